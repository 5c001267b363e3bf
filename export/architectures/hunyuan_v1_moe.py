"""Hunyuan-A13B: q/k normalised per head after they are rotated, softmax router, one shared expert without a weight."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx.errors import CheckpointError
from lesonnx_export.architectures.base import Decoder, Routing
from lesonnx_export.blocks import Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.config import Config
from lesonnx_export.expert import ExpertShape, ExpertTensors


class Architecture(Decoder):
    """Configs state counts and sizes once, or once a layer; only layers that are alike are exported."""

    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 290943,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    moe_intermediate_key = "intermediate_size"
    router_name = "gate.wg"
    rotates_before_norm = True
    states_head_dim = True

    def __init__(self, config: Config) -> None:
        for key in ("num_experts", "moe_topk", "num_experts_per_tok", "num_shared_expert", "moe_intermediate_size"):
            _one_for_all_layers(config, key)
        super().__init__(config)
        self.norm_topk_prob = True
        self.attention_bias = config.flag("attention_bias", False)
        config.require("num_shared_expert", (1,), 1)
        config.require("moe_intermediate_size", (None, self.moe_intermediate_size), None)
        config.require("use_qk_norm", (True,), True)
        config.require("use_cla", (False,), False)
        config.require("norm_type", ("rms",), "rms")
        config.require("mlp_bias", (False,), False)
        config.require("moe_layer_num_skipped", (0,), 0)
        for key in (
            *("use_mixed_mlp_moe", "moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor"),
            *("cla_share_factor", "eod_token_id", "sep_token_id", "im_end_id", "im_newline_id", "im_start_id"),
            *("attention_head_dim", "pool_type", "position_embedding_xdrope", "add_classification_head", "class_num"),
            *("dense_list", "tie_word_embeddings", "text_end_id", "text_start_id", "mask_init_id", "org_vocab_size"),
        ):
            config.raw(key, None)  # training, other uses of the checkpoint, or what follows from other keys

    def has_qkv_bias(self) -> bool:
        return self.attention_bias

    def has_output_bias(self) -> bool:
        return self.attention_bias

    def normalize_qk(self, step: Step, prefix: str, query: str, key: str) -> tuple[str, str]:
        names = (f"{prefix}query_layernorm.weight", f"{prefix}key_layernorm.weight")
        return self.normalize_heads(step, query, names[0], key, names[1])

    def route(self, step: Step, layer_idx: int, moe_input: str) -> Routing:
        routing = super().route(step, layer_idx, moe_input)
        return Routing(routing.ids, routing.weights, routing.scores, step.column(moe_input, 1.0))

    def shared_expert_shape(self) -> ExpertShape:
        return self.expert_shape()

    def shared_expert(self, weights: Weights, layer_idx: int) -> ExpertTensors:
        return self.mlp(weights, f"layers.{layer_idx}.mlp.shared_mlp.", self.moe_intermediate_size, self.hidden_size)


def _one_for_all_layers(config: Config, key: str) -> None:
    """A list with one value for each layer becomes that value; CheckpointError where layers differ."""
    value = config.values.get(key)
    if isinstance(value, list):
        if not value or any(item != value[0] for item in value):
            raise CheckpointError(f"config.json: {key} differs from layer to layer, which is not supported")
        config.values[key] = value[0]
