"""In a control group whose limit is ``--memory-budget``, a run ends as it does without one; a larger one is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_group import MemoryGroup, NoGroupError, memory_group
from rich.console import Console

from lesonnx import memory
from lesonnx_export.exporter import ExportOptions
from lesonnx_export.synth import write_synthetic

LIMIT_BYTES = 256_000_000
# Two layers with 400 MB of experts, of which one row needs 12.6 MB.
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
}
PROMPT = ",".join(str(7 * token % 500) for token in range(900))
# Joins the group, then becomes the command.
JOIN = "import os, sys; open(sys.argv[1], 'w').write('0'); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"


@pytest.fixture(scope="module")
def large_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "bundle"
    options = ExportOptions(bits=32, dense_bits=4, num_workers=1, prefill_chunk_tokens=128)
    write_synthetic("qwen3-30b-a3b", path, options, SHAPE, Console(quiet=True))
    return path


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        with memory_group(LIMIT_BYTES) as made:
            yield made
    except NoGroupError as error:
        pytest.skip(f"no control group: {error}")


def run(bundle: Path, *options: str, group: MemoryGroup | None = None) -> subprocess.CompletedProcess[str]:
    command = ["-m", "lesonnx", "run", str(bundle), "--prompt-ids", PROMPT, "--max-tokens", "8", "--json", *options]
    start = [sys.executable, *command] if group is None else [sys.executable, "-c", JOIN, str(group.joining), *command]
    return subprocess.run(start, capture_output=True, text=True, check=False)


def test_a_budget_is_enough_for_its_group(large_bundle: Path, group: MemoryGroup) -> None:
    free = run(large_bundle)
    assert free.returncode == 0, free.stderr
    bounded = run(large_bundle, "--memory-budget", str(LIMIT_BYTES), group=group)
    assert bounded.returncode == 0, bounded.stderr
    assert group.killed() == 0
    one, other = json.loads(free.stdout), json.loads(bounded.stdout)
    assert other["tokens"] == one["tokens"]
    assert other["peak_memory_bytes"] <= LIMIT_BYTES < one["peak_memory_bytes"]
    # It had to read experts again: they did not all fit.
    assert other["read_bytes"] > other["expert_bytes"]


def test_without_a_budget_the_group_kills(large_bundle: Path, group: MemoryGroup) -> None:
    """The limit is real: the same run with all experts in memory does not survive it."""
    assert run(large_bundle, "--schedule", "resident", group=group).returncode == -signal.SIGKILL
    assert group.killed() > 0


def test_auto_sees_its_group(group: MemoryGroup) -> None:
    script = (
        f"open({str(group.joining)!r}, 'w').write('0'); from lesonnx import memory; print(memory.auto_budget_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < LIMIT_BYTES


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_room_of_all_groups_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Own group without a limit, its parent with one, the outermost with a larger one."""
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    root = tmp_path / ("memory" if version == 1 else "")
    groups: dict[str, tuple[Any, int]] = {"": (9000, 500), "a": (3000, 1000), "a/b": ("max", 400)}
    for name, values in groups.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for file, value in zip(names, values, strict=True):
            (root / name / file).write_text(f"{value}\n")
    own = tmp_path / "own"
    own.write_text("9:pids:/c\n" + ("4:memory:/a/b\n" if version == 1 else "0::/a/b\n"))
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", own)
    assert list(memory._group_rooms()) == [2000, 8500]
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "none")
    assert list(memory._group_rooms()) == []
