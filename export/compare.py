"""How far logits and greedy tokens are from a reference: pure functions over arrays.

It knows no bundle, file or model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import ToleranceError

Logits = NDArray[np.float32]
# Rows whose softmax is held in float64 at once: a few megabytes with a vocabulary of 150,000.
ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class Comparison:
    """A bundle against its reference.

    ``max_abs_diff`` is the largest absolute difference of any logit; ``kl`` the mean over tokens of
    KL(reference || bundle) in nats; ``top1_agreement`` the share of tokens whose largest logit is the same one.
    ``greedy_match`` says whether all ``greedy_tokens`` of the reference's greedy continuation came out alike, and
    ``greedy_matched_tokens`` how many did before the first that differs.
    """

    tokens: int
    max_abs_diff: float
    kl: float
    top1_agreement: float
    greedy_match: bool
    greedy_tokens: int
    greedy_matched_tokens: int


@dataclass(frozen=True)
class CaseComparison(Comparison):
    """A prompt with pictures against what was recorded of it.

    ``features_max_abs_diff`` is the largest difference of what the eyes gave for its ``image_tokens``;
    ``position_ids_match`` says whether all positions are those of the reference.
    """

    name: str
    image_tokens: int
    features_max_abs_diff: float
    position_ids_match: bool


@dataclass
class LogitsTally:
    """Adds up comparisons of logits, window after window, so that a long text needs no room for all its logits."""

    tokens: int = 0
    max_abs_diff: float = 0.0
    _kl_sum: float = field(default=0.0, repr=False)
    _agreed: int = field(default=0, repr=False)

    def add(self, reference: Logits, found: Logits) -> None:
        """Compare logits [n,V]; ToleranceError where the bundle's are not finite: no figure would say anything."""
        if reference.shape != found.shape:
            raise ValueError(f"logits {found.shape} are compared with a reference {reference.shape}")
        if not np.isfinite(found).all():
            row = int(np.flatnonzero(~np.isfinite(found).all(axis=1))[0])
            raise ToleranceError(f"the bundle's logits at position {self.tokens + row} are not finite")
        for start in range(0, len(found), ROWS_AT_ONCE):
            ours = found[start : start + ROWS_AT_ONCE].astype(np.float64)
            theirs = reference[start : start + ROWS_AT_ONCE].astype(np.float64)
            self.max_abs_diff = max(self.max_abs_diff, float(np.abs(ours - theirs).max()))
            self._kl_sum += float(kl_divergence(theirs, ours).sum())
            self._agreed += int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
        self.tokens += len(found)

    @property
    def kl(self) -> float:
        """Mean KL(reference || bundle) per token."""
        return self._kl_sum / max(self.tokens, 1)

    @property
    def top1_agreement(self) -> float:
        """The share of tokens whose most probable continuation is the same."""
        return self._agreed / max(self.tokens, 1)

    def with_greedy(self, reference: Sequence[int], found: Sequence[int]) -> Comparison:
        """The comparison as a whole: what was added up, and two greedy continuations."""
        matched = matching_tokens(reference, found)
        return Comparison(
            tokens=self.tokens,
            max_abs_diff=self.max_abs_diff,
            kl=self.kl,
            top1_agreement=self.top1_agreement,
            greedy_match=matched == len(reference) == len(found),
            greedy_tokens=len(reference),
            greedy_matched_tokens=matched,
        )


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


def kl_divergence(reference: NDArray[np.float64], found: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL(softmax(reference) || softmax(found)) in nats over the last axis; rounding below zero is cut off."""
    log_p, log_q = log_softmax(reference), log_softmax(found)
    divergence: NDArray[np.float64] = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=-1), 0.0)
    return divergence


def matching_tokens(reference: Sequence[int], found: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    count = 0
    for left, right in zip(reference, found, strict=False):
        if left != right:
            break
        count += 1
    return count


def judge(comparison: Comparison, tolerance: float, max_kl: float | None = None) -> str | None:
    """Why a comparison does not pass, in one line; None where it does.

    Without ``max_kl`` the logits must agree within ``tolerance`` and the greedy tokens exactly. With it, KL alone is
    judged: a quantized bundle is another model, whose logits and text may differ.
    """
    if max_kl is not None:
        if comparison.kl <= max_kl:
            return None
        return f"KL is {comparison.kl:.6g} per token over {comparison.tokens} tokens, at most {max_kl:g} is allowed"
    if not comparison.max_abs_diff <= tolerance:
        return (
            f"logits differ by up to {comparison.max_abs_diff:.6g}, the tolerance is {tolerance:g}"
            " (judge a quantized bundle with --max-kl)"
        )
    if not comparison.greedy_match:
        return (
            f"greedy tokens differ from number {comparison.greedy_matched_tokens + 1} of {comparison.greedy_tokens} on,"
            f" logits by up to {comparison.max_abs_diff:.6g}"
        )
    return None


def judge_case(case: CaseComparison, tolerance: float, max_kl: float | None = None) -> str | None:
    """Why a prompt with pictures does not pass, in one line; None where it does. Positions must always be equal."""
    if not case.position_ids_match:
        return f"{case.name}: position_ids differ from the reference's"
    if max_kl is None and not case.features_max_abs_diff <= tolerance:
        return f"{case.name}: image features differ by up to {case.features_max_abs_diff:.6g}, at most {tolerance:g}"
    reason = judge(case, tolerance, max_kl)
    return None if reason is None else f"{case.name}: {reason}"


def largest_difference(reference: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """The largest absolute difference of two arrays of one shape; ToleranceError where what was found is not finite."""
    if reference.shape != found.shape:
        raise ValueError(f"an array {found.shape} is compared with a reference {reference.shape}")
    if not np.isfinite(found).all():
        raise ToleranceError("the bundle's image features are not finite")
    return float(np.abs(reference.astype(np.float64) - found).max(initial=0.0))
