"""Routing from a recorded trace: which experts a real model chose, so that speed can be measured with random weights.

It knows the trace and the model's shape; the runner takes ids and predictions from it instead of from its router.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import InputError

Ids = NDArray[np.int64]


class TraceRouting:
    """Decode steps of a trace, one after another, over and over; not thread-safe, owned by one runner.

    ``steps`` int64 [steps, layers, k]. Predictions name each expert of the next layer with probability ``recall`` and
    fill up with wrong ones, seeded, since a trace does not hold what a lookahead would have said.
    """

    def __init__(self, steps: Ids, num_experts: int, recall: float, seed: int = 0) -> None:
        if not 0 <= recall <= 1:
            raise InputError(f"recall is {recall}, expected 0 to 1")
        self._steps = steps
        self._num_experts = num_experts
        self._recall = recall
        self._rng = np.random.default_rng(seed)
        self._step = -1
        self._scores: dict[int, NDArray[np.float32]] = {}

    def begin_step(self, num_rows: int) -> None:
        """Go on to the next step; several rows take several steps of the trace."""
        self._rows = [(self._step + 1 + row) % len(self._steps) for row in range(num_rows)]
        self._step = self._rows[-1]
        self._scores.clear()

    def ids(self, place: int) -> Ids:
        """What the router of MoE layer number ``place`` chose: [T,k]."""
        return self._steps[self._rows, place]

    def scores(self, place: int) -> NDArray[np.float32]:
        """A prediction [T,E] for MoE layer number ``place``, the same however often it is asked for in a step."""
        if place not in self._scores:
            ids = self.ids(place)
            scores = self._rng.random((len(ids), self._num_experts), np.float32) * np.float32(1e-3)
            for row, chosen in enumerate(ids):
                named = chosen[self._rng.random(len(chosen)) < self._recall]
                others = np.setdiff1d(np.arange(self._num_experts), chosen)
                wrong = self._rng.choice(others, len(chosen) - len(named), replace=False)
                order = self._rng.permutation(np.concatenate([named, wrong]))
                scores[row, order] = np.linspace(0.3, 0.05, len(order), dtype=np.float32)
            self._scores[place] = scores
        return self._scores[place]
