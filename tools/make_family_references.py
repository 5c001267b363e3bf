"""Makes the tiny checkpoints of tests/data/checkpoints named below, with what transformers computes for them.

    pip install "transformers==5.24.0" torch safetensors     # in an environment of its own: 5 GB
    python tools/make_family_references.py tests/data            # all, or: … tests/data glm4_moe phimoe

Weights are random, seeded by the name, rounded to bfloat16; the reference is computed in float32 with eager attention.
``variants.npz`` holds the last logits of checkpoints under other settings: past rotary and sliding windows.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS, VOCAB, PROMPT, NEW = 96, 320, 24, 40


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0} | parameters}


COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "granitemoeshared": {
        "model_type": "granitemoeshared", "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 48, "embedding_multiplier": 6.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", "head_dim": 32, "intermediate_size": 96, "moe_intermediate_size": 32,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2,
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite", "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "v_head_dim": 24,
        "qk_nope_head_dim": 16, "num_key_value_heads": 4,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe", "intermediate_size": 96, "moe_intermediate_size": 32, "moe_num_experts": 8,
        "moe_k": 3, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "tie_word_embeddings": True,
    },
    "hunyuan_v1_moe": {
        "model_type": "hunyuan_v1_moe", "head_dim": 32, "intermediate_size": 32, "num_experts": 8, "moe_topk": 3,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0},
    },
    "phimoe": {
        "model_type": "phimoe", "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
        "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [2.0] * 8,
            "short_mscale": 1.2, "long_mscale": 1.3,
        },
    },
    "gemma4_text": {
        "model_type": "gemma4_text", "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "intermediate_size": 48,
        "moe_intermediate_size": 32, "num_experts": 8, "top_k_experts": 3, "enable_moe_block": True,
        "hidden_size_per_layer_input": 0, "sliding_window": 16, "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    },
}  # fmt: skip
# Settings that real configs have, on checkpoints that are there: the last 32 of 96 logits are kept.
SHORT = {"max_position_embeddings": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("qwen3_moe", SHORT | rope(rope_type="linear", factor=4.0)),
    "dynamic": ("qwen3_moe", SHORT | rope(rope_type="dynamic", factor=4.0)),
    "yarn": ("qwen3_moe", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)),
    "yarn_untruncated": (
        "qwen3_moe",
        rope(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False, beta_fast=16.0,
            beta_slow=2.0,
        ),
    ),
    "yarn_mscale": (
        "qwen3_moe",
        rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.2),
    ),
    "yarn_attention_factor": (
        "qwen3_moe", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.3),
    ),
    "llama3": (
        "qwen3_moe",
        rope(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "longrope": (
        "qwen3_moe",
        rope(
            rope_type="longrope", factor=4.0, original_max_position_embeddings=32,
            short_factor=[1.0 + i / 16 for i in range(16)], long_factor=[2.0 + i for i in range(16)],
        ),
    ),
    "latent_yarn": (
        "deepseek_v3",
        rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0),
    ),
    "latent_halves": ("deepseek_v3", {"rope_interleave": False}),
    "groups_by_best": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1}),
    "window_everywhere": ("mixtral", {"sliding_window": 16}),
    "window_qwen3": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}),
    "window_by_layer": (
        "qwen2_moe",
        {
            "use_sliding_window": True, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "clipped": ("olmoe", {"clip_qkv": 0.5}),
}  # fmt: skip


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights of a scale that makes logits differ; norms near one, biases and buffers of weights not zero."""
    generator = torch.Generator().manual_seed(seed)
    names = {name for name, _ in model.named_parameters()}
    tensors = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n in model.state_dict()}
    with torch.no_grad():
        for name, tensor in sorted(tensors.items()):
            if not tensor.dtype.is_floating_point or (name not in names and "bias" not in name and "scal" not in name):
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() >= 2 and "correction_bias" not in name:
                tensor.copy_(noise * (1.5 / tensor.shape[-1] ** 0.5))
            elif "norm" in name and name.endswith("weight"):
                tensor.copy_(1 + 0.1 * noise)
            elif "scale" in name or "scalar" in name:
                tensor.copy_(1 + 0.2 * noise)
            else:
                tensor.copy_(0.1 * noise)


@torch.no_grad()
def reference(model: torch.nn.Module, input_ids: np.ndarray) -> dict[str, np.ndarray]:
    logits = model(torch.from_numpy(input_ids)[None]).logits[0].float().numpy()
    ids = input_ids[:PROMPT].tolist()
    for _ in range(NEW):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return {
        "input_ids": input_ids,
        "logits": logits,
        "greedy_prompt_len": np.array(PROMPT),
        "greedy_ids": np.array(ids[PROMPT:], np.int64),
    }


def load(directory: Path, **changes: Any) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(directory, **changes)
    return AutoModelForCausalLM.from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def make_family(data: Path, name: str) -> None:
    directory = data / "checkpoints" / name
    config = AutoConfig.for_model(**(COMMON | FAMILIES[name]))
    config._attn_implementation = "eager"
    seed = zlib.crc32(name.encode())
    model = AutoModelForCausalLM.from_config(config)
    randomize(model, seed)
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    ids = np.random.default_rng(seed).integers(3, VOCAB, TOKENS)
    np.savez_compressed(directory / "reference.npz", **reference(load(directory), ids))
    print(name, sorted(path.name for path in directory.iterdir()))


def make_variants(data: Path) -> None:
    found: dict[str, np.ndarray] = {}
    for name, (checkpoint, changes) in VARIANTS.items():
        directory = data / "checkpoints" / checkpoint
        with np.load(directory / "reference.npz") as arrays:
            ids = arrays["input_ids"]
        with torch.no_grad():
            found[name] = load(directory, **changes)(torch.from_numpy(ids)[None]).logits[0, -32:].numpy()
        found[f"{name}_config"] = np.array(json.dumps([checkpoint, changes]))
    np.savez_compressed(data / "variants.npz", **found)


def main() -> None:
    data, chosen = Path(sys.argv[1]), sys.argv[2:] or [*FAMILIES, "variants"]
    for name in chosen:
        make_variants(data) if name == "variants" else make_family(data, name)


if __name__ == "__main__":
    main()
