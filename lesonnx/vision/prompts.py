"""A prompt with pictures: its text or ids with what stands for each picture, the positions, and whose tokens are whose.

It knows the manifest's record and the tokenizer's interface, neither sessions nor pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
        raise InputError(
            f"the prompt's ids hold the image token {vision.tokens.image} {found} times,"
            f" expected once a picture: {len(pictures)}"
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


def split_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages for a chat template, without the pictures in them, and these, in order.

    A picture is an item ``{"type": "image", "image": source}`` (or ``"path"``) of a content that is a list. InputError
    for an item that has none.
    """
    plain, sources = [], []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list | tuple):
            plain.append(dict(message))
            continue
        items = []
        for item in content:
            if not isinstance(item, Mapping) or item.get("type") != "image":
                items.append(item)
                continue
            source = next((item[name] for name in ("image", "path") if item.get(name) is not None), None)
            if source is None:
                given = ", ".join(sorted(set(map(str, item)) - {"type"})) or "nothing"
                raise InputError(f"a message has an image with {given}; expected image: a path, bytes or pixels")
            sources.append(source)
            items.append({"type": "image"})
        plain.append({**message, "content": items})
    return plain, sources
