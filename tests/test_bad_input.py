"""What can be wrong with a checkpoint, a bundle or a command: one line that names it, an exit code, no leftovers.

Exit code 2: usage and bad input; 1: a failure while working. Every case calls the program's entry point.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from checkpoints import INDEX, SAMPLE, Config, Tensors, derive, fixture
from conftest import BundleFactory, Outcome
from onnx import TensorProto, helper

from lesonnx import cli as cli_module
from lesonnx import engines, ort
from lesonnx_export.workers import Worker

NAME = "qwen3_moe"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
Call = Callable[..., Outcome]


def assert_refused(outcome: Outcome, code: int, *mentions: object) -> None:
    assert outcome.code == code, outcome.err
    line = outcome.error
    assert line.startswith("error: ")
    for text in mentions:
        assert str(text) in line


# -- checkpoints: export names what is wrong and writes nothing --------------------------------------------------------


@dataclass(frozen=True)
class BadCheckpoint:
    """How to spoil a fixture, and what the error must mention."""

    spoil: Callable[[Path], object]
    mentions: tuple[str, ...]


def config(**changes: Any) -> Callable[[Path], object]:
    return lambda path: derive(NAME, path, config=lambda values: {**values, **changes})


def config_without(*keys: str) -> Callable[[Path], object]:
    def leave_out(values: Config) -> Config:
        return {key: value for key, value in values.items() if key not in keys}

    return lambda path: derive(NAME, path, config=leave_out)


def tensors(change: Callable[[Tensors], Tensors]) -> Callable[[Path], object]:
    return lambda path: derive(NAME, path, tensors=change)


def with_tensor(name: str, value: Any) -> Callable[[Path], object]:
    return tensors(lambda values: {**values, name: value})


def without_tensor(name: str) -> Callable[[Path], object]:
    return tensors(lambda values: {key: value for key, value in values.items() if key != name})


def with_value(name: str, value: float) -> Callable[[Path], object]:
    def change(values: Tensors) -> Tensors:
        values[name] = values[name].copy()
        values[name].flat[5] = value
        return values

    return tensors(change)


def file(name: str, content: str | bytes) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        derive(NAME, path)
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def directory_instead_of(name: str) -> Callable[[Path], object]:
    def replace(path: Path) -> None:
        derive(NAME, path)
        (path / name).unlink()
        (path / name).mkdir()

    return replace


def truncated(keep: float) -> Callable[[Path], object]:
    def truncate(path: Path) -> None:
        weights = derive(NAME, path) / "model.safetensors"
        os.truncate(weights, int(weights.stat().st_size * keep))

    return truncate


def missing_shard(path: Path) -> None:
    derive(NAME, path, num_shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()


def truncated_shard(path: Path) -> None:
    derive(NAME, path, num_shards=3)
    os.truncate(path / "model-00002-of-00003.safetensors", 1000)


def pickled(path: Path) -> None:
    (derive(NAME, path) / "model.safetensors").rename(path / "pytorch_model.bin")


def only_a_config(path: Path) -> None:
    (derive(NAME, path) / "model.safetensors").unlink()


HALF = np.zeros((32, 64), ml_dtypes.bfloat16)
BAD_CHECKPOINTS = {
    "unknown model_type": BadCheckpoint(
        config(model_type="qwen3_mow"), ("config.json", "model_type 'qwen3_mow'", "the nearest is qwen3_moe")
    ),
    "no model_type": BadCheckpoint(config_without("model_type"), ("config.json", "model_type")),
    "config not JSON": BadCheckpoint(file("config.json", "{'a': 1}"), ("config.json", "not readable as JSON")),
    "config a list": BadCheckpoint(file("config.json", "[]"), ("config.json", "expected a JSON object, found list")),
    "config not text": BadCheckpoint(file("config.json", b"\xff\xfe\x00"), ("config.json", "not readable")),
    "config a directory": BadCheckpoint(directory_instead_of("config.json"), ("config.json", "not readable")),
    "config lacks a size": BadCheckpoint(
        config_without("hidden_size"), ("embed_tokens", "[320, 64]", "config.json leaves out", "hidden_size")
    ),
    "config with a null size": BadCheckpoint(config(hidden_size=None), ("config.json", "hidden_size is missing")),
    "a size of zero": BadCheckpoint(config(num_hidden_layers=0), ("config.json", "num_hidden_layers", "0")),
    "top-k above the experts": BadCheckpoint(
        config(num_experts_per_tok=17), ("config.json", "num_experts_per_tok 17 exceeds num_experts 16")
    ),
    "no layer with experts": BadCheckpoint(config(mlp_only_layers=[0, 1, 2]), ("config.json", "no layer has experts")),
    "quantized": BadCheckpoint(
        config(quantization_config={"quant_method": "gptq", "bits": 4}), ("quantization_config", "'gptq'")
    ),
    "rotary positions of another kind": BadCheckpoint(
        config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e6}), ("config.json", "'spiral'")
    ),
    "a window of nothing": BadCheckpoint(
        config(use_sliding_window=True, sliding_window=0), ("config.json", "sliding_window", "0")
    ),
    "unknown activation": BadCheckpoint(config(hidden_act="mish"), ("config.json", "hidden_act 'mish'")),
    "odd head_dim": BadCheckpoint(config(head_dim=12), ("config.json", "head_dim", "12")),
    "eos of text": BadCheckpoint(config(eos_token_id="</s>"), ("config.json", "eos_token_id", "</s>")),
    "wrong shape": BadCheckpoint(
        with_tensor(EXPERT, np.zeros((64, 32), ml_dtypes.bfloat16)),
        ("model.safetensors", EXPERT, "[64, 32], expected [32, 64]"),
    ),
    "missing tensor": BadCheckpoint(
        without_tensor(EXPERT), ("checkpoint", EXPERT.removeprefix("model."), "is missing")
    ),
    "missing norm": BadCheckpoint(without_tensor("model.norm.weight"), ("norm.weight", "is missing")),
    "no embedding": BadCheckpoint(without_tensor("model.embed_tokens.weight"), ("embed_tokens.weight",)),
    "extra tensor": BadCheckpoint(
        with_tensor("model.layers.0.mlp.bonus.weight", HALF), ("model.layers.0.mlp.bonus.weight", "not part of a")
    ),
    "fewer layers than weights": BadCheckpoint(config(num_hidden_layers=2), ("model.layers.2.", "not part of a")),
    "more layers than weights": BadCheckpoint(config(num_hidden_layers=4), ("layers.3.", "is missing")),
    "NaN in an expert": BadCheckpoint(with_value(EXPERT, np.nan), (EXPERT, "not finite")),
    "infinity in the embedding": BadCheckpoint(
        with_value("model.embed_tokens.weight", np.inf), ("model.embed_tokens.weight", "not finite")
    ),
    "NaN in a norm": BadCheckpoint(with_value("model.norm.weight", np.nan), ("model.norm.weight", "not finite")),
    "NaN in a router": BadCheckpoint(
        with_value("model.layers.2.mlp.gate.weight", np.nan), ("model.layers.2.mlp.gate.weight", "not finite")
    ),
    "int tensor": BadCheckpoint(with_tensor(EXPERT, np.zeros((32, 64), np.int8)), (EXPERT, "is I8, expected one of")),
    "float8 tensor": BadCheckpoint(
        with_tensor(EXPERT, np.zeros((32, 64), ml_dtypes.float8_e4m3fn)), (EXPERT, "F8_E4M3")
    ),
    "truncated": BadCheckpoint(truncated(0.5), ("model.safetensors", "not a whole safetensors file")),
    "truncated header": BadCheckpoint(truncated(0.001), ("model.safetensors", "not a whole safetensors file")),
    "empty": BadCheckpoint(truncated(0), ("model.safetensors", "not a whole safetensors file")),
    "weights a directory": BadCheckpoint(
        directory_instead_of("model.safetensors"), ("model.safetensors", "not a whole safetensors file")
    ),
    "missing shard": BadCheckpoint(missing_shard, ("model-00002-of-00003.safetensors", "missing")),
    "truncated shard": BadCheckpoint(truncated_shard, ("model-00002-of-00003.safetensors", "not a whole")),
    "index without a map": BadCheckpoint(file(INDEX, "{}"), (INDEX, "weight_map")),
    "index that leaves": BadCheckpoint(
        file(INDEX, json.dumps({"weight_map": {"x": "../../etc/passwd"}})), (INDEX, "leaves the checkpoint")
    ),
    "pickled": BadCheckpoint(pickled, ("pytorch_model.bin", "pickled checkpoints are refused")),
    "no weights": BadCheckpoint(only_a_config, ("no model.safetensors",)),
    "broken tokenizer": BadCheckpoint(file("tokenizer.json", "{}"), ("tokenizer.json",)),
    "broken generation_config": BadCheckpoint(file("generation_config.json", "{"), ("generation_config.json",)),
}


@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_bad_checkpoint(lesonnx: Call, tmp_path: Path, case: str, bits: int) -> None:
    bad = BAD_CHECKPOINTS[case]
    bad.spoil(tmp_path / "checkpoint")
    (tmp_path / "work").mkdir()
    outcome = lesonnx("export", tmp_path / "checkpoint", tmp_path / "work/bundle", "--bits", bits, "--workers", 1)
    assert_refused(outcome, 2, *bad.mentions)
    assert os.listdir(tmp_path / "work") == []


def test_bad_weights_in_a_worker_process(lesonnx: Call, tmp_path: Path) -> None:
    with_value(EXPERT, np.nan)(tmp_path / "checkpoint")
    outcome = lesonnx("export", tmp_path / "checkpoint", tmp_path / "bundle", "--workers", 2)
    assert_refused(outcome, 2, EXPERT, "not finite")
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_weights_too_large_to_quantize(lesonnx: Call, tmp_path: Path) -> None:
    tensors(lambda values: {**values, EXPERT: np.full((32, 64), 3e38, ml_dtypes.bfloat16)})(tmp_path / "checkpoint")
    outcome = lesonnx("export", tmp_path / "checkpoint", tmp_path / "bundle", "--workers", 1)
    assert_refused(outcome, 2, "layer 1 expert 3.up_proj", "too large")
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_checkpoint_missing(lesonnx: Call, tmp_path: Path) -> None:
    outcome = lesonnx("export", tmp_path / "nothing", tmp_path / "bundle")
    assert_refused(outcome, 2, tmp_path / "nothing", "no such checkpoint directory")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_target_exists(lesonnx: Call, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "bundle"
    target.mkdir() if kind == "directory" else target.write_text("precious")
    assert_refused(lesonnx("export", fixture(NAME), target), 2, target, "already exists")
    assert os.listdir(tmp_path) == ["bundle"]


def test_targets_parent_missing(lesonnx: Call, tmp_path: Path) -> None:
    outcome = lesonnx("export", fixture(NAME), tmp_path / "no/bundle")
    assert_refused(outcome, 2, tmp_path / "no", "no such directory")
    assert os.listdir(tmp_path) == []


def test_target_name_too_long(lesonnx: Call, tmp_path: Path) -> None:
    outcome = lesonnx("export", fixture(NAME), tmp_path / ("x" * 250))
    assert_refused(outcome, 1, "xxxx", "name too long")
    assert os.listdir(tmp_path) == []


def test_disk_full(lesonnx: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    outcome = lesonnx("export", fixture(NAME), tmp_path / "bundle", "--workers", 1)
    assert_refused(outcome, 1, ".bundle.partial", "the disk is full", "--resume")
    assert os.listdir(tmp_path) == [".bundle.partial"]
    monkeypatch.undo()
    assert_resumes(lesonnx, tmp_path)


def test_a_disk_too_small(lesonnx: Call, small_disk: Path) -> None:
    outcome = lesonnx("export", SAMPLE, small_disk / "bundle", "--bits", 32)
    assert_refused(outcome, 1, small_disk, "the bundle needs", "free")
    assert os.listdir(small_disk) == []


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_disk_that_fills_up(
    lesonnx: Call, small_disk: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    """Another program takes the room that there was at the start."""
    monkeypatch.setattr("lesonnx_export.exporter._check_disk", lambda *args: None)
    outcome = lesonnx("export", fixture(NAME), small_disk / "bundle", "--bits", 32, "--workers", num_workers)
    assert_refused(outcome, 1, small_disk, "the disk is full", "--resume")
    assert os.listdir(small_disk) == [".bundle.partial"]


def test_worker_killed(lesonnx: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Worker.give

    def give(self: Worker, task: Any) -> None:
        original(self, task)
        os.kill(int(self.process.pid or 0), signal.SIGKILL)

    monkeypatch.setattr(Worker, "give", give)
    outcome = lesonnx("export", fixture(NAME), tmp_path / "bundle", "--workers", 2)
    assert_refused(outcome, 1, "a worker process died", "--resume")
    assert os.listdir(tmp_path) == [".bundle.partial"]
    monkeypatch.undo()
    assert_resumes(lesonnx, tmp_path)


def assert_resumes(lesonnx: Call, directory: Path) -> None:
    assert_refused(
        lesonnx("export", fixture(NAME), directory / "bundle", "--resume", "--bits", 8), 2, ".bundle.partial", "options"
    )
    assert lesonnx("export", fixture(NAME), directory / "bundle", "--resume", "--workers", 1).code == 0
    assert lesonnx("inspect", directory / "bundle", "--verify").code == 0
    assert os.listdir(directory) == ["bundle"]


def test_nothing_to_resume(lesonnx: Call, tmp_path: Path) -> None:
    outcome = lesonnx("export", fixture(NAME), tmp_path / "bundle", "--resume")
    assert_refused(outcome, 2, ".bundle.partial", "nothing to resume")
    assert os.listdir(tmp_path) == []


# -- bundles: run and inspect name the file ----------------------------------------------------------------------------


@pytest.fixture
def bundle(bundle_of: BundleFactory, tmp_path: Path) -> Path:
    """A bundle to spoil, with a tokenizer."""
    return Path(shutil.copytree(bundle_of("sample", bits=4, dense_bits=8), tmp_path / "bundle"))


@dataclass(frozen=True)
class BadBundle:
    """How to spoil a bundle, and what running it then says."""

    spoil: Callable[[Path], object]
    mentions: tuple[str, ...]
    code: int = 2


def manifest(change: Callable[[Any], object]) -> Callable[[Path], object]:
    def edit(path: Path) -> None:
        document = json.loads((path / "manifest.json").read_text())
        change(document)
        (path / "manifest.json").write_text(json.dumps(document))

    return edit


def remove(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(content)


def cut(name: str, by: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - by)


def other_model(name: str) -> Callable[[Path], object]:
    """A valid model in the place of a part, which takes and gives other things."""

    def replace(path: Path) -> None:
        info = helper.make_tensor_value_info
        graph = helper.make_graph(
            [helper.make_node("Identity", ["a"], ["b"])],
            "other",
            [info("a", TensorProto.FLOAT, [1])],
            [info("b", TensorProto.FLOAT, [1])],
        )
        opsets = [helper.make_opsetid("", 21)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), str(path / name))

    return replace


def link_out(name: str) -> Callable[[Path], object]:
    def link(path: Path) -> None:
        moved = (path / name).rename(path.parent / "moved")
        (path / name).symlink_to(moved)

    return link


PACK = "experts/layer_002/experts.pack"
BAD_BUNDLES = {
    "no manifest": BadBundle(remove("manifest.json"), ("bundle", "holds no manifest.json")),
    "manifest not JSON": BadBundle(write("manifest.json", b"{"), ("manifest.json", "not JSON")),
    "manifest not text": BadBundle(write("manifest.json", b"\xff\xff"), ("manifest.json", "not readable")),
    "newer version": BadBundle(
        manifest(lambda m: m.update(format_version=99)), ("manifest.json", "format_version is 99", "export again")
    ),
    "unknown key": BadBundle(manifest(lambda m: m.update(colour="red")), ("manifest.json", "colour")),
    "path up": BadBundle(
        manifest(lambda m: m["parts"][0].update(path="../embed.onnx")), ("manifest.json", "'../embed.onnx'", "inside")
    ),
    "absolute path": BadBundle(
        manifest(lambda m: m["expert_layers"][0].update(pack="/etc/passwd")), ("manifest.json", "'/etc/passwd'")
    ),
    "pack cut": BadBundle(cut(PACK, 4096), (PACK, "bytes, expected")),
    "pack grown": BadBundle(cut(PACK, -1), (PACK, "bytes, expected")),
    "pack missing": BadBundle(remove(PACK), (PACK, "missing from the bundle")),
    "part missing": BadBundle(remove("dense/segment_003.onnx"), ("segment_003.onnx", "missing from the bundle")),
    "lookahead missing": BadBundle(remove("dense/lookahead_003.onnx"), ("lookahead_003.onnx", "missing")),
    "stage missing": BadBundle(remove("experts/stage_0.onnx"), ("stage_0.onnx", "missing from the bundle")),
    "expert missing": BadBundle(
        remove("experts/layer_002/expert_009.onnx"), ("layer_002/expert_009.onnx", "missing from the bundle")
    ),
    "dense weights missing": BadBundle(remove("dense/dense.bin"), ("dense/", "dense.bin")),
    "dense weights cut": BadBundle(cut("dense/dense.bin", 100_000), ("dense/",)),
    "part cut": BadBundle(cut("dense/segment_003.onnx", 50), ("segment_003.onnx", "ONNX Runtime does not take it")),
    "part garbage": BadBundle(write("dense/head.onnx", b"\x08garbage"), ("head.onnx", "ONNX Runtime does not take it")),
    "part empty": BadBundle(write("dense/embed.onnx", b""), ("embed.onnx",)),
    "part another model": BadBundle(
        other_model("dense/segment_003.onnx"), ("segment_003.onnx", "input 'residual' is not there, expected")
    ),
    "part a link out": BadBundle(link_out("dense/head.onnx"), ("head.onnx", "leads out of the bundle")),
    "pack a link out": BadBundle(link_out(PACK), (PACK, "leads out of the bundle")),
    "tokenizer missing": BadBundle(remove("tokenizer/tokenizer.json"), ("tokenizer.json", "missing")),
    "tokenizer broken": BadBundle(write("tokenizer/tokenizer.json", b"{}"), ("tokenizer.json", "not a tokenizer.json")),
    "ONNX Runtime of the future": BadBundle(
        manifest(lambda m: m.update(onnxruntime_at_least="99.1")), ("needs ONNX Runtime 99.1 or later, found",)
    ),
}


@pytest.mark.parametrize("case", BAD_BUNDLES)
def test_bad_bundle(lesonnx: Call, bundle: Path, case: str) -> None:
    bad = BAD_BUNDLES[case]
    bad.spoil(bundle)
    before = sorted(bundle.rglob("*"))
    outcome = lesonnx("run", bundle, "--prompt", "In the beginning", "--max-tokens", 2)
    assert_refused(outcome, bad.code, *bad.mentions)
    assert outcome.out == ""
    assert sorted(bundle.rglob("*")) == before


@pytest.mark.parametrize("schedule", ["resident", "on-demand"])
@pytest.mark.parametrize("content", [b"", b"garbage", None], ids=["empty", "garbage", "cut"])
def test_bad_expert_model(lesonnx: Call, bundle: Path, content: bytes | None, schedule: str) -> None:
    """A load that fails is tried once more, then the run stops. Only the engine session reads these files."""
    for path in sorted((bundle / "experts/layer_002").glob("*.onnx")):
        path.write_bytes(path.read_bytes()[:-50] if content is None else content)
    outcome = lesonnx(
        "run", bundle, "--prompt", "In the beginning", "--max-tokens", 2, "--engine", "session", "--schedule", schedule
    )
    assert_refused(outcome, 1, "layer 2 expert", "cannot be")


@pytest.mark.parametrize("engine", ["kernel", "session"])
def test_pack_that_shrinks_under_a_run(
    lesonnx: Call, bundle: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    original = engines.make_engine

    def make_engine(*arguments: Any) -> Any:
        made = original(*arguments)
        os.truncate(bundle / PACK, 0)
        return made

    monkeypatch.setattr("lesonnx.model.make_engine", make_engine)
    outcome = lesonnx("run", bundle, "--prompt", "In the beginning", "--max-tokens", 2, "--engine", engine)
    if "library is not built" in outcome.err:
        pytest.skip("no kernel here")
    assert_refused(outcome, 1, "layer 2 expert")


def test_old_onnxruntime(lesonnx: Call, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort.onnxruntime, "__version__", "1.20.1")
    outcome = lesonnx("run", bundle, "--prompt", "x")
    assert_refused(outcome, 2, "needs ONNX Runtime 1.24 or later, found 1.20.1")


@pytest.mark.parametrize(
    "command", [("run", "--prompt", "x"), ("chat",), ("inspect",), ("inspect", "--verify", "--json")]
)
def test_no_bundle(lesonnx: Call, tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *options = command
    assert_refused(lesonnx(name, tmp_path / "nothing", *options), 2, tmp_path / "nothing", "no such bundle directory")
    assert_refused(
        lesonnx(name, SAMPLE / "config.json", *options), 2, SAMPLE / "config.json", "no such bundle directory"
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_inspect_verify_names_the_corrupt_file(lesonnx: Call, bundle: Path, as_json: bool) -> None:
    with (bundle / PACK).open("r+b") as pack:
        pack.seek(5000)
        pack.write(b"\xff\x00")
    options = ["--json"] if as_json else []
    assert lesonnx("inspect", bundle, *options).code == 0
    outcome = lesonnx("inspect", bundle, "--verify", *options)
    assert_refused(outcome, 2, PACK, "SHA-256 differs")
    assert outcome.out == ""


def test_bundle_without_tokenizer_given_text(lesonnx: Call, bundle_of: BundleFactory) -> None:
    bare = bundle_of(NAME)
    assert_refused(lesonnx("run", bare, "--prompt", "x"), 2, bare, "has no tokenizer")
    assert_refused(lesonnx("run", bare, "--prompt-ids", "5", "--stop", "x"), 2, "stop strings need a tokenizer")
    assert_refused(lesonnx("chat", bare), 2, bare, "has no chat template", "lesonnx run")


# -- usage -------------------------------------------------------------------------------------------------------------

LONG = ",".join(["7"] * 2048)
BAD_USAGE: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no prompt": ([], ("exactly one of --prompt, --prompt-file and --prompt-ids",)),
    "two prompts": (["--prompt", "x", "--prompt-ids", "5"], ("exactly one of --prompt",)),
    "empty prompt": (["--prompt", ""], ("the prompt is empty",)),
    "prompt too long": (["--prompt-ids", LONG], ("2048 tokens", "context of 2048")),
    "prompt and answer too long": (["--prompt-ids", LONG[:-2], "--max-tokens", "9"], ("2047 tokens and 9", "2048")),
    "token id out of range": (["--prompt-ids", "5,2048"], ("token id 2048 is outside 0..2047",)),
    "negative token id": (["--prompt-ids", "5,-3"], ("token id -3 is outside",)),
    "token id beyond 64 bits": (["--prompt-ids", "5,99999999999999999999"], ("token id 99999999999999999999",)),
    "ids that are none": (["--prompt-ids", "1,two"], ("--prompt-ids '1,two'",)),
    "no ids": (["--prompt-ids", ""], ("--prompt-ids ''",)),
    "prompt file missing": (["--prompt-file", "/nowhere/prompt.txt"], ("/nowhere/prompt.txt", "not readable")),
    "prompt file a directory": (["--prompt-file", "/"], ("/", "not readable")),
    "bad size": (["--prompt", "x", "--expert-budget", "many"], ("--expert-budget", "'many' is not a size")),
    "negative size": (["--prompt", "x", "--memory-budget", "-3GB"], ("--memory-budget", "-3GB")),
    "expert budget too small": (["--prompt", "x", "--expert-budget", "4096"], ("4,096 bytes", "at least")),
    "expert budget zero": (["--prompt", "x", "--expert-budget", "0"], ("the expert budget is 0 bytes",)),
    "memory budget too small": (
        ["--prompt", "x", "--memory-budget", "10MB"],
        ("the memory budget is 10,000,000 bytes",),
    ),
    "budget too small for resident": (
        ["--prompt", "x", "--schedule", "resident", "--expert-budget", "2MB"],
        ("schedule resident keeps all experts", "2,000,000"),
    ),
    "unknown schedule": (["--prompt", "x", "--schedule", "magic"], ("--schedule", "'magic'", "on-demand")),
    "unknown engine": (["--prompt", "x", "--engine", "magic"], ("--engine", "'magic'")),
    "no chunk": (["--prompt", "x", "--prefill-chunk", "0"], ("--prefill-chunk", "0")),
    "no tokens": (["--prompt", "x", "--max-tokens", "0"], ("--max-tokens", "0")),
    "empty stop string": (["--prompt", "x", "--stop", ""], ("a stop string is empty",)),
    "NaN temperature": (["--prompt", "x", "--temperature", "nan"], ("temperature is nan",)),
    "negative temperature": (["--prompt", "x", "--temperature", "-1"], ("temperature is -1",)),
    "top-p of zero": (["--prompt", "x", "--top-p", "0"], ("top_p is 0",)),
    "negative top-k": (["--prompt", "x", "--top-k", "-1"], ("top_k is -1",)),
    "penalty of zero": (["--prompt", "x", "--repetition-penalty", "0"], ("repetition_penalty is 0",)),
    "negative seed": (["--prompt", "x", "--seed", "-1"], ("seed is -1",)),
    "unknown option": (["--prompt", "x", "--magic"], ("--magic", "lesonnx run --help")),
    "option without value": (["--prompt"], ("--prompt", "requires an argument")),
    "surplus argument": (["surplus", "--prompt", "x"], ("surplus",)),
    "half a surrogate pair": (["--prompt", "\udcff"], ("surrogate",)),
}


@pytest.mark.parametrize("case", BAD_USAGE)
def test_bad_usage(lesonnx: Call, sample_bundle: Path, case: str) -> None:
    arguments, mentions = BAD_USAGE[case]
    outcome = lesonnx("run", sample_bundle, *arguments)
    assert_refused(outcome, 2, *mentions)
    assert outcome.out == ""


@pytest.mark.parametrize("option", ["--trace", "--record-routing"])
def test_a_directory_to_write_to(lesonnx: Call, sample_bundle: Path, tmp_path: Path, option: str) -> None:
    """Told before any work, which would be lost."""
    outcome = lesonnx("run", sample_bundle, "--prompt", "x", option, tmp_path)
    assert_refused(outcome, 2, tmp_path, "is a directory")
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["nothing"], ("No such command 'nothing'", "lesonnx --help")),
        (["export"], ("Missing argument 'CHECKPOINT'", "lesonnx export --help")),
        (["export", "a", "b", "--bits", "5"], ("--bits", "'5'")),
        (["export", "a", "b", "--workers", "0"], ("--workers", "0")),
        (["run"], ("Missing argument 'BUNDLE'",)),
        (["--magic"], ("--magic",)),
    ],
)
def test_bad_commands(lesonnx: Call, arguments: list[str], mentions: tuple[str, ...]) -> None:
    assert_refused(lesonnx(*arguments), 2, *mentions)


def test_a_system_error_nobody_expected(lesonnx: Call, sample_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(5, "Input/output error", "/dev/broken")

    monkeypatch.setattr(cli_module.cli, "main", fail)
    assert_refused(lesonnx("run", sample_bundle), 1, "/dev/broken: Input/output error")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["export", "{tmp}/nothing", "{tmp}/bundle"], 2),
        (["run", "{tmp}/nothing", "--prompt", "x"], 2),
        (["run", "{bundle}", "--prompt-ids", "5,2048"], 2),
        (["run", "{bundle}", "--prompt", "x", "--expert-budget", "1"], 2),
        (["inspect", "{tmp}/nothing"], 2),
        (["magic"], 2),
    ],
)
def test_in_a_process_of_its_own(sample_bundle: Path, tmp_path: Path, arguments: list[str], code: int) -> None:
    """As above, but as a user meets it: nothing but the one line reaches the terminal."""
    filled = [argument.format(tmp=tmp_path, bundle=sample_bundle) for argument in arguments]
    result = subprocess.run([sys.executable, "-m", "lesonnx", *filled], capture_output=True, text=True, check=False)
    assert_refused(Outcome(result.returncode, result.stdout, result.stderr), code)
    assert result.stdout == ""
    assert os.listdir(tmp_path) == []
