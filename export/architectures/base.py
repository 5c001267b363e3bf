"""What every family shares: a pre-norm decoder, written as hooks that a family's module overrides.

A family says how one layer mixes tokens, how it routes, and where its weights lie; ``segments`` walks the layers and
decides where one part ends and the next begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from lesonnx.errors import CheckpointError
from lesonnx.manifest import Activation
from lesonnx_export.blocks import Step
from lesonnx_export.checkpoint import Checkpoint, Weights
from lesonnx_export.config import Config
from lesonnx_export.expert import ExpertShape, ExpertTensors
from lesonnx_export.rope import Rope, make_rope
from lesonnx_export.routers import normalized

if TYPE_CHECKING:
    from lesonnx_export.vision.eyes import Eyes

ACTIVATIONS: dict[str, Activation] = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "relu": "reglu"}
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
# Entries of ``layer_types``.
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Routing:
    """What a router gives: ids int64 [T,k], weights [T,k], scores [T,E], and [T,1] for a shared expert's weight."""

    ids: str
    weights: str
    scores: str
    shared_weights: str | None = None


class Replayable(Protocol):
    """A state of fixed shape that can be run again, alone, on some rows of a step."""

    def replay(self, step: Step) -> None:
        """Build the part: ``past`` and rows in, ``present`` out."""


class Decoder:
    """A pre-norm decoder with grouped-query attention and, in some or all layers, experts behind a softmax router.

    Residuals are [1,T,H], what the router and the experts see is [T,H]; float32. Subclasses set what differs.
    """

    # What transformers takes for keys that a config leaves out.
    defaults: ClassVar[dict[str, Any]] = {}
    default_rope_theta = 10000.0
    moe_intermediate_key = "moe_intermediate_size"
    activation_key = "hidden_act"
    # Whether the family's config may hold a ``head_dim`` apart from the hidden size.
    states_head_dim = False
    # The names inside the block of a layer that holds router and experts.
    router_name = "gate"
    expert_names = ("gate_proj", "up_proj", "down_proj")
    # Norms of the hidden states, and what is added to their weights; the map behind attention.
    mixer_norm, ffn_norm, final_norm = "input_layernorm", "post_attention_layernorm", "norm"
    norm_offset = 0.0
    output_name = "o_proj"
    # Parts that run a state of fixed shape again on the rows of a step, by name.
    replays: Mapping[str, Replayable] = MappingProxyType({})
    # The ONNX Runtime that has the operators of ``--operators native``, where they are younger than the rest.
    native_operators_since: str | None = None
    # Whether a layer's router reads its input, before it mixes tokens: its experts are then known early.
    routes_before_mixing = False
    # Whether neighbours are rotated as pairs, instead of the halves of a head; whether before q/k are normalised.
    rope_interleave = False
    rotates_before_norm = False
    # Quantized checkpoints that are converted, by ``quant_method``.
    quantization_methods: ClassVar[frozenset[str]] = frozenset({"fp8"})
    # Tensors that a checkpoint may hold and inference does not need: a pattern for the canonical name -> the reason.
    skipped: dict[str, str] = {  # noqa: RUF012  (an instance that has more makes its own)
        r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "rotary table, computed in the graph",
        r"(model\.)?mtp\..*": "multi-token prediction head, not part of the decoder",
    }

    # The same of tensors of its eyes, in a bundle that is exported without.
    of_eyes: Mapping[str, str] = MappingProxyType({})

    def __init__(self, config: Config) -> None:
        self.config = config
        config.defaults = dict(self.defaults)
        self.model_type = config.model_type
        self.hidden_size = config.integer("hidden_size")
        self.num_hidden_layers = config.integer("num_hidden_layers")
        self.vocab_size = config.integer("vocab_size")
        self.num_attention_heads = config.integer("num_attention_heads")
        self.num_key_value_heads = config.integer("num_key_value_heads", self.num_attention_heads)
        self.max_position_embeddings = config.integer("max_position_embeddings")
        self.rms_norm_eps = config.number("rms_norm_eps")
        self.num_experts = config.integer("num_experts")
        self.num_experts_per_tok = config.integer("num_experts_per_tok")
        self.moe_intermediate_size = config.integer(self.moe_intermediate_key)
        self.norm_topk_prob = False
        self.activation = self._activation()
        self.head_dim = self._head_dim()
        self.rope = self._rope()
        if self.num_experts_per_tok > self.num_experts:
            raise CheckpointError(
                f"config.json: num_experts_per_tok {self.num_experts_per_tok} exceeds num_experts {self.num_experts}"
            )
        self.check_heads(self.num_key_value_heads, self.head_dim)

    def check_heads(self, num_key_value_heads: int, head_dim: int) -> None:
        """CheckpointError for heads that attention cannot compute."""
        if self.num_attention_heads % num_key_value_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {self.num_attention_heads} is not a multiple of"
                f" num_key_value_heads {num_key_value_heads}"
            )
        if head_dim % 8:
            raise CheckpointError(f"config.json: head_dim must be a multiple of 8, found {head_dim}")

    def _activation(self) -> Activation:
        name = self.config.raw(self.activation_key, "silu")
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise CheckpointError(f"config.json: {self.activation_key} {name!r} is not one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def _head_dim(self) -> int:
        """Size of a head: the config's ``head_dim`` for families that state it, else the hidden size by the heads."""
        if self.states_head_dim and self.config.raw("head_dim", None) is not None:
            return self.config.integer("head_dim")
        if self.hidden_size % self.num_attention_heads:
            raise CheckpointError(
                f"config.json: hidden_size {self.hidden_size} is not a multiple of"
                f" num_attention_heads {self.num_attention_heads}"
            )
        return self.hidden_size // self.num_attention_heads

    def _rope(self) -> Rope:
        """The rotary positions of all layers that have no others."""
        return make_rope(self.config, self.head_dim, default_theta=self.default_rope_theta)

    @property
    def position_rows(self) -> int:
        """How many positions a token has."""
        return 1 if self.rope.axes is None else 3

    def eyes(self, checkpoint: Checkpoint) -> Eyes | None:
        """What takes pictures in, as a checkpoint has it; None for a family without, CheckpointError in one line."""
        return None

    def eyes_of_shape(self, config: dict[str, Any], directory: Path | None) -> Eyes | None:
        """The same of a config.json alone, for sizes: marks are made up; ``directory`` may hold a processor's files."""
        return None

    # -- layers ------------------------------------------------------------------------------------------------------

    def is_moe(self, layer_idx: int) -> bool:
        """Whether a layer has experts."""
        return True

    def moe_block(self, weights: Weights, layer_idx: int) -> str:
        """Where a layer's router and experts, or its dense matrices, lie: a prefix that ends in a dot."""
        return f"layers.{layer_idx}.mlp."

    @property
    def moe_layers(self) -> list[int]:
        return [layer_idx for layer_idx in range(self.num_hidden_layers) if self.is_moe(layer_idx)]

    def embed(self, step: Step, ids: str) -> str:
        """ids [1,T] -> hidden [1,T,H]."""
        return step.embedding(ids, EMBEDDING, self.vocab_size, self.hidden_size)

    def norm(self, step: Step, x: str, name: str) -> str:
        """RMS normalisation of hidden states."""
        return step.norm(x, f"{name}.weight", self.hidden_size, self.rms_norm_eps, self.norm_offset)

    def mixer(self, step: Step, layer_idx: int, residual: str) -> str:
        """The first half of a layer, residual added: norm and attention, or whatever mixes tokens here."""
        x = self.norm(step, residual, f"layers.{layer_idx}.{self.mixer_norm}")
        return step.graph.op("Add", residual, self.attention(step, layer_idx, x))

    def attention(self, step: Step, layer_idx: int, x: str) -> str:
        """Self-attention of normalised x [1,T,H]."""
        prefix = f"layers.{layer_idx}.self_attn."
        query_size = self.num_attention_heads * self.head_dim
        kv_size = self.num_key_value_heads * self.head_dim
        sizes = {"q": query_size, "k": kv_size, "v": kv_size}
        fused = step.fused_linear(
            x,
            [
                (f"{prefix}{name}_proj.weight", size, f"{prefix}{name}_proj.bias" if self.has_qkv_bias() else None)
                for name, size in sizes.items()
            ],
            self.hidden_size,
        )
        query, key, value = step.graph.ops(
            "Split", 3, fused, step.graph.constant(list(sizes.values()), "int64"), axis=-1
        )
        rope = self.rope_of(layer_idx)
        if not self.rotates_before_norm:
            query, key = self.normalize_qk(step, prefix, query, key)
        query = step.rotate(query, rope, self.num_attention_heads, self.head_dim, interleaved=self.rope_interleave)
        key = step.rotate(key, rope, self.num_key_value_heads, self.head_dim, interleaved=self.rope_interleave)
        if self.rotates_before_norm:
            query, key = self.normalize_qk(step, prefix, query, key)
        mixed = step.attention(
            layer_idx,
            query,
            key,
            self.shape_value(step, value),
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            scale=self.attention_scale(),
            sliding_window=self.sliding_window_of(layer_idx),
            sinks=self.sinks(step, prefix),
        )
        name = f"{prefix}{self.output_name}"
        bias = f"{name}.bias" if self.has_output_bias() else None
        return step.linear(mixed, f"{name}.weight", self.hidden_size, query_size, bias)

    def rope_of(self, layer_idx: int) -> Rope | None:
        """The rotary positions of a layer; None where it has no positions."""
        return self.rope

    def attention_scale(self) -> float | None:
        """What products of queries and keys are multiplied by; None is ``head_dim ** -0.5``."""
        return None

    def sliding_window_of(self, layer_idx: int) -> int | None:
        """How many tokens a token of this layer sees, itself included; None is all."""
        return None

    def sinks(self, step: Step, prefix: str) -> str:
        """Attention sinks [heads]; an empty name where there are none."""
        return ""

    def has_qkv_bias(self) -> bool:
        return False

    def has_output_bias(self) -> bool:
        return False

    def normalize_qk(self, step: Step, prefix: str, query: str, key: str) -> tuple[str, str]:
        """Normalisation of queries and keys [1,T,heads*size]; none by default."""
        return query, key

    def shape_value(self, step: Step, value: str) -> str:
        """What becomes of values [1,T,heads*size] before they are cached."""
        return value

    def normalize_heads(self, step: Step, query: str, query_norm: str, key: str, key_norm: str) -> tuple[str, str]:
        """Every head of queries and of keys normalised by itself, with the weights of those names."""
        eps = self.rms_norm_eps
        return (
            step.head_norm(query, query_norm, self.num_attention_heads, self.head_dim, eps),
            step.head_norm(key, key_norm, self.num_key_value_heads, self.head_dim, eps),
        )

    def ffn_input(self, step: Step, layer_idx: int, residual: str) -> str:
        """What the second half of a layer sees: [1,T,H]."""
        return self.norm(step, residual, f"layers.{layer_idx}.{self.ffn_norm}")

    def dense_block(self, weights: Weights, layer_idx: int) -> str:
        """Where the gated MLP that is no expert lies: a prefix that ends in a dot."""
        return self.moe_block(weights, layer_idx)

    def dense_intermediate_size(self) -> int:
        return self.config.integer("intermediate_size")

    def dense(self, step: Step, layer_idx: int, residual: str) -> str:
        """The second half of a layer without experts, residual added."""
        graph = step.graph
        x = self.ffn_input(step, layer_idx, residual)
        return graph.op("Add", residual, self.gated_mlp(step, layer_idx, x))

    def gated_mlp(self, step: Step, layer_idx: int, x: str) -> str:
        """The gated MLP that is no expert, of normalised x [1,T,H]."""
        graph, prefix = step.graph, self.dense_block(step.weights, layer_idx)
        gate_name, up_name, down_name = (f"{prefix}{name}.weight" for name in self.expert_names)
        size = self.dense_intermediate_size()
        fused = step.fused_linear(x, [(gate_name, size, None), (up_name, size, None)], self.hidden_size)
        gate, up = graph.ops("Split", 2, fused, graph.constant([size, size], "int64"), axis=-1)
        if self.activation == "swiglu":
            active = graph.op("Mul", gate, graph.op("Sigmoid", gate))
        elif self.activation == "geglu":
            active = graph.op("Gelu", gate, approximate="tanh")
        else:
            active = graph.op("Relu", gate)
        return step.linear(graph.op("Mul", active, up), down_name, self.hidden_size, size)

    # -- experts -----------------------------------------------------------------------------------------------------

    def moe_input(self, step: Step, layer_idx: int, residual: str) -> str:
        """What router and experts see: [T,H]."""
        graph = step.graph
        x = self.ffn_input(step, layer_idx, residual)
        return graph.op("Reshape", x, graph.constant([-1, self.hidden_size], "int64"))

    def router_input(self, step: Step, layer_idx: int, residual: str, moe_input: str) -> str:
        """What the router sees, [T,H], where that is not what the experts see."""
        return moe_input

    @property
    def residual_size(self) -> int:
        """How many values a token has in what is carried past the experts: the residual, perhaps more."""
        return self.hidden_size

    def carry(self, step: Step, layer_idx: int, residual: str) -> str:
        """What is carried past the experts of a layer, [1,T,residual_size]."""
        return residual

    def combine(self, step: Step, layer_idx: int, carried: str, mixed: str) -> str:
        """The layer's output [1,T,H] from what was carried and the weighted sum of its experts [1,T,H]."""
        return step.graph.op("Add", carried, mixed)

    def router_scores(self, step: Step, layer_idx: int, moe_input: str) -> str:
        """What the router ranks experts by: [T,E]."""
        name = f"{self.moe_block(step.weights, layer_idx)}{self.router_name}.weight"
        logits = step.router_linear(moe_input, name, self.num_experts, self.hidden_size)
        return step.graph.op("Softmax", logits, axis=-1)

    def route(self, step: Step, layer_idx: int, moe_input: str) -> Routing:
        """Softmax over all experts, the best k, their weights as they are or made to sum to one."""
        graph = step.graph
        scores = self.router_scores(step, layer_idx, moe_input)
        count = graph.constant([self.num_experts_per_tok], "int64")
        weights, ids = graph.ops("TopK", 2, scores, count, axis=-1, largest=1, sorted=1)
        if self.norm_topk_prob:
            weights = normalized(step, weights)
        return Routing(ids, weights, scores)

    def softmax_of_chosen(self, step: Step, scores: str) -> Routing:
        """The best k by score, their weights a softmax over those k alone."""
        graph = step.graph
        count = graph.constant([self.num_experts_per_tok], "int64")
        chosen, ids = graph.ops("TopK", 2, scores, count, axis=-1, largest=1, sorted=1)
        return Routing(ids, graph.op("Softmax", chosen, axis=-1), scores)

    def expert_shape(self) -> ExpertShape:
        return ExpertShape(self.hidden_size, self.moe_intermediate_size, self.activation)

    def shared_expert_shape(self) -> ExpertShape | None:
        """The shape of the expert that every token uses, where there is one."""
        return None

    def expert(self, weights: Weights, layer_idx: int, expert_idx: int) -> ExpertTensors:
        """One routed expert's matrices, whichever way the checkpoint holds them."""
        prefix = f"{self.moe_block(weights, layer_idx)}experts."
        intermediate, hidden = self.moe_intermediate_size, self.hidden_size
        if f"{prefix}gate_up_proj" in weights:
            fused = weights.item(f"{prefix}gate_up_proj", expert_idx, self.num_experts, 2 * intermediate, hidden)
            down = weights.item(f"{prefix}down_proj", expert_idx, self.num_experts, hidden, intermediate)
            return {"gate_proj": fused[:intermediate], "up_proj": fused[intermediate:], "down_proj": down}
        gate, up, down_name = (f"{prefix}{expert_idx}.{name}.weight" for name in self.expert_names)
        return {
            "gate_proj": weights(gate, intermediate, hidden),
            "up_proj": weights(up, intermediate, hidden),
            "down_proj": weights(down_name, hidden, intermediate),
        }

    def shared_expert(self, weights: Weights, layer_idx: int) -> ExpertTensors:
        """The shared expert's matrices."""
        raise NotImplementedError

    @staticmethod
    def mlp(weights: Weights, prefix: str, intermediate_size: int, hidden_size: int) -> ExpertTensors:
        """The three matrices of a gated MLP under their usual names."""
        return {
            "gate_proj": weights(f"{prefix}gate_proj.weight", intermediate_size, hidden_size),
            "up_proj": weights(f"{prefix}up_proj.weight", intermediate_size, hidden_size),
            "down_proj": weights(f"{prefix}down_proj.weight", hidden_size, intermediate_size),
        }

    # -- the end -----------------------------------------------------------------------------------------------------

    def logits(self, step: Step, rows: str) -> str:
        """Final norm and head of rows [R,H] -> [R,V]."""
        x = self.norm(step, rows, self.final_norm)
        return step.head(x, self.head_name(step.weights), self.vocab_size, self.hidden_size)

    def head_name(self, weights: Weights) -> str:
        """The head is the embedding where the checkpoint holds no other one."""
        if HEAD not in weights:
            return EMBEDDING
        weights.expect(HEAD, (self.vocab_size, self.hidden_size))
        return EMBEDDING if weights.same(HEAD, EMBEDDING) else HEAD
