"""The text that stands for pictures in a prompt: each placeholder becomes marks and one placeholder an image token.

Text in, text out: it knows no token ids. Every runtime has the same function, held to this one by
``tests/data/vision.json``.
"""

from __future__ import annotations

from collections.abc import Sequence

from lesonnx.errors import InputError
from lesonnx.manifest import AnyVision, Vision
from lesonnx.vision.cutting import View


def expand(text: str, pictures: Sequence[Sequence[View]], vision: Vision) -> str:
    """A prompt with one placeholder a picture, in order, as it is tokenized; ``pictures`` has the views of each.

    InputError unless there are as many placeholders as pictures.
    """
    between = split_at_pictures(text, len(pictures), vision)
    expanded = [between[0]]
    for index, (picture, following) in enumerate(zip(pictures, between[1:], strict=True)):
        expanded += [_expansion(index, picture, vision), following]
    return "".join(expanded)


def split_at_pictures(text: str, num_pictures: int, vision: AnyVision) -> list[str]:
    """The text before, between and after a prompt's placeholders; InputError unless there is one a picture."""
    between = text.split(vision.texts.placeholder)
    found = len(between) - 1
    if found != num_pictures:
        raise InputError(
            f"the prompt has {found} placeholder{'s' * (found != 1)} {vision.texts.placeholder!r} for "
            f"{num_pictures} picture{'s' * (num_pictures != 1)}, expected one a picture"
        )
    return between


def _expansion(index: int, picture: Sequence[View], vision: Vision) -> str:
    """What stands for the prompt's picture ``index``, from 0."""
    texts = vision.texts
    overview, *sliced = picture
    number = "" if texts.id_start is None or texts.id_end is None else f"{texts.id_start}{index}{texts.id_end}"
    parts = [number, texts.image_start, texts.placeholder * overview.num_tokens(vision), texts.image_end]
    for view in sliced:
        rows, columns = view.grid
        tokens_of_slice = texts.placeholder * (view.num_tokens(vision) // view.num_crops)
        row = (texts.slice_start + tokens_of_slice + texts.slice_end) * columns
        parts.append(texts.row_end.join([row] * rows))
    return "".join(parts)
