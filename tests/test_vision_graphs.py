"""The vision graphs alone: the tower against a plain forward pass and transformers, preparation against Pillow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import PIL
import pytest
from checkpoints import FIXTURES, read_config, read_reference
from numpy.typing import NDArray
from PIL import Image

from lesonnx.errors import CheckpointError
from lesonnx_export.blocks import DenseBits, Precision
from lesonnx_export.checkpoint import Checkpoint, Weights
from lesonnx_export.graph import DenseStore
from lesonnx_export.segments import BuiltPart
from lesonnx_export.vision.prepare import build_prepare
from lesonnx_export.vision.tower import MERGER, TOWER, VisionStore, build_tower, num_parameters
from lesonnx_export.vision.vision_config import Pixels, TowerConfig

NAME = "minicpmv4_7_moe"
PIXELS = Pixels(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
PATCH = 14
# Before, Pillow resized rows first whatever the sizes.
COLUMNS_FIRST = int(PIL.__version__.partition(".")[0]) >= 13
Array = NDArray[Any]


def session(part: BuiltPart, directory: Path) -> onnxruntime.InferenceSession:
    path = directory / Path(part.part.path).name
    path.write_bytes(part.model.SerializeToString())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def make_tower(directory: Path, bits: DenseBits = 32, mode: str = "16x") -> onnxruntime.InferenceSession:
    store = VisionStore(directory / VisionStore.location)
    part = build_tower(tower_config(mode), Weights(Checkpoint(FIXTURES / NAME)), store, Precision(bits, 32))
    store.close()
    return session(part, directory)


def tower_config(mode: str = "16x") -> TowerConfig:
    return TowerConfig.read(read_config(NAME) | {"downsample_mode": mode}, 64)


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    return make_tower(tmp_path_factory.mktemp("tower"))


@pytest.fixture(scope="module")
def prepare(tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    return session(build_prepare(PATCH, PIXELS, DenseStore(None)), tmp_path_factory.mktemp("prepare"))


def see(tower: onnxruntime.InferenceSession, pixels: Array, target: Array) -> Array:
    features: Array = tower.run(None, {"pixel_values": pixels, "target_size": target.astype(np.int64)})[0]
    return features


def crops_of(case: int) -> tuple[list[Array], list[Array], Array]:
    """Pixels and target size of each crop of a case, and its features."""
    reference = read_reference(NAME)
    targets = list(reference[f"case{case}_target_sizes"])
    ends = np.cumsum([PATCH * math.prod(target) for target in targets])
    pixels = np.split(reference[f"case{case}_pixel_values"], ends[:-1], axis=-1)
    return pixels, targets, reference[f"case{case}_image_features"]


# -- the tower ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(3))
def test_features_of_every_crop(tower: onnxruntime.InferenceSession, case: int) -> None:
    pixels, targets, expected = crops_of(case)
    alone = [see(tower, crop, target) for crop, target in zip(pixels, targets, strict=True)]
    assert np.abs(np.concatenate(alone) - expected).max() < 1e-5
    # Crops that are alike may go together: bit for bit the same.
    for target in np.unique(targets, axis=0):
        places = [place for place, other in enumerate(targets) if (other == target).all()]
        together = see(tower, np.concatenate([pixels[place] for place in places], -1), target)
        assert together.tobytes() == np.concatenate([alone[place] for place in places]).tobytes()


class Forward:
    """The tower in float64, from the words of docs/vision.md: one crop, plain loops over heads and groups."""

    def __init__(self, config: TowerConfig) -> None:
        self.config = config
        self.checkpoint = Checkpoint(FIXTURES / NAME)

    def tensor(self, name: str) -> Array:
        return self.checkpoint.read(name).astype(np.float64)

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.tensor(f"{name}.weight").T + self.tensor(f"{name}.bias")

    def norm(self, x: Array, name: str) -> Array:
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * self.tensor(f"{name}.weight") + self.tensor(f"{name}.bias")

    def attention(self, x: Array, name: str) -> Array:
        """Among all rows of x [N,size]."""
        q, k, v = (self.linear(x, f"{name}.{key}_proj") for key in "qkv")
        size = self.config.hidden_size // self.config.num_attention_heads
        heads = []
        for start in range(0, self.config.hidden_size, size):
            part = slice(start, start + size)
            scores = q[:, part] @ k[:, part].T / math.sqrt(size)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, part])
        return self.linear(np.concatenate(heads, -1), f"{name}.out_proj")

    def __call__(self, pixels: Array, height: int, width: int) -> Array:
        config, table = self.config, self.tensor(f"{TOWER}embeddings.position_embedding.weight")
        kernel = self.tensor(f"{TOWER}embeddings.patch_embedding.weight")
        patches = pixels[0].reshape(3, PATCH, height * width, PATCH)
        x = np.einsum("cynx,hcyx->nh", patches, kernel) + self.tensor(f"{TOWER}embeddings.patch_embedding.bias")
        n = config.positions_per_side
        x = x + [table[i * n // height * n + j * n // width] for i in range(height) for j in range(width)]
        for layer_idx in range(config.num_hidden_layers):
            name = f"{TOWER}encoder.layers.{layer_idx}"
            x = x + self.attention(self.norm(x, f"{name}.layer_norm1"), f"{name}.self_attn")
            inner = gelu_tanh(self.linear(self.norm(x, f"{name}.layer_norm2"), f"{name}.mlp.fc1"))
            x = x + self.linear(inner, f"{name}.mlp.fc2")
            if layer_idx == config.insert_layer_id:
                x = np.array([self.window(x[group]) for group in groups(height, width)])
                height, width = height // 2, width // 2
        x = self.norm(x, f"{TOWER}post_layernorm")
        merged = np.array([x[group].reshape(-1) for group in groups(height, width)])
        inner = self.linear(self.norm(merged, f"{MERGER}mlp.0.pre_norm"), f"{MERGER}mlp.0.linear_1")
        return self.linear(inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2, f"{MERGER}mlp.0.linear_2")

    def window(self, four: Array) -> Array:
        name = f"{TOWER}vit_merger"
        four = four + self.attention(self.norm(four, f"{name}.layer_norm1"), f"{name}.self_attn")
        inner = gelu_tanh(self.linear(self.norm(four.reshape(-1), f"{name}.pre_norm"), f"{name}.linear_1"))
        return self.linear(inner, f"{name}.linear_2") + four.mean(0)


def gelu_tanh(x: Array) -> Array:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def groups(height: int, width: int) -> list[list[int]]:
    """Every 2 x 2 neighbours, row by row: top left, top right, bottom left, bottom right."""
    return [
        [(i + down) * width + j + right for down in (0, 1) for right in (0, 1)]
        for i in range(0, height, 2)
        for j in range(0, width, 2)
    ]


@pytest.mark.parametrize("mode", ["16x", "4x"])
@pytest.mark.parametrize("target", [(4, 4), (8, 8), (4, 20), (12, 8), (20, 16)])
def test_any_size_in_both_modes(tmp_path: Path, mode: str, target: tuple[int, int]) -> None:
    pixels = np.random.default_rng(1).uniform(-1, 1, (1, 3, PATCH, PATCH * math.prod(target))).astype(np.float32)
    expected = Forward(tower_config(mode))(pixels.astype(np.float64), *target)
    features = see(make_tower(tmp_path, mode=mode), pixels, np.array(target))
    assert features.shape == expected.shape == (math.prod(target) // tower_config(mode).token_patches ** 2, 64)
    assert np.abs(features - expected).max() < 1e-5


@pytest.mark.parametrize(("bits", "most"), [(8, 0.03), (4, 0.3)])
def test_quantized_towers_come_near(tmp_path: Path, bits: DenseBits, most: float) -> None:
    tower = make_tower(tmp_path, bits)
    pixels, targets, expected = crops_of(1)
    alone = [see(tower, crop, target) for crop, target in zip(pixels, targets, strict=True)]
    assert np.linalg.norm(np.concatenate(alone) - expected) < most * np.linalg.norm(expected)
    assert see(tower, np.concatenate(pixels, -1), targets[0]).tobytes() == np.concatenate(alone).tobytes()


@pytest.mark.parametrize("mode", ["16x", "4x"])
def test_every_tensor_of_the_tower_is_used_and_counted(mode: str) -> None:
    weights = Weights(Checkpoint(FIXTURES / NAME), rehearsal=True)
    build_tower(tower_config(mode), weights, VisionStore(None), Precision(32, 0))
    tensors = {name: info for name, info in weights.checkpoint.tensors.items() if name.startswith((TOWER, MERGER))}
    unused = {name for name in tensors if mode == "4x" and ".vit_merger." in name}
    assert weights.used == set(tensors) - unused
    assert num_parameters(tower_config(mode)) == sum(math.prod(tensors[name].shape) for name in weights.used)


@pytest.mark.parametrize(
    ("outer", "inner", "message"),
    [
        ({"vision_config": None}, {}, "vision_config must be an object"),
        ({"merger_times": 2}, {}, "merger_times is 2, only 1 is supported"),
        ({"merge_kernel_size": [4, 4]}, {}, r"merge_kernel_size is \[4, 4\]"),
        ({"downsample_mode": "8x"}, {}, "downsample_mode is '8x', only '16x' or '4x'"),
        ({"insert_layer_id": 4}, {}, "insert_layer_id is 4, vision_config has 4 layers"),
        ({"insert_layer_id": -1}, {}, "insert_layer_id must be a whole number of at least 0"),
        ({}, {"window_kernel_size": [2, 3]}, r"window_kernel_size is \[2, 3\]"),
        ({}, {"num_channels": 4}, "num_channels is 4, only 3"),
        ({}, {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({}, {"hidden_act": ["gelu"]}, "hidden_act is"),
        ({}, {"num_attention_heads": 5}, "hidden_size 32 is not a multiple of 5 heads"),
        ({}, {"image_size": 13}, "image_size 13 is less than patch_size 14"),
        ({}, {"image_size": [112, 112]}, "image_size must be a whole number"),
        ({}, {"layer_norm_eps": 0}, "layer_norm_eps must be a positive number"),
    ],
)
def test_settings_that_are_refused(outer: Mapping[str, Any], inner: Mapping[str, Any], message: str) -> None:
    config = read_config(NAME)
    config["vision_config"] |= inner
    with pytest.raises(CheckpointError, match=message):
        TowerConfig.read({**config, **outer}, 64)


def test_the_outer_insert_layer_wins() -> None:
    config = read_config(NAME)
    config["vision_config"] |= {"insert_layer_id": 3}
    assert TowerConfig.read(config, 64).insert_layer_id == 1
    assert TowerConfig.read(config | {"insert_layer_id": 0}, 64).insert_layer_id == 0
    assert TowerConfig.read(config | {"downsample_mode": "4x"}, 64).insert_layer_id is None


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    config = replace(tower_config(), positions_per_side=9)
    with pytest.raises(CheckpointError, match=r"position_embedding.weight' has shape \[64, 32\], expected \[81, 32\]"):
        build_tower(config, Weights(Checkpoint(FIXTURES / NAME)), VisionStore(None), Precision(32, 0))


# -- preparation -------------------------------------------------------------------------------------------------------


def prepared(
    prepare: onnxruntime.InferenceSession, image: Array, size: tuple[int, int], grid: tuple[int, int] = (1, 1)
) -> Array:
    values = {"image": image, "size": np.array(size, np.int64), "grid": np.array(grid, np.int64)}
    pixels: Array = prepare.run(None, values)[0]
    return pixels


def packed(resized: Array, grid: tuple[int, int]) -> Array:
    """What the processor makes of a resized picture, crop by crop and patch by patch."""
    values = ((resized.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)).transpose(2, 0, 1)
    pieces = []
    for band in np.split(values, grid[0], axis=1):
        for crop in np.split(band, grid[1], axis=2):
            for row in np.split(crop, crop.shape[1] // PATCH, axis=1):
                pieces += np.split(row, row.shape[2] // PATCH, axis=2)
    return np.concatenate(pieces, -1)[None]


def by_pillow(image: Array, size: tuple[int, int]) -> Array:
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BICUBIC))


# How the fixture's pictures are seen: size and grid of each view.
VIEWS = {
    "small.png": [((112, 112), (1, 1))],
    "wide.png": [((112, 168), (1, 1)), ((224, 336), (2, 2))],
    "tall.png": [((224, 56), (1, 1)), ((336, 112), (3, 1))],
}


@pytest.mark.parametrize("case", range(3))
def test_pixels_of_the_fixture_are_equal_in_every_bit(prepare: onnxruntime.InferenceSession, case: int) -> None:
    reference = read_reference(NAME)
    pieces = []
    for name in reference[f"case{case}_images"]:
        image = np.asarray(Image.open(FIXTURES / NAME / "images" / str(name)).convert("RGB"))
        pieces += [prepared(prepare, image, size, grid) for size, grid in VIEWS[str(name)]]
    assert np.concatenate(pieces, -1).tobytes() == reference[f"case{case}_pixel_values"].tobytes()


@pytest.mark.parametrize(
    ("height", "width", "size", "grid"),
    [
        (1, 1, (56, 56), (1, 1)),  # every output sees the same pixel
        (5, 3, (112, 56), (2, 1)),
        (112, 56, (112, 56), (1, 1)),  # nothing to resize
        (112, 300, (112, 56), (1, 1)),
        (2, 900, (56, 1120), (1, 2)),
        (600, 37, (224, 112), (2, 2)),  # columns first
        (240, 320, (168, 336), (1, 2)),  # columns first, while the width grows
        (300, 200, (112, 112), (1, 1)),  # columns first, while both shrink
        (212, 246, (112, 196), (1, 1)),  # exactly twice as much: rows first
        (777, 1333, (336, 560), (3, 5)),
    ],
)
def test_pillow_s_pixels(
    prepare: onnxruntime.InferenceSession, height: int, width: int, size: tuple[int, int], grid: tuple[int, int]
) -> None:
    lost_height, lost_width = height - size[0], width - size[1]
    if not COLUMNS_FIRST and lost_height > max(0, 2 * lost_width):
        pytest.skip("this Pillow resizes rows first")
    noise = np.random.default_rng(2).integers(0, 256, (height, width, 3), dtype=np.uint8)
    stripes = np.broadcast_to(
        np.uint8([255, 0, 255]) * (np.arange(width) % 2 == 0)[:, None].astype(np.uint8), noise.shape
    )
    for image in (noise, np.ascontiguousarray(stripes)):
        assert prepared(prepare, image, size, grid).tobytes() == packed(by_pillow(image, size), grid).tobytes()


def test_pillow_s_pixels_at_random_sizes(prepare: onnxruntime.InferenceSession) -> None:
    rng = np.random.default_rng(3)
    checked = 0
    while checked < 40:
        height, width = (int(side) for side in np.exp(rng.uniform(0, math.log(400), 2)))
        size = (int(rng.integers(1, 9)) * PATCH, int(rng.integers(1, 9)) * PATCH)
        if COLUMNS_FIRST or height - size[0] <= max(0, 2 * (width - size[1])):
            image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            assert prepared(prepare, image, size).tobytes() == packed(by_pillow(image, size), (1, 1)).tobytes()
            checked += 1


def test_mean_and_deviation_are_the_processor_s(tmp_path: Path) -> None:
    pixels = Pixels(0.5, (1, 2, 3), (2, 4, 8))
    store = DenseStore(None)
    part = build_prepare(2, pixels, store)
    assert store.end_bytes == 0
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    found = prepared(session(part, tmp_path), image, (2, 2))
    expected = (image.astype(np.float64) * 0.5 - [1, 2, 3]) / [2, 4, 8]
    np.testing.assert_allclose(found[0], expected.transpose(2, 0, 1), rtol=1e-6)
