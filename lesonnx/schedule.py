"""What the scheduler and its host say to each other: the model's shape, the switches, the actions, the counters.

Plain values that know no state; immutable but for the counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lesonnx.allocator import SLAB_BYTES
from lesonnx.errors import LesonnxError
from lesonnx.eviction import ONE


class ScheduleError(LesonnxError):
    """An event that cannot happen in the scheduler's state: a fault of the host."""


class LayerShape(NamedTuple):
    """One MoE layer. ``cost_bytes``: an expert's length in the pack, in whole pages; 0 for no shared expert."""

    num_experts: int
    num_experts_per_tok: int
    cost_bytes: int
    shared_cost_bytes: int = 0


@dataclass(frozen=True)
class SchedulerConfig:
    """Which techniques are on.

    ``max_loads``: loads under way at once. ``compute_first``: compute what is ready while the rest loads.
    ``lookahead_loads`` and ``lookahead_bytes``: most speculative loads under way, most speculative bytes queued and
    under way (0: eight of the largest experts). ``lookahead_odds``: least odds, of 16384, to load a prediction.
    ``retain``: keep experts after use. ``resident``: load every expert at the start and keep it.
    """

    policy: str = "les"
    max_loads: int = 4
    compute_first: bool = True
    lookahead: bool = True
    lookahead_loads: int = 1
    lookahead_bytes: int = 0
    lookahead_odds: int = ONE * 5 // 8
    retain: bool = True
    resident: bool = False
    slab_bytes: int = SLAB_BYTES


ON_DEMAND = SchedulerConfig(policy="lru", max_loads=1, compute_first=False, lookahead=False, retain=False)


class Load(NamedTuple):
    """Read the expert to this place; report ``loaded`` or ``load_failed``."""

    expert: int
    lookahead: bool
    slab: int
    offset_bytes: int


class Evict(NamedTuple):
    """The expert's place is free; a load that comes later may take it."""

    expert: int


class Compute(NamedTuple):
    """Compute these experts, each with all its rows; report ``computed`` with the same."""

    experts: tuple[int, ...]


class Promote(NamedTuple):
    """Record: a lookahead load, queued or under way, has become a demand load."""

    expert: int


class Cancel(NamedTuple):
    """Record: a lookahead load that had not started, or that failed, is dropped."""

    expert: int


Action = Load | Evict | Compute | Promote | Cancel


@dataclass
class Counters:
    """Totals since the start. Required experts count once a layer and step, shared ones too; bytes as loads begin."""

    hits: int = 0
    late: int = 0
    misses: int = 0
    demand_bytes: int = 0
    lookahead_bytes: int = 0
    lookahead_loads: int = 0
    lookahead_used: int = 0
    lookahead_wasted: int = 0
    evictions: int = 0
