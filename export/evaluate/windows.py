"""Perplexity of a model on token ids, and its KL and agreement with a reference, window by window.

It knows loaded models and token ids, not files, tasks or intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import InputError, ToleranceError
from lesonnx.model import Model
from lesonnx.runner import Logits
from lesonnx_export.compare import ROWS_AT_ONCE, log_softmax
from lesonnx_export.reference import WINDOW_TOKENS, cut_windows

Sums = NDArray[np.float64]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class WindowSums:
    """What was added up over each of W windows; every window began with an empty context.

    Over its ``tokens``, ``kl`` (KL(reference || bundle) in nats) and ``agreed`` (the likeliest next token is the same)
    are sums. Over those that have a token before them, ``predicted``, ``loss`` and ``reference_loss`` are sums of
    -log p in nats. What a reference is needed for is zero without one.
    """

    tokens: Sums
    predicted: Sums
    loss: Sums
    reference_loss: Sums
    kl: Sums
    agreed: Sums
    has_reference: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of all windows."""
        return int(self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean loss of the bundle; NaN where no token has one before it."""
        return _perplexity(self.loss, self.predicted)

    @property
    def reference_perplexity(self) -> float | None:
        """The reference's."""
        return _perplexity(self.reference_loss, self.predicted) if self.has_reference else None

    @property
    def mean_kl(self) -> float | None:
        """Nats a token."""
        return float(self.kl.sum() / self.tokens.sum()) if self.has_reference else None

    @property
    def top1_agreement(self) -> float | None:
        """The share of tokens after which both find the same one likeliest."""
        return float(self.agreed.sum() / self.tokens.sum()) if self.has_reference else None


def _perplexity(loss: Sums, predicted: Sums) -> float:
    count = float(predicted.sum())
    return float(np.exp(loss.sum() / count)) if count else float("nan")


def kl_to_reference(
    bundle: Model, reference: Model, token_ids: Sequence[int], progress: Progress = lambda num_tokens: None
) -> WindowSums:
    """Compare two loaded models of one vocabulary on token ids, in windows of 512 tokens with an empty context each.

    ``progress`` is called with the tokens done. InputError where there are no ids or the vocabularies differ in size,
    ToleranceError where logits are not finite. Both models lose the sequence that they were at.
    """
    ours, theirs = bundle.bundle.manifest.model, reference.bundle.manifest.model
    context = min(ours.max_position_embeddings, theirs.max_position_embeddings)
    return sum_windows(bundle, reference, cut_windows(token_ids, min(WINDOW_TOKENS, context)), progress)


def sum_windows(
    bundle: Model,
    reference: Model | None,
    windows: Sequence[Sequence[int]],
    progress: Progress = lambda num_tokens: None,
) -> WindowSums:
    """`kl_to_reference` on windows as they are, each within the models' contexts; also without a reference."""
    if not windows:
        raise InputError("there are no tokens to compare on")
    check_vocabularies(bundle, reference)
    rows = []
    for window in windows:
        rows.append(_sum_window(bundle, reference, list(window)))
        progress(len(window))
    tokens, predicted, loss, reference_loss, kl, agreed = np.array(rows, np.float64).T
    return WindowSums(tokens, predicted, loss, reference_loss, kl, agreed, reference is not None)


def check_vocabularies(bundle: Model, reference: Model | None) -> None:
    """InputError where the logits of two models are not of the same tokens."""
    if reference is None:
        return
    if reference is bundle:
        raise ValueError("one loaded model cannot be at two places: load the bundle twice")
    ours, theirs = bundle.bundle, reference.bundle
    sizes = [each.manifest.model.vocab_size for each in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise InputError(f"{theirs.directory}: has a vocabulary of {sizes[1]}, that of {ours.directory} is {sizes[0]}")


def _sum_window(bundle: Model, reference: Model | None, ids: list[int]) -> tuple[float, ...]:
    loss = reference_loss = kl = agreed = 0.0
    bundle.runner.rewind(0)
    if reference is not None:
        reference.runner.rewind(0)
    # No more logits than a chunk's: a vocabulary of 150,000 makes 300 MB of 512 rows.
    chunk = bundle.runner.prefill_chunk_tokens
    for start in range(0, len(ids), chunk):
        piece = ids[start : start + chunk]
        wanted = list(range(len(piece)))
        following = np.array(ids[start + 1 : start + 1 + len(piece)], np.int64)
        found = bundle.runner.step(piece, wanted)
        expected = reference.runner.step(piece, wanted) if reference is not None else None
        for log_q, log_p, next_ids in _log_probabilities(found, expected, following):
            place = np.arange(len(next_ids))
            loss -= float(log_q[place, next_ids].sum())
            if log_p is not None:
                reference_loss -= float(log_p[place, next_ids].sum())
                # A row's KL is at least zero; what rounding leaves below is cut off.
                kl += float(np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=1), 0.0).sum())
                agreed += float((log_p.argmax(axis=1) == log_q.argmax(axis=1)).sum())
    return len(ids), len(ids) - 1, loss, reference_loss, kl, agreed


def _log_probabilities(
    found: Logits, expected: Logits | None, following: NDArray[np.int64]
) -> Iterator[tuple[Sums, Sums | None, NDArray[np.int64]]]:
    """A few rows at a time: both models' log-probabilities [n,V] in float64, and the tokens [m <= n] that follow."""
    for start in range(0, len(found), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        log_q = log_softmax(finite(found[rows], "the bundle"))
        log_p = log_softmax(finite(expected[rows], "the reference")) if expected is not None else None
        yield log_q, log_p, following[rows]


def finite(logits: Logits, whose: str) -> Sums:
    """Logits in float64; ToleranceError where one is not finite: no figure would say anything."""
    if not np.isfinite(logits).all():
        raise ToleranceError(f"{whose} gives logits that are not finite")
    return logits.astype(np.float64)
