"""The tokenizer of a bundle: the checkpoint's files, and ``tokenizer.onnx`` for hosts that have no tokenizer library.

It knows nothing of weights. ``tokenizer.onnx`` needs onnxruntime-extensions registered (0.13.0 has no HfJsonTokenizer,
0.15.2 has) and maps one text to its ids::

    text [1] string -> StringConcat(text, guard) -> HfJsonTokenizer -> without the guard's id -> ids [1, L] int64

It never adds special tokens around the text; which ids the tokenizer would add is in its metadata (``prefix_ids``,
``suffix_ids``: decimal, separated by commas). The *guard* is an added token of the model: the operator (0.15.2) loses
the end of a text that ends in the beginning of an added token ("a <|im"), and with a whole token behind it that cannot
be. Other limits remain: the operator ends a text at a NUL, splits words only by the patterns that it knows, of a
sequence of splits takes the last, and does not compose characters (NFC). So the ids of both are compared on probes, and
every one that differs is a warning.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import tokenizers
from onnx import TensorProto, helper

from lesonnx.chat import ChatTemplate
from lesonnx.errors import BundleError, CheckpointError
from lesonnx.manifest import TokenizerFiles
from lesonnx_export.chat_format import DerivedFormat, derive_chat_format
from lesonnx_export.chat_probes import texts_in
from lesonnx_export.tokenizer_probes import PROBES, added_token_probes

EXTENSIONS_DOMAIN = "ai.onnx.contrib"
OPSET = 20  # the first with StringConcat
IR_VERSION = 9
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_ONNX = "tokenizer.onnx"
_ALSO_COPIED = ("special_tokens_map.json", "generation_config.json", "chat_template.json")
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "merges.txt", "spiece.model", "tekken.json", "tiktoken.model")

# The class under which the operator reads each kind of tokenizer; it knows a fixed list, and their details differ.
# The second value says whether the guard works: the unigram code takes it for a part of the text.
_BYTE_LEVEL_CLASSES = (("GPT2Tokenizer", True),)
_SENTENCEPIECE_CLASSES = (("GemmaTokenizer", True), ("LlamaTokenizer", True))
_UNIGRAM_CLASSES = (("XLMRobertaTokenizer", False),)
_MOST_DIFFERENCES = 0.1  # of the probes; a graph that is wrong more often is not written


def export_tokenizer(checkpoint_dir: Path, tokenizer_dir: Path) -> tuple[TokenizerFiles | None, list[str]]:
    """Copy the checkpoint's tokenizer into a bundle's ``tokenizer_dir`` and build ``tokenizer.onnx`` there.

    Gives the files, by paths relative to the bundle (the parent of ``tokenizer_dir``), and warnings, a line each: for
    every probe whose ids differ, or why there is no ``tokenizer.onnx``, and what of a chat template has no plain
    format. Without a ``tokenizer.json`` nothing is written and the files are None. CheckpointError for a broken file.
    """
    source = checkpoint_dir / TOKENIZER_JSON
    if not source.is_file():
        others = [name for name in _OTHER_TOKENIZERS if (checkpoint_dir / name).is_file()]
        if not others:
            return None, []
        return None, [f"{checkpoint_dir}: has {', '.join(others)} but no {TOKENIZER_JSON}: the bundle has no tokenizer"]
    document = _read_object(source)
    reference = load_tokenizer(source)  # after this the document has the shape that the library demands
    chat_template = _chat_template(checkpoint_dir, _read_object(checkpoint_dir / TOKENIZER_CONFIG))

    tokenizer_dir.mkdir(parents=True, exist_ok=True)
    for name in (TOKENIZER_JSON, TOKENIZER_CONFIG, *_ALSO_COPIED):
        if (checkpoint_dir / name).is_file():
            shutil.copyfile(checkpoint_dir / name, tokenizer_dir / name)
    if chat_template is not None:
        (tokenizer_dir / CHAT_TEMPLATE).write_bytes(chat_template)

    model, warnings = build_tokenizer_onnx(document, reference)
    if model is not None:
        (tokenizer_dir / TOKENIZER_ONNX).write_bytes(model.SerializeToString())

    chat_format = None
    if chat_template is not None:
        derived = _derive_chat_format(tokenizer_dir, document, chat_template.decode(errors="replace"))
        chat_format = derived.format
        warnings += [derived.note] if derived.note else []

    def inside(name: str) -> str | None:
        return f"{tokenizer_dir.name}/{name}" if (tokenizer_dir / name).is_file() else None

    files = TokenizerFiles(
        json_path=inside(TOKENIZER_JSON),
        onnx=inside(TOKENIZER_ONNX) if model is not None else None,
        config=inside(TOKENIZER_CONFIG),
        chat_template=inside(CHAT_TEMPLATE) if chat_template is not None else None,
        chat_format=chat_format,
    )
    return files, warnings


def build_tokenizer_onnx(
    document: dict[str, Any], reference: tokenizers.Tokenizer
) -> tuple[onnx.ModelProto | None, list[str]]:
    """The graph for a parsed ``tokenizer.json`` that agrees best with ``reference``, and a warning per difference.

    None, and one warning that says why, where the operator cannot express the tokenizer.
    """
    left_out = f"{TOKENIZER_ONNX} is left out"
    kind = str(document["model"].get("type", "BPE"))
    classes = _operator_classes(document, kind)
    if not classes:
        return None, [f"{left_out}: onnxruntime-extensions reads no {kind} model of {TOKENIZER_JSON}"]
    probes = PROBES + added_token_probes(document)
    expected = [reference.encode(text, add_special_tokens=False).ids for text in probes]
    best: tuple[onnx.ModelProto, list[str]] | None = None
    reason = ""
    for tokenizer_class, is_guarded in classes:
        try:
            model = _build(document, reference, tokenizer_class, _guard(document) if is_guarded else None)
            encode = open_tokenizer_onnx(model)
            differing = [text for text, ids in zip(probes, expected, strict=True) if encode(text) != ids]
        except Exception as error:  # noqa: BLE001  (onnxruntime and its extensions raise classes of their own)
            reason = reason or _one_line(error)
            continue
        if best is None or len(differing) < len(best[1]):
            best = model, differing
        if not differing:
            break
    if best is None:
        return None, [f"{left_out}: onnxruntime-extensions cannot read {TOKENIZER_JSON}: {reason}"]
    model, differing = best
    if len(differing) > _MOST_DIFFERENCES * len(probes):
        count = f"{len(differing)} of {len(probes)} probes"
        return None, [f"{left_out}: other ids than {TOKENIZER_JSON} for {count}, the first is {_shown(differing[0])}"]
    return model, [f"{TOKENIZER_ONNX} gives other ids than {TOKENIZER_JSON} for {_shown(text)}" for text in differing]


def open_tokenizer_onnx(model: onnx.ModelProto) -> Callable[[str], list[int]]:
    """A function from a text to its ids, by a session on ``tokenizer.onnx`` as any host opens it.

    Raises what onnxruntime raises where the model or the extensions' library cannot be loaded.
    """
    import onnxruntime_extensions  # heavy, and needed only here

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def encode(text: str) -> list[int]:
        ids: list[int] = session.run(["ids"], {"text": np.array([text], object)})[0][0].tolist()
        return ids

    return encode


def _operator_classes(document: dict[str, Any], kind: str) -> tuple[tuple[str, bool], ...]:
    if kind == "Unigram":
        return _UNIGRAM_CLASSES
    if kind != "BPE":
        return ()
    steps = json.dumps([document.get("pre_tokenizer"), document.get("decoder")])
    return _BYTE_LEVEL_CLASSES if '"ByteLevel"' in steps else _SENTENCEPIECE_CLASSES


def _build(
    document: dict[str, Any], reference: tokenizers.Tokenizer, tokenizer_class: str, guard: str | None
) -> onnx.ModelProto:
    """The graph of the module's docstring, not tried yet."""
    # A post-processor that names the BOS token would make the operator add it.
    vocabulary = json.dumps(document | {"post_processor": None, "truncation": None, "padding": None})
    config = json.dumps({"tokenizer_class": tokenizer_class, "add_bos_token": False, "add_eos_token": False})
    nodes = [
        helper.make_node(
            "HfJsonTokenizer",
            ["guarded"],
            ["raw_ids"],
            domain=EXTENSIONS_DOMAIN,
            tokenizer_vocab=vocabulary,
            tokenizer_config=config,
        ),
        helper.make_node("Reshape", ["raw_ids", "flat"], ["all_ids"]),  # the operator gives [L] for some classes
        helper.make_node("Slice", ["all_ids", "start", "end"], ["kept_ids"]),
        helper.make_node("Unsqueeze", ["kept_ids", "start"], ["ids"]),
    ]
    constants = [_int64("flat", -1), _int64("start", 0)]
    if guard is None:
        nodes.insert(0, helper.make_node("Identity", ["text"], ["guarded"]))
        constants.append(_int64("end", np.iinfo(np.int64).max))
    else:
        nodes.insert(0, helper.make_node("StringConcat", ["text", "guard"], ["guarded"]))
        constants += [
            TensorProto(name="guard", data_type=TensorProto.STRING, dims=[1], string_data=[guard.encode()]),
            _int64("end", -1),
        ]
    graph = helper.make_graph(
        nodes,
        "tokenizer",
        [helper.make_tensor_value_info("text", TensorProto.STRING, [1])],
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, "L"])],
        constants,
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(EXTENSIONS_DOMAIN, 1)]
    model: onnx.ModelProto = helper.make_model(
        graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="lesonnx"
    )
    prefix, suffix = _ids_around(reference)
    helper.set_model_props(model, {"prefix_ids": _decimal(prefix), "suffix_ids": _decimal(suffix)})
    return model


def _guard(document: dict[str, Any]) -> str | None:
    """An added token that changes nothing before it, or None."""
    plain = [
        token
        for token in document.get("added_tokens") or []
        if not (token.get("lstrip") or token.get("single_word") or token.get("normalized"))
    ]
    plain.sort(key=lambda token: not token.get("special"))
    return str(plain[0]["content"]) if plain else None


def _ids_around(reference: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before and after a text."""
    bare: list[int] = reference.encode("a", add_special_tokens=False).ids
    whole: list[int] = reference.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _chat_template(checkpoint_dir: Path, config: dict[str, Any]) -> bytes | None:
    """The default chat template: the file, or what ``tokenizer_config.json`` or ``chat_template.json`` holds."""
    file = checkpoint_dir / CHAT_TEMPLATE
    if file.is_file():
        return file.read_bytes()
    value = config.get("chat_template")
    if value is None and (checkpoint_dir / "chat_template.json").is_file():
        value = _read_object(checkpoint_dir / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
    if value is not None and not isinstance(value, str):
        kind = type(value).__name__
        raise CheckpointError(f"{checkpoint_dir / TOKENIZER_CONFIG}: chat_template is a {kind}, expected text")
    return None if value is None else value.encode(errors="replace")


def _derive_chat_format(tokenizer_dir: Path, document: dict[str, Any], source: str) -> DerivedFormat:
    """The format of the template as a host will read it from the bundle."""
    try:
        template = ChatTemplate.load(tokenizer_dir)
        at_another_time = ChatTemplate.load(tokenizer_dir, now=lambda: datetime(2001, 2, 3, 4, 5, 6))
    except BundleError as error:
        return DerivedFormat(None, f"chat_format is left out: {_one_line(error)}")
    if template is None or at_another_time is None:
        return DerivedFormat(None, None)
    added = [str(token["content"]) for token in document.get("added_tokens") or []]
    return derive_chat_format(template, at_another_time, added, texts_in(source))


def load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """A ``tokenizer.json`` as the tokenizers library has it, nothing cut and nothing padded; CheckpointError."""
    try:
        reference = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001  (the library raises plain Exception)
        raise CheckpointError(f"{path}: not a tokenizer.json: {_one_line(error)}") from None
    reference.no_truncation()
    reference.no_padding()
    return reference


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where the file is not there."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {_one_line(error)}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: holds a {type(document).__name__}, expected a JSON object")
    return document


def _int64(name: str, value: int) -> onnx.TensorProto:
    return helper.make_tensor(name, TensorProto.INT64, [1], [value])


def _decimal(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def _shown(text: str) -> str:
    """A probe in a warning: escaped, and shortened."""
    return ascii(text) if len(text) <= 40 else f"{text[:40]!a}... ({len(text)} characters)"


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:200]
