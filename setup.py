"""Builds the expert kernel, one C library that Python loads and ONNX Runtime registers.

Everything else about the package is in pyproject.toml. The library is plain C (no Python API), so one wheel serves
every Python 3 of its platform. Without a C compiler the package installs all the same and uses the `session` engine.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel  # type: ignore[import-not-found, no-redef]

NATIVE = Path("lesonnx") / "native"
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
# Fused multiply-adds are written out: a compiler that made its own would change bits between builds.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-shared"]


def compiler() -> list[str] | None:
    """The command of CC, or the first of cc, gcc and clang that is there."""
    wanted = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    commands = [shlex.split(command) for command in wanted]
    return next((command for command in commands if shutil.which(command[0])), None)


class BuildKernel(build_ext):
    """Compiles with the plain compiler command instead of Python's own flags; a failure is not an error."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + SUFFIX

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        command = compiler()
        if command is None:
            self.skip(target, "no C compiler found (set CC)")
            return
        partial = target.with_name(target.name + ".partial")
        libraries = [] if sys.platform == "win32" else ["-lm"]
        command += [*FLAGS, *ext.sources, "-o", str(partial), *libraries]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            partial.replace(target)
        else:
            reason = next((line for line in result.stderr.splitlines() if "error" in line), f"{command[0]} failed")
            self.skip(target, reason.strip())

    def skip(self, target: Path, reason: str) -> None:
        """Says why in one line; a library of an earlier build would not match these sources, so it goes."""
        target.unlink(missing_ok=True)
        print(f"lesonnx: expert kernel not built: {reason}; `--engine auto` will use session", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """Tags the wheel for any Python 3 on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            "lesonnx.native.liblesonnx",
            sources=sorted(path.as_posix() for path in NATIVE.glob("*.c")),
            depends=sorted(path.as_posix() for path in NATIVE.rglob("*.h")),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": PlatformWheel},
)
