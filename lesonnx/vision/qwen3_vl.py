"""Qwen3-VL's rules: the size that a picture is seen in, its text in a prompt, and the positions of its tokens; pure.

As `cutting`, `placeholders` and `canvas` are MiniCPM-V's. float64, in the order that is written here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lesonnx.errors import InputError
from lesonnx.manifest import Qwen3VLVision
from lesonnx.vision.canvas import Integers
from lesonnx.vision.cutting import View
from lesonnx.vision.placeholders import split_at_pictures

# What the model's own processor refuses: pictures that are longer than wide by more.
MOST_ASPECT = 200


def views(height: int, width: int, vision: Qwen3VLVision) -> list[View]:
    """The one view of a picture: near its own size, of whole image tokens, inside the bounds on pixels.

    InputError for a picture without pixels, and for one that is more than 200 times as long as it is wide.
    """
    if height < 1 or width < 1:
        raise InputError(f"a picture has at least one pixel, found {width} x {height}")
    if max(height, width) / min(height, width) > MOST_ASPECT:
        raise InputError(f"a picture of {width} x {height} pixels is too narrow: expected at most {MOST_ASPECT} to 1")
    unit = vision.patch_size * vision.token_patches
    sides = round(height / unit) * unit, round(width / unit) * unit
    if sides[0] * sides[1] > vision.max_pixels:
        factor = math.sqrt(height * width / vision.max_pixels)
        sides = (
            max(unit, math.floor(height / factor / unit) * unit),
            max(unit, math.floor(width / factor / unit) * unit),
        )
    elif sides[0] * sides[1] < vision.min_pixels:
        factor = math.sqrt(vision.min_pixels / (height * width))
        sides = math.ceil(height * factor / unit) * unit, math.ceil(width * factor / unit) * unit
    return [View(sides, (1, 1))]


def working_bytes(view: View, vision: Qwen3VLVision) -> int:
    """What the tower takes for a picture in this view: in proportion to its pixels, the record's being for the most."""
    height, width = view.size
    return math.ceil(vision.working_bytes * height * width / vision.max_pixels)


def expand(text: str, pictures: Sequence[Sequence[View]], vision: Qwen3VLVision) -> str:
    """A prompt with one placeholder a picture, in order, as it is tokenized: one placeholder an image token.

    InputError unless there are as many placeholders as pictures.
    """
    first, *following = split_at_pictures(text, len(pictures), vision)
    tokens = [vision.texts.placeholder * sum(v.num_tokens(vision) for v in picture) for picture in pictures]
    return first + "".join(image + after for image, after in zip(tokens, following, strict=True))


def positions(
    token_ids: Sequence[int] | Integers, pictures: Sequence[Sequence[View]], vision: Qwen3VLVision
) -> Integers:
    """Time, height and width [3, L] of each token of a prompt whose pictures, in order, have these views.

    Text, and the marks around a picture, count up by one. A picture's tokens have the next position as their time, and
    lie from it on by row and column; what follows counts on from its longer side. InputError where the prompt's image
    tokens are not those of these pictures. Linear in L.
    """
    ids = np.asarray(token_ids, np.int64)
    result = np.empty((3, len(ids)), np.int64)
    image_tokens = np.flatnonzero(ids == vision.tokens.image)
    done, origin, seen = 0, 0, 0
    for number, (view,) in enumerate(pictures, start=1):
        rows, columns = view.crop_tokens(vision)
        places = image_tokens[seen : seen + rows * columns]
        if len(places) < rows * columns or places[-1] - places[0] != rows * columns - 1:
            raise InputError(
                f"the prompt's image tokens are not those of picture {number}: expected {rows * columns} in a row, as"
                " its size gives them"
            )
        start = int(places[0])
        result[:, done:start] = np.arange(origin, origin + start - done)
        origin += start - done
        done, seen = start + rows * columns, seen + rows * columns
        result[0, start:done] = origin
        result[1, start:done] = origin + np.repeat(np.arange(rows), columns)
        result[2, start:done] = origin + np.tile(np.arange(columns), rows)
        origin += max(rows, columns)
    if seen != len(image_tokens):
        raise InputError(
            f"the prompt has {len(image_tokens)} image tokens, expected {seen}, those of {len(pictures)} pictures"
        )
    result[:, done:] = np.arange(origin, origin + len(ids) - done)
    return result
