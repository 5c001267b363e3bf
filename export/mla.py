"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads from one small latent.

The cache holds the latent, not the heads' keys and values. So keys are never made: each head's query is carried into
the latent's space by that head's part of ``kv_b_proj``, and what attention gives, a mean of latents, is carried out
of it. To attention that is one key-value head of ``kv_lora_rank + qk_rope_head_dim`` values, which are key and value.

What it costs: products of ``kv_lora_rank + qk_rope_head_dim`` (576 in all real models) instead of ``qk_head_dim`` (192)
a head and past token. What it saves: 1,152 cached values a token and layer instead of, with 16 heads, 5,120.
"""

from __future__ import annotations

from dataclasses import dataclass

from lesonnx.errors import CheckpointError
from lesonnx_export.blocks import Step
from lesonnx_export.config import Config
from lesonnx_export.rope import Rope, number_in, rope_parameters, yarn_mscale

# The norms of the two latents have this one, whatever the config says of the others.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class LatentAttention:
    """The sizes of a model's latent attention, as its config names them; ``q_lora_rank`` None: queries are direct."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    has_bias: bool
    rope_interleave: bool
    scale: float

    @classmethod
    def of(cls, config: Config, rope_interleave: bool) -> LatentAttention:
        """The sizes in a config; CheckpointError where the kernel cannot take them."""
        nope, rotary = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
        latent = config.integer("kv_lora_rank")
        if (latent + rotary) % 8:
            raise CheckpointError(
                f"config.json: kv_lora_rank {latent} + qk_rope_head_dim {rotary} is not a multiple of 8"
            )
        scale = float((nope + rotary) ** -0.5)
        parameters = rope_parameters(config)
        if parameters["rope_type"] != "default" and parameters.get("mscale_all_dim"):
            scale *= yarn_mscale(number_in(parameters, "factor"), number_in(parameters, "mscale_all_dim")) ** 2
        return cls(
            hidden_size=config.integer("hidden_size"),
            num_heads=config.integer("num_attention_heads"),
            q_lora_rank=None if config.raw("q_lora_rank", None) is None else config.integer("q_lora_rank"),
            kv_lora_rank=latent,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rotary,
            v_head_dim=config.integer("v_head_dim"),
            has_bias=config.flag("attention_bias", False),
            rope_interleave=rope_interleave,
            scale=scale,
        )

    def __call__(self, step: Step, layer_idx: int, x: str, rope: Rope | None) -> str:
        """Attention of normalised x [1,T,H]: [1,T,H]."""
        graph, heads, latent = step.graph, self.num_heads, self.kv_lora_rank
        nope, rotary = self.qk_nope_head_dim, self.qk_rope_head_dim
        prefix = f"layers.{layer_idx}.self_attn."
        # 1. What is cached: the normalised latent and one rotated key for all heads.
        compressed = step.linear(
            x,
            f"{prefix}kv_a_proj_with_mqa.weight",
            latent + rotary,
            self.hidden_size,
            self._bias(f"{prefix}kv_a_proj_with_mqa"),
        )
        values, key_rotary = graph.ops("Split", 2, compressed, graph.constant([latent, rotary], "int64"), axis=-1)
        values = step.norm(values, f"{prefix}kv_a_layernorm.weight", latent, LATENT_NORM_EPS)
        key_rotary = step.rotate(key_rotary, rope, 1, rotary, interleaved=self.rope_interleave)
        key = graph.op("Concat", values, key_rotary, axis=-1)

        # 2. Queries, their unrotated part in the latent's space.
        kv_b = step.weights(f"{prefix}kv_b_proj.weight", heads * (nope + self.v_head_dim), latent)
        kv_b = kv_b.reshape(heads, nope + self.v_head_dim, latent)
        query = graph.op(
            "Reshape", self._queries(step, prefix, x), graph.constant([1, -1, heads, nope + rotary], "int64")
        )
        query_plain, query_rotary = graph.ops("Split", 2, query, graph.constant([nope, rotary], "int64"), axis=-1)
        query_plain = step.head_linear(query_plain, f"{prefix}kv_b_proj.key", kv_b[:, :nope].transpose(0, 2, 1))
        query_rotary = graph.op("Reshape", query_rotary, graph.constant([1, -1, heads * rotary], "int64"))
        query_rotary = step.rotate(query_rotary, rope, heads, rotary, interleaved=self.rope_interleave)
        query_rotary = graph.op("Reshape", query_rotary, graph.constant([1, -1, heads, rotary], "int64"))
        query = graph.op("Concat", query_plain, query_rotary, axis=-1)
        query = graph.op("Reshape", query, graph.constant([1, -1, heads * (latent + rotary)], "int64"))

        # 3. One key-value head; of its values the rotated end is of no use.
        mixed = step.attention(
            layer_idx, query, key, key, num_heads=heads, num_kv_heads=1, head_dim=latent + rotary, scale=self.scale
        )
        mixed = graph.op("Reshape", mixed, graph.constant([1, -1, heads, latent + rotary], "int64"))
        mixed, _ = graph.ops("Split", 2, mixed, graph.constant([latent, rotary], "int64"), axis=-1)
        mixed = step.head_linear(mixed, f"{prefix}kv_b_proj.value", kv_b[:, nope:])
        mixed = graph.op("Reshape", mixed, graph.constant([1, -1, heads * self.v_head_dim], "int64"))
        return step.linear(
            mixed, f"{prefix}o_proj.weight", self.hidden_size, heads * self.v_head_dim, self._bias(f"{prefix}o_proj")
        )

    def _bias(self, name: str) -> str | None:
        return f"{name}.bias" if self.has_bias else None

    def _queries(self, step: Step, prefix: str, x: str) -> str:
        """[1,T,heads * qk_head_dim], by way of a latent of their own where there is one."""
        size = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            return step.linear(x, f"{prefix}q_proj.weight", size, self.hidden_size)
        name = f"{prefix}q_a_proj"
        reduced = step.linear(x, f"{name}.weight", self.q_lora_rank, self.hidden_size, self._bias(name))
        reduced = step.norm(reduced, f"{prefix}q_a_layernorm.weight", self.q_lora_rank, LATENT_NORM_EPS)
        return step.linear(reduced, f"{prefix}q_b_proj.weight", size, self.q_lora_rank)
