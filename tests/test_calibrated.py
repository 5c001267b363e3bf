"""Exports that calibrate: a share of the bytes is kept, what is done is not done again, bad input is said first."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import SAMPLE, fixture, one_layer, read_config, write_checkpoint
from conftest import Outcome
from forward import file_bytes
from plain_dspark import DRAFTER

import lesonnx_export.calibrated as calibrated
import lesonnx_export.exporter as exporter
from lesonnx.bundle import Bundle
from lesonnx.errors import InputError
from lesonnx.manifest import MATRIX_NAMES
from lesonnx_export.calibrate import random_ids
from lesonnx_export.calibrated import Text
from lesonnx_export.checkpoint import Checkpoint
from lesonnx_export.executors import run_on
from lesonnx_export.expert import ExpertPrecision
from lesonnx_export.exporter import ExportOptions, export_bundle
from lesonnx_export.journal import Journal
from lesonnx_export.plan import make_plan
from lesonnx_export.precision import (
    HALVES,
    Decision,
    baseline_bytes,
    decide,
    groups_of,
    layer_precisions,
    target_bytes,
)
from lesonnx_export.synth import SyntheticCheckpoint, SyntheticWeights

Call = Callable[..., Outcome]
NUM_TOKENS = 1024
ALONE = ExportOptions(experts_target_size=0.75, num_workers=1)


@pytest.fixture(scope="module")
def decisions() -> list[Decision]:
    return []


@pytest.fixture(scope="module", autouse=True)
def few_tokens() -> Iterator[None]:
    """Random tokens are the same in any number: a quarter of them makes the tests four times as quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrated, "random_ids", lambda vocab_size: random_ids(vocab_size)[:NUM_TOKENS])
        yield


@pytest.fixture(scope="module")
def checkpoint(quick_root: Path) -> Path:
    """Two layers of 4 experts and a shared one, random weights, no tokenizer; an expert is 4 pages in 4 bits."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    layers = {"num_hidden_layers": 2, "num_experts": 4, "layer_types": ["full_attention"] * 2}
    config = read_config("qwen2_moe") | sizes | layers
    synthetic = SyntheticCheckpoint(config)
    make_plan(synthetic, ExportOptions(), SyntheticWeights(synthetic, rehearsal=True, tied=False))
    rng = np.random.default_rng(0)
    tensors = {}
    for name, info in synthetic.tensors.items():
        values = np.ones(info.shape) if "norm" in name else rng.standard_normal(info.shape) * info.shape[-1] ** -0.5
        tensors[name] = values.astype(np.float32)
    return write_checkpoint(quick_root / "checkpoint", config, tensors)


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, quick_root: Path, decisions: list[Decision]) -> Path:
    """A bundle in mixed precision that nothing disturbed."""
    return export_bundle(
        checkpoint, quick_root / "mixed", ALONE, decided=lambda plan, found: decisions.extend(found)
    ).bundle


def losses_like(groups: list[Any], of: Callable[[int, int], float]) -> list[list[list[float]]]:
    """Losses of all groups: ``of(layer_idx, bits)`` for both halves alike."""
    return [
        [[of(group.layer_idx, precision.bits) for precision in group.precisions(half)] for half in range(len(HALVES))]
        for group in groups
    ]


# -- the choice --------------------------------------------------------------------------------------------------------


def test_a_layer_that_matters_more_gets_more() -> None:
    groups = groups_of(make_plan(Checkpoint(SAMPLE), ExportOptions()).architecture)
    most = target_bytes(groups, 0.733, 128)
    found = decide(
        groups, losses_like(groups, lambda layer, bits: (100.0 if layer == 2 else 1.0) * 16.0**-bits), most, 128
    )
    bits = [sum(matrix.bits for matrix in decision.precision) for decision in found]
    assert sum(decision.cost_bytes for decision in found) <= most < baseline_bytes(groups, 128)
    assert bits[2] == max(bits) > min(bits)
    assert [precision.routed for precision in layer_precisions(found)] == [decision.precision for decision in found]
    assert all(decision.loss_at_4 < decision.loss_at_2 for decision in found)


def test_gate_and_up_are_alike_and_all_precisions_fit_their_columns(checkpoint: Path) -> None:
    for group in groups_of(make_plan(Checkpoint(checkpoint), ExportOptions()).architecture):
        for _, _, precision in group.options():
            matrices = group.kind(precision).matrices
            assert precision.gate_proj == precision.up_proj
            assert [matrices[name].block_size for name in MATRIX_NAMES] == [m.block_size for m in precision]


@pytest.mark.parametrize("share", [0.01, 0.3, 9.0, math.nan])
def test_sizes_that_no_choice_has(lesonnx: Call, quick_path: Path, share: float) -> None:
    outcome = lesonnx("export", SAMPLE, quick_path / "bundle", "--experts-target-size", share)
    assert outcome.code == 2
    assert outcome.error == (
        f"error: --experts-target-size {share:g}: experts of this model can have 0.5 to 1.666 of the 4,718,592 bytes of"
        " uniform 4 bits"
    )
    assert not list(quick_path.iterdir())


def test_the_least_size_can_be_had() -> None:
    groups = groups_of(make_plan(Checkpoint(SAMPLE), ExportOptions()).architecture)
    found = decide(groups, losses_like(groups, lambda layer, bits: 1.0 / bits), target_bytes(groups, 0.5, 128), 128)
    assert {matrix.bits for decision in found for matrix in decision.precision} == {2}


# -- the bundle --------------------------------------------------------------------------------------------------------


def test_the_bytes_are_kept_and_the_manifest_says_how(
    checkpoint: Path, bundle: Path, decisions: list[Decision]
) -> None:
    opened = Bundle(bundle)
    record = opened.manifest.quantization.calibration
    assert record is not None
    assert record.baseline_bytes == make_plan(Checkpoint(checkpoint), ExportOptions()).expert_bytes
    assert opened.expert_bytes <= 0.75 * record.baseline_bytes
    assert opened.expert_bytes == sum(decision.cost_bytes for decision in decisions)
    assert (record.target_size, record.text_sha256, record.num_tokens) == (0.75, None, NUM_TOKENS)
    assert [layer.layer_idx for layer in record.layers] == [0, 1]
    assert all(layer.expected_loss > 0 for layer in record.layers)
    stored = json.loads((bundle / "manifest.json").read_text())["quantization"]
    assert (stored["expert_bits"], stored["block_size"]) == (4, 128)
    by_layer = {(d.group.layer_idx, d.group.is_shared): d.precision for d in decisions}
    for layer in opened.manifest.expert_layers:
        for place, is_shared in ((layer.kind, False), (layer.shared_kind, True)):
            assert place is not None
            matrices = opened.manifest.expert_kinds[place].matrices
            wanted: ExpertPrecision = by_layer[layer.layer_idx, is_shared]
            assert [(m.bits, m.block_size) for m in matrices.values()] == list(wanted)
    assert not (bundle / calibrated.DIRECTORY).exists()


def test_who_does_the_work_does_not_change_a_byte(checkpoint: Path, bundle: Path, quick_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        tasks = partial(run_on, pool, 2)
        threads = export_bundle(checkpoint, quick_path / "threads", ALONE, run_tasks=tasks).bundle
    assert file_bytes(threads) == file_bytes(bundle)
    options = ExportOptions(experts_target_size=0.75, num_workers=2)
    assert file_bytes(export_bundle(checkpoint, quick_path / "two", options).bundle) == file_bytes(bundle)


def test_uniform_bits_for_a_text(lesonnx: Call, quick_path: Path, bundle_of: Any) -> None:
    text = "".join(f"Line {number}: the list of values is sorted by {number * 7919 % 101}.\n" for number in range(40))
    (quick_path / "text.txt").write_text(text)
    arguments = ("--bits", "4", "--dense-bits", "8", "--calibration", quick_path / "text.txt", "--workers", "1")
    checkpoint = one_layer(quick_path / "checkpoint")
    outcome = lesonnx("export", checkpoint, quick_path / "bundle", *arguments)
    assert outcome.code == 0, outcome.err
    manifest = Bundle(quick_path / "bundle").manifest
    record = manifest.quantization.calibration
    assert record is not None
    assert (record.target_size, record.text_sha256) == (None, hashlib.sha256(text.encode()).hexdigest())
    assert manifest.expert_bits == [4]
    shown = lesonnx("inspect", quick_path / "bundle").out
    assert f"on {record.num_tokens:,} tokens of a text ({record.text_sha256[:12]}…); 1.000 of" in shown
    assert "expected loss" in shown
    plain = Bundle(bundle_of(checkpoint, bits=4, dense_bits=8))
    assert [layer.kind for layer in plain.manifest.expert_layers] == [layer.kind for layer in manifest.expert_layers]


# -- broken off and gone on with ---------------------------------------------------------------------------------------


class Broken(Exception):
    """What stands for the end of the process."""


@pytest.mark.parametrize("done", ["calibration", "losses", "experts"])
def test_resume(checkpoint: Path, bundle: Path, quick_path: Path, monkeypatch: pytest.MonkeyPatch, done: str) -> None:
    """Broken off after each sort of entry in the journal, what came before is not done again."""
    original = Journal.add

    def add(self: Journal, what: str, *arguments: Any, **details: Any) -> None:
        original(self, what, *arguments, **details)
        if what == done:
            raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", add)
        with pytest.raises(Broken):
            export_bundle(checkpoint, quick_path / "bundle", ALONE)

    def again(*arguments: Any) -> Any:
        raise AssertionError("this was done before")

    monkeypatch.setattr(calibrated, "run_calibration", again)
    if done != "calibration":
        monkeypatch.setattr(calibrated, "weigh", again)
    report = export_bundle(checkpoint, quick_path / "bundle", ALONE, resume=True)
    assert file_bytes(report.bundle) == file_bytes(bundle)


def test_another_text_or_size_is_another_export(
    checkpoint: Path, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(exporter, "calibrate", interrupted)
        with pytest.raises(Broken):
            export_bundle(checkpoint, quick_path / "bundle", ALONE)
    (quick_path / "text.txt").write_text("Words.")
    for options in (
        ExportOptions(experts_target_size=0.76),
        ExportOptions(experts_target_size=0.75, calibration=quick_path / "text.txt"),
    ):
        with pytest.raises(InputError, match="was begun with another checkpoint or options"):
            export_bundle(checkpoint, quick_path / "bundle", options, resume=True)


def test_a_kept_calibration_serves_other_sizes(
    lesonnx: Call, checkpoint: Path, bundle: Path, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = quick_path / "kept"
    arguments = ("--experts-target-size", "0.9", "--calibration-directory", kept, "--workers", "1")
    shown = lesonnx("export", checkpoint, quick_path / "one", *arguments).out
    assert "Precision of the experts: at most 0.9 of the bytes of 4 bits" in shown
    assert sum("shared" in line for line in shown.splitlines()) == 2
    monkeypatch.setattr(calibrated, "weigh", None)
    options = ExportOptions(experts_target_size=0.75, calibration_directory=kept, num_workers=1)
    assert file_bytes(export_bundle(checkpoint, quick_path / "two", options).bundle) == file_bytes(bundle)
    assert kept.is_dir()
    other = ExportOptions(bits=2, calibration="topics", calibration_directory=kept)
    with pytest.raises(InputError, match="kept: holds something else than this calibration"):
        export_bundle(fixture("qwen3_moe"), quick_path / "three", other)


@pytest.fixture(scope="module")
def kept_once(checkpoint: Path, quick_root: Path) -> Path:
    """A calibration directory that holds all: statistics and losses."""
    kept = quick_root / "kept_once"
    options = ExportOptions(experts_target_size=0.75, calibration_directory=kept, num_workers=1)
    export_bundle(checkpoint, quick_root / "keeper", options)
    return kept


def save(path: Path, change: Callable[[Any], Any]) -> None:
    np.save(path, change(np.load(path)))


def with_first(value: float) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array.flat[0] = value
        return array

    return change


DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "losses cut": ("losses.json", lambda path: path.write_text(path.read_text()[:20])),
    "losses of null": ("losses.json", lambda path: path.write_text("null")),
    "losses of a group less": (
        "losses.json",
        lambda path: path.write_text(json.dumps(json.loads(path.read_text())[1:])),
    ),
    "losses with NaN": (
        "losses.json",
        lambda path: path.write_text(re.sub(r"[\d.e-]+", "NaN", path.read_text(), count=1)),
    ),
    "losses of bytes": ("losses.json", lambda path: path.write_bytes(b"\xff")),
    "summary a list": ("calibration.json", lambda path: path.write_text("[]")),
    "summary without layers": (
        "calibration.json",
        lambda path: path.write_text(json.dumps({"version": 1, "num_experts": 4, "num_tokens": 2048})),
    ),
    "summary with NaN": (
        "calibration.json",
        lambda path: path.write_text(path.read_text().replace('"sensitivity": ', '"sensitivity": NaN, "x": ', 1)),
    ),
    "other experts": (
        "calibration.json",
        lambda path: path.write_text(path.read_text().replace('"num_experts": 4', '"num_experts": 5')),
    ),
    "stamp of bytes": ("calibrated", lambda path: path.write_bytes(b"\xff")),
    "inputs empty": ("layer_000/inputs.npy", lambda path: path.write_bytes(b"")),
    "inputs cut": ("layer_001/inputs.npy", lambda path: path.write_bytes(path.read_bytes()[:-2])),
    "inputs with NaN": ("layer_001/inputs.npy", lambda path: save(path, with_first(math.nan))),
    "inputs of other rows": ("layer_000/inputs.npy", lambda path: save(path, lambda array: array[:-1])),
    "an expert that is not there": ("layer_000/topk_ids.npy", lambda path: save(path, with_first(4))),
    "an expert below": ("layer_000/topk_ids.npy", lambda path: save(path, with_first(-1))),
    "weights of another type": (
        "layer_000/topk_weights.npy",
        lambda path: save(path, lambda array: array.astype(np.float64)),
    ),
    "no shared weights": ("layer_000/shared_weights.npy", lambda path: path.unlink()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_calibration_is_one_line(
    lesonnx: Call, checkpoint: Path, kept_once: Path, quick_path: Path, damage: str
) -> None:
    kept = shutil.copytree(kept_once, quick_path / "kept")
    name, do = DAMAGES[damage]
    do(kept / name)
    arguments = ("--experts-target-size", "0.8", "--calibration-directory", kept, "--workers", "1")
    outcome = lesonnx("export", checkpoint, quick_path / "bundle", *arguments)
    assert outcome.code == 2
    assert str(kept) in outcome.error
    assert name in outcome.error
    assert (quick_path / ".bundle.partial/journal.jsonl").is_file()


def test_a_calibration_directory_that_is_left_out_moved_or_gone(
    checkpoint: Path, kept_once: Path, bundle: Path, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = shutil.copytree(kept_once, quick_path / "kept")
    options = ExportOptions(experts_target_size=0.75, calibration_directory=kept, num_workers=1)

    def interrupted(*arguments: Any) -> Any:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(exporter, "write_parts", interrupted)
        with pytest.raises(Broken):
            export_bundle(checkpoint, quick_path / "bundle", options)
        with pytest.raises(InputError, match=f"go on with --calibration-directory {kept}$"):
            export_bundle(checkpoint, quick_path / "bundle", ALONE, resume=True)
        with monkeypatch.context() as moved:
            moved.setattr(calibrated, "run_calibration", None)
            kept.rename(quick_path / "moved")
            elsewhere = replace(options, calibration_directory=quick_path / "moved")
            with pytest.raises(Broken):
                export_bundle(checkpoint, quick_path / "bundle", elsewhere, resume=True)
    shutil.rmtree(quick_path / "moved")
    report = export_bundle(checkpoint, quick_path / "bundle", ALONE, resume=True)
    assert file_bytes(report.bundle) == file_bytes(bundle)


@pytest.mark.parametrize("is_kept", [False, True])
def test_once_experts_are_written_no_statistics_are_missed(
    checkpoint: Path, kept_once: Path, bundle: Path, quick_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    kept = shutil.copytree(kept_once, quick_path / "kept") if is_kept else None
    options = ExportOptions(experts_target_size=0.75, calibration_directory=kept, num_workers=1)

    def interrupted(*arguments: Any) -> Any:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(exporter, "write_stages", interrupted)
        with pytest.raises(Broken):
            export_bundle(checkpoint, quick_path / "bundle", options)
    if kept is not None:
        shutil.rmtree(kept)
    monkeypatch.setattr(calibrated, "run_calibration", None)
    report = export_bundle(checkpoint, quick_path / "bundle", options, resume=True)
    assert file_bytes(report.bundle) == file_bytes(bundle)


def test_a_drafter_beside_the_checkpoint_changes_no_stamp() -> None:
    plain, drafted = (make_plan(Checkpoint(SAMPLE), ExportOptions(drafter=path)) for path in (None, DRAFTER))
    assert len(drafted.checkpoint.tensors) > len(plain.checkpoint.tensors)
    assert calibrated._stamp(plain, [1, 2]) == calibrated._stamp(drafted, [1, 2])
    assert calibrated._stamp(plain, [1, 2]) != calibrated._stamp(plain, [1, 3])


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_disk_that_fills_up_while_calibrating(
    lesonnx: Call, checkpoint: Path, quick_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """An array that is written in part, as NumPy says it."""

    def full(*arguments: Any) -> None:
        np.zeros(4 << 20, np.uint8).tofile(small_disk / "array")

    monkeypatch.setattr(np, "save", full)
    arguments: list[Any] = ["--calibration", "topics", "--workers", "1"]
    arguments += ["--calibration-directory", quick_path / "kept"] if is_kept else []
    outcome = lesonnx("export", checkpoint, quick_path / "bundle", *arguments)
    assert outcome.code == 1
    place = quick_path / ("kept" if is_kept else ".bundle.partial/calibration")
    assert outcome.error == f"error: {place}: the disk is full; make room and export again with --resume"


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "4", "--experts-target-size", "0.7"], "--bits and --experts-target-size exclude each other"),
        (["--bits", "32", "--calibration", "topics"], "--calibration is for experts of 8, 4 or 2 bits"),
        (["--calibration", "{}/none.txt"], "none.txt: not readable as UTF-8 text"),
        (["--calibration", "{}/bytes.txt"], "bytes.txt: not readable as UTF-8 text"),
        (["--calibration", "{}/short.txt"], "short.txt: holds 4 tokens to calibrate on, expected at least 256"),
        (["--twin-bits", "16"], "--twin-bits is without effect here: it goes with --accelerate"),
        (["--twin-capacity", "64"], "--twin-capacity is without effect here: it goes with --accelerate"),
        (["--workers", "2", "--dask", "tcp://localhost:1"], "--workers and --dask exclude each other"),
        (["--experts-target-size", "0"], "0.0 is not in the range x>0"),
    ],
)
def test_bad_input_is_one_line(lesonnx: Call, quick_path: Path, arguments: list[str], message: str) -> None:
    (quick_path / "bytes.txt").write_bytes(b"\xff\xfe\x00words")
    (quick_path / "short.txt").write_text("a b c d")
    outcome = lesonnx("export", SAMPLE, quick_path / "bundle", *(word.format(quick_path) for word in arguments))
    assert outcome.code == 2
    assert message in outcome.error
    assert not (quick_path / "bundle").exists()


# -- texts -------------------------------------------------------------------------------------------------------------


def test_windows_are_spread_over_a_text() -> None:
    lines = [f"{number:07d} and some words\n" for number in range(100_000)]
    windows = Text("text", "".join(lines)).windows()
    assert len(windows) == calibrated.MOST_WINDOWS
    starts = [int(window[:7]) for window in windows]
    assert starts[0] == 0
    assert np.diff(starts).min() > 0.9 * 100_000 / len(windows)
    assert starts[-1] > 98_000 - 100_000 / len(windows)


@pytest.mark.parametrize("length", [0, 1, 5000, 100_000])
def test_a_short_text_is_taken_whole(length: int) -> None:
    content = "".join(f"{number}\n" for number in range(length))[:length]
    windows = Text("text", content).windows()
    assert sum(len(window) for window in windows) >= 0.99 * len(content)


# -- the disk ----------------------------------------------------------------------------------------------------------


def test_the_disk_must_hold_what_calibration_keeps(quick_path: Path) -> None:
    plan = make_plan(Checkpoint(SAMPLE), ExportOptions())
    statistics = calibrated.extra_bytes(plan, ExportOptions(calibration="topics"))
    assert calibrated.extra_bytes(plan, ExportOptions()) == 0
    assert statistics >= len(plan.layers) * calibrated.MOST_WINDOWS * calibrated.WINDOW_TOKENS * 2 * 192
    assert calibrated.extra_bytes(plan, ExportOptions(experts_target_size=0.733)) == statistics
    kept = ExportOptions(experts_target_size=1.5, calibration_directory=quick_path)
    assert calibrated.extra_bytes(plan, kept) == plan.expert_bytes // 2


@pytest.mark.parametrize("name", ["bundle", "bundle/kept", ".bundle.partial", ".bundle.partial/kept", "file/kept"])
def test_directories_that_cannot_keep_a_calibration(lesonnx: Call, quick_path: Path, name: str) -> None:
    (quick_path / "file").write_text("words")
    arguments = ("--calibration", "topics", "--calibration-directory", quick_path / name)
    outcome = lesonnx("export", SAMPLE, quick_path / "bundle", *arguments)
    assert outcome.code == 2
    assert str(quick_path / name) in outcome.error
    assert ("is not a directory" if name == "file/kept" else "which becomes the bundle") in outcome.error
    assert [path.name for path in quick_path.iterdir()] == ["file"]


def test_a_calibration_must_fit_its_own_disk(lesonnx: Call, quick_path: Path, small_disk: Path) -> None:
    arguments = ("--calibration", "topics", "--calibration-directory", small_disk / "kept")
    outcome = lesonnx("export", SAMPLE, quick_path / "bundle", *arguments)
    assert outcome.code == 1
    assert f"{small_disk}: the calibration needs" in outcome.error
    assert not list(small_disk.iterdir())
    assert not (quick_path / "bundle").exists()
    assert not (quick_path / ".bundle.partial").exists()


def test_a_calibration_directory_needs_a_calibration(lesonnx: Call, quick_path: Path) -> None:
    outcome = lesonnx("export", SAMPLE, quick_path / "bundle", "--calibration-directory", quick_path / "kept")
    assert outcome.code == 2
    assert "--calibration-directory is without effect" in outcome.error
    assert not list(quick_path.iterdir())
