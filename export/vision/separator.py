"""What a chat template writes between a picture and what follows it in a message, found by rendering it.

It knows templates of transformers' message contents, but no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lesonnx.chat import ChatTemplate
from lesonnx.errors import BundleError, InputError

MARK = "qXquestionQx"
# Texts whose beginning or end a template may change.
TEXTS = (MARK, f" {MARK}\n", f"{MARK}\n\n{MARK}")
MOST_PICTURES = 3
MAX_CHARS = 1000


class _NoSeparator(Exception):
    """Why there is none, in a few words."""


def separator_of(directory: Path, placeholder: str) -> tuple[str | None, str | None]:
    """`find_separator` of the chat template in a checkpoint directory; None alone where there is none."""
    try:
        template = ChatTemplate.load(directory)
    except BundleError as error:
        return None, f"separator is left out: {error}"
    return (None, None) if template is None else find_separator(template, placeholder)


def find_separator(template: ChatTemplate, placeholder: str) -> tuple[str | None, str | None]:
    """The separator and None, or None and a line for the export's report that says why.

    A message whose content is a list of pictures and then a text must read as one whose content is a string:
    placeholder, separator, placeholder, separator, …, text; wherever in a conversation it stands.
    """
    try:
        separator = _between(template, placeholder)
        for conversation in _conversations():
            for text in TEXTS:
                for count in range(1, MOST_PICTURES + 1):
                    _compare(template, conversation, placeholder, separator, text, count)
    except _NoSeparator as reason:
        return None, f"separator is left out, pictures in a chat go by the template alone: {reason}"
    except BundleError as error:
        return None, f"separator is left out: {error}"
    return separator, None


def _between(template: ChatTemplate, placeholder: str) -> str:
    _, found, rest = _render(template, [_user(_content(MARK, 1))]).partition(placeholder)
    separator, mark, _ = rest.partition(MARK)
    if not found or not mark or len(separator) > MAX_CHARS:
        raise _NoSeparator(f"the template does not write {placeholder} for a picture, and then the text")
    return separator


def _conversations() -> list[list[dict[str, Any]]]:
    """What comes before the message with pictures."""
    turns = [_user("a"), {"role": "assistant", "content": "b"}]
    return [[], turns]


def _compare(
    template: ChatTemplate,
    before: Sequence[dict[str, Any]],
    placeholder: str,
    separator: str,
    text: str,
    count: int,
) -> None:
    plain = (placeholder + separator) * count + text
    if _render(template, [*before, _user(_content(text, count))]) != _render(template, [*before, _user(plain)]):
        shown = "a picture" if count == 1 else f"{count} pictures"
        raise _NoSeparator(f"the template writes {shown} and a text otherwise than {placeholder}{separator!a} each")


def _content(text: str, num_pictures: int) -> list[dict[str, Any]]:
    return [{"type": "image"}] * num_pictures + [{"type": "text", "text": text}]


def _user(content: str | list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _render(template: ChatTemplate, messages: Sequence[dict[str, Any]]) -> str:
    try:
        return template.render(messages)
    except InputError as error:
        reason = str(error).rpartition("cannot render these messages: ")[2]
        raise _NoSeparator(f"the template refuses pictures: {reason}") from None
