"""DeepSeek-V3 (and Moonlight): latent attention; a sigmoid router over groups; its bias selects but does not weigh."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx_export.architectures import deepseek_v2
from lesonnx_export.architectures.base import Routing
from lesonnx_export.blocks import Step
from lesonnx_export.mla import LatentAttention
from lesonnx_export.routers import EXCLUDED, choose, keep_best_groups, normalized

# Added to the sum that weights are divided by.
NORM_EPSILON = 1e-20


class Architecture(deepseek_v2.Architecture):
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "num_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }

    def _read_attention(self) -> None:
        interleave = self.config.flag("rope_interleave", True)
        self.latent_attention = LatentAttention.of(self.config, rope_interleave=interleave)

    def _read_router(self) -> None:
        self.norm_topk_prob = self.config.flag("norm_topk_prob")
        self.config.require("topk_method", ("noaux_tc",), "noaux_tc")
        self.config.require("scoring_func", ("sigmoid",), "sigmoid")

    def _sigmoid_scores(self, step: Step, layer_idx: int, moe_input: str) -> str:
        name = f"{self.moe_block(step.weights, layer_idx)}{self.router_name}.weight"
        return step.graph.op("Sigmoid", step.router_linear(moe_input, name, self.num_experts, self.hidden_size))

    def _choice(self, step: Step, layer_idx: int, scores: str) -> str:
        """What experts are chosen by: scores with the selection bias, groups that are out excluded."""
        prefix = f"{self.moe_block(step.weights, layer_idx)}{self.router_name}."
        biased = step.graph.op("Add", scores, step.vector(f"{prefix}e_score_correction_bias", self.num_experts))
        return keep_best_groups(
            step,
            biased,
            num_experts=self.num_experts,
            n_group=self.n_group,
            topk_group=self.topk_group,
            by="top2",
            other=EXCLUDED,
        )

    def router_scores(self, step: Step, layer_idx: int, moe_input: str) -> str:
        return self._choice(step, layer_idx, self._sigmoid_scores(step, layer_idx, moe_input))

    def route(self, step: Step, layer_idx: int, moe_input: str) -> Routing:
        scores = self._sigmoid_scores(step, layer_idx, moe_input)
        choice = self._choice(step, layer_idx, scores)
        ids, weights = choose(step, choice, scores, self.num_experts_per_tok)
        if self.norm_topk_prob:
            weights = normalized(step, weights, NORM_EPSILON)
        weights = step.scaled(weights, self.routed_scaling_factor)
        return Routing(ids, weights, choice, step.column(moe_input, 1.0))
