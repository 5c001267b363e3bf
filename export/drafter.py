"""A DSpark drafter beside its target: its checkpoint read and checked, its three parts built.

DSpark is the block drafter of DeepSeek's DeepSpec (MIT): one parallel pass over the target's hidden states proposes a
block of tokens, a low-rank map from token to token makes them coherent, a confidence head says how far they will hold.
Embedding and head are the target's: they are stored once. It knows how a drafter computes, not when one is asked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from lesonnx.drafter_wiring import ROLES
from lesonnx.errors import CheckpointError
from lesonnx.manifest import Drafter, Part
from lesonnx_export.architectures.base import EMBEDDING, FULL, HEAD, Decoder
from lesonnx_export.blocks import POSITION_IDS, Step
from lesonnx_export.checkpoint import Checkpoint, Weights
from lesonnx_export.config import Config
from lesonnx_export.rope import make_rope

ARCHITECTURE = "Qwen3DSparkModel"
MARKOV_HEAD = "vanilla"
# What its tensors are called among the target's.
PREFIX = "drafter."
ANCHOR = "fc.weight"
LARGEST_BLOCK = 1 << 8
# Of the confidence head and of training; the rest says what a Qwen3 model is.
SETTINGS = ("num_anchors", "tie_word_embeddings", "max_position_embeddings", "sliding_window")
# Tensors that it may hold and that are left out, by their names among the target's: pattern -> the reason.
SKIPPED = {
    re.escape(PREFIX) + r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "rotary table, computed in the graph"
}


class DSpark:
    """A drafter's configuration, checked against its target, and what its parts compute. Shapes in docs/bundle.md.

    Making one adds its tensors to the target's checkpoint, under `PREFIX`, so that one set of weights knows both.
    CheckpointError, which names the drafter's directory, for anything that does not fit.
    """

    def __init__(self, directory: Path, target: Decoder, weights: Weights) -> None:
        checkpoint = Checkpoint(directory, ANCHOR)
        self.directory = directory
        self.target = target
        self.config = Config(checkpoint.config)
        try:
            self._read(self.config)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from None
        if type(target).embed is not Decoder.embed or type(target).logits is not Decoder.logits:
            raise CheckpointError(
                f"{directory}: a drafter shares the target's embedding and head, and those of {target.model_type}"
                " scale, bound or shift what they give"
            )
        self._adopt(checkpoint, weights)

    def _read(self, config: Config) -> None:
        target = self.target
        architectures = config.raw("architectures", None)
        if architectures != [ARCHITECTURE]:
            raise CheckpointError(f"config.json: architectures is {architectures!r:.100}, expected ['{ARCHITECTURE}']")
        self.vocab_size = self._as_target("vocab_size", target.vocab_size)
        self.hidden_size = self._as_target("hidden_size", target.hidden_size)
        self._as_target("num_target_layers", target.num_hidden_layers)
        self.num_hidden_layers = config.integer("num_hidden_layers")
        self.num_attention_heads = config.integer("num_attention_heads")
        self.num_key_value_heads = config.integer("num_key_value_heads", self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {self.num_attention_heads} is not a multiple of"
                f" num_key_value_heads {self.num_key_value_heads}"
            )
        self.head_dim = config.integer("head_dim", max(1, self.hidden_size // self.num_attention_heads))
        self.intermediate_size = config.integer("intermediate_size")
        self.rms_norm_eps = config.number("rms_norm_eps")
        config.require("hidden_act", ("silu",), "silu")
        config.require("attention_bias", (False,), False)
        config.require("use_sliding_window", (False,), False)
        config.layer_types(self.num_hidden_layers, (FULL,), [FULL] * self.num_hidden_layers)
        self.rope = make_rope(config, self.head_dim, default_theta=10000.0)
        if self.rope.dynamic_factor is not None or self.rope.long_inverse_frequencies is not None:
            raise CheckpointError("config.json: rotary positions that change with the sequence are not supported here")
        self.block_size = config.integer("block_size")
        if self.block_size > LARGEST_BLOCK:
            raise CheckpointError(f"config.json: block_size is {self.block_size}, expected at most {LARGEST_BLOCK}")
        self.mask_token_id = config.integer("mask_token_id", 0)
        if self.mask_token_id >= self.vocab_size:
            raise CheckpointError(
                f"config.json: mask_token_id is {self.mask_token_id}, expected less than vocab_size {self.vocab_size}"
            )
        self.target_layer_ids = self._target_layer_ids()
        self.markov_rank = config.integer("markov_rank")
        config.require("markov_head_type", (MARKOV_HEAD,), MARKOV_HEAD)
        self.has_confidence = config.flag("enable_confidence_head", False)
        self.confidence_sees_markov = config.flag("confidence_head_with_markov", False)
        for key in SETTINGS:
            config.raw(key, None)

    def _as_target(self, key: str, expected: int) -> int:
        found = self.config.integer(key)
        if found != expected:
            raise CheckpointError(f"config.json: {key} is {found}, the target's is {expected}")
        return found

    def _target_layer_ids(self) -> list[int]:
        values = self.config.raw("target_layer_ids")
        last = self.target.num_hidden_layers - 1
        if (
            not isinstance(values, list)
            or not values
            or not all(type(value) is int and -1 <= value <= last for value in values)
            or len(set(values)) != len(values)
        ):
            raise CheckpointError(
                f"config.json: target_layer_ids must be different layers from -1 to {last}, found {values!r:.100}"
            )
        return values

    # -- tensors -----------------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that it computes with, and its shape."""
        hidden, size, inner = self.hidden_size, self.head_dim, self.intermediate_size
        query, kv = self.num_attention_heads * size, self.num_key_value_heads * size
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.target_layer_ids) * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
            "markov_head.markov_w1.weight": (self.vocab_size, self.markov_rank),
            "markov_head.markov_w2.weight": (self.vocab_size, self.markov_rank),
        }
        if self.has_confidence:
            shapes["confidence_head.proj.weight"] = (1, self._confidence_size)
            shapes["confidence_head.proj.bias"] = (1,)
        for idx in range(self.num_hidden_layers):
            of_layer = {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (query, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, query),
                "self_attn.q_norm": (size,),
                "self_attn.k_norm": (size,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }
            shapes |= {f"layers.{idx}.{name}.weight": shape for name, shape in of_layer.items()}
        return shapes

    @property
    def _confidence_size(self) -> int:
        return self.hidden_size + (self.markov_rank if self.confidence_sees_markov else 0)

    @property
    def num_parameters(self) -> int:
        """Without embedding and head, which are the target's."""
        return sum(math.prod(shape) for shape in self.tensors.values())

    def _adopt(self, checkpoint: Checkpoint, weights: Weights) -> None:
        """Put the tensors among the target's; all that is there must be used, and copies be the target's own."""
        shapes = self.tensors
        for name in shapes:
            if name not in checkpoint:
                raise CheckpointError(f"{self.directory}: tensor {name!r} is missing")
        copies = {name for name in (EMBEDDING, HEAD) if name in checkpoint}
        for name, info in sorted(checkpoint.tensors.items()):
            if name not in shapes and name not in copies and not _is_skipped(name):
                raise CheckpointError(
                    f"{info.file}: tensor {info.key!r} {list(info.shape)} is not part of a {ARCHITECTURE} as its"
                    " config.json states it; refusing to leave it out silently"
                )
        weights.checkpoint.tensors |= {PREFIX + name: info for name, info in checkpoint.tensors.items()}
        try:
            for name, shape in shapes.items():
                weights.expect(PREFIX + name, shape)
            for name in copies:
                weights.expect(PREFIX + name, (self.vocab_size, self.hidden_size))
        except CheckpointError as error:
            raise CheckpointError(f"{self.directory}: {error}") from None
        theirs = {EMBEDDING: EMBEDDING, HEAD: self.target.head_name(weights)}
        for name in copies:
            if not weights.same(PREFIX + name, theirs[name]):
                raise CheckpointError(
                    f"{self.directory}: {name} differs from the target's: the drafter was trained for another model"
                )

    # -- parts -------------------------------------------------------------------------------------------------------

    def record(self, parts: Sequence[Part]) -> Drafter:
        """Its entry in the manifest."""
        return Drafter(
            kind="dspark",
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            target_layer_ids=self.target_layer_ids,
            markov_rank=self.markov_rank,
            num_parameters=self.num_parameters,
            parts=list(parts),
        )

    def build(self, step: Step, name: str) -> None:
        """Build the part of that name."""
        {ROLES[0]: self._context, ROLES[1]: self._block, ROLES[2]: self._markov}[name](step)

    def _norm(self, step: Step, x: str, name: str) -> str:
        return step.norm(x, f"{PREFIX}{name}.weight", self.hidden_size, self.rms_norm_eps)

    def _linear(self, step: Step, x: str, name: str) -> str:
        rows, columns = self.tensors[f"{name}.weight"]
        return step.linear(x, f"{PREFIX}{name}.weight", rows, columns)

    def _flat(self, step: Step, x: str) -> str:
        """[1,n,H] -> [n,H]."""
        return step.graph.op("Reshape", x, step.graph.constant([-1, self.hidden_size], "int64"))

    def _key_value(self, step: Step, idx: int, rows: str) -> tuple[str, str]:
        """Rotated keys and values [1,n,kv heads*size] of rows [n,H]. Context and block share these weights."""
        graph, prefix = step.graph, f"{PREFIX}layers.{idx}.self_attn."
        heads, size = self.num_key_value_heads, self.head_dim
        shape = graph.constant([1, -1, heads * size], "int64")
        key, value = (
            graph.op("Reshape", step.head(rows, f"{prefix}{name}_proj.weight", heads * size, self.hidden_size), shape)
            for name in ("k", "v")
        )
        key = step.head_norm(key, f"{prefix}k_norm.weight", heads, size, self.rms_norm_eps)
        return step.rotate(key, self.rope, heads, size), value

    def _context(self, step: Step) -> None:
        """What the target's layers gave for some tokens -> keys and values of every layer."""
        width = len(self.target_layer_ids) * self.hidden_size
        outputs = step.graph.input("layer_outputs", "float32", [1, "T", width])
        rows = self._flat(step, self._norm(step, self._linear(step, outputs, "fc"), "hidden_norm"))
        size = self.num_key_value_heads * self.head_dim
        for idx in range(self.num_hidden_layers):
            for name, value in zip(("key", "value"), self._key_value(step, idx, rows), strict=True):
                step.graph.output(value, f"drafter_{name}_{idx}", "float32", [1, "T", size])

    def _block(self, step: Step) -> None:
        """The anchor and the masks behind it, over the context -> hidden states and logits of some slots."""
        graph = step.graph
        ids = graph.input("input_ids", "int64", [1, self.block_size])
        graph.input(POSITION_IDS, "int64", [1, self.block_size])
        rows = graph.input("logit_rows", "int64", ["R"])
        residual = step.embedding(ids, EMBEDDING, self.vocab_size, self.hidden_size)
        for idx in range(self.num_hidden_layers):
            prefix = f"layers.{idx}."
            x = self._norm(step, residual, f"{prefix}input_layernorm")
            residual = graph.op("Add", residual, self._attention(step, idx, x))
            x = self._norm(step, residual, f"{prefix}post_attention_layernorm")
            residual = graph.op("Add", residual, self._mlp(step, f"{prefix}mlp.", x))
        chosen = graph.op("Gather", self._norm(step, residual, "norm"), rows, axis=1)
        hidden = graph.output(self._flat(step, chosen), "slot_hidden", "float32", ["R", self.hidden_size])
        logits = step.head(hidden, self.target.head_name(step.weights), self.vocab_size, self.hidden_size)
        graph.output(logits, "base_logits", "float32", ["R", self.vocab_size])

    def _attention(self, step: Step, idx: int, x: str) -> str:
        """Every slot sees the context and all slots: x [1,B,H] -> [1,B,H].

        Queries that share a key head are rows of one product: at 32 heads on 4 and 2000 tokens of context that takes
        half the time of ONNX's Attention operator.
        """
        graph, name = step.graph, f"layers.{idx}.self_attn."
        heads, kv_heads, size = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        group, block = heads // kv_heads, self.block_size

        def shaped(value: str, *shape: int) -> str:
            return graph.op("Reshape", value, graph.constant(shape, "int64"))

        query = self._linear(step, x, f"{name}q_proj")
        query = step.head_norm(query, f"{PREFIX}{name}q_norm.weight", heads, size, self.rms_norm_eps)
        query = step.rotate(query, self.rope, heads, size)
        key, value = (
            graph.op("Concat", graph.input(f"drafter_{kind}_{idx}", "float32", [1, "P", kv_heads * size]), own, axis=1)
            for kind, own in zip(("key", "value"), self._key_value(step, idx, self._flat(step, x)), strict=True)
        )
        query = graph.op("Transpose", shaped(query, block, kv_heads, group, size), perm=[1, 2, 0, 3])
        keys = graph.op("Transpose", shaped(key, -1, kv_heads, size), perm=[1, 2, 0])
        values = graph.op("Transpose", shaped(value, -1, kv_heads, size), perm=[1, 0, 2])
        products = graph.op("MatMul", step.scaled(shaped(query, kv_heads, group * block, size), size**-0.5), keys)
        mixed = graph.op("MatMul", graph.op("Softmax", products, axis=-1), values)
        mixed = graph.op("Transpose", shaped(mixed, kv_heads, group, block, size), perm=[2, 0, 1, 3])
        return self._linear(step, shaped(mixed, 1, block, heads * size), f"{name}o_proj")

    def _mlp(self, step: Step, prefix: str, x: str) -> str:
        graph, size = step.graph, self.intermediate_size
        names = [(f"{PREFIX}{prefix}{name}_proj.weight", size, None) for name in ("gate", "up")]
        fused = step.fused_linear(x, names, self.hidden_size)
        gate, up = graph.ops("Split", 2, fused, graph.constant([size, size], "int64"), axis=-1)
        active = graph.op("Mul", gate, graph.op("Sigmoid", gate))
        return self._linear(step, graph.op("Mul", active, up), f"{prefix}down_proj")

    def _markov(self, step: Step) -> None:
        """A slot's logits as the token before it shifts them, and how likely the slot is right."""
        graph, rank = step.graph, self.markov_rank
        if step.precision.dense_bits != 32 and rank % 16:
            raise CheckpointError(
                f"{self.directory}: markov_rank {rank} is not a multiple of 16: export with --dense-bits 32"
            )
        token = graph.input("token_id", "int64", [1])
        logits = graph.input("base_logits", "float32", [1, self.vocab_size])
        hidden = graph.input("slot_hidden", "float32", [1, self.hidden_size])
        before = step.embedding(token, f"{PREFIX}markov_head.markov_w1.weight", self.vocab_size, rank)
        bias = step.head(before, f"{PREFIX}markov_head.markov_w2.weight", self.vocab_size, rank)
        graph.output(graph.op("Add", logits, bias), "logits", "float32", [1, self.vocab_size])
        if not self.has_confidence:
            return
        seen = graph.op("Concat", hidden, before, axis=-1) if self.confidence_sees_markov else hidden
        name = f"{PREFIX}confidence_head.proj"
        logit = step.router_linear(seen, f"{name}.weight", 1, self._confidence_size, f"{name}.bias")
        shaped = graph.op("Reshape", graph.op("Sigmoid", logit), graph.constant([1], "int64"))
        graph.output(shaped, "confidence", "float32", [1])


def _is_skipped(name: str) -> bool:
    return any(re.fullmatch(pattern, PREFIX + name) for pattern in SKIPPED)
