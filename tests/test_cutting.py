"""How pictures are cut: golden vectors, the fixture's crops, and bounds that hold for every size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vision_vectors import FILE, FIXTURE, GOLDEN, TOOL, vision_of

from lesonnx.errors import InputError
from lesonnx.vision.cutting import View, cut, max_crop_tokens, views
from lesonnx.vision.pictures import open_picture

FACTS = st.sampled_from(["usual", "tiny", "tiny, unsliced", "tiny, 4x", "many slices", "no multiple", "4x"])
SIDES = st.integers(1, 30_000)


def test_the_vectors_are_what_the_tool_makes(tmp_path: Path) -> None:
    TOOL["main"](tmp_path / "made.json")
    assert (tmp_path / "made.json").read_bytes() == FILE.read_bytes(), "run tools/make_vision_vectors.py"


@pytest.mark.parametrize("case", GOLDEN["cutting"], ids=lambda case: str(case["facts"]))
def test_golden_sizes(case: dict[str, Any]) -> None:
    vision = vision_of(case["facts"])
    for (height, width), expected in zip(case["sizes"], case["views"], strict=True):
        if expected is None:
            with pytest.raises(InputError, match=rf"^a picture of {width} x {height} pixels is too narrow: "):
                views(height, width, vision)
        else:
            found = [[*view.size, *view.grid] for view in views(height, width, vision)]
            assert found == expected, (height, width)


@pytest.mark.parametrize("case", ["case0", "case1", "case2"])
def test_the_fixtures_crops(case: str) -> None:
    vision = vision_of("tiny")
    with np.load(FIXTURE / "reference.npz") as reference:
        names, expected = reference[f"{case}_images"].tolist(), reference[f"{case}_target_sizes"]
    found = []
    for name in names:
        picture = open_picture(FIXTURE / "images" / name)
        for view in views(picture.height, picture.width, vision):
            found += [view.crop_patches(vision)] * view.num_crops
    np.testing.assert_array_equal(found, expected)


@given(SIDES, SIDES, FACTS)
def test_every_picture_is_cut_in_whole_crops_within_the_bound_or_refused(height: int, width: int, name: str) -> None:
    vision = vision_of(name)
    unit = vision.patch_size * vision.token_patches
    try:
        found = views(height, width, vision)
    except InputError:
        assert max(height, width) > 3 * min(height, width) * (vision.scale_resolution / unit) ** 2
        return
    assert found == cut(height, width, vision)
    assert found[0].grid == (1, 1)
    assert len(found) == 1 or 1 < found[1].num_crops <= vision.max_slice_nums
    for view in found:
        rows, columns = view.crop_tokens(vision)
        assert (rows * unit * view.grid[0], columns * unit * view.grid[1]) == view.size
        assert view.num_tokens(vision) == view.num_crops * rows * columns
        assert rows * columns <= max_crop_tokens(vision)


def test_sizes_that_are_none() -> None:
    for height, width in ((0, 5), (5, 0), (-1, 5)):
        with pytest.raises(InputError, match=f"at least one pixel, found {width} x {height}$"):
            views(height, width, vision_of("usual"))


def test_the_narrowest_pictures() -> None:
    """256:1 at the usual resolution, whichever way it lies; then one line."""
    vision = vision_of("usual")
    assert max_crop_tokens(vision) == 128
    assert views(2560, 10, vision) == [View((7168, 56), (1, 1))]
    assert views(10, 2560, vision) == [View((56, 7168), (1, 1))]
    with pytest.raises(
        InputError, match="is too narrow: a crop of it would have 157 x 1 image tokens, expected at most 128"
    ):
        views(10, 4000, vision)
    assert math.prod(cut(1, 10**8, vision)[0].size) > 0
