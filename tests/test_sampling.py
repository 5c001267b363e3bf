"""Sampling: golden vectors, the meaning of every filter against a plain reference, and the errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lesonnx.errors import InputError, LesonnxError
from lesonnx.sampling import Logits, Pcg32, Sampler, SamplingOptions, exp_non_positive

GOLDEN = json.loads((Path(__file__).parent / "data" / "sampling.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("record", GOLDEN["pcg32"], ids=lambda record: str(record["seed"]))
def test_pcg32_golden(record: dict[str, Any]) -> None:
    random = Pcg32(record["seed"], record["stream"])
    assert [random.next_u32() for _ in record["outputs"]] == record["outputs"]


def test_pcg32_is_the_published_generator() -> None:
    random = Pcg32(42, 54)  # the first outputs that the demonstration program of pcg-c-basic prints
    expected = [0xA15C02B7, 0x7B47F409, 0xBA1D3330, 0x83D2F293, 0xBFA4784B, 0xCBED606E]
    assert [random.next_u32() for _ in expected] == expected


def test_exp_golden() -> None:
    points = np.array([x for x, _ in GOLDEN["exp"]])
    assert exp_non_positive(points).tolist() == [y for _, y in GOLDEN["exp"]]


def scalar_exp(x: float) -> float:
    """The exponential as a mirror in another language writes it, a number at a time."""
    if x < -700:
        return 0.0
    k = math.floor(x * 1.4426950408889634 + 0.5)
    r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    value = 1 / math.factorial(13)
    for power in range(12, -1, -1):
        value = value * r
        value = value + 1 / math.factorial(power)
    return math.ldexp(value, k)


@given(st.lists(st.floats(-800, 0), min_size=1, max_size=40))
def test_exp_is_its_definition_and_close_to_the_true_value(xs: list[float]) -> None:
    got = exp_non_positive(np.array(xs)).tolist()
    assert got == [scalar_exp(x) for x in xs]
    for x, y in zip(xs, got, strict=True):
        assert x < -700 or y == pytest.approx(math.exp(x), rel=5e-16)


def golden_logits(case: dict[str, Any]) -> list[Logits]:
    if "vocab_size" not in case:
        return [
            np.array([-np.inf if value is None else value for value in step["logits"]], np.float32)
            for step in case["steps"]
        ]
    random = Pcg32(case["logits_seed"], 1)
    return [
        np.array([(random.next_u32() >> 17) / 2048 - 8 for _ in range(case["vocab_size"])], np.float32)
        for _ in case["steps"]
    ]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["name"]))
def test_golden_case(case: dict[str, Any]) -> None:
    sampler = Sampler(SamplingOptions(**case["options"]))
    sampler.accept_all(case["accept"])
    for step, logits in zip(case["steps"], golden_logits(case), strict=True):
        if "ids" in step:
            ids, probabilities = sampler.distribution(logits)
            assert (ids.tolist(), probabilities.tolist()) == (step["ids"], step["probabilities"])
        token = sampler.sample(logits)
        assert token == step["token"]
        sampler.accept(token)


def reference(logits: Logits, options: SamplingOptions, seen: set[int]) -> list[tuple[int, float]]:
    """Steps 1 to 6 word by word, without NumPy's help: (id, weight) of what is left, in order."""
    scores = []
    for token, value in enumerate(logits.tolist()):
        if token in seen:
            value = value / options.repetition_penalty if value > 0 else value * options.repetition_penalty
        scores.append(float(np.float32(value)) + 0.0)
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    weight = [scalar_exp((score - max(scores)) / options.temperature) for score in scores]
    total = sum_one_by_one(weight)
    if 0 < options.top_k < len(order):
        order = order[: options.top_k]
        total = sum_one_by_one([weight[token] for token in order])
    if options.top_p < 1:
        kept: list[int] = []
        while len(kept) < len(order) and (
            not kept or sum_one_by_one([weight[token] for token in kept]) < options.top_p * total
        ):
            kept.append(order[len(kept)])
        order = kept
    kept = []
    for token in order:
        if weight[token] < options.min_p or weight[token] == 0:
            break
        kept.append(token)
    return [(token, weight[token]) for token in kept]


def sum_one_by_one(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total = total + value
    return total


OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([1e-300, 0.01, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 8, 1000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    seed=st.integers(0, 2**64 - 1),
)
LOGITS = st.lists(
    st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, -0.0, 1.0, -math.inf])), min_size=1, max_size=300
).filter(lambda values: max(values) > -math.inf)


@settings(deadline=None, max_examples=150)
@given(LOGITS, OPTIONS, st.sets(st.integers(0, 400), max_size=20))
def test_distribution_and_sample_are_their_definition(
    values: list[float], options: SamplingOptions, seen: set[int]
) -> None:
    logits = np.array(values, np.float32)
    before = logits.copy()
    sampler = Sampler(options)
    sampler.accept_all(seen)
    expected = reference(logits, options, seen)
    ids, probabilities = sampler.distribution(logits)
    assert ids.tolist() == [token for token, _ in expected]
    assert (probabilities > 0).all()
    assert sum(probabilities.tolist()) == pytest.approx(1, abs=1e-12)
    on = 0 < options.top_k < len(values) or options.top_p < 1 or options.min_p > 0
    weights = [weight for _, weight in expected]
    kept = sum_one_by_one(weights)
    if not on:
        by_id = dict(expected)
        kept = sum_one_by_one([by_id.get(token, 0.0) for token in range(len(values))])
    assert probabilities.tolist() == [weight / kept for weight in weights]
    target, running, drawn = Pcg32(options.seed).uniform() * kept, 0.0, expected[-1][0]
    for token, weight in expected:
        running = running + weight
        if running > target:
            drawn = token
            break
    assert sampler.sample(logits) == drawn
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("vocab_size", [255, 256, 257, 5000])
def test_long_vocabularies_with_many_ties(vocab_size: int) -> None:
    logits = (np.random.default_rng(vocab_size).integers(-4, 4, vocab_size) / 2).astype(np.float32)
    for options in ({"top_p": 0.97}, {"min_p": 0.05}, {"top_k": 200}, {"top_k": 200, "top_p": 0.5}, {}):
        chosen = SamplingOptions(temperature=1.3, **options)
        ids, _ = Sampler(chosen).distribution(logits)
        order = np.lexsort((np.arange(vocab_size), -logits))
        assert ids.tolist() == order[: len(ids)].tolist()
        if options == {"top_k": 200}:
            assert len(ids) == 200
        assert Sampler(chosen).sample(logits) in ids


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 6}, {"top_p": 0.9}, {"min_p": 0.03}, {"temperature": 1.7, "top_k": 9, "top_p": 0.95, "min_p": 0.01}],
)
def test_frequencies_fit_the_distribution(options: dict[str, Any]) -> None:
    logits = np.linspace(2.0, -2.0, 12, dtype=np.float32)
    sampler = Sampler(SamplingOptions(**({"temperature": 1.0, "seed": 7} | options)))
    ids, probabilities = sampler.distribution(logits)
    draws = 4000
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=len(logits))
    assert counts.sum() == counts[ids].sum()
    chi_square = ((counts[ids] - draws * probabilities) ** 2 / (draws * probabilities)).sum()
    freedom = len(ids) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty, p = 0.001
    assert chi_square < limit


def test_greedy_takes_the_lowest_id_and_draws_nothing() -> None:
    sampler = Sampler(SamplingOptions(seed=5))
    assert sampler.sample(np.array([1, 3, 3, -2], np.float32)) == 1
    assert sampler.rng.next_u32() == Pcg32(5).next_u32()
    assert sampler.sample(np.array([-0.0, 0.0], np.float32)) == 0
    ids, probabilities = sampler.distribution(np.array([1, 3, 3], np.float32))
    assert (ids.tolist(), probabilities.tolist()) == ([1], [1.0])


def test_one_draw_a_token() -> None:
    logits = np.zeros(50, np.float32)
    for options in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
        sampler, random = Sampler(SamplingOptions(temperature=1.0, seed=9, **options)), Pcg32(9)
        for _ in range(3):
            sampler.distribution(logits)
            sampler.sample(logits)
            random.next_u32()
        assert sampler.rng.next_u32() == random.next_u32()


def test_repetition_penalty_divides_positive_and_multiplies_negative() -> None:
    sampler = Sampler(SamplingOptions(repetition_penalty=2.0))
    sampler.accept_all([0, 0, 7])  # 7 is beyond the vocabulary and harms nobody
    assert sampler.sample(np.array([3.0, 2.0], np.float32)) == 1
    assert sampler.sample(np.array([-1.0, -1.5], np.float32)) == 1
    sampler.retract(0)
    assert sampler.sample(np.array([3.0, 2.0], np.float32)) == 1
    sampler.retract(0)
    assert sampler.sample(np.array([3.0, 2.0], np.float32)) == 0
    with pytest.raises(InputError, match="token 0 was never accepted"):
        sampler.retract(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected at least 0"),
        ({"temperature": math.nan}, "temperature is nan, expected a finite number"),
        ({"temperature": math.inf}, "temperature is inf, expected a finite number"),
        ({"temperature": "hot"}, "temperature is 'hot', expected a finite number"),
        ({"top_k": -1}, "top_k is -1, expected at least 0"),
        ({"top_k": 1.5}, "top_k is 1.5, expected a whole number"),
        ({"top_k": True}, "top_k is True, expected a whole number"),
        ({"top_p": 0.0}, "top_p is 0.0, expected above 0"),
        ({"top_p": 1.01}, "top_p is 1.01, expected above 0"),
        ({"min_p": -0.5}, "min_p is -0.5, expected from 0"),
        ({"min_p": 2}, "min_p is 2, expected from 0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected above 0"),
        ({"seed": -1}, "seed is -1, expected from 0"),
        ({"seed": 2**64}, f"seed is {2**64}, expected from 0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        SamplingOptions(**options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("values", "word"), [([1.0, math.nan], "NaN"), ([1.0, math.inf], "+inf"), ([-math.inf, -math.inf], "but -inf")]
)
def test_broken_logits(values: list[float], word: str, temperature: float) -> None:
    sampler = Sampler(SamplingOptions(temperature=temperature))
    with pytest.raises(LesonnxError) as caught:
        sampler.sample(np.array(values, np.float32))
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, InputError)


@pytest.mark.parametrize("logits", [np.zeros((2, 3), np.float32), np.zeros(3), np.zeros(0, np.float32), [1.0]])
def test_misshapen_logits(logits: Any) -> None:
    with pytest.raises(InputError, match=r"expected float32 \[V\]"):
        Sampler(SamplingOptions()).sample(logits)


def test_negative_token() -> None:
    with pytest.raises(InputError, match="token id is -1"):
        Sampler(SamplingOptions()).accept(-1)
