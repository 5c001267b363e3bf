"""Whether a manifest's drafter fits its model: its parts, what they take and give, and the layers that it reads.

As `wiring`, it reads no model. All errors are ValueError in one line, since pydantic asks for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lesonnx.wiring import LARGEST_ROW

if TYPE_CHECKING:
    from lesonnx.manifest import Drafter, Manifest, Value

ROLES = ("drafter_context", "drafter_block", "drafter_markov")
# What ``target_layer_ids`` calls the embedding's output.
EMBEDDING_IDX = -1
Declared = dict[str, tuple[str, list[int | str]]]


def layer_output_name(layer_idx: int) -> str:
    """What parts call the output of a layer; that of layer -1 is the embedding's."""
    return "hidden" if layer_idx == EMBEDDING_IDX else f"layer_output_{layer_idx}"


def check_drafter(manifest: Manifest, drafter: Drafter) -> None:
    """ValueError for a drafter that no host could run as it is stated."""
    model = manifest.model
    if sorted(part.role for part in drafter.parts) != sorted(ROLES):
        raise ValueError(f"the drafter has exactly one part of each role: {', '.join(ROLES)}")
    if any(part.role in ROLES for part in manifest.parts):
        raise ValueError("the drafter's parts belong into drafter.parts")
    if drafter.mask_token_id >= model.vocab_size:
        raise ValueError(f"drafter: mask_token_id is {drafter.mask_token_id}, expected less than {model.vocab_size}")
    given = {value.name for part in manifest.parts for value in part.outputs}
    for layer_idx in drafter.target_layer_ids:
        if layer_output_name(layer_idx) not in given:
            raise ValueError(f"drafter: target_layer_ids names layer {layer_idx}, whose output no part gives")
    for what, names in (("caches", drafter.caches), ("target_layer_ids", drafter.target_layer_ids)):
        if len(set(names)) != len(names):
            raise ValueError(f"drafter: {what} names one thing twice")
    sizes = _cache_sizes(drafter)
    hidden, vocab, block = model.hidden_size, model.vocab_size, drafter.block_size
    read: Declared = {"layer_outputs": ("float32", [1, "T", hidden * len(drafter.target_layer_ids)])}
    _check(drafter, "drafter_context", "takes", read | {"position_ids": ("int64", [1, "T"])})
    _check(drafter, "drafter_context", "gives", {name: ("float32", [1, "T", size]) for name, size in sizes.items()})
    caches: Declared = {name: ("float32", [1, "C", size]) for name, size in sizes.items()}
    ids: Declared = {"input_ids": ("int64", [1, block]), "position_ids": ("int64", [1, block])}
    _check(drafter, "drafter_block", "takes", ids | {"logit_rows": ("int64", ["R"])} | caches)
    rows: Declared = {"base_logits": ("float32", ["R", vocab]), "slot_hidden": ("float32", ["R", hidden])}
    _check(drafter, "drafter_block", "gives", rows)
    row: Declared = {"base_logits": ("float32", [1, vocab]), "slot_hidden": ("float32", [1, hidden])}
    _check(drafter, "drafter_markov", "takes", row | {"token_id": ("int64", [1])})
    confidence: Declared = {"confidence": ("float32", [1])} if drafter.has_confidence else {}
    _check(drafter, "drafter_markov", "gives", {"logits": ("float32", [1, vocab])} | confidence)


def _cache_sizes(drafter: Drafter) -> dict[str, int]:
    """The values of a token in each cache, as the context part states them."""
    sizes: dict[str, int] = {}
    for value in drafter.part("drafter_context").outputs:
        size = value.shape[-1] if value.shape else None
        if not isinstance(size, int) or not 0 < size < LARGEST_ROW:
            raise ValueError(f"drafter: shape {value.shape} of cache {value.name!r} is not [1, 'T', size]")
        sizes[value.name] = size
    if sorted(sizes) != sorted(drafter.caches):
        raise ValueError(f"drafter: caches are {drafter.caches}, its context part gives {list(sizes)}")
    return sizes


def _check(drafter: Drafter, role: str, verb: str, expected: Declared) -> None:
    part = next(part for part in drafter.parts if part.role == role)
    values: list[Value] = part.inputs if verb == "takes" else part.outputs
    found = {value.name: (value.dtype, value.shape) for value in values}
    for name, (dtype, shape) in expected.items():
        if name not in found:
            raise ValueError(f"drafter: part {part.name!r} {verb} no {name!r}")
        if found[name] != (dtype, shape):
            raise ValueError(
                f"drafter: {name!r} of part {part.name!r} is {found[name][0]} {found[name][1]}, expected {dtype} {shape}"
            )
    if surplus := sorted(set(found) - set(expected)):
        raise ValueError(f"drafter: part {part.name!r} {verb} {surplus[0]!r}, which no host knows")
