"""The DSpark drafter in plain numpy, float32: its published formulas, on purpose without a line of the exporter's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import SAMPLE, read_config, read_tensors
from forward import Forward
from numpy.typing import NDArray
from safetensors import safe_open

DRAFTER = SAMPLE / "dspark"
REFERENCE = Path(__file__).parent / "data" / "dspark" / "reference.npz"
Array = NDArray[np.float32]


def read_drafter(directory: Path = DRAFTER) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """A drafter's config and tensors as they are stored."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        return config, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a mapping)


def sample_layer_outputs(token_ids: list[int]) -> list[Array]:
    """The sample's hidden states [T,H]: the embedding's first, then each layer's."""
    config = read_config("sample")
    model = Forward(config | {"rope_parameters": {"rope_theta": config["rope_theta"]}}, read_tensors("sample"))
    embedding = model.weights["model.embed_tokens.weight"][token_ids]
    return [rows.astype(np.float32) for rows in (embedding, *model(token_ids).layer_outputs)]


@dataclass
class PlainDraft:
    """What a greedy draft computes: [B,V], [B,V], B tokens, [B]."""

    base_logits: Array
    logits: Array
    token_ids: list[int]
    confidence: Array


class PlainDSpark:
    """A drafter beside an embedding [V,H] that is its head too."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, NDArray[Any]], embedding: NDArray[Any]) -> None:
        self.config = config
        self.weights = {name: value.astype(np.float32) for name, value in tensors.items()}
        self.embedding = embedding.astype(np.float32)

    @classmethod
    def of_sample(cls) -> PlainDSpark:
        return cls(*read_drafter(), read_tensors("sample")["model.embed_tokens.weight"])

    def draft(self, context: Array, anchor: int) -> PlainDraft:
        """A draft after the anchor; ``context`` [C, n*H] is what the target's layers gave for all tokens before it."""
        start, size = len(context), self.config["block_size"]
        rows = self._norm(context @ self.weights["fc.weight"].T, "hidden_norm")
        residual = self.embedding[[anchor] + [self.config["mask_token_id"]] * (size - 1)]
        for idx in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{idx}."
            residual = residual + self._attention(
                prefix + "self_attn.", rows, self._norm(residual, prefix + "input_layernorm"), start
            )
            x = self._norm(residual, prefix + "post_attention_layernorm")
            gate, up = (x @ self.weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            residual = residual + (gate / (1 + np.exp(-gate)) * up) @ self.weights[f"{prefix}mlp.down_proj.weight"].T
        hidden = self._norm(residual, "norm")
        return self._chain(hidden, hidden @ self.embedding.T, anchor)

    def _chain(self, hidden: Array, base_logits: Array, anchor: int) -> PlainDraft:
        draft = PlainDraft(base_logits, np.empty_like(base_logits), [], np.empty(len(hidden), np.float32))
        before = anchor
        for slot, row in enumerate(hidden):
            latent = self.weights["markov_head.markov_w1.weight"][before]
            draft.logits[slot] = base_logits[slot] + self.weights["markov_head.markov_w2.weight"] @ latent
            seen = np.concatenate([row, latent]) if self.config["confidence_head_with_markov"] else row
            logit = self.weights["confidence_head.proj.weight"][0] @ seen
            draft.confidence[slot] = 1 / (1 + np.exp(-(logit + self.weights["confidence_head.proj.bias"][0])))
            before = int(np.argmax(draft.logits[slot]))
            draft.token_ids.append(before)
        return draft

    def _norm(self, x: Array, name: str) -> Array:
        variance = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(variance + np.float32(self.config["rms_norm_eps"])) * self.weights[f"{name}.weight"]

    def _attention(self, prefix: str, context: Array, block: Array, start: int) -> Array:
        size = self.config["head_dim"]
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]

        def heads(x: Array, name: str, first: int = -1) -> Array:
            projected = (x @ self.weights[f"{prefix}{name}_proj.weight"].T).reshape(len(x), -1, size).transpose(1, 0, 2)
            if first < 0:
                return projected
            return self._rotate(self._norm(projected, f"{prefix}{name}_norm"), first)

        query = heads(block, "q", start)
        key = np.concatenate([heads(context, "k", 0), heads(block, "k", start)], axis=1).repeat(group, axis=0)
        value = np.concatenate([heads(context, "v"), heads(block, "v")], axis=1).repeat(group, axis=0)
        scores = query @ key.transpose(0, 2, 1) / np.float32(np.sqrt(size))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = weights / weights.sum(axis=-1, keepdims=True) @ value
        return mixed.transpose(1, 0, 2).reshape(len(block), -1) @ self.weights[f"{prefix}o_proj.weight"].T

    def _rotate(self, x: Array, first: int) -> Array:
        size = x.shape[-1]
        frequencies = self.config["rope_theta"] ** (-np.arange(0, size, 2) / size)
        angles = np.arange(first, first + x.shape[1])[:, None] * frequencies
        cosines, sines = (
            np.concatenate([part, part], axis=-1).astype(np.float32) for part in (np.cos(angles), np.sin(angles))
        )
        turned = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], axis=-1)
        return x * cosines + turned * sines
