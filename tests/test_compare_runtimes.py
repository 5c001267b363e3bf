"""The tool that compares the three runtimes: on Python's real reports, and on reports that differ."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from conftest import Outcome

from lesonnx.errors import LesonnxError

TOOL = Path(__file__).resolve().parent.parent / "tools" / "compare_runtimes.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_runtimes", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_runtimes"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def alone(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python alone: building the others is their own tests' work."""
    monkeypatch.setattr(tool, "POM", tool.ROOT / "none" / "pom.xml")
    monkeypatch.setattr(tool, "SWIFT_PACKAGE", tool.ROOT / "none")


def test_what_is_read_is_what_run_prints(
    tool: ModuleType, lesonnx: Callable[..., Outcome], sample_bundle: Path
) -> None:
    """The contract of the three command lines is the JSON of `lesonnx run`."""
    outcome = lesonnx("run", sample_bundle, "--prompt", "In", "--max-tokens", 3, "--json")
    report = tool.read_report("Python", outcome.out)
    assert set(tool.KEYS) <= set(report)
    row = tool.summarize("les", "Python", [report, report])
    assert row.tokens == report["tokens"]
    assert 0 <= row.hits <= row.required
    assert row.required == report["hits"] + report["late"] + report["misses"] > 0


@pytest.mark.usefixtures("alone")
def test_python_against_itself(tool: ModuleType, sample_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(sample_bundle), "--schedules", "on-demand,les", "--max-new-tokens", "6", "--repeat", "2"]
    assert tool.main(arguments) == 0
    captured = capsys.readouterr()
    assert "note: without Kotlin: none/pom.xml is not there" in captured.err
    assert "note: without Swift: " in captured.err
    rows = [line.split(" | ") for line in captured.out.splitlines() if line.startswith("| ")][1:]
    assert [row[:3] for row in rows] == [["| on-demand", "Python", "6, equal"], ["| les", "Python", "6, equal"]]
    assert [row[4] for row in rows] == ["1.00", "1.00"]
    assert rows[0][5] == "0%"
    assert rows[1][5] != "0%"


def test_other_tokens_are_shown(tool: ModuleType) -> None:
    def row(schedule: str, runtime: str, tokens: list[int], speed: float) -> object:
        return tool.Row(schedule, runtime, tokens, speed, 3, 4, 1_000_000, "kernel")

    text, num_different = tool.table(
        [
            row("les", "Python", [1, 2, 3], 10.0),
            row("les", "Kotlin", [1, 2, 3], 12.0),
            row("cache", "Python", [1, 2, 3], 5.0),
            row("cache", "Swift", [1, 9, 3], 5.5),
            row("cache", "Kotlin", [1, 2], 5.0),
        ]
    )
    assert num_different == 2
    assert text.splitlines()[3:] == [
        "| les | Kotlin | 3, equal | 12.0 | 1.20 | 75% | 1 MB |",
        "| cache | Python | 3, equal | 5.0 | 1.00 | 75% | 1 MB |",
        "| cache | Swift | **differ from token 1 on** | 5.5 | 1.10 | 75% | 1 MB |",
        "| cache | Kotlin | **differ from token 2 on** | 5.0 | 1.00 | 75% | 1 MB |",
    ]


def test_runs_that_disagree_with_themselves(tool: ModuleType) -> None:
    report = {
        "tokens": [1],
        "tokens_per_s": 1,
        "hits": 0,
        "late": 0,
        "misses": 1,
        "peak_memory_bytes": 1,
        "engine": "k",
    }
    with pytest.raises(LesonnxError, match="Swift: gave other tokens when it ran again under schedule les"):
        tool.summarize("les", "Swift", [report, report | {"tokens": [2]}])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("", "Kotlin: printed '', expected a JSON object"),
        ("hello", "Kotlin: printed 'hello', expected a JSON object"),
        ("[]", "Kotlin: the report has no 'tokens'"),
        (json.dumps({"tokens": []}), "Kotlin: the report has no 'tokens_per_s'"),
    ],
)
def test_reports_that_are_none(tool: ModuleType, output: str, message: str) -> None:
    with pytest.raises(LesonnxError) as caught:
        tool.read_report("Kotlin", output)
    assert str(caught.value) == message


@pytest.mark.usefixtures("alone")
def test_a_program_that_fails_is_named(
    tool: ModuleType, sample_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([str(sample_bundle), "--schedules", "les", "--expert-budget", "1"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: Python: ")
    assert "exit code 2: error: the expert budget is 1 bytes" in error


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "none: no such bundle directory"),
        (["{bundle}", "--schedules", "les,fast"], "--schedules: 'fast' is not one of on-demand, cache, les, resident"),
        (["{bundle}", "--expert-budget", "much"], "'much' is not a size"),
    ],
)
def test_bad_arguments(
    tool: ModuleType,
    sample_bundle: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert tool.main([word.format(bundle=sample_bundle) for word in arguments]) in (1, 2)
    assert message in capsys.readouterr().err
