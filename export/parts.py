"""Writing the ONNX parts of a bundle that hold weights: one by one into a store, so that a broken export goes on.

It knows stores and the journal; what a part computes it leaves to its builder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx

from lesonnx.errors import InputError
from lesonnx.manifest import Part, State
from lesonnx_export.checkpoint import Weights
from lesonnx_export.contract import VISION_DIRECTORY, WrittenPart
from lesonnx_export.graph import DenseStore, StoredTensor
from lesonnx_export.journal import Journal
from lesonnx_export.plan import ExportOptions, ExportPlan
from lesonnx_export.segments import BuiltPart, PartBuilder
from lesonnx_export.vision.tower import VisionStore

Progress = Callable[[str, int], None]
Build = Callable[[str, DenseStore], BuiltPart]


@dataclass(frozen=True)
class Parts:
    """Parts that share a store: their names in order, where in it each ends, and what builds one.

    ``entry`` is what the journal calls them, ``shown`` what people do.
    """

    entry: str
    shown: str
    directory: str
    store: type[DenseStore]
    names: Sequence[str]
    ends: Sequence[int]
    build: Build


def write_parts(
    plan: ExportPlan, options: ExportOptions, partial: Path, journal: Journal, progress: Progress, weights: Weights
) -> list[WrittenPart]:
    """Write the dense parts in order; parts that the journal holds are taken from there."""
    deepstack_layers = plan.vision.eyes.deepstack_layers if plan.vision else 0

    def build(name: str, store: DenseStore) -> BuiltPart:
        return PartBuilder(plan.architecture, weights, store, options.precision, plan.drafter, deepstack_layers).build(
            name
        )

    dense = Parts("part", "dense parts", "dense", DenseStore, plan.part_names, plan.part_ends, build)
    return _write(dense, partial, journal, progress)


def write_vision(
    plan: ExportPlan, partial: Path, journal: Journal, progress: Progress, weights: Weights
) -> list[WrittenPart]:
    """The same of the parts that take pictures in, where there are any."""
    vision = plan.vision
    if vision is None:
        return []

    def build(name: str, store: DenseStore) -> BuiltPart:
        return vision.eyes.build(name, weights, store, vision.precision)

    names, ends = vision.eyes.names, vision.part_ends
    parts = Parts("vision part", "vision parts", VISION_DIRECTORY, VisionStore, names, ends, build)
    return _write(parts, partial, journal, progress)


def _write(parts: Parts, partial: Path, journal: Journal, progress: Progress) -> list[WrittenPart]:
    directory = partial / parts.directory
    directory.mkdir(parents=True, exist_ok=True)
    entries = journal.entries(parts.entry)
    written = [
        WrittenPart(Part.model_validate(entry["part"]), [State.model_validate(state) for state in entry["states"]])
        for entry in entries
    ]
    start = parts.ends[len(written) - 1] if written else 0
    if start:
        check_length(directory / parts.store.location, start)
    store = parts.store(directory / parts.store.location, start)
    for entry in entries:
        store.shared |= {
            key: StoredTensor(**{**value, "shape": tuple(value["shape"])}) for key, value in entry["shared"].items()
        }
    progress(parts.shown, start)
    try:
        for name in parts.names[len(written) :]:
            before = store.end_bytes
            built = parts.build(name, store)
            save_part(built, partial)
            store.sync()
            journal.add(
                parts.entry,
                store.end_bytes - before,
                part=built.part.model_dump(mode="json"),
                states=[state.model_dump(mode="json") for state in built.states],
                shared={key: asdict(tensor) for key, tensor in store.shared.items()},
            )
            written.append(WrittenPart(built.part, built.states))
            progress(parts.shown, store.end_bytes - before)
    finally:
        store.close()
    return written


def check_length(path: Path, length_bytes: int, exactly: bool = False) -> None:
    """InputError where a file no longer holds what the journal says was finished."""
    found = path.stat().st_size if path.is_file() else 0
    if found < length_bytes or (exactly and found != length_bytes):
        raise InputError(
            f"{path}: has {found:,} bytes, the journal says {length_bytes:,}; export without --resume to begin anew"
        )


def save_part(built: BuiltPart, partial: Path) -> None:
    """Write a part's model beside its weights."""
    path = partial / built.part.path
    with path.open("wb") as file:
        file.write(built.model.SerializeToString())
        file.flush()
        os.fsync(file.fileno())
    # The checker also follows the external data, so a part that names bytes beyond the file ends here.
    onnx.checker.check_model(str(path))
