"""Which of its options each group of experts gets: the least expected loss within a number of bytes.

It knows costs and losses alone: no bits, no model, no file. The same input gives the same choice everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import InputError

# Steps that the room for choices is counted in at most. Where the costs' own unit is finer, they are rounded up to this
# one, and what rounding leaves is spent greedily: 1/65536 of a bundle is less than one expert's page in most.
MOST_UNITS = 1 << 16


class Option(NamedTuple):
    """One way to store a group of experts (the routed ones of a layer, say): its bytes, and what it loses."""

    cost_bytes: int
    loss: float


def allocate(groups: Sequence[Sequence[Option]], most_bytes: int, most_units: int = MOST_UNITS) -> list[int]:
    """The number of an option for each group, so that their costs are at most ``most_bytes`` and their losses least.

    A multiple-choice knapsack, solved by dynamic programming over the bytes that the cheapest options leave (Sinha and
    Zoltners, 1979, on the problem): exact where these fit ``most_units`` steps of the costs' common unit. Of choices
    with equal losses it takes the one of fewer bytes. InputError where even the cheapest options take more.
    """
    if not groups or not all(groups):
        raise ValueError("every group needs an option")
    if not all(math.isfinite(option.loss) for options in groups for option in options):
        raise ValueError("losses must be finite")
    least = [min(option.cost_bytes for option in options) for options in groups]
    room = most_bytes - sum(least)
    if room < 0:
        raise InputError(f"{most_bytes:,} bytes of experts are asked for, they take at least {sum(least):,}")
    paying = [_paying(options) for options in groups]
    extras = [
        [options[number].cost_bytes - lowest for number in kept]
        for options, lowest, kept in zip(groups, least, paying, strict=True)
    ]
    unit = max(1, math.gcd(*(extra for row in extras for extra in row)), -(-room // most_units))
    # Rounded up, so that what fits in units fits in bytes.
    steps = [[-(-extra // unit) for extra in row] for row in extras]
    losses = [[options[number].loss for number in kept] for options, kept in zip(groups, paying, strict=True)]
    places = _solve(steps, losses, min(room // unit, sum(max(row) for row in steps)))
    room -= sum(row[place] for row, place in zip(extras, places, strict=True))
    _spend(extras, losses, places, room)
    return [kept[place] for kept, place in zip(paying, places, strict=True)]


def _paying(options: Sequence[Option]) -> list[int]:
    """The options that cost more than another only where their loss is less, cheapest first."""
    kept: list[int] = []
    for number in sorted(range(len(options)), key=lambda number: (*options[number], number)):
        if not kept or options[number].loss < options[kept[-1]].loss:
            kept.append(number)
    return kept


def _solve(steps: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], room: int) -> list[int]:
    """The place of an option for each group, by the least sum of losses that ``room`` steps allow."""
    best = np.zeros(room + 1)
    chosen: list[NDArray[np.uint8 | np.uint16]] = []
    for row, group_losses in zip(steps, losses, strict=True):
        found = np.full(room + 1, np.inf)
        choice = np.zeros(room + 1, np.min_scalar_type(len(row)))
        for place, (step, loss) in enumerate(zip(row, group_losses, strict=True)):
            if step <= room:
                attempt = best[: room + 1 - step] + loss
                better = attempt < found[step:]
                found[step:][better] = attempt[better]
                choice[step:][better] = place
        best = found
        chosen.append(choice)
    # The fewest steps that reach the least loss.
    left = int(np.argmin(best))
    places: list[int] = []
    for choice, row in zip(reversed(chosen), reversed(steps), strict=True):
        places.append(int(choice[left]))
        left -= row[places[-1]]
    return places[::-1]


def _spend(extras: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], places: list[int], room: int) -> None:
    """Improve the choice step by step where rounding left bytes: what lowers the loss most comes first."""
    while True:
        swaps = [
            (row_losses[place] - row_losses[places[group]], group, place)
            for group, (row, row_losses) in enumerate(zip(extras, losses, strict=True))
            for place in range(len(row))
            if row[place] - row[places[group]] <= room
        ]
        change, group, place = min(swaps)
        if change >= 0:
            return
        room -= extras[group][place] - extras[group][places[group]]
        places[group] = place
