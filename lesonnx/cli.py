"""The one command, ``lesonnx``: a table of subcommands, each imported when it is called.

Errors become one line here and nowhere else.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

import click

from lesonnx import __version__
from lesonnx.errors import InputError, LesonnxError

# Subcommand -> where its click command lies. The exporter's are loaded only when they are called.
COMMANDS = {
    "export": "lesonnx_export.cli:export",
    "run": "lesonnx.commands.run:run",
    "chat": "lesonnx.commands.chat:chat",
    "inspect": "lesonnx.commands.inspect:inspect",
    "glue": "lesonnx_export.glue.cli:glue",
    "verify": "lesonnx_export.verify:verify",
    "eval": "lesonnx_export.evaluate.command:evaluate",
    "tasks": "lesonnx_export.evaluate.build_command:tasks",
    "demo": "lesonnx.commands.demo:demo",
    "doctor": "lesonnx.doctor:doctor",
    "bench": "lesonnx.bench.cli:bench",
}
# Packages that an extra brings -> the extra.
EXTRAS = {
    "onnx": "export",
    "safetensors": "export",
    "ml_dtypes": "export",
    "threadpoolctl": "export",
    "matplotlib": "plot",
    "optimum": "optimum",
    "distributed": "dask",
}


def missing_extra(error: ModuleNotFoundError) -> InputError | None:
    """The error to show for a package that an extra brings; None for any other."""
    extra = EXTRAS.get((error.name or "").split(".")[0])
    if extra is None:
        return None
    return InputError(f"this needs the package {error.name}: pip install '.[{extra}]' in a clone of lesonnx")


class LazyGroup(click.Group):
    """A group whose commands are imported when first needed."""

    def __init__(self, *args: object, commands_at: Mapping[str, str], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._commands_at = commands_at

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._commands_at:
            return None
        module, _, attribute = self._commands_at[cmd_name].partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            problem = missing_extra(error)
            if problem is None:
                raise
            raise problem from None
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # One command that needs a missing extra must not hide the others from --help.
        rows = []
        for name in self.list_commands(ctx):
            try:
                command = self.get_command(ctx, name)
                rows.append((name, command.get_short_help_str(80) if command else ""))
            except InputError as error:
                rows.append((name, str(error)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=LazyGroup, commands_at=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lesonnx")
def cli() -> None:
    """Run Mixture-of-Experts language models several times larger than memory on ONNX Runtime."""


def fail(error: LesonnxError) -> NoReturn:
    """End with an error's one line and its exit code."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(error.exit_code)


def main() -> None:
    """The entry point: one line and an exit code for every error, none for Ctrl-C but what was begun."""
    # A closed pipe (`lesonnx run … | head`) ends the program quietly, as other tools do.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        cli.main(standalone_mode=False)
    except LesonnxError as error:
        fail(error)
    except ModuleNotFoundError as error:
        problem = missing_extra(error)
        if problem is None:
            raise
        fail(problem)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see `{context.command_path} --help`)" if context is not None else ""
        print(f"error: {' '.join(error.format_message().split()).removesuffix('.')}{hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except OSError as error:
        # What a command did not expect of the system: a disk that breaks, a file that goes away under its hands.
        name = f"{error.filename}: " if error.filename else ""
        print(f"error: {name}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
