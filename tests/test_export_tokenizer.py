"""The bundle's tokenizer files: what is copied, and that tokenizer.onnx has tokenizer.json's ids or says where not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from small_tokenizers import byte_level, document, sentencepiece_bpe, unigram
from tokenizers import Tokenizer, normalizers

from lesonnx.errors import CheckpointError
from lesonnx.manifest import TokenizerFiles
from lesonnx_export.tokenizer import build_tokenizer_onnx, export_tokenizer, open_tokenizer_onnx
from lesonnx_export.tokenizer_probes import PROBES, added_token_probes

SAMPLE = Path(__file__).resolve().parent.parent / "lesonnx" / "sample"


def checkpoint(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def built(tokenizer: Tokenizer) -> tuple[onnx.ModelProto | None, list[str]]:
    return build_tokenizer_onnx(document(tokenizer), tokenizer)


def test_byte_level_agrees_everywhere(tmp_path: Path) -> None:
    tokenizer = byte_level()
    files, warnings = export_tokenizer(checkpoint(tmp_path / "in", tokenizer), tmp_path / "bundle" / "tokenizer")
    assert files == TokenizerFiles(
        json_path="tokenizer/tokenizer.json", onnx="tokenizer/tokenizer.onnx", config="tokenizer/tokenizer_config.json"
    )
    assert warnings == []
    encode = open_tokenizer_onnx(onnx.load(str(tmp_path / "bundle" / "tokenizer" / "tokenizer.onnx")))
    for text in (*PROBES, *added_token_probes(document(tokenizer)), "x<|im_end", "<think>a</think>", "<<|im_end|>"):
        assert encode(text) == tokenizer.encode(text, add_special_tokens=False).ids, text


def test_merges_as_text_are_read_too() -> None:
    tokenizer = byte_level()
    legacy = document(tokenizer)
    assert isinstance(legacy["model"]["merges"][0], list)
    legacy["model"]["merges"] = [" ".join(pair) for pair in legacy["model"]["merges"]]
    model, warnings = build_tokenizer_onnx(legacy, Tokenizer.from_str(json.dumps(legacy)))
    assert warnings == []
    assert model is not None
    text = "The experts of a layer"
    assert open_tokenizer_onnx(model)(text) == tokenizer.encode(text).ids


def test_without_added_tokens_there_is_no_guard() -> None:
    bare = document(byte_level())
    bare["added_tokens"] = []
    model, warnings = build_tokenizer_onnx(bare, Tokenizer.from_str(json.dumps(bare)))
    assert warnings == []
    assert model is not None
    assert model.graph.node[0].op_type == "Identity"


def test_special_tokens_around_the_text_are_metadata() -> None:
    tokenizer = sentencepiece_bpe()
    model, _ = built(tokenizer)
    assert model is not None
    assert {entry.key: entry.value for entry in model.metadata_props} == {"prefix_ids": "1", "suffix_ids": ""}
    encode = open_tokenizer_onnx(model)
    for text in ("The experts", "  日本 👍", "a</s>", "x</"):
        assert encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_difference_is_a_warning_that_names_the_text() -> None:
    model, warnings = built(byte_level(normalizer=normalizers.NFC()))
    assert model is not None
    assert warnings == [
        r"tokenizer.onnx gives other ids than tokenizer.json for 'e\u0301 cafe\u0301 caf\xe9'",
        r"tokenizer.onnx gives other ids than tokenizer.json for 'Z\u0351\u036b\u0343a\u0300'",
    ]


@pytest.mark.parametrize("tokenizer", [byte_level(add_prefix_space=True), unigram()], ids=["prefix space", "unigram"])
def test_what_cannot_be_expressed_is_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    target = tmp_path / "tokenizer"
    files, warnings = export_tokenizer(checkpoint(tmp_path / "in", tokenizer), target)
    assert files is not None
    assert files.onnx is None
    assert len(warnings) == 1
    assert warnings[0].startswith("tokenizer.onnx is left out: other ids than tokenizer.json for ")
    assert sorted(path.name for path in target.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_a_kind_that_the_operator_does_not_know() -> None:
    parsed = {"model": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}, "added_tokens": []}
    model, warnings = build_tokenizer_onnx(parsed, Tokenizer.from_str(json.dumps({"version": "1.0"} | parsed)))
    assert model is None
    assert warnings == ["tokenizer.onnx is left out: onnxruntime-extensions reads no WordLevel model of tokenizer.json"]


def test_a_pattern_that_the_operator_cannot_read() -> None:
    parsed = document(byte_level())
    split = {"type": "Split", "pattern": {"Regex": r"\p{Lu}?\p{Ll}+(?<=e)|."}, "behavior": "Isolated", "invert": False}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parsed["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, plain]}
    model, warnings = build_tokenizer_onnx(parsed, Tokenizer.from_str(json.dumps(parsed)))
    assert model is None
    assert len(warnings) == 1
    assert "onnxruntime-extensions cannot read tokenizer.json: " in warnings[0]
    assert "\n" not in warnings[0]


def exported_template(tmp_path: Path, **config: Any) -> str | None:
    files, _ = export_tokenizer(checkpoint(tmp_path / "in", byte_level(), **config), tmp_path / "tokenizer")
    assert files is not None
    if files.chat_template is None:
        assert not (tmp_path / "tokenizer" / "chat_template.jinja").exists()
        return None
    return (tmp_path / files.chat_template).read_text(encoding="utf-8")


def test_chat_template_of_the_config_becomes_a_file(tmp_path: Path) -> None:
    assert exported_template(tmp_path, chat_template="{{ 'é' }}\r\n") == "{{ 'é' }}\n"
    assert (tmp_path / "tokenizer" / "chat_template.jinja").read_bytes() == "{{ 'é' }}\r\n".encode()


def test_default_of_named_chat_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert exported_template(tmp_path, chat_template=named) == "d"


def test_no_chat_template(tmp_path: Path) -> None:
    assert exported_template(tmp_path) is None


def test_other_files_are_copied(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", byte_level(), chat_template="config")
    for name in ("special_tokens_map.json", "generation_config.json", "vocab.json"):
        (source / name).write_text("{}", encoding="utf-8")
    (source / "chat_template.jinja").write_bytes(b"file\r\n")
    export_tokenizer(source, tmp_path / "tokenizer")
    assert sorted(path.name for path in (tmp_path / "tokenizer").iterdir()) == [
        "chat_template.jinja",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.onnx",
        "tokenizer_config.json",
    ]
    assert (tmp_path / "tokenizer" / "chat_template.jinja").read_bytes() == b"file\r\n"


def test_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    assert export_tokenizer(tmp_path, tmp_path / "tokenizer") == (None, [])
    assert not (tmp_path / "tokenizer").exists()


def test_checkpoint_with_another_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    files, warnings = export_tokenizer(tmp_path, tmp_path / "tokenizer")
    assert files is None
    assert warnings == [f"{tmp_path}: has tokenizer.model but no tokenizer.json: the bundle has no tokenizer"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {}}', '{"model": {"type": "BPE", "vocab": 3}}'])
def test_broken_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        export_tokenizer(tmp_path, tmp_path / "tokenizer")
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer.json'}: ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "tokenizer").exists()


@pytest.mark.parametrize("config", ["{", "[]", '{"chat_template": 3}'])
def test_broken_config(tmp_path: Path, config: str) -> None:
    source = checkpoint(tmp_path / "in", byte_level())
    (source / "tokenizer_config.json").write_text(config, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: "):
        export_tokenizer(source, tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()


@pytest.mark.skipif(not (SAMPLE / "tokenizer.json").exists(), reason="the sample is not there")
def test_sample_differs_only_where_the_operator_leaves_out_a_split(tmp_path: Path) -> None:
    files, warnings = export_tokenizer(SAMPLE, tmp_path / "tokenizer")
    assert files is not None
    assert files.onnx is not None
    assert warnings == [r"tokenizer.onnx gives other ids than tokenizer.json for '\xbd \xb2 \u2167 \u0663'"]
