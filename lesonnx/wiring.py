"""Whether a manifest's parts and states fit together: what flows from part to part, and what states go in and out.

It reads no model; whether the files are what the manifest says, `ort.check_part` tells. All errors are ValueError in
one line, since pydantic asks for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from lesonnx.vision_wiring import deepstack_name

if TYPE_CHECKING:
    from lesonnx.manifest import Manifest, Part, Replay, State, Value

# No tensor has a longer last axis; what has, would only exhaust the memory of whoever believes it.
LARGEST_ROW = 1 << 20
Named = TypeVar("Named", str, int | None, tuple[str, str])
CACHE_DTYPES = {8: "int8", 16: "float16", 32: "float32"}


def check_wiring(manifest: Manifest) -> None:
    """ValueError for parts and states that no host could run as they are stated."""
    _check_roles(manifest)
    _check_states(manifest)
    _check_flow(manifest)


def _check_roles(manifest: Manifest) -> None:
    """Every MoE layer has its segment, all but the first a lookahead, and none has two of anything."""
    layers = [layer.layer_idx for layer in manifest.expert_layers]
    by_role: dict[str, list[int | None]] = {"segment": [], "mixer": [], "lookahead": []}
    for part in manifest.parts:
        if part.role in by_role:
            by_role[part.role].append(part.layer_idx)
    if not set(by_role["mixer"]) <= set(layers):
        raise ValueError("a mixer part belongs to no MoE layer")
    for layer_idx in layers[1:]:
        if layer_idx not in by_role["lookahead"]:
            raise ValueError(f"layer {layer_idx} has no lookahead part")
    if by_role["segment"] != layers:
        raise ValueError("every MoE layer needs its segment, in the order of the layers")
    for role in ("mixer", "lookahead"):
        for repeated in _repeated(by_role[role]):
            raise ValueError(f"layer {repeated} has two {role} parts")


def _check_states(manifest: Manifest) -> None:
    """Every state is an input and an output of its part, of its own type and shape."""
    parts = {part.name: part for part in manifest.parts}
    for name in _repeated(state.name for state in manifest.states):
        raise ValueError(f"two states have the name {name!r}")
    for state in manifest.states:
        if state.part not in parts:
            raise ValueError(f"state {state.name!r} names part {state.part!r}, which is not there")
        if state.replay is not None:
            _check_replay(parts, state, state.replay)
        expected = CACHE_DTYPES[manifest.quantization.kv_bits] if state.is_attention else "float32"
        if state.dtype != expected:
            kv_bits = manifest.quantization.kv_bits
            raise ValueError(f"state {state.name!r} is {state.dtype}, expected {expected} (kv_bits is {kv_bits})")
        part = parts[state.part]
        for values, name in ((part.inputs, state.input), (part.outputs, state.output)):
            value = next((value for value in values if value.name == name), None)
            if value is None:
                raise ValueError(f"state {state.name!r} names {name!r}, which part {part.name!r} does not have")
            if (value.dtype, value.shape) != (state.dtype, state.shape):
                raise ValueError(
                    f"state {state.name!r} is {state.dtype} {state.shape},"
                    f" {name!r} of part {part.name!r} is {value.dtype} {value.shape}"
                )
    for part_name, name in _repeated((state.part, state.input) for state in manifest.states):
        raise ValueError(f"two states are input {name!r} of part {part_name!r}")


def _check_replay(parts: dict[str, Part], state: State, replay: Replay) -> None:
    """Whether a state's rows are what its replay part takes."""
    part = parts.get(replay.part)
    if part is None or part.role != "replay":
        raise ValueError(f"state {state.name!r} names {replay.part!r}, which is no part of role replay")
    given = {value.name: value for value in parts[state.part].outputs}
    taken = {value.name: value for value in part.inputs}
    past, gives = taken.pop("past", None), {value.name: value for value in part.outputs}
    present = gives.get("present")
    if past is None or present is None or not past.shape == present.shape == state.shape:
        raise ValueError(f"part {part.name!r} does not take past and give present {state.shape}")
    if set(taken) != set(replay.rows):
        raise ValueError(f"state {state.name!r}: part {part.name!r} takes the rows {', '.join(sorted(taken))}")
    for name, value in taken.items():
        row = given.get(replay.rows[name])
        if row is None or row.shape != value.shape or row.dtype != value.dtype:
            raise ValueError(f"state {state.name!r}: rows {replay.rows[name]!r} are not what {part.name!r} takes")
        size = row.shape[-1]
        if len(row.shape) != 3 or row.shape[:2] != [1, "T"] or isinstance(size, str) or not 0 < size < LARGEST_ROW:
            raise ValueError(f"shape {row.shape} of the rows {row.name!r} is not [1, 'T', size]")


def _check_flow(manifest: Manifest) -> None:
    """What is no state has one type and shape in all parts; a part takes nothing that a host does not know."""
    model = manifest.model
    for key in ("hidden_size", "num_experts", "num_experts_per_tok"):
        if getattr(model, key) >= LARGEST_ROW:
            raise ValueError(f"model: {key} is {getattr(model, key)}, expected less than {LARGEST_ROW}")
    known = _known_values(manifest)
    states = {(state.part, name) for state in manifest.states for name in (state.input, state.output)}
    for part in manifest.parts:
        if part.role == "replay":
            continue
        for value in (*part.inputs, *part.outputs):
            if value.name in known and (value.dtype, value.shape) != known[value.name]:
                dtype, shape = known[value.name]
                raise ValueError(
                    f"{value.name!r} of part {part.name!r} is {value.dtype} {value.shape}, expected {dtype} {shape}"
                )
        for value in part.inputs:
            if value.name not in known and (part.name, value.name) not in states:
                raise ValueError(f"part {part.name!r} takes {value.name!r}, which is no state of it")


def _known_values(manifest: Manifest) -> dict[str, tuple[str, list[int | str]]]:
    """The type and shape of every value that hosts hand to parts or take from them."""
    model = manifest.model
    hidden, slots, experts = model.hidden_size, model.num_experts_per_tok, model.num_experts
    residual = _residual(manifest)
    weights: list[int | str] = ["T", slots]
    return {
        **{deepstack_name(layer_idx): ("float32", [1, "T", hidden]) for layer_idx in range(manifest.deepstack_layers)},
        "input_ids": ("int64", [1, "T"]),
        "position_ids": ("int64", [1, "T"] if manifest.position_rows == 1 else [3, 1, "T"]),
        "seqlens_k": ("int32", [1]),
        "total_sequence_length": ("int32", []),
        "hidden": ("float32", [1, "T", hidden]),
        "residual": ("float32", residual),
        "residual_out": ("float32", residual),
        "moe_input": ("float32", ["T", hidden]),
        "topk_ids": ("int64", weights),
        "topk_weights": ("float32", weights),
        "topk_weights_out": ("float32", weights),
        "shared_weights": ("float32", ["T", 1]),
        "shared_weights_out": ("float32", ["T", 1]),
        "router_scores": ("float32", ["T", experts]),
        "scores": ("float32", ["T", experts]),
        "expert_out": ("float32", ["T", slots, hidden]),
        "shared_out": ("float32", ["T", hidden]),
        "ready": ("bool", weights),
        "logit_rows": ("int64", ["R"]),
        "logits": ("float32", ["R", model.vocab_size]),
    }


def _residual(manifest: Manifest) -> list[int | str]:
    """The shape of what segments hand on: that of the first that gives it holds for all."""
    value: Value | None = next(
        (value for part in manifest.parts for value in part.outputs if value.name == "residual_out"), None
    )
    if value is None:
        raise ValueError("no part gives residual_out")
    size = value.shape[-1] if value.shape else None
    if value.shape[:2] != [1, "T"] or len(value.shape) != 3 or not isinstance(size, int) or not 0 < size < LARGEST_ROW:
        raise ValueError(f"shape {value.shape} of 'residual_out' is not [1, 'T', size]")
    return value.shape


def _repeated(items: Iterable[Named]) -> list[Named]:
    return [item for item, count in Counter(items).items() if count > 1]
