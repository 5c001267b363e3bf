"""Which experts are in memory when: the ``on-demand`` and ``resident`` schedules.

They know the bundle's sizes and the engine's interface, not how an expert is stored or computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lesonnx.bundle import Bundle, ExpertRef
from lesonnx.engines import ExpertEngine, ExpertJob
from lesonnx.errors import BudgetError, LesonnxError, LoadError

SCHEDULES = ("on-demand", "resident")


@dataclass
class Telemetry:
    """Counts and times since the last reset."""

    loads: int = 0
    hits: int = 0
    read_bytes: int = 0
    load_ms: float = 0.0
    expert_ms: float = 0.0
    dense_ms: float = 0.0

    def reset(self) -> None:
        """Begin to count anew."""
        for entry in fields(self):
            setattr(self, entry.name, entry.default)


@dataclass
class LayerRequest:
    """What one layer's router asked for.

    Routed jobs write their rows of ``expert_out`` [T,k,H], the shared one ``shared_out`` [T,H].
    """

    layer_idx: int
    routed: list[ExpertJob]
    shared: ExpertJob | None
    hidden: NDArray[np.float32]
    expert_out: NDArray[np.float32]
    shared_out: NDArray[np.float32] | None

    @property
    def jobs(self) -> list[ExpertJob]:
        return [*([self.shared] if self.shared else []), *self.routed]


class Schedule(Protocol):
    """Carries a layer's request out: every required expert is loaded and computed, exactly once a request."""

    telemetry: Telemetry
    expert_budget_bytes: int

    def start(self) -> None:
        """What is done before the first token."""

    def pressure(self, expert_budget_bytes: int) -> None:
        """The expert budget is another from here on; between two layers only. BudgetError where it is too small."""

    def run_layer(self, request: LayerRequest) -> None:
        """Load and compute a layer's experts."""

    def close(self) -> None:
        """Free what is loaded."""


def jobs_of(layer_idx: int, topk_ids: NDArray[np.int64]) -> list[ExpertJob]:
    """The experts that a router's ids [T,k] ask for, in the order of their index, each with its rows."""
    flat = topk_ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    experts, starts = np.unique(flat[order], return_index=True)
    rows = np.split(order, starts[1:])
    return [
        ExpertJob(ExpertRef(layer_idx, int(expert_idx)), places)
        for expert_idx, places in zip(experts, rows, strict=True)
    ]


def load_twice(engine: ExpertEngine, ref: ExpertRef) -> int:
    """Load an expert, once more where it fails; LoadError when it fails again."""
    try:
        return engine.load(ref)
    except (OSError, LesonnxError):
        try:
            return engine.load(ref)
        except (OSError, LesonnxError) as error:
            raise LoadError(f"{ref} cannot be loaded: {error}") from None


@dataclass
class OnDemand:
    """Nothing is kept: a layer's experts are loaded one after another, computed, forgotten; in waves if need be.

    A wave holds as many experts as the budget does, each with all its rows, so a budget never changes the arithmetic.
    """

    bundle: Bundle
    engine: ExpertEngine
    expert_budget_bytes: int
    telemetry: Telemetry = field(default_factory=Telemetry)

    def start(self) -> None:
        check_budget(self.bundle, self.expert_budget_bytes)

    def pressure(self, expert_budget_bytes: int) -> None:
        check_budget(self.bundle, expert_budget_bytes)
        self.expert_budget_bytes = expert_budget_bytes

    def run_layer(self, request: LayerRequest) -> None:
        for wave in self._waves(request.jobs):
            began = time.perf_counter()
            for job in wave:
                self.telemetry.read_bytes += load_twice(self.engine, job.ref)
            loaded = time.perf_counter()
            compute(self.engine, wave, request)
            for job in wave:
                self.engine.evict(job.ref)
            self.telemetry.loads += len(wave)
            self.telemetry.load_ms += (loaded - began) * 1e3
            self.telemetry.expert_ms += (time.perf_counter() - loaded) * 1e3

    def _waves(self, jobs: list[ExpertJob]) -> Iterator[list[ExpertJob]]:
        wave: list[ExpertJob] = []
        left = self.expert_budget_bytes
        for job in jobs:
            cost = self.bundle.kind(job.ref).cost_bytes
            if wave and cost > left:
                yield wave
                wave, left = [], self.expert_budget_bytes
            wave.append(job)
            left -= cost
        if wave:
            yield wave

    def close(self) -> None:
        self.engine.close()


@dataclass
class Resident:
    """Everything is loaded before the first token and kept."""

    bundle: Bundle
    engine: ExpertEngine
    expert_budget_bytes: int
    telemetry: Telemetry = field(default_factory=Telemetry)

    def pressure(self, expert_budget_bytes: int) -> None:
        if expert_budget_bytes < self.bundle.expert_bytes:
            raise BudgetError(
                f"schedule resident keeps all experts, {self.bundle.expert_bytes:,} bytes;"
                f" the expert budget is {expert_budget_bytes:,}"
            )

    def start(self) -> None:
        self.pressure(self.expert_budget_bytes)
        began = time.perf_counter()
        for ref in self.bundle.experts():
            self.telemetry.read_bytes += load_twice(self.engine, ref)
            self.telemetry.loads += 1
        self.telemetry.load_ms += (time.perf_counter() - began) * 1e3

    def run_layer(self, request: LayerRequest) -> None:
        began = time.perf_counter()
        compute(self.engine, request.jobs, request)
        self.telemetry.hits += len(request.jobs)
        self.telemetry.expert_ms += (time.perf_counter() - began) * 1e3

    def close(self) -> None:
        self.engine.close()


def compute(engine: ExpertEngine, jobs: Iterable[ExpertJob], request: LayerRequest) -> None:
    """Compute loaded experts of a request, the shared one into its own output."""
    routed = [job for job in jobs if job.ref.expert_idx is not None]
    if request.shared is not None and request.shared in jobs and request.shared_out is not None:
        engine.compute([request.shared], request.hidden, request.shared_out[:, None])
    if routed:
        engine.compute(routed, request.hidden, request.expert_out)


def check_budget(bundle: Bundle, expert_budget_bytes: int) -> None:
    """BudgetError under the least budget: the largest layer's k experts and its shared one."""
    least = bundle.least_budget_bytes
    if expert_budget_bytes < least:
        raise BudgetError(f"the expert budget is {expert_budget_bytes:,} bytes, this bundle needs at least {least:,}")


def make_schedule(name: str, bundle: Bundle, engine: ExpertEngine, expert_budget_bytes: int) -> OnDemand | Resident:
    """The schedule of that name."""
    return (Resident if name == "resident" else OnDemand)(bundle, engine, expert_budget_bytes)
