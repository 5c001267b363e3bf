"""The forward pass of the four families in plain numpy, float64: what bundles are compared with beside transformers.

Written from the models' published descriptions, on purpose without a line of the exporter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Config, Tensors, read_config, read_tensors
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def softmax(x: Array) -> Array:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def rotate(x: Array, theta: float) -> Array:
    """Rotary embedding of [heads, T, size], halves rotated."""
    size = x.shape[-1]
    frequencies = theta ** (-np.arange(0, size, 2) / size)
    angles = np.arange(x.shape[1])[:, None] * frequencies
    angles = np.concatenate([angles, angles], axis=-1)
    turned = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], axis=-1)
    return x * np.cos(angles) + turned * np.sin(angles)


@dataclass
class Trace:
    """What a forward pass computed: logits [T,V], the residual after every layer, and the chosen experts by layer."""

    logits: Array = field(default_factory=lambda: np.empty(0))
    layer_outputs: list[Array] = field(default_factory=list)
    experts: dict[int, NDArray[np.int64]] = field(default_factory=dict)


class Forward:
    """A fixture's model. Config keys are read in transformers 5's spelling."""

    def __init__(self, config: Config, tensors: Tensors) -> None:
        self.config = config
        self.weights = {key: value.astype(np.float64) for key, value in tensors.items()}
        self.family = config["model_type"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps = config["rms_norm_eps"]

    @classmethod
    def of(cls, name: str) -> Forward:
        return cls(read_config(name), read_tensors(name))

    def __call__(self, token_ids: Sequence[int]) -> Trace:
        trace = Trace()
        residual = self.weights["model.embed_tokens.weight"][list(token_ids)]
        for layer_idx in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer_idx}."
            residual = residual + self._attention(prefix, self._norm(residual, f"{prefix}input_layernorm"))
            x = self._norm(residual, f"{prefix}post_attention_layernorm")
            residual = residual + self._ffn(layer_idx, prefix, x, trace)
            trace.layer_outputs.append(residual)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        trace.logits = self._norm(residual, "model.norm") @ head.T
        return trace

    def _norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.weights[f"{name}.weight"], self.eps)

    def _project(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", np.float64(0))

    def _attention(self, prefix: str, x: Array) -> Array:
        prefix += "self_attn."
        query, key, value = (self._project(x, f"{prefix}{name}_proj") for name in "qkv")
        if self.family == "olmoe":
            query, key = self._norm(query, f"{prefix}q_norm"), self._norm(key, f"{prefix}k_norm")
        query, key, value = (part.reshape(len(x), -1, self.head_dim).transpose(1, 0, 2) for part in (query, key, value))
        if self.family == "qwen3_moe":
            query, key = self._norm(query, f"{prefix}q_norm"), self._norm(key, f"{prefix}k_norm")
        theta = self.config["rope_parameters"]["rope_theta"]
        query, key = rotate(query, theta), rotate(key, theta)
        groups = self.heads // self.kv_heads
        scores = query @ key.repeat(groups, axis=0).transpose(0, 2, 1) / np.sqrt(self.head_dim)
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        mixed = softmax(scores) @ value.repeat(groups, axis=0)
        return mixed.transpose(1, 0, 2).reshape(len(x), -1) @ self.weights[f"{prefix}o_proj.weight"].T

    def _matrices(self, prefix: str, names: Sequence[str]) -> list[Array]:
        return [self.weights[f"{prefix}{name}.weight"] for name in names]

    def _ffn(self, layer_idx: int, prefix: str, x: Array, trace: Trace) -> Array:
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
        if layer_idx in self.config.get("mlp_only_layers", []):
            return swiglu(x, *self._matrices(f"{prefix}mlp.", names))
        block = f"{prefix}mlp."
        if self.family == "mixtral":
            block, names = f"{prefix}block_sparse_moe.", ("w1", "w3", "w2")
        probabilities = softmax(x @ self.weights[f"{block}gate.weight"].T)
        chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, : self.config["num_experts_per_tok"]]
        trace.experts[layer_idx] = chosen
        weights = np.take_along_axis(probabilities, chosen, axis=-1)
        if self.family == "mixtral" or self.config.get("norm_topk_prob"):
            weights = weights / weights.sum(axis=-1, keepdims=True)
        out = np.zeros_like(x)
        for row, (experts, shares) in enumerate(zip(chosen, weights, strict=True)):
            for expert, share in zip(experts, shares, strict=True):
                out[row] += share * swiglu(x[row], *self._matrices(f"{block}experts.{expert}.", names))
        if self.family == "qwen2_moe":
            shared = swiglu(x, *self._matrices(f"{block}shared_expert.", names))
            out += shared / (1 + np.exp(-x @ self.weights[f"{block}shared_expert_gate.weight"].T))
        return out


def file_bytes(directory: Path) -> dict[str, Any]:
    """Every file under a directory with its content."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
