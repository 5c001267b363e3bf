"""The DSpark drafter: its parts against its formulas, what it keeps of the target, generations that draft with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FAMILIES, read_reference
from conftest import BundleFactory
from numpy.typing import NDArray
from plain_dspark import DRAFTER, REFERENCE, PlainDSpark, read_drafter, sample_layer_outputs
from test_segments import PlainHost, Values

import lesonnx as package
from lesonnx.bundle import Bundle
from lesonnx.errors import BudgetError
from lesonnx.eviction import ONE
from lesonnx.generate import GenerationOptions, GenerationReport, generate
from lesonnx.model import Model
from lesonnx.sampling import Sampler, SamplingOptions
from lesonnx.speculative.drafter import Draft, DraftSampler
from lesonnx.speculative.dspark import PENDING_TOKENS, DSparkDrafter
from lesonnx.speculative.pricing import Pricing

CASES = "abc"


@pytest.fixture(scope="module")
def reference() -> dict[str, NDArray[Any]]:
    with np.load(REFERENCE) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def outputs(reference: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    """What the drafter reads of the sample on the reference's text: [96, 3*H]."""
    layers = sample_layer_outputs(reference["input_ids"].tolist())
    return np.concatenate([layers[idx + 1] for idx in read_drafter()[0]["target_layer_ids"]], axis=-1)


@pytest.fixture(scope="module")
def float_bundle(bundle_of: BundleFactory) -> Path:
    return bundle_of("sample", drafter=DRAFTER)


def greedy(drafter: DSparkDrafter, token_ids: list[int], count: int = 6) -> Draft:
    return drafter.propose(token_ids, count, DraftSampler(Sampler(SamplingOptions())))


@dataclass
class PlainBlockHost:
    """The least a host must do to draft, from docs/bundle.md alone."""

    bundle: Bundle

    def draft(
        self, outputs: NDArray[np.float32], anchor: int
    ) -> tuple[Values, list[NDArray[Any]], list[int], list[float]]:
        """Of a greedy draft: the block's values, logits by slot, tokens, confidences."""
        drafter = self.bundle.manifest.drafter
        assert drafter is not None
        host, start, size = PlainHost(self.bundle), len(outputs), drafter.block_size
        positions = np.arange(start, dtype=np.int64)[None]
        context = host.run_part(
            drafter.part("drafter_context"), {"layer_outputs": outputs[None], "position_ids": positions}
        )
        block = host.run_part(
            drafter.part("drafter_block"),
            context
            | {
                "input_ids": np.array([[anchor] + [drafter.mask_token_id] * (size - 1)], np.int64),
                "position_ids": np.arange(start, start + size, dtype=np.int64)[None],
                "logit_rows": np.arange(size, dtype=np.int64),
            },
        )
        logits, tokens, confidence = [], [anchor], []
        for slot in range(size):
            rows = {name: block[name][slot : slot + 1] for name in ("base_logits", "slot_hidden")}
            token = {"token_id": np.array([tokens[-1]], np.int64)}
            given = host.run_part(drafter.part("drafter_markov"), rows | token)
            logits.append(given["logits"][0])
            tokens.append(int(np.argmax(given["logits"][0])))
            confidence.append(float(given["confidence"][0]))
        return block, logits, tokens[1:], confidence


@pytest.mark.parametrize("case", CASES)
def test_the_parts_compute_the_formulas(
    float_bundle: Path, reference: dict[str, NDArray[Any]], outputs: NDArray[np.float32], case: str
) -> None:
    """Against a computation of its own, and against what was computed where the drafter was trained."""
    start, ids = int(reference[f"start_{case}"]), reference["input_ids"]
    block, logits, tokens, confidence = PlainBlockHost(Bundle(float_bundle)).draft(outputs[:start], int(ids[start]))
    plain = PlainDSpark.of_sample().draft(outputs[:start], int(ids[start]))
    for expected in (plain.base_logits, reference[f"base_logits_{case}"]):
        assert np.abs(block["base_logits"] - expected).max() < 1e-3
    for expected in (plain.logits, reference[f"logits_{case}"]):
        assert np.abs(np.stack(logits) - expected).max() < 1e-3
    assert tokens == plain.token_ids == reference[f"tokens_{case}"].tolist()
    for expected in (plain.confidence, reference[f"confidence_{case}"]):
        assert np.abs(confidence - expected).max() < 1e-3


@pytest.mark.parametrize("case", CASES)
def test_drafting_beside_the_model(float_bundle: Path, reference: dict[str, NDArray[Any]], case: str) -> None:
    """Layer outputs come from the runner here, the rest from the drafter as it is used."""
    start, ids = int(reference[f"start_{case}"]), reference["input_ids"].tolist()
    with package.load(float_bundle) as model:
        drafter = DSparkDrafter(model.bundle)
        model.runner.layer_reader = drafter
        model.runner.prefill(ids[:start])
        draft = greedy(drafter, ids[: start + 1])
        assert list(draft.token_ids) == reference[f"tokens_{case}"].tolist()
        assert draft.probabilities is None
        assert draft.confidence is not None
        assert np.abs(np.array(draft.confidence) / ONE - reference[f"confidence_{case}"]).max() < 1e-3
        # Fewer slots are the first ones.
        fewer = greedy(drafter, ids[: start + 1], 2)
        assert list(fewer.token_ids) == list(draft.token_ids)[:2]
        drafter.close()


CHUNKS = {"one go": [96], "chunks": [40, 3, 30, 23], "wide and narrow": [70, 1, 1, 24], "token by token": [1] * 96}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=list(CHUNKS))
def test_context_comes_in_any_pieces(
    float_bundle: Path, reference: dict[str, NDArray[Any]], outputs: NDArray[np.float32], chunks: list[int]
) -> None:
    ids = reference["input_ids"].tolist()
    whole, pieces = DSparkDrafter(Bundle(float_bundle)), DSparkDrafter(Bundle(float_bundle))
    whole.observe(0, outputs)
    place = 0
    for count in chunks:
        pieces.observe(place, outputs[place : place + count])
        place += count
    assert pieces.num_tokens == whole.num_tokens == len(ids)
    expected, got = greedy(whole, [*ids, 7]), greedy(pieces, [*ids, 7])
    assert got.token_ids == expected.token_ids
    for name, cache in pieces.context(len(ids)).items():
        assert np.abs(cache - whole.context(len(ids))[name]).max() < 1e-4, name
    assert np.abs(np.array(got.confidence) - np.array(expected.confidence)).max() <= ONE * 1e-3


def test_what_was_rejected_leaves_no_trace(
    float_bundle: Path, reference: dict[str, NDArray[Any]], outputs: NDArray[np.float32]
) -> None:
    """Rows behind a rewind are forgotten, whether they were projected or pending."""
    ids = reference["input_ids"].tolist()
    straight, drafter = DSparkDrafter(Bundle(float_bundle)), DSparkDrafter(Bundle(float_bundle))
    straight.observe(0, outputs[:80])
    expected = greedy(straight, ids[:81])
    drafter.observe(0, outputs[:70])
    drafter.observe(70, outputs[:7])
    drafter.rewind(72)
    drafter.observe(70, outputs[70:76])
    greedy(drafter, ids[:77])
    drafter.observe(76, outputs[3:9])
    greedy(drafter, ids[:83])
    drafter.rewind(76)
    drafter.observe(76, outputs[76:80])
    got = greedy(drafter, ids[:81])
    assert got.token_ids == expected.token_ids
    assert np.abs(np.array(got.confidence) - np.array(expected.confidence)).max() <= ONE * 1e-3
    assert drafter.num_tokens == 80
    drafter.rewind(0)
    assert drafter.num_tokens == 0


def test_it_must_have_seen_all_before_the_anchor(float_bundle: Path, outputs: NDArray[np.float32]) -> None:
    drafter = DSparkDrafter(Bundle(float_bundle))
    drafter.observe(0, outputs[:5])
    with pytest.raises(ValueError, match="has seen 5 tokens, and is told of token 6"):
        drafter.observe(6, outputs[6:8])
    with pytest.raises(ValueError, match="has seen 5 tokens, expected 9"):
        greedy(drafter, list(range(10)))


def test_a_drawn_draft_says_what_it_was_drawn_from(
    float_bundle: Path, reference: dict[str, NDArray[Any]], outputs: NDArray[np.float32]
) -> None:
    start, ids = int(reference["start_b"]), reference["input_ids"].tolist()
    drafter = DSparkDrafter(Bundle(float_bundle))
    drafter.observe(0, outputs[:start])
    options = SamplingOptions(temperature=0.8, seed=3)
    draft = drafter.propose(ids[: start + 1], 6, DraftSampler(Sampler(options)))
    plain = PlainDSpark.of_sample()
    base = plain.draft(outputs[:start], ids[start]).base_logits
    assert draft.probabilities is not None
    assert len(draft.probabilities) == len(draft.token_ids) == 6
    before = ids[start]
    for slot, (token, (drawn_ids, probabilities)) in enumerate(zip(draft.token_ids, draft.probabilities, strict=True)):
        latent = plain.weights["markov_head.markov_w1.weight"][before]
        logits = (base[slot] + plain.weights["markov_head.markov_w2.weight"] @ latent).astype(np.float64) / 0.8
        expected = np.exp(logits - logits.max())
        expected /= expected.sum()
        assert token in drawn_ids
        assert np.abs(expected[drawn_ids] - probabilities).max() < 1e-3
        before = token
    again = drafter.propose(ids[: start + 1], 6, DraftSampler(Sampler(options)))
    assert list(again.token_ids) == list(draft.token_ids)


def test_quantized_it_drafts_much_the_same(bundle_of: BundleFactory, reference: dict[str, NDArray[Any]]) -> None:
    ids = reference["input_ids"].tolist()
    with package.load(bundle_of("sample", bits=4, dense_bits=8, drafter=DRAFTER)) as model:
        drafter = DSparkDrafter(model.bundle)
        model.runner.layer_reader = drafter
        model.runner.prefill(ids)
        start = int(reference["start_a"])
        draft = greedy(drafter, ids[: start + 1])
        assert list(draft.token_ids)[:2] == reference["tokens_a"].tolist()[:2]
        assert np.abs(np.array(draft.confidence)[0] / ONE - reference["confidence_a"][0]) < 0.1


# -- in a generation ---------------------------------------------------------------------------------------------------


class WholeBlocks(Pricing):
    """Drafts and verifies as much as there is room for, whatever it costs: these tests are not about when it pays."""

    def ask(self, most: int, is_free: bool, new_bytes: Sequence[int]) -> int:
        return most

    def choose(
        self, drafted: int, confidence: Sequence[int] | None, is_free: bool, is_drawn: bool, new_bytes: Sequence[int]
    ) -> int:
        return drafted

    @property
    def may_draft(self) -> bool:
        return True


def drafting(model: Model) -> Model:
    assert model.speculator is not None
    model.speculator.pricing = WholeBlocks()
    return model


@pytest.mark.parametrize("budget", [None, 1_500_000 * 4], ids=["resident", "streaming"])
def test_greedy_tokens_are_those_without_drafts(float_bundle: Path, budget: int | None) -> None:
    """Also where a second prompt goes on from the first one's sequence, and where the limit ends a block."""
    ids = read_reference("sample")["input_ids"].tolist()
    got: list[list[list[int]]] = []
    for draft in ("none", "dspark"):
        with package.load(float_bundle, draft=draft, expert_budget_bytes=budget) as model:
            if draft != "none":
                drafting(model)
            got.append([])
            for prompt, limit, reuse in ((ids[:50], 40, False), (ids[:60], 23, True), (ids[:20], 30, True)):
                options, report = GenerationOptions(max_new_tokens=limit, ignore_eos=True), GenerationReport()
                list(generate(model.runner, prompt, options, report, reuse=reuse, speculator=model.speculator))
                got[-1].append(report.token_ids)
                assert model.runner.num_tokens == len(prompt) + limit - 1
                if draft != "none":
                    assert report.drafts is not None
                    assert report.drafts.accepted[0] >= 3
                    assert report.drafts.passes < limit
    assert got[0] == got[1]


def test_sampled_drafts_give_the_same_text_again(float_bundle: Path) -> None:
    """Drawn drafts and their verification depend on the seed alone."""
    ids = read_reference("sample")["input_ids"][:40].tolist()
    options = GenerationOptions(40, SamplingOptions(temperature=0.7, top_k=50, seed=11), ignore_eos=True)
    tokens = []
    for _ in range(2):
        with drafting(package.load(float_bundle, draft="dspark")) as model:
            generation = model.generate(ids, options)
            generation.text()
            tokens.append(generation.report.token_ids)
            assert generation.report.drafts is not None
            assert generation.report.drafts.accepted[0] >= 3
    assert tokens[0] == tokens[1]


def test_a_bundle_is_loaded_within_its_memory_budget(float_bundle: Path) -> None:
    """The drafter is there before the budget is shared out."""
    with package.load(float_bundle, draft="dspark", memory_budget_bytes=1 << 30) as model:
        assert model.speculator is not None
        assert isinstance(model.speculator.drafter, DSparkDrafter)
        assert model.runner.layer_reader is model.speculator.drafter
        assert len(model.generate([3, 4, 5], GenerationOptions(4, ignore_eos=True)).text()) > 0


# -- what the runner gives ---------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """Keeps what a runner tells it."""

    layer_idxs: tuple[int, ...]
    told: list[tuple[int, NDArray[np.float32]]] = field(default_factory=list)

    def observe(self, position: int, layer_outputs: NDArray[np.float32]) -> None:
        self.told.append((position, layer_outputs.copy()))

    def bytes_at(self, num_tokens: int) -> int:
        return 0


@pytest.mark.parametrize("name", [*FAMILIES, "gemma4_text", "smallthinker", "qwen3_next", "deepseek_v3"])
def test_the_runner_gives_what_layers_give(bundle_of: BundleFactory, name: str) -> None:
    """Every layer's, the embedding's and the head's own too, with and without logits, in prompts and in steps."""
    bundle = Bundle(bundle_of(name))
    ids = read_reference(name)["input_ids"][:24].tolist()
    host = PlainHost(bundle)
    host.forward(ids)
    embedding = host.run_part(bundle.manifest.part("embed"), {"input_ids": np.array([ids], np.int64)})["hidden"]
    last = bundle.manifest.model.num_hidden_layers - 1
    idxs = (last, -1, 0, last // 2)
    expected = np.concatenate([({-1: embedding} | host.layer_outputs)[idx][0] for idx in idxs], axis=-1)
    recorder = Recorder(idxs)
    with package.load(bundle, prefill_chunk_tokens=10) as model:
        model.runner.layer_reader = recorder
        model.runner.prefill(ids[:21])
        model.runner.step(ids[21:23], [])
        model.runner.step(ids[23:], [0])
        assert [position for position, _ in recorder.told] == [0, 10, 20, 21, 23]
        assert np.abs(np.concatenate([rows for _, rows in recorder.told]) - expected).max() < 1e-3
        # Without a reader nothing is asked for.
        model.runner.layer_reader = None
        model.runner.step([1], [0])
        assert len(recorder.told) == 5


def test_logits_do_not_depend_on_a_reader(float_bundle: Path) -> None:
    ids = read_reference("sample")["input_ids"].tolist()
    logits = []
    for reader in (None, Recorder((0, 2, 4))):
        with package.load(float_bundle) as model:
            model.runner.layer_reader = reader
            logits.append(model.runner.prefill(ids, all_logits=True).tobytes())
    assert logits[0] == logits[1]


def test_its_caches_count_against_the_memory_budget(float_bundle: Path) -> None:
    """What the experts may take is less by what the drafter keeps, as caches grow."""
    left = []
    for drafts in (False, True):
        with package.load(float_bundle) as model:
            drafter = DSparkDrafter(model.bundle)
            model.runner.layer_reader = drafter if drafts else None
            model.runner.bound_memory(1 << 30, None)
            bound = model.runner._memory
            assert bound is not None
            capacity = model.runner.states.capacity_for(1)
            states = model.runner.states.bytes_at(capacity)
            kept = drafter.bytes_at(capacity) if drafts else 0
            tight = bound.fixed_bytes + states + kept + model.bundle.least_budget_bytes
            left.append(kept)
            object.__setattr__(bound, "budget_bytes", tight - 4096)
            with pytest.raises(BudgetError, match=f"caches of {capacity} tokens {states + kept:,}"):
                model.runner._share_memory(capacity)
    # 512 tokens of keys and values of two layers of two heads of 32, and the rows that wait to be projected.
    assert left == [0, 4 * (512 * 2 * 2 * 2 * 32 + PENDING_TOKENS * 3 * 192)]
