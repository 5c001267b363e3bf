"""Log-probabilities of an item's choices after its context, by a loaded model; many items from one run of a passage.

It knows tokens, not texts or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lesonnx.model import Model
from lesonnx.runner import Logits, Runner
from lesonnx_export.compare import ROWS_AT_ONCE
from lesonnx_export.evaluate.places import PlacedItem, PlacedPassage
from lesonnx_export.evaluate.windows import finite

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """What a model answered to n items: whether it was right, by the field's two measures; bool [n] each.

    ``acc``: the right choice has the largest sum of log-probabilities. ``acc_norm``: the largest one by its bytes.
    """

    acc: NDArray[np.bool_]
    acc_norm: NDArray[np.bool_]

    @staticmethod
    def joined(parts: Sequence[Answers]) -> Answers:
        """The answers of several passages as one."""
        if not parts:
            return Answers(np.zeros(0, np.bool_), np.zeros(0, np.bool_))
        return Answers(np.concatenate([part.acc for part in parts]), np.concatenate([part.acc_norm for part in parts]))


def answer(model: Model, passage: PlacedPassage) -> Answers:
    """Answer every item of a passage. The model loses the sequence that it was at."""
    scores = score(model, passage)
    found = np.zeros((2, len(passage.items)), np.bool_)
    for place, (item, sums) in enumerate(zip(passage.items, scores, strict=True)):
        found[0, place] = sums.argmax() == item.answer
        found[1, place] = (sums / np.array(item.choice_bytes)).argmax() == item.answer
    return Answers(found[0], found[1])


def score(model: Model, passage: PlacedPassage) -> list[Scores]:
    """For every item the log-probability of each choice after its context, in nats: the sum over the choice's tokens.

    The passage runs once. It gives every choice's first token; choices of several tokens run behind their context then.
    """
    scores = _first_tokens(model.runner, passage)
    longer = [place for place, item in enumerate(passage.items) if any(len(choice) > 1 for choice in item.choices)]
    if longer:
        _later_tokens(model, passage, longer, scores)
    return scores


def _first_tokens(runner: Runner, passage: PlacedPassage) -> list[Scores]:
    """The log-probability of each choice's first token."""
    ids, items = passage.token_ids, passage.items
    rows = sorted({item.num_context - 1 for item in items})
    by_row: dict[int, list[int]] = {row: [] for row in rows}
    for place, item in enumerate(items):
        by_row[item.num_context - 1].append(place)
    scores: list[Scores] = [np.empty(0)] * len(items)
    runner.rewind(0)
    chunk = runner.prefill_chunk_tokens
    for start in range(0, len(ids), chunk):
        piece = ids[start : start + chunk]
        wanted = [row for row in rows if start <= row < start + len(piece)]
        logits = runner.step(piece, [row - start for row in wanted])
        sums = _log_sums(logits)
        for row, values, log_sum in zip(wanted, logits, sums, strict=True):
            for place in by_row[row]:
                first = [choice[0] for choice in items[place].choices]
                scores[place] = values[first].astype(np.float64) - log_sum
    return scores


def _later_tokens(model: Model, passage: PlacedPassage, places: Sequence[int], scores: list[Scores]) -> None:
    """Add the other tokens of choices that have several.

    A cache of attention goes back to any token, so items are taken from the passage's end: nothing runs twice. States
    of fixed shape go back to the last step's beginning only, so items are taken from the passage's beginning.
    """
    sequence = _Sequence(model.runner, passage.token_ids)
    goes_back = all(state.is_attention for state in model.bundle.manifest.states)
    order = sorted(places, key=lambda place: passage.items[place].num_context, reverse=goes_back)
    for place in order:
        item = passage.items[place]
        for number, choice in enumerate(item.choices):
            if len(choice) > 1:
                scores[place][number] += sequence.log_probability(item, choice)


class _Sequence:
    """A runner somewhere along a passage that it has run, with or without a choice behind."""

    def __init__(self, runner: Runner, token_ids: list[int]) -> None:
        self._runner = runner
        self._ids = token_ids
        self._num_own = runner.num_tokens  # how many leading tokens of the runner's sequence are the passage's

    def log_probability(self, item: PlacedItem, choice: list[int]) -> float:
        """Of all of a choice's tokens but the first, together."""
        self._go_to(item.num_context)
        total = 0.0
        chunk = self._runner.prefill_chunk_tokens
        for start in range(0, len(choice) - 1, chunk):
            piece = choice[start : min(start + chunk, len(choice) - 1)]
            logits = self._runner.step(piece, list(range(len(piece))))
            following = np.array(choice[start + 1 : start + 1 + len(piece)])
            values = logits[np.arange(len(piece)), following].astype(np.float64)
            total += float((values - _log_sums(logits)).sum())
        return total

    def _go_to(self, num_tokens: int) -> None:
        """Make the runner's sequence the passage's first tokens."""
        reached = self._runner.states.reachable(min(num_tokens, self._num_own))
        self._runner.rewind(reached)
        chunk = self._runner.prefill_chunk_tokens
        for start in range(reached, num_tokens, chunk):
            self._runner.step(self._ids[start : min(start + chunk, num_tokens)], [])
        self._num_own = num_tokens


def _log_sums(logits: Logits) -> Scores:
    """log(sum(exp)) of rows [n,V], in float64 a few rows at a time."""
    sums = np.empty(len(logits))
    for start in range(0, len(logits), ROWS_AT_ONCE):
        rows = finite(logits[start : start + ROWS_AT_ONCE], "a model")
        highest = rows.max(axis=1)
        sums[start : start + ROWS_AT_ONCE] = highest + np.log(np.exp(rows - highest[:, None]).sum(axis=1))
    return sums
