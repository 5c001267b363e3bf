"""A host without threads for the scheduler: carries actions out in any order, and checks what must always hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from lesonnx.schedule import Action, Cancel, Compute, Evict, LayerShape, Load, Promote
from lesonnx.scheduler import Scheduler


class Violation(AssertionError):
    """Something that must always hold did not."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


class AuditingHost:
    """Carries out the actions of one scheduler and keeps its own account of memory.

    ``choose(n)`` picks one of n things that may happen next; ``fails(expert)`` says whether a read fails.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        budget_bytes: int,
        choose: Callable[[int], int],
        fails: Callable[[int], bool] = lambda expert: False,
        read_us: Callable[[int], int] = lambda expert: 1000,
    ) -> None:
        self.scheduler = scheduler
        self.budget_bytes = budget_bytes
        self.choose = choose
        self.fails = fails
        self.read_us = read_us
        self.cost: list[int] = []
        for shape in scheduler.layers:
            self.cost += [shape.cost_bytes] * shape.num_experts
            self.cost += [shape.shared_cost_bytes] * (shape.shared_cost_bytes > 0)
        self.loading: list[int] = []
        self.resident: set[int] = set()
        self.where: dict[int, tuple[int, int]] = {}
        self.required: set[int] = set()
        self.compute: list[tuple[int, ...]] = []
        self.computed: list[int] = []
        self.speculative: set[int] = set()
        self.failing = -1  # the expert whose read failed last
        self.log: list[tuple[str, tuple[Any, ...], list[Action]]] = []

    # ---- events

    def send(self, name: str, *arguments: Any) -> list[Action]:
        actions: list[Action] = getattr(self.scheduler, name)(*arguments)
        self.log.append((name, arguments, actions))
        self.apply(actions)
        return actions

    def apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Load):
                self._load(action)
            elif isinstance(action, Evict):
                check(action.expert in self.resident, f"evicted {action.expert}, which is not resident")
                check(action.expert not in self.required, f"evicted {action.expert}, which is required")
                self.resident.remove(action.expert)
                del self.where[action.expert]
            elif isinstance(action, Compute):
                check(bool(action.experts), "an empty batch")
                for expert in action.experts:
                    check(expert in self.resident, f"compute of {expert}, which is not resident")
                    check(expert in self.required, f"compute of {expert}, which is not required")
                    check(all(expert not in batch for batch in self.compute), f"{expert} given out twice")
                self.compute.append(action.experts)
            elif isinstance(action, Promote):
                self.speculative.discard(action.expert)
            elif isinstance(action, Cancel):
                check(action.expert not in self.required, f"cancelled {action.expert}, which is required")
        self.check_memory()

    def _load(self, load: Load) -> None:
        expert = load.expert
        again = expert in self.where and expert not in self.resident  # the second try of a failed read
        check(expert not in self.loading, f"{expert} is read twice at once")
        check(expert not in self.resident, f"{expert} is read though resident")
        check(load.lookahead or expert in self.required or self.scheduler.config.resident, f"{expert} is not required")
        place = (load.slab, load.offset_bytes)
        check(not again or self.where[expert] == place, f"{expert} moved")
        self.where[expert] = place
        self.loading.append(expert)
        if load.lookahead:
            self.speculative.add(expert)
        check(len(self.loading) <= self.scheduler.config.max_loads, "too many loads at once")
        ahead = sum(expert in self.speculative for expert in self.loading)
        check(ahead <= self.scheduler.config.lookahead_loads, "too many lookahead loads at once")

    def check_memory(self) -> None:
        held = sum(self.cost[expert] for expert in self.where)
        check(held <= self.budget_bytes, f"{held} bytes held, budget {self.budget_bytes}")
        slabs = self.scheduler.slabs()
        spans = sorted((*place, place[1] + self.cost[expert]) for expert, place in self.where.items())
        for slab, start, end in spans:
            check(start >= 0 and start % 4096 == 0, "a place off the page grid")
            check(end <= slabs[slab].length_bytes <= self.scheduler.config.slab_bytes, "a place beyond its slab")
        for (slab, _, end), (next_slab, start, _) in itertools.pairwise(spans):
            check(slab != next_slab or end <= start, "two experts overlap")

    # ---- what may happen next

    def happen(self) -> bool:
        """Let one pending thing happen: a read ends or a batch is computed. False if nothing is pending."""
        pending = len(self.loading) + bool(self.compute)
        if not pending:
            return False
        pick = int(self.choose(pending))
        if pick < len(self.loading):
            self.end_read(self.loading[pick])
        else:
            self.end_compute()
        return True

    def end_read(self, expert: int) -> None:
        self.loading.remove(expert)
        if self.fails(expert):
            ahead = expert in self.speculative
            if ahead:
                self.speculative.discard(expert)
                del self.where[expert]
            self.failing = expert
            self.send("load_failed", expert)
            return
        self.speculative.discard(expert)
        self.resident.add(expert)
        self.send("loaded", expert, self.read_us(expert))

    def end_compute(self) -> None:
        batch = self.compute.pop(0)
        self.required.difference_update(batch)
        self.computed += batch
        self.send("computed", list(batch))

    # ---- a layer from route to end_layer

    def expected(self, layer: int, rows: Sequence[Sequence[int]]) -> set[int]:
        shape: LayerShape = self.scheduler.layers[layer]
        first = self.scheduler.first[layer]
        shared = {first + shape.num_experts} if shape.shared_cost_bytes else set()
        return {first + n for row in rows for n in row} | shared

    def run_layer(
        self, layer: int, rows: Sequence[Sequence[int]], before_each: Callable[[], None] | None = None
    ) -> None:
        self.required = self.expected(layer, rows)
        expected = set(self.required)
        self.computed = []
        self.send("route", layer, rows)
        while self.required:
            if before_each:
                before_each()
            check(self.happen(), f"nothing is pending, but {sorted(self.required)} are required")
        check(sorted(self.computed) == sorted(expected), "not every required expert was computed exactly once")
        self.send("end_layer")
