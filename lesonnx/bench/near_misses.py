"""What near misses would add to eviction: the `les` policy, which also learns from experts that were almost chosen.

An experiment for ``bench cache``; no host has it (see docs/experiments.md). Float scores make it unfit for three
languages that must agree bit by bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lesonnx.bench.trace import NearMisses
from lesonnx.eviction import LEARNED_ROWS, ONE, LesPolicy
from lesonnx.schedule import LayerShape, SchedulerConfig
from lesonnx.scheduler import Scheduler


class NearMissPolicy(LesPolicy):
    """`les` whose averages move towards ``near_weight * closeness`` for near misses. Not thread-safe."""

    def __init__(self, num_experts: Sequence[int], num_experts_per_tok: Sequence[int]) -> None:
        super().__init__(num_experts, num_experts_per_tok)
        self._near: list[deque[dict[int, int]]] = [deque() for _ in num_experts]

    def expect(self, layer: int, rows: Sequence[NearMisses], near_weight: float) -> None:
        """The near misses of the rows that the layer learns next."""
        self._near[layer].extend(
            {expert: round(near_weight * closeness * ONE) for expert, closeness in row.items()}
            for row in rows[-LEARNED_ROWS:]
        )

    def _targets(self, layer: int, row: Sequence[int]) -> npt.NDArray[np.int16]:
        targets = super()._targets(layer, row)
        for expert, target in self._near[layer].popleft().items():
            targets[expert] = target
        return targets


class NearMissScheduler(Scheduler):
    """The real scheduler with that policy; of steps without drafts."""

    def __init__(self, layers: Sequence[LayerShape], budget_bytes: int, config: SchedulerConfig) -> None:
        super().__init__(layers, budget_bytes, config)
        self._near_policy = NearMissPolicy(
            [shape.num_experts for shape in layers], [shape.num_experts_per_tok for shape in layers]
        )
        self._residency.policy = self._near_policy

    def expect(self, near: Sequence[Sequence[NearMisses]], near_weight: float) -> None:
        """The near misses of the coming step, by layer and row."""
        for layer, rows in enumerate(near):
            self._near_policy.expect(layer, rows, near_weight)
