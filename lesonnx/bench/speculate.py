"""``lesonnx bench speculate``: what drafting is worth here, for texts of several kinds, streaming and resident.

It plans rows, runs them and prints them; `bench.drafting` measures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from lesonnx.bench.console import wide_console
from lesonnx.bench.drafting import Task, measure
from lesonnx.bench.ladder import BUDGET_SHARE, trace_steps
from lesonnx.bench.oracle import DraftedRouting, KnownSampler, OracleDrafter
from lesonnx.bundle import Bundle
from lesonnx.commands.options import BUNDLE, SIZE
from lesonnx.errors import InputError
from lesonnx.limits import DEFAULT_LOADERS, MAX_LOADERS, MAX_THREADS
from lesonnx.memory import auto_budget_bytes, format_bytes
from lesonnx.model import Model, load
from lesonnx.sampling import Sampler, SamplingOptions
from lesonnx.speculative.drafters import check_drafter, make_drafter

# Text -> its beginning and the temperature it is gone on with: code and lists are written greedily, free text is not.
TEXTS: dict[str, tuple[str, float]] = {
    "repetitive": ("alpha = 1\nbeta = 2\ngamma = 3\n" * 6, 0.0),
    "code-like": (
        "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
        0.0,
    ),
    "free": ("In the evening the old man sat by the window and told them what he had seen", 0.8),
}
MODES = ("streaming", "resident")
TRACE, ORACLE = "trace", "oracle"
# Tokens a pass that the table shows as 1.00.
NO_GAIN = 1.005


@click.command()
@click.argument("bundle", type=BUNDLE)
@click.option("--drafter", "drafters", default="ngram", show_default=True, help="One or more, parted by commas.")
@click.option("--draft-model", type=BUNDLE, help="The bundle that drafts, for --drafter draft-model.")
@click.option("--modes", default=",".join(MODES), show_default=True, help="Which, parted by commas.")
@click.option("--expert-budget", type=SIZE, help="Most bytes of experts in memory, streaming.  [default: a quarter]")
@click.option("--tokens", type=click.IntRange(2), default=128, show_default=True, help="Tokens measured a run.")
@click.option("--warmup", type=click.IntRange(0), default=32, show_default=True, help="Tokens before them.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Pairs of runs, in which stretches without and with drafts take turns.",
)
@click.option(
    "--routing", type=BUNDLE, help="Take experts from this routing trace (random weights); drafts by an oracle."
)
@click.option(
    "--recall", type=click.FloatRange(0, 1), default=0.886, show_default=True, help="Of the trace's predictions."
)
@click.option(
    "--acceptance", type=click.FloatRange(0, 1), default=0.7, show_default=True, help="Of the oracle's drafts."
)
@click.option("--lookahead/--no-lookahead", default=None, help="Predict and prefetch.  [default: where it pays]")
@click.option(
    "--loaders", type=click.IntRange(1, MAX_LOADERS), default=DEFAULT_LOADERS, show_default=True, help="Reads at once."
)
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="Threads that compute.  [default: all cores]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def speculate(
    bundle: Path,
    drafters: str,
    draft_model: Path | None,
    modes: str,
    expert_budget: int | None,
    tokens: int,
    warmup: int,
    rounds: int,
    routing: Path | None,
    recall: float,
    acceptance: float,
    lookahead: bool | None,
    loaders: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure what drafting is worth on BUNDLE: acceptance, experts a pass, bytes a token, speed against none."""
    opened = Bundle(bundle)
    wanted = [name.strip() for name in modes.split(",")]
    for mode in wanted:
        if mode not in MODES:
            raise InputError(f"--modes {mode!r} is not one of {', '.join(MODES)}")
    names = [name.strip() for name in drafters.split(",")]
    if routing is None and (opened.manifest.tokenizer is None or opened.manifest.tokenizer.json_path is None):
        raise InputError(f"{bundle}: has no tokenizer for texts; give --routing TRACE.csv and drafts of --acceptance")
    for name in names if routing is None else ():
        check_drafter(name, draft_model if name == "draft-model" else None)
    budget = expert_budget or max(opened.expert_bytes // BUDGET_SHARE, opened.token_demand_bytes)
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for mode in wanted:
        if mode == "resident" and opened.expert_bytes > auto_budget_bytes():
            notes.append(f"resident is left out: the experts take {format_bytes(opened.expert_bytes)}")
            continue
        settings: dict[str, Any] = {"num_loaders": loaders, "num_threads": threads}
        if mode == "streaming":
            settings |= {"expert_budget_bytes": budget, "lookahead": lookahead}
        with load(opened, schedule="resident" if mode == "resident" else "les", **settings) as model:
            tasks = (
                text_tasks(model, names, draft_model, warmup, tokens)
                if routing is None
                else [trace_task(model, routing, recall, acceptance, warmup, tokens)]
            )
            for text, drafter, task in tasks:
                console.print(f"{mode}, {text}, {drafter}", style="dim", highlight=False)
                rows.append({"text": text, "drafter": drafter, "mode": mode} | measure(model.runner, task, rounds))
    found = {
        "bundle": bundle.name,
        "rows": rows,
        "notes": notes,
        "tokens": tokens,
        "warmup_tokens": warmup,
        "rounds": rounds,
        "expert_budget_bytes": budget,
        "stated_acceptance": None if routing is None else acceptance,
    }
    if as_json:
        print(json.dumps(found))
    else:
        print_rows(found)


def text_tasks(
    model: Model, names: list[str], draft_model: Path | None, warmup: int, tokens: int
) -> Iterator[tuple[str, str, Task]]:
    """Every text with every drafter; a drafter that holds a model or parts is made once."""
    for name in names:
        made = make_drafter(
            name, model.bundle, draft_model if name == "draft-model" else None, num_threads=model.options.num_threads
        )
        if made is None:
            raise InputError("--drafter none: there is nothing to measure")
        try:
            for text, (beginning, temperature) in TEXTS.items():
                prompt_ids = model.encode(beginning)
                room = model.runner.states.max_tokens - len(prompt_ids)
                if warmup + tokens + 1 > room:
                    raise InputError(f"{warmup} + {tokens} tokens do not fit the model's context, {room} are left")
                options = SamplingOptions(temperature=temperature, seed=1)

                def sampler(options: SamplingOptions = options, prompt_ids: list[int] = prompt_ids) -> Sampler:
                    chosen = Sampler(options)
                    chosen.accept_all(prompt_ids)
                    return chosen

                yield text, name, Task(prompt_ids, warmup, tokens, sampler, made)
        finally:
            made.close()


def trace_task(
    model: Model, path: Path, recall: float, acceptance: float, warmup: int, tokens: int
) -> tuple[str, str, Task]:
    """One token and what comes, routed by the trace; an oracle drafts."""
    manifest = model.bundle.manifest.model
    prompt_ids = [manifest.bos_token_id or 0]
    known: list[int] = []
    oracle = OracleDrafter(known, len(prompt_ids), acceptance, manifest.vocab_size)
    steps = np.array(trace_steps(path, model.bundle).tolist(), np.int64)
    model.runner.routing = DraftedRouting(steps, manifest.num_experts, recall, model.runner, oracle)
    return TRACE, ORACLE, Task(prompt_ids, warmup, tokens, lambda: KnownSampler(known, prompt_ids), oracle)


def print_rows(found: dict[str, Any]) -> None:
    """The table and its notes."""
    budget = format_bytes(found["expert_budget_bytes"])
    title = f"{found['bundle']}, {budget} of experts when streaming, {found['tokens']} tokens a run"
    table = Table(title=title, title_justify="left")
    for column in ("mode", "text", "drafter"):
        table.add_column(column, no_wrap=True)
    for column in (
        "plain/s",
        "tokens/s",
        "ratio",
        "each",
        "accepted",
        "by position",
        "tokens/pass",
        "experts",
        "read",
        "plain",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found["rows"]:
        by_position = [value for value in row["acceptance_by_position"] if value is not None]
        union = {rows: growth for rows, growth in row["union"].items() if rows > 1}
        widest = max(union, default=0)
        table.add_row(
            row["mode"],
            row["text"],
            row["drafter"],
            f"{row['plain_tokens_per_s']:.2f}",
            f"{row['tokens_per_s']:.2f}",
            f"{row['ratio']:.2f}",
            f"{min(row['ratios']):.2f}-{max(row['ratios']):.2f}",
            "" if row["acceptance"] is None else f"{row['acceptance']:.0%}",
            " ".join(f"{value:.0%}" for value in by_position[:4]),
            f"{row['tokens_per_pass']:.2f}",
            f"{union[widest]:.1f}x in {widest}" if union else "",
            format_bytes(row["bytes_per_token"]),
            format_bytes(row["plain_bytes_per_token"]),
        )
    console = wide_console()
    console.print(table, highlight=False)
    for note in found["notes"]:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    if any(row["tokens_per_pass"] < NO_GAIN for row in found["rows"]):
        console.print(
            "note: where tokens/pass is 1.00 hardly a draft was accepted: what is left of the ratio is mostly noise",
            highlight=False,
            soft_wrap=True,
        )
    if any(not row["same_tokens"] for row in found["rows"]):
        console.print(
            "note: tokens differ from those without drafts where a row's rounding decided (docs/speculation.md)"
        )
