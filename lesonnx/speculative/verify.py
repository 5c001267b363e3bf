"""Which drafted tokens stay, and the token after them: the output is the target's own, whoever drafted.

It knows logits and draws, neither models nor time. Every host gives the same tokens; ``docs/speculation.md`` states the
arithmetic, ``tests/data/speculation.json`` has vectors. Sources: Leviathan, Kalman and Matias, "Fast Inference from
Transformers via Speculative Decoding", 2023; Chen et al., "Accelerating Large Language Model Decoding with Speculative
Sampling", 2023.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from lesonnx.sampling import Logits, Sampler
from lesonnx.speculative.drafter import Distribution, Draft, draw


@dataclass(frozen=True)
class Verified:
    """The tokens that come next, at least one. The first ``accepted`` of them are drafts, which the target has run."""

    token_ids: list[int]
    accepted: int


def verify(draft: Draft, logits: Logits, sampler: Sampler, ends: Collection[int] = ()) -> Verified:
    """Verify a draft's first k tokens by float32 logits [k+1,V]: row j is the target's after j of them.

    The sampler's penalty sees a row's accepted drafts, and is as before at the end: the caller accepts what stays, as
    after ``Sampler.sample``. A token of ``ends`` is the last in any case: nothing is drawn behind it.

    Drafts that were chosen, not drawn: each row is sampled as without drafts, and a draft stays where it is that token.
    So tokens are those of plain decoding, draw for draw. Drafts drawn from q: accepted with min(1, p/q), and in place
    of the first rejected one a token is drawn from max(0, p - q); so tokens have the target's distribution p.
    """
    accepted: list[int] = []
    try:
        return _walk(draft, logits, sampler, ends, accepted)
    finally:
        for token in accepted:
            sampler.retract(token)


def _walk(draft: Draft, logits: Logits, sampler: Sampler, ends: Collection[int], accepted: list[int]) -> Verified:
    """Row by row; ``accepted`` gets what the sampler has accepted."""
    for row, drafted in enumerate(draft.token_ids[: len(logits) - 1]):
        if draft.probabilities is None or sampler.options.temperature == 0:
            token = sampler.sample(logits[row])
        else:
            token = _accept_or_redraw(drafted, sampler.distribution(logits[row]), draft.probabilities[row], sampler)
        if token != drafted:
            return Verified([*accepted, token], row)
        if token in ends:
            return Verified([*accepted, token], row + 1)
        sampler.accept(token)
        accepted.append(token)
    return Verified([*accepted, sampler.sample(logits[-1])], len(accepted))


def _accept_or_redraw(drafted: int, target: Distribution, proposal: Distribution, sampler: Sampler) -> int:
    """The drafted token with min(1, p/q), else one of the residual, which the drafted one is not in."""
    p = _probability(target, drafted)
    q = _probability(proposal, drafted)
    if sampler.rng.uniform() * q < p:
        return drafted
    ids, probabilities = target
    taken = dict(zip(proposal[0].tolist(), proposal[1].tolist(), strict=True))
    less = np.array([taken.get(token, 0.0) for token in ids.tolist()])
    residual = np.maximum(probabilities - less, 0.0)
    # What is 0 is cut off, as the rejected token is (p < q): where rounding leaves none, the last one is taken.
    kept = np.flatnonzero(residual > 0)
    if not len(kept):
        # p and q are the same but for rounding: one draw all the same, from p without the rejected token.
        kept, residual = np.flatnonzero(ids != drafted), probabilities
    return draw((ids[kept], residual[kept]), sampler.rng)


def _probability(distribution: Distribution, token: int) -> float:
    """The token's probability; 0 where it is not there."""
    ids, probabilities = distribution
    place = np.flatnonzero(ids == token)
    return float(probabilities[place[0]]) if len(place) else 0.0
