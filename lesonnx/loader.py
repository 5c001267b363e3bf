"""The loader: carries the scheduler's actions out with threads that read and a main thread that computes.

It knows the scheduler's events and actions and the engine's interface; it decides nothing itself.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lesonnx.bundle import Bundle
from lesonnx.engines import ExpertEngine, LayerWork
from lesonnx.errors import LesonnxError, LoadError
from lesonnx.lookahead import fixed_scores
from lesonnx.schedule import Action, Compute, Counters, Evict, LayerShape, Load, SchedulerConfig
from lesonnx.scheduler import RESIDENT, Scheduler
from lesonnx.timeline import EXPERTS, LOOKAHEAD, WAITING, Timeline

Scores = NDArray[np.float32]
# Gives router scores [T,E] of the next MoE layer from what is known; ``ready`` bool [T,k] says which rows are written.
Lookahead = Callable[[NDArray[np.bool_]], Scores]


@dataclass
class Telemetry:
    """Counts and times since the last reset. Loads are counted as they end, hits, late and misses a layer and step.

    ``lookahead_ms`` is what the computing thread waited for predictions.
    """

    loads: int = 0
    hits: int = 0
    late: int = 0
    misses: int = 0
    read_bytes: int = 0
    lookahead_loads: int = 0
    lookahead_used: int = 0
    lookahead_wasted: int = 0
    read_ms: float = 0.0
    stall_ms: float = 0.0
    expert_ms: float = 0.0
    lookahead_ms: float = 0.0
    schedule_ms: float = 0.0
    dense_ms: float = 0.0


class ExpertLoader:
    """Runs layers of experts. ``run_layer`` and the other methods belong to the thread that computes.

    The scheduler is called under one lock, by the computing thread and by a reading thread that has finished a load, so
    that the next read starts at once even while a dense part computes.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: ExpertEngine,
        config: SchedulerConfig,
        budget_bytes: int,
        num_loaders: int,
        timeline: Timeline | None = None,
    ) -> None:
        self.timeline = timeline
        self._telemetry = Telemetry()
        self.engine = engine
        self.expert_budget_bytes = budget_bytes
        self.scheduler = Scheduler(layer_shapes(bundle), budget_bytes, config)
        self._experts = bundle.experts
        self.uses_lookahead = config.lookahead
        self.keeps_all = config.resident
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._batches: deque[tuple[int, ...]] = deque()
        self._failure: LesonnxError | None = None
        self._questions: queue.SimpleQueue[tuple[int, Lookahead, NDArray[np.bool_]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._unanswered = 0
        engine.resize(slab_lengths(self.scheduler))
        self._threads = [
            threading.Thread(target=self._read, args=(f"loader {number}",), name=f"loader {number}", daemon=True)
            for number in range(num_loaders)
        ]
        if config.lookahead:
            self._threads.append(threading.Thread(target=self._predict, name="lookahead", daemon=True))
        for thread in self._threads:
            thread.start()

    # -- the computing thread ----------------------------------------------------------------------------------------

    def begin_step(self, num_rows: int, num_drafts: int = 0) -> None:
        """A step of that many rows begins, the last ``num_drafts`` of which may be rejected."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._carry_out(self.scheduler.begin_step(num_rows, num_drafts))

    def run_layer(
        self,
        place: int,
        work: LayerWork,
        lookahead: Lookahead | None,
        before_experts: Callable[[], None] | None = None,
    ) -> None:
        """Load and compute what MoE layer number ``place`` requires; LoadError where an expert cannot be read.

        ``before_experts`` runs while the first loads are under way: what makes the experts' input of a layer whose
        router has spoken before.
        A layer that is broken off (Ctrl-C, an error) leaves experts half loaded: nothing runs after it.
        """
        try:
            self._run_layer(place, work, lookahead, before_experts)
        except BaseException:
            with self._lock:
                self._failure = self._failure or LesonnxError("a step was broken off; load the bundle again")
            raise

    def _run_layer(
        self,
        place: int,
        work: LayerWork,
        lookahead: Lookahead | None,
        before_experts: Callable[[], None] | None,
    ) -> None:
        """Carry a layer out. The next one is predicted twice: before any expert has run, so that reading starts early,
        and again when those in memory have, which sees better. A thread of its own does that, while this one computes.
        """
        telemetry = self._telemetry
        began = time.perf_counter()
        self._await_predictions()
        telemetry.lookahead_ms += (time.perf_counter() - began) * 1e3
        began = time.perf_counter()
        with self._lock:
            before = replace(self.scheduler.counters) if self.timeline else None
            self._carry_out(self.scheduler.route(place, work.topk_ids.tolist()))
        telemetry.schedule_ms += (time.perf_counter() - began) * 1e3
        if self.timeline and before:
            mark_route(self.timeline, place, before, self.scheduler.counters)
        if before_experts is not None:
            began = time.perf_counter()
            before_experts()
            telemetry.dense_ms += (time.perf_counter() - began) * 1e3
        left = len(work.rows) + (self.scheduler.layers[place].shared_cost_bytes > 0)
        ready = np.zeros(work.topk_ids.shape, np.bool_)
        if lookahead is not None:
            self._foresee(place + 1, lookahead, ready)
        sharpened = lookahead is None
        while left:
            batch = self._next_batch()
            began = time.perf_counter()
            self.engine.compute([self._experts[number] for number in batch], work)
            computed = time.perf_counter()
            with self._lock:
                self._carry_out(self.scheduler.computed(batch))
            left -= len(batch)
            telemetry.expert_ms += (computed - began) * 1e3
            if self.timeline:
                self.timeline.span(EXPERTS, f"{len(batch)} of layer {place}", began, computed)
            telemetry.schedule_ms += (time.perf_counter() - computed) * 1e3
            if not sharpened and lookahead is not None:
                sharpened = True
                mark_ready(ready, batch, work)
                self._foresee(place + 1, lookahead, ready)
        with self._lock:
            self._carry_out(self.scheduler.end_layer())

    def _foresee(self, place: int, lookahead: Lookahead, ready: NDArray[np.bool_]) -> None:
        """Have the layer predicted by the thread for it, while this one goes on computing."""
        self._unanswered += 1
        self._questions.put((place, lookahead, ready.copy()))

    def _await_predictions(self) -> None:
        """Wait for what was asked: a prediction may not come after its layer's router has spoken."""
        while self._unanswered:
            problem = self._answers.get()
            self._unanswered -= 1
            if problem is not None:
                raise problem

    def _predict(self) -> None:
        """The predicting thread: one prediction after another.

        What it reads may be half written: rows of experts that are not ``ready`` are left out, and a shared expert's
        only makes the prediction a little better or worse. Nothing but loading depends on it.
        """
        while self._answer_next():
            pass

    def _answer_next(self) -> bool:
        """Answer one question; False at the end. Its names go with it: they hold a step's buffers and states alive."""
        question = self._questions.get()
        if question is None:
            return False
        place, lookahead, ready = question
        problem: Exception | None = None
        try:
            began = time.perf_counter()
            scores = fixed_scores(lookahead(ready))
            if self.timeline:
                self.timeline.span(LOOKAHEAD, f"layer {place}", began, time.perf_counter())
            with self._lock:
                self._carry_out(self.scheduler.predict(place, scores))
        except Exception as error:  # noqa: BLE001  (whatever it is, the computing thread must hear of it)
            problem = error
        # Before the answer: the step that waits for it may give its buffers up at once.
        del question, lookahead
        self._answers.put(problem)
        return True

    def _next_batch(self) -> tuple[int, ...]:
        """What is to be computed next; waits for reads where nothing is."""
        with self._lock:
            if not self._batches:
                began = time.perf_counter()
                while not self._batches and self._failure is None:
                    self._changed.wait()
                ended = time.perf_counter()
                self._telemetry.stall_ms += (ended - began) * 1e3
                if self.timeline:
                    self.timeline.span(WAITING, "waiting", began, ended)
            if self._failure is not None:
                raise self._failure
            return self._batches.popleft()

    def resident(self, place: int) -> list[bool]:
        """Which routed experts of MoE layer number ``place`` are in memory."""
        first, shape = self.scheduler.first[place], self.scheduler.layers[place]
        with self._lock:
            return [self.scheduler.state(first + number) == RESIDENT for number in range(shape.num_experts)]

    def expected_new_bytes(self, rows: int) -> list[int]:
        """For each of the next step's rows the bytes that it is expected to add to what must be loaded."""
        with self._lock:
            return self.scheduler.expected_new_bytes(rows)

    def accept(self, rows: Sequence[int]) -> None:
        """Of the step's rows these stay; what only rejected drafts touched is no use."""
        with self._lock:
            self._carry_out(self.scheduler.accept(rows))

    def pressure(self, expert_budget_bytes: int) -> None:
        """Another expert budget, between two steps. BudgetError where it is too small; nothing changes then."""
        with self._lock:
            self._carry_out(self.scheduler.pressure(expert_budget_bytes))
            while self.scheduler.committed_bytes() > expert_budget_bytes and self._failure is None:
                self._changed.wait()
            self.expert_budget_bytes = expert_budget_bytes
            self.engine.resize(slab_lengths(self.scheduler))

    def reset_telemetry(self) -> None:
        """Begin to count anew."""
        with self._lock:
            self._telemetry = Telemetry()
            self.scheduler.counters = Counters()

    @property
    def telemetry(self) -> Telemetry:
        """Counts and times since the last reset."""
        counters, telemetry = self.scheduler.counters, self._telemetry
        telemetry.hits, telemetry.late, telemetry.misses = counters.hits, counters.late, counters.misses
        telemetry.lookahead_loads = counters.lookahead_loads
        telemetry.lookahead_used, telemetry.lookahead_wasted = counters.lookahead_used, counters.lookahead_wasted
        return telemetry

    def close(self) -> None:
        """End the threads once their reads have, then forget all experts."""
        for _ in self._threads:
            self._loads.put(None)
        self._questions.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self.engine.close()

    # -- both ----------------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action]) -> None:
        """Hand actions on; called with the lock held."""
        for action in actions:
            if isinstance(action, Load):
                self._loads.put(action)
            elif isinstance(action, Evict):
                self.engine.evict(self._experts[action.expert])
            elif isinstance(action, Compute):
                self._batches.append(action.experts)
                self._changed.notify()

    # -- the reading threads -----------------------------------------------------------------------------------------

    def _read(self, lane: str) -> None:
        while (load := self._loads.get()) is not None:
            expert = self._experts[load.expert]
            began = time.perf_counter()
            problem: Exception | None = None
            num_bytes = 0
            try:
                num_bytes = self.engine.load(expert, load.slab, load.offset_bytes)
            except Exception as error:  # noqa: BLE001  (whatever it is, the computing thread must hear of it)
                problem = error
            ended = time.perf_counter()
            read_us = int((ended - began) * 1e6)
            if self.timeline:
                what = "lookahead" if load.lookahead else "demand"
                self.timeline.span(lane, f"{what}: {expert}", began, ended, bytes=num_bytes, failed=problem is not None)
            with self._lock:
                try:
                    if problem is None:
                        self._telemetry.loads += 1
                        self._telemetry.read_bytes += num_bytes
                        self._telemetry.read_ms += read_us / 1e3
                        self._carry_out(self.scheduler.loaded(load.expert, read_us))
                    else:
                        self._carry_out(self.scheduler.load_failed(load.expert))
                except LesonnxError:
                    self._failure = LoadError(f"{expert} cannot be loaded: {problem}")
                self._changed.notify()


def mark_route(timeline: Timeline, place: int, before: Counters, after: Counters) -> None:
    """Mark what a layer's router met: hits, late, misses, and predictions that turned out wasted."""
    for name, count in (
        ("hits", after.hits - before.hits),
        ("late", after.late - before.late),
        ("misses", after.misses - before.misses),
        ("wasted predictions", after.lookahead_wasted - before.lookahead_wasted),
    ):
        if count:
            timeline.mark(EXPERTS, f"{count} {name}", layer=place)


def mark_ready(ready: NDArray[np.bool_], batch: Sequence[int], work: LayerWork) -> None:
    """Set the places of ``ready`` [T,k] whose rows these experts have written."""
    flat = ready.reshape(-1)
    for number in batch:
        rows = work.rows.get(number)
        if rows is not None:
            flat[rows] = True


def layer_shapes(bundle: Bundle) -> list[LayerShape]:
    """The scheduler's view of a bundle: counts and costs, layer by layer."""
    kinds = bundle.manifest.expert_kinds
    return [
        LayerShape(
            layer.num_experts,
            layer.num_experts_per_tok,
            kinds[layer.kind].cost_bytes,
            0 if layer.shared_kind is None else kinds[layer.shared_kind].cost_bytes,
        )
        for layer in bundle.manifest.expert_layers
    ]


def slab_lengths(scheduler: Scheduler) -> list[int]:
    """The lengths of the cache's slabs, by number."""
    return [slab.length_bytes for slab in scheduler.slabs()]
