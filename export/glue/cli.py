"""``lesonnx glue``: the command."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from lesonnx.bundle import Bundle
from lesonnx.errors import InputError
from lesonnx.manifest import Target
from lesonnx_export.glue.outputters import OUTPUTTERS
from lesonnx_export.glue.render import GlueOptions, check, render, write
from lesonnx_export.glue.spec import read_spec


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--target", type=click.Choice(list(OUTPUTTERS)), required=True, help="Kotlin for android, Swift for ios.")
@click.option("--package", help="Kotlin package of the file.  [default: dev.lesonnx.generated]")
@click.option("--title", help="What people call the model.  [default: from the manifest]")
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit code 1 where a file differs.")
def glue(bundle: Path, out: Path, target: str, package: str | None, title: str | None, only_check: bool) -> None:
    """Write what an app can know of BUNDLE beforehand as source code into the directory OUT."""
    if package is not None and target != "android":
        raise InputError("--package is for --target android; Swift has no packages in its files")
    chosen: Target = next(each for each in get_args(Target) if each == target)
    options = GlueOptions(package) if package is not None else GlueOptions()
    rendered = render(read_spec(Bundle(bundle), chosen, title), options)
    paths = check(rendered, out) if only_check else write(rendered, out)
    for path in paths:
        print(f"{path}: {'as the bundle gives it' if only_check else 'written'}")
