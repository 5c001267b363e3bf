"""Kotlin's and Swift's real compilers, for tests of generated code. Without one a test is skipped; in CI it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KOTLIN_VERSION = "2.4.10"  # as android/lesonnx/pom.xml
SWIFT_TOOL = ROOT / "tools" / "swift-linux.sh"
SWIFT_ROOT = Path(os.environ.get("LESONNX_SWIFT_ROOT", "/var/lib/lesonnx-swift")) / "trixie"
_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>dev.lesonnx</groupId><artifactId>compiler</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>org.jetbrains.kotlin</groupId><artifactId>kotlin-compiler-embeddable</artifactId>
    <version>{KOTLIN_VERSION}</version>
  </dependency></dependencies>
</project>
"""


def run_kotlin(sources: Sequence[Path], main: str, work: Path) -> str:
    """What the main class prints; warnings are errors, and every public name must say so."""
    if not (shutil.which("java") and shutil.which("mvn")):
        _missing("Kotlin: no java and mvn")
    pom = work / "pom.xml"
    pom.write_text(_POM, encoding="utf-8")
    listed = work / "classpath"
    _run(["mvn", "-q", "-f", pom, "dependency:build-classpath", f"-Dmdep.outputFile={listed}"])
    jars = listed.read_text(encoding="utf-8").strip()
    stdlib = next(jar for jar in jars.split(os.pathsep) if Path(jar).name == f"kotlin-stdlib-{KOTLIN_VERSION}.jar")
    classes = work / "classes"
    compiler = [
        "java",
        "-Xmx1g",
        "-cp",
        jars,
        "org.jetbrains.kotlin.cli.jvm.K2JVMCompiler",
        "-no-stdlib",
        "-no-reflect",
    ]
    _run([*compiler, "-cp", stdlib, "-Werror", "-Xexplicit-api=strict", "-d", classes, *sources])
    return _run(["java", "-Xmx256m", "-cp", f"{classes}{os.pathsep}{stdlib}", main])


def run_swift(sources: Sequence[Path], work: Path) -> str:
    """What the program prints, one of whose sources is main.swift; warnings are errors."""
    program = work / "program"
    prefix: list[str | Path] = []
    if not shutil.which("swiftc"):
        if not SWIFT_TOOL.exists() or not (SWIFT_ROOT.exists() or os.environ.get("CI")):
            _missing("Swift: no swiftc, and tools/swift-linux.sh has not made one")
        prefix = [SWIFT_TOOL, "exec"]
    environment = os.environ | {"LESONNX_MOUNT": str(work)}
    strict = ["-swift-version", "6", "-warnings-as-errors"]
    _run([*prefix, "swiftc", *strict, "-o", program, *sources], environment)
    return _run([*prefix, program], environment)


def _run(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> str:
    result = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert result.returncode == 0, f"{command[0]}: {result.stdout[-3000:]}{result.stderr[-3000:]}"
    return result.stdout


def _missing(what: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)
