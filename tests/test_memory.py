"""Sizes as people write them, the system's word on memory, and a budget for the whole process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lesonnx import memory
from lesonnx.errors import InputError
from lesonnx.memory import current_bytes, format_bytes, parse_bytes, peak_bytes

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("3GB", 3_000_000_000),
        ("3 gb", 3_000_000_000),
        ("2GiB", 1 << 31),
        ("500MiB", 500 << 20),
        ("1.5M", 1_500_000),
        ("0.5KiB", 512),
        ("1T", 10**12),
        (" 7k ", 7000),
    ],
)
def test_parse(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "3 XB", "1,000", "1..5", "nan", "inf", "0x10", "3GB3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(0, "0 B"), (999, "999 B"), (1670, "1.67 kB"), (3_000_000, "3 MB"), (1.5e9, "1.5 GB"), (2e12, "2 TB")],
)
def test_format(num_bytes: float, expected: str) -> None:
    assert format_bytes(num_bytes) == expected


@LINUX
def test_the_peak_remembers_what_the_present_forgot() -> None:
    before = current_bytes()
    block = np.ones(64 << 20, np.uint8)
    during = current_bytes()
    del block
    assert during - before > 32 << 20
    assert peak_bytes() >= during - (1 << 20)  # the kernel counts in batches a thread


def test_without_proc_the_peak_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_status", lambda key: None)
    assert current_bytes() == peak_bytes() > 1 << 20


@LINUX
def test_a_memory_budget_holds(sample_bundle: Path) -> None:
    budget = 200_000_000
    command = ["run", str(sample_bundle), "--prompt-ids", ",".join(["7"] * 700), "--max-tokens", "8", "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "lesonnx", *command, "--memory-budget", str(budget)],
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(result.stdout)
    assert report["peak_memory_bytes"] <= budget
    assert report["expert_budget_bytes"] <= budget
