"""Positions of a prompt with pictures: text counts up, a picture's tokens lie on a canvas of heights and widths.

Token ids and sizes in, integers out. Every runtime has the same function, held to this one by
``tests/data/vision.json``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lesonnx.errors import InputError
from lesonnx.manifest import Vision
from lesonnx.vision.cutting import Size, View

Integers = npt.NDArray[np.int64]


def positions(token_ids: Sequence[int] | Integers, pictures: Sequence[Sequence[View]], vision: Vision) -> Integers:
    """Time, height and width [3, L] of each token of a prompt whose pictures, in order, have these views.

    The position of a token that follows is the greatest of them plus one. InputError where the prompt's image tokens
    and marks are not those of these pictures. Linear in L.
    """
    ids = np.asarray(token_ids, np.int64)
    result = np.empty((3, len(ids)), np.int64)
    image_tokens = np.flatnonzero(ids == vision.tokens.image)
    marks = frozenset(vision.tokens.model_dump(exclude={"image"}).values())
    laid: dict[tuple[View, ...], tuple[Integers, Integers, int]] = {}
    done, next_position, seen = 0, 0, 0
    for number, picture in enumerate(pictures, start=1):
        key = tuple(picture)
        if key not in laid:
            laid[key] = _laid_out(key, vision)
        expected, offsets, extent = laid[key]
        if seen == len(image_tokens):
            raise InputError(f"the prompt has no image tokens for picture {number} of {len(pictures)}")
        start = int(image_tokens[seen]) - 1
        end = start + len(expected)
        if start < done or not np.array_equal(ids[start:end], expected):
            raise InputError(
                f"the prompt's image tokens at {start + 1} are not those of picture {number}: expected {len(expected)} "
                "tokens with their marks, as its size gives them"
            )
        result[:, done:start] = np.arange(next_position, next_position + start - done)
        origin = next_position + start - done
        result[:, start:end] = np.maximum(origin + offsets, 0)
        done = end
        while done < len(ids) and int(ids[done]) in marks and not _opens(ids, done, vision):
            done += 1
        result[:, end:done] = origin
        next_position = origin + extent + 1
        seen += int(np.count_nonzero(expected == vision.tokens.image))
    if seen != len(image_tokens):
        raise InputError(
            f"the prompt has {len(image_tokens)} image tokens, expected {seen}, those of {len(pictures)} pictures"
        )
    result[:, done:] = np.arange(next_position, next_position + len(ids) - done)
    return result


def _opens(ids: Integers, index: int, vision: Vision) -> bool:
    """Whether a picture begins at this token."""
    return index + 1 < len(ids) and int(ids[index + 1]) == vision.tokens.image


def _laid_out(picture: tuple[View, ...], vision: Vision) -> tuple[Integers, Integers, int]:
    """A picture's token ids [N] with its marks, their places [3, N] from its origin, and its canvas's longer side."""
    tokens = vision.tokens
    overview, *sliced = picture
    own = overview.crop_tokens(vision)
    canvas, cell, grid = own, own, (1, 1)
    for view in sliced:
        cell, grid = view.crop_tokens(vision), view.grid
        canvas = grid[0] * cell[0], grid[1] * cell[1]
    ids = [tokens.image_start, *[tokens.image] * (own[0] * own[1]), tokens.image_end]
    places = [(-1, -1), *_product(_spread(own[0], canvas[0]), _spread(own[1], canvas[1])), canvas]
    if sliced:
        for row in range(grid[0]):
            if row:
                ids.append(tokens.newline)
                places.append((row * cell[0] - 1, canvas[1]))
            for column in range(grid[1]):
                heights = range(row * cell[0], (row + 1) * cell[0])
                widths = range(column * cell[1], (column + 1) * cell[1])
                inside = _product(heights, widths)
                ids += [tokens.slice_start, *[tokens.image] * len(inside), tokens.slice_end]
                places += [inside[0], *inside, inside[-1]]
    offsets = np.zeros((3, len(ids)), np.int64)
    offsets[1:] = np.array(places, np.int64).T
    return np.array(ids, np.int64), offsets, max(canvas)


def _product(heights: Sequence[int], widths: Sequence[int]) -> list[Size]:
    return [(height, width) for height in heights for width in widths]


def _spread(count: int, length: int) -> list[int]:
    """``count`` places in 0 .. ``length`` - 1, both ends among them, evenly, each rounded, ties to even; [0] for one.

    In float32, counted from the nearer end, as the model's own code has it: what is a half there is not always one.
    """
    if count == 1:
        return [0]
    last = np.float32(length - 1)
    step = last / np.float32(count - 1)
    places = [
        step * np.float32(index) if index < count // 2 else last - step * np.float32(count - 1 - index)
        for index in range(count)
    ]
    return [int(np.rint(place)) for place in places]
