"""A DSpark drafter exported beside its target: what is shared, what is refused, what the manifest says of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import SAMPLE, fixture, read_config, read_tensors, write_checkpoint
from conftest import BundleFactory, Outcome
from numpy.typing import NDArray
from plain_dspark import DRAFTER, read_drafter

from lesonnx.bundle import Bundle
from lesonnx.errors import BundleError, CheckpointError, InputError, LesonnxError
from lesonnx.manifest import parse_manifest
from lesonnx.speculative.dspark import DSparkDrafter
from lesonnx_export.exporter import ExportOptions, export_bundle

Config = dict[str, Any]
Tensors = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def float_bundle(bundle_of: BundleFactory) -> Path:
    return bundle_of("sample", drafter=DRAFTER)


@pytest.mark.parametrize("options", [{}, {"bits": 4, "dense_bits": 8}], ids=["float", "quantized"])
def test_embedding_and_head_are_stored_once(bundle_of: BundleFactory, options: dict[str, Any]) -> None:
    bundle = Bundle(bundle_of("sample", drafter=DRAFTER, **options))
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


def test_a_drafter_may_hold_copies_of_embedding_and_head(
    bundle_of: BundleFactory, tmp_path: Path, float_bundle: Path
) -> None:
    """They are compared and not stored: the bundle is the same. A rotary table is left out, by name."""
    config, tensors = read_drafter()
    embedding = read_tensors("sample")["model.embed_tokens.weight"]
    copies = {"embed_tokens.weight": embedding, "lm_head.weight": embedding, "rotary_emb.inv_freq": embedding[0]}
    whole = Bundle(bundle_of("sample", drafter=write_checkpoint(tmp_path / "whole", config, tensors | copies)))
    assert whole.file("dense/dense.bin").read_bytes() == Bundle(float_bundle).file("dense/dense.bin").read_bytes()
    assert whole.manifest.skipped_tensors == {"drafter.rotary_emb.inv_freq": "rotary table, computed in the graph"}
    assert whole.manifest.model_copy(update={"skipped_tensors": {}}) == Bundle(float_bundle).manifest


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


def as_target(name: str) -> Callable[[Config], Config]:
    """The sizes of a fixture, so that they are not what is wrong."""
    config = read_config(name)
    layers = config["num_hidden_layers"]
    sizes = {key: config[key] for key in ("vocab_size", "hidden_size")}
    return changed(**sizes, num_target_layers=layers, target_layer_ids=list(range(layers)))


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
        as_target("granitemoe"),
        target="granitemoe",
    ),
    "a target that shifts its logits": BadDrafter(
        ("embedding and head", "phimoe"), as_target("phimoe"), target="phimoe"
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
def test_drafters_that_do_not_fit(tmp_path: Path, bad: BadDrafter) -> None:
    config, tensors = read_drafter()
    drafter = write_checkpoint(tmp_path / "drafter", bad.config(config), bad.tensors(tensors))
    with pytest.raises(CheckpointError) as caught:
        export_bundle(fixture(bad.target), tmp_path / "bundle", ExportOptions(bits=32, drafter=drafter))
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
