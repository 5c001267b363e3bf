"""How far a prediction is trusted: odds by rank, measured, and a throttle that turns speculation down.

It knows nothing of memory or loads under way. Pure integers, not thread-safe, owned by the scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from lesonnx.eviction import ONE

SCORE_BITS = 20
SCORE_LIMIT = 1 << 30

MOMENTS = 2
"""Predictions of a layer are told apart as the first since its last visit and any later one."""
PREDICTED_ROWS = 32
"""Of more rows, only the last ones are ranked: together they name most of what the chunk needs."""
FIRST_ODDS = ONE * 5 // 8
EXTRA_ODDS = ONE // 4
ODDS_SHIFT = 4

FULL = 64
USEFUL, WASTED, SLOWED = 1, -1, -2
RECOVERY_VISITS = 64
SLOW_FACTOR = 2
READ_SHIFT = 4


def fixed_scores(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """Router scores [T,E] as the fixed point of the scheduler: 20 fractional bits, rounded half to even.

    Clipped to +-2**30 (a score of +-1024); what is not a number counts as the least. The one place where a float
    becomes an integer; done in float64, where the product is exact.
    """
    scaled = np.rint(scores.astype(np.float64) * (1 << SCORE_BITS))
    # fmax takes the number where the other is none.
    return np.fmin(np.fmax(scaled, -SCORE_LIMIT), SCORE_LIMIT).astype(np.int32)


class Lookahead:
    """Measured odds that the expert of a given rank is used, by layer and moment; and the throttle.

    The odds are learned from every prediction, loaded or not, so speculation that was turned down knows when it would
    pay again.
    """

    def __init__(self, num_experts: Sequence[int], num_experts_per_tok: Sequence[int]) -> None:
        self.level = FULL
        """Share of the speculative bytes allowed, of ``FULL``."""
        # Scores become keys that sort by score, then by lower expert: no sort of pairs, no question of stability.
        self._index_bits = max(num_experts).bit_length()
        self._mask = (1 << self._index_bits) - 1
        self._complement = [self._mask - np.arange(n) for n in num_experts]
        self._ranks = [min(n, k + (k + 1) // 2) for n, k in zip(num_experts, num_experts_per_tok, strict=True)]
        self._odds = [
            [[FIRST_ODDS] * k + [EXTRA_ODDS] * (ranks - k) for _ in range(MOMENTS)]
            for ranks, k in zip(self._ranks, num_experts_per_tok, strict=True)
        ]
        # By layer and moment: what was named that is not in memory, as (expert, rank).
        self._named: list[list[list[tuple[int, int]]]] = [[] for _ in num_experts]
        self._visits = 0
        self._us_per_mib = 0  # demand reads with no speculative read beside them; 0: none seen

    def rank(self, layer: int, scores: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
        """The experts that fixed-point ``scores`` [T,E] name, as (expert, rank), best rank first.

        A row ranks by descending score, ties by ascending expert; over several rows an expert counts with its best
        rank, ties by ascending expert.
        """
        ranks, mask = self._ranks[layer], self._mask
        keys = np.left_shift(scores[-PREDICTED_ROWS:], self._index_bits, dtype=np.int64)
        keys += self._complement[layer]
        if len(keys) == 1:
            row = keys[0]
            row.sort()
            return [(mask - (key & mask), rank) for rank, key in enumerate(row[: -ranks - 1 : -1].tolist())]
        keys.sort(axis=1)
        order = mask - (keys[:, : -ranks - 1 : -1] & mask)
        best: dict[int, int] = {}
        for rank in range(ranks):
            for expert in sorted(set(order[:, rank].tolist())):
                best.setdefault(expert, rank)
        return list(best.items())

    def note(self, layer: int, absent: list[tuple[int, int]]) -> list[int]:
        """What a prediction named that is not in memory: to be judged at the layer's visit. Gives the odds by rank."""
        named = self._named[layer]
        moment = min(len(named), MOMENTS - 1)
        named[moment:] = [absent]
        return self._odds[layer][moment]

    def observe(self, layer: int, used: Collection[int]) -> None:
        """The layer was visited and its rows used these experts: learn the odds, forget the predictions."""
        self._visits += 1
        if self._visits % RECOVERY_VISITS == 0:
            self.level = min(FULL, self.level + 1)
        for odds, named in zip(self._odds[layer], self._named[layer], strict=False):
            for expert, rank in named:
                odds[rank] += ((ONE if expert in used else 0) - odds[rank]) >> ODDS_SHIFT
        self._named[layer] = []

    def outcome(self, useful: bool) -> None:
        """A speculative load was used at its layer's visit, or was not."""
        self.level = max(0, min(FULL, self.level + (USEFUL if useful else WASTED)))

    def demand_read(self, cost_bytes: int, read_us: int, beside: bool) -> None:
        """A demand load took ``read_us``; ``beside``: a speculative one was under way when it began."""
        us_per_mib = (read_us << 20) // cost_bytes
        if not beside:
            if self._us_per_mib == 0:
                self._us_per_mib = us_per_mib
            else:
                self._us_per_mib += (us_per_mib - self._us_per_mib) >> READ_SHIFT
        elif self._us_per_mib and us_per_mib > SLOW_FACTOR * self._us_per_mib:
            self.level = max(0, self.level + SLOWED)
