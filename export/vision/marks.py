"""Token ids and texts of the marks around pictures: config.json's ids, the tokenizer's texts, held against each other.

It knows MiniCPM-V's marks, but neither towers nor chats.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from lesonnx.errors import CheckpointError
from lesonnx.manifest import VisionTexts, VisionTokens
from lesonnx_export.checkpoint import read_json
from lesonnx_export.tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON, load_tokenizer

ROW_END = "\n"
# Of each mark: the id's key in config.json, and the text's in tokenizer_config.json.
KEYS = {
    "image": ("image_token_id", "image_token"),
    "image_start": ("image_start_id", "image_start_token"),
    "image_end": ("image_end_id", "image_end_token"),
    "slice_start": ("slice_start_id", "slice_start_token"),
    "slice_end": ("slice_end_id", "slice_end_token"),
}
ID_MARKS = {"id_start": ("image_id_start_token", "<image_id>"), "id_end": ("image_id_end_token", "</image_id>")}


@dataclass(frozen=True)
class Marks:
    """Token ids and texts; the texts' ``separator`` is left open."""

    tokens: VisionTokens
    texts: VisionTexts


def read_marks(directory: Path, config: dict[str, Any], vocab_size: int, use_image_id: bool) -> Marks:
    """The marks of a checkpoint directory with that config.json.

    An id that config.json leaves out is the one of the text, a text that tokenizer_config.json leaves out that of the
    added token with the id. CheckpointError in one line where both are missing, or the tokenizer gives other ids.
    """
    if not (directory / TOKENIZER_JSON).is_file():
        raise CheckpointError(f"{directory}: no {TOKENIZER_JSON}, without which the marks around pictures have no text")
    tokenizer = load_tokenizer(directory / TOKENIZER_JSON)
    settings = _settings(directory)
    added = {int(id_): token.content for id_, token in tokenizer.get_added_tokens_decoder().items()}
    ids, texts = {}, {}
    for name, (id_key, text_key) in KEYS.items():
        id_, text = _id(config, id_key, vocab_size), _text(settings, text_key)
        if id_ is None and text is None:
            raise CheckpointError(f"config.json: {id_key} is missing, and {text_key} in {TOKENIZER_CONFIG}")
        if text is None and id_ not in added:
            raise CheckpointError(
                f"config.json: {id_key} is {id_}, which is no added token of {TOKENIZER_JSON}, and {TOKENIZER_CONFIG}"
                f" has no {text_key}"
            )
        texts[name] = added[id_] if text is None and id_ is not None else str(text)
        ids[name] = _same_id(tokenizer, texts[name], id_, id_key, vocab_size)
    newline = _same_id(tokenizer, ROW_END, _id(config, "newline_id", vocab_size), "newline_id", vocab_size)
    around = {}
    for name, (text_key, usual) in ID_MARKS.items() if use_image_id else ():
        text = _text(settings, text_key) or (usual if usual in added.values() else None)
        if text is None:
            raise CheckpointError(f"{TOKENIZER_CONFIG}: {text_key} is missing, use_image_id is true")
        around[name] = text
    marks = Marks(
        VisionTokens(**ids, newline=newline),
        VisionTexts(placeholder=texts.pop("image"), **texts, row_end=ROW_END, **around),
    )
    _check_together(tokenizer, marks)
    return marks


def _settings(directory: Path) -> dict[str, Any]:
    """The tokenizer's settings; marks of its model's own may lie in an object of theirs, named by the version."""
    path = directory / TOKENIZER_CONFIG
    settings = read_json(path) if path.is_file() else {}
    own = [settings.get(key) for key in ("extra_special_tokens", "model_specific_special_tokens")]
    return settings | {key: text for tokens in own if isinstance(tokens, dict) for key, text in tokens.items()}


def _text(settings: dict[str, Any], key: str) -> str | None:
    value = settings.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and (not isinstance(text, str) or not text):
        raise CheckpointError(f"{TOKENIZER_CONFIG}: {key} must be a text, found {value!r:.100}")
    return text


def _id(config: dict[str, Any], key: str, vocab_size: int) -> int | None:
    value = config.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < vocab_size):
        raise CheckpointError(f"config.json: {key} must be a token id below {vocab_size}, found {value!r:.100}")
    return value


def _same_id(tokenizer: tokenizers.Tokenizer, text: str, id_: int | None, key: str, vocab_size: int) -> int:
    """The one token that a text is, which must be ``id_`` where that is known."""
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if len(found) != 1 or (id_ is not None and found != [id_]):
        expected = "one token" if id_ is None else f"{id_}, config.json's {key}"
        raise CheckpointError(f"{TOKENIZER_JSON}: {json.dumps(text)} is {found}, expected {expected}")
    if found[0] >= vocab_size:
        raise CheckpointError(f"{TOKENIZER_JSON}: {json.dumps(text)} is {found[0]}, expected less than {vocab_size}")
    return found[0]


def _check_together(tokenizer: tokenizers.Tokenizer, marks: Marks) -> None:
    """CheckpointError where marks side by side are not the tokens that they are alone: positions go by these."""
    tokens, texts = marks.tokens, marks.texts
    ids = [tokens.image_start, tokens.image, tokens.image, tokens.image_end]
    text = f"{texts.image_start}{texts.placeholder * 2}{texts.image_end}"
    one_slice = f"{texts.slice_start}{texts.placeholder}{texts.slice_end}"
    slice_ids = [tokens.slice_start, tokens.image, tokens.slice_end]
    text += f"{one_slice}{texts.row_end}{one_slice}"
    ids += [*slice_ids, tokens.newline, *slice_ids]
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if found != ids:
        raise CheckpointError(f"{TOKENIZER_JSON}: {json.dumps(text)} is {found}, expected {ids}")
