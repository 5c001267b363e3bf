"""What stands for pictures in a prompt: golden vectors, the fixture's texts, and one line for a wrong number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from vision_vectors import FIXTURE, GOLDEN, pictures_of, vision_of

from lesonnx.errors import InputError
from lesonnx.vision.cutting import views
from lesonnx.vision.pictures import open_picture
from lesonnx.vision.placeholders import expand


@pytest.mark.parametrize("case", GOLDEN["expanding"], ids=range(len(GOLDEN["expanding"])))
def test_golden_texts(case: dict[str, Any]) -> None:
    vision = vision_of(case["facts"])
    if case.get("refused"):
        with pytest.raises(InputError, match=r"^the prompt has \d placeholders? .*, expected one a picture$"):
            expand(case["text"], pictures_of(case), vision)
    else:
        assert expand(case["text"], pictures_of(case), vision) == case["expanded"]


@pytest.mark.parametrize("case", ["case0", "case1", "case2"])
def test_the_fixtures_ids(case: str) -> None:
    vision = vision_of("tiny")
    with np.load(FIXTURE / "reference.npz") as reference:
        text, expected = str(reference[f"{case}_text"]), reference[f"{case}_input_ids"]
        opened = [open_picture(FIXTURE / "images" / name) for name in reference[f"{case}_images"]]
    expanded = expand(text, [views(picture.height, picture.width, vision) for picture in opened], vision)
    ids = Tokenizer.from_file(str(FIXTURE / "tokenizer.json")).encode(expanded, add_special_tokens=False).ids
    np.testing.assert_array_equal(ids, expected)


def test_a_wrong_number_is_told() -> None:
    vision = vision_of("tiny")
    picture = views(10, 10, vision)
    with pytest.raises(InputError) as caught:
        expand("a <|image_pad|>", [picture, picture], vision)
    expected = "the prompt has 1 placeholder '<|image_pad|>' for 2 pictures, expected one a picture"
    assert str(caught.value) == expected
