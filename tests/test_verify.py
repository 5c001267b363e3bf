"""`lesonnx verify`: the figures, what a reference may be, and the exit code."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from lesonnx.bundle import Bundle
from lesonnx.cli import cli
from lesonnx.errors import InputError, LesonnxError, ToleranceError
from lesonnx_export import optimum_model, reference
from lesonnx_export.checkpoint import Checkpoint
from lesonnx_export.compare import (
    Comparison,
    LogitsTally,
    judge,
    kl_divergence,
    log_softmax,
    matching_tokens,
)
from lesonnx_export.exporter import ExportOptions, export_bundle
from lesonnx_export.optimum_model import OptimumModel, check_trace, copy_checkpoint
from lesonnx_export.reference import cut_windows, random_ids, read_recorded
from lesonnx_export.transformers4 import NUM_EXPERTS_FAMILIES, to_transformers4

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
CHECKPOINT = CHECKPOINTS / "qwen3_moe"
VOCAB_SIZE, CONTEXT = 320, 512
Arrays = dict[str, NDArray[Any]]


# -- figures ---------------------------------------------------------------------------------------------------------


def test_log_softmax_of_large_logits() -> None:
    found = log_softmax(np.array([[1000.0, 1000.0, -1000.0]]))
    np.testing.assert_allclose(found, [[-np.log(2), -np.log(2), -2000 - np.log(2)]])


def test_kl_by_hand_and_in_the_direction_of_the_reference() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    skewed = np.array([0.9, 0.05, 0.05])
    assert kl_divergence(np.log([p]), np.log([q]) + 7.0)[0] == pytest.approx(0.25 * np.log(2))
    expected = (p * np.log(p / skewed)).sum()
    assert kl_divergence(np.log([p]), np.log([skewed]))[0] == pytest.approx(expected)
    assert expected != pytest.approx((skewed * np.log(skewed / p)).sum())


def test_kl_is_never_negative() -> None:
    logits = np.random.default_rng(0).normal(size=(200, 50))
    assert (kl_divergence(logits, logits + 1e-16) >= 0).all()


def test_tally_adds_windows_up_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    theirs = rng.normal(size=(53, 11)).astype(np.float32)
    ours = theirs + rng.normal(scale=0.5, size=theirs.shape).astype(np.float32)
    whole, pieces = LogitsTally(), LogitsTally()
    whole.add(theirs, ours)
    for start, end in ((0, 20), (20, 21), (21, 53)):
        pieces.add(theirs[start:end], ours[start:end])
    assert pieces.tokens == whole.tokens == 53
    assert pieces.max_abs_diff == whole.max_abs_diff == np.abs(ours.astype(float) - theirs).max()
    assert pieces.kl == pytest.approx(whole.kl)
    assert pieces.top1_agreement == whole.top1_agreement == (ours.argmax(1) == theirs.argmax(1)).mean()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_never_pass(value: float) -> None:
    tally = LogitsTally()
    tally.add(np.zeros((40, 4), np.float32), np.zeros((40, 4), np.float32))
    broken = np.zeros((40, 4), np.float32)
    broken[23, 1] = value
    with pytest.raises(ToleranceError, match="position 63 are not finite"):
        tally.add(np.zeros((40, 4), np.float32), broken)


def test_matching_tokens() -> None:
    assert matching_tokens([1, 2, 3], [1, 2, 3]) == 3
    assert matching_tokens([1, 2, 3], [1, 9, 3]) == 1
    assert matching_tokens([1, 2, 3], [1, 2]) == 2
    assert matching_tokens([], [1]) == 0


def test_greedy_matches_only_at_equal_length() -> None:
    assert LogitsTally().with_greedy([1, 2], [1, 2]).greedy_match
    assert not LogitsTally().with_greedy([1, 2], [1]).greedy_match
    assert not LogitsTally().with_greedy([1, 2], [1, 2, 3]).greedy_match


def comparison(**changes: Any) -> Comparison:
    values = {"tokens": 96, "max_abs_diff": 1e-4, "kl": 1e-6, "top1_agreement": 1.0}
    return Comparison(**{**values, "greedy_match": True, "greedy_tokens": 40, "greedy_matched_tokens": 40, **changes})


@pytest.mark.parametrize(
    ("changes", "max_kl", "reason"),
    [
        ({}, None, None),
        ({"max_abs_diff": 1e-3}, None, None),
        ({"max_abs_diff": 1.1e-3}, None, "differ by up to 0.0011, the tolerance is 0.001"),
        ({"max_abs_diff": float("nan")}, None, "differ by up to nan"),
        ({"greedy_match": False, "greedy_matched_tokens": 17}, None, "from number 18 of 40"),
        ({"max_abs_diff": 9.0, "greedy_match": False}, 1e-6, None),
        ({"kl": 0.03}, 0.025, "KL is 0.03 per token over 96 tokens, at most 0.025"),
        ({"kl": float("nan")}, 0.025, "KL is nan"),
    ],
)
def test_judge(changes: dict[str, Any], max_kl: float | None, reason: str | None) -> None:
    found = judge(comparison(**changes), 1e-3, max_kl)
    assert found is None if reason is None else reason in str(found)


# -- recorded references ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    with np.load(CHECKPOINT / "reference.npz") as archive:
        return {name: archive[name] for name in archive}


def saved(path: Path, arrays: Arrays) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def test_read_recorded(tmp_path: Path, arrays: Arrays) -> None:
    path = saved(tmp_path / "ok.npz", {**arrays, "case0_text": np.array("another array may be there")})
    recorded = read_recorded(path, VOCAB_SIZE, CONTEXT)
    assert recorded.windows == [arrays["input_ids"].tolist()]
    assert recorded.greedy_prompt == arrays["input_ids"][:24].tolist()
    assert recorded.greedy_ids() == arrays["greedy_ids"].tolist()
    np.testing.assert_array_equal(recorded.logits(0), arrays["logits"])


def changed(name: str, change: Callable[[NDArray[Any]], Any]) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {**arrays, name: np.asarray(change(arrays[name].copy()))}


def put(index: Any, value: float) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def change(array: NDArray[Any]) -> NDArray[Any]:
        array[index] = value
        return array

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda arrays: {k: v for k, v in arrays.items() if k != "greedy_ids"}, "has no array 'greedy_ids'"),
        (lambda arrays: {k: v for k, v in arrays.items() if k != "logits"}, "has no array 'logits'"),
        (changed("input_ids", lambda ids: ids.astype(np.float32)), "input_ids must be integers .* found float32"),
        (changed("input_ids", lambda ids: ids[None]), r"input_ids must be integers \[n\], found int64 \[1, 96\]"),
        (changed("input_ids", lambda ids: ids[:0]), "logits are of 96 tokens, input_ids are 0"),
        (changed("input_ids", lambda ids: ids[:-1]), "logits are of 96 tokens, input_ids are 95"),
        (changed("input_ids", put(5, VOCAB_SIZE)), "input_ids holds 320, expected ids from 0 to 319"),
        (changed("greedy_ids", put(5, -1)), "greedy_ids holds -1, expected ids from 0 to 319"),
        (changed("greedy_ids", lambda ids: ids.astype(bool)), "greedy_ids must be integers"),
        (changed("logits", lambda logits: logits.astype(np.int32)), "logits must be floats"),
        (changed("logits", lambda logits: logits[0]), r"logits must be floats \[T,V\], found float32 \[320\]"),
        (changed("logits", lambda logits: logits[:, :-1]), "a vocabulary of 319, the bundle's is 320"),
        (changed("logits", put((3, 4), np.nan)), "not finite"),
        (changed("greedy_prompt_len", lambda _: np.int64(0)), "greedy_prompt_len is 0, expected 1 to 96"),
        (changed("greedy_prompt_len", lambda _: np.int64(97)), "greedy_prompt_len is 97, expected 1 to 96"),
        (changed("greedy_prompt_len", lambda _: np.array([24])), "greedy_prompt_len must be one integer"),
        (changed("greedy_ids", lambda ids: np.tile(ids, 13)), "more tokens than the bundle's context of 512"),
        (changed("greedy_ids", lambda ids: ids.astype(object)), "pickled objects are refused"),
    ],
)
def test_recorded_reference_is_refused(
    tmp_path: Path, arrays: Arrays, spoil: Callable[[Arrays], Arrays], message: str
) -> None:
    path = saved(tmp_path / "bad.npz", spoil(arrays))
    with pytest.raises(InputError, match=message) as caught:
        read_recorded(path, VOCAB_SIZE, CONTEXT)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_files_that_are_no_archive_are_refused(tmp_path: Path, arrays: Arrays) -> None:
    pickled = tmp_path / "pickled.npz"
    np.save(pickled.open("wb"), np.array([{"a": 1}], dtype=object), allow_pickle=True)
    truncated = saved(tmp_path / "whole.npz", arrays).read_bytes()[:-100]
    (tmp_path / "cut.npz").write_bytes(truncated)
    for path in (pickled, tmp_path / "cut.npz"):
        with pytest.raises(InputError, match=r"not a \.npz file"):
            read_recorded(path, VOCAB_SIZE, CONTEXT)


def test_damaged_archive_is_refused(tmp_path: Path, arrays: Arrays) -> None:
    path = saved(tmp_path / "damaged.npz", arrays)
    data = bytearray(path.read_bytes())
    data[5000:5100] = bytes(100)
    path.write_bytes(data)
    with pytest.raises(InputError, match="not readable"):
        read_recorded(path, VOCAB_SIZE, CONTEXT)


def test_windows_and_random_ids() -> None:
    assert cut_windows([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert random_ids(50, 7) == random_ids(50, 7)
    assert set(random_ids(200, 7)) == set(range(7))


# -- transformers 4 spelling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, {"rope_theta": 5.0, "rope_scaling": None}),
        (
            {"rope_parameters": {"rope_theta": 5.0, "rope_type": "yarn", "factor": 8.0, "beta_fast": 32}},
            {"rope_theta": 5.0, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32}},
        ),
        (
            {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default", "partial_rotary_factor": 0.25}},
            {"rope_theta": 5.0, "rope_scaling": None, "partial_rotary_factor": 0.25},
        ),
        (
            {"rope_parameters": {"full": {"rope_theta": 5.0}, "sliding": {"rope_theta": 5.0}}},
            {"rope_theta": 5.0, "rope_scaling": None},
        ),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}, {"rope_theta": 7.0, "rope_scaling": None}),
        ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}),
        ({"model_type": "qwen3_moe", "num_local_experts": 8}, {"model_type": "qwen3_moe", "num_experts": 8}),
        ({"model_type": "mixtral", "num_local_experts": 8}, {"model_type": "mixtral", "num_local_experts": 8}),
        (
            {"text_config": {"model_type": "olmoe", "num_local_experts": 8, "dtype": "float32"}},
            {"text_config": {"model_type": "olmoe", "num_experts": 8, "torch_dtype": "float32"}},
        ),
    ],
)
def test_to_transformers4(new: dict[str, Any], old: dict[str, Any]) -> None:
    before = json.dumps(new)
    assert to_transformers4(new) == old
    assert json.dumps(new) == before
    assert to_transformers4(old) == old


def test_every_fixture_converts() -> None:
    converted = []
    for path in CHECKPOINTS.glob("*/config.json"):
        new = json.loads(path.read_text(encoding="utf-8"))
        if "rope_parameters" not in new or new["model_type"] == "gemma4_text":
            continue  # spelled as transformers 4 already, or with rotary settings by layer type, which 4 cannot say
        old = to_transformers4(new)
        assert old["rope_theta"] == new["rope_parameters"]["rope_theta"]
        renamed = new["model_type"] in NUM_EXPERTS_FAMILIES and "num_local_experts" in new
        assert ("num_experts" in old and "num_local_experts" not in old) or not renamed
        assert not {"rope_parameters", "dtype"} & set(old)
        converted.append(new["model_type"])
    assert {"qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "lfm2_moe"} <= set(converted)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"full": {"rope_theta": 1.0}, "sliding": {"rope_theta": 2.0}}, "differ by layer type"),
        ({"full": {"rope_theta": 1.0}, "rope_theta": 1.0}, "differ by layer type"),
        ([1], "must be an object"),
    ],
)
def test_rotary_parameters_without_old_words(parameters: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        to_transformers4({"rope_parameters": parameters})


# -- the optimum extra, without it -----------------------------------------------------------------------------------


def test_copy_holds_tensors_and_config_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(CHECKPOINT, source)
    (source / "modeling.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    copy_checkpoint(Checkpoint(source), {"model_type": "qwen3_moe"}, tmp_path / "copy")
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == {"model_type": "qwen3_moe"}


def test_a_trace_that_computes_something_else_is_no_reference() -> None:
    logits = np.zeros((2, 3), np.float32)
    check_trace("m", logits, logits + np.float32(5e-4))
    for broken in (logits + np.float32(2e-3), np.full_like(logits, np.nan), logits[:1]):
        with pytest.raises(LesonnxError, match="m: optimum's ONNX model is no reference"):
            check_trace("m", logits, broken)


@pytest.mark.parametrize(
    ("document", "stderr", "kind", "message"),
    [
        ({"message": "m: unknown family", "exit_code": 2}, "", InputError, "m: unknown family"),
        ({"message": "m: broke", "exit_code": 1}, "", LesonnxError, "m: broke"),
        (None, "Traceback\nMemoryError: 5 GB", LesonnxError, "ended early: MemoryError: 5 GB"),
    ],
)
def test_failures_of_optimums_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    document: dict[str, Any] | None,
    stderr: str,
    kind: type[LesonnxError],
    message: str,
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if document is not None:
            (Path(command[3]) / "error.json").write_text(json.dumps(document))
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(optimum_model, "require_optimum", lambda: None)
    monkeypatch.setattr(optimum_model.subprocess, "run", run)
    monkeypatch.setattr(optimum_model.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "work"))
    with pytest.raises(LesonnxError, match=message) as caught:
        OptimumModel(CHECKPOINT, [1, 2, 3])
    assert type(caught.value) is kind
    assert not (tmp_path / "work").exists()


# -- the command -----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    exit_code: int
    output: str
    error: str

    @property
    def figures(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.output)
        return document


def verify(*arguments: Path | str, schedule: str = "resident") -> Outcome:
    """Run the command as the entry point does, without its process."""
    result = CliRunner().invoke(cli, ["verify", *map(str, arguments), "--schedule", schedule])
    if isinstance(result.exception, LesonnxError):
        return Outcome(result.exception.exit_code, result.stdout, str(result.exception))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("bundles")
    for bits in (32, 8):
        export_bundle(CHECKPOINT, root / str(bits), ExportOptions(bits=bits, dense_bits=32, num_workers=1))  # type: ignore[arg-type]
    return {bits: root / str(bits) for bits in (32, 8)}


@pytest.mark.parametrize(("chunk", "schedule"), [("96", "on-demand"), ("7", "resident")])
def test_float_bundle_passes(bundles: dict[int, Path], chunk: str, schedule: str) -> None:
    recorded = ("--reference", CHECKPOINT / "reference.npz")
    outcome = verify(bundles[32], *recorded, "--json", "--prefill-chunk", chunk, schedule=schedule)
    assert outcome.exit_code == 0, outcome.error
    figures = outcome.figures
    assert figures["passed"] is True
    assert figures["tokens"] == 96
    assert 0 < figures["max_abs_diff"] <= 1e-3
    assert 0 <= figures["kl"] < 1e-8
    assert figures["top1_agreement"] == 1.0
    assert (figures["greedy_match"], figures["greedy_tokens"]) == (True, 40)
    assert figures["tolerance"] == 1e-3


def test_table_names_the_figures(bundles: dict[int, Path]) -> None:
    outcome = verify(bundles[32], "--reference", CHECKPOINT / "reference.npz")
    assert outcome.exit_code == 0
    assert "40 of 40" in outcome.output
    assert "100.00%" in outcome.output


def test_corrupted_logit_fails_with_its_size(bundles: dict[int, Path], tmp_path: Path, arrays: Arrays) -> None:
    path = saved(tmp_path / "r.npz", changed("logits", put((70, 3), arrays["logits"][70, 3] + 0.5))(arrays))
    outcome = verify(bundles[32], "--reference", path, "--json")
    assert outcome.exit_code == 1
    assert outcome.figures["max_abs_diff"] == pytest.approx(0.5, abs=1e-3)
    assert outcome.figures["passed"] is False
    assert "logits differ by up to 0.5" in outcome.error


def test_corrupted_top_token_fails_with_its_kl(bundles: dict[int, Path], tmp_path: Path, arrays: Arrays) -> None:
    logits = arrays["logits"].copy()
    logits[50, (logits[50].argmax() + 1) % VOCAB_SIZE] = logits[50].max() + 3
    path = saved(tmp_path / "r.npz", {**arrays, "logits": logits})
    outcome = verify(bundles[32], "--reference", path, "--json")
    p = np.exp(logits[50].astype(float)) / np.exp(logits[50].astype(float)).sum()
    q = np.exp(arrays["logits"][50].astype(float)) / np.exp(arrays["logits"][50].astype(float)).sum()
    assert outcome.exit_code == 1
    assert outcome.figures["top1_agreement"] == pytest.approx(95 / 96)
    assert outcome.figures["kl"] == pytest.approx((p * np.log(p / q)).sum() / 96, rel=1e-3)


def test_corrupted_greedy_id_fails_with_its_place(bundles: dict[int, Path], tmp_path: Path, arrays: Arrays) -> None:
    path = saved(tmp_path / "r.npz", changed("greedy_ids", put(17, (arrays["greedy_ids"][17] + 1) % 320))(arrays))
    outcome = verify(bundles[32], "--reference", path, "--json")
    assert outcome.exit_code == 1
    assert (outcome.figures["greedy_match"], outcome.figures["greedy_matched_tokens"]) == (False, 17)
    assert "from number 18 of 40" in outcome.error


def test_tolerance_is_what_is_judged(bundles: dict[int, Path]) -> None:
    outcome = verify(bundles[32], "--reference", CHECKPOINT / "reference.npz", "--tolerance", "1e-9")
    assert outcome.exit_code == 1
    assert "the tolerance is 1e-09" in outcome.error


def test_quantized_bundle_against_the_float_one(bundles: dict[int, Path]) -> None:
    arguments = (bundles[8], "--reference", bundles[32], "--tokens", "40", "--json")
    strict = verify(*arguments)
    assert strict.exit_code == 1
    figures = strict.figures
    assert figures["tokens"] == 40
    assert figures["max_abs_diff"] > 1e-3
    assert 0 < figures["kl"] < 0.05
    assert verify(*arguments, "--max-kl", str(figures["kl"] * 1.01)).exit_code == 0
    assert verify(*arguments, "--max-kl", str(figures["kl"] * 0.99)).exit_code == 1


def test_a_bundle_equals_itself(bundles: dict[int, Path]) -> None:
    figures = verify(bundles[8], "--reference", bundles[8], "--json", "--tolerance", "0").figures
    assert figures["tokens"] == 96
    assert (figures["max_abs_diff"], figures["kl"], figures["top1_agreement"]) == (0.0, 0.0, 1.0)
    assert figures["passed"]


def test_expert_budget_is_raised_for_a_larger_reference(bundles: dict[int, Path]) -> None:
    least = Bundle(bundles[8]).least_budget_bytes
    assert least < Bundle(bundles[32]).least_budget_bytes
    budget = ("--expert-budget", str(least))
    outcome = verify(
        bundles[8], "--reference", bundles[32], "--max-kl", "1", "--tokens", "4", *budget, schedule="on-demand"
    )
    assert outcome.exit_code == 0, outcome.error


def test_bad_references_end_with_one_line_and_exit_code_2(
    bundles: dict[int, Path], tmp_path: Path, arrays: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_package(name: str) -> None:
        return None

    monkeypatch.setattr(optimum_model.importlib.util, "find_spec", no_package)
    recorded = CHECKPOINT / "reference.npz"
    text, binary = tmp_path / "text.txt", tmp_path / "binary.txt"
    text.write_text("In the beginning")
    binary.write_bytes(b"\xff\xfe\xff")
    empty = tmp_path / "empty"
    empty.mkdir()
    quantized = tmp_path / "quantized"
    shutil.copytree(CHECKPOINT, quantized)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    cases: list[tuple[list[Path | str], str]] = [
        (["--reference", tmp_path / "none"], "no such reference"),
        (["--reference", empty], "neither a bundle"),
        (["--reference", text], "not a .npz file"),
        (["--reference", recorded, "--text", text], "brings its own tokens"),
        (["--reference", recorded, "--tokens", "5"], "brings its own tokens"),
        (["--reference", recorded, "--tolerance", "nan"], "tolerance must be a number"),
        (["--reference", recorded, "--max-kl", "-1"], "tolerance must be a number"),
        (["--reference", bundles[32], "--text", text], "has no tokenizer"),
        (["--reference", bundles[32], "--text", binary], "not readable as UTF-8"),
        (["--reference", bundles[32], "--text", tmp_path / "none"], "not readable"),
        (["--reference", CHECKPOINT], "needs torch: pip install 'lesonnx[export,optimum]'"),
        (["--reference", quantized], "is quantized"),
    ]
    for arguments, message in cases:
        outcome = verify(bundles[32], *arguments)
        assert outcome.exit_code == 2, arguments
        assert message in outcome.error
        assert "\n" not in outcome.error


def test_vocabularies_must_agree(bundles: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Other:
        name, vocab_size, max_tokens = "other", 321, 512

        def __init__(self, *_: Any) -> None:
            pass

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr("lesonnx_export.verify.OptimumModel", Other)
    outcome = verify(bundles[32], "--reference", CHECKPOINT)
    assert (outcome.exit_code, closed) == (2, [True])
    assert "has a vocabulary of 321, the bundle's is 320" in outcome.error


def test_long_texts_are_cut_into_windows_that_fit_both_contexts() -> None:
    class Other:
        name, vocab_size, max_tokens = "other", 320, 100

    found = reference.computed(Other(), list(range(250)), 512)  # type: ignore[arg-type]
    assert [len(window) for window in found.windows] == [100, 100, 50]
    assert found.greedy_prompt == list(range(100, 124))
    assert found.greedy_tokens == 40
