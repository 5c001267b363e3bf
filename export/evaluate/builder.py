"""Builds next-word tasks from a text: at places of its passages the true next word among others as frequent in it.

It knows texts and, where it is to keep to words of one token, a tokenizer.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass

from lesonnx.errors import InputError
from lesonnx.tokenizer import Tokenizer
from lesonnx_export.evaluate.overlap import Calibration
from lesonnx_export.evaluate.tasks import Item, Passage

# A word between a space and what is no part of it.
WORD = re.compile(r"(?<=\S) ([^\W\d_]+)(?![\w'\u2019-])")
# Distractors are at most this many ranks away in the order of frequency.
NEARBY_RANKS = 16
# A word seen less often is no choice: a model could know it as odd without understanding the passage.
LEAST_COUNT = 3
# What an item has before it, at least.
CONTEXT_CHARS = 200


@dataclass(frozen=True)
class TaskOptions:
    """How a task is built; the same options and text give the same task."""

    items: int = 30_000
    items_per_passage: int = 100
    choices: int = 4
    passage_chars: int = 1000
    seed: int = 0


@dataclass(frozen=True)
class BuiltTask:
    """Passages in the text's order, and how many were left out for being in the calibration text."""

    passages: list[Passage]
    overlapping: int


def build_task(
    name: str, text: str, options: TaskOptions, calibration: Calibration, tokenizer: Tokenizer | None = None
) -> BuiltTask:
    """Build a task of a text; with a tokenizer all its choices are words of one token.

    Passages are drawn from all of the text until there are items enough. InputError, with what there is, where the text
    does not give as many.
    """
    others = _Distractors(text, options.choices - 1, tokenizer)
    rng = random.Random(options.seed)
    starts = _passage_starts(text, options.passage_chars)
    order = list(range(len(starts) - 1))
    rng.shuffle(order)
    built: dict[int, Passage] = {}
    overlapping = num_items = 0
    for place in order:
        if num_items == options.items:
            break
        passage = text[starts[place] : starts[place + 1]].rstrip()
        if calibration.overlaps(passage):
            overlapping += 1
            continue
        most = min(options.items_per_passage, options.items - num_items)
        items = _items(passage, most, others, rng)
        if items:
            built[place] = Passage(id=f"{name}-{starts[place]}", text=passage, items=items)
            num_items += len(items)
    if num_items < options.items:
        raise InputError(
            f"{name}: too short a text: it gives {num_items:,} items, {options.items:,} are asked for"
            + (f"; {overlapping} passages are in the calibration text" if overlapping else "")
        )
    return BuiltTask([built[place] for place in sorted(built)], overlapping)


class _Distractors:
    """The words of a text that can be choices, and for each those about as frequent."""

    def __init__(self, text: str, count: int, tokenizer: Tokenizer | None) -> None:
        counts = Counter(match[1] for match in WORD.finditer(text))
        words = [word for word, number in counts.items() if number >= LEAST_COUNT]
        if tokenizer is not None:
            words = _of_one_token(words, tokenizer)
        self._count = count
        self._ranked: list[list[str]] = []
        self._rank: dict[str, tuple[int, int]] = {}
        # A capital letter would give an answer away.
        for capital in (False, True):
            ranked = [word for word in words if word[0].isupper() == capital]
            ranked.sort(key=lambda word: (-counts[word], word))
            if len(ranked) > count:
                self._rank |= {word: (len(self._ranked), rank) for rank, word in enumerate(ranked)}
                self._ranked.append(ranked)

    def __contains__(self, word: str) -> bool:
        return word in self._rank

    def draw(self, word: str, rng: random.Random) -> list[str]:
        """Other words, near in frequency; of other spelling even without regard to case."""
        kind, rank = self._rank[word]
        ranked = self._ranked[kind]
        reach = max(NEARBY_RANKS, self._count)
        near = ranked[max(0, rank - reach) : rank] + ranked[rank + 1 : rank + 1 + reach]
        return rng.sample(near, self._count)


def _of_one_token(words: list[str], tokenizer: Tokenizer) -> list[str]:
    before, *found = tokenizer.encode_all(["a", *(f"a {word}" for word in words)])
    return [word for word, ids in zip(words, found, strict=True) if len(ids) == len(before) + 1]


def _passage_starts(text: str, passage_chars: int) -> list[int]:
    """Where passages begin, and the end of the last: at lines' ends where there is one in the last quarter."""
    starts = [0]
    while len(text) - starts[-1] >= passage_chars:
        end = starts[-1] + passage_chars
        cut = text.rfind("\n", end - passage_chars // 4, end)
        starts.append(cut + 1 if cut >= 0 else end)
    return starts


def _items(passage: str, most: int, others: _Distractors, rng: random.Random) -> list[Item]:
    found = [match for match in WORD.finditer(passage, CONTEXT_CHARS) if match[1] in others]
    items = []
    for match in sorted(rng.sample(found, min(most, len(found))), key=lambda match: match.start()):
        choices = [f" {word}" for word in others.draw(match[1], rng)]
        answer = rng.randrange(len(choices) + 1)
        choices.insert(answer, match[0])
        items.append(Item(at=match.start(), choices=choices, answer=answer))
    return items
