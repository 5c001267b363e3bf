"""Write the golden traces that the schedulers of all three languages replay: ``tests/data/traces/*.json``.

Run from the project's root: ``python tools/make_golden_traces.py [DIRECTORY]``. The same seeds give the same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the checking host lives beside the tests

from golden_traces import FORMAT, end_state, write_action, write_event  # noqa: E402
from scheduler_host import AuditingHost  # noqa: E402

from lesonnx.errors import LoadError  # noqa: E402
from lesonnx.lookahead import fixed_scores  # noqa: E402
from lesonnx.schedule import ON_DEMAND, LayerShape, SchedulerConfig  # noqa: E402
from lesonnx.scheduler import Scheduler  # noqa: E402

PAGE = 4096


@dataclass
class Scenario:
    """One trace. ``rows``: the rows of a step, chosen by the step's number; ``recall``: of 10 scores, how many tell."""

    layers: list[LayerShape]
    budget_bytes: int
    config: SchedulerConfig
    steps: int
    rows: Callable[[int], int] = lambda step: 9 if step == 0 else 1
    drafts: bool = False
    recall: int = 8
    failure: float = 0.0
    fatal_step: int = -1
    budgets: list[int] = field(default_factory=list)
    slow_from: int = 1 << 30


def shape(num_experts: int = 12, per_tok: int = 3, pages: int = 2, shared: int = 0) -> LayerShape:
    return LayerShape(num_experts, per_tok, pages * PAGE, shared * PAGE)


def total(layers: list[LayerShape]) -> int:
    return sum(s.num_experts * s.cost_bytes + s.shared_cost_bytes for s in layers)


def scenarios() -> dict[str, Scenario]:
    plain = [shape()] * 5
    mixed = [shape(pages=2, shared=1), shape(pages=5, shared=1), shape(pages=3, shared=1), shape(pages=2, shared=4)]
    uneven = [shape(8, 2), shape(16, 4), shape(12, 4), shape(5, 1)]
    les = SchedulerConfig(max_loads=2, lookahead_loads=1)
    deep = SchedulerConfig(max_loads=3, lookahead_loads=2, lookahead_odds=6000)
    off = SchedulerConfig(max_loads=3, lookahead=False)
    half = total(plain) // 2
    return {
        "les_decode": Scenario(plain, half, les, 16),
        "les_two_ahead_of_uneven_layers": Scenario(uneven, total(uneven) * 2 // 5, deep, 14),
        "least_budget_in_waves": Scenario(plain, 3 * 2 * PAGE, deep, 8, lambda step: 12 if step % 3 == 0 else 1),
        "several_sizes_and_shared_experts": Scenario(
            mixed, total(mixed) // 2, SchedulerConfig(max_loads=3, lookahead_loads=2, slab_bytes=24 * PAGE), 10
        ),
        "shared_experts_at_a_small_budget": Scenario(mixed, 20 * PAGE, deep, 8, lambda step: 1 + step % 3),
        "drafts_and_accept": Scenario(plain, half, les, 12, lambda step: 9 if step == 0 else 1 + step % 5, drafts=True),
        "pressure": Scenario(
            mixed,
            total(mixed) * 2 // 3,
            deep,
            12,
            budgets=[60, 44, 24, 90, 33, 140, 50],
            rows=lambda step: 1 + step % 2,
        ),
        "failures": Scenario(plain, half, deep, 10, failure=0.25, fatal_step=9),
        "poor_predictions_and_slow_reads": Scenario(
            [shape(10, 2)] * 4, 26 * PAGE, deep, 36, lambda step: 1, recall=1, slow_from=12
        ),
        "lru": Scenario(plain, half, SchedulerConfig(policy="lru", max_loads=2), 12),
        "lfu": Scenario(plain, half, SchedulerConfig(policy="lfu", max_loads=2), 12),
        "without_compute_first": Scenario(
            plain,
            5 * 2 * PAGE,
            SchedulerConfig(max_loads=2, compute_first=False, lookahead=False),
            10,
            lambda step: 1 + step % 4,
        ),
        "on_demand": Scenario(plain, half, ON_DEMAND, 6, lambda step: 4 if step == 0 else 1),
        "resident": Scenario(plain, total(plain), SchedulerConfig(max_loads=3, lookahead=False, resident=True), 6),
        "les_without_lookahead": Scenario(uneven, total(uneven) // 2, off, 14),
    }


class Run:
    """Plays a scenario; every choice comes from one seeded generator."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.random = random.Random(seed)
        self.step = 0
        self.failed: set[int] = set()
        scheduler = Scheduler(scenario.layers, scenario.budget_bytes, scenario.config)
        self.host = AuditingHost(scheduler, scenario.budget_bytes, self.random.randrange, self.fails, self.read_us)
        self.error: dict[str, Any] | None = None

    def fails(self, expert: int) -> bool:
        fatal = self.step == self.scenario.fatal_step
        if expert in self.failed and not fatal:
            self.failed.discard(expert)
            return False
        if fatal or self.random.random() < self.scenario.failure:
            self.failed.add(expert)
            return True
        return False

    def read_us(self, expert: int) -> int:
        slow = self.step >= self.scenario.slow_from and self.random.random() < 0.7
        return self.random.randrange(300, 400) * (4 if slow else 1)

    def routed(self, layer: int, rows: int) -> list[list[int]]:
        """Rows that use some experts more than others, and often the same as the row before."""
        n, k = self.scenario.layers[layer][:2]
        ids: list[list[int]] = []
        for _ in range(rows):
            row: list[int] = []
            while len(row) < k:
                expert = min(self.random.randrange(n), self.random.randrange(n), self.random.randrange(2 * n))
                if ids and self.random.random() < 0.3:
                    expert = ids[-1][len(row)]
                if expert not in row:
                    row.append(expert)
            ids.append(row)
        return ids

    def predict(self, layer: int, rows: list[list[int]]) -> None:
        """Scores that name most of what the rows will use; small integers, so that there are ties."""
        if layer == self.host.scheduler.open_layer:
            return
        scores = np.zeros((len(rows), self.scenario.layers[layer].num_experts), np.int32)
        for number, row in enumerate(rows):
            scores[number] = [self.random.randrange(-20, 12) for _ in range(scores.shape[1])]
            for place, expert in enumerate(row):
                if self.random.randrange(10) < self.scenario.recall:
                    scores[number, expert] = 16 - place
        self.host.send("predict", layer, scores)

    def play(self) -> None:
        scenario, host = self.scenario, self.host
        count = len(scenario.layers)
        plan = [
            [self.routed(layer, scenario.rows(step)) for layer in range(count)] for step in range(scenario.steps + 1)
        ]
        for self.step in range(scenario.steps):
            rows = scenario.rows(self.step)
            drafts = rows - 1 if scenario.drafts and self.step else 0
            host.send("begin_step", rows, drafts)
            for layer in range(count):
                said: list[int] = []

                def ahead(layer: int = layer, said: list[int] = said) -> None:
                    said.append(0)
                    if scenario.config.lookahead and len(said) <= 2:
                        distance = layer + (1 if self.random.random() < 0.8 else 2)
                        self.predict(distance % count, plan[self.step + distance // count][distance % count])
                    elif scenario.budgets and self.random.random() < 0.03:
                        self.squeeze(False)

                host.run_layer(layer, plan[self.step][layer], ahead)
            if drafts:
                host.send("accept", list(range(1 + self.random.randrange(rows))))
            if scenario.budgets:
                self.squeeze(True)

    def squeeze(self, settle: bool) -> None:
        new = self.random.choice(self.scenario.budgets) * PAGE
        self.host.send("pressure", new)
        while settle and self.host.happen():
            pass


def make(name: str, scenario: Scenario) -> str:
    run = Run(scenario, sum(name.encode()))
    host = run.host
    failure = ""
    try:
        run.play()
    except LoadError:
        failure = "load"
    events = [
        {**write_event(event, arguments), "actions": [write_action(action) for action in actions]}
        for event, arguments, actions in host.log
    ]
    if failure:
        events.append({**write_event("load_failed", (host.failing,)), "error": failure})
    head = {
        "format": FORMAT,
        "layers": [layer._asdict() for layer in scenario.layers],
        "budget_bytes": scenario.budget_bytes,
        "config": asdict(scenario.config),
    }
    lines = ",\n".join("  " + json.dumps(event, separators=(",", ":")) for event in events)
    body = json.dumps(head, indent=1)[:-2] + ',\n "events": [\n' + lines + "\n ],\n"
    return body + ' "end": ' + json.dumps(end_state(host.scheduler), separators=(",", ":")) + "\n}\n"


def make_scores() -> str:
    """Float32 scores, by their bits, and the fixed point they become."""
    tiny = [2.0**-21, 3 * 2.0**-21, -(2.0**-21), 2.0**-149]
    values = [0.0, -0.0, 1.0, -1.5, 0.1, -7.25, *tiny, 1023.9999, 1024.0, -5000.0]
    scores = np.array([*values, np.inf, -np.inf, np.nan, *np.random.RandomState(5).normal(0, 4, 40)], np.float32)
    lists = {"float32_bits": scores.view(np.uint32).tolist(), "fixed": fixed_scores(scores[None])[0].tolist()}
    return json.dumps(lists, separators=(",", ":")).replace('],"', '],\n"') + "\n"


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, scenario in scenarios().items():
        (directory / f"{name}.json").write_text(make(name, scenario), encoding="utf-8")
    (directory.parent / "fixed_scores.json").write_text(make_scores(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests" / "data" / "traces")
