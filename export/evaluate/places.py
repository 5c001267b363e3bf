"""Where a task's items stand among the tokens of their passages, and what tokens their choices are.

It knows a tokenizer, no model.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

from lesonnx.tokenizer import Tokenizer
from lesonnx_export.evaluate.tasks import Passage

# A choice's tokens depend on what is right before it: this much of it, from a space on.
TAIL_CHARS = 16
_SPACE = re.compile(r"\s")
# How many tokens before an item must be those of the tail alone, so that both agree where the item begins.
AGREEING_TOKENS = 2

INSIDE_TOKEN = "inside a token"
BEYOND_CONTEXT = "beyond the context"
AT_BEGINNING = "without a token before"


@dataclass(frozen=True)
class PlacedItem:
    """An item behind the first ``num_context`` tokens of its passage; its choices as tokens, and their bytes."""

    num_context: int
    choices: list[list[int]]
    choice_bytes: list[int]
    answer: int


@dataclass(frozen=True)
class PlacedPassage:
    """The tokens of a passage up to its last item, its items in their order, and why others were left out."""

    token_ids: list[int]
    items: list[PlacedItem]
    skipped: Counter[str] = field(default_factory=Counter)


def place(passage: Passage, tokenizer: Tokenizer, max_tokens: int) -> PlacedPassage:
    """Tokenize a passage and its choices.

    White space before an item belongs to its choices, as elsewhere in the field: to most tokenizers a word begins with
    its space. An item whose place is no token's end is left out and counted; so is one beyond ``max_tokens`` with the
    longest of its choices, or with nothing before it.
    """
    text = passage.text
    ids, ends = tokenizer.encode_with_ends(text)
    # What the tokenizer says of ends may step back a little (bytes of one character).
    reached = list(accumulate(ends, max))
    starts = [len(text[: item.at].rstrip()) for item in passage.items]
    tails = [_tail(text, start) for start in starts]
    wanted: list[str] = []
    for item, start, tail in zip(passage.items, starts, tails, strict=True):
        space = text[start : item.at]
        wanted += [tail, *(tail + space + choice for choice in item.choices)]
    encoded = iter(tokenizer.encode_all(wanted))
    items: list[PlacedItem] = []
    skipped: Counter[str] = Counter()
    for item, start in zip(passage.items, starts, strict=True):
        before = next(encoded)
        choices = [next(encoded) for _ in item.choices]
        num_context = bisect_right(reached, start)
        tokens = [choice[len(before) :] for choice in choices]
        if num_context == 0:
            skipped[AT_BEGINNING] += 1
        elif not _ends_alike(ids[:num_context], before, start == 0) or not all(
            choice[: len(before)] == before and rest for choice, rest in zip(choices, tokens, strict=True)
        ):
            skipped[INSIDE_TOKEN] += 1
        elif num_context + max(map(len, tokens)) > max_tokens:
            skipped[BEYOND_CONTEXT] += 1
        else:
            # As written, without the space that sets a word apart: that is the tokenizer's affair.
            choice_bytes = [max(1, len(choice.lstrip().encode())) for choice in item.choices]
            items.append(PlacedItem(num_context, tokens, choice_bytes, item.answer))
    last = max((item.num_context for item in items), default=0)
    return PlacedPassage(ids[:last], items, skipped)


def _tail(text: str, end: int) -> str:
    """The text right before ``end``, from a white space on that is `TAIL_CHARS` away or more, or all of it."""
    start = end - TAIL_CHARS
    while start > 0 and not _SPACE.match(text[start]):
        start -= 1
    return text[max(start, 0) : end]


def _ends_alike(context: list[int], tail: list[int], tail_is_empty: bool) -> bool:
    """Whether the context's last tokens are the tail's, as far as its cut beginning cannot have made a difference."""
    if tail_is_empty:
        return True
    count = min(AGREEING_TOKENS, len(tail), len(context))
    return count > 0 and context[-count:] == tail[-count:]
