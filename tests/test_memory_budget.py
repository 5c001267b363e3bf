"""The process stays within ``--memory-budget`` as the system reports it, while attention caches grow to 16k tokens."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import lesonnx
from lesonnx.bundle import Bundle
from lesonnx.errors import BudgetError
from lesonnx_export.blocks import Operators
from lesonnx_export.exporter import ExportOptions
from lesonnx_export.synth import write_synthetic

CONTEXT_TOKENS = 16384
# Two layers with 100 MB of experts and 134 MB of attention caches at 16k tokens.
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 512,
}
# Three recurrent layers with 15 MB of states, and 128 MB that a prefill chunk takes inside one of them.
RECURRENT_SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
}
# Prints the expert budget at the start and at the end, the memory budget, and the most that the process had.
SCRIPT = """
import json, sys
import lesonnx
from lesonnx.memory import current_bytes, peak_bytes
import lesonnx.model
budget, tokens = current_bytes() + int(sys.argv[2]), int(sys.argv[3])
with lesonnx.load(sys.argv[1], memory_budget_bytes=budget) as model:
    first = model.runner.loader.expert_budget_bytes
    model.runner.prefill([i % 500 for i in range(tokens)])
    model.runner.step([7], [0])
    last = model.runner.loader.expert_budget_bytes
print(json.dumps({"first": first, "last": last, "budget": budget, "peak": peak_bytes()}))
"""


@pytest.fixture(scope="module")
def long_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "bundle"
    options = ExportOptions(bits=32, dense_bits=4, num_workers=1)
    write_synthetic("qwen3-30b-a3b", path, options, SHAPE, Console(quiet=True))
    return path


def run(bundle: Path, extra_bytes: int, tokens: int) -> dict[str, int]:
    command = [sys.executable, "-c", SCRIPT, str(bundle), str(extra_bytes), str(tokens)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    answer: dict[str, int] = json.loads(result.stdout)
    return answer


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_long_context_takes_from_the_experts(long_bundle: Path) -> None:
    """At 16k tokens the caches alone are larger than what the experts may keep, and the peak is within the budget."""
    got = run(long_bundle, 225_000_000, CONTEXT_TOKENS - 1)
    caches = 2 * 2 * 8 * CONTEXT_TOKENS * 64 * 4
    assert got["peak"] <= got["budget"]
    assert got["first"] - got["last"] > 0.6 * caches
    assert got["last"] >= Bundle(long_bundle).least_budget_bytes


@pytest.mark.parametrize("operators", ["native", "portable"])
@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_recurrent_layers_stay_within_the_budget(quick_path: Path, operators: Operators) -> None:
    bundle = quick_path / "bundle"
    options = ExportOptions(bits=32, dense_bits=4, num_workers=1, operators=operators)
    write_synthetic("qwen3.5-35b-a3b", bundle, options, RECURRENT_SHAPE, Console(quiet=True))
    got = run(bundle, 320_000_000, 1200)
    assert got["peak"] <= got["budget"]
    assert Bundle(bundle).least_budget_bytes < got["last"] < Bundle(bundle).expert_bytes


def test_a_budget_without_room_for_the_caches_ends_before_the_step(long_bundle: Path) -> None:
    # In a process of its own: what other tests leave to be freed meanwhile would count as room.
    script = """
import sys
import lesonnx
from lesonnx.errors import BudgetError
from lesonnx.memory import current_bytes
import lesonnx.model
with lesonnx.load(sys.argv[1], memory_budget_bytes=current_bytes() + 140_000_000) as model:
    try:
        model.runner.prefill([1] * 8000)
    except BudgetError as error:
        print(error)
    assert 0 < model.runner.num_tokens < 8000
    model.runner.rewind(100)
    assert model.runner.step([1], [0]).shape == (1, 512)
"""
    command = [sys.executable, "-c", script, str(long_bundle)]
    assert "attention caches" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_resident_needs_room_for_all(long_bundle: Path) -> None:
    with pytest.raises(BudgetError, match=r"at least [\d,]+ bytes are needed \(.*, experts [\d,]+\)$"):
        lesonnx.load(long_bundle, schedule="resident", memory_budget_bytes=_resident_now() + 150_000_000)


def test_the_least_budget_that_a_refusal_states_is_enough(long_bundle: Path) -> None:
    def run(budget: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lesonnx", "run", str(long_bundle), "--prompt-ids", "1,2,3"]
        command += ["--max-tokens", "4", "--memory-budget", str(budget)]
        return subprocess.run(command, capture_output=True, text=True)

    refused = run(1_000_000)
    stated = re.search(r"; at least ([\d,]+) bytes are needed ", refused.stderr)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert stated is not None
    least = int(stated[1].replace(",", ""))
    assert least % 10**6 == 0
    assert run(least).returncode == 0
    assert run(least - 10_000_000).returncode == 2


def _resident_now() -> int:
    from lesonnx.memory import current_bytes

    return current_bytes()
