"""Whether a manifest's twins fit the parts that they stand for: what they take and give, and the caches they read.

It reads no model. All errors are ValueError in one line, since pydantic asks for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lesonnx.manifest import Manifest, Part, Twin, Twins, Value

Shape = tuple[str, list[int | str]]
LOGITS_PREFIX, LOGITS_OF_ROUTER = "logits_", "router_logits"


def rows_name(output: str) -> str:
    """The output of a twin that holds the step's rows of the state whose part calls its output so."""
    return f"{output}_rows"


def check_twins(manifest: Manifest, twins: Twins) -> None:
    """ValueError for twins that no host could use in their parts' places."""
    parts = {part.name: part for part in manifest.parts}
    segments = [part.name for part in manifest.parts if part.role == "segment"]
    if [selection.part for selection in twins.selections] != segments:
        raise ValueError("twins: every segment needs its selection, in the order of the segments")
    given: dict[str, Shape] = {value.name: (value.dtype, value.shape) for value in twins.positions.outputs}
    for value in twins.positions.inputs:
        if value.name not in ("position_ids", "total_sequence_length"):
            raise ValueError(f"twins: positions takes {value.name!r}, which no host has for it")
    for twin in twins.parts:
        part = parts.get(twin.part)
        if part is None or part.role not in ("segment", "head") or (part.role == "head" and twin.rows != 1):
            raise ValueError(f"twins: {twin.part!r} with {twin.rows} rows is no twin of a segment or of the head")
        _check_twin(manifest, twins, twin, part, given)
    for rows in {twin.rows for twin in twins.parts}:
        if missing := [name for name in segments if twins.of(name, rows) is None]:
            raise ValueError(f"twins: {missing[0]!r} has none of {rows} rows")
    for name, rows in {(twin.part, twin.rows) for twin in twins.parts}:
        if sum((twin.part, twin.rows) == (name, rows) for twin in twins.parts) > 1:
            raise ValueError(f"twins: {name!r} has two of {rows} rows")
    for selection in twins.selections:
        _check_selection(twins, selection.part, selection.inputs, selection.outputs, parts[selection.part])


def _fixed(shape: list[int | str], rows: int, capacity: int) -> list[int | str]:
    known = {"T": rows, "S": capacity, "R": 1}
    return [known.get(size, size) if isinstance(size, str) else size for size in shape]


def _check_twin(manifest: Manifest, twins: Twins, twin: Twin, part: Part, positions: Mapping[str, Shape]) -> None:
    """A twin takes what its part or positions has for it; and gives what its part gives, or what a host knows."""

    def fixed(dtype: str, shape: list[int | str]) -> Shape:
        return dtype, _fixed(shape, twin.rows, twins.capacity_tokens)

    states = [state for state in manifest.states if state.part == part.name]
    if other := next((state for state in states if not state.is_attention), None):
        raise ValueError(f"twins: state {other.name!r} of part {part.name!r} is no attention cache")
    takes = {value.name: fixed(value.dtype, value.shape) for value in part.inputs}
    takes |= {name: fixed(*shape) for name, shape in positions.items()}
    gives = {value.name: fixed(value.dtype, value.shape) for value in part.outputs}
    gives |= {rows_name(s.output): (s.dtype, [twin.rows if n == "S" else n for n in s.shape]) for s in states}
    for values, known in ((twin.inputs, takes), (twin.outputs, gives)):
        for value in values:
            if not all(isinstance(size, int) and size > 0 for size in value.shape):
                raise ValueError(f"twins: shape {value.shape} of {value.name!r} of {twin.path!r} is not fixed")
            if value.name in known and known[value.name] != (value.dtype, value.shape):
                dtype, shape = known[value.name]
                raise ValueError(
                    f"twins: {value.name!r} of {twin.path!r} is {value.dtype} {value.shape}, expected {dtype} {shape}"
                )
    for value in twin.inputs:
        if value.name not in takes:
            raise ValueError(f"twins: {twin.path!r} takes {value.name!r}, which neither its part nor positions has")
    names = [value.name for value in twin.outputs]
    needed = [rows_name(state.output) for state in states]
    needed += ["residual_out", "moe_input"] if part.role == "segment" else []
    if missing := next((name for name in needed if name not in names), None):
        raise ValueError(f"twins: {twin.path!r} does not give {missing!r}")
    pieces = [value for value in twin.outputs if value.name.startswith(LOGITS_PREFIX)]
    if part.role == "head" and sum(_size(value) for value in pieces) != manifest.model.vocab_size:
        raise ValueError(f"twins: the pieces of logits of {twin.path!r} are not {manifest.model.vocab_size} in all")


def _check_selection(twins: Twins, name: str, inputs: Iterable[Value], outputs: Iterable[Value], part: Part) -> None:
    """A selection takes what every twin of its segment ends at, and gives what the segment gives of its router."""
    for twin in (twin for twin in twins.parts if twin.part == name):
        given = {value.name: (value.dtype, value.shape) for value in twin.outputs}
        for value in inputs:
            if given.get(value.name) != (value.dtype, _fixed(value.shape, twin.rows, twins.capacity_tokens)):
                raise ValueError(
                    f"twins: the selection of {name!r} takes {value.name!r}, unlike what {twin.path!r} gives"
                )
    expected = {value.name: value for value in part.outputs}
    for value in outputs:
        if value.name not in expected or expected[value.name].shape != value.shape:
            raise ValueError(f"twins: the selection of {name!r} gives {value.name!r}, which its segment does not")
    needed = {"topk_ids", "topk_weights_out", "shared_weights_out", "router_scores"} & set(expected)
    if missing := needed - {value.name for value in outputs}:
        raise ValueError(f"twins: the selection of {name!r} does not give {min(missing)!r}")


def _size(value: Value) -> int:
    return int(value.shape[-1])
