"""DeepSeek-V2: latent attention, first layers dense, softmax router over groups, shared experts."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx.errors import CheckpointError
from lesonnx_export.architectures.base import Decoder, Routing
from lesonnx_export.blocks import Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.config import Config
from lesonnx_export.expert import ExpertShape, ExpertTensors
from lesonnx_export.mla import LatentAttention
from lesonnx_export.routers import keep_best_groups


class Architecture(Decoder):
    """Several shared experts are one of their summed width, as the checkpoint has them."""

    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "num_experts": 64,
        "n_shared_experts": 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._read_attention()
        self.first_k_dense_replace = config.integer("first_k_dense_replace", 0)
        self.n_shared_experts = config.integer("n_shared_experts")
        self.routed_scaling_factor = config.number("routed_scaling_factor")
        self.n_group = config.integer("n_group", 1)
        self.topk_group = config.integer("topk_group", self.n_group)
        self._check_groups()
        self._read_router()
        config.require("mlp_bias", (False,), False)
        config.require("moe_layer_freq", (1,), 1)
        for key in ("qk_head_dim", "v_head_dim", "ep_size", "seq_aux", "aux_loss_alpha"):
            config.raw(key, None)  # sizes that follow from others, and training
        config.raw("intermediate_size", None)
        config.raw("tie_word_embeddings", None)
        # Heads for further tokens lie as layers behind the last.
        self.skipped = dict(type(self).skipped)
        for idx in range(
            self.num_hidden_layers, self.num_hidden_layers + config.integer("num_nextn_predict_layers", 0)
        ):
            self.skipped[rf"layers\.{idx}\..*"] = "multi-token prediction head, not part of the decoder"

    def _read_attention(self) -> None:
        self.latent_attention = LatentAttention.of(self.config, rope_interleave=True)

    def _check_groups(self) -> None:
        """CheckpointError where groups of experts are unequal, or those chosen hold too few experts."""
        groups, chosen = self.n_group, self.topk_group
        if self.num_experts % groups:
            raise CheckpointError(f"config.json: num_experts {self.num_experts} is not a multiple of n_group {groups}")
        if chosen > groups:
            raise CheckpointError(f"config.json: topk_group {chosen} exceeds n_group {groups}")
        if self.num_experts_per_tok > chosen * (self.num_experts // groups):
            raise CheckpointError(
                f"config.json: num_experts_per_tok {self.num_experts_per_tok} exceeds the"
                f" {chosen * (self.num_experts // groups)} experts of topk_group {chosen} groups"
            )

    def _read_router(self) -> None:
        self.topk_method = self.config.raw("topk_method")
        self.config.require("topk_method", ("greedy", "group_limited_greedy"), "greedy")
        self.config.require("scoring_func", ("softmax",), "softmax")
        # Weights are not normalised by this class, whatever the config says; a config that asks for it means another.
        self.config.require("norm_topk_prob", (False,), False)

    def _head_dim(self) -> int:
        return self.config.integer("qk_rope_head_dim")

    def is_moe(self, layer_idx: int) -> bool:
        return layer_idx >= self.first_k_dense_replace

    def attention(self, step: Step, layer_idx: int, x: str) -> str:
        return self.latent_attention(step, layer_idx, x, self.rope_of(layer_idx))

    def router_scores(self, step: Step, layer_idx: int, moe_input: str) -> str:
        scores = super().router_scores(step, layer_idx, moe_input)
        if self.topk_method == "greedy":
            return scores
        return keep_best_groups(
            step,
            scores,
            num_experts=self.num_experts,
            n_group=self.n_group,
            topk_group=self.topk_group,
            by="max",
            other=0.0,
        )

    def route(self, step: Step, layer_idx: int, moe_input: str) -> Routing:
        routing = super().route(step, layer_idx, moe_input)
        weights = step.scaled(routing.weights, self.routed_scaling_factor)
        return Routing(routing.ids, weights, routing.scores, step.column(moe_input, 1.0))

    def shared_expert_shape(self) -> ExpertShape:
        size = self.moe_intermediate_size * self.n_shared_experts
        return ExpertShape(self.hidden_size, size, self.activation)

    def shared_expert(self, weights: Weights, layer_idx: int) -> ExpertTensors:
        return self.mlp(
            weights,
            f"{self.moe_block(weights, layer_idx)}shared_experts.",
            self.shared_expert_shape().intermediate_size,
            self.hidden_size,
        )
