"""Float bundles compute what transformers computes, however the checkpoint is laid out and the bundle is run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    FAMILIES,
    RECURRENT,
    Config,
    Tensors,
    cast,
    derive,
    fuse_experts,
    fuse_lfm2,
    fuse_mixtral,
    nest_text_config,
    prefix_with,
    read_config,
    read_reference,
    read_tensors,
    round_to_float16,
    spell_as_transformers_4,
)
from conftest import BundleFactory
from forward import Forward, file_bytes
from numpy.typing import NDArray

import lesonnx
from lesonnx.bundle import Bundle
from lesonnx.engines import ENGINES
from lesonnx.errors import InputError
from lesonnx.generate import GenerationOptions
from lesonnx.model import SCHEDULES

TOLERANCE = 1e-3  # of the fixtures' README; most logits are within 1e-4
ENGINES_HERE = [name for name in ENGINES if name != "auto"]
Logits = NDArray[np.float32]


def load(bundle: Path, **options: Any) -> lesonnx.Model:
    """A loaded bundle; skips where the engine asked for is not built, or ONNX Runtime is too old for the bundle."""
    try:
        return lesonnx.load(bundle, **options)
    except InputError as error:
        if "library is not built" in str(error) or "bundle needs ONNX Runtime" in str(error):
            pytest.skip(str(error))
        raise


def logits_of(bundle: Path, token_ids: Sequence[int], **options: Any) -> Logits:
    """Logits at every position of a prompt."""
    with load(bundle, **options) as model:
        return model.runner.prefill(list(token_ids), all_logits=True)


def greedy(bundle: Path, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    with load(bundle, **options) as model:
        generation = model.generate(list(prompt), GenerationOptions(max_new_tokens=count, ignore_eos=True))
        return [token.id for token in generation if token.id is not None]


def assert_reference(bundle: Path, name: str, **options: Any) -> None:
    reference = read_reference(name)
    logits = logits_of(bundle, reference["input_ids"].tolist(), **options)
    worst = np.abs(logits - reference["logits"]).max(axis=1)
    assert worst.max() < TOLERANCE, f"position {worst.argmax()}: {worst.max()}"
    prompt = reference["input_ids"][: int(reference["greedy_prompt_len"])].tolist()
    expected = reference["greedy_ids"].tolist()
    assert greedy(bundle, prompt, len(expected), **options) == expected


@pytest.mark.parametrize("chunk", [1, 7, 24, 96])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("engine", ENGINES_HERE)
@pytest.mark.parametrize("name", FAMILIES + RECURRENT)
def test_reference(bundle_of: BundleFactory, name: str, engine: str, schedule: str, chunk: int) -> None:
    assert_reference(bundle_of(name), name, engine=engine, schedule=schedule, prefill_chunk_tokens=chunk)


def test_sample_reference(bundle_of: BundleFactory) -> None:
    assert_reference(bundle_of("sample"), "sample", schedule="resident")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tests_own_forward_pass_agrees_with_transformers(name: str) -> None:
    reference = read_reference(name)
    trace = Forward.of(name)(reference["input_ids"].tolist())
    assert np.abs(trace.logits - reference["logits"]).max() < TOLERANCE


# -- the same checkpoint in other layouts ------------------------------------------------------------------------------

FUSE = dict.fromkeys(FAMILIES + RECURRENT, fuse_experts) | {"mixtral": fuse_mixtral, "lfm2_moe": fuse_lfm2}
VARIANTS: dict[str, dict[str, Any]] = {
    "sharded": {"num_shards": 3},
    "transformers_4": {"config": spell_as_transformers_4},
    "model.language_model": {
        "config": nest_text_config,
        "tensors": prefix_with("model.language_model.", "lm_head."),
    },
    "language_model.model": {
        "config": nest_text_config,
        "tensors": prefix_with("language_model.model.", "language_model.lm_head."),
    },
    "no_prefix": {"tensors": prefix_with("", "lm_head.")},
    "float32": {"tensors": cast(np.float32)},
}


def assert_same_bundle(bundle_of: BundleFactory, name: str, variant: Path, **options: Any) -> None:
    """Not a byte of the weights may depend on how the checkpoint was laid out. (Graphs hold the tensors' names.)"""
    ours, theirs = file_bytes(bundle_of(variant, **options)), file_bytes(bundle_of(name, **options))
    assert set(ours) == set(theirs)
    weights = [path for path in theirs if path.endswith((".pack", ".bin"))]
    assert [path for path in weights if theirs[path] != ours[path]] == []


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FAMILIES + RECURRENT)
def test_layout_does_not_matter(bundle_of: BundleFactory, tmp_path: Path, name: str, variant: str) -> None:
    checkpoint = derive(name, tmp_path / variant, **VARIANTS[variant])
    assert_reference(bundle_of(checkpoint), name)
    assert_same_bundle(bundle_of, name, checkpoint)


@pytest.mark.parametrize("name", FUSE)
def test_fused_experts(bundle_of: BundleFactory, tmp_path: Path, name: str) -> None:
    checkpoint = derive(name, tmp_path / "fused", tensors=FUSE[name])
    assert not any(".experts.0." in key for key in FUSE[name](read_tensors(name)))
    assert_reference(bundle_of(checkpoint), name)
    assert_same_bundle(bundle_of, name, checkpoint, bits=4)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_float16(bundle_of: BundleFactory, tmp_path: Path, name: str) -> None:
    def convert(tensors: Tensors) -> Tensors:
        return cast(np.float16)(round_to_float16(tensors))

    checkpoint = derive(name, tmp_path / "float16", tensors=convert)
    token_ids = read_reference(name)["input_ids"].tolist()
    expected = Forward(read_config(name), convert(read_tensors(name)))(token_ids).logits
    assert np.abs(logits_of(bundle_of(checkpoint), token_ids) - expected).max() < TOLERANCE


@pytest.mark.parametrize("engine", ENGINES_HERE)
def test_float16_caches(bundle_of: BundleFactory, engine: str) -> None:
    """Half the bytes, nearly the same logits; still the same bits for every schedule."""
    bundle = bundle_of("qwen3_moe", kv_bits=16)
    reference = read_reference("qwen3_moe")
    prompt = reference["input_ids"].tolist()
    got = [
        logits_of(bundle, prompt, engine=engine, schedule=schedule, prefill_chunk_tokens=24) for schedule in SCHEDULES
    ]
    assert 0 < np.abs(got[0] - reference["logits"]).max() < 0.02
    assert all(logits.tobytes() == got[0].tobytes() for logits in got)


@pytest.mark.parametrize("engine", ENGINES_HERE)
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_int8_caches(bundle_of: BundleFactory, name: str, engine: str) -> None:
    """A quarter of the bytes; the same bits for every schedule, and after a rewind."""
    bundle = bundle_of(name, kv_bits=8)
    reference = read_reference(name)
    prompt = reference["input_ids"].tolist()
    got = [
        logits_of(bundle, prompt, engine=engine, schedule=schedule, prefill_chunk_tokens=24) for schedule in SCHEDULES
    ]
    # Random routers choose other experts for a hair's breadth: some rows differ much.
    assert 0 < np.median(np.abs(got[0] - reference["logits"])) < 0.1
    assert all(logits.tobytes() == got[0].tobytes() for logits in got)
    with lesonnx.load(bundle, engine=engine) as model:
        assert {array.dtype for array in model.runner.states.arrays.values()} <= {np.dtype(np.int8)}
        first = model.runner.prefill(prompt)
        model.runner.rewind(len(prompt) // 2)
        again = model.runner.prefill(prompt[len(prompt) // 2 :])
        assert np.abs(again - first).max() < 1e-4


def test_keys_that_are_left_out_take_the_familys_defaults(bundle_of: BundleFactory, tmp_path: Path) -> None:
    def leave_out(config: Config) -> Config:
        # The fixture's values for these equal transformers' defaults for qwen2_moe.
        defaults = (
            "rms_norm_eps",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
            "qkv_bias",
            "hidden_act",
        )
        kept = {key: value for key, value in config.items() if key not in defaults}
        kept["rope_parameters"] = {"rope_type": "default"}
        return kept

    checkpoint = derive("qwen2_moe", tmp_path / "left_out", config=leave_out)
    assert_same_bundle(bundle_of, "qwen2_moe", checkpoint)


def test_an_equal_head_is_tied_whatever_the_config_says(bundle_of: BundleFactory, tmp_path: Path) -> None:
    name = "qwen3_moe_tied_dense0"

    def add_head(tensors: Tensors) -> Tensors:
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}

    def untie(config: Config) -> Config:
        return config | {"tie_word_embeddings": False}

    checkpoint = derive(name, tmp_path / "explicit", tensors=add_head, config=untie)
    assert_reference(bundle_of(checkpoint), name)
    assert_same_bundle(bundle_of, name, checkpoint)


def test_a_different_head_is_used_whatever_the_config_says(bundle_of: BundleFactory, tmp_path: Path) -> None:
    checkpoint = derive("qwen3_moe", tmp_path / "untied", config=lambda config: config | {"tie_word_embeddings": True})
    assert_reference(bundle_of(checkpoint), "qwen3_moe")


# -- schedules, budgets, waves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [32, 8, 4, 2])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "qwen3_next"])
@pytest.mark.parametrize("engine", ENGINES_HERE)
def test_schedules_and_budgets_do_not_change_a_bit(bundle_of: BundleFactory, name: str, engine: str, bits: int) -> None:
    bundle = bundle_of(name, bits=bits)
    least = Bundle(bundle).least_budget_bytes
    prompt = read_reference(name)["input_ids"][:40].tolist()
    for chunk in (7, 40):
        common: dict[str, Any] = {"engine": engine, "prefill_chunk_tokens": chunk}
        expected = logits_of(bundle, prompt, schedule="resident", **common)
        for options in (
            {"schedule": "on-demand", "expert_budget_bytes": least},
            {"schedule": "cache", "expert_budget_bytes": 2 * least},
            {"schedule": "les", "expert_budget_bytes": least, "num_loaders": 1},
            {"schedule": "les", "expert_budget_bytes": 3 * least, "policy": "lfu"},
            {"schedule": "les"},
        ):
            got = logits_of(bundle, prompt, **options, **common)
            assert got.tobytes() == expected.tobytes(), (options, chunk)


def test_the_least_budget_makes_waves(bundle_of: BundleFactory) -> None:
    """What the test above relies on: a chunk of 40 tokens wants more experts than the least budget holds."""
    bundle = Bundle(bundle_of("qwen3_moe"))
    trace = Forward.of("qwen3_moe")(read_reference("qwen3_moe")["input_ids"][:40].tolist())
    kind = bundle.manifest.expert_kinds[0]
    wanted = min(len(np.unique(chosen)) for chosen in trace.experts.values())
    assert wanted * kind.cost_bytes >= 2 * bundle.least_budget_bytes


def test_same_tokens_in_one_run_and_in_two(bundle_of: BundleFactory) -> None:
    """Decoding continues on the caches of the prefill, past a growth step of the caches."""
    bundle = bundle_of("qwen3_moe")
    prompt = read_reference("qwen3_moe")["input_ids"].tolist()
    with load(bundle, prefill_chunk_tokens=96) as model:
        model.runner.prefill(prompt)
        model.runner.rewind(40)
        again = model.runner.prefill(prompt[40:], all_logits=True)
    assert np.abs(again - read_reference("qwen3_moe")["logits"][40:]).max() < TOLERANCE


def disjoint_prompts(forward: Forward, vocab_size: int) -> tuple[list[int], list[int]]:
    """Two prompts of one token whose experts differ in every layer."""
    chosen = {token: forward([token]).experts for token in range(vocab_size)}

    def disjoint(one: int, other: int) -> bool:
        return all(not set(chosen[one][layer][0]) & set(chosen[other][layer][0]) for layer in chosen[one])

    pairs = itertools.combinations(range(vocab_size), 2)
    one, other = next(pair for pair in pairs if disjoint(*pair))
    return [one], [other]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_prompts_with_disjoint_experts(bundle_of: BundleFactory, name: str, schedule: str) -> None:
    """Nothing of a prompt is baked into the bundle or left behind in the runner."""
    forward = Forward.of(name)
    for prompt in disjoint_prompts(forward, read_config(name)["vocab_size"]):
        with load(bundle_of(name), schedule=schedule) as model:
            logits = model.runner.prefill(prompt)
        assert np.abs(logits - forward(prompt).logits[-1]).max() < TOLERANCE
    with load(bundle_of(name), schedule=schedule) as model:
        for prompt in disjoint_prompts(forward, read_config(name)["vocab_size"]) * 2:
            model.runner.rewind(0)
            assert np.abs(model.runner.prefill(prompt) - forward(prompt).logits[-1]).max() < TOLERANCE
