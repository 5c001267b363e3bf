"""The scheduler once more, written from ``docs/scheduler.md`` alone: plain lists, full searches, no cleverness.

It shows that the text suffices for the Kotlin and Swift schedulers, and checks the quick one: both must replay the
golden traces. It trusts its events.
"""

from __future__ import annotations

from math import lcm
from typing import Any

ONE = 1 << 14
ABSENT, QUEUED, LOADING, RESIDENT = range(4)
PAGE = 4096


class ReadFailed(Exception):
    """The second failure in a row."""


class Slots:
    def __init__(self, layers: list[dict[str, int]], budget: int, slab_bytes: int) -> None:
        costs = [s["cost_bytes"] for s in layers] + [s["shared_cost_bytes"] for s in layers if s["shared_cost_bytes"]]
        self.sizes = sorted(set(costs))
        self.routed = [sum(s["num_experts"] for s in layers if s["cost_bytes"] == size) for size in self.sizes]
        self.pinned = [sum(s["shared_cost_bytes"] == size for s in layers) for size in self.sizes]
        self.at_once = max(s["num_experts_per_tok"] for s in layers)
        self.most = budget
        self.first = self.plan(budget)
        self.limit = list(self.first)
        self.per_slab = [slab_bytes // size for size in self.sizes]
        self.free = [[(c, i) for i in reversed(range(n))] for c, n in enumerate(self.first)]
        self.held: set[tuple[int, int]] = set()

    def plan(self, budget: int) -> list[int]:
        pages, sizes = budget // PAGE, [size // PAGE for size in self.sizes]
        largest = max(c for c in range(len(sizes)) if self.routed[c])
        for pinned in (self.pinned, [min(1, n) for n in self.pinned]):
            slots = list(pinned)
            slots[largest] += min(self.at_once, self.routed[largest])
            rest = pages - sum(a * b for a, b in zip(slots, sizes, strict=True))
            if rest >= 0:
                break
        else:
            return [0] * (len(sizes) - 1) + [min(pages // sizes[-1], sum(self.routed) + sum(self.pinned))]
        missing = [r + p - n for r, p, n in zip(self.routed, self.pinned, slots, strict=True)]
        total = sum(a * b for a, b in zip(missing, sizes, strict=True))
        left = rest
        for c, size in enumerate(sizes):
            more = min(missing[c], rest * missing[c] // total) if total else 0
            slots[c], missing[c], left = slots[c] + more, missing[c] - more, left - more * size
        for c in reversed(range(len(sizes))):
            more = min(missing[c], left // sizes[c])
            slots[c], left = slots[c] + more, left - more * sizes[c]
        return slots

    def resize(self, budget: int) -> None:
        self.limit = [min(a, b) for a, b in zip(self.plan(min(budget, self.most)), self.first, strict=True)]
        for c, end in enumerate(self.limit):
            kept = [slot for slot in self.free[c] if slot[1] < end]
            back = [(c, i) for i in reversed(range(end)) if (c, i) not in kept and (c, i) not in self.held]
            self.free[c] = back + kept

    def gone(self, slot: tuple[int, int]) -> bool:
        return slot[1] >= self.limit[slot[0]]

    def take(self, size_class: int) -> tuple[int, int]:
        slot = next(free for free in self.free[size_class:] if free).pop()
        self.held.add(slot)
        return slot

    def give_back(self, slot: tuple[int, int]) -> None:
        self.held.discard(slot)
        if not self.gone(slot):
            self.free[slot[0]].append(slot)

    def place(self, slot: tuple[int, int]) -> tuple[int, int]:
        c, i = slot
        before = sum(-(-self.first[b] // self.per_slab[b]) for b in range(c))
        return before + i // self.per_slab[c], i % self.per_slab[c] * self.sizes[c]


class PlainScheduler:
    def __init__(self, layers: list[dict[str, int]], budget: int, config: dict[str, Any]) -> None:
        self.layers, self.config, self.count = layers, config, len(layers)
        self.layer_of: list[int] = []
        self.first: list[int] = []
        self.cost: list[int] = []
        for n, shape in enumerate(layers):
            self.first.append(len(self.cost))
            new = [shape["cost_bytes"]] * shape["num_experts"]
            new += [shape["shared_cost_bytes"]] if shape["shared_cost_bytes"] else []
            self.cost += new
            self.layer_of += [n] * len(new)
        self.slots = Slots(layers, budget, min(config["slab_bytes"], 1 << 30))
        self.slot: dict[int, tuple[int, int]] = {}
        self.state = [ABSENT] * len(self.cost)
        self.value = [0] * len(self.cost)
        self.tables: list[list[list[int]]] = []
        for n, shape in enumerate(layers):
            e, k = shape["num_experts"], shape["num_experts_per_tok"]
            if shape["shared_cost_bytes"]:
                self.value[self.first[n] + e] = 1 << 42
            self.tables.append([[0] * e for _ in range(e + 1)] + [[ONE * k // e] * e])
        self.before: list[list[int]] = [[] for _ in layers]
        self.scale = lcm(*(s["num_experts_per_tok"] for s in layers))
        self.price = max(1, 4 * self.scale * ONE // (20 * self.count))
        self.last_use = [[0] * s["num_experts"] for s in layers]
        self.uses = [[0] * s["num_experts"] for s in layers]
        self.visit, self.visited = 0, [n + 1 - self.count for n in range(self.count)]
        self.odds = [
            [[10240] * (k := s["num_experts_per_tok"]) + [4096] * ((k + 1) // 2) for _ in range(2)] for s in layers
        ]
        self.named: list[list[list[tuple[int, int]]]] = [[] for _ in layers]
        self.level, self.usual = 64, 0
        self.cap = config["lookahead_bytes"] or 8 * max(s["cost_bytes"] for s in layers)
        self.rows = self.drafts = 0
        self.draft_rows: list[list[list[int]]] = [[] for _ in layers]
        self.required: set[int] = set()
        self.ready: list[int] = []
        self.computing: set[int] = set()
        self.demand: list[int] = []
        self.wanted: list[int] = []
        self.loading: dict[int, str] = {}
        self.beside: dict[int, bool] = {}
        self.ahead: list[set[int]] = [set() for _ in layers]
        self.failed: set[int] = set()
        self.preload = list(range(len(self.cost))) if config["resident"] else []
        self.out: list[list[Any]] = []

    # ---- events

    def begin_step(self, rows: int, drafts: int) -> None:
        self.rows, self.drafts = rows, drafts
        self.draft_rows = [[] for _ in self.layers]

    def route(self, layer: int, expert_ids: list[list[int]]) -> None:
        shape, first = self.layers[layer], self.first[layer]
        used = expert_ids[0] if len(expert_ids) == 1 else sorted({e for row in expert_ids for e in row})
        chosen = [first + e for e in used]
        if shape["shared_cost_bytes"]:
            chosen.append(first + shape["num_experts"])
        self.visit += 1
        self.visited[layer] = self.visit
        self.required = set(chosen)
        certain = expert_ids[: max(0, len(expert_ids) - self.drafts)]
        self.draft_rows[layer] = expert_ids[len(certain) :]
        self.learn(layer, certain)
        if self.config["lookahead"]:
            if self.visit % 64 == 0:
                self.level = min(64, self.level + 1)
            for odds, named in zip(self.odds[layer], self.named[layer], strict=False):
                for e, rank in named:
                    odds[rank] += ((ONE if e in used else 0) - odds[rank]) >> 4
            self.named[layer] = []
            for expert in [x for x in self.wanted if self.layer_of[x] == layer]:
                self.unqueue(expert)
                self.out.append(["promote" if expert in self.required else "cancel", expert])
            for expert in sorted(self.ahead[layer]):
                self.judge(1 if expert in self.required else -1)
            self.ahead[layer] = set()
        for expert in chosen:
            if self.state[expert] == RESIDENT:
                self.ready.append(expert)
            elif self.state[expert] == LOADING:
                if self.loading[expert] == "lookahead":
                    self.loading[expert] = "demand"
                    self.out.append(["promote", expert])
            else:
                self.state[expert] = QUEUED
                self.demand.append(expert)

    def predict(self, layer: int, scores: list[list[int]]) -> None:
        if not self.config["lookahead"]:
            return
        shape, first = self.layers[layer], self.first[layer]
        k = shape["num_experts_per_tok"]
        ranks = min(shape["num_experts"], k + (k + 1) // 2)
        best: dict[int, int] = {}
        for row in scores[-32:]:
            for rank, e in enumerate(sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:ranks]):  # type: ignore[misc]
                best[e] = min(rank, best.get(e, rank))
        old = [x for x in self.wanted if self.layer_of[x] == layer]
        for expert in old:
            self.unqueue(expert)
        named = [
            (e, rank)
            for e, rank in sorted(best.items(), key=lambda item: (item[1], item[0]))
            if self.state[first + e] != RESIDENT or first + e in self.ahead[layer]
        ]
        moment = min(len(self.named[layer]), 1)
        self.named[layer][moment:] = [named]
        new: list[int] = []
        worst = self.worst(first)
        for e, rank in named:
            odds, expert = self.odds[layer][moment][rank], first + e
            if odds < self.config["lookahead_odds"] or self.state[expert] != ABSENT:
                continue
            under_way = sum(self.cost[x] for x in [*self.wanted, *new])
            under_way += sum(self.cost[x] for x, kind in self.loading.items() if kind == "lookahead")
            if under_way + self.cost[expert] > self.cap * self.level // 64:
                break
            value = self.predicted(layer, odds)
            if worst is None or (worst >= 0 and self.value[worst] >= value):
                continue
            self.state[expert], self.value[expert] = QUEUED, value
            new.append(expert)
        self.out += [["cancel", expert] for expert in old if expert not in new]
        place = 0
        while place < len(self.wanted) and self.visited[self.layer_of[self.wanted[place]]] <= self.visited[layer]:
            place += 1
        self.wanted[place:place] = new

    def loaded(self, expert: int, read_us: int) -> None:
        del self.loading[expert]
        self.state[expert] = RESIDENT
        self.failed.discard(expert)
        beside = self.beside.pop(expert, None)
        if beside is not None:
            speed = (read_us << 20) // self.cost[expert]
            if not beside:
                self.usual = self.usual + ((speed - self.usual) >> 4) if self.usual else speed
            elif self.usual and speed > 2 * self.usual:
                self.level = max(0, self.level - 2)
        if expert in self.required:
            self.ready.append(expert)
        else:
            self.let_go(expert)

    def load_failed(self, expert: int) -> None:
        self.beside.pop(expert, None)
        if self.loading.pop(expert) == "lookahead":
            self.free(expert)
            self.out.append(["cancel", expert])
            return
        if expert in self.failed:
            self.free(expert)
            raise ReadFailed
        self.failed.add(expert)
        self.loading[expert] = "demand"
        self.out.append(["load", expert, "demand", *self.slots.place(self.slot[expert])])

    def computed(self, experts: list[int]) -> None:
        self.computing -= set(experts)
        self.required -= set(experts)
        for expert in experts:
            self.let_go(expert)

    def end_layer(self) -> None:
        pass

    def accept(self, rows: list[int]) -> None:
        for layer, drafts in enumerate(self.draft_rows):
            before = self.rows - len(drafts)
            self.learn(layer, [drafts[row - before] for row in rows if row >= before], only_if_any=True)

    def pressure(self, budget_bytes: int) -> None:
        self.slots.resize(budget_bytes)
        for expert in range(len(self.cost)):
            if self.evictable(expert) and self.slots.gone(self.slot[expert]):
                self.evict(expert)

    # ---- the common end

    def advance(self) -> None:
        config = self.config
        while len(self.loading) < config["max_loads"]:
            ahead = sum(kind == "lookahead" for kind in self.loading.values())
            if self.demand:
                if not self.start(self.demand[0], "demand"):
                    break
                del self.demand[0]
            elif self.wanted and ahead < config["lookahead_loads"]:
                expert = self.wanted[0]
                if self.start(expert, "lookahead"):
                    del self.wanted[0]
                else:
                    self.unqueue(expert)
                    self.out.append(["cancel", expert])
            elif self.preload:
                expert = self.preload.pop(0)
                if self.state[expert] == ABSENT:
                    self.start(expert, "demand")
            else:
                break
        whole = len(self.ready) == len(self.required) or not self.loading
        if self.ready and not self.computing and (config["compute_first"] or whole):
            self.out.append(["compute", *self.ready])
            self.computing = set(self.ready)
            self.ready = []

    def start(self, expert: int, kind: str) -> bool:
        worst = self.worst(expert)
        if worst is None:
            return False
        if worst >= 0:
            if kind == "lookahead" and self.value[worst] >= self.value[expert]:
                return False
            self.evict(worst)
        if kind == "lookahead":
            self.ahead[self.layer_of[expert]].add(expert)
        else:
            self.beside[expert] = "lookahead" in self.loading.values()
        self.slot[expert] = self.slots.take(self.slots.sizes.index(self.cost[expert]))
        self.state[expert] = LOADING
        self.loading[expert] = kind
        self.out.append(["load", expert, kind, *self.slots.place(self.slot[expert])])
        return True

    # ---- memory and worth

    def evictable(self, expert: int) -> bool:
        return self.state[expert] == RESIDENT and expert not in self.required

    def worst(self, expert: int) -> int | None:
        """-1: a slot is free; None: nothing may be evicted."""
        size_class = self.slots.sizes.index(self.cost[expert])
        if any(self.slots.free[size_class:]):
            return -1
        fits = [x for x in range(len(self.cost)) if self.evictable(x) and self.slot[x][0] >= size_class]
        return min(fits, key=lambda x: (self.value[x], x), default=None)

    def let_go(self, expert: int) -> None:
        if not self.config["retain"] or self.slots.gone(self.slot[expert]):
            self.evict(expert)

    def evict(self, expert: int) -> None:
        self.free(expert)
        self.out.append(["evict", expert])

    def free(self, expert: int) -> None:
        self.slots.give_back(self.slot.pop(expert))
        self.state[expert] = ABSENT
        if expert in self.ahead[self.layer_of[expert]]:
            self.ahead[self.layer_of[expert]].remove(expert)
            self.judge(-1)

    def unqueue(self, expert: int) -> None:
        self.wanted.remove(expert)
        self.state[expert] = ABSENT

    def judge(self, step: int) -> None:
        self.level = max(0, min(64, self.level + step))

    def learn(self, layer: int, rows: list[list[int]], only_if_any: bool = False) -> None:
        if only_if_any and not rows:
            return
        table, e = self.tables[layer], self.layers[layer]["num_experts"]
        for row in rows:
            for expert in row:
                self.last_use[layer][expert] = self.visited[layer]
                self.uses[layer][expert] += 1
        for row in rows[-64:]:
            for f, shift in [*((f, 3) for f in self.before[layer]), (e, 1), (e + 1, 4)]:
                for x in range(e):
                    table[f][x] += ((ONE if x in row else 0) - table[f][x]) >> shift
            self.before[layer] = row
        k = self.layers[layer]["num_experts_per_tok"]
        for x in range(e):
            les = sum(2 * self.scale // k * table[f][x] for f in self.before[layer])
            les += self.scale * (table[e][x] + table[e + 1][x]) - self.price * (self.visited[layer] + self.count)
            by = {"les": les, "lru": self.last_use[layer][x], "lfu": self.uses[layer][x]}
            self.value[self.first[layer] + x] = by[self.config["policy"]]

    def predicted(self, layer: int, odds: int) -> int:
        les = 4 * self.scale * odds - self.price * (self.visited[layer] + self.count)
        return {"les": les, "lru": self.visit, "lfu": 1 << 42}[self.config["policy"]]

    # ---- traces

    def answer(self, event: dict[str, Any]) -> dict[str, Any]:
        arguments = {key: value for key, value in event.items() if key not in ("event", "actions", "error")}
        self.out = []
        try:
            getattr(self, event["event"])(**arguments)
        except ReadFailed:
            return {"event": event["event"], **arguments, "error": "load"}
        repeated = event["event"] == "load_failed" and bool(self.out) and self.out[0][0] == "load"
        if not repeated and event["event"] not in ("end_layer", "accept"):
            self.advance()
        return {"event": event["event"], **arguments, "actions": self.out}
