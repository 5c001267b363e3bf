"""``lesonnx bench prefill``: time to first token and bytes read by chunk length, against what flash allows.

A chunk touches most experts of a layer, so what counts is that none is read twice in a chunk, and how many chunks.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from rich.table import Table

from lesonnx import ort
from lesonnx.bench.console import wide_console
from lesonnx.bench.flash import measure_flash
from lesonnx.bench.lookahead import is_random
from lesonnx.bundle import Bundle, Expert
from lesonnx.commands.options import BUNDLE, SIZE
from lesonnx.engines import ExpertEngine, LayerWork, make_engine
from lesonnx.errors import InputError
from lesonnx.loader import ExpertLoader
from lesonnx.memory import format_bytes
from lesonnx.model import LoadOptions, check_budget, scheduler_config
from lesonnx.runner import Runner

BUDGET_SHARE = 4


@dataclass(frozen=True)
class PrefillRow:
    """One chunk length. ``most_reads`` is the most times that an expert was read in a chunk: one.

    (Two at budgets of a few experts, where a later prediction can take the place of one that comes true after all.)

    ``touched``: the mean share of a layer's experts that a chunk reads or finds. ``flash_ms`` is what reading the bytes
    takes at the measured speed, ``flash_share`` that of the time to first token; ``bound_share`` that of the larger of
    it and computing (dense parts and experts).
    """

    chunk_tokens: int
    chunks: int
    first_token_ms: float
    read_bytes: int
    loads: int
    most_reads: int
    touched: float
    dense_ms: float
    expert_ms: float
    stall_ms: float
    flash_bytes_per_s: float
    flash_ms: float
    flash_share: float
    bound_share: float


class CountingEngine:
    """Another engine, and how often each expert was loaded in each chunk. Loads come from several threads."""

    def __init__(self, engine: ExpertEngine) -> None:
        self._engine = engine
        self.name = engine.name
        self.notes = engine.notes
        self.memory_per_byte = engine.memory_per_byte
        self.chunk = 0
        self.reads: Counter[tuple[int, int]] = Counter()
        self.computed: Counter[int] = Counter()

    def resize(self, slab_bytes: list[int]) -> None:
        self._engine.resize(slab_bytes)

    def load(self, expert: Expert, slab: int, offset_bytes: int) -> int:
        # One thread at a time loads an expert, so no two add to one entry at once.
        self.reads[self.chunk, expert.number] += 1
        return self._engine.load(expert, slab, offset_bytes)

    def compute(self, experts: list[Expert], work: LayerWork) -> None:
        self.computed[self.chunk] += len(experts)
        self._engine.compute(experts, work)

    def evict(self, expert: Expert) -> None:
        self._engine.evict(expert)

    def close(self) -> None:
        self._engine.close()


def measure_prefill(
    bundle: Bundle, token_ids: list[int], chunk_tokens: int, expert_budget_bytes: int, engine_name: str = "auto"
) -> PrefillRow:
    """Prefill a prompt with nothing in memory."""
    config, num_loaders = scheduler_config(LoadOptions())
    check_budget(bundle, expert_budget_bytes, config)
    engine = CountingEngine(make_engine(engine_name, bundle))
    runner = Runner(bundle, ExpertLoader(bundle, engine, config, expert_budget_bytes, num_loaders), chunk_tokens)
    before = measure_flash(bundle, num_loaders)
    try:
        began = time.perf_counter()
        starts = range(0, len(token_ids), chunk_tokens)
        for number, start in enumerate(starts):
            engine.chunk = number
            chunk = token_ids[start : start + chunk_tokens]
            runner.step(chunk, [len(chunk) - 1] if number + 1 == len(starts) else [])
        first_token_ms = (time.perf_counter() - began) * 1e3
        telemetry = asdict(runner.loader.telemetry)
        reads = dict(engine.reads)
        computed = sum(engine.computed.values())
    finally:
        runner.close()
    speed = max(before.bytes_per_s, measure_flash(bundle, num_loaders).bytes_per_s)
    flash_ms = telemetry["read_bytes"] / speed * 1e3
    return PrefillRow(
        chunk_tokens=chunk_tokens,
        chunks=len(starts),
        first_token_ms=first_token_ms,
        read_bytes=telemetry["read_bytes"],
        loads=telemetry["loads"],
        most_reads=max(reads.values(), default=0),
        touched=computed / (len(starts) * len(bundle.experts)),
        dense_ms=telemetry["dense_ms"],
        expert_ms=telemetry["expert_ms"],
        stall_ms=telemetry["stall_ms"],
        flash_bytes_per_s=speed,
        flash_ms=flash_ms,
        flash_share=flash_ms / first_token_ms,
        bound_share=max(flash_ms, telemetry["dense_ms"] + telemetry["expert_ms"]) / first_token_ms,
    )


@click.command()
@click.argument("bundle", type=BUNDLE)
@click.option("--tokens", type=click.IntRange(1), default=512, show_default=True, help="Length of the prompt.")
@click.option("--chunks", default="128,256,512", show_default=True, help="Tokens a pass to compare, parted by commas.")
@click.option("--expert-budget", type=SIZE, help="Most bytes of experts in memory.  [default: a quarter of them]")
@click.option("--text", type=BUNDLE, help="A text to take the prompt from.  [default: random tokens]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def prefill(
    bundle: Path, tokens: int, chunks: str, expert_budget: int | None, text: Path | None, as_json: bool
) -> None:
    """Measure BUNDLE's time to first token by chunk length, against what flash allows."""
    try:
        lengths = [int(item) for item in chunks.split(",")]
    except ValueError:
        raise InputError(f"--chunks {chunks!r} is not a list of numbers parted by commas") from None
    if min(lengths) < 1:
        raise InputError(f"--chunks {chunks!r}: a chunk has at least 1 token")
    opened = Bundle(bundle)
    ort.check_version(opened.manifest.onnxruntime_at_least)
    token_ids = prompt_ids(opened, tokens, text)
    if len(token_ids) > opened.manifest.model.max_position_embeddings:
        room = opened.manifest.model.max_position_embeddings
        raise InputError(f"{len(token_ids)} tokens do not fit the model's context of {room}")
    budget = expert_budget or max(opened.expert_bytes // BUDGET_SHARE, opened.least_budget_bytes)
    # The first pass through a bundle also brings its dense parts into memory: it is not counted.
    measure_prefill(opened, token_ids[:1], 1, budget)
    rows = [measure_prefill(opened, token_ids, length, budget) for length in lengths]
    if as_json:
        found = {
            "bundle": opened.directory.name,
            "random_weights": is_random(opened),
            "tokens": len(token_ids),
            "expert_budget_bytes": budget,
            "expert_bytes": opened.expert_bytes,
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(found))
    else:
        print_rows(opened, rows, len(token_ids), budget)


def prompt_ids(bundle: Bundle, tokens: int, text: Path | None) -> list[int]:
    """The prompt: the beginning of a text, or random tokens, the same ones every time."""
    if text is None:
        vocab_size = bundle.manifest.model.vocab_size
        ids: list[int] = np.random.default_rng(0).integers(0, vocab_size, tokens).tolist()
        return ids
    files = bundle.manifest.tokenizer
    if files is None or files.json_path is None:
        raise InputError(f"{bundle.directory}: has no tokenizer for --text; leave it out")
    from lesonnx.tokenizer import Tokenizer

    try:
        source = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{text}: not readable as text: {error}") from None
    ids = Tokenizer.from_file(bundle.file(files.json_path)).encode(source, add_special_tokens=True)[:tokens]
    if not ids:
        raise InputError(f"{text}: holds no token")
    return ids


def print_rows(bundle: Bundle, rows: list[PrefillRow], num_tokens: int, budget_bytes: int) -> None:
    """The table, a row a chunk length; savings are against the first row."""
    title = f"{bundle.directory.name}: {num_tokens} tokens, {format_bytes(budget_bytes)} of experts"
    table = Table(title=title + ("; random weights" if is_random(bundle) else ""), title_justify="left")
    columns = (
        "chunk",
        "first token",
        "read",
        "most reads",
        "touched",
        "flash bound",
        "share",
        "bound",
        "dense ms",
        "expert ms",
    )
    for column in (*columns, "stall ms", "time saved", "bytes saved"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.chunk_tokens),
            f"{row.first_token_ms:.0f} ms",
            format_bytes(row.read_bytes),
            str(row.most_reads),
            f"{row.touched:.0%}",
            f"{row.flash_ms:.0f} ms",
            f"{row.flash_share:.0%}",
            f"{row.bound_share:.0%}",
            f"{row.dense_ms:.0f}",
            f"{row.expert_ms:.0f}",
            f"{row.stall_ms:.0f}",
            f"{1 - row.first_token_ms / rows[0].first_token_ms:.0%}",
            f"{1 - row.read_bytes / rows[0].read_bytes:.0%}" if rows[0].read_bytes else "",
        )
    console = wide_console()
    console.print(table, highlight=False)
