"""The manifest: its schema is checked in, unknown keys and other versions are refused, references must hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, RECURRENT
from conftest import BundleFactory
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import lesonnx
from lesonnx.errors import BundleError, InputError
from lesonnx.manifest import Manifest, check_path, json_schema, page_ceil, parse_manifest

SCHEMA = Path(lesonnx.__file__).parent / "manifest.schema.json"
Document = dict[str, Any]
TURN = {"prefix": "<", "suffix": ">"}


@pytest.fixture(scope="session")
def text(bundle_of: BundleFactory) -> str:
    return (bundle_of("qwen2_moe", bits=4) / "manifest.json").read_text(encoding="utf-8")


def test_schema_is_checked_in() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == json_schema(), (
        "the manifest has changed: write lesonnx.manifest.json_schema() to lesonnx/manifest.schema.json"
    )


@pytest.mark.parametrize("name", FAMILIES + RECURRENT)
def test_manifest_survives_a_round_trip(bundle_of: BundleFactory, name: str) -> None:
    text = (bundle_of(name) / "manifest.json").read_text(encoding="utf-8")
    assert parse_manifest(text).model_dump_json(indent=1) + "\n" == text


def test_parts_by_role(text: str) -> None:
    manifest = parse_manifest(text)
    assert manifest.part("embed").name == "embed"
    assert manifest.part("segment", 2).name == "segment_002"
    with pytest.raises(KeyError):
        manifest.part("lookahead", 0)


def test_manifest_is_immutable(text: str) -> None:
    with pytest.raises(ValidationError):
        parse_manifest(text).model.hidden_size = 1  # type: ignore[misc]


def edit(*path: str | int, value: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        target: Any = document
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


BAD = {
    "unknown key": (edit("colour", value=1), "colour"),
    "unknown key deep inside": (edit("expert_layers", 0, "colour", value=1), r"expert_layers\.0\.colour"),
    "newer version": (edit("format_version", value=2), "format_version is 2, this lesonnx reads 1"),
    "older version": (edit("format_version", value=0), "format_version is 0"),
    "version is text": (edit("format_version", value="1"), "format_version"),
    "negative count": (edit("model", "hidden_size", value=-1), r"model\.hidden_size"),
    "a number as text": (edit("model", "num_experts", value="many"), r"model\.num_experts"),
    "bits that do not exist": (edit("quantization", "expert_bits", value=5), "expert_bits"),
    "path up": (edit("parts", 0, "path", value="../embed.onnx"), "must be relative and stay inside"),
    "absolute path": (edit("expert_layers", 0, "pack", value="/tmp/x.pack"), "must be relative and stay inside"),
    "drive letter": (edit("expert_layers", 0, "pack", value="C:x.pack"), "must be relative and stay inside"),
    "backslash": (edit("tokenizer", value={"json_path": "..\\x.json"}), "must be relative and stay inside"),
    "state of no part": (edit("states", 0, "part", value="segment_9"), "names part 'segment_9', which is not there"),
    "two parts of one name": (edit("parts", 1, "name", value="embed"), "two parts have one name"),
    "no head": (edit("parts", -1, "role", value="lookahead"), "exactly one head"),
    "layer without segment": (edit("parts", 1, "layer_idx", value=7), "every MoE layer needs its segment"),
    "kind that is not there": (edit("expert_layers", 1, "kind", value=9), "names expert kind 9 of 2"),
    "more experts a token than experts": (edit("expert_layers", 0, "num_experts_per_tok", value=99), "99"),
    "experts a token unlike the model's": (edit("expert_layers", 0, "num_experts_per_tok", value=1), "expert_layers"),
    "matrix of another shape": (edit("expert_kinds", 0, "up_proj", "rows", value=3), r"up_proj is \[3,64\]"),
    "matrix beyond the expert": (edit("expert_kinds", 0, "length_bytes", value=64), "beyond the expert's 64"),
    "scales of a float matrix": (edit("expert_kinds", 0, "up_proj", "bits", value=32), "block_size and scales"),
    "chat format without user": (
        edit("tokenizer", value={"chat_format": {"start": "", "messages": {}, "answer": ""}}),
        r"tokenizer\.chat_format: .*roles \[\], expected user among them",
    ),
    "chat format with another role": (
        edit("tokenizer", value={"chat_format": {"start": "", "messages": {"tool": TURN, "user": TURN}, "answer": ""}}),
        r"tokenizer\.chat_format\.messages\.tool",
    ),
    "chat format with another key": (
        edit("tokenizer", value={"chat_format": {"start": "", "messages": {"user": TURN}, "answer": "", "end": ""}}),
        r"tokenizer\.chat_format\.end",
    ),
    "chat format that is not whole": (
        edit("tokenizer", value={"chat_format": {"start": "", "messages": {"user": {"prefix": ""}}, "answer": ""}}),
        r"tokenizer\.chat_format\.messages\.user\.suffix",
    ),
    "not finite": (edit("expert_kinds", 0, "alpha", value=float("nan")), "alpha"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_manifests(text: str, case: str) -> None:
    change, message = BAD[case]
    document = json.loads(text)
    change(document)
    with pytest.raises(BundleError, match=message) as caught:
        parse_manifest(json.dumps(document), "here/manifest.json")
    assert str(caught.value).startswith("here/manifest.json: ")
    assert "\n" not in str(caught.value)


# Of qwen3_next: states 0 and 1 are the convolution and the recurrence of the first layer, the last part replays.
BAD_REPLAYS = {
    "attention that replays": (edit("states", 0, "kind", value="attention_key"), "shape .* is not \\[1, heads, 'S'"),
    "no replay": (edit("states", 1, "replay", value=None), "replay belongs to states of fixed shape"),
    "a shape that grows": (edit("states", 1, "shape", value=[1, "S", 16, 16]), "is not fixed"),
    "a shape of nothing": (edit("states", 1, "shape", value=[1, 0, 16, 16]), "is not fixed"),
    "another shape than its replay's": (edit("states", 1, "shape", value=[1, 4, 16, 8]), "does not take past and give"),
    "no such part": (edit("states", 1, "replay", "part", value="replay_x"), "'replay_x', which is no part of role"),
    "a part of another role": (edit("states", 1, "replay", "part", value="head"), "'head', which is no part of role"),
    "no rows": (edit("states", 1, "replay", "rows", value={}), "at least 1 item"),
    "other rows": (edit("states", 1, "replay", "rows", value={"x": "residual_out"}), "takes the rows beta, decay, key"),
    "rows that nobody gives": (edit("states", 0, "replay", "rows", "x", value="y"), "rows 'y' are not what"),
    "rows of another shape": (edit("states", 0, "replay", "rows", "x", value="residual_out"), "are not what"),
    "an unknown key": (edit("states", 0, "replay", "colour", value=1), "colour"),
}


@pytest.mark.parametrize("case", BAD_REPLAYS)
def test_bad_replays(bundle_of: BundleFactory, case: str) -> None:
    change, message = BAD_REPLAYS[case]
    document = json.loads((bundle_of("qwen3_next") / "manifest.json").read_text(encoding="utf-8"))
    change(document)
    with pytest.raises(BundleError, match=message) as caught:
        parse_manifest(json.dumps(document))
    assert "\n" not in str(caught.value)


def double(role: str) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        part = next(part for part in document["parts"] if part["role"] == role)
        document["parts"].append({**part, "name": "another"})

    return change


def without(role: str) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        document["parts"] = [part for part in document["parts"] if part["role"] != role]

    return change


def value_of(name: str, value: Any, key: str = "shape", last: bool = True) -> Callable[[Document], None]:
    """Change the last (or first) output of that name among all parts."""

    def change(document: Document) -> None:
        found = [v for part in document["parts"] for v in part["outputs"] if v["name"] == name]
        found[-1 if last else 0][key] = value

    return change


def double_state(document: Document) -> None:
    document["states"].append(document["states"][0])


def two_states_on_one_input(document: Document) -> None:
    document["states"].append({**document["states"][0], "name": "another"})


def without_state(document: Document) -> None:
    document["states"].pop()


# By the fixture whose manifest is spoiled. In gemma4_text the residual is twice as wide as the hidden size.
BAD_WIRING = {
    "a recurrence in int8": ("qwen3_next", edit("states", 1, "dtype", value="int8"), "is int8, expected float32"),
    "a cache in int8": (
        "gpt_oss",
        edit("states", 0, "dtype", value="int8"),
        r"is int8, expected float32 \(kv_bits is 32",
    ),
    "other bits of caches": ("gpt_oss", edit("quantization", "kv_bits", value=8), "is float32, expected int8"),
    "a cache of another shape": ("gpt_oss", edit("states", 0, "shape", value=[1, 9, "S", 16]), "'past_key_0' of part"),
    "an input nobody has": ("gpt_oss", edit("states", 0, "input", value="x"), "names 'x', which part .* does not have"),
    "an output nobody has": ("gpt_oss", edit("states", 0, "output", value="x"), "names 'x', which part .* does not"),
    "a state twice": ("qwen3_next", double_state, "two states have the name 'convolution_0'"),
    "an input twice": ("qwen3_next", two_states_on_one_input, "two states are input 'past_convolution_0'"),
    "a state that is gone": ("qwen3_next", without_state, "takes 'past_value_3', which is no state of it"),
    "two mixers": ("smallthinker", double("mixer"), "layer 0 has two mixer parts"),
    "no mixers": ("smallthinker", without("mixer"), "names part 'mixer_000', which is not there"),
    "two lookaheads": ("gpt_oss", double("lookahead"), "layer 1 has two lookahead parts"),
    "no replays": ("lfm2_moe", without("replay"), "'replay_convolution', which is no part of role replay"),
    "residuals that differ": (
        "gemma4_text",
        value_of("residual_out", [1, "T", 64]),
        r"expected float32 \[1, 'T', 128\]",
    ),
    "a residual of any size": (
        "gemma4_text",
        value_of("residual_out", [1, "T", "X"], last=False),
        "is not .1, 'T', size",
    ),
    "a residual too wide": (
        "gemma4_text",
        value_of("residual_out", [1, "T", 1 << 40], last=False),
        "is not .1, 'T', size",
    ),
    "ids that are no integers": (
        "gpt_oss",
        value_of("topk_ids", "float32", "dtype"),
        "'topk_ids' of part .* is float32",
    ),
    "a hidden size of its own": ("gpt_oss", edit("model", "hidden_size", value=32), "expected float32 .1, 'T', 32"),
    "a hidden size too large": ("gpt_oss", edit("model", "hidden_size", value=1 << 31), "hidden_size is 2147483648"),
    "a vocabulary of its own": ("gpt_oss", edit("model", "vocab_size", value=7), "'logits' of part 'head'"),
}


@pytest.mark.parametrize("case", BAD_WIRING)
def test_bad_wiring(bundle_of: BundleFactory, case: str) -> None:
    name, change, message = BAD_WIRING[case]
    document = json.loads((bundle_of(name) / "manifest.json").read_text(encoding="utf-8"))
    change(document)
    with pytest.raises(BundleError, match=message) as caught:
        parse_manifest(json.dumps(document))
    assert "\n" not in str(caught.value)


def test_parts_that_are_not_what_the_manifest_says(bundle_of: BundleFactory, quick_path: Path) -> None:
    """Opening tells, before any step."""
    bundle = Path(shutil.copytree(bundle_of("qwen3_next"), quick_path / "bundle"))
    path = bundle / "manifest.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    replays = [part for part in document["parts"] if part["role"] == "replay"]
    replays[0]["path"] = replays[1]["path"]
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(BundleError, match=r"replay_\w+\.onnx: input '\w+' is"):
        lesonnx.load(bundle)


def test_attention_states_do_not_name_a_replay(text: str) -> None:
    """Bundles of attention alone are what hosts without replays read."""
    assert "replay" not in text


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "3", "[" * 100_000])
def test_documents_that_are_none(content: str) -> None:
    with pytest.raises(BundleError, match="manifest.json"):
        parse_manifest(content)


def test_keys_may_not_be_missing(text: str) -> None:
    for key in Manifest.model_fields:
        document = json.loads(text)
        # A bundle without them has no key for them.
        document.pop(key, None)
        if Manifest.model_fields[key].is_required():
            with pytest.raises(BundleError, match=f"{key}: Field required"):
                parse_manifest(json.dumps(document))
        else:
            parse_manifest(json.dumps(document))


def test_a_chat_format_joins_messages(text: str) -> None:
    document = json.loads(text)
    document["tokenizer"] = {
        "chat_format": {
            "start": "S",
            "messages": {"user": TURN, "assistant": {"prefix": "(", "suffix": ")"}},
            "answer": "A",
        }
    }
    files = parse_manifest(json.dumps(document)).tokenizer
    assert files is not None
    assert files.chat_format is not None
    conversation = [("user", " a\n"), ("assistant", ""), ("user", "<b>")]
    messages = [{"role": role, "content": content} for role, content in conversation]
    assert files.chat_format.join(messages) == "S< a\n>()<<b>>A"
    with pytest.raises(InputError, match=r"role 'system', the bundle's chat format has \['assistant', 'user'\]"):
        files.chat_format.join([{"role": "system", "content": "x"}])


@given(st.lists(st.sampled_from(["a", "..", ".", "b.onnx", ""]), min_size=1, max_size=5).map("/".join))
def test_no_accepted_path_leaves_its_directory(path: str) -> None:
    try:
        check_path(path)
    except ValueError:
        return
    root = Path("/bundle")
    resolved = Path("/")
    for piece in (root / path).parts:
        resolved = resolved.parent if piece == ".." else resolved / piece
    assert resolved.is_relative_to(root)


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_page_ceil(length: int, expected: int) -> None:
    assert page_ceil(length) == expected
