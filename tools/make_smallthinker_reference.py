"""Makes tests/data/checkpoints/smallthinker: a tiny checkpoint, and what SmallThinker's arithmetic gives for it.

    pip install torch safetensors numpy
    python tools/make_smallthinker_reference.py tests/data

No class of transformers computes this family, so the arithmetic stands here in torch, plainly and apart from the
exporter: float32, the whole sequence at once, no caches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

TOKENS, PROMPT, NEW = 96, 24, 40
CONFIG = {
    "architectures": ["SmallThinkerForCausalLM"],
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
    "rope_layout": [1, 1, 1, 0], "sliding_window_layout": [1, 1, 1, 0], "sliding_window_size": 16,
    "moe_num_primary_experts": 8, "moe_num_active_primary_experts": 3, "moe_ffn_hidden_size": 32,
    "moe_primary_router_apply_softmax": False, "moe_enable_early_router": True, "moe_enable_secondary_experts": False,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.02, "torch_dtype": "bfloat16",
}  # fmt: skip


def make_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden, size, heads, kv, dim = 64, 32, 4, 2, 16

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (1.5 / columns**0.5)

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    weights = {"model.embed_tokens.weight": matrix(320, hidden), "lm_head.weight": matrix(320, hidden)}
    weights["model.norm.weight"] = norm()
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        weights[f"{prefix}input_layernorm.weight"] = norm()
        weights[f"{prefix}post_attention_layernorm.weight"] = norm()
        for name, rows in (("q", heads * dim), ("k", kv * dim), ("v", kv * dim)):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = matrix(rows, hidden)
        weights[f"{prefix}self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        weights[f"{prefix}block_sparse_moe.primary_router.weight"] = matrix(8, hidden)
        for expert in range(8):
            for name in ("gate", "up"):
                weights[f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight"] = matrix(size, hidden)
            weights[f"{prefix}block_sparse_moe.experts.{expert}.down.weight"] = matrix(hidden, size)
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x [heads, T, 16]."""
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    cosines, sines = (torch.cat([f(angles), f(angles)], -1) for f in (torch.cos, torch.sin))
    return x * cosines + torch.cat([-x[..., 8:], x[..., :8]], -1) * sines


def attention(weights: dict[str, torch.Tensor], layer: int, x: torch.Tensor) -> torch.Tensor:
    prefix, length = f"model.layers.{layer}.self_attn.", len(x)
    q, k, v = (
        (x @ weights[f"{prefix}{name}_proj.weight"].T).view(length, -1, 16).transpose(0, 1) for name in ("q", "k", "v")
    )
    if CONFIG["rope_layout"][layer]:
        q, k = rotate(q), rotate(k)
    scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) * 16**-0.5
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    hidden = distance < 0
    if CONFIG["sliding_window_layout"][layer]:
        hidden = hidden | (distance >= 16)
    mixed = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v.repeat_interleave(2, 0)
    return mixed.transpose(0, 1).reshape(length, -1) @ weights[f"{prefix}o_proj.weight"].T


def forward(weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    residual = weights["model.embed_tokens.weight"][ids]
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        logits = residual @ weights[f"{prefix}block_sparse_moe.primary_router.weight"].T
        residual = residual + attention(weights, layer, rms(residual, weights[f"{prefix}input_layernorm.weight"]))
        x = rms(residual, weights[f"{prefix}post_attention_layernorm.weight"])
        chosen, experts = torch.topk(logits, 3, dim=-1)
        scales = torch.sigmoid(chosen)
        scales = scales / scales.sum(-1, keepdim=True)
        out = torch.zeros_like(residual)
        for row in range(len(ids)):
            for scale, expert in zip(scales[row], experts[row].tolist(), strict=True):
                gate, up, down = (
                    weights[f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight"]
                    for name in ("gate", "up", "down")
                )
                out[row] += scale * ((torch.relu(x[row] @ gate.T) * (x[row] @ up.T)) @ down.T)
        residual = residual + out
    return rms(residual, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


@torch.no_grad()
def main() -> None:
    directory = Path(sys.argv[1]) / "checkpoints" / "smallthinker"
    directory.mkdir(parents=True, exist_ok=True)
    stored = make_weights()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    weights = {name: tensor.float() for name, tensor in stored.items()}
    input_ids = np.random.default_rng(7).integers(3, 320, TOKENS)
    ids = input_ids[:PROMPT].tolist()
    for _ in range(NEW):
        ids.append(int(forward(weights, ids)[-1].argmax()))
    np.savez_compressed(
        directory / "reference.npz",
        input_ids=input_ids,
        logits=forward(weights, input_ids.tolist()).numpy(),
        greedy_prompt_len=np.array(PROMPT),
        greedy_ids=np.array(ids[PROMPT:], np.int64),
    )


if __name__ == "__main__":
    main()
