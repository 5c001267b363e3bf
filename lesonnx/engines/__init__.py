"""Expert engines: how an expert gets into memory and is computed. Loader and runner know only this interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lesonnx.bundle import Bundle, Expert
from lesonnx.errors import InputError

ENGINES = ("auto", "kernel", "session")
Rows = NDArray[np.int64]


@dataclass(slots=True)
class LayerWork:
    """What a layer's router asked for in one step of T rows.

    ``topk_ids`` int64 [T,k]; ``hidden`` [T,H] is what experts read; a routed expert writes its rows of ``expert_out``
    [T,k,H], the shared one ``shared_out`` [T,H]. ``rows`` gives a routed expert's flat places ``t * k + slot``.
    """

    first: int
    topk_ids: NDArray[np.int64]
    hidden: NDArray[np.float32]
    expert_out: NDArray[np.float32]
    shared_out: NDArray[np.float32]
    rows: dict[int, Rows]

    @classmethod
    def make(
        cls,
        first: int,
        topk_ids: NDArray[np.int64],
        hidden: NDArray[np.float32],
        expert_out: NDArray[np.float32],
        shared_out: NDArray[np.float32],
    ) -> LayerWork:
        """Group the flat places by expert; ``first`` is the number of the layer's first expert."""
        flat = topk_ids.reshape(-1)
        if len(topk_ids) == 1:
            rows = {first + expert_idx: _SINGLE[slot] for slot, expert_idx in enumerate(flat.tolist())}
        elif len(flat) <= _FEW_PLACES:
            places: dict[int, list[int]] = {}
            for place, expert_idx in enumerate(flat.tolist()):
                places.setdefault(first + expert_idx, []).append(place)
            rows = {number: np.array(places[number]) for number in sorted(places)}
        else:
            order = np.argsort(flat, kind="stable")
            experts, starts = np.unique(flat[order], return_index=True)
            pieces = np.split(order, starts[1:])
            rows = dict(zip((experts + first).tolist(), pieces, strict=True))
        return cls(first, topk_ids, hidden, expert_out, shared_out, rows)


# Below so many places plain Python groups faster than NumPy.
_FEW_PLACES = 256
# One row's places, each as an array: made once, since decode needs them for every expert of every token.
_SINGLE = [np.array([slot], np.int64) for slot in range(256)]


class ExpertEngine(Protocol):
    """Loads, computes and evicts experts. ``load`` may run in several threads at once, the rest in one."""

    name: str
    # Why this engine was taken, where that is worth a line to the user.
    notes: list[str]
    # Memory that a byte of experts takes, for a budget of the whole process.
    memory_per_byte: float

    def resize(self, slab_bytes: list[int]) -> None:
        """The cache's slabs by number; a slab that shrinks gives its end back to the system."""

    def load(self, expert: Expert, slab: int, offset_bytes: int) -> int:
        """Bring an expert to its place in the cache; gives the bytes read. OSError or LesonnxError where that fails."""

    def compute(self, experts: list[Expert], work: LayerWork) -> None:
        """Compute loaded experts of one layer."""

    def evict(self, expert: Expert) -> None:
        """Forget a loaded expert: its place may be taken."""

    def close(self) -> None:
        """Forget all."""


def make_engine(name: str, bundle: Bundle, num_threads: int | None = None) -> ExpertEngine:
    """The engine of that name: ``kernel``, ``session`` (plain ONNX Runtime), or ``auto``, the fastest that works here.

    InputError for another name, or for ``kernel`` where its library is not built.
    """
    from lesonnx.engines.kernel import KernelEngine, why_not
    from lesonnx.engines.session import SessionEngine

    if name not in ENGINES:
        raise InputError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
    if name == "session":
        return SessionEngine(bundle)
    reason = why_not(bundle)
    if reason is None:
        return KernelEngine(bundle, num_threads)
    if name == "kernel":
        raise InputError(f"engine kernel cannot be used: {reason}")
    engine = SessionEngine(bundle)
    engine.notes.append(f"engine session is used, since the faster kernel cannot be: {reason}")
    return engine
