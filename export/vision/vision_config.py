"""What the vision graphs must know of a model: the tower's sizes from config.json, and how pixels are scaled.

It knows MiniCPM-V's spelling, but neither processors nor bundles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lesonnx.errors import CheckpointError
from lesonnx_export.config import Config

ACTIVATIONS = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu": "none"}
MODES = ("16x", "4x")
# The keys that the outer level of config.json has for the tower.
OUTER = ("merger_times", "merge_kernel_size", "downsample_mode", "insert_layer_id")


@dataclass(frozen=True)
class Pixels:
    """How 8-bit RGB becomes what the tower takes: ``(value * rescale_factor - mean) / std``, by channel."""

    rescale_factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True)
class TowerConfig:
    """The sizes of the tower and its mergers.

    ``positions_per_side``: the position table is so many entries a side. ``insert_layer_id``: the layer behind which
    the window merger stands, None without one. ``text_hidden_size`` is the width of the features.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    positions_per_side: int
    layer_norm_eps: float
    gelu: str
    insert_layer_id: int | None
    text_hidden_size: int

    @property
    def token_patches(self) -> Literal[2, 4]:
        """The patches a side that give one image token."""
        return 2 if self.insert_layer_id is None else 4

    @classmethod
    def read(cls, raw: dict[str, Any], text_hidden_size: int) -> TowerConfig:
        """From a checkpoint's config.json; CheckpointError names what is missing, malformed or not computed here."""
        inner = raw.get("vision_config")
        if not isinstance(inner, dict):
            raise CheckpointError("config.json: vision_config must be an object")
        config = Config({"model_type": "vision_config", **inner})
        outer = Config({"model_type": "minicpmv4_7", **{key: raw[key] for key in OUTER if key in raw}})
        outer.require("merger_times", (1,), 1)
        outer.require("merge_kernel_size", ([2, 2],), [2, 2])
        outer.require("downsample_mode", MODES, "16x")
        config.require("window_kernel_size", ([2, 2],), [2, 2])
        config.require("num_channels", (3,), 3)
        config.require("hidden_act", tuple(ACTIVATIONS), "gelu_pytorch_tanh")
        hidden, heads = config.integer("hidden_size", 768), config.integer("num_attention_heads", 12)
        if hidden % heads:
            raise CheckpointError(
                f"config.json: vision_config: hidden_size {hidden} is not a multiple of {heads} heads"
            )
        patch, image = config.integer("patch_size", 16), config.integer("image_size", 224)
        if image < patch:
            raise CheckpointError(f"config.json: vision_config: image_size {image} is less than patch_size {patch}")
        layers = config.integer("num_hidden_layers", 12)
        # transformers lets the outer one, or its default, win.
        insert = outer.integer("insert_layer_id", 0) if "insert_layer_id" in raw else 6
        if outer.raw("downsample_mode", "16x") == "4x":
            insert_layer_id = None
        elif insert >= layers:
            raise CheckpointError(f"config.json: insert_layer_id is {insert}, vision_config has {layers} layers")
        else:
            insert_layer_id = insert
        return cls(
            hidden_size=hidden,
            intermediate_size=config.integer("intermediate_size", 3072),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            patch_size=patch,
            positions_per_side=image // patch,
            layer_norm_eps=config.positive("layer_norm_eps", 1e-6),
            gelu=ACTIVATIONS[config.raw("hidden_act", "gelu_pytorch_tanh")],
            insert_layer_id=insert_layer_id,
            text_hidden_size=text_hidden_size,
        )
