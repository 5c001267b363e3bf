"""What a drafter is: it proposes tokens that may come next; the target runs them in one pass and keeps the right ones.

It knows tokens, not how they are verified, and nothing of what a draft costs the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lesonnx.eviction import ONE
from lesonnx.sampling import PCG_STREAM, Ids, Logits, Pcg32, Sampler, Weights
from lesonnx.step_states import REWINDABLE_TOKENS

MAX_DRAFT_TOKENS = REWINDABLE_TOKENS - 1
"""The token before the drafts runs in the same pass, of which every row can be gone back to."""
DRAFT_STREAM = PCG_STREAM + 1
"""Drafters draw from a stream of their own: the target's draws do not depend on who drafts."""

Distribution = tuple[Ids, Weights]
"""Ids int64 [n] and their probabilities float64 [n], as `Sampler.distribution` gives them."""


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next, in order; perhaps none.

    ``probabilities`` has for each token what it was drawn from; None where tokens were not drawn but chosen.
    ``confidence`` has for each token how likely it is right if all before it are, of `ONE`; it may depend on the tokens
    before it, not on the token itself, and is calibrated by whoever uses it. None where the drafter has no opinion.
    """

    token_ids: Sequence[int]
    probabilities: Sequence[Distribution] | None = None
    confidence: Sequence[int] | None = None


NO_DRAFT = Draft(())


class Drafter(Protocol):
    """Proposes tokens for one sequence. Not thread-safe; owned by a speculator, which closes it.

    ``name``: what ``--draft`` calls it. ``max_tokens``: the most it proposes at once, at most `MAX_DRAFT_TOKENS`.
    ``is_free``: a proposal takes microseconds, so it is asked even where nothing will be drafted, to learn how often it
    is right; others are asked only where their drafts are expected to pay.
    ``layer_idxs``: the target's layers whose outputs it reads, in its order (-1 the embedding); empty for none.
    """

    name: str
    max_tokens: int
    is_free: bool
    layer_idxs: tuple[int, ...]

    def propose(self, token_ids: Sequence[int], max_tokens: int, sampler: DraftSampler) -> Draft:
        """Up to ``max_tokens`` tokens after ``token_ids``, the whole sequence, whose last one the target has not run.

        ``token_ids`` is the caller's and grows between two calls. A drafter with logits chooses by ``sampler``.
        """

    def observe(self, position: int, layer_outputs: NDArray[np.float32]) -> None:
        """The target has run T tokens from ``position`` on: outputs [T, n*H] of ``layer_idxs``, the caller's buffer.

        Of every step (a prompt's chunks, drafts that may be rejected); never called where ``layer_idxs`` is empty.
        """

    def rewind(self, num_tokens: int) -> None:
        """The target has gone back to its first ``num_tokens`` tokens; 0 before another sequence."""

    def close(self) -> None:
        """Free what it owns."""


class DraftSampler:
    """Chooses a draft's tokens as the target would: the same options and repetition penalty, random numbers apart.

    Use as a context manager around one proposal, so that what it accepted for the penalty is taken back at the end.
    Not thread-safe; holds the target's sampler, owns its random numbers.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._rng = Pcg32(sampler.options.seed, DRAFT_STREAM)
        self._accepted: list[int] = []

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn: then a draft has ``probabilities``."""
        return self._sampler.options.temperature > 0

    def choose(self, logits: Logits) -> tuple[int, Distribution | None]:
        """A token by float32 logits [V] of the place after those chosen so far, and what it was drawn from.

        Greedy draws nothing and gives None.
        """
        if not self.draws:
            token, distribution = self._sampler.sample(logits), None
        else:
            distribution = self._sampler.distribution(logits)
            token = draw(distribution, self._rng)
        self._sampler.accept(token)
        self._accepted.append(token)
        return token, distribution

    def __enter__(self) -> DraftSampler:
        return self

    def __exit__(self, *_: object) -> None:
        for token in self._accepted:
            self._sampler.retract(token)
        self._accepted.clear()


def draw(distribution: Distribution, rng: Pcg32) -> int:
    """One draw u: the first id whose running sum, in order, exceeds ``u * total``, ``total`` the sum over all.

    Where rounding leaves none, the last one.
    """
    ids, probabilities = distribution
    running = np.add.accumulate(probabilities)
    target = rng.uniform() * float(running[-1])
    return int(ids[min(int(np.searchsorted(running, target, side="right")), len(ids) - 1)])


def fixed_confidence(probability: float) -> int:
    """A probability as a confidence, of `ONE`: ``floor(p * ONE + 0.5)`` in float64, from 0 to ONE; 0 for NaN."""
    return 0 if math.isnan(probability) else max(0, min(ONE, math.floor(probability * ONE + 0.5)))
