"""``lesonnx bench cache``: hit rates of eviction policies on a routing trace, beside Belady's bound.

It knows no bundle and no ONNX Runtime: the trace is played through the real scheduler, with reads that end at once.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from lesonnx.bench.near_misses import NearMissScheduler
from lesonnx.bench.trace import RoutingTrace, read_trace
from lesonnx.errors import InputError
from lesonnx.eviction import POLICIES
from lesonnx.schedule import Action, Compute, LayerShape, Load, SchedulerConfig
from lesonnx.scheduler import Scheduler

BELADY = "belady"
NEAR = "les+near"
NEAR_WEIGHT = 0.25
MIB = 1 << 20


@dataclass(frozen=True)
class CacheRow:
    """One replay: of the experts that decode steps required, ``hit_rate`` % were in memory.

    ``read_mib`` is the mean of a decode step, ``schedule_ms`` the median of the time in the scheduler (None for the
    bound, which has none).
    """

    budget_mib: int
    policy: str
    hit_rate: float
    read_mib: float
    schedule_ms: float | None


def replay(trace: RoutingTrace, budget_mib: int, policy: str, near_weight: float = NEAR_WEIGHT) -> CacheRow:
    """Play the trace through the scheduler: prefill warms the cache, decode steps count.

    ``les+near`` is ``les`` that also learns from near misses, each worth up to ``near_weight`` of a use.
    """
    layers = [
        LayerShape(trace.num_experts, k, cost)
        for k, cost in zip(trace.num_experts_per_tok, trace.cost_bytes, strict=True)
    ]
    near = policy == NEAR
    config = SchedulerConfig(policy="les" if near else policy, max_loads=1, lookahead=False)
    make = NearMissScheduler if near else Scheduler
    scheduler = make(layers, budget_mib * MIB, config)
    counters = scheduler.counters
    hits = misses = read_bytes = 0
    spent: list[float] = []
    for step in trace.steps:
        before = counters.hits, counters.misses, counters.demand_bytes
        if isinstance(scheduler, NearMissScheduler):
            scheduler.expect(step.near, near_weight)
        began = time.perf_counter()
        _play(scheduler, step.layers)
        ended = time.perf_counter()
        if step.is_decode:
            spent.append(ended - began)
            hits += counters.hits - before[0]
            misses += counters.misses - before[1]
            read_bytes += counters.demand_bytes - before[2]
    rate = round(100 * hits / (hits + misses), 2)
    per_step = round(read_bytes / len(spent) / MIB, 1)
    return CacheRow(budget_mib, policy, rate, per_step, round(1e3 * median(spent), 2))


def _play(scheduler: Scheduler, layers: Sequence[Sequence[Sequence[int]]]) -> None:
    scheduler.begin_step(max(len(rows) for rows in layers))
    for layer, rows in enumerate(layers):
        if not rows:
            continue
        actions: list[Action] = scheduler.route(layer, rows)
        for action in actions:  # grows while it is walked: every report brings new actions
            if isinstance(action, Load):
                actions += scheduler.loaded(action.expert, 1)
            elif isinstance(action, Compute):
                actions += scheduler.computed(action.experts)
        scheduler.end_layer()


def belady(trace: RoutingTrace, budget_mib: int) -> CacheRow:
    """The bound: evict what is used again last. Needs the future, so no policy reaches it. (Belady, 1966.)"""
    visits = [
        (step.is_decode, layer, sorted({expert for row in rows for expert in row}))
        for step in trace.steps
        for layer, rows in enumerate(step.layers)
    ]
    never = len(visits)
    following: dict[tuple[int, int], int] = {}
    next_use: list[list[int]] = []
    for visit in range(never - 1, -1, -1):
        _, layer, experts = visits[visit]
        next_use.append([following.get((layer, expert), never) for expert in experts])
        following.update({(layer, expert): visit for expert in experts})
    next_use.reverse()

    resident: dict[tuple[int, int], int] = {}  # expert -> its next use
    farthest: list[tuple[int, int, tuple[int, int]]] = []  # heap of (-next use, tie, expert), with stale entries
    ties = count()
    room = budget_mib * MIB
    hits = needed = read_bytes = 0
    for visit, (is_decode, layer, experts) in enumerate(visits):
        cost = trace.cost_bytes[layer]
        for expert in experts:
            hit = (layer, expert) in resident
            needed += is_decode
            hits += is_decode and hit
            if not hit:
                read_bytes += is_decode * cost
                room -= cost
            resident[layer, expert] = visit  # pinned: sorts as used at once, until the layer is done
        while room < 0:
            # What was left over when a chunk needs more than all the memory: its own experts, farthest use first.
            if not farthest:
                for expert, later in zip(experts, next_use[visit], strict=True):
                    resident[layer, expert] = later
                    heapq.heappush(farthest, (-later, next(ties), (layer, expert)))
            later, _, victim = heapq.heappop(farthest)
            if resident.get(victim) == -later:
                del resident[victim]
                room += trace.cost_bytes[victim[0]]
        for expert, later in zip(experts, next_use[visit], strict=True):
            if resident.get((layer, expert)) == visit:
                resident[layer, expert] = later
                heapq.heappush(farthest, (-later, next(ties), (layer, expert)))
    steps = sum(step.is_decode for step in trace.steps)
    return CacheRow(budget_mib, BELADY, round(100 * hits / needed, 2), round(read_bytes / steps / MIB, 1), None)


def measure(
    trace: RoutingTrace, budgets_mib: Sequence[int], policies: Sequence[str], near_weight: float = NEAR_WEIGHT
) -> list[CacheRow]:
    """Every policy at every budget (MiB)."""
    return [
        belady(trace, budget) if policy == BELADY else replay(trace, budget, policy, near_weight)
        for budget in budgets_mib
        for policy in policies
    ]


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        numbers = [int(word) for word in value.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"expected whole MiB with commas between, such as 500,1000; got {value!r}")
    return numbers


def _policies(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    names = value.split(",")
    known = (*POLICIES, NEAR, BELADY)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(f"unknown policy {unknown[0]!r}: expected some of {', '.join(known)}")
    return names


@click.command()
@click.option("--trace", "trace_path", type=click.Path(path_type=Path), required=True, help="Routing trace (CSV).")
@click.option(
    "--budget-mib",
    "budgets_mib",
    default="500,1000,2000,3000",
    show_default=True,
    callback=_numbers,
    help="Expert budgets to try.",
)
@click.option(
    "--policy",
    "policies",
    default=",".join((*POLICIES, BELADY)),
    show_default=True,
    callback=_policies,
    help=f"Eviction policies to compare; {NEAR} learns from the near misses of a recorded trace too.",
)
@click.option(
    "--near-weight",
    type=click.FloatRange(0, 1),
    default=NEAR_WEIGHT,
    show_default=True,
    help=f"What a near miss is worth to {NEAR} at most, in uses.",
)
@click.option("--row-by-row", is_flag=True, help="Count every row as a decode step, the prompt's too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a plot (PNG) too; needs matplotlib.")
def cache(
    trace_path: Path,
    budgets_mib: list[int],
    policies: list[str],
    near_weight: float,
    row_by_row: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Compare eviction policies on a routing trace with Belady's bound.

    The prefill warms the cache; decode steps count. No lookahead: a trace holds no predictions.
    """
    trace = read_trace(trace_path)
    if NEAR in policies and not trace.has_near_misses:
        raise InputError(f"{trace_path}: holds no near misses for {NEAR}; record with `lesonnx run --record-routing`")
    if row_by_row:
        trace = trace.row_by_row()
    rows = measure(trace, budgets_mib, policies, near_weight)
    if as_json:
        facts = {"model": trace.model, "token_mib": round(trace.token_bytes / MIB, 1)}
        click.echo(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        _print_table(trace, rows, policies)
    if plot:
        _draw(trace, rows, plot)


def _print_table(trace: RoutingTrace, rows: list[CacheRow], policies: list[str]) -> None:
    decode = sum(step.is_decode for step in trace.steps)
    title = f"{trace.model}: decode hits, % ({decode} steps; one token needs {trace.token_bytes / MIB:.0f} MiB)"
    table = Table(title=title, title_justify="left")
    table.add_column("budget, MiB", justify="right")
    for policy in policies:
        table.add_column(policy, justify="right")
    table.add_column("scheduler, ms a token", justify="right")
    for budget in dict.fromkeys(row.budget_mib for row in rows):
        group = [row for row in rows if row.budget_mib == budget]
        times = [f"{row.schedule_ms:.1f}" for row in group if row.schedule_ms is not None]
        table.add_row(str(budget), *(f"{row.hit_rate:.1f}" for row in group), " / ".join(times))
    Console().print(table)


def _draw(trace: RoutingTrace, rows: list[CacheRow], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs the package matplotlib: pip install 'lesonnx[plot]'") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(row.policy for row in rows):
        points = sorted((row.budget_mib, row.hit_rate) for row in rows if row.policy == policy)
        style: dict[str, Any] = {"linestyle": "--", "color": "black"} if policy == BELADY else {"marker": "o"}
        axes.plot(*zip(*points, strict=True), label="Belady's bound" if policy == BELADY else policy, **style)
    axes.axvline(trace.token_bytes / MIB, color="grey", linewidth=1, linestyle=":", label="one token's demand")
    axes.set(xlabel="expert budget, MiB", ylabel="decode hits, %", title=trace.model, ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
