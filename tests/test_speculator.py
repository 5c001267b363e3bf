"""Drafting as a whole: tokens, ends, states and averages of plain decoding, whoever drafts and whatever is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import SAMPLE, read_reference
from conftest import BundleFactory
from numpy.typing import NDArray

import lesonnx
from lesonnx.bundle import Bundle
from lesonnx.errors import BudgetError, InputError, LesonnxError, LoadError
from lesonnx.eviction import LesPolicy
from lesonnx.generate import GenerationOptions
from lesonnx.model import Model
from lesonnx.sampling import SamplingOptions
from lesonnx.speculative.draft_model import DraftModelDrafter
from lesonnx.speculative.drafter import MAX_DRAFT_TOKENS, NO_DRAFT, Draft, Drafter, DraftSampler
from lesonnx.speculative.ngram import NgramDrafter
from lesonnx.speculative.pricing import Pricing
from lesonnx.speculative.speculator import Speculator

PROMPT = "CREATE TABLE t (a integer, b integer);\nCREATE TABLE u (a integer, b integer);\nCREATE"
# Families whose states rewind in each way: attention alone, convolutions, a delta rule, dense layers in the head.
FIXTURES = ("qwen3_moe", "lfm2_moe", "qwen3_next", "deepseek_v3")


class Always(Pricing):
    """Verifies as much as is drafted, at most so many tokens: no test depends on the clock."""

    def __init__(self, length: int = MAX_DRAFT_TOKENS) -> None:
        super().__init__()
        self.length = length

    @property
    def may_draft(self) -> bool:
        return True

    def ask(self, most: int, is_free: bool, new_bytes: Sequence[int]) -> int:
        return min(most, self.length)

    def choose(self, drafted: int, *_: Any) -> int:  # type: ignore[override]
        return min(drafted, self.length)


class Oracle:
    """Drafts what plain decoding gave, each token wrong with some odds."""

    name, is_free, layer_idxs, max_tokens = "oracle", True, (), MAX_DRAFT_TOKENS

    def __init__(self, token_ids: Sequence[int], prompt_tokens: int, wrong: float, vocab_size: int) -> None:
        self._token_ids, self._prompt_tokens = list(token_ids), prompt_tokens
        self._wrong, self._vocab_size, self._random = wrong, vocab_size, np.random.default_rng(5)

    def propose(self, token_ids: Sequence[int], max_tokens: int, sampler: DraftSampler) -> Draft:
        begin = len(token_ids) - self._prompt_tokens
        tokens = self._token_ids[begin : begin + max_tokens]
        return Draft([self._spoil(token) for token in tokens])

    def _spoil(self, token: int) -> int:
        return int(self._random.integers(self._vocab_size)) if self._random.random() < self._wrong else token

    def observe(self, position: int, layer_outputs: NDArray[np.float32]) -> None: ...

    def rewind(self, num_tokens: int) -> None: ...

    def close(self) -> None: ...


def options(count: int = 48, **values: Any) -> GenerationOptions:
    return GenerationOptions(max_new_tokens=count, ignore_eos=values.pop("ignore_eos", True), **values)


def drafting(model: Model, drafter: Drafter, length: int = MAX_DRAFT_TOKENS) -> Speculator:
    model.speculator = Speculator(model.runner, drafter, Always(length))
    return model.speculator


def les_tables(model: Model) -> list[list[list[int]]]:
    policy = model.runner.loader.scheduler._residency.policy
    assert isinstance(policy, LesPolicy)
    return [table.tolist() for table in policy._tables]


@pytest.fixture(scope="module")
def float_sample(bundle_of: BundleFactory) -> Path:
    return bundle_of(SAMPLE)


@pytest.fixture
def model(float_sample: Path) -> Iterator[Model]:
    with lesonnx.load(float_sample) as loaded:
        yield loaded


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 15])
@pytest.mark.parametrize("name", ["ngram", "draft-model", "oracle"])
def test_the_sample_gives_the_tokens_without_drafts(model: Model, float_sample: Path, name: str, length: int) -> None:
    plain = model.generate(PROMPT, options())
    text = plain.text()
    expected, sequence = plain.report.token_ids, list(model.runner.token_ids)
    prompt_tokens, vocab_size = plain.report.prompt_tokens, model.bundle.manifest.model.vocab_size
    drafter: Drafter = (
        NgramDrafter()
        if name == "ngram"
        else Oracle(expected, prompt_tokens, 0.3, vocab_size)
        if name == "oracle"
        else DraftModelDrafter(model.bundle, model.bundle)
    )
    speculator = drafting(model, drafter, length)
    generation = model.generate(PROMPT, options())
    assert generation.text() == text
    assert generation.report.token_ids == expected
    assert model.runner.token_ids == sequence
    assert generation.report.drafts is speculator.counts
    assert sum(speculator.counts.accepted) > 10
    drafter.close()


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("wrong", [0.0, 0.5, 1.0])
def test_fixtures_give_the_tokens_without_drafts(bundle_of: BundleFactory, name: str, wrong: float) -> None:
    """States of every kind go back to the last right token, and the next step goes on from there."""
    prompt = read_reference(name)["input_ids"].reshape(-1).tolist()[:9]
    with lesonnx.load(bundle_of(name)) as model:
        plain = model.generate(prompt, options(24))
        plain.text()
        vocab_size = model.bundle.manifest.model.vocab_size
        drafting(model, Oracle(plain.report.token_ids, len(prompt), wrong, vocab_size), 6)
        again = model.generate(prompt, options(24))
        again.text()
        assert again.report.token_ids == plain.report.token_ids


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sampled_tokens_with_chosen_drafts_are_those_without(model: Model, seed: int) -> None:
    sampling = SamplingOptions(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=seed)
    plain = model.generate(PROMPT, options(sampling=sampling))
    plain.text()
    vocab_size = model.bundle.manifest.model.vocab_size
    for drafter in (NgramDrafter(), Oracle(plain.report.token_ids, plain.report.prompt_tokens, 0.3, vocab_size)):
        drafting(model, drafter)
        again = model.generate(PROMPT, options(sampling=sampling))
        again.text()
        assert again.report.token_ids == plain.report.token_ids


def test_a_draft_model_that_is_the_target_is_nearly_always_right_when_drawn(model: Model) -> None:
    """p and q differ by rounding alone: min(1, p/q) is nearly 1, whatever the draws."""
    drafter = DraftModelDrafter(model.bundle, model.bundle)
    speculator = drafting(model, drafter, 6)
    model.generate(PROMPT, options(60, sampling=SamplingOptions(temperature=1.2, seed=4))).text()
    assert sum(speculator.counts.judged) > 30
    assert sum(speculator.counts.accepted) >= 0.99 * sum(speculator.counts.judged)
    drafter.close()


def test_averages_learn_what_was_accepted_and_nothing_else(float_sample: Path) -> None:
    tables = []
    token_ids: list[int] = []
    for wrong in (None, 0.4):
        with lesonnx.load(float_sample, expert_budget_bytes=Bundle(float_sample).expert_bytes // 3) as model:
            if wrong is not None:
                drafting(model, Oracle(token_ids, len(model.encode(PROMPT)), wrong, 2048), 5)
            generation = model.generate(PROMPT, options())
            generation.text()
            token_ids = generation.report.token_ids
            tables.append(les_tables(model))
    assert tables[0] == tables[1]


# -- ends --------------------------------------------------------------------------------------------------------------


def outcome(model: Model, chosen: GenerationOptions, prompt: str = PROMPT) -> tuple[Any, ...]:
    generation = model.generate(prompt, chosen)
    text = generation.text()
    return text, generation.report.token_ids, generation.report.finish_reason, list(model.runner.token_ids)


def test_limits_stops_and_ends_inside_an_accepted_run_are_where_they_are_without_drafts(model: Model) -> None:
    everything = model.generate(PROMPT, options(40))
    everything.text()
    token_ids = everything.report.token_ids
    assert model.tokenizer is not None
    stop = model.tokenizer.decode(token_ids[9:14])[1:4]
    cases = [options(count) for count in (1, 2, 3, 7, 20)] + [options(40, stop=[stop])]
    plain = [outcome(model, chosen) for chosen in cases]
    oracle = Oracle(token_ids, everything.report.prompt_tokens, 0.0, 2048)
    drafting(model, oracle)
    assert [outcome(model, chosen) for chosen in cases] == plain
    assert plain[-1][2] == "stop"


@pytest.mark.parametrize("place", [0, 1, 5, 11])
def test_an_end_token_inside_an_accepted_run_ends_there(model: Model, place: int) -> None:
    everything = model.generate(PROMPT, options(30))
    everything.text()
    token_ids = everything.report.token_ids
    model.bundle.manifest.model.eos_token_ids[:] = [token_ids[place]]
    chosen = options(30, ignore_eos=False)
    plain = outcome(model, chosen)
    drafting(model, Oracle(token_ids, everything.report.prompt_tokens, 0.0, 2048))
    assert outcome(model, chosen) == plain
    assert plain[2] == "eos"


def test_closing_early_leaves_the_sequence_that_was_given_out(model: Model) -> None:
    everything = model.generate(PROMPT, options(30))
    everything.text()
    drafting(model, Oracle(everything.report.token_ids, everything.report.prompt_tokens, 0.0, 2048))
    prompt_ids = model.encode(PROMPT)
    for taken in (1, 2, 9):
        generation = model.generate(PROMPT, options(30))
        tokens = iter(generation)
        given = [next(tokens).id for _ in range(taken)]
        tokens.close()  # type: ignore[attr-defined]
        assert model.runner.token_ids == [*prompt_ids, *given[:-1]]


def test_one_generation_follows_another_and_reuses_its_beginning(bundle_of: BundleFactory) -> None:
    prompt = read_reference("qwen3_next")["input_ids"].reshape(-1).tolist()
    found = []
    for drafter in (None, NgramDrafter()):
        with lesonnx.load(bundle_of("qwen3_next")) as model:
            if drafter is not None:
                drafting(model, drafter)
            tokens = []
            for begin in (prompt[:8], prompt[:8] * 3, prompt[:20]):
                generation = model._generate(begin, options(12), reuse=True)
                generation.text()
                tokens.append(generation.report.token_ids)
            found.append(tokens)
    assert found[0] == found[1]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_read_that_fails_in_a_verify_pass_ends_the_generation(float_sample: Path, monkeypatch: Any) -> None:
    budget = Bundle(float_sample).token_demand_bytes
    with lesonnx.load(float_sample, expert_budget_bytes=budget) as model:
        plain = model.generate(PROMPT, options(20))
        plain.text()
        drafting(model, Oracle(plain.report.token_ids, plain.report.prompt_tokens, 0.0, 2048))
        tokens = iter(model.generate(PROMPT, options(20)))
        next(tokens)
        engine = model.runner.loader.engine

        def fail(*_: Any) -> int:
            raise OSError("unplugged")

        monkeypatch.setattr(engine, "load", fail)
        with pytest.raises(LoadError, match="cannot be loaded: unplugged"):
            list(tokens)
        with pytest.raises(LesonnxError):
            model.generate(PROMPT, options(2)).text()


def test_bad_drafters_are_one_line(float_sample: Path, bundle_of: BundleFactory) -> None:
    other = bundle_of("qwen3_moe")
    for values, message in (
        ({"draft": "oracle"}, "drafter 'oracle' is not one of none, ngram, draft-model, dspark, mtp"),
        ({"draft": "draft-model"}, "needs the bundle that drafts: give --draft-model BUNDLE"),
        ({"draft": "ngram", "draft_model": other}, "a draft model was given, but the drafter is ngram"),
        ({"draft": "mtp"}, "this bundle has no mtp drafter"),
        ({"draft": "draft-model", "draft_model": other}, r"its vocabulary has \d+ tokens, the target's 2048"),
    ):
        with pytest.raises(InputError, match=message):
            lesonnx.load(float_sample, **values)


def test_a_memory_budget_counts_the_draft_model(float_sample: Path) -> None:
    fixed = []
    for values in ({}, {"draft": "draft-model", "draft_model": float_sample}):
        with lesonnx.load(float_sample, memory_budget_bytes=1 << 30, **values) as model:
            bound = model.runner._memory
            assert bound is not None
            fixed.append(bound.fixed_bytes)
    # Sessions and buffers come on top; what one load leaves behind for the next is far less.
    assert fixed[1] - fixed[0] > 0.9 * Bundle(float_sample).expert_bytes


def test_a_drafter_that_has_nothing_to_say_costs_no_pass(model: Model) -> None:
    class Silent(Oracle):
        def propose(self, token_ids: Sequence[int], max_tokens: int, sampler: DraftSampler) -> Draft:
            return NO_DRAFT

    speculator = drafting(model, Silent([], 0, 0.0, 2048))
    model.generate(PROMPT, options(12)).text()
    assert speculator.counts.passes == 0


def test_a_memory_budget_counts_a_draft_models_caches_as_they_grow(float_sample: Path) -> None:
    budget = 2 << 30
    with lesonnx.load(float_sample, draft="draft-model", draft_model=float_sample, memory_budget_bytes=budget) as model:
        runner = model.runner
        # The same bundle drafts, so its caches are as large as the target's.
        for num_tokens in (1, 600, 1500):
            capacity = runner.states.capacity_for(num_tokens)
            assert runner.bytes_beside(capacity) == runner.states.bytes_at(capacity) > 0
        runner.bytes_beside = lambda num_tokens: budget
        with pytest.raises(BudgetError, match="the memory budget is"):
            runner._share_memory(512)
