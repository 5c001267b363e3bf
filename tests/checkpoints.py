"""Checkpoints for the tests: the fixtures as they lie in ``data/``, and variants derived from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

FIXTURES = Path(__file__).parent / "data" / "checkpoints"
SAMPLE = Path(__file__).resolve().parent.parent / "lesonnx" / "sample"
FAMILIES = ("qwen3_moe", "qwen3_moe_tied_dense0", "olmoe", "mixtral", "qwen2_moe")
# Those that carry more from token to token than attention caches.
RECURRENT = ("lfm2_moe", "qwen3_next", "qwen3_5_moe_text")
INDEX = "model.safetensors.index.json"
Tensors = dict[str, NDArray[Any]]
Config = dict[str, Any]


def fixture(name: str) -> Path:
    """The directory of a fixture, or of the embedded sample."""
    return SAMPLE if name == "sample" else FIXTURES / name


def read_config(name: str) -> Config:
    config: Config = json.loads((fixture(name) / "config.json").read_text(encoding="utf-8"))
    return config


def read_tensors(name: str) -> Tensors:
    """All tensors of a fixture in the type in which it stores them."""
    tensors = {}
    with safe_open(fixture(name) / "model.safetensors", framework="numpy") as file:
        for key in file.keys():  # noqa: SIM118  (not a mapping)
            is_float8 = file.get_slice(key).get_dtype() == "F8_E4M3"  # which safetensors does not give to numpy
            tensors[key] = read_float8(name, key) if is_float8 else file.get_tensor(key)
    return tensors


def read_float8(name: str, key: str) -> NDArray[Any]:
    """A float8 tensor of a fixture, by the file's header."""
    data = (fixture(name) / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + header_bytes])[key]
    start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
    return np.frombuffer(data[start:end], ml_dtypes.float8_e4m3fn).reshape(entry["shape"])


def read_reference(name: str) -> dict[str, NDArray[Any]]:
    with np.load(fixture(name) / "reference.npz") as arrays:
        return dict(arrays)


def write_checkpoint(
    directory: Path, config: Config, tensors: Mapping[str, NDArray[Any]], *, num_shards: int = 0
) -> Path:
    """A checkpoint directory: one file, or shards (tensors dealt out in turn) with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if not num_shards:
        save_file(dict(tensors), directory / "model.safetensors")
        return directory
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::num_shards]}
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return directory


def derive(
    name: str,
    directory: Path,
    *,
    config: Callable[[Config], Config] | None = None,
    tensors: Callable[[Tensors], Tensors] | None = None,
    num_shards: int = 0,
) -> Path:
    """A fixture with its config or tensors changed."""
    changed_config, changed_tensors = read_config(name), read_tensors(name)
    if config is not None:
        changed_config = config(changed_config)
    if tensors is not None:
        changed_tensors = tensors(changed_tensors)
    return write_checkpoint(directory, changed_config, changed_tensors, num_shards=num_shards)


def one_layer(directory: Path) -> Path:
    """The first layer of the sample, with its tokenizer: text in little time."""

    def first(tensors: Tensors) -> Tensors:
        return {key: value for key, value in tensors.items() if ".layers." not in key or ".layers.0." in key}

    derive("sample", directory, config=lambda config: config | {"num_hidden_layers": 1}, tensors=first)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((SAMPLE / name).read_bytes())
    return directory


# -- what real checkpoints do to names, layouts and types --------------------------------------------------------------


def fuse_experts(tensors: Tensors, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Tensors:
    """``experts.N.{gate,up,down}_proj.weight`` as ``gate_up_proj`` [E,2I,H] and ``down_proj`` [E,H,I]."""
    fused = {key: value for key, value in tensors.items() if ".experts." not in key}
    for block in sorted({key.split(".experts.")[0] for key in tensors if ".experts." in key}):
        prefix = f"{block}.experts."
        count = len({key for key in tensors if key.startswith(prefix)}) // 3
        gate, up, down = (
            np.stack([tensors[f"{prefix}{expert}.{name}.weight"] for expert in range(count)]) for name in names
        )
        fused[f"{prefix}gate_up_proj"] = np.concatenate([gate, up], axis=1)
        fused[f"{prefix}down_proj"] = down
    return fused


def fuse_lfm2(tensors: Tensors) -> Tensors:
    """LFM2-MoE as transformers 5 holds it: experts fused, dense layers as they are."""
    return fuse_experts(tensors, ("w1", "w3", "w2"))


def fuse_mixtral(tensors: Tensors) -> Tensors:
    """Mixtral as transformers 5 holds it: the block called ``mlp``, its experts fused."""
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    renamed = {}
    for key, value in tensors.items():
        key = key.replace(".block_sparse_moe.", ".mlp.")
        for old, new in names.items():
            key = key.replace(f".{old}.weight", f".{new}.weight")
        renamed[key] = value
    return fuse_experts(renamed)


def spell_as_transformers_4(config: Config) -> Config:
    """``rope_theta`` and ``rope_scaling`` instead of ``rope_parameters``; ``torch_dtype``; ``num_experts``."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    config["rope_theta"], config["rope_scaling"] = rope["rope_theta"], None
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.57.0"
    if config["model_type"] != "mixtral" and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    return config


def nest_text_config(config: Config) -> Config:
    """The language model's configuration inside a multimodal one."""
    outer = ("architectures", "transformers_version", "tie_word_embeddings", "eos_token_id")
    return {key: config[key] for key in outer} | {
        "model_type": "vision_language",
        "text_config": {key: value for key, value in config.items() if key not in outer},
    }


def prefix_with(prefix: str, head: str) -> Callable[[Tensors], Tensors]:
    """``model.`` replaced by another prefix, ``lm_head.`` by another name."""

    def rename(tensors: Tensors) -> Tensors:
        return {
            prefix + key.removeprefix("model.") if key.startswith("model.") else key.replace("lm_head.", head): value
            for key, value in tensors.items()
        }

    return rename


def cast(dtype: Any) -> Callable[[Tensors], Tensors]:
    """All tensors in another type; the values stay what they are."""

    def convert(tensors: Tensors) -> Tensors:
        converted = {key: value.astype(np.float32).astype(dtype) for key, value in tensors.items()}
        for key, value in tensors.items():
            if not np.array_equal(converted[key].astype(np.float32), value.astype(np.float32)):
                raise ValueError(f"{key} is not exact in {np.dtype(dtype)}")
        return converted

    return convert


def round_to_float16(tensors: Tensors) -> Tensors:
    """Values that bfloat16 and float16 both hold exactly: what float16 holds only as subnormal goes to zero."""
    rounded = {}
    for key, value in tensors.items():
        values = value.astype(np.float32)
        values[np.abs(values) < 2.0**-14] = 0
        rounded[key] = values.astype(ml_dtypes.bfloat16)
    return rounded
