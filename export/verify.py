"""``lesonnx verify``: run a bundle where a reference is known, print how far it is from it, fail beyond a tolerance.

It wires references, the runner and the comparison together; none of their work is done here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lesonnx.bundle import Bundle
from lesonnx.commands.options import make_load_options, run_options
from lesonnx.errors import InputError, ToleranceError
from lesonnx.model import LoadOptions, Model, load
from lesonnx_export.cases import Case, case_names, measure_case, read_case
from lesonnx_export.compare import CaseComparison, Comparison, LogitsTally, judge, judge_case
from lesonnx_export.optimum_model import OptimumModel
from lesonnx_export.reference import (
    BundleModel,
    LanguageModel,
    Reference,
    computed,
    random_ids,
    read_recorded,
)

# How many tokens are compared where the user does not say.
RANDOM_TOKENS = 96
TEXT_TOKENS = 4096


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--reference",
    required=True,
    metavar="REF",
    type=click.Path(path_type=Path),
    help="A .npz file, another bundle, or a checkpoint (needs the optimum extra).",
)
@click.option("--tolerance", type=float, default=1e-3, show_default=True, help="Largest difference of any logit.")
@click.option("--max-kl", type=float, help="Judge the mean KL per token instead: for quantized bundles.")
@click.option("--text", type=click.Path(path_type=Path), help="Compare on this text.  [default: random tokens]")
@click.option("--tokens", type=click.IntRange(1), help="Most tokens to compare.  [default: 96, or 4096 of a text]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@run_options
def verify(
    bundle: Path,
    reference: Path,
    tolerance: float,
    max_kl: float | None,
    text: Path | None,
    tokens: int | None,
    as_json: bool,
    **load_values: Any,
) -> None:
    """Compare the logits and greedy tokens of BUNDLE with a reference; exit code 1 beyond the tolerance."""
    if not tolerance >= 0 or (max_kl is not None and not max_kl >= 0):
        raise InputError("a tolerance must be a number of at least 0")
    options = make_load_options(load_values)
    with ExitStack() as opened:
        model = BundleModel(load(bundle, options))
        opened.callback(model.close)
        source = open_reference(reference, model, options, text, tokens)
        opened.callback(source.close)
        recorded, left_out = open_cases(reference, model.model.bundle)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("comparing", total=sum(len(window) for window in source.windows))
            comparison = measure(source, model, lambda num_tokens: progress.advance(task, num_tokens))
        cases = [measure_case(case, model.model) for case in recorded]
    reasons = [judge(comparison, tolerance, max_kl), *(judge_case(case, tolerance, max_kl) for case in cases)]
    reason = next((reason for reason in reasons if reason is not None), None)
    if as_json:
        document = {"reference": source.name, **asdict(comparison), "tolerance": tolerance, "max_kl": max_kl}
        document |= {"cases": [{"name": case.name, **asdict(case)} for case in cases], "cases_left_out": left_out}
        click.echo(json.dumps({**document, "passed": reason is None}))
    else:
        Console().print(_table(source.name, comparison, tolerance, max_kl))
        if cases:
            Console().print(_cases_table(cases, tolerance, max_kl))
        if left_out:
            click.echo(f"note: {', '.join(left_out)} left out: this bundle has no eyes", err=True)
    if reason is not None:
        raise ToleranceError(f"{bundle}: {reason}")


def measure(
    reference: Reference, model: LanguageModel, progress: Callable[[int], None] = lambda num_tokens: None
) -> Comparison:
    """Run a model on the reference's windows and greedy prompt. ``progress`` is called with the tokens compared."""
    tally = LogitsTally()
    for place, window in enumerate(reference.windows):
        tally.add(reference.logits(place), model.logits(window))
        progress(len(window))
    expected = reference.greedy_ids()
    return tally.with_greedy(expected, model.greedy(reference.greedy_prompt, len(expected)))


def open_reference(
    path: Path, model: BundleModel, options: LoadOptions, text: Path | None, tokens: int | None
) -> Reference:
    """The reference that a path names: a file of arrays, a bundle, or a checkpoint. InputError for anything else."""
    if path.is_file():
        if text is not None or tokens is not None:
            raise InputError(f"{path}: brings its own tokens; --text and --tokens go with a bundle or a checkpoint")
        return read_recorded(path, model.vocab_size, model.max_tokens)
    if not path.is_dir():
        raise InputError(f"{path}: no such reference; expected a .npz file, a bundle or a checkpoint directory")
    is_bundle = (path / "manifest.json").exists()
    if not is_bundle and not (path / "config.json").exists():
        raise InputError(f"{path}: neither a bundle (manifest.json) nor a checkpoint (config.json)")
    ids = _token_ids(model, text, tokens)
    other: LanguageModel
    if is_bundle:
        other = BundleModel(load_reference_bundle(path, options))
    else:
        other = OptimumModel(path, ids[: min(RANDOM_TOKENS, model.max_tokens)])
    if other.vocab_size != model.vocab_size:
        other.close()
        raise InputError(f"{path}: has a vocabulary of {other.vocab_size}, the bundle's is {model.vocab_size}")
    return computed(other, ids, model.max_tokens)


def open_cases(path: Path, bundle: Bundle) -> tuple[list[Case], list[str]]:
    """The prompts with pictures of a file, and the names of those left out since the bundle takes no pictures."""
    names = case_names(path) if path.is_file() else []
    vision = bundle.manifest.vision
    if vision is None:
        return [], names
    return [read_case(path, name, bundle.manifest, vision) for name in names], []


def load_reference_bundle(path: Path, options: LoadOptions) -> Model:
    """Another bundle, run like the first, but never by twins: what those round is the first one's to answer for.

    Its experts may be larger, so a budget is raised to the least it needs.
    """
    bundle = Bundle(path)
    budget = options.expert_budget_bytes
    if budget is not None:
        least = bundle.expert_bytes if options.schedule == "resident" else bundle.least_budget_bytes
        budget = max(budget, least)
    return load(bundle, replace(options, expert_budget_bytes=budget, memory_budget_bytes=None, accelerate="off"))


def _token_ids(model: BundleModel, text: Path | None, tokens: int | None) -> list[int]:
    if text is None:
        return random_ids(tokens or RANDOM_TOKENS, model.vocab_size)
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{text}: not readable as UTF-8 text: {error}") from None
    ids = model.encode(content)[: tokens or TEXT_TOKENS]
    if not ids:
        raise InputError(f"{text}: holds no tokens to compare on")
    return ids


def _table(name: str, comparison: Comparison, tolerance: float, max_kl: float | None) -> Table:
    table = Table(show_header=True, title=f"{comparison.tokens} tokens against {name}", title_justify="left")
    table.add_column("figure")
    table.add_column("found", justify="right")
    table.add_column("allowed", justify="right")
    judged = max_kl is None
    table.add_row("largest difference of a logit", f"{comparison.max_abs_diff:.3g}", f"{tolerance:g}" if judged else "")
    table.add_row("KL per token", f"{comparison.kl:.3g}", "" if max_kl is None else f"{max_kl:g}")
    table.add_row("same likeliest token", f"{comparison.top1_agreement:.2%}", "")
    greedy = f"{comparison.greedy_matched_tokens} of {comparison.greedy_tokens}"
    table.add_row("greedy tokens alike", greedy, f"{comparison.greedy_tokens}" if judged else "")
    return table


def _cases_table(cases: list[CaseComparison], tolerance: float, max_kl: float | None) -> Table:
    allowed = f"logits and features within {tolerance:g}" if max_kl is None else f"KL per token at most {max_kl:g}"
    table = Table("case", title=f"Prompts with pictures ({allowed})", title_justify="left")
    for column in ("tokens", "image", "features", "logits" if max_kl is None else "KL", "greedy"):
        table.add_column(column, justify="right")
    table.add_column("positions")
    for case in cases:
        table.add_row(
            case.name,
            str(case.tokens),
            str(case.image_tokens),
            f"{case.features_max_abs_diff:.3g}",
            f"{case.max_abs_diff if max_kl is None else case.kl:.3g}",
            f"{case.greedy_matched_tokens} of {case.greedy_tokens}",
            "equal" if case.position_ids_match else "differ",
        )
    return table
