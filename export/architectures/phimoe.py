"""Phi-3.5-MoE: layer norms with biases, biased attention, sparsemixer routing, LongRoPE."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx.errors import CheckpointError
from lesonnx_export.architectures.base import Decoder, Routing
from lesonnx_export.blocks import Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.config import Config
from lesonnx_export.routers import EXCLUDED


class Architecture(Decoder):
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 32064,
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    default_rope_theta = 1e6
    moe_intermediate_key = "intermediate_size"
    expert_names = ("w1", "w3", "w2")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.num_experts_per_tok != 2:
            raise CheckpointError(
                f"config.json: num_experts_per_tok is {self.num_experts_per_tok}, sparsemixer chooses 2"
            )
        self.attention_bias = config.flag("attention_bias", False)
        self.lm_head_bias = config.flag("lm_head_bias", False)
        self.router_jitter_noise = config.number("router_jitter_noise", 0.01)
        window = None if config.raw("sliding_window", None) is None else config.integer("sliding_window")
        if window is not None and window < self.max_position_embeddings:
            raise CheckpointError(
                f"config.json: sliding_window {window} is shorter than the context, not supported here"
            )
        config.raw("input_jitter_noise", None)
        config.raw("tie_word_embeddings", None)

    def moe_block(self, weights: Weights, layer_idx: int) -> str:
        # transformers 5 calls the block "mlp".
        block = "mlp" if f"layers.{layer_idx}.mlp.router.weight" in weights else "block_sparse_moe"
        return f"layers.{layer_idx}.{block}."

    def norm(self, step: Step, x: str, name: str) -> str:
        weight, bias = (step.vector(f"{name}.{what}", self.hidden_size) for what in ("weight", "bias"))
        return step.graph.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=self.rms_norm_eps)

    def has_qkv_bias(self) -> bool:
        return self.attention_bias

    def has_output_bias(self) -> bool:
        return self.attention_bias

    def router_scores(self, step: Step, layer_idx: int, moe_input: str) -> str:
        block = self.moe_block(step.weights, layer_idx)
        name = f"{block}router.weight" if f"{block}router.weight" in step.weights else f"{block}gate.weight"
        return step.router_linear(moe_input, name, self.num_experts, self.hidden_size)

    def route(self, step: Step, layer_idx: int, moe_input: str) -> Routing:
        """Sparsemixer (arXiv 2409.12136): the best expert, weighed among those near it; then again without it."""
        graph = step.graph
        scores = self.router_scores(step, layer_idx, moe_input)
        size = graph.op("Abs", scores)
        threshold = graph.constant(2 * self.router_jitter_noise)
        excluded, numbers = graph.constant(EXCLUDED), graph.constant(range(self.num_experts), "int64")
        left, ids, weights = scores, [], []
        for _ in range(2):
            best, idx = graph.ops("TopK", 2, left, graph.constant([1], "int64"), axis=-1, largest=1, sorted=1)
            distance = graph.op("Div", graph.op("Sub", best, scores), graph.op("Max", size, best))
            near = graph.op("Where", graph.op("Greater", distance, threshold), excluded, left)
            weights.append(graph.op("GatherElements", graph.op("Softmax", near, axis=-1), idx, axis=1))
            ids.append(idx)
            left = graph.op("Where", graph.op("Equal", numbers, idx), excluded, left)
        return Routing(graph.op("Concat", *ids, axis=1), graph.op("Concat", *weights, axis=1), scores)

    def logits(self, step: Step, rows: str) -> str:
        logits = super().logits(step, rows)
        if not self.lm_head_bias:
            return logits
        return step.graph.op("Add", logits, step.vector("lm_head.bias", self.vocab_size))
