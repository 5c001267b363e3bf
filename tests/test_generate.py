"""Generation: limits, ends, stop strings and streamed text, on the sample and on a bundle without a tokenizer."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SAMPLE, read_reference
from conftest import BundleFactory

import lesonnx
from lesonnx.errors import ContextError, InputError
from lesonnx.generate import GenerationOptions, Token, token_limit
from lesonnx.sampling import SamplingOptions

PROMPT = "In the beginning God"


def options(count: int | None = 24, **values: Any) -> GenerationOptions:
    return GenerationOptions(max_new_tokens=count, **values)


def sampled(seed: int, **values: Any) -> GenerationOptions:
    return options(sampling=SamplingOptions(temperature=1.0, seed=seed, **values))


@pytest.fixture(scope="module")
def model(sample_bundle: Path) -> lesonnx.Model:
    return lesonnx.load(sample_bundle)


def edited(bundle: Path, target: Path, **facts: Any) -> Path:
    """A copy of a bundle whose manifest tells other facts of the model."""
    shutil.copytree(bundle, target)
    document = json.loads((target / "manifest.json").read_text())
    document["model"] |= facts
    (target / "manifest.json").write_text(json.dumps(document))
    return target


def ids(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens if token.id is not None]


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_pieces_of_text_are_the_text_of_the_tokens(model: lesonnx.Model) -> None:
    assert model.tokenizer is not None
    for prompt in (PROMPT, "CREATE TABLE", "The list.append() method"):
        tokens = list(model.generate(prompt, options(40)))
        assert "".join(token.text for token in tokens) == model.tokenizer.decode(ids(tokens))


def test_report(model: lesonnx.Model) -> None:
    generation = model.generate(PROMPT, options(10))
    tokens = list(generation)
    report = generation.report
    assert report.token_ids == ids(tokens)
    assert report.prompt_tokens == len(model.encode(PROMPT))
    assert report.finish_reason == "length"
    assert report.reused_tokens == 0
    assert report.prefill_ms > 0
    assert report.decode_ms > 0
    assert report.tokens_per_s == pytest.approx(9 / (report.decode_ms / 1e3))


def test_text_takes_what_had_not_been_taken(model: lesonnx.Model) -> None:
    whole = model.generate(PROMPT, options(10)).text()
    generation = model.generate(PROMPT, options(10))
    beginning = "".join(next(iter(generation)).text for _ in range(3))
    assert beginning + generation.text() == whole


def test_every_generation_begins_from_scratch(model: lesonnx.Model) -> None:
    first = ids(list(model.generate(PROMPT, options())))
    list(model.generate("CREATE TABLE", options()))
    iterator = iter(model.generate(PROMPT, options()))
    next(iterator)  # left in the middle
    assert ids(list(model.generate(PROMPT, options()))) == first


def test_an_older_generation_leaves_a_newer_one_alone(model: lesonnx.Model) -> None:
    options = GenerationOptions(max_new_tokens=12)
    expected = [token.id for token in model.generate(list(range(10, 40)), options)]
    first = iter(model.generate([5, 6, 7, 5, 6, 7], options))
    next(first)
    second = iter(model.generate(list(range(10, 40)), options))
    found = [next(second).id]
    with pytest.raises(InputError, match="another one has begun"):
        next(first)
    closed = iter(model.generate([5, 6, 7], options))
    found += [token.id for token in second]
    assert found == expected
    # One that has not begun takes nothing away either; one that is closed in the middle rewinds its own sequence alone.
    closed.close()  # type: ignore[attr-defined]
    assert model.runner.num_tokens == 30 + len(expected) - 1


def test_text_and_its_ids_are_the_same_prompt(model: lesonnx.Model) -> None:
    from_text = ids(list(model.generate(PROMPT, options())))
    assert ids(list(model.generate(model.encode(PROMPT), options()))) == from_text


def test_seeds(model: lesonnx.Model) -> None:
    first, again, other = (ids(list(model.generate(PROMPT, sampled(seed)))) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_penalty_forbids_repeating(model: lesonnx.Model) -> None:
    prompt = [300, 301, 302]
    sampling = SamplingOptions(repetition_penalty=1e9)
    got = ids(list(model.generate(prompt, options(sampling=sampling))))
    assert len({*prompt, *got}) == len(prompt) + len(got)


def test_without_a_tokenizer_there_are_ids_alone(bundle_of: BundleFactory) -> None:
    reference = read_reference("qwen3_moe")
    with lesonnx.load(bundle_of("qwen3_moe")) as bare:
        prompt = reference["input_ids"][:24].tolist()
        tokens = list(bare.generate(prompt, options(40, ignore_eos=True)))
        assert ids(tokens) == reference["greedy_ids"].tolist()
        assert {token.text for token in tokens} == {""}
        with pytest.raises(InputError, match="has no tokenizer; give token ids"):
            bare.generate("text")
        with pytest.raises(InputError, match="stop strings need a tokenizer"):
            bare.generate(prompt, options(stop=["x"]))


# -- where it ends -----------------------------------------------------------------------------------------------------


def test_stop_strings_wherever_tokens_begin_and_end(model: lesonnx.Model) -> None:
    whole = model.generate(PROMPT, options()).text()
    for start in range(len(whole) - 4):
        stop = whole[start : start + 5]
        generation = model.generate(PROMPT, options(stop=[stop]))
        text = generation.text()
        assert text == whole[: whole.index(stop)]
        assert generation.report.finish_reason == "stop"


def test_the_beginning_of_a_stop_string_is_given_back_at_the_end(model: lesonnx.Model) -> None:
    whole = model.generate(PROMPT, options()).text()
    generation = model.generate(PROMPT, options(stop=[f"{whole[-6:]}\0"]))
    assert generation.text() == whole
    assert generation.report.finish_reason == "length"


def test_eos_ends_and_is_no_text(sample_bundle: Path, tmp_path: Path, model: lesonnx.Model) -> None:
    tokens = list(model.generate(PROMPT, options()))
    last = next(place for place, token in enumerate(ids(tokens)) if place > 5 and token not in ids(tokens)[:place])
    eos = ids(tokens)[last]
    with lesonnx.load(edited(sample_bundle, tmp_path / "eos", eos_token_ids=[0, eos])) as other:
        generation = other.generate(PROMPT, options())
        text = generation.text()
        assert text == model.tokenizer.decode(ids(tokens)[:last])  # type: ignore[union-attr]
        assert generation.report.finish_reason == "eos"
        assert generation.report.token_ids == ids(tokens)[: last + 1]
        assert ids(list(other.generate(PROMPT, options(ignore_eos=True)))) == ids(tokens)


def test_the_default_length_ends_with_the_context(sample_bundle: Path, tmp_path: Path) -> None:
    with lesonnx.load(edited(sample_bundle, tmp_path / "short", max_position_embeddings=20)) as short:
        generation = short.generate([5] * 12, options(None, ignore_eos=True))
        assert len(ids(list(generation))) == 8
        assert generation.report.finish_reason == "length"
        assert len(ids(list(short.generate([5] * 19, options(1))))) == 1


@pytest.mark.parametrize(
    ("prompt_tokens", "wanted", "context", "expected"),
    [(10, None, 1000, 256), (10, None, 100, 90), (10, 90, 100, 90), (99, 1, 100, 1), (99, None, 100, 1)],
)
def test_token_limit(prompt_tokens: int, wanted: int | None, context: int, expected: int) -> None:
    assert token_limit(prompt_tokens, options(wanted), context) == expected


@pytest.mark.parametrize(
    ("prompt_tokens", "wanted", "message"),
    [
        (100, None, "100 tokens leaves no room in the model's context of 100"),
        (101, 1, "101 tokens leaves no room"),
        (10, 91, "10 tokens and 91 new ones do not fit the model's context of 100"),
    ],
)
def test_token_limit_beyond_the_context(prompt_tokens: int, wanted: int | None, message: str) -> None:
    with pytest.raises(ContextError, match=message):
        token_limit(prompt_tokens, options(wanted), 100)


# -- errors come at once, before any work ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([5, 2048], {}, r"token id 2048 is outside 0\.\.2047"),
        ([5, -1], {}, "token id -1 is outside"),
        ([5] * 2048, {}, "leaves no room"),
        ([5] * 2040, {"count": 9}, "do not fit the model's context of 2048"),
        (PROMPT, {"count": 0}, "max_new_tokens is 0"),
        (PROMPT, {"stop": ["a", ""]}, "a stop string is empty"),
    ],
)
def test_errors_before_any_work(
    sample_bundle: Path, prompt: str | list[int], changes: dict[str, Any], message: str
) -> None:
    with lesonnx.load(sample_bundle, schedule="on-demand") as fresh:
        with pytest.raises(InputError, match=message):
            fresh.generate(prompt, options(**changes))
        assert fresh.telemetry.read_bytes == 0
        assert fresh.runner.num_tokens == 0


# -- conversations -----------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chat_bundle(bundle_of: BundleFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = tmp_path_factory.mktemp("chat") / "sample"
    shutil.copytree(SAMPLE, checkpoint, ignore=shutil.ignore_patterns("*.py", "__pycache__", "reference.npz"))
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    return bundle_of(checkpoint)


def test_a_conversation_goes_on_from_what_is_computed(chat_bundle: Path) -> None:
    conversation = [{"role": "user", "content": "In the beginning"}]
    with lesonnx.load(chat_bundle) as model:
        first = model.chat(conversation, options(8))
        answer = first.text()
        assert first.report.reused_tokens == 0
        conversation += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
        second = model.chat(conversation, options(8))
        text = second.text()
        assert second.report.reused_tokens >= first.report.prompt_tokens
        assert second.report.reused_tokens < second.report.prompt_tokens
    with lesonnx.load(chat_bundle) as fresh:
        scratch = fresh.chat(conversation, options(8))
        assert scratch.text() == text
        assert scratch.report.prompt_tokens == second.report.prompt_tokens


def test_the_same_conversation_again_runs_its_last_token(chat_bundle: Path) -> None:
    conversation = [{"role": "user", "content": "In the beginning"}]
    with lesonnx.load(chat_bundle) as model:
        answers = [model.chat(conversation, options(8)) for _ in range(2)]
        assert answers[0].text() == answers[1].text()
        assert answers[1].report.reused_tokens == answers[1].report.prompt_tokens - 1


def test_chat_without_a_template(model: lesonnx.Model) -> None:
    with pytest.raises(InputError, match="has no chat template; use generate, or `lesonnx run`"):
        model.chat([{"role": "user", "content": "x"}])


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "never"}, "schedule 'never' is not one of"),
        ({"engine": "steam"}, "engine 'steam' is not one of"),
        ({"prefill_chunk_tokens": 0}, "prefill chunk is 0"),
        ({"num_threads": 0}, "threads is 0"),
        ({"expert_budget_bytes": 1}, r"the expert budget is 1 bytes; this bundle needs at least [\d,]+"),
        ({"schedule": "resident", "expert_budget_bytes": 10**6}, "schedule resident keeps all experts"),
        ({"memory_budget_bytes": 1}, "the memory budget is 1 bytes"),
    ],
)
def test_options_that_cannot_be(sample_bundle: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lesonnx.load(sample_bundle, **changes)


def test_the_budget_bounds_what_is_resident(sample_bundle: Path) -> None:
    """With the least budget, every token reads again what does not fit; with all of it, nothing twice."""
    with lesonnx.load(sample_bundle) as model:
        list(model.generate(PROMPT, options()))
        roomy = model.telemetry.read_bytes
        assert roomy <= model.bundle.expert_bytes
    with lesonnx.load(sample_bundle, expert_budget_bytes=model.bundle.least_budget_bytes) as tight:
        list(tight.generate(PROMPT, options()))
        assert tight.telemetry.read_bytes > roomy


def test_a_load_that_fails_leaves_no_threads(sample_bundle: Path, tmp_path: Path) -> None:
    spoiled = edited(sample_bundle, tmp_path / "spoiled")
    (spoiled / "dense/head.onnx").write_bytes(b"garbage")
    before = threading.active_count()
    for changes in ({}, {"memory_budget_bytes": 1}):
        with pytest.raises(InputError):
            lesonnx.load(spoiled if not changes else sample_bundle, **changes)
        assert threading.active_count() == before


def test_closing_twice_is_harmless(sample_bundle: Path) -> None:
    model = lesonnx.load(sample_bundle)
    model.close()
    model.close()


def test_public_names() -> None:
    for name in lesonnx.__all__:
        assert getattr(lesonnx, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        lesonnx.nothing  # type: ignore[attr-defined]  # noqa: B018
