"""Twins: they compute what their parts compute, on the same caches; a host uses them where it can, and does without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import Tensors, derive, fixture
from conftest import BundleFactory, Outcome
from numpy.typing import NDArray

import lesonnx
from lesonnx.bundle import Bundle
from lesonnx.errors import BundleError, InputError, LesonnxError
from lesonnx.generate import GenerationOptions
from lesonnx.manifest import Twins
from lesonnx.twins import Twins as RuntimeTwins
from lesonnx_export.exporter import ExportOptions, export_bundle
from lesonnx_export.twin_graph import LONGEST_AXIS

CHUNK, CAPACITY = 4, 48
# Of the largest logit: float16 has 11 bits, and a few products follow one another.
TOLERANCE = 0.02
# Plain attention, q/k norms; a shared expert and biases; sinks and windows; latents; interleaved and partial rotation.
FAMILIES = ("qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "phimoe")
Logits = NDArray[np.float32]
Document = dict[str, Any]


@pytest.fixture(scope="session")
def twins_of(bundle_of: BundleFactory) -> Callable[..., Path]:
    """Float bundles with twins."""

    def make(name: str | Path, **options: Any) -> Path:
        chosen = {"accelerate": "dense", "twin_capacity_tokens": CAPACITY, "prefill_chunk_tokens": CHUNK} | options
        return bundle_of(name, **chosen)

    return make


def some_ids(bundle: Path, count: int) -> list[int]:
    vocab_size = json.loads((bundle / "manifest.json").read_text())["model"]["vocab_size"]
    return [int(token) for token in np.random.default_rng(7).integers(0, vocab_size, count)]


def logits_of(model: lesonnx.Model, token_ids: Sequence[int], prompt_tokens: int) -> Logits:
    """Logits after a prompt, and after every token that follows it, one a step."""
    rows = [model.runner.prefill(list(token_ids[:prompt_tokens]))]
    rows += [model.runner.step([token], [0])[0] for token in token_ids[prompt_tokens:]]
    return np.stack(rows)


def assert_near(found: Logits, expected: Logits) -> None:
    """Near, and not the same: these are other computations."""
    assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()
    assert not np.array_equal(found, expected)


@pytest.mark.parametrize("name", ["sample", *FAMILIES])
def test_twins_compute_what_their_parts_compute(twins_of: Callable[..., Path], name: str) -> None:
    """Over chunks of a prompt, steps of one token, and a last chunk that is too short for twins."""
    bundle = twins_of(name)
    ids = some_ids(bundle, 40)
    with lesonnx.load(bundle) as plain, lesonnx.load(bundle, accelerate="cpu") as twins:
        assert not plain.runner.twins.widths
        assert sorted(twins.runner.twins.widths) == [1, CHUNK]
        assert_near(logits_of(twins, ids, 2 * CHUNK + 3), logits_of(plain, ids, 2 * CHUNK + 3))
        for name, cache in plain.runner.states.arrays.items():
            filled = twins.runner.states.arrays[name][:, :, : len(ids)]
            np.testing.assert_allclose(filled, cache[:, :, : len(ids)], atol=TOLERANCE * np.abs(cache).max())
            assert not twins.runner.states.arrays[name][:, :, len(ids) :].any()


@pytest.mark.parametrize("name", ["sample", "qwen3_moe"])
def test_greedy_tokens_are_those_of_the_float_bundle(twins_of: Callable[..., Path], name: str) -> None:
    bundle = twins_of(name)
    options = GenerationOptions(max_new_tokens=24, ignore_eos=True)
    token_ids = []
    for accelerate in ("off", "cpu"):
        with lesonnx.load(bundle, accelerate=accelerate) as model:
            generation = model.generate(some_ids(bundle, 10), options)
            generation.text()
            token_ids.append(generation.report.token_ids)
    assert len(token_ids[0]) == 24
    assert token_ids[0] == token_ids[1]


@pytest.mark.parametrize(
    "options", [{"bits": 4, "dense_bits": 8, "kv_bits": 16}, {"twin_bits": 32}, {"target": "android", "twin_bits": 32}]
)
def test_other_precisions(twins_of: Callable[..., Path], options: dict[str, Any]) -> None:
    """Caches of float16 are read as they are; twins of float32 differ in the order of sums alone."""
    bundle = twins_of("qwen3_moe", **options)
    ids = some_ids(bundle, 14)
    with lesonnx.load(bundle) as plain, lesonnx.load(bundle, accelerate="cpu") as twins:
        found, expected = (logits_of(model, ids, 6) for model in (twins, plain))
    tolerance = 0.1 if "kv_bits" in options else 1e-4
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()
    assert not np.array_equal(found, expected)


def test_a_vocabulary_is_cut_into_pieces(
    twins_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    vocab_size = LONGEST_AXIS + 100

    def grow(tensors: Tensors) -> Tensors:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = np.tile(tensors[name], (-(-vocab_size // len(tensors[name])), 1))[:vocab_size]
            # Twice the same row would be twice the same logit: no piece could take another's place unseen.
            tensors[name] = (rows * np.linspace(0.5, 1.5, vocab_size)[:, None]).astype(rows.dtype)
        return tensors

    checkpoint = derive(
        "qwen3_moe",
        tmp_path_factory.mktemp("large") / "vocabulary",
        config=lambda config: config | {"vocab_size": vocab_size},
        tensors=grow,
    )
    bundle = twins_of(checkpoint)
    head = record_of(bundle).of("head", 1)
    assert head is not None
    assert [value.shape for value in head.outputs] == [[1, LONGEST_AXIS], [1, 100]]
    ids = some_ids(bundle, 6)
    with lesonnx.load(bundle) as plain, lesonnx.load(bundle, accelerate="cpu") as twins:
        assert_near(logits_of(twins, ids, 5), logits_of(plain, ids, 5))


def test_a_dense_layer_that_is_too_wide_to_be_fused(
    twins_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Gate and up of a dense layer side by side are longer than any axis may be: they are apart in a twin."""
    size = LONGEST_AXIS // 2 + 8

    def widen(tensors: Tensors) -> Tensors:
        for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            key = f"model.layers.0.mlp.{name}.weight"
            repeats = -(-size // tensors[key].shape[axis])
            wide = np.concatenate([tensors[key]] * repeats, axis=axis).take(range(size), axis=axis)
            tensors[key] = wide / repeats if name == "down_proj" else wide
        return tensors

    checkpoint = derive(
        "qwen3_moe_tied_dense0",
        tmp_path_factory.mktemp("wide") / "layer",
        config=lambda config: config | {"intermediate_size": size},
        tensors=widen,
    )
    bundle = twins_of(checkpoint)
    ids = some_ids(bundle, 6)
    with lesonnx.load(bundle) as plain, lesonnx.load(bundle, accelerate="cpu") as twins:
        assert_near(logits_of(twins, ids, 5), logits_of(plain, ids, 5))


def record_of(bundle: Path) -> Twins:
    twins = Bundle(bundle).manifest.twins
    assert twins is not None
    return twins


def test_decode_and_chunk_name_the_same_bytes(twins_of: Callable[..., Path]) -> None:
    bundle = twins_of("qwen3_moe")

    def offsets(path: str) -> set[tuple[str, ...]]:
        model = onnx.load(str(bundle / path), load_external_data=False)
        return {tuple(entry.value for entry in t.external_data) for t in model.graph.initializer if t.external_data}

    for twin in record_of(bundle).parts:
        other = record_of(bundle).of(twin.part, 1)
        assert other is not None
        assert offsets(twin.path) == offsets(other.path)
        assert {place[0] for place in offsets(twin.path)} == {"twins.bin"}


def test_routers_that_are_alike_share_a_selection(twins_of: Callable[..., Path]) -> None:
    record = record_of(twins_of("sample"))
    assert len(record.selections) == 6
    assert len({selection.path for selection in record.selections}) == 1
    # DeepSeek's router adds a bias of the layer's own before it selects.
    assert len({selection.path for selection in record_of(twins_of("deepseek_v3")).selections}) > 1


# -- steps of other widths, rewinds, long contexts ---------------------------------------------------------------------


def test_a_verify_pass_and_rewinds_use_the_same_caches(twins_of: Callable[..., Path]) -> None:
    bundle = twins_of("qwen3_moe")
    ids = some_ids(bundle, 16)
    with lesonnx.load(bundle) as plain, lesonnx.load(bundle, accelerate="cpu") as twins:
        rows = []
        for model in (twins, plain):
            runner = model.runner
            runner.prefill(ids[:9])
            verified = runner.step(ids[9:12], [0, 1, 2])
            runner.rewind(10)
            again = np.stack([runner.step([token], [0])[0] for token in ids[10:14]])
            rows.append(np.concatenate([verified, again]))
        assert_near(*rows)
        # After the rewind the same tokens were run one by one.
        assert np.abs(rows[0][1] - rows[0][3]).max() < TOLERANCE * np.abs(rows[0]).max()


def test_drafts_are_verified_by_the_parts(twins_of: Callable[..., Path]) -> None:
    """Passes of several rows and single steps in turns, a prompt that repeats itself: tokens as without twins."""
    bundle = twins_of("qwen3_moe", twin_capacity_tokens=128)
    options = GenerationOptions(max_new_tokens=20, ignore_eos=True)
    found = []
    for chosen in ({}, {"accelerate": "cpu", "draft": "ngram"}):
        with lesonnx.load(bundle, **chosen) as model:
            generation = model.generate(some_ids(bundle, 6) * 3, options)
            generation.text()
            found.append(generation.report.token_ids)
    assert found[0] == found[1]


def test_a_context_beyond_the_capacity_goes_on_without(twins_of: Callable[..., Path]) -> None:
    bundle = twins_of("qwen3_moe")
    ids = some_ids(bundle, CAPACITY + 6)
    with lesonnx.load(bundle) as plain, lesonnx.load(bundle, accelerate="cpu") as twins:
        states = twins.runner.states
        found = logits_of(twins, ids[: CAPACITY - 2], CAPACITY - 4)
        assert states.capacity_tokens == CAPACITY
        found = np.stack([twins.runner.step([token], [0])[0] for token in ids[CAPACITY - 2 :]])
        assert states.capacity_tokens > CAPACITY
        assert twins.runner.twins.for_step(1, states) is None
        expected = logits_of(plain, ids, CAPACITY - 2)[1:]
        assert_near(found, expected)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_whole_capacity_is_paid_for(twins_of: Callable[..., Path]) -> None:
    bundle = twins_of("qwen3_moe", twin_capacity_tokens=512)
    budget = 2_000_000_000
    with lesonnx.load(bundle, accelerate="cpu", memory_budget_bytes=budget, expert_budget_bytes=300_000) as model:
        assert model.runner.loader.expert_budget_bytes == 300_000
        assert model.runner.states.capacity_for(1) == 512
        with lesonnx.load(bundle) as plain:
            ids = some_ids(bundle, 9)
            assert_near(logits_of(model, ids, 6), logits_of(plain, ids, 6))


# -- providers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def edited(twins_of: Callable[..., Path], quick_path: Path) -> Callable[[Callable[[Document], None]], Path]:
    """A bundle with another manifest."""

    def make(change: Callable[[Document], None]) -> Path:
        target = quick_path / "bundle"
        shutil.copytree(twins_of("qwen3_moe"), target)
        document = json.loads((target / "manifest.json").read_text())
        change(document)
        (target / "manifest.json").write_text(json.dumps(document))
        return target

    return make


def test_a_provider_that_is_not_installed_is_passed_over_once(twins_of: Callable[..., Path]) -> None:
    bundle = twins_of("qwen3_moe")
    ids = some_ids(bundle, 8)
    with lesonnx.load(bundle) as model, lesonnx.load(bundle, accelerate="off") as plain:
        if model.runner.twins.widths:
            pytest.skip("CoreML is installed here")
        assert model.notes == ["the installed ONNX Runtime has no CoreMLExecutionProvider: dense parts run without it"]
        assert not plain.notes
        np.testing.assert_array_equal(logits_of(model, ids, 5), logits_of(plain, ids, 5))


def test_a_provider_that_takes_no_twin_leaves_the_parts(edited: Callable[..., Path]) -> None:
    """A provider that the wheel has and that takes no node: the session is refused, the parts themselves run."""
    import onnxruntime

    if "AzureExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has no provider that takes nothing")

    def change(document: Document) -> None:
        for twin in document["twins"]["parts"]:
            twin["providers"] = {"desktop": [{"name": "AzureExecutionProvider", "options": {}}]}

    bundle = edited(change)
    ids = some_ids(bundle, 8)
    with lesonnx.load(bundle) as model, lesonnx.load(bundle, accelerate="off") as plain:
        assert [note.split(":")[0] for note in model.notes] == [
            "steps of 1 tokens do not use AzureExecutionProvider",
            f"steps of {CHUNK} tokens do not use AzureExecutionProvider",
        ]
        np.testing.assert_array_equal(logits_of(model, ids, 5), logits_of(plain, ids, 5))


def test_a_target_that_is_not_listed_has_no_twins(twins_of: Callable[..., Path]) -> None:
    with lesonnx.load(twins_of("qwen3_moe", target="ios")) as model:
        assert not model.notes
        assert not model.runner.twins.widths


def test_lists_by_target(twins_of: Callable[..., Path]) -> None:
    def listed(**options: Any) -> dict[str, list[str]]:
        providers = record_of(twins_of("qwen3_moe", **options)).parts[0].providers
        return {target: [provider.name for provider in found] for target, found in providers.items()}

    assert listed(target="ios") == {"ios": ["CoreMLExecutionProvider"]}
    assert listed() == {"desktop": ["CoreMLExecutionProvider"]}
    android = ["QNNExecutionProvider", "NnapiExecutionProvider", "XnnpackExecutionProvider"]
    assert listed(target="android", twin_bits=32) == {"android": android}
    manifest = Bundle(twins_of("qwen3_moe", target="ios")).manifest
    assert {tuple(p.name for p in part.providers["ios"]) for part in manifest.parts} == {("CPUExecutionProvider",)}


# -- bad input ---------------------------------------------------------------------------------------------------------


def twin(document: Document, place: int = 0) -> Any:
    return document["twins"]["parts"][place]


BROKEN: dict[str, tuple[Callable[[Document], Any], str]] = {
    "part": (lambda d: twin(d).update(part="embed"), "'embed' with 1 rows is no twin"),
    "rows of the head": (lambda d: d["twins"]["parts"][-1].update(rows=3), "'head' with 3 rows is no twin"),
    "missing": (lambda d: d["twins"]["parts"].pop(0), "'segment_000' has none of 1 rows"),
    "twice": (lambda d: d["twins"]["parts"].append(twin(d)), "'segment_000' has two of 1 rows"),
    "symbol": (lambda d: twin(d)["inputs"][0].update(shape=[1, "T", 64]), "is not fixed"),
    "shape": (lambda d: twin(d)["inputs"][0].update(shape=[1, 1, 8]), "'hidden' of 'dense/twin_segment_000_1.onnx' is"),
    "input": (lambda d: twin(d)["inputs"][0].update(name="other"), "takes 'other'"),
    "capacity": (lambda d: d["twins"].update(capacity_tokens=99), "expected float32 [1, 2, 99"),
    "rows of a cache": (lambda d: twin(d)["outputs"].pop(0), "does not give 'present_key_0_rows'"),
    "selection": (lambda d: d["twins"]["selections"].pop(), "every segment needs its selection"),
    "selected": (lambda d: d["twins"]["selections"][0]["outputs"].pop(0), "does not give 'topk_ids'"),
    "logits": (lambda d: d["twins"]["selections"][0]["inputs"][0].update(shape=["T", 7]), "takes 'router_logits_0'"),
    "pieces": (lambda d: d["twins"]["parts"][-1]["outputs"].pop(), "pieces of logits"),
    "exactness": (lambda d: d["twins"].update(exact_over_widths=True), "exact_over_widths"),
    "path": (lambda d: d["twins"].update(data="../x"), "must be relative and stay inside"),
    "file": (lambda d: d["twins"].update(data="dense/nothing.bin"), "missing from the bundle"),
    "positions": (lambda d: d["twins"]["positions"]["inputs"][0].update(name="ids"), "positions takes 'ids'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_records_are_refused_in_one_line(edited: Callable[..., Path], case: str) -> None:
    change, expected = BROKEN[case]
    with pytest.raises(BundleError) as error:
        lesonnx.load(edited(change))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_that_is_not_what_the_record_says(edited: Callable[..., Path]) -> None:
    def change(document: Document) -> None:
        parts = document["twins"]["parts"]
        parts[0]["path"], parts[2]["path"] = parts[2]["path"], parts[0]["path"]

    with pytest.raises(BundleError, match=r"twin_segment_00\d_1\.onnx: input"):
        lesonnx.load(edited(change), accelerate="cpu")


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("qwen3_next", {}, "it has layers with recurrent or convolution states"),
        ("smallthinker", {}, "its router reads a layer before attention"),
        ("gemma4_text", {}, "needs the operator Gelu, which twins for desktop cannot have"),
        ("phimoe", {"target": "android"}, "needs the operator LayerNormalization, which twins for android cannot have"),
        ("qwen3_moe", {"kv_bits": 8}, "--accelerate dense does not go with --kv-bits 8"),
        ("qwen3_moe", {"prefill_chunk_tokens": 1024, "twin_capacity_tokens": 16000}, "at most 4 axes of 1 to 16384"),
    ],
)
def test_what_has_no_twins_is_refused_before_any_work(
    quick_path: Path, name: str, options: dict[str, Any], expected: str
) -> None:
    chosen = ExportOptions(bits=32, accelerate="dense", **options)
    if "twin_capacity_tokens" in options:
        source = derive(name, quick_path / "long", config=lambda c: c | {"max_position_embeddings": 20000})
    else:
        source = fixture(name)
    with pytest.raises(InputError) as error:
        export_bundle(source, quick_path / "bundle", chosen)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert [path.name for path in quick_path.iterdir() if "bundle" in path.name] == []


def test_modes(twins_of: Callable[..., Path], bundle_of: BundleFactory, lesonnx: Callable[..., Outcome]) -> None:
    arguments = ("--prompt-ids", "1,2,3", "--max-tokens", "2")
    assert lesonnx("run", twins_of("qwen3_moe"), *arguments, "--accelerate", "cpu").code == 0
    outcome = lesonnx("run", bundle_of("qwen3_moe"), *arguments, "--accelerate", "cpu")
    assert outcome.code == 2
    assert "has no twins; export with --accelerate dense" in outcome.error
    assert "twins" not in json.loads((bundle_of("qwen3_moe") / "manifest.json").read_text())
    shown = lesonnx("inspect", twins_of("qwen3_moe")).out
    assert f"in float16, for steps of 1, {CHUNK} tokens over caches of {CAPACITY}" in shown


def test_an_export_that_was_broken_off_makes_its_twins_anew(
    twins_of: Callable[..., Path], quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lesonnx_export import exporter

    options = ExportOptions(
        bits=32, accelerate="dense", twin_capacity_tokens=CAPACITY, prefill_chunk_tokens=CHUNK, num_workers=1
    )

    def broken(*_: Any) -> None:
        raise LesonnxError("broken off")

    with monkeypatch.context() as patch:
        patch.setattr(exporter, "make_manifest", broken)
        with pytest.raises(LesonnxError, match="broken off"):
            export_bundle(fixture("qwen3_moe"), quick_path / "bundle", options)
    export_bundle(fixture("qwen3_moe"), quick_path / "bundle", options, resume=True)
    for path in sorted((twins_of("qwen3_moe") / "dense").iterdir()):
        assert (quick_path / "bundle" / "dense" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_reference_runs_without_twins(
    twins_of: Callable[..., Path], bundle_of: BundleFactory, lesonnx: Callable[..., Outcome]
) -> None:
    """Whether or not it has some: else what twins round would not show, or nothing would run."""
    twins, plain = twins_of("qwen3_moe"), bundle_of("qwen3_moe")
    for reference in (twins, plain):
        outcome = lesonnx("verify", twins, "--reference", reference, "--accelerate", "cpu", "--max-kl", "1", "--json")
        assert outcome.code == 0, outcome.error
        assert json.loads(outcome.out)["max_abs_diff"] > 0
    same = json.loads(lesonnx("verify", twins, "--reference", twins, "--accelerate", "off", "--json").out)
    assert same["max_abs_diff"] == 0


@pytest.mark.parametrize("command", ["verify", "eval"])
@pytest.mark.parametrize("option", ["--draft", "--draft-model"])
def test_nothing_is_drafted_where_tokens_are_given(lesonnx: Callable[..., Outcome], command: str, option: str) -> None:
    outcome = lesonnx(command, "bundle", option, "ngram")
    assert outcome.code == 2
    assert f"No such option: {option}" in outcome.err or f"No such option '{option}'" in outcome.err
    assert "--accelerate" in lesonnx(command, "--help").out


@pytest.mark.parametrize(
    ("prompt", "tokens", "accelerate", "expected"),
    [
        (3, 2, "cpu", "cpu"),
        (3, 1, "cpu", "off"),
        (CHUNK, 1, "cpu", "cpu"),
        (CHUNK + 1, 1, "cpu", "cpu"),
        (CAPACITY + 1, 2, "cpu", "cpu"),
        (3, 2, "off", "off"),
    ],
)
def test_run_says_whether_twins_ran(
    twins_of: Callable[..., Path],
    lesonnx: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    prompt: int,
    tokens: int,
    accelerate: str,
    expected: str,
) -> None:
    """As the steps themselves did: what was handed out to them is counted."""
    handed = []
    for_step = RuntimeTwins.for_step

    def counted(self: RuntimeTwins, num_rows: int, states: Any) -> Any:
        handed.append(for_step(self, num_rows, states))
        return handed[-1]

    monkeypatch.setattr(RuntimeTwins, "for_step", counted)
    bundle = twins_of("qwen3_moe")
    prompt_ids = ",".join(map(str, some_ids(bundle, prompt)))
    arguments = ("run", bundle, "--prompt-ids", prompt_ids, "--max-tokens", tokens, "--ignore-eos")
    found = json.loads(lesonnx(*arguments, "--accelerate", accelerate, "--json").out)
    assert found["accelerate"] == expected
    assert any(handed) == (expected != "off")
    assert ("twins ran" in lesonnx(*arguments, "--accelerate", accelerate).err) == (expected != "off")
