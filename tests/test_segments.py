"""The dense parts: their inputs and outputs, run by plain ONNX Runtime without a line of the runner's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import FAMILIES, RECURRENT, Tensors, derive, read_config, read_reference
from conftest import BundleFactory
from forward import Forward
from numpy.typing import NDArray

from lesonnx.bundle import Bundle
from lesonnx.manifest import Part

Values = dict[str, NDArray[Any]]
DTYPES = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.INT64: "int64", onnx.TensorProto.INT32: "int32"}
DTYPES |= {onnx.TensorProto.BOOL: "bool", onnx.TensorProto.FLOAT16: "float16"}
STREAM = ("residual", "topk_weights", "shared_weights")


@dataclass
class PlainHost:
    """The least a host must do, from docs/bundle.md alone: one step, everything loaded, no buffers kept."""

    bundle: Bundle
    sessions: dict[Path, Any] = field(default_factory=dict)
    scores: dict[int, NDArray[Any]] = field(default_factory=dict)
    layer_outputs: dict[int, NDArray[Any]] = field(default_factory=dict)
    streams: dict[int, Values] = field(default_factory=dict)

    def session(self, path: Path) -> Any:
        if path not in self.sessions:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            options.intra_op_num_threads = 1
            self.sessions[path] = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return self.sessions[path]

    def run_part(self, part: Part, values: Values) -> Values:
        inputs = {value.name: values[value.name] for value in part.inputs}
        names = [value.name for value in part.outputs]
        return dict(zip(names, self.session(self.bundle.part_file(part)).run(names, inputs), strict=True))

    def forward(self, token_ids: Sequence[int]) -> NDArray[Any]:
        """Logits at every position."""
        manifest = self.bundle.manifest
        count = len(token_ids)
        values: Values = {
            "input_ids": np.array([token_ids], np.int64),
            "position_ids": np.arange(count, dtype=np.int64)[None],
            "seqlens_k": np.array([count - 1], np.int32),
            "total_sequence_length": np.array(count, np.int32),
            "logit_rows": np.arange(count, dtype=np.int64),
        }
        for state in manifest.states:
            shape = [count if size == "S" else int(size) for size in state.shape]
            values[state.input] = np.zeros(shape, state.dtype)
        for part in manifest.parts:
            if part.role in ("lookahead", "replay"):
                continue
            given = self.run_part(part, values)
            # What flows on comes out under a name of its own where the plain one is the input's.
            values |= {name.removesuffix("_out"): value for name, value in given.items()}
            for name, value in given.items():
                if name.startswith("layer_output_"):
                    self.layer_outputs[int(name.removeprefix("layer_output_"))] = value
            if part.role == "segment" and part.layer_idx is not None:
                self.scores[part.layer_idx] = given["router_scores"]
            # A segment that routes early leaves what its experts see to the mixer behind it.
            if "moe_input" in given and part.layer_idx is not None:
                values |= self.experts(part.layer_idx, values)
                kept = (*STREAM, "expert_out", "shared_out")
                self.streams[part.layer_idx] = {name: values[name] for name in kept if name in values}
        return values["logits"]

    def experts(self, layer_idx: int, given: Values) -> Values:
        hidden, ids = given["moe_input"], given["topk_ids"]
        out = np.empty((*ids.shape, hidden.shape[1]), np.float32)
        for expert_idx in np.unique(ids):
            tokens, slots = np.nonzero(ids == expert_idx)
            path = self.expert_file(layer_idx, int(expert_idx))
            out[tokens, slots] = self.session(path).run(None, {"x": hidden[tokens]})[0]
        values: Values = {"expert_out": out}
        if self.bundle.layer(layer_idx).shared_kind is not None:
            path = self.expert_file(layer_idx, None)
            values["shared_out"] = self.session(path).run(None, {"x": hidden})[0]
        return values

    def expert_file(self, layer_idx: int, expert_idx: int | None) -> Path:
        wanted = (layer_idx, expert_idx)
        expert = next(e for e in self.bundle.experts if (e.layer_idx, e.expert_idx) == wanted)
        return self.bundle.model_file(expert)

    def lookahead(self, layer_idx: int, stream: Values, ready: NDArray[np.bool_]) -> NDArray[Any]:
        scores: NDArray[Any] = self.run_part(
            self.bundle.manifest.part("lookahead", layer_idx), stream | {"ready": ready}
        )["scores"]
        return scores


@pytest.mark.parametrize("name", [*FAMILIES, *RECURRENT, "smallthinker"])
def test_a_plain_host_gives_the_references_logits(bundle_of: BundleFactory, name: str) -> None:
    reference = read_reference(name)
    logits = PlainHost(Bundle(bundle_of(name))).forward(reference["input_ids"].tolist())
    assert np.abs(logits - reference["logits"]).max() < 1e-3


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_a_plain_host_runs_small_caches(bundle_of: BundleFactory, kv_bits: int) -> None:
    """It makes states of the type that the manifest names, and knows nothing else of them."""
    reference = read_reference("qwen3_moe")
    logits = PlainHost(Bundle(bundle_of("qwen3_moe", kv_bits=kv_bits))).forward(reference["input_ids"].tolist())
    # Random routers choose other experts for a hair's breadth: some rows differ much.
    assert np.median(np.abs(logits - reference["logits"])) < 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_layer_outputs(bundle_of: BundleFactory, name: str) -> None:
    token_ids = read_reference(name)["input_ids"][:32].tolist()
    host = PlainHost(Bundle(bundle_of(name)))
    host.forward(token_ids)
    expected = Forward.of(name)(token_ids).layer_outputs
    assert sorted(host.layer_outputs) == list(range(len(expected)))
    for layer_idx, got in host.layer_outputs.items():
        assert got.shape == (1, 32, read_config(name)["hidden_size"])
        assert np.abs(got[0] - expected[layer_idx]).max() < 1e-3


def expected_values(bundle: Bundle, part: Part) -> tuple[set[str], set[str]]:
    """The inputs and outputs that the design gives a part, without states, lengths, positions and layer outputs."""
    has_shared = any(layer.shared_kind is not None for layer in bundle.manifest.expert_layers)
    after_experts = {"residual", "expert_out", "topk_weights"} | (
        {"shared_out", "shared_weights"} if has_shared else set()
    )
    if part.role == "embed":
        return {"input_ids"}, {"hidden"}
    if part.role == "head":
        return after_experts | {"logit_rows"}, {"logits"}
    if part.role == "lookahead":
        return after_experts | {"ready"}, {"scores"}
    first = part.layer_idx == bundle.manifest.expert_layers[0].layer_idx
    outputs = {"residual_out", "moe_input", "topk_ids", "topk_weights_out", "router_scores"}
    return ({"hidden"} if first else after_experts), outputs | ({"shared_weights_out"} if has_shared else set())


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_take_and_give_what_the_format_says(bundle_of: BundleFactory, name: str) -> None:
    bundle = Bundle(bundle_of(name, bits=4))
    manifest = bundle.manifest
    lengths = {"position_ids", "seqlens_k", "total_sequence_length"}
    for part in manifest.parts:
        model = onnx.load(str(bundle.part_file(part)), load_external_data=False)
        onnx.checker.check_model(str(bundle.part_file(part)))
        for declared, infos in ((part.inputs, model.graph.input), (part.outputs, model.graph.output)):
            found = [
                (
                    info.name,
                    DTYPES[info.type.tensor_type.elem_type],
                    [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim],
                )
                for info in infos
            ]
            assert found == [(value.name, value.dtype, value.shape) for value in declared]
        states = [state for state in manifest.states if state.part == part.name]
        inputs, outputs = expected_values(bundle, part)
        carried = {state.input for state in states} | (lengths if states else set())
        assert {value.name for value in part.inputs} == inputs | carried
        completed = {value.name for value in part.outputs if value.name.startswith("layer_output_")}
        assert {value.name for value in part.outputs} == outputs | {state.output for state in states} | completed


@pytest.mark.parametrize("name", FAMILIES)
def test_one_segment_a_moe_layer_and_lookaheads_between(bundle_of: BundleFactory, name: str) -> None:
    manifest = Bundle(bundle_of(name)).manifest
    layers = [layer.layer_idx for layer in manifest.expert_layers]
    expected = ["embed", f"segment_{layers[0]:03d}"]
    for layer_idx in layers[1:]:
        expected += [f"segment_{layer_idx:03d}", f"lookahead_{layer_idx:03d}"]
    assert [part.name for part in manifest.parts] == [*expected, "head"]
    attending = {state.layer_idx for state in manifest.states}
    assert attending == set(range(manifest.model.num_hidden_layers))


def without_attention(tensors: Tensors) -> Tensors:
    """Attention that adds nothing, so that the residual reaches the next router as the experts left it."""
    return {key: value * 0 if key.endswith("o_proj.weight") else value for key, value in tensors.items()}


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_a_complete_lookahead_is_the_next_router(bundle_of: BundleFactory, tmp_path: Path, name: str) -> None:
    checkpoint = derive(name, tmp_path / "no_attention", tensors=without_attention)
    host = PlainHost(Bundle(bundle_of(checkpoint)))
    host.forward(read_reference(name)["input_ids"][:16].tolist())
    layers = sorted(host.scores)
    for before, layer_idx in itertools.pairwise(layers):
        stream = host.streams[before]
        ready = np.ones(stream["topk_weights"].shape, bool)
        assert np.abs(host.lookahead(layer_idx, stream, ready) - host.scores[layer_idx]).max() < 1e-5


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])
def test_rows_that_are_not_ready_do_not_matter(bundle_of: BundleFactory, name: str) -> None:
    """They hold anything, NaN and infinity included, and count as zero."""
    host = PlainHost(Bundle(bundle_of(name)))
    host.forward(read_reference(name)["input_ids"][:16].tolist())
    layers = sorted(host.scores)
    stream = host.streams[layers[0]]
    ready = np.random.default_rng(5).random(stream["topk_weights"].shape) < 0.5
    ready[0], ready[1] = False, True
    zero, garbage = stream["expert_out"].copy(), stream["expert_out"].copy()
    zero[~ready] = 0
    garbage[~ready] = np.nan
    garbage[0, 0] = np.inf
    clean = host.lookahead(layers[1], stream | {"expert_out": zero}, np.ones_like(ready))
    got = host.lookahead(layers[1], stream | {"expert_out": garbage}, ready)
    assert np.isfinite(got).all()
    assert np.array_equal(got, clean)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])
def test_lookahead_names_experts_better_than_chance(bundle_of: BundleFactory, name: str) -> None:
    """On random weights there is little to predict; that it sees the right hidden state shows all the same."""
    host = PlainHost(Bundle(bundle_of(name)))
    config = read_config(name)
    host.forward(read_reference(name)["input_ids"].tolist())
    layers = sorted(host.scores)
    slots = config["num_experts_per_tok"]
    found = wanted = 0
    for before, layer_idx in itertools.pairwise(layers):
        stream = host.streams[before]
        scores = host.lookahead(layer_idx, stream, np.ones(stream["topk_weights"].shape, bool))
        for predicted, real in zip(np.argsort(-scores), np.argsort(-host.scores[layer_idx]), strict=True):
            found += len(set(predicted[:slots]) & set(real[:slots]))
            wanted += slots
    chance = slots / host.scores[layers[0]].shape[1]
    assert found / wanted > 1.5 * chance


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_and_weights_agree_with_the_routers_choice(bundle_of: BundleFactory, name: str) -> None:
    """The ids are the best of the scores, in their order; the weights of a row are what the family makes of them."""
    host = PlainHost(Bundle(bundle_of(name)))
    token_ids = read_reference(name)["input_ids"][:32].tolist()
    host.forward(token_ids)
    config = read_config(name)
    expected = Forward.of(name)(token_ids).experts
    for layer_idx, scores in host.scores.items():
        slots = config["num_experts_per_tok"]
        assert np.array_equal(np.argsort(-scores, axis=1, kind="stable")[:, :slots], expected[layer_idx])
        weights = host.streams[layer_idx]["topk_weights"]
        best = np.sort(scores, axis=1)[:, ::-1][:, :slots]
        if name == "mixtral" or config.get("norm_topk_prob"):
            best = best / best.sum(axis=1, keepdims=True)
        assert np.abs(weights - best).max() < 1e-6


def test_tied_head_shares_the_embeddings_bytes(bundle_of: BundleFactory) -> None:
    name = "qwen3_moe_tied_dense0"
    for bits in (32, 4):
        bundle = Bundle(bundle_of(name, bits=bits))
        places = []
        for role in ("embed", "head"):
            model = onnx.load(str(bundle.part_file(bundle.manifest.part(role))), load_external_data=False)
            big = max(
                (tensor for tensor in model.graph.initializer if "embed_tokens" in tensor.name),
                key=lambda tensor: int(np.prod(tensor.dims)),
            )
            places.append({entry.key: entry.value for entry in big.external_data})
        assert places[0] == places[1]


@pytest.mark.parametrize("dense_bits", [4, 8])
def test_router_and_norms_stay_float32(bundle_of: BundleFactory, dense_bits: int) -> None:
    bundle = Bundle(bundle_of("qwen2_moe", bits=4, dense_bits=dense_bits))
    for part in bundle.manifest.parts:
        model = onnx.load(str(bundle.part_file(part)), load_external_data=False)
        for tensor in model.graph.initializer:
            if any(word in tensor.name for word in ("norm", "mlp.gate", "shared_expert_gate")):
                assert tensor.data_type == onnx.TensorProto.FLOAT, tensor.name
        quantized = {node.op_type for node in model.graph.node} & {"MatMulNBits", "GatherBlockQuantized"}
        assert bool(quantized) == (part.role != "lookahead")
