"""Positions of prompts with pictures: golden vectors, the fixture's, what does not fit; and long prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vision_vectors import FIXTURE, GOLDEN, pictures_of, vision_of

from lesonnx.errors import InputError
from lesonnx.vision import canvas
from lesonnx.vision.canvas import positions
from lesonnx.vision.cutting import View, views
from lesonnx.vision.pictures import open_picture


@pytest.mark.parametrize("case", GOLDEN["positions"], ids=range(len(GOLDEN["positions"])))
def test_golden_positions(case: dict[str, Any]) -> None:
    vision, pictures = vision_of(case["facts"]), pictures_of(case)
    if case.get("refused"):
        with pytest.raises(InputError, match="image tokens"):
            positions(case["token_ids"], pictures, vision)
        return
    for ids in (case["token_ids"], np.array(case["token_ids"], np.int64)):
        found = positions(ids, pictures, vision)
        assert found.dtype == np.int64
        assert found.tolist() == case["positions"]
    assert int(found.max(initial=-1)) + 1 == case["next"]


@pytest.mark.parametrize("case", ["case0", "case1", "case2"])
def test_the_fixtures_positions(case: str) -> None:
    vision = vision_of("tiny")
    with np.load(FIXTURE / "reference.npz") as reference:
        ids, expected = reference[f"{case}_input_ids"], reference[f"{case}_position_ids"]
        opened = [open_picture(FIXTURE / "images" / name) for name in reference[f"{case}_images"]]
        delta = int(reference[f"{case}_rope_delta"])
    found = positions(ids, [views(picture.height, picture.width, vision) for picture in opened], vision)
    np.testing.assert_array_equal(found, expected)
    assert int(found.max()) + 1 == len(ids) + delta


def test_text_counts_up() -> None:
    ids = [200 + token % 100 for token in range(500)]
    np.testing.assert_array_equal(positions(ids, [], vision_of("tiny")), np.tile(np.arange(500), (3, 1)))


def test_the_picture_that_does_not_fit_is_named() -> None:
    vision = vision_of("tiny")
    small, other = [View((112, 112), (1, 1))], [View((56, 112), (1, 1))]
    tokens = vision.tokens
    ids = [5, tokens.image_start, *[tokens.image] * 4, tokens.image_end]
    with pytest.raises(InputError) as caught:
        positions([*ids, *ids], [small, other], vision)
    assert str(caught.value).startswith("the prompt's image tokens at 9 are not those of picture 2: expected 4 tokens")
    with pytest.raises(InputError, match="^the prompt has no image tokens for picture 2 of 2$"):
        positions(ids, [small, small], vision)
    with pytest.raises(InputError, match="^the prompt has 8 image tokens, expected 4, those of 1 pictures$"):
        positions([*ids, *ids], [small], vision)


def test_a_long_prompt_is_laid_out_picture_by_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of one size are laid out once, and 20,000 tokens give what their parts give."""
    vision = vision_of("tiny")
    calls = []
    laid_out = canvas._laid_out
    monkeypatch.setattr(canvas, "_laid_out", lambda *given: calls.append(given) or laid_out(*given))
    picture = views(300, 300, vision)
    ids, _, _ = laid_out(tuple(picture), vision)
    turn = [*ids.tolist(), 1, 2, 3]
    count = 20_000 // len(turn) + 1
    found = positions(turn * count, [picture] * count, vision)
    assert len(calls) == 1
    alone = positions(turn, [picture], vision)
    step = int(alone.max()) + 1
    assert found.shape[1] >= 20_000
    for index in (0, 1, count - 1):
        part = found[:, index * len(turn) : (index + 1) * len(turn)]
        expected = alone + step * index
        if index:
            expected[1:, 0] = step * index - 1
        np.testing.assert_array_equal(part, expected)
