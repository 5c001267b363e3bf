"""The DSpark drafter: its parts against its formulas, what it keeps of the target, and drafters that do not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import FAMILIES, SAMPLE, read_reference, read_tensors, write_checkpoint
from conftest import BundleFactory, Outcome
from numpy.typing import NDArray
from plain_dspark import DRAFTER, REFERENCE, PlainDSpark, read_drafter, sample_layer_outputs
from test_segments import PlainHost, Values

import lesonnx as package
from lesonnx.bundle import Bundle
from lesonnx.errors import BudgetError, BundleError, CheckpointError, InputError, LesonnxError
from lesonnx.eviction import ONE
from lesonnx.manifest import parse_manifest
from lesonnx.sampling import Sampler, SamplingOptions
from lesonnx.speculative.drafter import Draft, DraftSampler
from lesonnx.speculative.dspark import PENDING_TOKENS, DSparkDrafter
from lesonnx_export.exporter import ExportOptions, export_bundle

CASES = "abc"
Config = dict[str, Any]
Tensors = dict[str, NDArray[Any]]


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

    def warm_up(self) -> None:
        pass


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


# -- export ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [32, 4])
def test_embedding_and_head_are_stored_once(bundle_of: BundleFactory, bits: int) -> None:
    bundle = Bundle(bundle_of("sample", bits=bits, drafter=DRAFTER))
    drafter = bundle.manifest.drafter
    assert drafter is not None

    def place(path: Path, word: str) -> list[str]:
        tensors = onnx.load(str(path), load_external_data=False).graph.initializer
        chosen = max((t for t in tensors if word in t.name), key=lambda tensor: int(np.prod(tensor.dims)))
        return [entry.value for entry in chosen.external_data]

    embed = place(bundle.part_file(bundle.manifest.part("embed")), "embed_tokens")
    assert place(bundle.part_file(drafter.part("drafter_block")), "embed_tokens") == embed
    for word in ("k_proj", "v_proj"):
        places = [place(bundle.part_file(drafter.part(role)), word) for role in ("drafter_context", "drafter_block")]
        assert places[0] == places[1]


def test_a_bundle_without_drafter_says_nothing_of_it(bundle_of: BundleFactory, float_bundle: Path) -> None:
    plain = Bundle(bundle_of("sample"))
    assert '"drafter"' not in (plain.directory / "manifest.json").read_text()
    with pytest.raises(InputError, match="this bundle has no dspark drafter; export with --drafter"):
        DSparkDrafter(plain)
    # The model is the same one, bit for bit.
    for name in ("segment_003", "head"):
        assert (
            plain.file(f"dense/{name}.onnx").read_bytes()
            == Bundle(float_bundle).file(f"dense/{name}.onnx").read_bytes()
        )
    assert plain.manifest.model == Bundle(float_bundle).manifest.model


def test_inspect_names_it(lesonnx: Callable[..., Outcome], float_bundle: Path) -> None:
    shown = lesonnx("inspect", float_bundle).out
    assert re.search(r"drafter +dspark, blocks of 6, 1.2 M parameters, 1.02 kB a token", shown)
    facts = json.loads(lesonnx("inspect", float_bundle, "--json").out)["drafter"]
    assert facts["cache_bytes_per_token"] == 2 * 2 * 2 * 32 * 4
    assert facts["target_layer_ids"] == [0, 2, 4]


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


def test_a_drafter_may_hold_copies_of_embedding_and_head(
    bundle_of: BundleFactory, tmp_path: Path, float_bundle: Path
) -> None:
    """They are compared and not stored: the bundle is the same."""
    config, tensors = read_drafter()
    embedding = read_tensors("sample")["model.embed_tokens.weight"]
    copies = {"embed_tokens.weight": embedding, "lm_head.weight": embedding}
    whole = Bundle(bundle_of("sample", drafter=write_checkpoint(tmp_path / "whole", config, tensors | copies)))
    assert whole.file("dense/dense.bin").read_bytes() == Bundle(float_bundle).file("dense/dense.bin").read_bytes()
    assert whole.manifest == Bundle(float_bundle).manifest


def test_an_export_broken_off_in_the_drafter_goes_on(tmp_path: Path, float_bundle: Path) -> None:
    """It finds what its parts share, and goes on with that drafter alone."""
    bundle, options = tmp_path / "bundle", ExportOptions(bits=32, drafter=DRAFTER, num_workers=1)
    parts = iter(range(100))

    def progress(what: str, num_bytes: int) -> None:
        if what == "dense parts" and next(parts) == 15:
            raise LesonnxError("broken off")

    with pytest.raises(LesonnxError, match="broken off"):
        export_bundle(SAMPLE, bundle, options, progress=progress)
    journal = (tmp_path / ".bundle.partial" / "journal.jsonl").read_text()
    assert '"drafter_block"' in journal
    assert '"drafter_markov"' not in journal
    other = write_checkpoint(tmp_path / "other", *read_drafter())
    (other / "config.json").write_text(json.dumps(read_drafter()[0] | {"num_anchors": 25}))
    for drafter in (None, other):
        with pytest.raises(InputError, match="another checkpoint or options"):
            export_bundle(SAMPLE, bundle, replace(options, drafter=drafter), resume=True)
    export_bundle(SAMPLE, bundle, options, resume=True)
    for name in ("manifest.json", "dense/dense.bin", "dense/drafter_block.onnx", "dense/drafter_markov.onnx"):
        assert (bundle / name).read_bytes() == (float_bundle / name).read_bytes(), name


def test_the_command_names_what_is_wrong(lesonnx: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = lesonnx("export", SAMPLE, tmp_path / "bundle", "--drafter", tmp_path / "nothing")
    assert outcome.code == 2
    assert "nothing: no such checkpoint directory" in outcome.error
    outcome = lesonnx("export", SAMPLE, tmp_path / "bundle", "--drafter", SAMPLE)
    assert outcome.code == 2
    assert "no tensor named 'fc.weight'" in outcome.error


@dataclass(frozen=True)
class BadDrafter:
    """What is wrong, and the words of the one line that says so."""

    words: tuple[str, ...]
    config: Callable[[Config], Config] = dict
    tensors: Callable[[Tensors], Tensors] = dict
    target: str = "sample"


def changed(**values: Any) -> Callable[[Config], Config]:
    return lambda config: config | values


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def shifted_embedding(tensors: Tensors) -> Tensors:
    embedding = read_tensors("sample")["model.embed_tokens.weight"].copy()
    embedding[5, 7] += 1
    return tensors | {"lm_head.weight": embedding}


BAD = {
    "another vocabulary": BadDrafter(
        ("config.json", "vocab_size is 2049", "target's is 2048"), changed(vocab_size=2049)
    ),
    "another width": BadDrafter(("config.json", "hidden_size is 256", "192"), changed(hidden_size=256)),
    "another depth": BadDrafter(("num_target_layers is 7", "target's is 6"), changed(num_target_layers=7)),
    "a layer that is not there": BadDrafter(("target_layer_ids", "-1 to 5", "6"), changed(target_layer_ids=[0, 2, 6])),
    "a layer twice": BadDrafter(("target_layer_ids", "different"), changed(target_layer_ids=[0, 2, 2])),
    "other layers than its tensors": BadDrafter(
        ("fc.weight", "[192, 576]", "[192, 384]"), changed(target_layer_ids=[0, 2])
    ),
    "a mask beyond the vocabulary": BadDrafter(("mask_token_id is 2048", "2048"), changed(mask_token_id=2048)),
    "another Markov head": BadDrafter(("markov_head_type", "'gated'", "'vanilla'"), changed(markov_head_type="gated")),
    "another architecture": BadDrafter(
        ("architectures", "Qwen3DSparkModel"), changed(architectures=["LlamaForCausalLM"])
    ),
    "a rank of nothing": BadDrafter(("markov_rank",), changed(markov_rank=0)),
    "a sliding window": BadDrafter(("layer_types",), changed(layer_types=["sliding_attention"] * 2)),
    "positions that stretch": BadDrafter(
        ("rotary positions",), changed(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    ),
    "a tensor is missing": BadDrafter(("hidden_norm.weight", "missing"), tensors=without("hidden_norm.weight")),
    "a tensor too many": BadDrafter(
        ("layers.9.extra", "not part"), tensors=lambda tensors: tensors | {"layers.9.extra": np.zeros(3, np.float32)}
    ),
    "a head of another model": BadDrafter(("lm_head.weight", "differs from the target's"), tensors=shifted_embedding),
    "no drafter at all": BadDrafter(("fc.weight",), tensors=lambda tensors: {"x": np.zeros(3, np.float32)}),
    "a target that scales its embedding": BadDrafter(
        ("embedding and head", "granitemoe"),
        changed(vocab_size=320, hidden_size=64, num_target_layers=3, target_layer_ids=[0, 1, 2]),
        target="granitemoe",
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
def test_drafters_that_do_not_fit(tmp_path: Path, bad: BadDrafter) -> None:
    config, tensors = read_drafter()
    drafter = write_checkpoint(tmp_path / "drafter", bad.config(config), bad.tensors(tensors))
    target = SAMPLE if bad.target == "sample" else SAMPLE.parent.parent / "tests/data/checkpoints" / bad.target
    with pytest.raises(CheckpointError) as caught:
        export_bundle(target, tmp_path / "bundle", ExportOptions(bits=32, drafter=drafter))
    message = str(caught.value)
    assert "\n" not in message
    assert str(drafter) in message
    for word in bad.words:
        assert word in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]


def wrong_manifests() -> Iterator[tuple[str, Callable[[dict[str, Any]], object], str]]:
    """What, how a drafter's record is changed, and a word of the error."""
    yield "two of a part", lambda d: d["parts"].append(d["parts"][0]), "one part of each role"
    yield "a layer nobody gives", lambda d: d["target_layer_ids"].__setitem__(1, 77), "layer 77"
    yield "a mask beyond", lambda d: d.update(mask_token_id=5000), "mask_token_id"
    yield "a layer twice", lambda d: d["target_layer_ids"].__setitem__(1, 0), "twice"
    yield "a cache without size", lambda d: d["parts"][0]["outputs"][0].update(shape=[1, "T", "D"]), "cache"
    yield "a cache too narrow", lambda d: d["parts"][1]["inputs"][-1].update(shape=[1, "P", 32]), "expected float32"
    yield "another block", lambda d: d.update(block_size=7), "expected int64"
    yield "an input too many", lambda d: d["parts"][2]["inputs"].append(d["parts"][1]["inputs"][0]), "no host knows"
    yield "an output too few", lambda d: d["parts"][2]["outputs"].pop(0), "gives no 'logits'"
    yield "no rows", lambda d: d["parts"][0]["inputs"].pop(0), "takes no 'layer_outputs'"
    yield "another kind", lambda d: d.update(kind="eagle"), "drafter.kind"


@pytest.mark.parametrize(
    ("change", "word"), [case[1:] for case in wrong_manifests()], ids=[c[0] for c in wrong_manifests()]
)
def test_a_record_that_no_host_could_run(
    float_bundle: Path, change: Callable[[dict[str, Any]], object], word: str
) -> None:
    document = json.loads((float_bundle / "manifest.json").read_text())
    change(document["drafter"])
    with pytest.raises(BundleError) as caught:
        parse_manifest(json.dumps(document))
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
