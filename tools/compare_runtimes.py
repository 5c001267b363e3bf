"""Runs one bundle in Python, Kotlin and Swift, schedule by schedule, and prints what they gave as a Markdown table.

    python tools/compare_runtimes.py build/mobile/bundles/sample-int4
    python tools/compare_runtimes.py qwen3-30b --expert-budget 2000MiB --max-new-tokens 64 --repeat 3 \\
        --python "env PYTHONPATH=build/mobile/onnxruntime/1.29.0 .venv/bin/lesonnx"

Each runtime has a command line with the same flags and the same JSON.
Runtimes that are not there are named and left out. They take turns, so that a busy machine is busy for all; of several
runs the median of tokens/s and the largest memory count. Exit code 1 where tokens differ from Python's.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lesonnx.bundle import Bundle
from lesonnx.errors import LesonnxError
from lesonnx.memory import format_bytes, parse_bytes

ROOT = Path(__file__).resolve().parent.parent
SCHEDULES = ("on-demand", "cache", "les", "resident")
PROMPT = "In the beginning God created"
POM = ROOT / "android" / "lesonnx" / "pom.xml"
KOTLIN_MAIN = "dev.lesonnx.jvm.MainKt"
KERNEL = ROOT / "lesonnx" / "native" / "liblesonnx.so"
SWIFT = ROOT / "tools" / "swift-linux.sh"
SWIFT_PACKAGE = ROOT / "ios" / "Lesonnx"
SWIFT_PRODUCT = "lesonnx-swift"
# What is read of a report; see `lesonnx run --json`.
KEYS = ("tokens", "tokens_per_s", "hits", "late", "misses", "peak_memory_bytes", "engine")


@dataclass(frozen=True)
class Runtime:
    """One language's command line: ``command run BUNDLE …``."""

    name: str
    command: Sequence[str]
    tokens_flag: str = "--max-new-tokens"
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, bundle: Path, arguments: Sequence[str], max_new_tokens: int) -> dict[str, Any]:
        """The report of one run; LesonnxError where the program fails or gives another one."""
        words = [*self.command, "run", str(bundle), *arguments, self.tokens_flag, str(max_new_tokens), "--json"]
        result = subprocess.run(words, env=os.environ | self.environment, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            lines = result.stderr.strip().splitlines() or ["it says nothing"]
            raise LesonnxError(f"{self.name}: {shlex.join(words)}: exit code {result.returncode}: {lines[-1]}")
        return read_report(self.name, result.stdout)


def read_report(name: str, output: str) -> dict[str, Any]:
    """The JSON object in the last line of a program's output; LesonnxError where it lacks what is compared."""
    lines = output.strip().splitlines() or [""]
    try:
        report: Any = json.loads(lines[-1])
    except ValueError:
        raise LesonnxError(f"{name}: printed {lines[-1][:80]!r}, expected a JSON object") from None
    missing = [key for key in KEYS if not isinstance(report, dict) or key not in report]
    if missing:
        raise LesonnxError(f"{name}: the report has no {missing[0]!r}")
    found: dict[str, Any] = report
    return found


# -- finding the runtimes ----------------------------------------------------------------------------------------------


def find_python(command: str | None) -> Runtime:
    words = shlex.split(command) if command else [str(Path(sys.executable).with_name("lesonnx"))]
    return Runtime("Python", words, "--max-tokens")


def find_kotlin(command: str | None) -> Runtime | str:
    """The Kotlin command line, compiled if it is not; why there is none, else."""
    environment = {"LESONNX_LIBRARY": os.environ.get("LESONNX_LIBRARY", str(KERNEL))}
    if command:
        return Runtime("Kotlin", shlex.split(command), environment=environment)
    if not POM.exists():
        return f"{POM.relative_to(ROOT)} is not there"
    if not (shutil.which("mvn") and shutil.which("java")):
        return "no mvn and java"
    classpath = ROOT / "build" / "kotlin-classpath"
    classpath.parent.mkdir(exist_ok=True)
    goals = ["compile", "dependency:build-classpath", "-Dmdep.includeScope=runtime", f"-Dmdep.outputFile={classpath}"]
    built = subprocess.run(["mvn", "-q", "-f", str(POM), *goals], capture_output=True, text=True, check=False)
    if built.returncode != 0:
        return f"mvn fails: {(built.stdout.strip().splitlines() or ['it says nothing'])[-1]}"
    jars = f"{POM.parent / 'target' / 'classes'}{os.pathsep}{classpath.read_text(encoding='utf-8').strip()}"
    words = ["java", "-XX:MaxDirectMemorySize=64g", "-cp", jars, KOTLIN_MAIN]
    return Runtime("Kotlin", words, environment=environment)


def find_swift(command: str | None, bundle: Path) -> Runtime | str:
    """The Swift command line, built if it is not; why there is none, else."""
    mounts = os.pathsep.join(filter(None, [os.environ.get("LESONNX_MOUNT"), str(bundle.parent)]))
    environment = {"LESONNX_MOUNT": mounts}
    if command:
        return Runtime("Swift", shlex.split(command), environment=environment)
    if not (SWIFT.exists() and SWIFT_PACKAGE.exists()):
        return f"{SWIFT.relative_to(ROOT)} or {SWIFT_PACKAGE.relative_to(ROOT)} is not there"
    build = [str(SWIFT), "build", "-c", "release", "--product", SWIFT_PRODUCT]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        return f"swift build fails: {((built.stdout + built.stderr).strip().splitlines() or ['it says nothing'])[-1]}"
    program = SWIFT_PACKAGE / ".build" / "release" / SWIFT_PRODUCT
    return Runtime("Swift", [str(SWIFT), "exec", str(program)], environment=environment)


# -- comparing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One runtime under one schedule, of one or several runs that gave the same tokens."""

    schedule: str
    runtime: str
    tokens: list[int]
    tokens_per_s: float
    hits: int
    required: int
    peak_memory_bytes: int
    engine: str


def summarize(schedule: str, runtime: str, reports: Sequence[dict[str, Any]]) -> Row:
    """One row of several runs; LesonnxError where they gave different tokens."""
    first = reports[0]
    if any(report["tokens"] != first["tokens"] for report in reports):
        raise LesonnxError(f"{runtime}: gave other tokens when it ran again under schedule {schedule}")
    last = reports[-1]
    return Row(
        schedule,
        runtime,
        first["tokens"],
        statistics.median(report["tokens_per_s"] for report in reports),
        last["hits"],
        last["hits"] + last["late"] + last["misses"],
        max(report["peak_memory_bytes"] for report in reports),
        first["engine"],
    )


def first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """The place of the first token that differs; None where all are equal."""
    if list(found) == list(expected):
        return None
    equal = (a == b for a, b in zip(found, expected, strict=False))
    return next((place for place, same in enumerate(equal) if not same), min(len(found), len(expected)))


def table(rows: Sequence[Row]) -> tuple[str, int]:
    """The Markdown table, and how many rows have other tokens than the first one, which is Python's."""
    expected = rows[0].tokens
    lines = [
        "| schedule | runtime | tokens | tokens/s | of Python's | hits | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    num_different = 0
    python_speed: dict[str, float] = {}
    for row in rows:
        python_speed.setdefault(row.schedule, row.tokens_per_s)
        place = first_difference(row.tokens, expected)
        num_different += place is not None
        told = f"{len(row.tokens)}, equal" if place is None else f"**differ from token {place} on**"
        base = python_speed[row.schedule]
        share = f"{row.tokens_per_s / base:.2f}" if base else ""
        hits = f"{row.hits / row.required:.0%}" if row.required else ""
        memory = format_bytes(row.peak_memory_bytes)
        lines.append(
            f"| {row.schedule} | {row.runtime} | {told} | {row.tokens_per_s:.1f} | {share} | {hits} | {memory} |"
        )
    return "\n".join(lines), num_different


def compare(
    runtimes: Sequence[Runtime],
    bundle: Path,
    schedules: Sequence[str],
    arguments: Callable[[str], list[str]],
    max_new_tokens: int,
    repeat: int,
) -> list[Row]:
    """Run all, in turns; rows by schedule, and in it by runtime."""
    rows = []
    for schedule in schedules:
        reports: dict[str, list[dict[str, Any]]] = {runtime.name: [] for runtime in runtimes}
        for _ in range(repeat):
            for runtime in runtimes:
                reports[runtime.name].append(runtime.run(bundle, arguments(schedule), max_new_tokens))
        rows += [summarize(schedule, name, found) for name, found in reports.items()]
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="parted by commas")
    parser.add_argument("--engine", default="kernel", choices=["kernel", "session"])
    parser.add_argument("--expert-budget", help="of all schedules but resident; default: a quarter of the experts")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=1)
    for name in ("python", "kotlin", "swift"):
        parser.add_argument(f"--{name}", help="the command, instead of the one of this checkout")
    chosen = parser.parse_args(arguments)
    try:
        opened = Bundle(chosen.bundle.absolute())
        quarter = max(opened.expert_bytes // 4, opened.least_budget_bytes)
        budget = parse_bytes(chosen.expert_budget) if chosen.expert_budget else quarter
        schedules = chosen.schedules.split(",")
        if unknown := [schedule for schedule in schedules if schedule not in SCHEDULES]:
            raise LesonnxError(f"--schedules: {unknown[0]!r} is not one of {', '.join(SCHEDULES)}")
        runtimes = [find_python(chosen.python)]
        others = {"Kotlin": find_kotlin(chosen.kotlin), "Swift": find_swift(chosen.swift, opened.directory)}
        for name, found in others.items():
            if isinstance(found, str):
                print(f"note: without {name}: {found}", file=sys.stderr)
            else:
                runtimes.append(found)

        def flags(schedule: str) -> list[str]:
            num_bytes = opened.expert_bytes if schedule == "resident" else budget
            words = ["--prompt", chosen.prompt, "--schedule", schedule, "--engine", chosen.engine]
            return [*words, "--expert-budget", str(num_bytes)]

        rows = compare(runtimes, opened.directory, schedules, flags, chosen.max_new_tokens, max(chosen.repeat, 1))
    except LesonnxError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    text, num_different = table(rows)
    print(text)
    share = f"{format_bytes(budget)} of {format_bytes(opened.expert_bytes)} of experts (resident: all)"
    runs = f"{max(chosen.repeat, 1)} run(s) each, in turns"
    print(f"\n{opened.directory.name}, engine {chosen.engine}, {share}, {chosen.max_new_tokens} tokens, {runs}.")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
