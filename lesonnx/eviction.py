"""What an expert in memory is worth: the policies ``lru``, ``lfu`` and ``les``, in integers.

A policy learns which experts the rows of each visit to a layer used, and values every expert of that layer; it knows
neither sizes nor states. The value of an expert changes only when its own layer is visited, so the scheduler asks for
one layer's values at a time. Not thread-safe, owned by the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lesonnx.errors import InputError

POLICIES = ("lru", "lfu", "les")

ODDS_BITS = 14
ONE = 1 << ODDS_BITS
"""Certainty, in the fixed point of all averages and odds (14 fractional bits)."""

LEARNED_ROWS = 64
"""Of a longer chunk, only this many last rows teach: what came before has faded anyway."""

# The table of a layer has one row for each expert (what its use foretells) and these two.
FOLLOWER_SHIFT = 3
RECENT_SHIFT = 1
LASTING_SHIFT = 4
FOLLOWER_WEIGHT = 2
RECENT_WEIGHT = 1
LASTING_WEIGHT = 1
TOTAL_WEIGHT = FOLLOWER_WEIGHT + RECENT_WEIGHT + LASTING_WEIGHT
WAIT_DIVISOR = 20
"""Waiting one whole cycle in memory costs 1/20 of a certain use."""

TOP = 1 << 42
"""Above every value that is learned: pinned experts, and what ``lfu`` thinks of a prediction."""


class Policy(Protocol):
    """Values are signed integers, in size at most ``TOP``; the smaller is evicted first."""

    def learn(self, layer: int, rows: Sequence[Sequence[int]]) -> None:
        """Take in the experts (``expert_idx``) that these consecutive rows used at this layer."""

    def values(self, layer: int, visit: int) -> npt.NDArray[np.int64]:
        """The value of each routed expert of the layer, whose last visit had this number."""

    def odds(self, layer: int) -> npt.NDArray[np.int64]:
        """How likely each routed expert of the layer is used by the next row, of ``ONE``."""

    def predicted(self, layer: int, odds: int, visit: int, clock: int) -> int:
        """The value of an absent expert that has ``odds`` of ``ONE`` to be used at the layer's next ``visit``.

        ``clock`` is the number of the latest visit of any layer.
        """


class _EvenPolicy:
    """What ``lru`` and ``lfu`` share: they foretell nothing, so one expert is as likely as another."""

    def __init__(self, num_experts: Sequence[int], num_experts_per_tok: Sequence[int]) -> None:
        self._odds = [np.full(n, ONE * k // n) for n, k in zip(num_experts, num_experts_per_tok, strict=True)]

    def odds(self, layer: int) -> npt.NDArray[np.int64]:
        return self._odds[layer]


class LruPolicy(_EvenPolicy):
    """The least recently used goes first: the value is the visit of the last use."""

    def __init__(self, num_experts: Sequence[int], num_experts_per_tok: Sequence[int]) -> None:
        super().__init__(num_experts, num_experts_per_tok)
        self._last = [np.zeros(n, np.int64) for n in num_experts]
        self._learned: list[set[int]] = [set() for _ in num_experts]

    def learn(self, layer: int, rows: Sequence[Sequence[int]]) -> None:
        self._learned[layer].update(*rows)

    def values(self, layer: int, visit: int) -> npt.NDArray[np.int64]:
        last = self._last[layer]
        last[sorted(self._learned[layer])] = visit
        self._learned[layer].clear()
        return last

    def predicted(self, layer: int, odds: int, visit: int, clock: int) -> int:
        return clock


class LfuPolicy(_EvenPolicy):
    """The least often used goes first: the value is the number of rows that used it."""

    def __init__(self, num_experts: Sequence[int], num_experts_per_tok: Sequence[int]) -> None:
        super().__init__(num_experts, num_experts_per_tok)
        self._count = [np.zeros(n, np.int64) for n in num_experts]

    def learn(self, layer: int, rows: Sequence[Sequence[int]]) -> None:
        for row in rows:
            self._count[layer][list(row)] += 1

    def values(self, layer: int, visit: int) -> npt.NDArray[np.int64]:
        return self._count[layer]

    def predicted(self, layer: int, odds: int, visit: int, clock: int) -> int:
        return TOP


class LesPolicy:
    """What is least likely to be used at its layer's next visit goes first; the farther that visit, the sooner.

    value = odds of use at the next visit - price * (number of that visit), where the odds are a weighted sum of three
    moving averages: what followed the experts used now (a mean over them), recent use, and lasting use. The number of
    the next visit stands for its distance, since all values are compared at the same moment.

    One table a layer holds the averages, [num_experts + 2, num_experts] int16 of ``ONE``: row e what is used one row
    after expert e is, then recent and lasting use.
    """

    def __init__(self, num_experts: Sequence[int], num_experts_per_tok: Sequence[int]) -> None:
        # Followers are a mean over k experts; multiplying by a common multiple of every k leaves no division.
        self._scale = math.lcm(*num_experts_per_tok)
        self._price = max(1, TOTAL_WEIGHT * self._scale * ONE // (WAIT_DIVISOR * len(num_experts)))
        self._num_experts = list(num_experts)
        self._tables: list[npt.NDArray[np.int16]] = []
        self._weights: list[npt.NDArray[np.int32]] = []
        self._shifts: list[npt.NDArray[np.int16]] = []
        # The table's rows that the next row of tokens moves, and a copy of them: what the last row used, and the two.
        self._latest: list[npt.NDArray[np.intp]] = []
        self._block: list[npt.NDArray[np.int16]] = []
        for n, k in zip(num_experts, num_experts_per_tok, strict=True):
            table = np.zeros((n + 2, n), np.int16)
            table[n + 1] = ONE * k // n
            self._tables.append(table)
            self._latest.append(np.array([n, n + 1]))
            self._block.append(table[n:])
            weights = [FOLLOWER_WEIGHT * self._scale // k] * k + [
                RECENT_WEIGHT * self._scale,
                LASTING_WEIGHT * self._scale,
            ]
            self._weights.append(np.array(weights, np.int32))
            shifts = np.array([FOLLOWER_SHIFT] * k + [RECENT_SHIFT, LASTING_SHIFT], np.int16)
            self._shifts.append(np.repeat(shifts[:, None], n, axis=1))

    def learn(self, layer: int, rows: Sequence[Sequence[int]]) -> None:
        table, n = self._tables[layer], self._num_experts[layer]
        latest, block = self._latest[layer], self._block[layer]
        for row in rows[-LEARNED_ROWS:]:
            following = np.array([*row, n, n + 1])
            change = self._targets(layer, row) - block
            change >>= self._shifts[layer][-len(latest) :]
            change += block
            table[latest] = change
            latest, block = following, table.take(following, 0)
        self._latest[layer], self._block[layer] = latest, block

    def _targets(self, layer: int, row: Sequence[int]) -> npt.NDArray[np.int16]:
        """What a row moves the averages of the layer's experts towards."""
        targets = np.zeros(self._num_experts[layer], np.int16)
        targets[list(row)] = ONE
        return targets

    def odds(self, layer: int) -> npt.NDArray[np.int64]:
        return np.minimum(self._weighted(layer) // (TOTAL_WEIGHT * self._scale), ONE)

    def _weighted(self, layer: int) -> npt.NDArray[np.int64]:
        """The odds of each expert, ``TOTAL_WEIGHT * scale`` times too large."""
        block = self._block[layer]
        return self._weights[layer][-len(block) :] @ block

    def values(self, layer: int, visit: int) -> npt.NDArray[np.int64]:
        return self._weighted(layer) - self._price * np.int64(visit + len(self._tables))

    def predicted(self, layer: int, odds: int, visit: int, clock: int) -> int:
        return TOTAL_WEIGHT * self._scale * odds - self._price * visit


def make_policy(name: str, num_experts: Sequence[int], num_experts_per_tok: Sequence[int]) -> Policy:
    """The policy of that name for layers of these many experts, ``num_experts_per_tok`` of them a row.

    Raises InputError for an unknown name.
    """
    if name == "lru":
        return LruPolicy(num_experts, num_experts_per_tok)
    if name == "lfu":
        return LfuPolicy(num_experts, num_experts_per_tok)
    if name == "les":
        return LesPolicy(num_experts, num_experts_per_tok)
    raise InputError(f"unknown policy {name!r}: expected one of {', '.join(POLICIES)}")
