"""States of fixed shape: how far a sequence goes back, what is exact about it, what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import RECURRENT, Tensors, derive, read_reference
from conftest import BundleFactory
from numpy.typing import NDArray
from test_parity import ENGINES_HERE, greedy, load

import lesonnx
from lesonnx.bundle import Bundle
from lesonnx.errors import InputError, LoadError
from lesonnx.generate import GenerationOptions
from lesonnx.runner import Runner
from lesonnx.states import LayerStates
from lesonnx.step_states import REWINDABLE_TOKENS

VOCAB_SIZE = 320
CASES = [(name, operators) for name in RECURRENT for operators in ("native", "portable")][1:]
Logits = NDArray[np.float32]


def run_script(runner: Runner, steps: list[tuple[list[int], int]]) -> list[bytes]:
    """Steps of some tokens, of which so many stay: the logits of those that do."""
    logits = []
    for token_ids, kept in steps:
        before = runner.num_tokens
        rows = runner.step(token_ids, list(range(len(token_ids))))
        logits.append(rows[:kept].tobytes())
        runner.rewind(before + kept)
    return logits


def random_script(seed: int, first_tokens: int = 24) -> list[tuple[list[int], int]]:
    random = np.random.default_rng(seed)
    steps = [(random.integers(0, VOCAB_SIZE, first_tokens).tolist(), first_tokens)]
    for _ in range(12):
        count = int(random.integers(1, REWINDABLE_TOKENS + 1))
        steps.append((random.integers(0, VOCAB_SIZE, count).tolist(), int(random.integers(0, count + 1))))
    return steps


def with_other_rejects(steps: list[tuple[list[int], int]], seed: int) -> list[tuple[list[int], int]]:
    """The same script, other tokens where they do not stay."""
    random = np.random.default_rng(seed)
    return [
        (token_ids[:kept] + random.integers(0, VOCAB_SIZE, len(token_ids) - kept).tolist(), kept)
        for token_ids, kept in steps
    ]


@pytest.mark.parametrize("engine", ENGINES_HERE)
@pytest.mark.parametrize(("name", "operators"), CASES)
def test_what_was_taken_back_leaves_no_trace(bundle_of: BundleFactory, name: str, operators: str, engine: str) -> None:
    """Bit for bit: a sequence depends on the tokens that stay and on the widths of steps, on nothing else."""
    bundle = bundle_of(name, operators=operators)
    for seed in range(5):
        steps = random_script(seed)
        got = []
        for script in (steps, with_other_rejects(steps, 100 + seed)):
            with load(bundle, engine=engine) as model:
                got.append(run_script(model.runner, script))
                assert model.runner.num_tokens == sum(kept for _, kept in steps)
        assert got[0] == got[1]


@pytest.mark.parametrize(("name", "operators"), CASES)
def test_steps_taken_back_whole_might_never_have_been(bundle_of: BundleFactory, name: str, operators: str) -> None:
    bundle = bundle_of(name, operators=operators)
    for seed in range(5):
        steps = [(token_ids, kept and len(token_ids)) for token_ids, kept in random_script(seed)]
        with load(bundle) as model, load(bundle) as other:
            got = run_script(model.runner, steps)
            expected = run_script(other.runner, [step for step in steps if step[1]])
            assert [logits for logits in got if logits] == expected


@pytest.mark.parametrize(("name", "operators"), CASES)
def test_what_stays_is_what_the_tokens_give(bundle_of: BundleFactory, name: str, operators: str) -> None:
    """Against a run of only the tokens that stay, in one step each: other widths, so not bit for bit."""
    bundle = bundle_of(name, operators=operators)
    for seed in range(3):
        steps = random_script(seed)
        kept_ids = [token for token_ids, kept in steps for token in token_ids[:kept]]
        with load(bundle) as model, load(bundle, prefill_chunk_tokens=1) as other:
            got = np.frombuffer(b"".join(run_script(model.runner, steps)), np.float32).reshape(-1, VOCAB_SIZE)
            expected = other.runner.prefill(kept_ids, all_logits=True)
            assert model.runner.token_ids == kept_ids
            assert np.abs(got - expected).max() < 1e-3


def dense_at_the_end(tensors: Tensors) -> Tensors:
    """The last two layers of qwen3_next without experts: their shared experts become the dense matrices."""
    changed = {}
    for key, value in tensors.items():
        if ".layers.2.mlp." in key or ".layers.3.mlp." in key:
            if ".shared_expert." not in key:
                continue
            key = key.replace(".shared_expert.", ".")
        changed[key] = value
    return changed


def test_a_head_that_carries_every_kind_of_state(bundle_of: BundleFactory, tmp_path: Path) -> None:
    """Dense layers at the end, one recurrent and one of attention, lie in the head with their states."""
    changes = {"mlp_only_layers": [2, 3], "intermediate_size": 32}
    checkpoint = derive(
        "qwen3_next", tmp_path / "dense_end", config=lambda config: config | changes, tensors=dense_at_the_end
    )
    bundle = bundle_of(checkpoint)
    kinds = {state.kind for state in Bundle(bundle).manifest.states if state.part == "head"}
    assert kinds == {"attention_key", "attention_value", "convolution", "recurrent"}
    prompt = read_reference("qwen3_next")["input_ids"].tolist()
    with load(bundle, prefill_chunk_tokens=1) as model:
        expected = model.runner.prefill(prompt, all_logits=True)
    with load(bundle, prefill_chunk_tokens=24) as model:
        runner = model.runner
        # No logits are asked for, yet the head must run.
        runner.prefill(prompt[:48])
        runner.step(prompt[48:64], [])
        runner.rewind(53)
        assert np.abs(runner.prefill(prompt[53:], all_logits=True) - expected[53:]).max() < 1e-3
    for seed in range(3):
        steps = random_script(seed)
        with load(bundle) as model, load(bundle) as other:
            assert run_script(model.runner, steps) == run_script(other.runner, with_other_rejects(steps, seed + 100))


@pytest.mark.parametrize("name", RECURRENT)
def test_rewinding_again_inside_the_same_step(bundle_of: BundleFactory, name: str) -> None:
    prompt = read_reference(name)["input_ids"].tolist()
    with load(bundle_of(name)) as model, load(bundle_of(name)) as other:
        for runner, path in ((model.runner, (20 + 11, 20 + 6, 20 + 6, 20 + 2)), (other.runner, (20 + 2,))):
            runner.step(prompt[:20], [0])
            runner.step(prompt[20:34], [0])
            for num_tokens in path:
                runner.rewind(num_tokens)
                assert runner.num_tokens == len(runner.token_ids) == num_tokens
        assert model.runner.step(prompt[22:30], [7]).tobytes() == other.runner.step(prompt[22:30], [7]).tobytes()


@pytest.mark.parametrize("name", RECURRENT)
def test_zero_is_always_reached(bundle_of: BundleFactory, name: str) -> None:
    reference = read_reference(name)
    prompt = reference["input_ids"].tolist()
    with load(bundle_of(name), prefill_chunk_tokens=24) as model:
        for _ in range(3):
            logits = model.runner.prefill(prompt, all_logits=True)
            assert np.abs(logits - reference["logits"]).max() < 1e-3
            model.runner.rewind(0)


UNREACHABLE = [
    # (widths of steps, to how many tokens, what the message says)
    ((40, 8), 39, "cannot rewind to 39 tokens: the states of this model go back to 40 to 48 tokens, or to 0"),
    ((40, 30), 69, "cannot rewind to 69 tokens: the states of this model go back to 40 or 70 tokens, or to 0"),
    ((20, 1), 1, "back to 20 to 21 tokens"),
    ((REWINDABLE_TOKENS + 1,), REWINDABLE_TOKENS, f"back to 0 or {REWINDABLE_TOKENS + 1} tokens"),
]


@pytest.mark.parametrize(("widths", "num_tokens", "message"), UNREACHABLE)
@pytest.mark.parametrize("name", RECURRENT)
def test_out_of_reach_is_said_and_nothing_is_lost(
    bundle_of: BundleFactory, name: str, widths: tuple[int, ...], num_tokens: int, message: str
) -> None:
    prompt = read_reference(name)["input_ids"].tolist()
    logits = []
    for rewinds in (True, False):
        with load(bundle_of(name)) as model:
            for width in widths:
                count = model.runner.num_tokens
                model.runner.step(prompt[count : count + width], [0])
            if rewinds:
                with pytest.raises(InputError, match=message):
                    model.runner.rewind(num_tokens)
            assert model.runner.num_tokens == sum(widths)
            logits.append(model.runner.step(prompt[sum(widths) :][:5], [4]).tobytes())
    assert logits[0] == logits[1]


@pytest.mark.parametrize("name", RECURRENT)
def test_a_step_that_breaks_off_has_changed_nothing(
    bundle_of: BundleFactory, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = read_reference(name)["input_ids"].tolist()
    with load(bundle_of(name)) as model, load(bundle_of(name)) as other:
        for runner in (model.runner, other.runner):
            runner.step(prompt[:10], [0])
        run_layer = model.runner.loader.run_layer

        def fail_late(place: int, *arguments: Any) -> None:
            if place == 2:
                raise LoadError("the disk is gone")
            run_layer(place, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(model.runner.loader, "run_layer", fail_late)
            with pytest.raises(LoadError):
                model.runner.step(prompt[50:58], [0])
        # What the broken step wrote over is no longer reached; where it began is.
        with pytest.raises(InputError, match="go back to 10 to 10 tokens"):
            model.runner.rewind(5)
        got, expected = (runner.step(prompt[10:18], [7]).tobytes() for runner in (model.runner, other.runner))
        assert got == expected


# -- prompts that go on from one another -------------------------------------------------------------------------------


@pytest.fixture
def conversation(bundle_of: BundleFactory) -> Iterator[lesonnx.Model]:
    with load(bundle_of("qwen3_next"), prefill_chunk_tokens=24) as model:
        yield model


def test_a_prompt_reuses_what_can_be_reached(conversation: lesonnx.Model) -> None:
    runner = conversation.runner
    prompt = read_reference("qwen3_next")["input_ids"].tolist()
    runner.prefill(prompt[:48])
    runner.step(prompt[48:56], [0])
    other = (prompt[0] + 1) % VOCAB_SIZE
    assert runner.common_tokens([*prompt[:56], other]) == 56
    assert runner.common_tokens(prompt[:56]) == 55
    assert runner.common_tokens([*prompt[:50], other, other]) == 50
    # The first 47 are common, but the last step began at 48.
    assert runner.common_tokens(prompt[:48]) == 0
    assert runner.common_tokens([other, other]) == 0
    runner.rewind(0)
    runner.prefill(prompt[:48])
    # A step wider than what is kept: its beginning, or all of it.
    assert runner.common_tokens([*prompt[:40], other, other]) == 24
    assert runner.common_tokens(prompt[:49]) == 48


@pytest.mark.parametrize("name", RECURRENT)
def test_a_second_answer_is_what_a_fresh_model_says(bundle_of: BundleFactory, name: str) -> None:
    """As a chat does: each prompt begins with the one before and its answer, or with a part of that."""
    prompt = read_reference(name)["input_ids"].tolist()
    options = GenerationOptions(max_new_tokens=8, ignore_eos=True)
    with load(bundle_of(name), prefill_chunk_tokens=24) as model:
        first = [token.id for token in model._generate(prompt[:30], options, reuse=True)]
        answer = [token for token in first if token is not None]
        for second, reused in (
            ([*prompt[:30], *answer, *prompt[30:50]], 30 + 7),
            ([*prompt[:20], *prompt[60:70]], 0),
        ):
            generation = model._generate(second, options, reuse=True)
            ids = [token.id for token in generation if token.id is not None]
            assert generation.report.reused_tokens == reused
            assert ids == greedy(bundle_of(name), second, 8)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECURRENT)
def test_bytes_are_counted(bundle_of: BundleFactory, name: str) -> None:
    """Buffers in pairs and the rows that are kept, as large as the arrays that a step touches."""
    manifest = Bundle(bundle_of(name)).manifest
    states = LayerStates(manifest)
    states.reserve(1)
    arrays: dict[int, int] = {}
    for side in range(2):
        assert states.side == side
        for part in manifest.parts:
            for array in (states.inputs(part.name) | states.outputs(part.name, REWINDABLE_TOKENS)).values():
                arrays[array.ctypes.data] = array.nbytes
        states.begin(1)
        states.commit(1)
    assert sum(arrays.values()) == states.bytes_at(states.capacity_tokens)
    grown = states.bytes_at(1024) - states.bytes_at(512)
    assert grown == 512 * sum(
        int(state.shape[1]) * int(state.shape[3]) * 4 for state in manifest.states if state.is_attention
    )


def test_rows_are_kept_of_narrow_steps_alone(bundle_of: BundleFactory) -> None:
    manifest = Bundle(bundle_of("qwen3_next")).manifest
    states = LayerStates(manifest)
    states.reserve(1)
    names = {name for state in manifest.states for name in state.row_names}
    assert names

    def given(num_rows: int) -> set[str]:
        return {name for part in manifest.parts for name in states.outputs(part.name, num_rows)} & names

    assert given(1) == given(REWINDABLE_TOKENS + 1) == set()
    assert given(2) == given(REWINDABLE_TOKENS) == names


def test_attention_alone_needs_no_second_buffer(bundle_of: BundleFactory) -> None:
    bundle: Path = bundle_of("qwen3_moe")
    with load(bundle) as model:
        model.runner.prefill([1, 2, 3])
        model.runner.rewind(1)
        model.runner.step([4], [0])
        assert model.runner.states.side == 0
