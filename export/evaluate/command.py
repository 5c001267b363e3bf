"""``lesonnx eval``: texts and tasks through a bundle and its reference, figures with intervals."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lesonnx.bundle import Bundle
from lesonnx.commands.options import make_load_options, run_options
from lesonnx.errors import InputError
from lesonnx.memory import format_bytes
from lesonnx_export.evaluate.evaluation import Evaluator, TaskSums, open_evaluator
from lesonnx_export.evaluate.float_reference import OpenedReference, opened_reference
from lesonnx_export.evaluate.kept import KeptAnswers
from lesonnx_export.evaluate.overlap import Calibration, read_text
from lesonnx_export.evaluate.report import Metric, Report, document, make_report, task_table, text_table
from lesonnx_export.evaluate.tasks import Task, read_task
from lesonnx_export.evaluate.windows import WindowSums

PATH = click.Path(path_type=Path)


@click.command("eval")
@click.argument("bundle", type=PATH)
@click.option(
    "--reference", type=PATH, metavar="REF", help="A bundle, or a checkpoint: it is exported in float32 and run alike."
)
@click.option("--text", "texts", type=PATH, multiple=True, help="Perplexity and KL on this text; several times.")
@click.option("--tasks", type=PATH, multiple=True, help="Accuracy on this task file (JSON lines); several times.")
@click.option(
    "--metric",
    type=click.Choice(["acc", "acc_norm"]),
    default="acc",
    show_default=True,
    help="The likeliest choice, or the likeliest by its bytes.",
)
@click.option(
    "--tokens", type=click.IntRange(0), default=16_384, show_default=True, help="Most tokens of a text; 0 takes all."
)
@click.option("--passages", type=click.IntRange(1), help="Most passages of a task.  [default: all]")
@click.option(
    "--keep", type=PATH, metavar="DIR", help="Keep float reference and answers here, for evaluations to come."
)
@click.option(
    "--calibration",
    type=PATH,
    multiple=True,
    help="Say where tasks and texts overlap with this one too, beside Python's help topics.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@run_options
def evaluate(
    bundle: Path,
    reference: Path | None,
    texts: tuple[Path, ...],
    tasks: tuple[Path, ...],
    metric: Metric,
    tokens: int,
    passages: int | None,
    keep: Path | None,
    calibration: tuple[Path, ...],
    as_json: bool,
    **load_values: Any,
) -> None:
    """Perplexity, KL to a reference and accuracy on tasks of BUNDLE, with intervals."""
    if not texts and not tasks:
        raise InputError("nothing to evaluate on: give --text or --tasks (`lesonnx tasks` makes some of any text)")
    options = make_load_options(load_values)
    console = Console(stderr=True)
    # All that a user may have wrong is read before anything runs.
    contents = {name: read_text(path) for name, path in _named(texts, lambda path: path.name).items()}
    read_tasks = [read_task(path, passages) for path in _named(tasks, lambda path: path.stem).values()]
    opened = Bundle(bundle)
    kept = KeptAnswers(keep)
    kept.check()
    notes = list(_overlaps(contents, read_tasks, Calibration.known(calibration)))
    with ExitStack() as stack:
        source = stack.enter_context(opened_reference(reference, keep, console)) if reference else None
        evaluator = open_evaluator(opened, source.bundle if source else None, options, kept)
        stack.callback(evaluator.close)
        text_sums, task_sums = _run(evaluator, contents, read_tasks, tokens or None, console)
    skipped = [_skipped(name, sums) for name, sums in task_sums.items() if sums.skipped]
    report = make_report(text_sums, task_sums, metric, source is not None)
    if as_json:
        click.echo(json.dumps({**_facts(opened, source), **document(report), "notes": notes + skipped}))
    else:
        _print(opened, source, report, notes + skipped)


def _named(paths: Iterable[Path], name_of: Any) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for path in paths:
        name = name_of(path)
        if name in named:
            raise InputError(f"{named[name]} and {path} have the same name, {name!r}; figures are told apart by it")
        named[name] = path
    return named


def _overlaps(contents: dict[str, str], tasks: list[Task], calibration: Calibration) -> Iterable[str]:
    for name, content in contents.items():
        share = calibration.share(content)
        if share > 0:
            yield f"{name}: {share:.2%} of it is in the calibration text, on which a bundle looks better than it is"
    for task in tasks:
        count = sum(calibration.overlaps(passage.text) for passage in task.passages)
        if count:
            yield f"{task.name}: {count} of {len(task.passages)} passages overlap with the calibration text"


def _skipped(name: str, sums: TaskSums) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(sums.skipped.items()))
    return f"{name}: items left out: {reasons}"


def _run(
    evaluator: Evaluator, contents: dict[str, str], tasks: list[Task], tokens: int | None, console: Console
) -> tuple[dict[str, WindowSums], dict[str, TaskSums]]:
    """Run texts and tasks; without texts, the tasks' passages are the texts."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        windows = {name: evaluator.text_windows(content, tokens) for name, content in contents.items()}
        if not contents:
            windows = {task.name: evaluator.task_windows(task, tokens) for task in tasks}
        for name, found in windows.items():
            if not found:
                raise InputError(f"{name}: holds no tokens to compare on")
        steps = {name: bar.add_task(f"{name}: tokens", total=sum(map(len, found))) for name, found in windows.items()}
        models = 2 if evaluator.reference else 1
        asked = [bar.add_task(f"{task.name}: items", total=models * task.num_items) for task in tasks]
        text_sums = {
            name: evaluator.read(found, lambda count, step=steps[name]: bar.advance(step, count))  # type: ignore[misc]
            for name, found in windows.items()
        }
        task_sums = {
            task.name: evaluator.ask(task, lambda count, step=step: bar.advance(step, count))  # type: ignore[misc]
            for task, step in zip(tasks, asked, strict=True)
        }
    return text_sums, task_sums


def _facts(bundle: Bundle, reference: OpenedReference | None) -> dict[str, Any]:
    """What is compared; ``expert_bytes`` are the bundle's, the reference's are under its own key."""
    facts = None
    if reference is not None:
        facts = {
            "path": str(reference.path),
            "kind": reference.kind,
            "expert_bytes": reference.bundle.expert_bytes,
        }
    return {"bundle": str(bundle.directory), "expert_bytes": bundle.expert_bytes, "reference": facts}


def _print(bundle: Bundle, reference: OpenedReference | None, report: Report, notes: list[str]) -> None:
    console = Console()
    console.print(f"{bundle.directory}: {format_bytes(bundle.expert_bytes)} of experts", highlight=False)
    if reference is not None:
        what = "in float32" if reference.kind == "checkpoint" else f"{format_bytes(reference.bundle.expert_bytes)}"
        console.print(f"reference: {reference.path}, {what}", highlight=False)
    if report.texts:
        console.print(text_table(report))
    if report.tasks:
        console.print(task_table(report))
    for note in notes:
        console.print(f"note: {note}", highlight=False)
