"""The float run is the checkpoint's own forward pass, of every family; what it keeps is what the experts read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import FIXTURES, SAMPLE, Tensors, derive, read_reference

from lesonnx.errors import CheckpointError, InputError
from lesonnx_export import activations
from lesonnx_export.activations import FloatRun, calibration_steps, run_calibration
from lesonnx_export.checkpoint import Checkpoint
from lesonnx_export.plan import ExportOptions, ExportPlan, make_plan
from lesonnx_export.statistics import SUMMARY_NAME, StatisticsDirectory, to_stored

IDS = [int(token) for token in np.random.default_rng(3).integers(2048, size=700)]


def plan_of(checkpoint: Path) -> ExportPlan:
    return make_plan(Checkpoint(checkpoint), ExportOptions())


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir() if (path / "reference.npz").exists()))
def test_the_float_run_gives_the_references_logits(name: str, tmp_path: Path) -> None:
    reference = read_reference(name)
    ids, plan = reference["input_ids"].tolist(), plan_of(FIXTURES / name)
    run = FloatRun(plan, tmp_path)
    # Twice the same window: windows do not know of each other.
    windows = run.begin([ids[: len(ids) // 2], ids, ids])
    for place in range(len(plan.layers)):
        run.compute(place, windows, run.route(place, windows))
    with run.judge() as logits:
        found = [logits(window, np.arange(len(window.ids))) for window in windows]
    assert np.abs(found[1] - reference["logits"]).max() < 1e-3
    assert np.abs(found[2] - found[1]).max() < 1e-5
    assert np.abs(found[0] - reference["logits"][: len(ids) // 2]).max() < 1e-3
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> StatisticsDirectory:
    return run_calibration(plan_of(SAMPLE), IDS, tmp_path_factory.mktemp("calibration"))


def test_every_token_is_kept_with_its_experts(statistics: StatisticsDirectory) -> None:
    # 512 and 188 tokens, and a window of random ones.
    num_tokens = len(IDS) + 512
    for layer_idx in range(6):
        layer = statistics.layer(layer_idx)
        assert layer.num_tokens == num_tokens
        assert layer.expert_tokens.sum() == 4 * num_tokens
        assert len(layer.expert_tokens) == 32
        assert np.allclose(layer.topk_weights.sum(axis=1), 1, atol=1e-5)
        rows = layer.rows(7)
        assert len(rows.inputs) == len(rows.weights) == layer.expert_tokens[7]
        used = (layer.topk_ids == 7).any(axis=1)
        assert np.array_equal(rows.inputs, layer.inputs[used].astype(np.float32) * np.float32(layer.input_scale))


def test_sensitivities_are_what_noise_costs(statistics: StatisticsDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rise of KL is about in proportion to the noise: a loss can be told from errors of other sizes."""
    found = [statistics.layer(layer_idx).sensitivity for layer_idx in range(6)]
    assert min(found) > 0
    monkeypatch.setattr(activations, "NOISE_SHARE", activations.NOISE_SHARE / 4)
    directory = statistics.directory.parent / "less_noise"
    less = run_calibration(plan_of(SAMPLE), IDS, directory)
    ratios = np.array([less.layer(layer_idx).sensitivity for layer_idx in range(6)]) / found
    assert 0.5 < ratios.min() < ratios.max() < 2


def test_a_finished_run_is_not_run_again(
    statistics: StatisticsDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, counted = plan_of(SAMPLE), [0]

    def count(what: str, steps: int) -> None:
        counted[0] += steps

    monkeypatch.setattr(activations, "FloatRun", None)
    again = run_calibration(plan, IDS, statistics.directory, count)
    assert again.layer(3).sensitivity == statistics.layer(3).sensitivity
    assert counted[0] == calibration_steps(plan)
    (tmp_path / "layer_000").mkdir()
    assert not StatisticsDirectory(tmp_path).is_complete


@pytest.mark.parametrize("name", ["qwen2_moe", "smallthinker", "qwen3_next"])
def test_other_families(name: str, tmp_path: Path) -> None:
    """With shared experts, with a router before attention, with recurrent layers: to the end, and finite."""
    plan = plan_of(FIXTURES / name)
    ids = [token % plan.architecture.vocab_size for token in IDS[:40]]
    found = run_calibration(plan, ids, tmp_path)
    for layer in plan.layers:
        kept = found.layer(layer.layer_idx)
        assert (kept.shared_weights is not None) == (layer.shared_kind is not None)
        assert np.isfinite(kept.inputs).all()
        assert kept.sensitivity > 0
        if layer.shared_kind is not None:
            assert len(kept.rows(None).inputs) == kept.num_tokens


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "has 0 tokens"), ([5], "has 1 tokens"), ([5, 2048], "outside 0..2047"), ([-1, 4], "outside 0..2047")],
)
def test_bad_ids(ids: list[int], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        run_calibration(plan_of(SAMPLE), ids, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_activations_that_are_not_finite(tmp_path: Path) -> None:
    def enlarge(tensors: Tensors) -> Tensors:
        name = next(name for name in tensors if name.endswith("layers.1.post_attention_layernorm.weight"))
        return tensors | {name: np.full(tensors[name].shape, 3e38, np.float32)}

    checkpoint = derive("qwen3_moe", tmp_path / "checkpoint", tensors=enlarge)
    with pytest.raises(CheckpointError, match="layer 1: what its experts read .* is not finite"):
        run_calibration(plan_of(checkpoint), [1, 2, 3], tmp_path / "new")


def test_stored_inputs_keep_their_size() -> None:
    values = np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)
    for factor in (1e-30, 1e-3, 1.0, 1e6, 1e30):
        stored, scale = to_stored(values * np.float32(factor))
        assert np.isfinite(stored).all()
        assert np.allclose(stored.astype(np.float64) * scale, values * factor, rtol=1e-3, atol=factor * 1e-6)
    assert not to_stored(np.zeros((2, 3), np.float32))[0].any()


def test_files_that_are_not_whole(statistics: StatisticsDirectory, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{SUMMARY_NAME}: not readable"):
        _ = StatisticsDirectory(tmp_path).summary
    (tmp_path / SUMMARY_NAME).write_text('{"version": 0}')
    with pytest.raises(InputError, match="version 0, expected 1"):
        _ = StatisticsDirectory(tmp_path).summary
    (tmp_path / SUMMARY_NAME).write_bytes((statistics.directory / SUMMARY_NAME).read_bytes())
    (tmp_path / "layer_000").mkdir()
    (tmp_path / "layer_000" / "inputs.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(InputError, match=r"inputs\.npy: not readable as calibration statistics"):
        StatisticsDirectory(tmp_path).layer(0)
    with pytest.raises(InputError, match="has no layer 9"):
        StatisticsDirectory(tmp_path).layer(9)
