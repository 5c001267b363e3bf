"""GLM-4.7-Flash: DeepSeek-V3's layers; which are dense is said by a list."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx.errors import CheckpointError
from lesonnx_export.architectures import deepseek_v3
from lesonnx_export.config import Config

KINDS = ("dense", "sparse")


class Architecture(deepseek_v3.Architecture):
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "n_shared_experts": 1,
        "num_experts": 64,
        "routed_scaling_factor": 1.8,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        count = self.num_hidden_layers
        first = config.integer("first_k_dense_replace", 1)
        kinds = config.raw("mlp_layer_types", [KINDS[idx >= first] for idx in range(count)])
        if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= set(KINDS):
            raise CheckpointError(f"config.json: mlp_layer_types must be {count} of {', '.join(KINDS)}")
        self.mlp_layer_types: list[str] = kinds

    def is_moe(self, layer_idx: int) -> bool:
        return self.mlp_layer_types[layer_idx] == "sparse"
