"""A conversation's messages: what a caller may write in them, and their parting from the pictures in them.

It knows neither templates nor pixels. What it does not know it refuses: a template would leave it out without a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lesonnx.errors import InputError

_ITEMS = "text, image"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|data:")


def split_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages for a chat template, without the pictures in them, and these, in order.

    A content is a text, or a list of items ``{"type": "text", "text": …}`` and ``{"type": "image", "image": source}``
    (or ``"path"`` for ``"image"``; ``{"type": "image_url", "image_url": {"url": path}}`` is the same). A message with
    ``tool_calls`` may have none. InputError in one line for all else, and for a picture's address in a network.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InputError(f'messages are a list of {{"role": …, "content": …}}, found {_kind(messages)}')
    if not messages:
        raise InputError("messages are an empty list, expected at least one message")
    plain, sources = [], []
    for number, message in enumerate(messages):
        where = f"message {number}"
        if not isinstance(message, Mapping):
            raise InputError(f'{where} is {_kind(message)}, expected {{"role": …, "content": …}}')
        if not isinstance(message.get("role"), str):
            raise InputError(f"{where}: role is {_kind(message.get('role'))}, expected text such as 'user'")
        content = message.get("content")
        if isinstance(content, str) or (content is None and message.get("tool_calls")):
            plain.append(dict(message))
            continue
        if not isinstance(content, list | tuple):
            raise InputError(f"{where}: content is {_kind(content)}, expected text or a list of items ({_ITEMS})")
        items: list[dict[str, Any]] = []
        for place, item in enumerate(content):
            kind, value = _item(item, f"{where}, item {place}")
            if kind == "image":
                sources.append(value)
                items.append({"type": "image"})
            else:
                items.append(dict(item))
        plain.append({**message, "content": items})
    return plain, sources


def _item(item: Any, where: str) -> tuple[str, Any]:
    """What an item of a content is, ``text`` or ``image``, and its text or its picture."""
    if not isinstance(item, Mapping):
        raise InputError(f'{where} is {_kind(item)}, expected {{"type": "text", "text": …}} or an image')
    kind = item.get("type")
    if kind == "text":
        if not isinstance(item.get("text"), str):
            raise InputError(f"{where}: text is {_kind(item.get('text'))}, expected text")
        return "text", item["text"]
    if kind == "image":
        source = next((item[name] for name in ("image", "path") if item.get(name) is not None), None)
        if source is None:
            given = ", ".join(sorted(set(map(str, item)) - {"type"})) or "nothing"
            raise InputError(
                f"{where} is an image with {given}; expected image: a path, bytes or pixels, or path: a path"
            )
    elif kind == "image_url":
        url = item.get("image_url")
        source = url.get("url") if isinstance(url, Mapping) else url
        if not isinstance(source, str):
            raise InputError(f'{where}: image_url is {_kind(url)}, expected {{"url": path}}')
    else:
        raise InputError(f"{where}: type is {kind!r}, expected one of {_ITEMS}")
    if isinstance(source, str) and _ADDRESS.match(source):
        raise InputError(f"{where}: {source[:80]!r} is an address; expected the path of a file here")
    return "image", source


def _kind(value: Any) -> str:
    """What a value is, as an error says it."""
    if value is None:
        return "missing or None"
    return f"the text {value[:40]!r}" if isinstance(value, str) else f"of type {type(value).__name__}"
