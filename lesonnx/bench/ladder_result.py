"""What ``bench ladder`` found, as its table, its plot and ``--json`` have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lesonnx.bench.turns import Turns

Row = dict[str, Any]


@dataclass
class Ladder:
    """What the command found: one row a technique, and what the machine allows at most.

    ``flash_bytes_per_s``: the least and the most that was measured between the rows. ``busy``: how many other
    processes spun meanwhile.
    """

    rows: list[Row]
    notes: list[str]
    flash_bytes_per_s: tuple[float, float]
    flash_is_direct: bool
    compute_ms: float
    num_loaders: int
    expert_budget_bytes: int
    label: str | None = None
    bundle: str = ""
    tokens: int = 0
    warmup_tokens: int = 0
    busy: int = 0
    turns: Turns | None = None
