"""The expert scheduler: events in, actions out. What to load, where to, what to evict, what to compute when.

It knows no threads, clock, files or ONNX Runtime; the host carries actions out and reports events. Everything is
integers and every tie is broken by index, so that the Kotlin and Swift schedulers replay the same golden traces (see
``docs/scheduler.md``). Not thread-safe: the host calls it from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lesonnx.allocator import Slab
from lesonnx.errors import BudgetError, LoadError
from lesonnx.lookahead import FULL, Lookahead
from lesonnx.residency import INDEX_BITS, INDEX_MASK, NONE, Residency
from lesonnx.schedule import (
    Action,
    Cancel,
    Compute,
    Counters,
    Evict,
    LayerShape,
    Load,
    Promote,
    ScheduleError,
    SchedulerConfig,
)

ABSENT, QUEUED, LOADING, RESIDENT = range(4)


class Scheduler:
    """The state machine. Experts are numbered layer by layer: its routed experts, then its shared one.

    A step is ``begin_step``, then for each layer in order ``route``, (``loaded`` and ``computed`` as they come, until
    all required experts are computed), ``end_layer``. ``predict`` may come at any time, ``accept`` after the last
    layer, ``pressure`` best between steps. Each returns the actions it causes, in order.

    Raises BudgetError for a budget below the largest layer's experts of one row.
    """

    def __init__(self, layers: Sequence[LayerShape], budget_bytes: int, config: SchedulerConfig | None = None) -> None:
        self.config = config = config or SchedulerConfig()
        if (config.resident or config.lookahead) and not config.retain:
            raise ValueError("resident experts and lookahead need retain")
        self.layers = list(layers)
        self.counters = Counters()
        self._check_budget(budget_bytes)
        total = sum(s.num_experts * s.cost_bytes + s.shared_cost_bytes for s in layers)
        if config.resident and budget_bytes < total:
            raise BudgetError(f"expert budget of {budget_bytes} bytes: all experts in memory need {total}")
        self._residency = Residency(layers, budget_bytes, config.policy, config.slab_bytes)
        self.first = self._residency.first
        self._layer_of = self._residency.layer_of
        self._cost = self._residency.cost
        self._state = [ABSENT] * len(self._cost)
        per_tok = [shape.num_experts_per_tok for shape in layers]
        self._lookahead = Lookahead([shape.num_experts for shape in layers], per_tok)
        self._lookahead_cap = config.lookahead_bytes or 8 * max(shape.cost_bytes for shape in layers)

        self._clock = 0  # layer visits so far
        self._last_visit = [n + 1 - len(layers) for n in range(len(layers))]  # as if a cycle had just ended
        self._rows = 0
        self._drafts = 0
        self._draft_rows: list[list[list[int]]] = [[] for _ in layers]
        self._open = -1  # the layer between route and end_layer
        self._required: set[int] = set()  # of the open layer, not yet computed
        self._ready: list[int] = []  # resident, required, not given out to compute
        self._computing: set[int] = set()
        self._demand: list[int] = []  # queued, in the order of loading
        self._wanted: list[int] = []  # queued for lookahead, nearest layer first, then best rank; in order of loading
        self._speculative: list[set[int]] = [set() for _ in layers]  # loaded or loading ahead of the layer's visit
        self._loading: dict[int, bool] = {}  # expert -> it is a lookahead load, and not promoted
        self._beside: dict[int, bool] = {}  # demand load -> a speculative load was under way when it began
        self._speculative_loads = 0
        self._speculative_bytes = 0  # queued and loading
        self._failures: set[int] = set()
        self._preload = 0 if config.resident else len(self._cost)

    # ---- what a host may ask

    def slabs(self) -> list[Slab]:
        """The cache's buffers by number; lengths shrink and return with ``pressure``."""
        return self._residency.slabs()

    def committed_bytes(self) -> int:
        """What the slots in force take, and those given up whose expert is still needed; at most the budget once
        nothing is required and nothing is loading."""
        return self._residency.committed_bytes()

    @property
    def open_layer(self) -> int:
        """The layer between ``route`` and ``end_layer``; -1 if there is none."""
        return self._open

    @property
    def num_experts(self) -> int:
        """Experts of all layers together."""
        return len(self._cost)

    @property
    def lookahead_level(self) -> int:
        """How far speculation is turned up, 0 to 64."""
        return self._lookahead.level

    def state(self, expert: int) -> int:
        """``ABSENT``, ``QUEUED``, ``LOADING`` or ``RESIDENT``."""
        return self._state[expert]

    def place(self, expert: int) -> tuple[int, int]:
        """Slab and byte offset of a loading or resident expert."""
        return self._residency.place(expert)

    def expected_new_bytes(self, rows: int) -> list[int]:
        """For each of the next step's ``rows`` the bytes that it is expected to add to what must be loaded."""
        absent = np.array([state != RESIDENT for state in self._state])
        return self._residency.expected_new_bytes(rows, absent)

    # ---- events

    def begin_step(self, rows: int, drafts: int = 0) -> list[Action]:
        """A step of ``rows`` tokens begins, the last ``drafts`` of which may be rejected (see ``accept``)."""
        if self._open >= 0:
            raise ScheduleError(f"begin_step while layer {self._open} is open")
        if not 0 <= drafts < rows:
            raise ScheduleError(f"begin_step of {rows} rows with {drafts} drafts")
        self._rows, self._drafts = rows, drafts
        for layer_rows in self._draft_rows:
            layer_rows.clear()
        return self._advance([])

    def route(self, layer: int, expert_ids: Sequence[Sequence[int]]) -> list[Action]:
        """The router's choice: for each row (the last rows of the step, where a layer computes fewer) its experts."""
        if self._open >= 0 or not 0 < len(expert_ids) <= self._rows or not 0 <= layer < len(self.layers):
            raise ScheduleError(f"route of layer {layer}: {len(expert_ids)} rows of {self._rows}, open {self._open}")
        shape = self.layers[layer]
        first = self.first[layer]
        # One row keeps the router's order, strongest first; several load in the order of the pack.
        used = expert_ids[0] if len(expert_ids) == 1 else sorted(set().union(*expert_ids))
        chosen = [first + n for n in used]
        required = set(chosen)
        if (
            len(required) < len(chosen)
            or not 0 < max(map(len, expert_ids)) <= shape.num_experts_per_tok
            or min(used) < 0
            or max(used) >= shape.num_experts
        ):
            most = shape.num_experts_per_tok
            raise ScheduleError(f"route of layer {layer}: a row names up to {most} experts below {shape.num_experts}")
        if shape.shared_cost_bytes:
            chosen.append(first + shape.num_experts)
            required.add(first + shape.num_experts)
        self._open = layer
        self._clock += 1
        self._last_visit[layer] = self._clock
        self._required = required
        certain = expert_ids
        if self._drafts:
            certain = expert_ids[: max(0, len(expert_ids) - self._drafts)]
            self._draft_rows[layer] = [list(row) for row in expert_ids[len(certain) :]]
        if certain:
            self._residency.policy.learn(layer, certain)
        self._residency.revalue(layer, self._last_visit[layer], self._required)

        actions: list[Action] = []
        if self.config.lookahead:
            self._lookahead.observe(layer, used)
            self._settle_speculation(layer, actions)
        counters = self.counters
        for expert in chosen:
            state = self._state[expert]
            if state == RESIDENT:
                counters.hits += 1
                self._ready.append(expert)
            elif state == LOADING:
                counters.late += 1
                if self._loading[expert]:
                    self._no_longer_speculative(expert)
                    self._loading[expert] = False
                    actions.append(Promote(expert))
            else:
                counters.misses += 1
                self._state[expert] = QUEUED
                self._demand.append(expert)
        return self._advance(actions)

    def predict(self, layer: int, scores: npt.NDArray[np.int32]) -> list[Action]:
        """Fixed-point router scores [T,E] (see ``fixed_scores``) for the layer's next visit; they replace the last."""
        if layer == self._open or not 0 <= layer < len(self.layers):
            raise ScheduleError(f"predict for layer {layer} while layer {self._open} is open")
        if not self.config.lookahead:
            return []
        actions: list[Action] = []
        old = [expert for expert in self._wanted if self._layer_of[expert] == layer] if self._wanted else []
        for expert in old:
            self._unqueue(expert)
        new = self._admit(layer, scores)
        actions += [Cancel(expert) for expert in old if self._state[expert] == ABSENT]
        if not new:
            return actions
        visit = self._next_visit(layer)
        place = 0
        while place < len(self._wanted) and self._next_visit(self._layer_of[self._wanted[place]]) <= visit:
            place += 1
        self._wanted[place:place] = new
        return self._advance(actions)

    def loaded(self, expert: int, read_us: int) -> list[Action]:
        """The expert is in its place; reading it took ``read_us`` microseconds."""
        self._end_load(expert)
        self._state[expert] = RESIDENT
        self._failures.discard(expert)
        beside = self._beside.pop(expert, None)
        if beside is not None:
            self._lookahead.demand_read(self._cost[expert], read_us, beside)
        actions: list[Action] = []
        if expert in self._required:
            self._ready.append(expert)
        else:
            self._let_go(expert, actions)
        return self._advance(actions)

    def load_failed(self, expert: int) -> list[Action]:
        """The read failed. A required expert is read once more, to the same place; a mere prediction is dropped.

        Raises LoadError when an expert fails for the second time in a row.
        """
        speculative = self._end_load(expert)
        self._beside.pop(expert, None)  # a read that was repeated says nothing of speed
        if speculative:
            self._free(expert)
            return self._advance([Cancel(expert)])
        if expert in self._failures:
            self._free(expert)
            layer = self._layer_of[expert]
            raise LoadError(f"expert {expert - self.first[layer]} of MoE layer {layer} could not be read, twice")
        self._failures.add(expert)
        self._loading[expert] = False
        return [Load(expert, False, *self.place(expert))]

    def computed(self, experts: Sequence[int]) -> list[Action]:
        """These experts' rows are written: they are no longer required."""
        if not self._computing.issuperset(experts):
            raise ScheduleError(f"computed {list(experts)}: being computed are {sorted(self._computing)}")
        self._computing.difference_update(experts)
        self._required.difference_update(experts)
        actions: list[Action] = []
        for expert in experts:
            self._let_go(expert, actions)
        return self._advance(actions)

    def end_layer(self) -> list[Action]:
        """The open layer is done."""
        if self._open < 0 or self._required:
            raise ScheduleError(f"end_layer of layer {self._open} while {len(self._required)} experts are required")
        self._open = -1
        return []

    def accept(self, rows: Sequence[int]) -> list[Action]:
        """Of the step's rows these stay (ascending); what only rejected drafts used teaches the policy nothing."""
        if self._open >= 0 or any(not 0 <= row < self._rows for row in rows):
            raise ScheduleError(f"accept of rows {list(rows)} of {self._rows} while layer {self._open} is open")
        for layer, drafts in enumerate(self._draft_rows):
            before = self._rows - len(drafts)
            kept = [drafts[row - before] for row in rows if row >= before]
            if kept:
                self._residency.policy.learn(layer, kept)
                self._residency.revalue(layer, self._last_visit[layer], self._required)
            drafts.clear()
        return []

    def pressure(self, budget_bytes: int) -> list[Action]:
        """A new budget, at most the first one: experts beyond it are evicted, those still needed as soon as possible.

        Raises BudgetError for a budget below the largest layer's experts of one row, changing nothing.
        """
        self._check_budget(budget_bytes)
        actions: list[Action] = []
        for expert in self._residency.resize(budget_bytes):
            self._evict(expert, actions)
        return self._advance(actions)

    # ---- loads

    def _advance(self, actions: list[Action]) -> list[Action]:
        """Start what may start, then give out what is ready; the common end of every event."""
        self._start_loads(actions)
        if (
            self._ready
            and not self._computing
            and (self.config.compute_first or len(self._ready) == len(self._required) or not self._loading)
        ):
            self._computing.update(self._ready)
            actions.append(Compute(tuple(self._ready)))
            self._ready.clear()
        return actions

    def _start_loads(self, actions: list[Action]) -> None:
        config = self.config
        while len(self._loading) < config.max_loads:
            if self._demand:
                expert = self._demand[0]
                if not self._start(expert, NONE, False, actions):
                    return  # everything in memory is required: wait until some of it is computed
                del self._demand[0]
            elif self._wanted and self._speculative_loads < config.lookahead_loads:
                expert = self._wanted[0]
                # Strictly more in value: a prediction must not push out its equal, loaded a moment ago.
                if self._start(expert, self._residency.entry[expert] & ~INDEX_MASK, True, actions):
                    del self._wanted[0]
                else:
                    self._unqueue(expert)
                    actions.append(Cancel(expert))
            elif self._preload < len(self._cost):
                expert, self._preload = self._preload, self._preload + 1
                if self._state[expert] == ABSENT:
                    self._start(expert, NONE, False, actions)
            else:
                return

    def _start(self, expert: int, worth: int, speculative: bool, actions: list[Action]) -> bool:
        """Load the expert if there is a free slot, or one whose expert's entry is below ``worth``."""
        victim = self._residency.worst(expert)
        if victim >= worth:
            return False
        if victim > -NONE:
            self._evict(victim & INDEX_MASK, actions)
        place = self._residency.take(expert)
        self._state[expert] = LOADING
        self._loading[expert] = speculative
        if speculative:
            self._speculative_loads += 1
            self._speculative[self._layer_of[expert]].add(expert)
            self.counters.lookahead_loads += 1
            self.counters.lookahead_bytes += self._cost[expert]
        else:
            self.counters.demand_bytes += self._cost[expert]
            self._beside[expert] = self._speculative_loads > 0
        actions.append(Load(expert, speculative, *place))
        return True

    def _end_load(self, expert: int) -> bool:
        """Take the expert off the loads under way; whether it is a lookahead load."""
        if expert not in self._loading:
            raise ScheduleError(f"expert {expert} is not being loaded")
        speculative = self._loading.pop(expert)
        if speculative:
            self._no_longer_speculative(expert)
        return speculative

    def _no_longer_speculative(self, expert: int) -> None:
        self._speculative_loads -= 1
        self._speculative_bytes -= self._cost[expert]

    # ---- lookahead

    def _admit(self, layer: int, scores: npt.NDArray[np.int32]) -> list[int]:
        """Queue those predicted experts that are absent, likely, within the cap and worth more than their victim."""
        state, first, ahead = self._state, self.first[layer], self._speculative[layer]
        # The odds are those of experts that need a load: what is in memory is there because it is used often.
        absent = [
            (n, rank)
            for n, rank in self._lookahead.rank(layer, scores)
            if state[first + n] != RESIDENT or first + n in ahead
        ]
        odds = self._lookahead.note(layer, absent)
        admitted: list[int] = []
        victim = NONE
        for n, rank in absent:
            expert = first + n
            if odds[rank] < self.config.lookahead_odds or state[expert] != ABSENT:
                continue
            if self._speculative_bytes + self._cost[expert] > self._lookahead_cap * self._lookahead.level // FULL:
                break
            if not admitted:
                victim = self._residency.worst(expert)
            value = self._residency.policy.predicted(layer, odds[rank], self._next_visit(layer), self._clock)
            if victim < value << INDEX_BITS:
                state[expert] = QUEUED
                self._residency.entry[expert] = value << INDEX_BITS | expert
                self._speculative_bytes += self._cost[expert]
                admitted.append(expert)
        return admitted

    def _unqueue(self, expert: int) -> None:
        self._wanted.remove(expert)
        self._state[expert] = ABSENT
        self._speculative_bytes -= self._cost[expert]

    def _settle_speculation(self, layer: int, actions: list[Action]) -> None:
        """The layer's router has spoken: promote or cancel what is queued, and judge what was loaded ahead."""
        for expert in [expert for expert in self._wanted if self._layer_of[expert] == layer]:
            self._unqueue(expert)
            actions.append(Promote(expert) if expert in self._required else Cancel(expert))
        for expert in sorted(self._speculative[layer]):
            self._judge(expert in self._required)
        self._speculative[layer].clear()

    def _judge(self, useful: bool) -> None:
        self._lookahead.outcome(useful)
        if useful:
            self.counters.lookahead_used += 1
        else:
            self.counters.lookahead_wasted += 1

    def _next_visit(self, layer: int) -> int:
        return self._last_visit[layer] + len(self.layers)

    # ---- what is in memory

    def _let_go(self, expert: int, actions: list[Action]) -> None:
        """A resident expert is not required (any more): it may be evicted, at once where it is not to be kept."""
        if self.config.retain and not self._residency.retired(expert):
            self._residency.offer(expert)
        else:
            self._drop(expert, actions)

    def _evict(self, expert: int, actions: list[Action]) -> None:
        self._residency.withdraw(expert)
        self._drop(expert, actions)

    def _drop(self, expert: int, actions: list[Action]) -> None:
        self.counters.evictions += 1
        self._free(expert)
        actions.append(Evict(expert))

    def _free(self, expert: int) -> None:
        """Give up the expert's slot; a load ahead that is given up before its layer came was wasted."""
        self._residency.release(expert)
        self._state[expert] = ABSENT
        speculative = self._speculative[self._layer_of[expert]]
        if expert in speculative:
            speculative.remove(expert)
            self._judge(False)

    def _check_budget(self, budget_bytes: int) -> None:
        least = max(s.num_experts_per_tok * s.cost_bytes + s.shared_cost_bytes for s in self.layers)
        if budget_bytes < least:
            raise BudgetError(f"expert budget of {budget_bytes} bytes: at least {least} are needed")
