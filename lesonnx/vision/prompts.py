"""A prompt with pictures: its text or ids with what stands for each picture, the positions, and whose tokens are whose.

It knows the manifest's record and the tokenizer's interface, neither sessions nor pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lesonnx.errors import InputError
from lesonnx.manifest import AnyVision
from lesonnx.prompt import ImageRow, Prompt
from lesonnx.vision.cutting import View
from lesonnx.vision.rules import expand, positions

Views = Sequence[View]
# Where a bundle's chat template does not say what parts a picture from the text behind it.
SEPARATOR = "\n"
Encode = Callable[[str], list[int]]


def with_placeholders(text: str, num_pictures: int, vision: AnyVision) -> str:
    """The text with a placeholder a picture in front, each followed by the separator, where it has none of its own."""
    if vision.texts.placeholder in text:
        return text
    separator = SEPARATOR if vision.texts.separator is None else vision.texts.separator
    return (vision.texts.picture + separator) * num_pictures + text


def expand_ids(token_ids: Sequence[int], pictures: Sequence[Views], vision: AnyVision, encode: Encode) -> list[int]:
    """Token ids that have one image token a picture, with all that stands for it in its place.

    ``encode`` gives the ids of a text without special tokens around it. InputError for another number of them.
    """
    found = sum(token == vision.tokens.image for token in token_ids)
    if found != len(pictures):
        given = f"{len(pictures)} picture{'s' * (len(pictures) != 1)}"
        raise InputError(
            f"{given}, but the prompt's token ids have {found or 'no'} place{'s' * (found != 1)} for pictures: put"
            f" token {vision.tokens.image} ({vision.texts.placeholder}) where each belongs, or give text instead of ids"
        )
    ids: list[int] = []
    text, number = "", 0
    for token in token_ids:
        if token != vision.tokens.image:
            ids.append(token)
            continue
        # Pictures are numbered in the whole prompt: what one adds to those before it is its own.
        number += 1
        longer = expand(vision.texts.placeholder * number, pictures[:number], vision)
        ids += encode(longer[len(text) :])
        text = longer
    return ids


def place(token_ids: Sequence[int], pictures: Sequence[Views], keys: Sequence[str], vision: AnyVision) -> Prompt:
    """The prompt of expanded ids; ``keys`` says which picture each is. InputError where ids and pictures do not fit."""
    rows = [
        ImageRow(key, row)
        for views, key in zip(pictures, keys, strict=True)
        for row in range(sum(view.num_tokens(vision) for view in views))
    ]
    where = positions(token_ids, pictures, vision)
    places = np.flatnonzero(np.asarray(token_ids, np.int64) == vision.tokens.image).tolist()
    return Prompt(list(token_ids), where, dict(zip(places, rows, strict=True)))
