"""The scheduler: what must hold for any model, budget, route, prediction, failure and order of loads; its parts."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from golden_traces import write_action, write_event
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_scheduler import PlainScheduler
from scheduler_host import AuditingHost

from lesonnx.errors import BudgetError, InputError, LoadError
from lesonnx.eviction import ONE, LesPolicy, LfuPolicy, LruPolicy, make_policy
from lesonnx.lookahead import FULL, SCORE_LIMIT, Lookahead, fixed_scores
from lesonnx.schedule import Cancel, Compute, Evict, LayerShape, Load, Promote, ScheduleError, SchedulerConfig
from lesonnx.scheduler import ABSENT, QUEUED, RESIDENT, Scheduler

PAGE = 4096
DEMAND_ONLY = SchedulerConfig(lookahead=False)


def least_bytes(layers: list[LayerShape]) -> int:
    return max(s.num_experts_per_tok * s.cost_bytes + s.shared_cost_bytes for s in layers)


def total_bytes(layers: list[LayerShape]) -> int:
    return sum(s.num_experts * s.cost_bytes + s.shared_cost_bytes for s in layers)


@st.composite
def models(draw: st.DrawFn) -> list[LayerShape]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True))
    shared = draw(st.sampled_from([0, 0, 1, 3]))
    per_tok = draw(st.integers(1, 4))
    return [
        LayerShape(
            draw(st.integers(per_tok, 10)),
            per_tok if draw(st.booleans()) else draw(st.integers(1, per_tok)),
            draw(st.sampled_from(sizes)) * PAGE,
            shared * PAGE,
        )
        for _ in range(draw(st.integers(1, 5)))
    ]


configs = st.builds(
    SchedulerConfig,
    policy=st.sampled_from(["lru", "lfu", "les"]),
    max_loads=st.integers(1, 5),
    compute_first=st.booleans(),
    lookahead=st.booleans(),
    lookahead_loads=st.integers(1, 4),
    lookahead_bytes=st.sampled_from([0, 4 * PAGE, 40 * PAGE]),
    lookahead_odds=st.sampled_from([0, ONE // 3, ONE]),
    slab_bytes=st.sampled_from([6 * PAGE, 25 * PAGE, 1 << 30]),
)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), layers=models(), config=configs)
def test_invariants_hold_for_any_run(data: st.DataObject, layers: list[LayerShape], config: SchedulerConfig) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    least, total = least_bytes(layers), total_bytes(layers)
    budget = data.draw(st.integers(least, total + 8 * PAGE))
    if data.draw(st.booleans()):
        config = replace(config, retain=False, lookahead=False)
    elif budget >= total and data.draw(st.booleans()):
        config = replace(config, resident=True)
    failing: set[int] = set()

    def fails(expert: int) -> bool:
        if expert in failing or rng.random() > 0.1:
            failing.discard(expert)
            return False
        failing.add(expert)
        return True

    scheduler = Scheduler(layers, budget, config)
    host = AuditingHost(scheduler, budget, lambda n: int(rng.integers(n)), fails, lambda _: int(rng.integers(1, 9000)))

    def noise() -> None:
        """What may come at any moment: a prediction for another layer, or nothing."""
        layer = int(rng.integers(len(layers)))
        if rng.random() < 0.4 and layer != scheduler.open_layer:
            scores = rng.normal(size=(int(rng.integers(1, 4)), layers[layer].num_experts)).astype(np.float32)
            host.send("predict", layer, fixed_scores(scores))

    for _ in range(data.draw(st.integers(1, 5))):
        rows = int(rng.choice([1, 1, 2, 3, 12]))
        drafts = int(rng.integers(rows))
        host.send("begin_step", rows, drafts)
        for layer, shape in enumerate(layers):
            present = rows if rng.random() < 0.9 else int(rng.integers(1, rows + 1))
            ids = [rng.permutation(shape.num_experts)[: shape.num_experts_per_tok].tolist() for _ in range(present)]
            noise()
            host.run_layer(layer, ids, noise)
            if not config.retain:
                assert not host.resident
        if drafts:
            host.send("accept", list(range(rows - drafts + int(rng.integers(drafts + 1)))))
        if not config.resident and rng.random() < 0.5:
            new = int(rng.integers(least, budget + 1))
            # What is loading cannot be taken back; all else must fit at once, and everything when the reads are done.
            loading = sum(host.cost[expert] for expert in host.loading)
            host.budget_bytes = max(host.budget_bytes, new)
            host.send("pressure", new)
            host.budget_bytes = new + loading
            host.check_memory()
            while host.happen():
                pass
            host.budget_bytes = new
            host.check_memory()
            assert scheduler.committed_bytes() <= new
            assert sum(slab.length_bytes for slab in scheduler.slabs()) <= new
    while host.happen():
        pass
    assert scheduler.counters.lookahead_used + scheduler.counters.lookahead_wasted <= scheduler.counters.lookahead_loads
    # The plain scheduler, which searches where this one keeps order, gives the same actions.
    plain = PlainScheduler([layer._asdict() for layer in layers], budget, asdict(config))
    for event, arguments, actions in host.log:
        written = {**write_event(event, arguments), "actions": [write_action(action) for action in actions]}
        assert plain.answer(written) == written


@settings(max_examples=60, deadline=None)
@given(layers=models(), config=configs, seed=st.integers(0, 2**32 - 1))
def test_pressure_amid_a_layer_is_met_when_it_ends(
    layers: list[LayerShape], config: SchedulerConfig, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    least, total = least_bytes(layers), total_bytes(layers)
    scheduler = Scheduler(layers, total, config)
    host = AuditingHost(scheduler, total, lambda n: int(rng.integers(n)))
    for _ in range(3):
        host.send("begin_step", 4)
        for layer, shape in enumerate(layers):
            new = int(rng.integers(least, total + 1))
            ids = [rng.permutation(shape.num_experts)[: shape.num_experts_per_tok].tolist() for _ in range(4)]
            before = sum(host.cost[expert] for expert in host.where)

            def squeeze(new: int = new, before: int = before) -> None:
                if rng.random() < 0.5:
                    host.send("pressure", new)

            host.run_layer(layer, ids, squeeze)
            host.send("pressure", new)
            while host.happen():
                pass
            host.budget_bytes = new
            host.check_memory()
            assert scheduler.committed_bytes() <= new
            host.budget_bytes = total


@settings(max_examples=60, deadline=None)
@given(layers=models(), config=configs, seed=st.integers(0, 2**32 - 1))
def test_a_read_that_fails_twice_stops_the_run(layers: list[LayerShape], config: SchedulerConfig, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(layers, total_bytes(layers), config)
    host = AuditingHost(scheduler, total_bytes(layers), lambda n: int(rng.integers(n)), lambda expert: True)
    host.send("begin_step", 1)
    with pytest.raises(LoadError, match="could not be read, twice"):
        host.run_layer(0, [list(range(layers[0].num_experts_per_tok))])


@settings(max_examples=30, deadline=None)
@given(layers=models(), config=configs, seed=st.integers(0, 2**32 - 1))
def test_the_same_events_give_the_same_actions(layers: list[LayerShape], config: SchedulerConfig, seed: int) -> None:
    logs = []
    for _ in range(2):
        rng = np.random.default_rng(seed)
        budget = max(least_bytes(layers), total_bytes(layers) // 2)
        host = AuditingHost(Scheduler(layers, budget, config), budget, rng.integers)
        for _ in range(3):
            host.send("begin_step", 2)
            for layer, shape in enumerate(layers):
                ids = [rng.permutation(shape.num_experts)[: shape.num_experts_per_tok].tolist() for _ in range(2)]
                host.run_layer(layer, ids)
        logs.append(host.log)
    assert logs[0] == logs[1]


# ---- single behaviours


def small(budget_experts: int, config: SchedulerConfig = DEMAND_ONLY, num_layers: int = 2) -> Scheduler:
    """Layers of 4 experts of a page each, 2 a token."""
    return Scheduler([LayerShape(4, 2, PAGE)] * num_layers, budget_experts * PAGE, config)


def test_demand_loads_start_up_to_the_limit_and_in_the_routers_order() -> None:
    scheduler = small(4, replace(DEMAND_ONLY, max_loads=1))
    scheduler.begin_step(1)
    assert scheduler.route(0, [[3, 1]]) == [Load(3, False, 0, 0)]
    assert scheduler.state(1) == QUEUED
    assert scheduler.loaded(3, 10) == [Load(1, False, 0, PAGE), Compute((3,))]
    # While a batch is being computed, what arrives waits to make the next one.
    assert scheduler.loaded(1, 10) == []
    assert scheduler.computed([3]) == [Compute((1,))]
    assert scheduler.computed([1]) == []
    assert scheduler.end_layer() == []


def test_without_compute_first_a_layer_is_one_batch() -> None:
    scheduler = small(4, replace(DEMAND_ONLY, compute_first=False))
    scheduler.begin_step(1)
    scheduler.route(0, [[3, 1]])
    assert scheduler.loaded(1, 10) == []
    assert scheduler.loaded(3, 10) == [Compute((1, 3))]


def test_several_rows_load_in_the_order_of_the_pack_and_in_waves() -> None:
    scheduler = small(2)
    scheduler.begin_step(3)
    assert scheduler.route(0, [[3, 1], [0, 2], [1, 0]]) == [Load(0, False, 0, 0), Load(1, False, 0, PAGE)]
    assert scheduler.loaded(0, 1) == [Compute((0,))]
    assert scheduler.loaded(1, 1) == []
    assert scheduler.computed([0]) == [Evict(0), Load(2, False, 0, 0), Compute((1,))]
    assert scheduler.computed([1]) == [Evict(1), Load(3, False, 0, PAGE)]


def test_nothing_is_kept_on_demand() -> None:
    scheduler = small(4, SchedulerConfig("lru", 1, False, False, retain=False))
    scheduler.begin_step(1)
    assert scheduler.route(0, [[0, 1]]) == [Load(0, False, 0, 0)]
    assert scheduler.loaded(0, 1) == [Load(1, False, 0, PAGE)]
    assert scheduler.loaded(1, 1) == [Compute((0, 1))]
    assert scheduler.computed([0, 1]) == [Evict(0), Evict(1)]


def test_resident_loads_everything_and_what_is_required_first() -> None:
    scheduler = small(8, SchedulerConfig(max_loads=1, lookahead=False, resident=True))
    assert scheduler.begin_step(1) == [Load(0, False, 0, 0)]
    assert scheduler.route(0, [[2, 0]]) == []
    order = [scheduler.loaded(0, 1)[0], scheduler.loaded(2, 1)[0], scheduler.loaded(1, 1)[0]]
    assert [load.expert for load in order if isinstance(load, Load)] == [2, 1, 3]
    with pytest.raises(BudgetError, match="all experts in memory need 32768"):
        small(7, SchedulerConfig(resident=True))


def run_layer(scheduler: Scheduler, layer: int, rows: list[list[int]]) -> None:
    scheduler.begin_step(len(rows))
    actions = scheduler.route(layer, rows)
    while actions:
        action = actions.pop(0)
        if isinstance(action, Load):
            actions += scheduler.loaded(action.expert, 1)
        elif isinstance(action, Compute):
            actions += scheduler.computed(action.experts)
    scheduler.end_layer()


def predicted(scheduler: Scheduler, layer: int, *experts: int) -> list[object]:
    scores = np.full((1, scheduler.layers[layer].num_experts), -9.0, np.float32)
    for place, expert in enumerate(experts):
        scores[0, expert] = 9.0 - place
    return list(scheduler.predict(layer, fixed_scores(scores)))


def test_a_prediction_is_queued_promoted_and_cancelled() -> None:
    scheduler = small(8, SchedulerConfig(max_loads=1))
    scheduler.begin_step(1)
    assert predicted(scheduler, 0, 1, 2) == [Load(1, True, 0, 0)]
    assert scheduler.state(2) == QUEUED
    # It replaces the last: what is under way goes on, what is queued and not named again is cancelled.
    assert predicted(scheduler, 0, 3, 0) == [Cancel(2)]
    assert scheduler.state(2) == ABSENT
    assert scheduler.route(0, [[1, 0]]) == [Cancel(3), Promote(0), Promote(1)]
    assert scheduler.counters.late == 1
    assert scheduler.counters.misses == 1
    assert scheduler.counters.lookahead_used == 1
    assert scheduler.loaded(1, 1) == [Load(0, False, 0, PAGE), Compute((1,))]


def test_demand_comes_before_lookahead() -> None:
    scheduler = small(8, SchedulerConfig(max_loads=1))
    scheduler.begin_step(1)
    scheduler.route(0, [[0, 1]])
    assert predicted(scheduler, 1, 2, 3) == []
    assert scheduler.loaded(0, 1) == [Load(1, False, 0, PAGE), Compute((0,))]
    assert scheduler.loaded(1, 1) == [Load(6, True, 0, 2 * PAGE)]


def test_a_prediction_that_fails_is_dropped_and_a_required_expert_is_read_again() -> None:
    scheduler = small(8, SchedulerConfig(max_loads=1))
    scheduler.begin_step(1)
    predicted(scheduler, 0, 1)
    assert scheduler.load_failed(1)[0] == Cancel(1)
    scheduler = small(8)
    scheduler.begin_step(1)
    scheduler.route(0, [[0, 1]])
    assert scheduler.load_failed(1) == [Load(1, False, 0, PAGE)]
    assert scheduler.loaded(1, 5) == [Compute((1,))]


def test_lookahead_never_takes_the_place_of_something_worth_more() -> None:
    scheduler = small(2, SchedulerConfig(max_loads=2))
    for _ in range(12):
        run_layer(scheduler, 0, [[0, 1]])
        run_layer(scheduler, 1, [[0, 1]])
    assert [expert for expert in range(8) if scheduler.state(expert) == RESIDENT] == [4, 5]
    assert predicted(scheduler, 0, 0, 1) == []  # experts 0 and 1 of layer 1 have been used again and again
    run_layer(scheduler, 1, [[2, 3]])  # once, which is little against a prediction
    assert [type(action) for action in predicted(scheduler, 0, 0, 1)] == [Evict, Load]


def test_a_queued_prediction_whose_victim_has_become_worth_more_is_cancelled() -> None:
    scheduler = small(3, SchedulerConfig(max_loads=1), num_layers=20)
    run_layer(scheduler, 0, [[0, 1]])
    assert predicted(scheduler, 1, 2, 3) == [Load(6, True, 0, 2 * PAGE)]
    assert scheduler.state(7) == QUEUED
    for _ in range(12):
        run_layer(scheduler, 0, [[0, 1]])
    assert scheduler.loaded(6, 1) == [Cancel(7)]


def test_drafts_teach_only_when_accepted() -> None:
    kept, dropped = small(8, num_layers=3), small(8, num_layers=3)
    for scheduler, rows in ((kept, [0, 1]), (dropped, [0])):
        scheduler.begin_step(2, drafts=1)
        for layer in (0, 1):
            scheduler.route(layer, [[0, 1], [2, 3]])
            for expert in (0, 1, 2, 3):
                scheduler.loaded(4 * layer + expert, 1)
            scheduler.computed([4 * layer])
            scheduler.computed([4 * layer + 1, 4 * layer + 2, 4 * layer + 3])
            scheduler.end_layer()
        scheduler.accept(rows)
    for scheduler, first in ((kept, 4), (dropped, 6)):
        # The memory is full: of layer 1, whose turn is farthest, the expert that was not used last goes.
        scheduler.begin_step(1)
        actions = scheduler.route(2, [[0, 1]])
        assert next(action.expert for action in actions if isinstance(action, Evict)) == first


@pytest.mark.parametrize(
    "misuse",
    [
        lambda s: s.begin_step(0),
        lambda s: s.begin_step(2, 2),
        lambda s: s.route(0, []),
        lambda s: s.route(0, [[0, 1], [1, 2]]),
        lambda s: s.route(0, [[]]),
        lambda s: s.route(0, [[1, 1]]),
        lambda s: s.route(0, [[1, 4]]),
        lambda s: s.route(0, [[0, 1, 2]]),
        lambda s: s.route(0, [[-1, 2]]),
        lambda s: s.route(2, [[0, 1]]),
        lambda s: s.route(-1, [[0, 1]]),
        lambda s: s.predict(2, np.zeros((1, 4), np.int32)),
        lambda s: s.loaded(0, 1),
        lambda s: s.load_failed(0),
        lambda s: s.computed([0]),
        lambda s: s.end_layer(),
        lambda s: s.accept([1]),
    ],
)
def test_events_that_cannot_happen_are_refused(misuse: object) -> None:
    scheduler = small(4)
    scheduler.begin_step(1)
    with pytest.raises(ScheduleError):
        misuse(scheduler)  # type: ignore[operator]


def test_budgets_and_switches_are_checked() -> None:
    with pytest.raises(BudgetError, match="at least 8192"):
        small(1)
    scheduler = small(4)
    with pytest.raises(BudgetError, match="at least 8192"):
        scheduler.pressure(PAGE)
    with pytest.raises(InputError, match="unknown policy 'fifo'"):
        small(4, SchedulerConfig(policy="fifo"))
    with pytest.raises(ValueError, match="need retain"):
        small(4, SchedulerConfig(retain=False))


# ---- policies


def test_lru_and_lfu_value_by_last_use_and_by_count() -> None:
    lru, lfu = LruPolicy([3], [1]), LfuPolicy([3], [1])
    for clock, rows in ((1, [[0, 1]]), (2, [[1], [1]])):
        lru.learn(0, rows)
        lfu.learn(0, rows)
        values = [lru.values(0, clock).tolist(), lfu.values(0, clock).tolist()]
    assert values == [[1, 2, 0], [1, 3, 0]]


def test_les_averages_are_exact() -> None:
    policy = LesPolicy([3, 3], [1, 1])
    policy.learn(0, [[0], [1]])
    recent = [ONE // 4, ONE // 2, 0]
    lasting = [ONE // 3 + ((ONE - ONE // 3) >> 4), 0, 0]
    lasting[1] = ONE // 3 + ((0 - ONE // 3) >> 4)
    lasting[0] += (0 - lasting[0]) >> 4
    lasting[1] += (ONE - lasting[1]) >> 4
    lasting[2] = ONE // 3 + ((0 - ONE // 3) >> 4)
    lasting[2] += (0 - lasting[2]) >> 4
    price = 4 * ONE // (20 * 2)
    assert policy.values(0, 1).tolist() == [r + s - price * 3 for r, s in zip(recent, lasting, strict=True)]
    # Expert 0 is seen again: what followed it is expected once more.
    before = policy.values(0, 1)[1]
    policy.learn(0, [[0]])
    assert policy.values(0, 1)[1] > before - ONE // 2 + 2 * (ONE >> 3) - ONE // 8


def test_les_prefers_what_is_needed_sooner() -> None:
    policy = make_policy("les", [4, 4, 4], [2, 2, 2])
    for layer in range(3):
        policy.learn(layer, [[0, 1]])
    assert policy.values(0, 1)[0] > policy.values(1, 2)[0] > policy.values(2, 3)[0]
    assert policy.predicted(1, ONE, 2, 1) > policy.predicted(1, ONE // 2, 2, 1)
    assert policy.predicted(1, ONE, 2, 1) > policy.predicted(1, ONE, 3, 1)


# ---- lookahead


def test_scores_become_fixed_point_in_one_way() -> None:
    scores = np.array([[0.0, 1.0, -1.0, 2.0**-21, 3 * 2.0**-21, np.inf, -np.inf, np.nan, 5000.0]], np.float32)
    fixed = fixed_scores(scores)
    assert fixed.dtype == np.int32
    assert fixed.tolist() == [[0, 1 << 20, -(1 << 20), 0, 2, SCORE_LIMIT, -SCORE_LIMIT, -SCORE_LIMIT, SCORE_LIMIT]]


def test_ranks_break_ties_by_index_and_take_the_best_row() -> None:
    lookahead = Lookahead([4], [2])
    assert lookahead.rank(0, np.array([[5, 7, 7, 5]], np.int32)) == [(1, 0), (2, 1), (0, 2)]
    ranked = lookahead.rank(0, np.array([[0, 1, 2, 3], [3, 2, 1, 0]], np.int32))
    assert ranked == [(0, 0), (3, 0), (1, 1), (2, 1)]


def test_odds_are_learned_by_rank_and_moment() -> None:
    lookahead = Lookahead([4, 4], [2, 2])
    ranked = lookahead.rank(0, np.array([[9, 8, 1, 0]], np.int32))
    assert ranked == [(0, 0), (1, 1), (2, 2)]
    first = list(lookahead.note(0, ranked))
    for _ in range(50):
        lookahead.observe(0, [0, 3])
        lookahead.note(0, ranked)
    assert lookahead.note(0, ranked) == first  # a later moment: not yet learned
    lookahead.observe(0, [0, 3])
    odds = lookahead.note(0, [])
    assert odds[0] > ONE * 9 // 10
    assert odds[1] < ONE // 10
    assert lookahead.note(1, []) == first


def test_odds_are_those_of_experts_that_need_a_load() -> None:
    scheduler = small(8, SchedulerConfig(max_loads=1))
    run_layer(scheduler, 1, [[0, 1]])
    # Layer 1 holds experts 0 and 1, always named first and always right; the third is named and always wrong.
    for _ in range(40):
        predicted(scheduler, 1, 0, 1, 2)
        run_layer(scheduler, 1, [[0, 1]])
    assert predicted(scheduler, 1, 2, 0, 1) == [Load(6, True, 0, 2 * PAGE)]  # rank 0 of an absent expert: not yet known


def test_waste_and_slow_reads_turn_speculation_down_and_time_brings_it_back() -> None:
    lookahead = Lookahead([4], [2])
    lookahead.outcome(False)
    assert lookahead.level == FULL - 1
    lookahead.outcome(True)
    assert lookahead.level == FULL
    for _ in range(20):
        lookahead.demand_read(1 << 20, 1000, beside=False)
    lookahead.demand_read(1 << 20, 1900, beside=True)
    assert lookahead.level == FULL
    lookahead.demand_read(1 << 20, 2100, beside=True)
    assert lookahead.level == FULL - 2
    for _ in range(200):
        lookahead.outcome(False)
    assert lookahead.level == 0
    for _ in range(640):
        lookahead.observe(0, [0, 1])
    assert lookahead.level == 10
