"""Reading a checkpoint: tensors as float32 whatever their file, type and name, and what the reader refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import INDEX, Tensors, cast, derive, fixture, prefix_with, read_config, read_tensors, write_checkpoint
from safetensors.numpy import save_file

from lesonnx.errors import CheckpointError
from lesonnx_export.checkpoint import Checkpoint, Weights, read_json

NAME = "qwen3_moe"
EMBEDDING = "embed_tokens.weight"


@pytest.fixture
def tensors() -> Tensors:
    return read_tensors(NAME)


def test_tensors_come_as_float32_under_canonical_names(tensors: Tensors) -> None:
    checkpoint = Checkpoint(fixture(NAME))
    assert set(checkpoint.tensors) == {key.removeprefix("model.") for key in tensors}
    for key, value in tensors.items():
        name = key.removeprefix("model.")
        got = checkpoint.read(name)
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        assert got.flags.owndata
        assert np.array_equal(got, value.astype(np.float32))
        assert checkpoint.info(name).shape == value.shape


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_three_float_types(tmp_path: Path, dtype: Any) -> None:
    values = {"model.embed_tokens.weight": np.arange(-8, 8, dtype=np.float32).reshape(4, 4)}
    checkpoint = Checkpoint(write_checkpoint(tmp_path, {}, cast(dtype)(values)))
    assert np.array_equal(checkpoint.read(EMBEDDING), values["model.embed_tokens.weight"])
    assert checkpoint.info(EMBEDDING).num_bytes == 16 * np.dtype(dtype).itemsize


def test_one_index_and_ranges_of_the_first_axis(tensors: Tensors) -> None:
    checkpoint = Checkpoint(fixture(NAME))
    whole = checkpoint.read(EMBEDDING)
    assert np.array_equal(checkpoint.read(EMBEDDING, 7), whole[7])
    assert np.array_equal(checkpoint.read(EMBEDDING, slice(3, 9)), whole[3:9])
    pieces = list(checkpoint.rows(EMBEDDING, 100))
    assert [len(piece) for piece in pieces] == [100, 100, 100, 20]
    assert np.array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_shards(tmp_path: Path, tensors: Tensors, num_shards: int) -> None:
    checkpoint = Checkpoint(derive(NAME, tmp_path, num_shards=num_shards))
    assert len({info.file for info in checkpoint.tensors.values()}) == num_shards
    assert np.array_equal(checkpoint.read(EMBEDDING), tensors["model.embed_tokens.weight"].astype(np.float32))


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head."),
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("", "lm_head."),
    ],
)
def test_prefixes(tmp_path: Path, prefix: str, head: str) -> None:
    expected = set(Checkpoint(fixture(NAME)).tensors)
    assert set(Checkpoint(derive(NAME, tmp_path, tensors=prefix_with(prefix, head))).tensors) == expected


def test_reading_does_not_keep_the_file_in_the_process(tmp_path: Path) -> None:
    """200 MB are read row by row; what the process holds afterwards must not have grown with them."""
    rows = np.ones((50_000, 1024), np.float32)
    save_file({"model.embed_tokens.weight": rows}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    script = f"""
from pathlib import Path
from lesonnx.memory import current_bytes, peak_bytes
from lesonnx_export.checkpoint import Checkpoint
checkpoint = Checkpoint(Path({str(tmp_path)!r}))
before = current_bytes()
for piece in checkpoint.rows("embed_tokens.weight", 1000): pass
del piece
print(current_bytes() - before)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 50_000_000


def test_same_tensor(tmp_path: Path, tensors: Tensors) -> None:
    changed = tensors["model.embed_tokens.weight"].copy()
    changed[-1, -1] += 1
    tensors |= {"model.same": tensors["model.embed_tokens.weight"], "model.changed": changed}
    tensors["model.short"] = np.ascontiguousarray(changed[:-1])
    weights = Weights(Checkpoint(write_checkpoint(tmp_path, {}, tensors)))
    assert weights.same(EMBEDDING, "same", 100)
    assert not weights.same(EMBEDDING, "changed", 100)
    assert not weights.same(EMBEDDING, "short")


def test_weights_record_their_use_and_state_shapes() -> None:
    weights = Weights(Checkpoint(fixture(NAME)))
    assert weights(EMBEDDING, 320, 64).shape == (320, 64)
    assert weights.used == {EMBEDDING}
    with pytest.raises(CheckpointError, match=r"shape \[320, 64\], expected \[64, 320\]"):
        weights(EMBEDDING, 64, 320)
    with pytest.raises(CheckpointError, match="'layers.9' is missing"):
        weights("layers.9", 1)


def test_a_rehearsal_reads_nothing(tmp_path: Path) -> None:
    checkpoint = Checkpoint(derive(NAME, tmp_path))
    (tmp_path / "model.safetensors").unlink()
    weights = Weights(checkpoint, rehearsal=True)
    assert weights(EMBEDDING, 320, 64).shape == (320, 64)
    assert [piece.shape for piece in weights.chunks(EMBEDDING, 200, 320, 64)] == [(200, 64), (120, 64)]
    assert weights.used == {EMBEDDING}


# -- refusals: the ones that an export meets are in test_bad_input.py --------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\x00", "[" * 100_000])
def test_json_that_is_no_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="config.json"):
        read_json(path)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": "../x.safetensors"}}]
)
def test_index_that_is_none(tmp_path: Path, index: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=INDEX):
        Checkpoint(tmp_path)


def test_index_that_names_what_its_shard_lacks(tmp_path: Path) -> None:
    derive(NAME, tmp_path, num_shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.extra"] = next(iter(index["weight_map"].values()))
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="'model.extra', which its file does not hold"):
        Checkpoint(tmp_path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    derive(NAME, tmp_path, num_shards=2)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match="model-00001-of-00002"):
        Checkpoint(tmp_path)


def test_without_an_embedding_under_any_prefix(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, read_config(NAME), {"transformer.wte.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match="embed_tokens"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(tmp_path: Path, tensors: Tensors, value: float) -> None:
    tensors["model.embed_tokens.weight"][300, 5] = value
    checkpoint = Checkpoint(write_checkpoint(tmp_path, {}, tensors))
    with pytest.raises(CheckpointError, match=r"'model.embed_tokens.weight' holds values that are not finite"):
        checkpoint.read(EMBEDDING)
    assert np.isfinite(checkpoint.read(EMBEDDING, slice(0, 300))).all()
