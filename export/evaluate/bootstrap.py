"""Intervals by a paired bootstrap: whole groups (documents, passages) are drawn again, with all that is in them.

Pure functions over arrays. What lies in one group is not independent, so groups are drawn and not their items; what two
models did is drawn together, so what a passage makes hard for both leaves their difference alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Sums = NDArray[np.float64]
Interval = tuple[float, float]

RESAMPLES = 2000
SEED = 0
COVERED = 0.95
# Weights of some resamples at a time: 32 MB of int64.
_WEIGHTS_AT_ONCE = 4 << 20


@dataclass(frozen=True)
class Estimate:
    """A figure, and between what it lies with 95 % confidence: None with fewer than two groups."""

    value: float
    interval: Interval | None


def resampled_sums(groups: Sums, resamples: int = RESAMPLES, seed: int = SEED) -> Sums:
    """Sums over groups drawn with replacement: from [G,F] (F figures of G groups) to [resamples,F].

    Groups alike in every figure are drawn together, as often as a multinomial says: 150,000 items that are groups of
    their own are a handful of sorts.
    """
    kinds, counts = np.unique(groups, axis=0, return_counts=True)
    rng = np.random.default_rng(seed)
    at_once = max(1, _WEIGHTS_AT_ONCE // len(kinds))
    sums = [
        rng.multinomial(len(groups), counts / len(groups), size=min(at_once, resamples - start)) @ kinds
        for start in range(0, resamples, at_once)
    ]
    return np.concatenate(sums)


def estimate(strata: list[Sums], figure: Callable[[Sums], Sums]) -> Estimate:
    """A figure of sums with its interval, its mean over several strata (tasks) if there are several.

    ``strata``: sums [G,F] by group. ``figure`` makes the figure [n] of sums [n,F]. Each stratum is drawn for itself.
    """
    value = np.mean([figure(groups.sum(axis=0, keepdims=True))[0] for groups in strata])
    if any(len(groups) < 2 for groups in strata):
        return Estimate(float(value), None)
    drawn = np.mean([figure(resampled_sums(groups, seed=SEED + place)) for place, groups in enumerate(strata)], axis=0)
    low, high = np.quantile(drawn, [(1 - COVERED) / 2, (1 + COVERED) / 2])
    return Estimate(float(value), (float(low), float(high)))
