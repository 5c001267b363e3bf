"""Rows that ran in turns, A/B/A: how much faster B is than the A's around it, whatever the machine did meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

# Fewer say nothing that the table does not.
LEAST_TURNS = 2


@dataclass(frozen=True)
class Turns:
    """``ratios``: the speed of each ``name`` row by the mean of the two ``against`` rows beside it."""

    name: str
    against: str
    ratios: list[float]
    median: float


def turns_of(rows: Sequence[dict[str, Any]]) -> Turns | None:
    """The turns of a ladder whose second row comes again and again between rows like the first; None without any."""
    if len(rows) < 2:
        return None
    against, name = rows[0]["name"], rows[1]["name"]
    ratios = []
    for before, row, after in zip(rows, rows[1:], rows[2:], strict=False):
        if (before["name"], row["name"], after["name"]) == (against, name, against) and name != against:
            ratios.append(row["tokens_per_s"] * 2 / (before["tokens_per_s"] + after["tokens_per_s"]))
    return Turns(name, against, ratios, median(ratios)) if len(ratios) >= LEAST_TURNS else None


def turns_line(turns: Turns) -> str:
    """In one line."""
    each = ", ".join(f"{ratio:.3f}" for ratio in turns.ratios)
    return f"{turns.name} by the {turns.against} rows around it: median {turns.median:.3f} of {each}"
