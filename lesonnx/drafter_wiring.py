"""Whether a manifest's drafter fits its model: its parts, what they take and give, and the layers that it reads.

As `wiring`, it reads no model. All errors are ValueError in one line, since pydantic asks for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lesonnx.wiring import LARGEST_ROW

if TYPE_CHECKING:
    from lesonnx.manifest import Drafter, Manifest, Part, Value

ROLES = ("drafter_context", "drafter_block", "drafter_markov")
# What ``target_layer_ids`` calls the embedding's output.
EMBEDDING_IDX = -1
Declared = dict[str, tuple[str, list[int | str]]]


def layer_output_name(layer_idx: int) -> str:
    """What parts call the output of a layer; that of layer -1 is the embedding's."""
    return "hidden" if layer_idx == EMBEDDING_IDX else f"layer_output_{layer_idx}"


def check_drafter(manifest: Manifest, drafter: Drafter) -> None:
    """ValueError for a drafter that no host could run as it is stated."""
    if sorted(part.role for part in drafter.parts) != sorted(ROLES):
        raise ValueError(f"the drafter has exactly one part of each role: {', '.join(ROLES)}")
    if any(part.role in ROLES for part in manifest.parts):
        raise ValueError("the drafter's parts belong into drafter.parts")
    vocab_size, layers = manifest.model.vocab_size, drafter.target_layer_ids
    if drafter.mask_token_id >= vocab_size:
        raise ValueError(f"drafter: mask_token_id is {drafter.mask_token_id}, expected less than {vocab_size}")
    given = {value.name for part in manifest.parts for value in part.outputs}
    for layer_idx in layers:
        if layer_output_name(layer_idx) not in given:
            raise ValueError(f"drafter: target_layer_ids names layer {layer_idx}, whose output no part gives")
    if len(set(layers)) != len(layers):
        raise ValueError("drafter: target_layer_ids names a layer twice")
    expected = _expected(manifest, drafter)
    for part in drafter.parts:
        takes, gives = expected[part.role]
        _check(part, "takes", part.inputs, takes)
        _check(part, "gives", part.outputs, gives)


def _expected(manifest: Manifest, drafter: Drafter) -> dict[str, tuple[Declared, Declared]]:
    """What each part takes and gives, by role. The caches are what the context part says they are."""
    hidden, vocab, block = manifest.model.hidden_size, manifest.model.vocab_size, drafter.block_size
    sizes = _cache_sizes(drafter)
    reads: Declared = {"layer_outputs": ("float32", [1, "T", hidden * len(drafter.target_layer_ids)])}
    reads["position_ids"] = ("int64", [1, "T"])
    keeps: Declared = {name: ("float32", [1, "T", size]) for name, size in sizes.items()}
    slots: Declared = {name: ("float32", [1, "P", size]) for name, size in sizes.items()}
    slots |= {"input_ids": ("int64", [1, block]), "position_ids": ("int64", [1, block]), "logit_rows": ("int64", ["R"])}
    rows: Declared = {"base_logits": ("float32", ["R", vocab]), "slot_hidden": ("float32", ["R", hidden])}
    row: Declared = {"base_logits": ("float32", [1, vocab]), "slot_hidden": ("float32", [1, hidden])}
    row["token_id"] = ("int64", [1])
    chosen: Declared = {"logits": ("float32", [1, vocab])}
    if drafter.has_confidence:
        chosen["confidence"] = ("float32", [1])
    return {"drafter_context": (reads, keeps), "drafter_block": (slots, rows), "drafter_markov": (row, chosen)}


def _cache_sizes(drafter: Drafter) -> dict[str, int]:
    """The values of a token in each cache."""
    sizes: dict[str, int] = {}
    for value in drafter.part("drafter_context").outputs:
        size = value.shape[-1] if value.shape else None
        if not isinstance(size, int) or not 0 < size < LARGEST_ROW:
            raise ValueError(f"drafter: shape {value.shape} of cache {value.name!r} is not [1, 'T', size]")
        sizes[value.name] = size
    return sizes


def _check(part: Part, verb: str, values: list[Value], expected: Declared) -> None:
    found = {value.name: (value.dtype, value.shape) for value in values}
    for name, (dtype, shape) in expected.items():
        if name not in found:
            raise ValueError(f"drafter: part {part.name!r} {verb} no {name!r}")
        if found[name] != (dtype, shape):
            type_and_shape = f"{found[name][0]} {found[name][1]}"
            raise ValueError(f"drafter: {name!r} of part {part.name!r} is {type_and_shape}, expected {dtype} {shape}")
    if surplus := sorted(set(found) - set(expected)):
        raise ValueError(f"drafter: part {part.name!r} {verb} {surplus[0]!r}, which no host knows")
