"""``lesonnx bench load``: what bringing one expert into memory costs on each engine, by kind, wall and processor time.

Engines take turns within one run, so that what else the machine does meets both alike.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from lesonnx.bundle import Bundle, Expert
from lesonnx.commands.options import BUNDLE
from lesonnx.engines import ExpertEngine, LayerWork, make_engine
from lesonnx.engines.kernel import why_not
from lesonnx.limits import MAX_THREADS
from lesonnx.memory import format_bytes

ENGINES = ("kernel", "session")


@dataclass(frozen=True)
class LoadCost:
    """Medians of one kind. A session packs some weights only in its first run, so that belongs to the load."""

    kind: str
    precision: str
    engine: str
    wall_ms: float
    cpu_ms: float
    first_run_ms: float
    read_bytes: int


def measure(bundle: Bundle, num_experts: int, num_threads: int | None) -> list[LoadCost]:
    """Load, run once and evict experts from all over the bundle, one at a time, kinds and engines in turns.

    Of each kind as many, ``num_experts`` in all or at least one of each.
    """
    engines = {
        name: make_engine(name, bundle, num_threads) for name in ENGINES if name != "kernel" or not why_not(bundle)
    }
    samples: dict[tuple[int, str], list[tuple[float, float, float]]] = {}
    read_bytes: dict[tuple[int, str], int] = {}
    try:
        for engine in engines.values():
            engine.resize([max(kind.cost_bytes for kind in bundle.manifest.expert_kinds)])
        for expert in _spread(bundle, num_experts):
            for name, engine in engines.items():
                key = expert.kind_idx, name
                sample, read_bytes[key] = _load_once(bundle, engine, expert)
                samples.setdefault(key, []).append(sample)
    finally:
        for engine in engines.values():
            engine.close()
    costs = []
    for (kind_idx, name), rows in sorted(samples.items()):
        kind = bundle.manifest.expert_kinds[kind_idx]
        wall_ms, cpu_ms, run_ms = (statistics.median(column) for column in zip(*rows, strict=True))
        costs.append(LoadCost(kind.name, kind.precision, name, wall_ms, cpu_ms, run_ms, read_bytes[kind_idx, name]))
    return costs


def _spread(bundle: Bundle, num_experts: int) -> list[Expert]:
    """Experts from all over the bundle, as many of each kind, kinds in turns; where there are few, they come again."""
    by_kind: dict[int, list[Expert]] = {}
    for expert in bundle.experts:
        by_kind.setdefault(expert.kind_idx, []).append(expert)
    count = max(1, num_experts // len(by_kind))
    places = [[round(place) for place in np.linspace(0, len(experts) - 1, count)] for experts in by_kind.values()]
    rows = zip(*places, strict=True)
    return [experts[place] for row in rows for experts, place in zip(by_kind.values(), row, strict=True)]


def _load_once(bundle: Bundle, engine: ExpertEngine, expert: Expert) -> tuple[tuple[float, float, float], int]:
    """Wall and processor ms of a load with its first run, ms of that run, and bytes read."""
    model = bundle.manifest.model
    hidden = np.zeros((1, model.hidden_size), np.float32)
    first = expert.number - (expert.expert_idx or 0)
    slots = model.num_experts_per_tok
    ids = np.full((1, slots), expert.expert_idx or 0, np.int64)
    out, shared = np.zeros((1, slots, model.hidden_size), np.float32), np.zeros_like(hidden)
    work = LayerWork.make(first, ids, hidden, out, shared)
    # Of the whole process: a session packs with whatever threads it likes.
    cpu, began = time.process_time(), time.perf_counter()
    read_bytes = engine.load(expert, 0, 0)
    loaded = time.perf_counter()
    engine.compute([expert], work)
    ended = time.perf_counter()
    cpu = time.process_time() - cpu
    engine.evict(expert)
    return ((ended - began) * 1e3, cpu * 1e3, (ended - loaded) * 1e3), read_bytes


@click.command()
@click.argument("bundle", type=BUNDLE)
@click.option("--experts", type=click.IntRange(1), default=64, show_default=True, help="How many are loaded.")
@click.option(
    "--threads", type=click.IntRange(1, MAX_THREADS), default=1, show_default=True, help="Threads that compute."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def load(bundle: Path, experts: int, threads: int, as_json: bool) -> None:
    """Measure what loading one expert of BUNDLE costs on the kernel and the session engine."""
    rows = measure(Bundle(bundle), experts, threads)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
        return
    table = Table("kind", "bits (block)", "engine", "load and first run, ms", "processor, ms", "first run, ms", "read")
    for row in rows:
        table.add_row(
            row.kind,
            row.precision,
            row.engine,
            f"{row.wall_ms:.2f}",
            f"{row.cpu_ms:.2f}",
            f"{row.first_run_ms:.2f}",
            format_bytes(row.read_bytes),
        )
    console = Console()
    console.print(table)
    by_engine = {name: [row.cpu_ms for row in rows if row.engine == name] for name in ENGINES}
    if by_engine["kernel"]:
        share = sum(by_engine["kernel"]) / sum(by_engine["session"])
        console.print(f"the kernel's load takes {share:.0%} of the session's processor time")
    else:
        console.print(f"the kernel is not measured: {why_not(Bundle(bundle))}")
