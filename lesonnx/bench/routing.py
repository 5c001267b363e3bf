"""Routing from a recorded trace: which experts a real model chose, so that speed can be measured with random weights.

It knows the trace and the model's shape; the runner takes ids and predictions from it instead of from its router.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import InputError

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]


class TraceRouting:
    """Decode steps of a trace, one after another, over and over; not thread-safe, owned by one runner.

    ``steps`` int64 [steps, layers, k]; ``first_step`` comes first (negative: from the end). Predictions name each
    expert of the next layer with probability ``recall`` and fill up with wrong ones, seeded by step, since a trace does
    not hold what a lookahead would have said. They are made at the start: a run spends no time on them.
    """

    def __init__(self, steps: Ids, num_experts: int, recall: float, seed: int = 0, first_step: int = 0) -> None:
        if not 0 <= recall <= 1:
            raise InputError(f"recall is {recall}, expected 0 to 1")
        self._steps = steps
        self._scores = [predictions(step, num_experts, recall, (seed, number)) for number, step in enumerate(steps)]
        self._step = first_step - 1
        self._rows: list[int] = []

    def begin_step(self, num_rows: int) -> None:
        """Go on to the next step; several rows take several steps of the trace."""
        self._rows = [(self._step + 1 + row) % len(self._steps) for row in range(num_rows)]
        self._step = self._rows[-1]

    def ids(self, place: int) -> Ids:
        """What the router of MoE layer number ``place`` chose: [T,k]."""
        if len(self._rows) == 1:
            return self._steps[self._rows[0], place : place + 1]
        return self._steps[self._rows, place]

    def scores(self, place: int) -> Scores:
        """A prediction [T,E] for MoE layer number ``place``, the same however often it is asked for in a step."""
        if len(self._rows) == 1:
            return self._scores[self._rows[0]][place : place + 1]
        return np.stack([self._scores[row][place] for row in self._rows])


def predictions(step: Ids, num_experts: int, recall: float, seed: tuple[int, ...]) -> Scores:
    """Scores [layers, E] for one step's experts [layers, k]: right ones with probability ``recall``, the rest wrong."""
    rng = np.random.default_rng(seed)
    scores = rng.random((len(step), num_experts), np.float32) * np.float32(1e-3)
    ranked = np.linspace(0.3, 0.05, step.shape[1], dtype=np.float32)
    for place, chosen in enumerate(step):
        named = chosen[rng.random(len(chosen)) < recall]
        others = np.setdiff1d(np.arange(num_experts), chosen)
        # Where nearly all experts are chosen, there are not enough wrong ones.
        wrong = rng.choice(others, min(len(chosen) - len(named), len(others)), replace=False)
        order = rng.permutation(np.concatenate([named, wrong]))
        scores[place, order] = ranked[: len(order)]
    return scores
