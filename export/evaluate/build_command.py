"""``lesonnx tasks``: task files made of texts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import click
from rich.console import Console

from lesonnx.bundle import Bundle
from lesonnx.errors import InputError
from lesonnx.files import write_whole
from lesonnx.tokenizer import Tokenizer
from lesonnx_export.evaluate.builder import TaskOptions, build_task
from lesonnx_export.evaluate.overlap import Calibration, read_text

PATH = click.Path(path_type=Path)
DEFAULTS = TaskOptions()


@click.command()
@click.argument("texts", type=PATH, nargs=-1, required=True, metavar="TEXT...")
@click.argument("out", type=PATH)
@click.option(
    "--tokenizer", type=PATH, metavar="BUNDLE", help="Only words that are one token of this bundle: quicker by far."
)
@click.option("--items", type=click.IntRange(1), default=DEFAULTS.items, show_default=True, help="Items of a task.")
@click.option(
    "--items-per-passage",
    type=click.IntRange(1),
    default=DEFAULTS.items_per_passage,
    show_default=True,
    help="Most items of a passage.",
)
@click.option(
    "--passage-chars",
    type=click.IntRange(400),
    default=DEFAULTS.passage_chars,
    show_default=True,
    help="Characters of a passage, at most.",
)
@click.option(
    "--choices", type=click.IntRange(2, 16), default=DEFAULTS.choices, show_default=True, help="Choices of an item."
)
@click.option("--seed", type=int, default=DEFAULTS.seed, show_default=True, help="Equal seeds give equal tasks.")
@click.option(
    "--calibration",
    type=PATH,
    multiple=True,
    help="Leave out passages that are in this text too, beside Python's help topics.",
)
def tasks(
    texts: tuple[Path, ...],
    out: Path,
    tokenizer: Path | None,
    items: int,
    items_per_passage: int,
    passage_chars: int,
    choices: int,
    seed: int,
    calibration: tuple[Path, ...],
) -> None:
    """Make next-word tasks for `lesonnx eval` of texts, one JSON-lines file each, in the directory OUT."""
    targets = [out / f"{path.stem}.jsonl" for path in texts]
    for path, target in zip(texts, targets, strict=True):
        if targets.count(target) > 1:
            raise InputError(
                f"{path}: another text has the same name, {path.stem!r}, and each makes a file of its name"
            )
        if target.exists():
            raise InputError(f"{target}: already exists; remove it or choose another directory")
    options = TaskOptions(items, items_per_passage, choices, passage_chars, seed)
    known = Calibration.known(calibration)
    words = _tokenizer(tokenizer) if tokenizer else None
    contents = [read_text(path) for path in texts]
    console = Console()
    # All are made before the first is written: a text that is too short leaves nothing behind.
    with console.status("looking for words") if console.is_terminal else nullcontext():
        built = [
            build_task(path.name, content, options, known, words) for path, content in zip(texts, contents, strict=True)
        ]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{out}: not a directory") from None
    for target, task in zip(targets, built, strict=True):
        lines = [passage.model_dump_json(exclude_none=True) + "\n" for passage in task.passages]
        write_whole(target, "".join(lines), "task file")
        left_out = f"; {task.overlapping} left out, they are in the calibration text" if task.overlapping else ""
        count = sum(len(passage.items) for passage in task.passages)
        console.print(
            f"{target}: {count:,} items in {len(task.passages):,} passages{left_out}", highlight=False, soft_wrap=True
        )


def _tokenizer(path: Path) -> Tokenizer:
    bundle = Bundle(path)
    files = bundle.manifest.tokenizer
    if files is None or files.json_path is None:
        raise InputError(f"{path}: has no tokenizer")
    return Tokenizer.from_file(bundle.file(files.json_path))
