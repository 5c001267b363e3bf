"""Experts of several precisions in one bundle: what a kind is, that engines agree, that schedules change nothing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import fixture, read_reference
from conftest import BundleFactory
from forward import file_bytes
from numpy.typing import NDArray
from test_parity import ENGINES_HERE, logits_of

from lesonnx.bundle import Bundle
from lesonnx.engines import LayerWork, make_engine
from lesonnx.engines.kernel import why_not
from lesonnx.errors import InputError
from lesonnx.manifest import MATRIX_NAMES
from lesonnx_export.expert import ExpertPrecision, MatrixPrecision
from lesonnx_export.exporter import ExportOptions, export_bundle
from lesonnx_export.plan import LayerPrecision

NAME = "qwen2_moe"  # three layers, a shared expert in each; hidden 64, experts of 32, shared ones of 64


def expert(*matrices: tuple[Any, int]) -> ExpertPrecision:
    return ExpertPrecision(*(MatrixPrecision(bits, block) for bits, block in matrices))


EIGHT, FOUR, TWO = (expert(*[(bits, 16)] * 3) for bits in (8, 4, 2))
TORN = expert((2, 16), (4, 32), (8, 32))
MIXED = (
    LayerPrecision(TORN, FOUR),
    LayerPrecision(TWO, EIGHT),
    LayerPrecision(EIGHT, expert((2, 64), (2, 64), (4, 16))),
)


@pytest.fixture
def bundle(bundle_of: BundleFactory) -> Path:
    return bundle_of(NAME, bits=4, dense_bits=32, precisions=MIXED)


def test_every_layer_has_what_was_asked_for(bundle: Path) -> None:
    manifest = Bundle(bundle).manifest
    assert manifest.expert_bits == [2, 4, 8]
    for layer, precision in zip(manifest.expert_layers, MIXED, strict=True):
        for place, wanted in ((layer.kind, precision.routed), (layer.shared_kind, precision.shared)):
            assert place is not None
            matrices = manifest.expert_kinds[place].matrices
            assert [(matrices[name].bits, matrices[name].block_size) for name in MATRIX_NAMES] == list(wanted)
    assert len({kind.cost_bytes for kind in manifest.expert_kinds}) >= 3


def test_every_expert_is_a_model_of_its_own(bundle: Path) -> None:
    opened = Bundle(bundle)
    for expert in opened.experts:
        onnx.checker.check_model(str(opened.model_file(expert)))


def test_layers_of_one_layout_share_a_kind(bundle_of: BundleFactory) -> None:
    """Block sizes that come to the same count as the same; routed and shared experts never share."""
    wide, narrow = expert(*[(4, 128)] * 3), expert((4, 64), (4, 64), (4, 32))
    precisions = (LayerPrecision(wide, wide), LayerPrecision(EIGHT, wide), LayerPrecision(narrow, wide))
    manifest = Bundle(bundle_of(NAME, bits=4, precisions=precisions)).manifest
    assert [(layer.kind, layer.shared_kind) for layer in manifest.expert_layers] == [(0, 1), (2, 1), (0, 1)]
    assert [kind.stage for kind in manifest.expert_kinds] == [f"experts/stage_{number}.onnx" for number in range(3)]


def test_all_layers_alike_are_a_plain_export(bundle_of: BundleFactory) -> None:
    stated = (LayerPrecision.uniform(4, 128),) * 3
    assert file_bytes(bundle_of(NAME, bits=4, precisions=stated)) == file_bytes(bundle_of(NAME, bits=4))


@pytest.mark.parametrize("num_rows", [1, 9])
def test_engines_agree_on_every_expert(bundle: Path, num_rows: int) -> None:
    """The kernel against plain sessions, which know nothing of packs and kinds. Both round activations to 8 bits."""
    opened = Bundle(bundle)
    if reason := why_not(opened):
        pytest.skip(reason)
    kernel, session = (outputs(opened, engine, num_rows) for engine in ("kernel", "session"))
    for ours, plain in zip(kernel, session, strict=True):
        assert np.abs(ours - plain).max() < 0.02 * np.abs(plain).max()


def outputs(bundle: Bundle, engine_name: str, num_rows: int) -> list[NDArray[np.float32]]:
    """What every expert gives for the same rows, one expert at a time."""
    model, found = bundle.manifest.model, []
    hidden = np.random.default_rng(5).standard_normal((num_rows, model.hidden_size)).astype(np.float32)
    engine = make_engine(engine_name, bundle, 1)
    try:
        engine.resize([max(kind.cost_bytes for kind in bundle.manifest.expert_kinds)])
        for expert in bundle.experts:
            slots = model.num_experts_per_tok
            ids = np.zeros((num_rows, slots), np.int64)
            out = np.zeros((num_rows, slots, model.hidden_size), np.float32)
            shared = np.zeros_like(hidden)
            rows = {expert.number: np.arange(num_rows) * slots}
            work = LayerWork(expert.number - (expert.expert_idx or 0), ids, hidden, out, shared, rows)
            engine.load(expert, 0, 0)
            engine.compute([expert], work)
            engine.evict(expert)
            found.append(shared if expert.expert_idx is None else out[:, 0])
    finally:
        engine.close()
    return found


@pytest.mark.parametrize("engine", ENGINES_HERE)
def test_schedules_and_budgets_do_not_change_a_bit(bundle: Path, engine: str) -> None:
    prompt = read_reference(NAME)["input_ids"].tolist()[:40]
    opened = Bundle(bundle)
    least, most = opened.least_budget_bytes, opened.expert_bytes
    budgets = range(least, most + 1, max(4096, (most - least) // 7 // 4096 * 4096))
    runs = [
        logits_of(bundle, prompt, engine=engine, **options)
        for options in (
            {"schedule": "resident"},
            {"schedule": "on-demand", "expert_budget_bytes": least},
            {"schedule": "cache", "expert_budget_bytes": 2 * least},
            *({"schedule": "les", "expert_budget_bytes": budget} for budget in budgets),
        )
    ]
    assert all(np.array_equal(one, other) for one, other in itertools.pairwise(runs))


def test_precisions_for_other_layers(tmp_path: Path) -> None:
    options = ExportOptions(bits=4, precisions=MIXED[:2], num_workers=1)
    with pytest.raises(InputError, match="precisions are given for 2 layers, 3 have experts"):
        export_bundle(fixture(NAME), tmp_path / "bundle", options)
