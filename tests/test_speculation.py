"""The pure parts of speculative decoding: golden vectors, the meaning of verify, and what pricing must never do."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_traces import answer, make_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from lesonnx.eviction import ONE
from lesonnx.sampling import Logits, Pcg32, Sampler, SamplingOptions
from lesonnx.speculative.drafter import DRAFT_STREAM, Draft, DraftSampler, draw, fixed_confidence
from lesonnx.speculative.ngram import LEAST_MATCH, MOST_CANDIDATES, MOST_MATCH, NgramDrafter
from lesonnx.speculative.pass_times import PassTimes
from lesonnx.speculative.pricing import Pricing
from lesonnx.speculative.verify import verify

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "data" / "speculation.json"
GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))
GREEDY = DraftSampler(Sampler(SamplingOptions()))


def named(section: str) -> Any:
    return pytest.mark.parametrize("case", GOLDEN[section], ids=lambda case: str(case.get("name", case.get("trace"))))


def made_logits(random: Pcg32) -> Logits:
    return np.array([(random.next_u32() >> 17) / 2048 - 8 for _ in range(GOLDEN["vocab_size"])], np.float32)


def test_the_vectors_are_what_the_tool_makes(tmp_path: Path) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "make_speculation_vectors.py"))
    tool["main"](tmp_path / "made.json")
    assert (tmp_path / "made.json").read_bytes() == FILE.read_bytes(), "run tools/make_speculation_vectors.py"


# ---- ngram


@named("ngram")
def test_ngram_golden(case: dict[str, Any]) -> None:
    drafter, sequence = NgramDrafter(), list[int]()
    for call in case["calls"]:
        if "rewind" in call:
            del sequence[call["rewind"] :]
            drafter.rewind(call["rewind"])
        sequence += call["tokens"]
        draft = drafter.propose(sequence, call["max_tokens"], GREEDY)
        assert (list(draft.token_ids), list(draft.confidence or ())) == (call["draft"], call["confidence"])


def plain_lookup(sequence: list[int], count: int) -> list[int]:
    """Prompt lookup word by word: the longest suffix that ends earlier, the most recent of equals."""
    ends = [end for end in range(1, len(sequence) - 1) if sequence[end - 1 : end + 1] == sequence[-2:]]
    best, best_length = None, 0
    for end in sorted(ends, reverse=True)[:MOST_CANDIDATES]:
        length = LEAST_MATCH
        while length < MOST_MATCH and length <= end and sequence[end - length] == sequence[-1 - length]:
            length += 1
        if length > best_length:
            best, best_length = end, length
    if best is None:
        return []
    longer = list(sequence)
    for _ in range(count):
        longer.append(longer[best + 1 + len(longer) - len(sequence)])
    return longer[len(sequence) :]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 3), max_size=80), st.integers(1, 15))
def test_ngram_is_its_definition(sequence: list[int], count: int) -> None:
    drafter, grown = NgramDrafter(), list[int]()
    for token in sequence:
        grown.append(token)
        assert list(drafter.propose(grown, count, GREEDY).token_ids) == plain_lookup(grown, count)


# ---- draws and verify


@named("draft_sampler")
def test_draft_sampler_golden(case: dict[str, Any]) -> None:
    sampler = Sampler(SamplingOptions(**case["options"]))
    sampler.accept_all(case["accept"])
    random, draft_sampler = Pcg32(case["logits_seed"], 1), DraftSampler(sampler)
    for tokens in case["drafts"]:
        with draft_sampler:
            assert [draft_sampler.choose(made_logits(random))[0] for _ in tokens] == tokens
    assert sampler.sample(made_logits(random)) == case["then"]


@named("verify")
def test_verify_golden(case: dict[str, Any]) -> None:
    sampler = Sampler(SamplingOptions(**case["options"]))
    sampler.accept_all(case["accept"])
    random = Pcg32(case["logits_seed"], 1)
    logits = np.stack([made_logits(random) for _ in range(len(case["draft"]) + 1)])
    drawn = case["probabilities"]
    draft = Draft(case["draft"], drawn and [(np.array(ids, np.int64), np.array(q)) for ids, q in drawn])
    found = verify(draft, logits, sampler, case["ends"])
    assert (found.token_ids, found.accepted) == (case["token_ids"], case["accepted"])
    assert sampler.rng.next_u32() == case["next_u32"]


@pytest.mark.parametrize(
    "options",
    [{}, {"repetition_penalty": 1.4}, {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 5}],
)
def test_chosen_drafts_give_the_tokens_of_plain_sampling(options: dict[str, Any]) -> None:
    """Whatever is drafted: the same tokens, the same draws, row for row."""
    noise = np.random.default_rng(3)
    for _ in range(200):
        logits = noise.normal(0, 2, (6, 9)).astype(np.float32)
        plain, drafting = (Sampler(SamplingOptions(**options)) for _ in range(2))
        expected = []
        for row in logits:
            expected.append(plain.sample(row))
            plain.accept(expected[-1])
        drafted = [token if noise.random() < 0.7 else int(noise.integers(9)) for token in expected[:5]]
        found = verify(Draft(drafted), logits, drafting)
        assert found.token_ids == expected[: len(found.token_ids)]
        matching = next((slot for slot in range(5) if drafted[slot] != expected[slot]), 5)
        assert (found.accepted, len(found.token_ids)) == (matching, matching + 1)
        # The penalty has forgotten the drafts, and no draw was made for rows behind.
        fresh = Sampler(SamplingOptions(**options))
        for row, token in zip(logits, found.token_ids, strict=False):
            assert fresh.sample(row) == token
            fresh.accept(token)
        assert drafting.rng.next_u32() == fresh.rng.next_u32()


def test_verified_tokens_have_the_targets_distribution() -> None:
    """10^5 drafts of one token over four, with q far from p: the token that comes has p, by chi-square."""
    draws = 100_000
    target = np.array([[1.2, 0.1, -0.6, -3.0]] * 2, np.float32)
    sampler = Sampler(SamplingOptions(temperature=1.0, seed=17))
    proposal = sampler.distribution(np.array([-0.4, 0.9, 0.3, -1.0], np.float32))
    draft_random = Pcg32(17, DRAFT_STREAM)
    counts = [0] * 4
    accepted = 0
    for _ in range(draws):
        # Every token ends: no draw of a bonus token.
        found = verify(Draft([draw(proposal, draft_random)], [proposal]), target, sampler, range(4))
        counts[found.token_ids[0]] += 1
        accepted += found.accepted
    p, q = (dict(zip(ids.tolist(), values, strict=True)) for ids, values in (sampler.distribution(target[0]), proposal))
    # 16.27: one in a thousand for three degrees of freedom; the seed is fixed.
    assert sum((counts[token] - draws * p[token]) ** 2 / (draws * p[token]) for token in range(4)) < 16.27
    # And drafts are accepted as often as can be: the overlap of p and q.
    assert accepted / draws == pytest.approx(sum(min(p[token], q[token]) for token in range(4)), abs=0.006)


# ---- pricing


@named("pricing")
def test_pricing_golden(case: dict[str, Any]) -> None:
    pricing = Pricing()
    for number, turn in enumerate(case["turns"]):
        confidence, new_bytes = turn["confidence"], turn["new_bytes"]
        assert pricing.may_draft == turn["may_draft"], number
        assert pricing.ask(turn["most"], case["is_free"], new_bytes) == turn["asked"], number
        chosen = pricing.choose(turn["drafted"], confidence, case["is_free"], case["is_drawn"], new_bytes)
        assert chosen == turn["chosen"], number
        times = [turn[name] for name in ("pass_us", "stall_us", "read_bytes")]
        pricing.passed(chosen + 1, *times, new_bytes, turn["new_tokens"], turn["draft_us"])
        if turn["judged"]:
            pricing.judge(turn["judged"], turn["accepted"], confidence)
        slot, odds = turn["odds"]
        value, by_confidence = turn["confidence_odds"]
        rows, extra_bytes, us = turn["expected_us"]
        assert pricing.acceptance.odds(slot, None) == odds, number
        assert pricing.acceptance.odds(0, [value]) == by_confidence, number
        assert pricing.times.pass_us(rows, extra_bytes) == us, number


@named("new_bytes")
def test_new_bytes_golden(case: dict[str, Any]) -> None:
    trace = json.loads((ROOT / "tests" / "data" / "traces" / case["trace"]).read_text(encoding="utf-8"))
    scheduler = make_scheduler(trace)
    for event in trace["events"]:
        answer(scheduler, event)
    assert scheduler.expected_new_bytes(case["rows"]) == case["result"]


def simulate(
    passes: int, first_row_us: int, row_us: int, odds: float, draft_us: int | None, seed: int
) -> tuple[float, int]:
    """How much faster than plain decoding under the same hiccups, and passes with drafts; a machine and a drafter."""
    random, pricing = np.random.default_rng(seed), Pricing()
    took_us, plain_took_us, drafting, most, plain_us = 0.0, 0.0, 0, 15, 5000
    for _ in range(passes):
        asked = pricing.ask(most, draft_us is None, []) if pricing.may_draft or draft_us is None else 0
        drafted = most if asked else 0
        length = pricing.choose(drafted, None, draft_us is None, False, []) if pricing.may_draft else 0
        accepted = 0
        while accepted < length and random.random() < odds:
            accepted += 1
        hiccup = random.uniform(0.9, 1.1) * (4 if random.random() < 0.02 else 1)
        us = int((plain_us + (first_row_us + row_us * (length - 1) if length else 0)) * hiccup)
        paid_us = draft_us if draft_us is not None and asked else None
        pricing.passed(length + 1, us, 0, 0, [], accepted + 1, paid_us)
        if length:
            pricing.judge(length, accepted, None)
        elif drafted:
            pricing.judge(1, int(random.random() < odds), None)
        took_us += us + (paid_us or 0)
        plain_took_us += (accepted + 1) * plain_us * hiccup
        drafting += length > 0
    return plain_took_us / took_us, drafting


@pytest.mark.parametrize("draft_us", [None, 2500])
@pytest.mark.parametrize("odds", [0.0, 0.1, 0.5])
def test_drafting_that_cannot_pay_costs_next_to_nothing(odds: float, draft_us: int | None) -> None:
    """A row that costs as much as a pass: whatever the drafter, little more than one part in a hundred is lost."""
    found = [simulate(600, 5000, 5000, odds, draft_us, seed) for seed in range(5)]
    assert np.mean([ratio for ratio, _ in found]) > 0.985
    assert max(drafting for _, drafting in found) < 25


@pytest.mark.parametrize("odds", [0.3, 0.4, 0.5])
def test_drafts_that_hardly_pay_lose_nothing(odds: float) -> None:
    """What one draft gains is what its row costs, or less: choices by rough figures must not add up to a loss."""
    ratios = [simulate(400, 2250, 700, odds, None, seed)[0] for seed in range(5)]
    assert np.mean(ratios) > 0.99
    assert min(ratios) > 0.975


def test_a_few_quick_passes_of_two_rows_do_not_make_wide_ones_free() -> None:
    times = PassTimes()
    for _ in range(3):
        times.took(1, 1000, 0, 0, [])
    times.took(2, 900, 0, 0, [])
    assert times.pass_us(12) > 4000
    for _ in range(2):
        times.took(2, 900, 0, 0, [])
    assert times.pass_us(12) > 2000
    for _ in range(3):
        times.took(12, 2800, 0, 0, [])
    # What was seen three times is believed, whatever narrow passes took.
    assert times.pass_us(12) == pytest.approx(2800, rel=0.01)
    # And a width between them is not dearer than the wider one.
    assert times.pass_us(11) <= times.pass_us(12)


def test_wide_passes_are_not_thought_free_in_the_long_run() -> None:
    """Every other draft is right and rows are cheap: two rows pay, twelve do not."""
    ratios = [simulate(300, 750, 750, 0.5, None, seed)[0] for seed in range(20)]
    assert min(ratios) > 1.0
    assert np.mean(ratios) > 1.2


def test_what_is_slow_twice_in_a_row_is_the_drafts_own() -> None:
    """Waits that vary, for bytes foretold too low, hide what rows cost: three passes each, so drafts always lose."""
    ratios = []
    for seed in range(8):
        random, pricing, took_us, num_tokens = np.random.default_rng(seed), Pricing(), 0, 0
        while num_tokens < 1500:
            pricing.ask(15, True, [])
            new_bytes = [100] * 16
            length = pricing.choose(15, None, True, False, new_bytes) if pricing.may_draft else 0
            us = 1000 * (1 + 3 * length)
            pricing.judge(max(length, 1), max(length, 1), None)
            waited_us = int(us * random.uniform(0.1, 0.9))
            pricing.passed(length + 1, us, waited_us, 3000 * (length + 1), new_bytes, length + 1, None)
            took_us += us
            num_tokens += length + 1
        ratios.append(1000 * num_tokens / took_us)
    assert min(ratios) > 0.94
    assert np.mean(ratios) > 0.96


def test_a_drafter_that_is_paid_and_then_not_believed_is_not_asked_for_long() -> None:
    """Drafts are right as often as not, so worth asking for; its confidence is low, so none is verified."""
    pricing, asked = Pricing(), 0
    for _ in range(600):
        wanted = pricing.ask(5, False, [])
        length = pricing.choose(5, [0] * 5, False, False, []) if wanted else 0
        pricing.passed(length + 1, 5000, 0, 0, [], 1, 3000 if wanted else None)
        if wanted:
            pricing.judge(1, asked % 2, [0])
            asked += 1
    assert 4 <= asked < 15


def test_drafting_that_pays_is_found_and_kept() -> None:
    for seed in range(5):
        assert simulate(400, 1500, 400, 0.85, None, seed)[0] > 2
        assert simulate(400, 1500, 400, 0.85, 1500, seed)[0] > 1.6


def test_a_drawn_draft_is_cut_at_the_first_drop_and_a_chosen_one_is_not() -> None:
    """A second row is dear, those behind it are free: a choice that may look at all slots goes on to them."""
    pricing = Pricing()
    for _ in range(5):
        pricing.passed(1, 1000, 0, 0, [], 1, None)
    for rows in (2, 8):
        for _ in range(3):
            pricing.passed(rows, 1800, 0, 0, [], 7, None)
    for _ in range(15):
        for right in (1, 1, 1, 0):
            pricing.judge(1, right, [ONE])
    assert pricing.choose(7, [ONE] * 7, True, False, []) == 7
    assert pricing.choose(7, [ONE] * 7, True, True, []) == 0


def test_bytes_that_a_row_adds_shorten_drafts() -> None:
    pricing = Pricing()
    for _ in range(24):
        # A cache that is still cold makes passes wait: nothing is compared with the first of them.
        assert not pricing.may_draft
        pricing.passed(1, 3000, 2000, 1 << 20, [], 1, None)
    for _ in range(30):
        pricing.judge(15, 15, None)
    by_mib = [
        pricing.choose(15, None, True, False, [size * row for row in range(16)]) for size in (0, 1 << 16, 1 << 22)
    ]
    assert by_mib[0] == 15
    assert by_mib[0] > by_mib[1] > by_mib[2]


@pytest.mark.parametrize(("probability", "fixed"), [(0.0, 0), (1.0, ONE), (0.5, ONE // 2), (float("nan"), 0), (2, ONE)])
def test_confidence_is_fixed_point(probability: float, fixed: int) -> None:
    assert fixed_confidence(probability) == fixed
