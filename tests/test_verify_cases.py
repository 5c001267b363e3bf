"""`lesonnx verify` on prompts with pictures: the figures of each case, and references that cannot be used."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import fixture, read_reference
from conftest import BundleFactory, Outcome
from numpy.typing import NDArray

from lesonnx.bundle import Bundle
from lesonnx.errors import InputError, ToleranceError
from lesonnx.manifest import Vision
from lesonnx.vision.cutting import View
from lesonnx_export.cases import ARRAYS, case_names, pictures_of, read_case
from lesonnx_export.compare import CaseComparison, judge_case, largest_difference

NAME = "minicpmv4_7_moe"
REFERENCE = fixture(NAME) / "reference.npz"
Arrays = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return read_reference(NAME)


@pytest.fixture(scope="module")
def bundle(bundle_of: BundleFactory) -> Path:
    return bundle_of(NAME)


@pytest.fixture(scope="module")
def vision(bundle: Path) -> Vision:
    record = Bundle(bundle).manifest.vision
    assert record is not None
    return record


def test_a_float_bundle_passes_all_cases(bundle: Path, lesonnx: Callable[..., Outcome]) -> None:
    outcome = lesonnx("verify", bundle, "--reference", REFERENCE, "--json", "--prefill-chunk", 7)
    document = json.loads(outcome.out)
    assert (outcome.code, document["passed"], document["cases_left_out"]) == (0, True, [])
    assert [case["name"] for case in document["cases"]] == ["case0", "case1", "case2"]
    assert [case["image_tokens"] for case in document["cases"]] == [4, 30, 20]
    for case in document["cases"]:
        assert case["greedy_match"]
        assert case["position_ids_match"]
        assert 0 < case["max_abs_diff"] < 1e-3
        assert 0 < case["features_max_abs_diff"] < 1e-4


def test_a_table_has_a_line_a_case(bundle: Path, lesonnx: Callable[..., Outcome]) -> None:
    out = lesonnx("verify", bundle, "--reference", REFERENCE, "--schedule", "cache", "--engine", "session").out
    assert len(re.findall(r"case\d .* 24 of 24 .* equal", out)) == 3


def test_a_quantized_bundle_is_judged_by_kl(bundle_of: BundleFactory, lesonnx: Callable[..., Outcome]) -> None:
    quantized = bundle_of(NAME, bits=8, dense_bits=8)
    outcome = lesonnx("verify", quantized, "--reference", REFERENCE, "--json", "--max-kl", 1.0)
    cases = json.loads(outcome.out)["cases"]
    assert outcome.code == 0
    assert all(case["position_ids_match"] and case["features_max_abs_diff"] > 1e-3 for case in cases)
    assert all(1e-9 < case["kl"] < 1.0 for case in cases)


def test_a_bundle_without_eyes_leaves_cases_out(bundle_of: BundleFactory, lesonnx: Callable[..., Outcome]) -> None:
    blind = bundle_of(NAME, vision=False)
    document = json.loads(lesonnx("verify", blind, "--reference", REFERENCE, "--json").out)
    assert (document["passed"], document["cases"]) == (True, [])
    assert document["cases_left_out"] == ["case0", "case1", "case2"]
    note = "note: case0, case1, case2 left out: this bundle has no eyes"
    assert note in lesonnx("verify", blind, "--reference", REFERENCE).err


def test_a_case_without_pictures_is_text(
    bundle: Path, arrays: Arrays, lesonnx: Callable[..., Outcome], tmp_path: Path
) -> None:
    ids, start, count = arrays["input_ids"], int(arrays["greedy_prompt_len"]), len(arrays["greedy_ids"])
    case = {
        "target_sizes": np.zeros((0, 2), np.int64),
        "pixel_values": np.zeros((1, 3, 14, 0), np.float32),
        "image_features": np.zeros((0, 64), np.float32),
        "input_ids": ids[:start],
        "position_ids": np.tile(np.arange(start), (3, 1)),
        "logits": arrays["logits"][:start],
        "greedy_ids": arrays["greedy_ids"],
    }
    base = {name: array for name, array in arrays.items() if not name.startswith("case")}
    path = tmp_path / "text.npz"
    np.savez(path, **base, **{f"case0_{name}": array for name, array in case.items()})
    outcome = lesonnx("verify", bundle, "--reference", path, "--json")
    (found,) = json.loads(outcome.out)["cases"]
    assert (outcome.code, found["image_tokens"], found["features_max_abs_diff"]) == (0, 0, 0)
    assert found["position_ids_match"]
    assert (found["greedy_matched_tokens"], found["tokens"]) == (count, start)
    case["logits"] = case["logits"] + 9
    np.savez(path, **base, **{f"case0_{name}": array for name, array in case.items()})
    assert "case0: logits differ by up to" in lesonnx("verify", bundle, "--reference", path).err


@pytest.mark.parametrize(
    ("array", "place", "value", "reason"),
    [
        ("case1_logits", (3, 5), 9.0, "case1: logits differ by up to"),
        ("case2_greedy_ids", (7,), 1, "case2: greedy tokens differ from number 8 of 24"),
        ("case1_position_ids", (2, 20), 0, "case1: position_ids differ"),
    ],
)
def test_what_differs_is_named(
    bundle: Path,
    arrays: Arrays,
    lesonnx: Callable[..., Outcome],
    tmp_path: Path,
    array: str,
    place: tuple[int, ...],
    value: float,
    reason: str,
) -> None:
    changed = arrays[array].copy()
    changed[place] = value
    path = tmp_path / "changed.npz"
    np.savez(path, **arrays | {array: changed})
    outcome = lesonnx("verify", bundle, "--reference", path, "--json")
    assert outcome.code == 1
    assert reason in outcome.err
    assert json.loads(outcome.out)["passed"] is False


@pytest.mark.parametrize(
    ("array", "change", "message"),
    [
        ("logits", None, "has no array 'case0_logits'"),
        ("logits", lambda a: a[:, :5], r"case0_logits is float32 \[30, 5\], expected floats \[30, 384\]"),
        ("logits", lambda a: a * np.nan, "case0_logits holds values that are not finite"),
        (
            "pixel_values",
            lambda a: a[..., :-14],
            r"case0_pixel_values is float32 .*, expected floats \[1, 3, 14, 896\]",
        ),
        ("pixel_values", lambda a: a.astype(np.int64), "case0_pixel_values is int64"),
        ("target_sizes", lambda a: a[0], r"case0_target_sizes is .*, expected integers \[crops,2\]"),
        ("target_sizes", lambda a: a + 1, "expected multiples of 4 patches"),
        ("target_sizes", lambda a: a * 0, "expected multiples of 4 patches"),
        ("target_sizes", lambda a: np.concatenate([a, a]), "case0_pixel_values is float32"),
        ("position_ids", lambda a: a[:2], r"case0_position_ids is .* \[2, 30\], expected integers \[3, 30\]"),
        ("image_features", lambda a: a[1:], r"case0_image_features is .* \[3, 64\], expected floats \[4, 64\]"),
        ("input_ids", lambda a: np.where(a == 375, 5, a), "0 crops are marked, expected 1"),
        ("input_ids", lambda a: np.where(a == 376, 5, a), "case0_input_ids and case0_target_sizes do not fit"),
        ("input_ids", lambda a: a + 500, "case0_input_ids holds"),
        ("input_ids", lambda a: a[:0], "0 tokens"),
        ("input_ids", lambda a: a.astype(float), "case0_input_ids must be integers"),
        ("greedy_ids", lambda a: a - 400, "case0_greedy_ids holds"),
        ("greedy_ids", lambda a: np.zeros(1000, np.int64), "30 tokens and 1000"),
    ],
)
def test_broken_arrays(
    bundle: Path, arrays: Arrays, vision: Vision, tmp_path: Path, array: str, change: Any, message: str
) -> None:
    own = {name: arrays[f"case0_{name}"] for name in ARRAYS}
    if change is None:
        del own[array]
    else:
        own[array] = change(own[array])
    path = tmp_path / "broken.npz"
    np.savez(path, **{f"case0_{name}": values for name, values in own.items()})
    with pytest.raises(InputError, match=message) as error:
        read_case(path, "case0", Bundle(bundle).manifest, vision)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_cases_are_found_by_name_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    np.savez(path, case10_logits=1, case2_logits=1, logits=1, lower_case3_logits=1)
    assert case_names(path) == ["case2", "case10"]


def test_pictures_are_read_from_their_marks(vision: Vision) -> None:
    start, end, image, slice_start, slice_end, line = 375, 376, 373, 377, 378, 198
    overview, piece = [start, image, end], [slice_start, image, image, slice_end]
    ids = [5, *overview, *overview, 5, *overview, *piece, *piece, line, *piece, *piece, line, line, start, 5]
    sizes = [(4, 4), (4, 4), (4, 4), *[(4, 8)] * 4]
    one = View((56, 56), (1, 1))
    assert pictures_of(ids, sizes, vision) == [[one], [one], [one, View((112, 224), (2, 2))]]
    with pytest.raises(ValueError, match="more than 2 crops are marked"):
        pictures_of(ids, sizes[:2], vision)
    with pytest.raises(ValueError, match="7 crops are marked, expected 8"):
        pictures_of(ids, [*sizes, (4, 4)], vision)
    with pytest.raises(ValueError, match="slices of a picture differ in size"):
        pictures_of(ids, [*sizes[:-1], (8, 8)], vision)
    with pytest.raises(ValueError, match="a slice comes before any picture"):
        pictures_of(piece, [(4, 8)], vision)


def test_largest_difference() -> None:
    one = np.zeros((2, 2), np.float32)
    assert largest_difference(one, one + np.float32(0.25)) == 0.25
    assert largest_difference(one[:0], one[:0]) == 0
    with pytest.raises(ToleranceError, match="not finite"):
        largest_difference(one, one * np.nan)


def test_positions_are_judged_whatever_else_is() -> None:
    figures: dict[str, Any] = {"tokens": 1, "max_abs_diff": 0, "kl": 0, "top1_agreement": 1, "greedy_match": True}
    figures |= {"greedy_tokens": 1, "greedy_matched_tokens": 1, "name": "c", "image_tokens": 1}
    wrong = CaseComparison(**figures, features_max_abs_diff=0, position_ids_match=False)
    assert judge_case(wrong, 1.0) == judge_case(wrong, 1.0, 1.0) == "c: position_ids differ from the reference's"
    right = CaseComparison(**figures, features_max_abs_diff=2, position_ids_match=True)
    assert judge_case(right, 1.0) == "c: image features differ by up to 2, at most 1"
    assert judge_case(right, 1.0, 1.0) is None
