"""MiniCPM-V 4.7 exported: its text half against transformers, the record of its eyes, and what is refused of both."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FIXTURES, Config, Tensors, fuse_experts, read_config, read_reference, read_tensors
from checkpoints import write_checkpoint as write
from conftest import BundleFactory, Outcome
from plain_dspark import read_drafter
from test_parity import assert_reference, assert_same_bundle, greedy, logits_of

from lesonnx.bundle import Bundle
from lesonnx.chat import ChatTemplate
from lesonnx.engines import ENGINES
from lesonnx.errors import CheckpointError, InputError, LesonnxError
from lesonnx.model import SCHEDULES
from lesonnx.vision import rules
from lesonnx.vision.album import Shown
from lesonnx.vision.album import reading_bytes as bytes_in_a_run
from lesonnx.vision.cutting import max_crop_tokens, views
from lesonnx_export.architectures import make_decoder
from lesonnx_export.checkpoint import Checkpoint
from lesonnx_export.config import Config as ModelConfig
from lesonnx_export.exporter import ExportOptions, export_bundle, make_plan
from lesonnx_export.shapes import SHAPES
from lesonnx_export.sizes import TYPICAL_PICTURES, photo_budget, read_shape, sizes_of, suggested_budget, verdict
from lesonnx_export.vision.separator import find_separator
from lesonnx_export.vision.tower import working_bytes

NAME = "minicpmv4_7_moe"
Lesonnx = Callable[..., Outcome]
PUBLISHED_PARAMETERS = 35_212_875_824  # of openbmb/MiniCPM-V-4.7-35B-A3B
TEXT_PREFIX = "model.language_model."
OF_EYES = ("model.vision_tower.", "model.merger.")


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """A JSON file changed in place."""
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(change(document)), encoding="utf-8")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The fixture's files without its pictures and references, to be changed."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for name in ("model.safetensors", "chat_template.jinja", *(path.name for path in (FIXTURES / NAME).glob("*.json"))):
        shutil.copyfile(FIXTURES / NAME / name, directory / name)
    return directory


def derived(directory: Path, config: Config, tensors: Tensors, *, num_shards: int = 0) -> Path:
    """A checkpoint with the fixture's tokenizer and processor."""
    write(directory, config, tensors, num_shards=num_shards)
    for path in (FIXTURES / NAME).iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copyfile(path, directory / path.name)
    return directory


# -- the text half -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "chunk"), [*((name, 24) for name in SCHEDULES), *(("les", n) for n in (1, 7, 96))]
)
def test_reference(bundle_of: BundleFactory, schedule: str, chunk: int) -> None:
    assert_reference(bundle_of(NAME), NAME, schedule=schedule, prefill_chunk_tokens=chunk)


def test_sessions_give_the_same_tokens(bundle_of: BundleFactory) -> None:
    assert_reference(bundle_of(NAME), NAME, engine="session", prefill_chunk_tokens=24)


def test_equal_positions_give_what_the_text_model_gives(bundle_of: BundleFactory, tmp_path: Path) -> None:
    """Not a bit of the logits differs from those of the same weights as a qwen3_5_moe_text model."""
    tensors = read_tensors(NAME)
    text = {
        "model." + key.removeprefix(TEXT_PREFIX) if key.startswith(TEXT_PREFIX) else key: value
        for key, value in tensors.items()
        if not key.startswith(OF_EYES)
    }
    plain = write(tmp_path / "plain", read_config(NAME)["text_config"], text)
    prompt = read_reference(NAME)["input_ids"].tolist()
    bundles = bundle_of(NAME, vision=False), bundle_of(plain)
    assert [Bundle(bundle).manifest.position_rows for bundle in bundles] == [3, 1]
    for chunk in (24, 96):
        ours, theirs = (logits_of(bundle, prompt, prefill_chunk_tokens=chunk) for bundle in bundles)
        assert ours.tobytes() == theirs.tobytes()


def test_frequencies_take_their_axes() -> None:
    config = read_config(NAME)
    decoder = make_decoder(ModelConfig(config))
    assert decoder.rope.axes == (0, 1, 2, 0, 1, 2, 0, 0)
    left_out = {key: value for key, value in config["text_config"]["rope_parameters"].items() if "mrope" not in key}
    config["text_config"] = config["text_config"] | {"rope_parameters": left_out}
    assert make_decoder(ModelConfig(config)).rope.axes == (0, 1, 2, 0, 1, 2, 0, 1)  # [11, 11, 10], all that fits


def test_schedules_and_budgets_do_not_change_a_bit(bundle_of: BundleFactory) -> None:
    bundle = bundle_of(NAME, bits=4)
    prompt = read_reference(NAME)["input_ids"][:40].tolist()
    for engine in (engine for engine in ENGINES if engine != "auto"):
        common: dict[str, Any] = {"engine": engine, "prefill_chunk_tokens": 13}
        expected = logits_of(bundle, prompt, schedule="resident", **common)
        assert np.isfinite(expected).all()
        options = {"schedule": "les", "expert_budget_bytes": 2 * Bundle(bundle).least_budget_bytes}
        assert logits_of(bundle, prompt, **options, **common).tobytes() == expected.tobytes()


@pytest.mark.parametrize("layout", ["shards", "fused", "no prefix"])
def test_layout_does_not_matter(bundle_of: BundleFactory, tmp_path: Path, layout: str) -> None:
    """Experts one by one or fused, one file or several, all of ``model.`` under another name: the same weights."""
    tensors = read_tensors(NAME)
    if layout == "fused":
        tensors = fuse_experts(tensors)
    if layout == "no prefix":
        tensors = {key.removeprefix("model."): value for key, value in tensors.items()}
        tensors = {key.replace("language_model.", "language_model.model."): value for key, value in tensors.items()}
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
        tensors = {f"model.{key}" if key.startswith(("vision", "merger")) else key: v for key, v in tensors.items()}
    checkpoint = derived(tmp_path / "c", read_config(NAME), tensors, num_shards=3 if layout == "shards" else 0)
    assert_same_bundle(bundle_of, NAME, checkpoint)


def test_small_caches_and_mixed_precision(bundle_of: BundleFactory) -> None:
    """What runs the model during an export runs it with three positions a token."""
    prompt = read_reference(NAME)["input_ids"][:48].tolist()
    expected = logits_of(bundle_of(NAME), prompt)
    small = bundle_of(NAME, kv_bits=8)
    assert Bundle(small).manifest.quantization.kv_bits == 8
    assert np.abs(logits_of(small, prompt) - expected).max() < 0.2
    mixed = bundle_of(NAME, bits=4, experts_target_size=1.05, calibration=FIXTURES / NAME / "chat_template.jinja")
    manifest = Bundle(mixed).manifest
    assert manifest.quantization.calibration is not None
    assert manifest.vision is not None
    assert np.isfinite(logits_of(mixed, prompt)).all()


def test_a_drafter_goes_by_places_in_the_sequence(bundle_of: BundleFactory, tmp_path: Path) -> None:
    config, tensors = read_drafter()
    sizes = {192: 64, 576: 192, 2048: 384, 256: 128}
    small = {key: value[tuple(slice(sizes.get(size, size)) for size in value.shape)] for key, value in tensors.items()}
    config |= {
        "hidden_size": 64,
        "vocab_size": 384,
        "num_attention_heads": 2,
        "num_target_layers": 4,
        "markov_rank": 64,
    }
    drafter = write(tmp_path / "drafter", config | {"target_layer_ids": [0, 1, 2]}, small)
    bundle = bundle_of(NAME, drafter=drafter)
    reference = read_reference(NAME)
    prompt = reference["input_ids"][: int(reference["greedy_prompt_len"])].tolist()
    expected = reference["greedy_ids"][:20].tolist()
    assert greedy(bundle, prompt, 20, draft="dspark") == expected


# -- the record --------------------------------------------------------------------------------------------------------


def test_record(bundle_of: BundleFactory) -> None:
    bundle = Bundle(bundle_of(NAME))
    manifest, vision = bundle.manifest, bundle.manifest.vision
    assert vision is not None
    assert manifest.skipped_tensors == {}
    assert [part.role for part in vision.parts] == ["vision_prepare", "vision_tower"]
    assert (vision.patch_size, vision.token_patches, vision.scale_resolution, vision.max_slice_nums) == (14, 4, 112, 9)
    assert vision.tokens.model_dump() == {
        **{"image": 373, "image_start": 375, "image_end": 376, "slice_start": 377, "slice_end": 378, "newline": 198}
    }
    assert vision.texts.model_dump() == {
        **{"placeholder": "<|image_pad|>", "image_start": "<image>", "image_end": "</image>"},
        **{"slice_start": "<slice>", "slice_end": "</slice>", "row_end": "\n", "separator": "\n"},
        **{"id_start": "<image_id>", "id_end": "</image_id>"},
    }
    of_eyes = {key: value.size for key, value in read_tensors(NAME).items() if key.startswith(OF_EYES)}
    assert vision.num_parameters == sum(of_eyes.values())
    others = sum(value.size for key, value in read_tensors(NAME).items() if key not in of_eyes)
    assert manifest.model.num_parameters == others
    checksums = json.loads((bundle.directory / "checksums.json").read_text())["files"]
    assert {"vision/vision.bin", "vision/prepare.onnx", "vision/tower.onnx"} <= set(checksums)
    assert bundle.verify() == len(checksums)


def test_what_it_says_of_itself(bundle_of: BundleFactory, lesonnx: Lesonnx, tmp_path: Path) -> None:
    facts = json.loads(lesonnx("inspect", bundle_of(NAME), "--json").out)["vision"]
    data = (bundle_of(NAME) / "vision/vision.bin").stat().st_size
    assert facts["bytes"] > data > 4 * 100_000
    assert facts["separator"] == "\n"
    assert [part["role"] for part in facts["parts"]] == ["vision_prepare", "vision_tower"]
    assert facts["bits"] == 32
    outcome = lesonnx("export", FIXTURES / NAME, tmp_path / "bundle", "--workers", 1, "--vision-bits", 8)
    assert "vision parts" in outcome.out
    assert (tmp_path / "bundle/vision/vision.bin").stat().st_size < data / 2
    said = lesonnx("inspect", tmp_path / "bundle").out
    assert "minicpmv, 0.1 M parameters" in said
    assert "eyes int8" in said
    assert "│ vision_tower " in said
    described = json.loads(lesonnx("inspect", tmp_path / "bundle", "--json").out)
    assert described["vision"]["bits"] == 8
    assert described["num_parameters"] == described["model"]["num_parameters"] + facts["num_parameters"]


def test_blind(bundle_of: BundleFactory, lesonnx: Lesonnx, tmp_path: Path) -> None:
    blind = bundle_of(NAME, vision=False)
    manifest = Bundle(blind).manifest
    assert manifest.vision is None
    assert not (blind / "vision").exists()
    assert set(manifest.skipped_tensors) == {key for key in read_tensors(NAME) if key.startswith(OF_EYES)}
    assert all("--no-vision" in reason for reason in manifest.skipped_tensors.values())
    assert json.loads(lesonnx("inspect", blind, "--json").out)["vision"] is None
    lines = lesonnx("export", FIXTURES / NAME, tmp_path / "blind", "--no-vision", "--workers", 1).out.splitlines()
    named = f"left out: {len(manifest.skipped_tensors)} tensors (vision tower and merger, left out by --no-vision)"
    assert [line for line in lines if line.startswith("left out")] == [f"{named}; manifest.json has their names"]
    weights = "dense/dense.bin"
    assert (blind / weights).read_bytes() == (bundle_of(NAME) / weights).read_bytes()


def test_an_export_broken_off_in_the_eyes_goes_on(bundle_of: BundleFactory, tmp_path: Path) -> None:
    bundle, options = tmp_path / "bundle", ExportOptions(bits=32, num_workers=1)
    calls = iter(range(100))

    def progress(what: str, num_bytes: int) -> None:
        # What is there already, then a part each.
        if what == "vision parts" and next(calls) == 1:
            raise LesonnxError("broken off")

    with pytest.raises(LesonnxError, match="broken off"):
        export_bundle(FIXTURES / NAME, bundle, options, progress=progress)
    for other in (ExportOptions(bits=32, vision=False), ExportOptions(bits=32, vision_bits=8)):
        with pytest.raises(InputError, match="another checkpoint or options"):
            export_bundle(FIXTURES / NAME, bundle, other, resume=True)
    export_bundle(FIXTURES / NAME, bundle, options, resume=True)
    for name in ("manifest.json", "vision/vision.bin", "vision/tower.onnx", "dense/dense.bin"):
        assert (bundle / name).read_bytes() == (bundle_of(NAME) / name).read_bytes(), name


def test_without_the_window_merger(copied: Path) -> None:
    """4x: four patches give a token, and the merger that is without use is named."""
    edit_json(copied / "config.json", lambda config: config | {"downsample_mode": "4x"})
    with pytest.raises(CheckpointError, match=r"processor_config.json: downsample_mode is '16x', expected '4x' as in"):
        make_plan(Checkpoint(copied), ExportOptions())
    change_processor(copied, {"downsample_mode": "4x"})
    bundle = export_bundle(copied, copied.parent / "bundle", ExportOptions(bits=32, num_workers=1)).manifest
    assert bundle.vision is not None
    assert bundle.vision.token_patches == 2
    assert set(bundle.skipped_tensors) == {key for key in read_tensors(NAME) if "vit_merger" in key}
    assert all("4x" in reason for reason in bundle.skipped_tensors.values())


def change_processor(directory: Path, changes: dict[str, Any]) -> None:
    """Entries of the image processor, in the file that counts."""
    edit_json(
        directory / "processor_config.json",
        lambda outer: outer | {"image_processor": outer["image_processor"] | changes},
    )


def vision_of(directory: Path) -> Any:
    """The record that a checkpoint would have, without its parts."""
    vision = make_plan(Checkpoint(directory), ExportOptions(bits=32)).vision
    assert vision is not None
    return vision.eyes


def test_settings_of_the_processor(copied: Path) -> None:
    change_processor(copied, {"slice_mode": False, "use_image_id": False, "scale_resolution": 224})
    eyes = vision_of(copied)
    assert (eyes.processor.max_slice_nums, eyes.processor.scale_resolution) == (1, 224)
    assert (eyes.texts.id_start, eyes.texts.id_end) == (None, None)
    change_processor(copied, {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3], "max_slice_nums": None})
    pixels = vision_of(copied).processor.pixels
    assert (pixels.mean, pixels.std) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    edit_json(copied / "processor_config.json", lambda outer: outer | {"use_image_id": True})
    assert vision_of(copied).texts.id_start == "<image_id>"
    # Without it the older file counts; its settings are those of the fixture.
    (copied / "processor_config.json").unlink()
    assert vision_of(copied).processor.max_slice_nums == 9


def test_ids_and_texts_stand_in_for_each_other(copied: Path) -> None:
    expected = vision_of(copied)
    original = read_config(NAME)
    marks = ("image_token_id", "image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")
    edit_json(copied / "config.json", lambda _: {key: original[key] for key in original if key not in marks})
    assert vision_of(copied).tokens == expected.tokens
    edit_json(copied / "config.json", lambda _: original)
    edit_json(
        copied / "tokenizer_config.json",
        lambda settings: {key: value for key, value in settings.items() if not key.startswith(("image", "slice"))},
    )
    assert vision_of(copied).texts == expected.texts
    edit_json(
        copied / "tokenizer_config.json",
        lambda settings: settings | {"extra_special_tokens": {"image_token": {"content": "<|image_pad|>"}}},
    )
    assert vision_of(copied).texts == expected.texts


# -- what is refused ---------------------------------------------------------------------------------------------------

Change = Callable[[Path], None]


def config_with(**changes: Any) -> Change:
    return lambda directory: edit_json(directory / "config.json", lambda config: config | changes)


def text_with(**changes: Any) -> Change:
    return lambda directory: edit_json(
        directory / "config.json", lambda config: config | {"text_config": config["text_config"] | changes}
    )


def processor_with(**changes: Any) -> Change:
    return lambda directory: change_processor(directory, changes)


def tokenizer_with(**changes: Any) -> Change:
    return lambda directory: edit_json(directory / "tokenizer_config.json", lambda settings: settings | changes)


def without(*names: str) -> Change:
    def remove(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return remove


def rope_with(**changes: Any) -> Change:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return text_with(rope_parameters=rope | changes)


# What is changed -> what the line says, and whether --no-vision helps.
REFUSED: dict[str, tuple[Change, str, bool]] = {
    "a dense text model": (text_with(model_type="qwen3_5_text"), "only 'qwen3_5_moe_text' is supported for", False),
    "no text model": (config_with(text_config=None), "text_config.model_type is missing", False),
    "sections that do not add up": (rope_with(mrope_section=[4, 2, 1]), "numbers that add up to 8", False),
    "sections of text": (rope_with(mrope_section="422"), "mrope_section must be three whole numbers", False),
    "sections side by side": (rope_with(mrope_interleaved=False), "mrope_interleaved is False", False),
    "mergers after mergers": (config_with(merger_times=2), "merger_times is 2, only 1", True),
    "another kernel": (config_with(merge_kernel_size=[4, 4]), "merge_kernel_size is [4, 4]", True),
    "no tower": (config_with(vision_config=None), "vision_config must be an object", True),
    "an unknown mode": (config_with(downsample_mode="8x"), "downsample_mode is '8x'", True),
    "no processor": (without("processor_config.json", "preprocessor_config.json"), "which say how pictures are", True),
    "no tokenizer": (without("tokenizer.json"), "no tokenizer.json, without which", True),
    "another processor": (processor_with(image_processor_type="CLIPImageProcessor"), "image_processor_type", True),
    "another filter": (processor_with(resample=2), "resample is 2, expected 3 (bicubic)", True),
    "no resizing": (processor_with(do_resize=False), "do_resize is False, expected true", True),
    "no rescaling": (processor_with(do_rescale=False), "do_rescale is False, expected true", True),
    "no normalisation": (processor_with(do_normalize=False), "do_normalize is False, expected true", True),
    "a deviation of nothing": (processor_with(image_std=[0.5, 0, 0.5]), "image_std is [0.5, 0, 0.5], expected", True),
    "two means": (processor_with(image_mean=[0.5, 0.5]), "image_mean is [0.5, 0.5], expected three numbers", True),
    "other patches": (processor_with(patch_size=16), "patch_size is 16, expected 14 as in config.json", True),
    "slices without end": (processor_with(max_slice_nums=10**9), "expected a whole number from 1 to 256", True),
    "an id of another token": (config_with(image_start_id=376), '"<image>" is [375], expected 376', True),
    "an id beyond the vocabulary": (config_with(newline_id=384), "newline_id must be a token id below 384", True),
    "a text of several tokens": (tokenizer_with(slice_end_token="</slice>s"), "is [378, ", True),
    "a text that is a number": (tokenizer_with(image_token=3), "image_token must be a text, found 3", True),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(copied: Path, case: str) -> None:
    change, mentions, helps = REFUSED[case]
    change(copied)
    with pytest.raises(CheckpointError) as caught:
        make_plan(Checkpoint(copied), ExportOptions())
    message = str(caught.value)
    assert mentions in message
    assert "\n" not in message
    assert ("; --no-vision exports the model without its eyes" in message) == helps
    if helps:
        assert make_plan(Checkpoint(copied), ExportOptions(vision=False)).vision is None


def test_a_tensor_that_nobody_knows(tmp_path: Path) -> None:
    tensors = read_tensors(NAME) | {"model.vision_tower.pooler.weight": np.zeros(3, np.float32)}
    checkpoint = derived(tmp_path / "c", read_config(NAME), tensors)
    with pytest.raises(CheckpointError, match=r"vision_tower.pooler.weight.* refusing to leave it out silently"):
        make_plan(Checkpoint(checkpoint), ExportOptions())
    assert "model.vision_tower.pooler.weight" in make_plan(Checkpoint(checkpoint), ExportOptions(vision=False)).skipped


def test_options_that_do_not_fit() -> None:
    checkpoint = Checkpoint(FIXTURES / NAME)
    with pytest.raises(InputError, match="twins take one position a token, minicpmv4_7 has three"):
        make_plan(checkpoint, ExportOptions(accelerate="dense"))
    with pytest.raises(InputError, match="--no-vision leaves them out"):
        make_plan(checkpoint, ExportOptions(vision=False, vision_bits=8))
    with pytest.raises(InputError, match="qwen3_moe takes no pictures"):
        make_plan(Checkpoint(FIXTURES / "qwen3_moe"), ExportOptions(vision_bits=8))


VALUES: list[Any] = [None, True, 0, -1, 3, 1 << 31, 10**30, 0.5, "", "a", [], [[1]], {}, {"content": "a"}, [0.5] * 3]


def test_any_value_anywhere(copied: Path) -> None:
    """Whatever the configurations say is exported or refused in one line; no other exception comes of it."""
    files = ("config.json", "processor_config.json", "tokenizer_config.json")
    rng, taken = random.Random(11), 0
    refused: list[str] = []
    for _ in range(60):
        path = copied / rng.choice(files)
        original = path.read_text(encoding="utf-8")
        document = json.loads(original)
        spot: Any = document
        while True:
            key = rng.choice(list(spot))
            if not isinstance(spot[key], dict) or not spot[key] or rng.random() < 0.1:
                break
            spot = spot[key]
        if rng.random() < 0.2:
            del spot[key]
        else:
            spot[key] = rng.choice(VALUES)
        path.write_text(json.dumps(document), encoding="utf-8")
        try:
            make_plan(Checkpoint(copied), ExportOptions())
            taken += 1
        except CheckpointError as error:
            refused.append(str(error))
        path.write_text(original, encoding="utf-8")
    assert min(len(refused), taken) > 10
    assert not any("\n" in line or len(line) > 1000 for line in refused)


# -- the separator -----------------------------------------------------------------------------------------------------

LOOP = "{% for m in messages %}[{{ m.role }}]%s{% endfor %}"
BY_ITEM = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<P>%s{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (BY_ITEM.replace("%s", ""), ""),
        (BY_ITEM.replace("%s", "\n"), "\n"),
        (BY_ITEM.replace("%s", "{{ loop.index }}"), "otherwise than <P>'1' each"),
        (BY_ITEM.replace("{{ c.text }}", "{{ c.text | trim }}").replace("%s", ""), "a picture and a text otherwise"),
        ("{{ m.content }}", "does not write <P>"),
        (
            "{% if m.content is not string %}{{ raise_exception('text only') }}{% endif %}",
            "refuses pictures: text only",
        ),
    ],
)
def test_separators(content: str, expected: str) -> None:
    template = ChatTemplate({"default": LOOP.replace("%s", content)})
    separator, note = find_separator(template, "<P>")
    if note is None:
        assert separator == expected
    else:
        assert separator is None
        assert expected in note


def test_a_checkpoint_without_a_chat(copied: Path) -> None:
    (copied / "chat_template.jinja").unlink()
    eyes = vision_of(copied)
    assert (eyes.texts.separator, eyes.notes) == (None, [])


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_an_export(bundle_of: BundleFactory, lesonnx: Lesonnx) -> None:
    bundle = Bundle(bundle_of(NAME, bits=4))
    vision = bundle.manifest.vision
    assert vision is not None
    sizes = json.loads(lesonnx("inspect", "--shape", FIXTURES / NAME, "--json").out)
    assert sizes["vision"]["weights_bytes"] == (bundle.directory / vision.data).stat().st_size
    assert sizes["vision"]["working_bytes"] == vision.working_bytes
    assert sizes["vision"]["num_parameters"] == vision.num_parameters
    assert sizes["num_parameters"] == bundle.manifest.model.num_parameters + vision.num_parameters
    photo = sum(view.num_tokens(vision) for view in views(3000, 4000, vision))
    assert sizes["vision"]["image_tokens"]["4000x3000"] == photo
    dense = (bundle.directory / "dense/dense.bin").stat().st_size
    data = (bundle.directory / vision.data).stat().st_size
    assert sizes["bundle_bytes"] == bundle.expert_bytes + dense + data


def test_the_real_models_size() -> None:
    """The shape has as many parameters as are published, and its eyes fit where experts make room."""
    sizes = sizes_of(SHAPES["minicpm-v-4.7-35b-a3b"], ExportOptions())
    assert sizes.vision is not None
    assert sizes.num_parameters == PUBLISHED_PARAMETERS
    assert sizes.vision.image_tokens == {"448x448": 64, "1920x1080": 578, "4000x3000": 630}
    assert sizes.vision.seeing_bytes < sizes.suggested_memory_bytes - sizes.memory_without_experts_bytes
    assert suggested_budget(sizes, 8 * 10**9) == 4 * 10**9
    assert suggested_budget(sizes, 4 * 10**9) is None
    blind = sizes_of(SHAPES["minicpm-v-4.7-35b-a3b"], ExportOptions(vision=False))
    assert blind.vision is None
    assert sizes.bundle_bytes - blind.bundle_bytes == sizes.vision.weights_bytes
    assert sizes.num_parameters - blind.num_parameters == sizes.vision.num_parameters


@pytest.mark.parametrize("name", [NAME, "qwen3_vl_moe"])
def test_reading_takes_what_a_run_asks_for(bundle_of: BundleFactory, lesonnx: Lesonnx, name: str) -> None:
    bundle = Bundle(bundle_of(name, bits=4))
    vision = bundle.manifest.vision
    sizes = sizes_of(*with_options(name, ExportOptions()))
    assert vision is not None
    assert sizes.vision is not None
    asked = {
        f"{width}x{height}": bytes_in_a_run(
            bundle, [Shown("", height, width, tuple(rules.views(height, width, vision)), None)]
        )
        for height, width in TYPICAL_PICTURES
    }
    assert sizes.vision.reading_bytes == asked
    said = json.loads(lesonnx("inspect", bundle.directory, "--json").out)["vision"]
    assert said["photo_bytes"] == sizes.vision.photo_bytes


def with_options(name: str, options: ExportOptions) -> tuple[dict[str, Any], ExportOptions, Path | None]:
    config, directory = read_shape(str(FIXTURES / name))
    return config, options, directory


def test_a_budget_that_is_suggested_reads_a_photo() -> None:
    """Whatever the device, where the model is seen to fit; or the verdict says what a photo wants."""
    for shape, options, directory in (
        with_options(NAME, ExportOptions()),
        (SHAPES["minicpm-v-4.7-35b-a3b"], ExportOptions(), None),
    ):
        sizes = sizes_of(shape, options, directory)
        for memory_bytes in (2 * sizes.least_memory_bytes, 8 * 10**9, 64 * 10**9):
            budget = suggested_budget(sizes, memory_bytes)
            assert budget is not None
            assert budget >= photo_budget(sizes)
            assert "megapixels" not in verdict(sizes, memory_bytes)
    sizes = sizes_of(SHAPES["qwen3-vl-30b-a3b"], ExportOptions())
    assert "a photo of 12 megapixels would want 9GB" in verdict(sizes, 8 * 10**9)
    assert "megapixels" not in verdict(sizes, 64 * 10**9)


def test_bits_of_a_shape(bundle_of: BundleFactory, lesonnx: Lesonnx) -> None:
    """As an export has them; bits of eyes that there are not are refused."""
    asked = ("--bits", 4, "--dense-bits", 8, "--vision-bits", 32)
    sizes = json.loads(lesonnx("inspect", "--shape", FIXTURES / NAME, *asked, "--json").out)
    exported = Bundle(bundle_of(NAME, bits=4, dense_bits=8, vision_bits=32)).directory
    assert (sizes["bits"], sizes["dense_bits"], sizes["vision"]["bits"]) == (4, 8, 32)
    assert sizes["dense_bytes"] == (exported / "dense/dense.bin").stat().st_size
    assert sizes["vision"]["weights_bytes"] == (exported / "vision/vision.bin").stat().st_size
    blind = lesonnx("inspect", "--shape", FIXTURES / NAME, "--no-vision", "--vision-bits", 4)
    assert "--vision-bits 4 is for the parts that read pictures: --no-vision leaves them out" in blind.error
    assert "olmoe takes no pictures" in lesonnx("inspect", "--shape", "olmoe-1b-7b", "--vision-bits", 4).error
    assert lesonnx("inspect", exported, "--vision-bits", 4).code == 2


def test_working_bytes_are_those_of_the_largest_crop(bundle_of: BundleFactory) -> None:
    vision = Bundle(bundle_of(NAME)).manifest.vision
    assert vision is not None
    tower = vision_of(FIXTURES / NAME).tower
    assert vision.working_bytes == working_bytes(tower, max_crop_tokens(vision) * vision.token_patches**2)
    largest = max(
        view.crop_tokens(vision)[0] * view.crop_tokens(vision)[1]
        for height, width in ((100, 1100), (112, 112), (1, 1), (777, 5000))
        for view in views(height, width, vision)
    )
    assert largest <= max_crop_tokens(vision)
