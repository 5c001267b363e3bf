"""Expert engines: how an expert gets into memory and is computed. Schedules and runners know only this interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lesonnx.bundle import Bundle, ExpertRef
from lesonnx.errors import InputError

ENGINES = ("auto", "session")

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExpertJob:
    """An expert and the rows of the step that want it.

    ``rows`` int64 [n] are flat places ``token * slots + slot`` of the output; slots is k for routed experts, 1 for a
    shared one.
    """

    ref: ExpertRef
    rows: Rows


class ExpertEngine(Protocol):
    """Loads, computes and evicts experts. ``load`` may run in several threads at once, the rest in one.

    A loaded expert costs ``cost_bytes`` of the cache until it is evicted.
    """

    name: str
    notes: list[str]

    def load(self, ref: ExpertRef) -> int:
        """Bring an expert into memory; gives the bytes read. OSError or BundleError where that fails."""

    def compute(self, jobs: list[ExpertJob], hidden: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Compute loaded experts of one layer: hidden [T,H], each job's rows of out [T,slots,H] are written."""

    def evict(self, ref: ExpertRef) -> None:
        """Forget a loaded expert."""

    def close(self) -> None:
        """Forget all."""


def make_engine(name: str, bundle: Bundle) -> ExpertEngine:
    """The engine of that name: ``session`` (plain ONNX Runtime), or ``auto``, the fastest that works here."""
    from lesonnx.engines.session import SessionEngine

    if name not in ENGINES:
        raise InputError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
    return SessionEngine(bundle)
