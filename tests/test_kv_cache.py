"""8-bit attention caches: scales from a calibration run, parts rewritten once, resumable in between."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import RECURRENT, fixture
from conftest import BundleFactory
from forward import file_bytes

import lesonnx
import lesonnx_export.calibrate as calibrate
import lesonnx_export.exporter as exporter
import lesonnx_export.kv_cache as kv_cache
from lesonnx.bundle import Bundle
from lesonnx.errors import LesonnxError
from lesonnx_export.calibrate import CALIBRATION_TOKENS, WINDOW_TOKENS, cache_spans, calibration_ids
from lesonnx_export.exporter import ExportOptions, export_bundle
from lesonnx_export.kv_cache import CODE_LIMIT, HEADROOM, rewrite, scales_of

NAME = "qwen3_moe"
OPTIONS = ExportOptions(bits=4, kv_bits=8, num_workers=1)


class Broken(Exception):
    """What stands for the end of the process in these tests."""


def test_scales_cover_the_spans() -> None:
    span = np.array([[1, 4, 0], [2, 2, 8]], np.float32)
    scale = scales_of({"key_0": span})["key_0"]
    assert (scale > 0).all()
    assert scale[span > 0] == pytest.approx(span[span > 0] * HEADROOM / CODE_LIMIT)
    with pytest.raises(LesonnxError, match="key_1 is not finite"):
        scales_of({"key_1": np.array([[np.inf]], np.float32)})


def test_a_cache_of_nothing_has_a_scale() -> None:
    assert (scales_of({"value_0": np.zeros((2, 4), np.float32)})["value_0"] > 0).all()


def test_the_bundle_says_what_it_has(bundle_of: BundleFactory) -> None:
    bundle, plain = Bundle(bundle_of(NAME, bits=4, kv_bits=8)), Bundle(bundle_of(NAME, bits=4))
    manifest = bundle.manifest
    assert manifest.quantization.kv_bits == 8
    assert manifest.onnxruntime_at_least == "1.29"
    assert {state.dtype for state in manifest.states} == {"int8"}
    caches = {name for state in manifest.states for name in (state.input, state.output)}
    for part in manifest.parts:
        model = onnx.load(str(bundle.part_file(part)), load_external_data=False)
        for declared, given in (
            (part.inputs, model.graph.input),
            (part.outputs, model.graph.output),
        ):
            for value, proto in zip(declared, given, strict=True):
                assert (value.dtype == "int8") == (value.name in caches)
                assert (proto.type.tensor_type.elem_type == onnx.TensorProto.INT8) == (value.name in caches)
    # Nothing else differs, and what is rewritten is not rewritten again.
    files, others = file_bytes(bundle.directory), file_bytes(plain.directory)
    changed = {path for path in files if files[path] != others[path]}
    carrying = {part.path for part in manifest.parts if any(state.part == part.name for state in manifest.states)}
    assert changed == carrying | {"manifest.json", "checksums.json"}
    states = {state.input: state for state in manifest.states}
    assert not any(rewrite(onnx.load_from_string(files[path]), states, {}) for path in carrying)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_states_stay_float(name: str, bundle_of: BundleFactory) -> None:
    """Only attention is quantized: what else is carried differs by no more than attention's rounding explains."""
    eight, plain = bundle_of(name, kv_bits=8), bundle_of(name)
    for state in Bundle(eight).manifest.states:
        assert state.dtype == ("int8" if state.is_attention else "float32")
    ids = list(range(5, 45))
    logits = []
    for bundle in (eight, plain):
        with lesonnx.load(bundle) as model:
            model.runner.prefill(ids[:-8])
            logits.append(model.runner.step(ids[-8:], range(8)).copy())
            # Back into the step: replays run on float32 as ever.
            model.runner.rewind(len(ids) - 5)
            logits.append(model.runner.step(ids[-5:], range(5)).copy())
    assert 0 < np.abs(logits[0] - logits[2]).mean() < 0.05 * logits[2].std()
    assert np.abs(logits[0][3:] - logits[1]).max() < 0.05


def test_caches_hold_rounded_values(bundle_of: BundleFactory) -> None:
    """The first layer's caches are those of the float bundle, rounded by the scales and clipped."""
    eight, plain = bundle_of(NAME, kv_bits=8), bundle_of(NAME)
    ids = list(range(5, 45))
    held: list[dict[str, Any]] = []
    for bundle in (eight, plain):
        with lesonnx.load(bundle) as model:
            model.runner.prefill(ids)
            held.append({name: a[0, :, : len(ids)].copy() for name, a in model.runner.states.arrays.items()})
    scales = scales_of(cache_spans(plain))
    for name in ("key_0", "value_0"):
        codes = np.clip(np.rint(held[1][name] / scales[name][:, None]), -128, 127)
        # A value that lies between two codes may go either way: the product's last bit decides.
        assert np.abs(codes - held[0][name]).max() <= 1
        assert (codes == held[0][name]).mean() > 0.99


def test_calibration_text(bundle_of: BundleFactory, sample_bundle: Path) -> None:
    ids = calibration_ids(Bundle(sample_bundle))
    assert len(ids) == CALIBRATION_TOKENS
    assert ids == calibration_ids(Bundle(sample_bundle))
    assert "assert" in lesonnx.tokenizer.Tokenizer.from_file(sample_bundle / "tokenizer/tokenizer.json").decode(ids)


def test_random_tokens_without_a_tokenizer(tmp_path: Path, bundle_of: BundleFactory) -> None:
    bundle = Bundle(bundle_of(NAME))
    without = bundle.manifest.model_copy(update={"tokenizer": None})
    bundle.manifest = without
    ids = calibration_ids(bundle)
    assert len(ids) == CALIBRATION_TOKENS
    assert 0 <= min(ids) <= max(ids) < without.model.vocab_size


def test_windows_begin_with_nothing(monkeypatch: pytest.MonkeyPatch, bundle_of: BundleFactory) -> None:
    bundle = bundle_of(NAME)
    window = min(WINDOW_TOKENS, Bundle(bundle).manifest.model.max_position_embeddings)
    monkeypatch.setattr(calibrate, "calibration_ids", lambda _: [5, 6, 7] * window)
    spans = cache_spans(bundle)
    with lesonnx.load(bundle) as model:
        for start in range(3):
            model.runner.rewind(0)
            model.runner.prefill(([5, 6, 7] * window)[start * window : (start + 1) * window])
            for name, array in model.runner.states.arrays.items():
                most = np.abs(array[0, :, :window]).max(axis=1)
                assert (most <= spans[name]).all()


@pytest.mark.parametrize("where", ["cache_spans", "quantize_caches", "rewrite"])
def test_resumes(where: str, quick_path: Path, bundle_of: BundleFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken off in the run, before the first part is rewritten, or after one: the same bytes in the end."""
    bundle = quick_path / "bundle"
    module: Any = kv_cache if where == "rewrite" else exporter
    original = getattr(module, where)
    calls = []

    def broken(*arguments: Any) -> Any:
        calls.append(where)
        if len(calls) == (2 if where == "rewrite" else 1):
            raise Broken
        return original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(module, where, broken)
        with pytest.raises(Broken):
            export_bundle(fixture(NAME), bundle, OPTIONS)
    assert not bundle.exists()
    if where != "cache_spans":
        # What the run found is kept.
        monkeypatch.setattr(exporter, "cache_spans", lambda directory: pytest.fail("ran again"))
    export_bundle(fixture(NAME), bundle, OPTIONS, resume=True)
    assert file_bytes(bundle) == file_bytes(bundle_of(NAME, bits=4, kv_bits=8))
    assert os.listdir(quick_path) == [bundle.name]
