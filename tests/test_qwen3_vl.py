"""Qwen3-VL-MoE: text and pictures against what transformers computed, rules for pictures, and what is refused.

`tools/make_qwen3_vl_reference.py` made the checkpoint and the reference.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from checkpoints import Config, Tensors, derive, fixture, read_config, read_reference, spell_as_transformers_4
from conftest import BundleFactory, Outcome
from numpy.typing import NDArray
from test_parity import TOLERANCE, assert_reference, assert_same_bundle, load

from lesonnx import GenerationOptions
from lesonnx.bundle import Bundle
from lesonnx.errors import BundleError, CheckpointError, InputError
from lesonnx.manifest import Qwen3VLVision, parse_manifest
from lesonnx.model import SCHEDULES
from lesonnx.prompt import Prompt
from lesonnx.vision import rules
from lesonnx.vision.album import features_bytes, reading_bytes
from lesonnx.vision.cutting import View
from lesonnx.vision.eyes import Crop, Eyes, cut_packed
from lesonnx.vision.prompts import place
from lesonnx_export.exporter import ExportOptions, export_bundle

NAME = "qwen3_vl_moe"
CASES = ("case0", "case1", "case2")
CHUNKS = (1, 7, 24, 96)
# What a checkpoint has beside its config and its tensors.
BESIDE = ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
Case = dict[str, NDArray[Any]]


def read_case(name: str) -> Case:
    return {k.removeprefix(f"{name}_"): v for k, v in read_reference(NAME).items() if k.startswith(f"{name}_")}


def record(bundle: Path) -> Qwen3VLVision:
    vision = Bundle(bundle).manifest.vision
    assert isinstance(vision, Qwen3VLVision)
    return vision


def views_of(case: Case, vision: Qwen3VLVision) -> list[list[View]]:
    return [[View((rows * vision.patch_size, columns * vision.patch_size), (1, 1))]
            for rows, columns in case["target_sizes"].tolist()]  # fmt: skip


def prompt_of(case: Case, vision: Qwen3VLVision) -> Prompt:
    """The case with the reference's own features."""
    pictures = views_of(case, vision)
    keys = [str(number) for number in range(len(pictures))]
    rows = np.concatenate([case["image_features"], *case["deepstack_features"]], axis=1)
    ends = np.cumsum([picture[0].num_tokens(vision) for picture in pictures])
    features = dict(zip(keys, np.split(rows, ends[:-1]), strict=True))
    return place(case["input_ids"].tolist(), pictures, keys, vision).with_features(features)


def beside(directory: Path) -> Path:
    """A derived checkpoint with the fixture's processor, tokenizer and template."""
    for name in BESIDE:
        shutil.copy(fixture(NAME) / name, directory / name)
    return directory


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("vision", [True, False])
def test_text(bundle_of: BundleFactory, vision: bool, chunk: int) -> None:
    assert_reference(bundle_of(NAME, vision=vision), NAME, schedule="les", prefill_chunk_tokens=chunk)


def as_published(tensors: Tensors) -> Tensors:
    """Fused experts as Qwen publishes them: [experts, inputs, outputs]."""
    return {
        key: np.ascontiguousarray(value.transpose(0, 2, 1)) if ".experts." in key else value
        for key, value in tensors.items()
    }


def one_by_one(tensors: Tensors) -> Tensors:
    apart = {key: value for key, value in tensors.items() if ".experts." not in key}
    for key, value in tensors.items():
        block, _, name = key.partition(".experts.")
        for expert, matrix in enumerate(value if name else ()):
            names = {"gate_up_proj": ("gate_proj", "up_proj")}.get(name, (name,))
            for part, half in zip(names, np.split(matrix, len(names)), strict=True):
                apart[f"{block}.experts.{expert}.{part}.weight"] = np.ascontiguousarray(half)
    return apart


def transformers_4(config: Config) -> Config:
    text = spell_as_transformers_4(config["text_config"] | {"dtype": "bfloat16"})
    rope = config["text_config"]["rope_parameters"]
    scaling = {key: rope[key] for key in ("mrope_section", "mrope_interleaved", "rope_type")}
    vision = {key: value for key, value in config["vision_config"].items() if key != "rope_parameters"}
    return config | {"text_config": text | {"rope_scaling": scaling}, "vision_config": vision}


LAYOUTS: dict[str, dict[str, Any]] = {
    "published": {"tensors": as_published, "config": transformers_4},
    "one_by_one": {"tensors": one_by_one},
    "sharded": {"num_shards": 3},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_same_bundle(bundle_of: BundleFactory, tmp_path: Path, layout: str) -> None:
    checkpoint = beside(derive(NAME, tmp_path / layout, **LAYOUTS[layout]))
    assert_same_bundle(bundle_of, NAME, checkpoint)


def test_without_vision_the_tower_is_named_and_nothing_is_added(bundle_of: BundleFactory, lesonnx: Any) -> None:
    manifest = Bundle(bundle_of(NAME, vision=False)).manifest
    assert manifest.vision is None
    assert manifest.position_rows == 3
    assert manifest.deepstack_layers == 0
    assert not [v.name for part in manifest.parts for v in part.inputs if v.name.startswith("deepstack")]
    assert all(name.startswith("model.visual.") for name in manifest.skipped_tensors)
    assert manifest.skipped_tensors
    picture = fixture(NAME) / "images" / "plain.png"
    outcome = lesonnx("run", bundle_of(NAME, vision=False), "--prompt", "a", "--image", picture)
    assert outcome.code
    assert "no eyes" in outcome.error


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_pictures_are_prepared_as_the_processor_does(bundle_of: BundleFactory, name: str) -> None:
    image = pytest.importorskip("PIL.Image")
    bundle, case = Bundle(bundle_of(NAME)), read_case(name)
    vision = record(bundle_of(NAME))
    packed, pictures = [], []
    with Eyes(bundle) as eyes:
        for file in case["images"].tolist():
            pixels = np.array(image.open(fixture(NAME) / "images" / file).convert("RGB"))
            pictures.append(rules.views(*pixels.shape[:2], vision))
            packed += [crop.pixel_values for crop in eyes.crops(pixels, pictures[-1])]
    assert pictures == views_of(case, vision)
    assert np.abs(np.concatenate(packed, axis=-1) - case["pixel_values"]).max() < 1e-5
    with load(bundle_of(NAME)) as model:
        text = rules.expand(str(case["text"]), pictures, vision)
        assert model.encode(text) == case["input_ids"].tolist()


@pytest.mark.parametrize("name", CASES)
def test_the_tower(bundle_of: BundleFactory, name: str) -> None:
    case, vision = read_case(name), record(bundle_of(NAME))
    expected = np.concatenate([case["image_features"], *case["deepstack_features"]], axis=1)
    with Eyes(Bundle(bundle_of(NAME))) as eyes:
        crops = cut_packed(case["pixel_values"], [*map(tuple, case["target_sizes"].tolist())], vision.patch_size)
        given = np.concatenate([eyes.see(crop) for crop in crops])
    assert given.shape == expected.shape
    assert np.abs(given - expected).max() < 1e-4


def test_pictures_of_one_size_do_not_see_each_other(bundle_of: BundleFactory) -> None:
    case, size = read_case("case0"), (6, 4)
    other = case["pixel_values"][..., ::-1].copy()
    with Eyes(Bundle(bundle_of(NAME))) as eyes:
        both = eyes.see(Crop(np.concatenate([case["pixel_values"], other], axis=-1), size))
        alone = [eyes.see(Crop(pixels, size)) for pixels in (case["pixel_values"], other)]
    assert np.array_equal(both, np.concatenate(alone))


# Every chunk and every schedule with every case, though not all three at once.
@pytest.mark.parametrize(
    ("schedule", "chunk"), [*zip(SCHEDULES, CHUNKS, strict=True), *zip(SCHEDULES, CHUNKS[::-1], strict=True)]
)
@pytest.mark.parametrize("name", CASES)
def test_answers_about_pictures(bundle_of: BundleFactory, name: str, schedule: str, chunk: int) -> None:
    assert_case(bundle_of(NAME), read_case(name), schedule=schedule, prefill_chunk_tokens=chunk)


def test_sessions_answer_alike(bundle_of: BundleFactory) -> None:
    assert_case(bundle_of(NAME), read_case("case2"), engine="session")


def assert_case(bundle: Path, case: Case, **options: Any) -> None:
    prompt = prompt_of(case, record(bundle))
    assert prompt.position_ids is not None
    assert np.array_equal(prompt.position_ids, case["position_ids"])
    with load(bundle, **options) as model:
        runner = model.runner
        logits = runner.prefill(prompt, all_logits=True)
        assert np.abs(logits - case["logits"]).max() < TOLERANCE
        greedy = [int(logits[-1].argmax())]
        while len(greedy) < len(case["greedy_ids"]):
            greedy.append(int(runner.prefill(greedy[-1:]).argmax()))
        assert greedy == case["greedy_ids"].tolist()
        # A text behind it is not touched by what was added before.
        runner.rewind(0)
        reference = read_reference(NAME)
        text = runner.prefill(reference["input_ids"].tolist(), all_logits=True)
        assert np.abs(text - reference["logits"]).max() < TOLERANCE


def test_what_is_added_behind_the_first_layers_matters(bundle_of: BundleFactory) -> None:
    case = read_case("case0")
    prompt = prompt_of(case, record(bundle_of(NAME)))
    hidden = case["image_features"].shape[1]
    bare = {key: np.where(np.arange(rows.shape[1]) < hidden, rows, 0) for key, rows in prompt.features.items()}
    with load(bundle_of(NAME)) as model:
        logits = model.runner.prefill(replace(prompt, features=bare), all_logits=True)
    differences = np.abs(logits - case["logits"]).max(axis=1)
    first = case["input_ids"].tolist().index(record(bundle_of(NAME)).tokens.image)
    assert differences[:first].max() < TOLERANCE
    assert differences[first:].min() > 10 * TOLERANCE


@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize("name", CASES)
def test_run_with_files(bundle_of: BundleFactory, lesonnx: Callable[..., Outcome], name: str, draft: str) -> None:
    pytest.importorskip("PIL")
    case = read_case(name)
    images = [part for file in case["images"].tolist() for part in ("--image", fixture(NAME) / "images" / file)]
    common = ("--max-tokens", len(case["greedy_ids"]), "--ignore-eos", "--json", "--draft", draft)
    outcome = lesonnx("run", bundle_of(NAME), "--prompt", str(case["text"]), *images, *common)
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    assert report["tokens"] == case["greedy_ids"].tolist()
    assert report["image_tokens"] == len(case["image_features"])


def test_verify_tells_of_the_cases(bundle_of: BundleFactory, lesonnx: Callable[..., Outcome], tmp_path: Path) -> None:
    reference = fixture(NAME) / "reference.npz"
    outcome = lesonnx("verify", bundle_of(NAME), "--reference", reference, "--json")
    assert outcome.code == 0, outcome.err
    cases = json.loads(outcome.out)["cases"]
    assert [case["name"] for case in cases] == list(CASES)
    assert all(case["max_abs_diff"] < TOLERANCE for case in cases)
    assert all(case["features_max_abs_diff"] < TOLERANCE for case in cases)
    assert all(case["greedy_match"] and case["position_ids_match"] for case in cases)
    arrays = read_reference(NAME)
    arrays["case1_deepstack_features"] = arrays["case1_deepstack_features"][:1]
    np.savez(tmp_path / "less.npz", **arrays)
    outcome = lesonnx("verify", bundle_of(NAME), "--reference", tmp_path / "less.npz")
    assert outcome.code
    assert "case1_deepstack_features is float32 [1, 14, 64], expected floats [2, 14, 64]" in outcome.error


def test_pictures_come_in_front_with_their_marks(bundle_of: BundleFactory) -> None:
    pixels = np.zeros((48, 32, 3), np.uint8)
    vision, options = record(bundle_of(NAME)), GenerationOptions(max_new_tokens=1)
    text = f"{vision.texts.picture}What?"
    with load(bundle_of(NAME)) as model:
        expected = model.encode(rules.expand(text, [rules.views(48, 32, vision)], vision))
        for prompt in (text, "What?", model.encode(text)):
            list(model.generate(prompt, options, images=[pixels]))
            assert model.runner.token_ids[: len(expected)] == expected
        content = [{"type": "image", "image": pixels}, {"type": "text", "text": "What?"}]
        list(model.chat([{"role": "user", "content": content}], options))
        start = model.runner.token_ids.index(expected[0])
        assert model.runner.token_ids[start : start + len(expected)] == expected


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_bits": 8}, {"vision_bits": 8}, {"calibration": Path(__file__)}],
    ids=["int4", "kv8", "vision8", "calibrated"],
)
def test_smaller_bundles_see(bundle_of: BundleFactory, options: dict[str, Any]) -> None:
    """Not what they answer, which random weights do not keep: that all schedules answer alike, and pictures matter."""
    bundle = bundle_of(NAME, bits=4, **options)
    vision = record(bundle)
    prompt = prompt_of(read_case("case2"), vision)
    found = []
    for schedule in SCHEDULES:
        with load(bundle, schedule=schedule, prefill_chunk_tokens=13) as model:
            found.append(model.runner.prefill(prompt, all_logits=True))
            blind = model.runner.prefill([1])
    assert all(np.array_equal(logits, found[0]) for logits in found)
    assert np.isfinite(found[0]).all()
    with load(bundle, prefill_chunk_tokens=13) as model:
        without = replace(prompt, features={}, image_rows={})
        assert not np.array_equal(model.runner.prefill(without, all_logits=True), found[0])
    assert np.isfinite(blind).all()


def test_an_export_goes_on_where_it_was_broken_off(bundle_of: BundleFactory, tmp_path: Path) -> None:
    options, target = ExportOptions(bits=32, num_workers=1), tmp_path / "bundle"

    def stop(what: str, num_bytes: int) -> None:
        if what == "experts":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_bundle(fixture(NAME), target, options, progress=stop)
    export_bundle(fixture(NAME), target, options, resume=True)
    for name in ("vision/vision.bin", "vision/tower.onnx", "dense/dense.bin", "dense/segment_001.onnx"):
        assert (target / name).read_bytes() == (bundle_of(NAME) / name).read_bytes(), name


# -- rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "bounds"), [("resized", (8, 1024, 5120)), ("resized_30b", (16, 65536, 16777216))])
def test_sizes(bundle_of: BundleFactory, key: str, bounds: tuple[int, int, int]) -> None:
    reference = read_reference(NAME)
    patch, least, most = bounds
    vision = record(bundle_of(NAME)).model_copy(
        update={"patch_size": patch, "min_pixels": least, "max_pixels": most}
    )  # fmt: skip
    refused = 0
    for (height, width), expected in zip(reference["sizes"].tolist(), reference[key].tolist(), strict=True):
        if expected == [0, 0]:
            refused += 1
            with pytest.raises(InputError, match="too narrow"):
                rules.views(height, width, vision)
        else:
            assert rules.views(height, width, vision) == [View(tuple(expected), (1, 1))]
    assert 0 < refused < len(reference["sizes"])


def test_what_a_picture_takes_goes_by_its_pixels(bundle_of: BundleFactory) -> None:
    with load(bundle_of(NAME)) as model:
        small, large = (model.open_picture(np.zeros((*size, 3), np.uint8)) for size in ((32, 32), (64, 64)))
    vision = record(bundle_of(NAME)).model_copy(update={"working_bytes": 5_120_000})
    assert [rules.working_bytes(shown.views[0], vision) for shown in (small, large)] == [1_024_000, 4_096_000]
    bundle = Bundle(bundle_of(NAME))
    bundle.manifest = bundle.manifest.model_copy(update={"vision": vision})
    # What pixels and features take beside is less than a tenth of that.
    assert 3_000_000 < reading_bytes(bundle, [large]) - reading_bytes(bundle, [small]) < 3_400_000
    # Features, and those behind two layers.
    assert features_bytes(bundle, large) == 16 * 3 * 64 * 4


def test_positions_in_words(bundle_of: BundleFactory) -> None:
    """A picture of 2 x 3 tokens between two of text, twice, with nothing in between the second time."""
    vision = record(bundle_of(NAME))
    unit, image = vision.patch_size * vision.token_patches, vision.tokens.image
    pictures = [[View((2 * unit, 3 * unit), (1, 1))]] * 2
    ids = [1, 2, *[image] * 12, 3]
    assert rules.positions(ids, pictures, vision).T.tolist() == [
        *([0] * 3, [1] * 3),
        *([2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]),
        *([5, 5, 5], [5, 5, 6], [5, 5, 7], [5, 6, 5], [5, 6, 6], [5, 6, 7]),
        [8] * 3,
    ]


@pytest.mark.parametrize("count", [0, 5, 7])
def test_image_tokens_that_are_not_the_pictures(bundle_of: BundleFactory, count: int) -> None:
    vision = record(bundle_of(NAME))
    unit = vision.patch_size * vision.token_patches
    with pytest.raises(InputError, match="image tokens"):
        rules.positions([1, *[vision.tokens.image] * count, 2], [[View((2 * unit, 3 * unit), (1, 1))]], vision)


def test_another_number_of_placeholders(bundle_of: BundleFactory) -> None:
    with pytest.raises(InputError, match="2 placeholders '<|image_pad|>' for 0 pictures".replace("|", r"\|")):
        rules.expand("<|image_pad|><|image_pad|>", [], record(bundle_of(NAME)))


# -- what is refused ---------------------------------------------------------------------------------------------------


def outer(**changes: Any) -> Callable[[Config], Config]:
    return lambda config: config | changes


def vision_config(**changes: Any) -> Callable[[Config], Config]:
    return lambda config: config | {"vision_config": config["vision_config"] | changes}


CONFIGS: dict[str, tuple[Callable[[Config], Config], str]] = {
    "no tower": (outer(vision_config=None), "vision_config must be an object"),
    "dense": (lambda c: c | {"text_config": c["text_config"] | {"model_type": "qwen3_vl_text"}}, "qwen3_vl_moe_text"),
    "channels": (vision_config(in_channels=1), "in_channels is 1"),
    "merge": (vision_config(spatial_merge_size=4), "spatial_merge_size is 4"),
    "width": (vision_config(out_hidden_size=32), "out_hidden_size is 32"),
    "table": (vision_config(num_position_embeddings=35), "num_position_embeddings is 35"),
    "heads": (vision_config(num_heads=3), "hidden_size 16 is no multiple of 4 x 3 heads"),
    "patch": (vision_config(patch_size=[8, 8]), "patch_size must be a whole number"),
    "levels": (vision_config(deepstack_visual_indexes=[0, 4]), "deepstack_visual_indexes must be"),
    "order": (vision_config(deepstack_visual_indexes=[2, 0]), "deepstack_visual_indexes must be"),
    "many": (vision_config(deepstack_visual_indexes=[0, 1, 2, 3]), "4 deepstack_visual_indexes, expected at most 3"),
    "fewer": (vision_config(deepstack_visual_indexes=[0]), "deepstack_merger_list.1"),
    "rope": (vision_config(rope_parameters={"rope_type": "yarn"}), "rope_type 'yarn'"),
    "theta": (vision_config(rope_parameters={"rope_theta": 0}), "rope_theta must be a number of at least 1"),
    "rope list": (vision_config(rope_parameters=[1]), "rope_theta must be a number"),
    "mark": (outer(image_token_id=5), "image_token_id is 5, which is no added token"),
    "far mark": (outer(vision_end_token_id=276), "vision_end_token_id must be a token id below 276"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_are_refused(tmp_path: Path, name: str) -> None:
    change, expected = CONFIGS[name]
    checkpoint = beside(derive(NAME, tmp_path / "checkpoint", config=change))
    assert_refused(checkpoint, expected)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "patch": ({"patch_size": 16}, "patch_size is 16, expected 8 as in config.json"),
    "merge": ({"merge_size": 4}, "merge_size is 4, expected 2"),
    "filter": ({"resample": 2}, "resample is 2, expected 3"),
    "size": ({"size": {"height": 64, "width": 64}}, "shortest_edge and longest_edge"),
    "bounds": ({"min_pixels": 9000}, "shortest_edge and longest_edge"),
    "type": ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type is 'CLIPImageProcessor'"),
    "plain": ({"do_normalize": False}, "do_normalize is False, expected true"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_refused(tmp_path: Path, name: str) -> None:
    changes, expected = SETTINGS[name]
    checkpoint = beside(derive(NAME, tmp_path / "checkpoint"))
    path = checkpoint / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert_refused(checkpoint, expected)


@pytest.mark.parametrize("missing", ["preprocessor_config.json", "tokenizer.json"])
def test_without_processor_or_tokenizer_it_goes_blind_only(tmp_path: Path, missing: str) -> None:
    checkpoint = beside(derive(NAME, tmp_path / "checkpoint"))
    (checkpoint / missing).unlink()
    assert_refused(checkpoint, "--no-vision")
    export_bundle(checkpoint, tmp_path / "blind", ExportOptions(bits=32, num_workers=1, vision=False))


def assert_refused(checkpoint: Path, expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        export_bundle(checkpoint, checkpoint.parent / "bundle", ExportOptions(num_workers=1))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "kind": (lambda v: v.update(kind="other"), "vision: Input tag 'other'"),
    "unknown": (lambda v: v.update(max_slice_nums=9), "vision.max_slice_nums: Extra inputs"),
    "bounds": (lambda v: v.update(min_pixels=9000), "min_pixels 9000 exceeds max_pixels 5120"),
    "more": (lambda v: v.update(deepstack_layers=3), "parts take deepstack_0, deepstack_1, expected"),
    "fewer": (lambda v: v.update(deepstack_layers=1), "'deepstack_1'"),
    "picture": (lambda v: v["texts"].update(picture="<p>"), "texts.picture must have texts.placeholder once"),
    "token": (lambda v: v["tokens"].update(image=276), "tokens.image is 276, expected less than 276"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_records_that_are_refused(bundle_of: BundleFactory, name: str) -> None:
    change, expected = MANIFESTS[name]
    document = json.loads((bundle_of(NAME) / "manifest.json").read_text())
    change(document["vision"])
    with pytest.raises(BundleError) as caught:
        parse_manifest(json.dumps(document))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plain_session_takes_the_parts_as_declared(bundle_of: BundleFactory) -> None:
    """Each part of the record, by ONNX Runtime alone."""
    directory = bundle_of(NAME)
    for part in record(directory).parts:
        session = onnxruntime.InferenceSession(str(directory / part.path), providers=["CPUExecutionProvider"])
        assert [value.name for value in session.get_outputs()] == [value.name for value in part.outputs]
        assert [value.shape for value in session.get_inputs()] == [value.shape for value in part.inputs]


def test_the_fixture_is_small_and_its_own(bundle_of: BundleFactory) -> None:
    assert sum(path.stat().st_size for path in fixture(NAME).rglob("*") if path.is_file()) < 600_000
    assert read_config(NAME)["model_type"] == NAME == Bundle(bundle_of(NAME)).manifest.model.model_type


@pytest.mark.parametrize("target", ["android", "ios"])
def test_phones_get_it_without_pictures_only(
    bundle_of: BundleFactory, lesonnx: Callable[..., Outcome], tmp_path: Path, target: str
) -> None:
    outcome = lesonnx("export", fixture(NAME), tmp_path / "bundle", "--target", target)
    assert outcome.code
    assert f"--target {target}: its runtime does not read pictures of kind qwen3_vl yet" in outcome.error
    assert lesonnx("export", fixture(NAME), tmp_path / "blind", "--target", target, "--no-vision").code == 0
    outcome = lesonnx("glue", bundle_of(NAME), tmp_path / "glue", "--target", target)
    assert outcome.code
    assert "pictures of kind qwen3_vl are not read by apps yet" in outcome.error
