"""A chat template as plain prefixes and suffixes (`ChatFormat`), where that gives the template's text exactly.

The template is rendered with marks for contents; what stands between the marks is the format. Then both are compared
on the conversations of `chat_probes`. Where they differ, roles are given up until they agree: a format says less rather
than something else. It knows nothing of tokens and files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lesonnx.chat import ChatTemplate
from lesonnx.errors import InputError
from lesonnx.manifest import ChatFormat, ChatTurn, Role
from lesonnx_export.chat_probes import Message, Probe, probes

MAX_FORMAT_CHARS = 100_000  # of a rendered mark; a longer one is a document, not a format

# The sets of roles that are tried: several turns are worth more than a system message.
ROLES: tuple[tuple[Role, ...], ...] = (
    ("system", "user", "assistant"),
    ("user", "assistant"),
    ("system", "user"),
    ("user",),
)
_MARKS: dict[Role, str] = {"system": "qXsystemQx", "user": "qXuserQx", "assistant": "qXassistantQx"}


class _NoFormat(Exception):
    """Why some roles have no format, in a few words."""


@dataclass(frozen=True)
class DerivedFormat:
    """What was found: the format or None, and a line for the export's report where it says less than the template."""

    format: ChatFormat | None
    note: str | None


def derive_chat_format(
    template: ChatTemplate,
    at_another_time: ChatTemplate,
    special_tokens: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> DerivedFormat:
    """The format of a template.

    ``at_another_time`` is the same template under another clock: a text that holds the date is no format.
    ``special_tokens`` (of the tokenizer, by their names in text) and ``texts`` (of the template, see
    `chat_probes.texts_in`) are contents to try besides.
    """
    reasons: dict[tuple[Role, ...], str] = {}
    for roles in ROLES:
        try:
            chat_format = _split(template, roles)
            _compare(template, at_another_time, chat_format, probes(roles, special_tokens, texts))
        except _NoFormat as reason:
            reasons[roles] = str(reason)
            continue
        return DerivedFormat(chat_format, _note(roles, reasons))
    return DerivedFormat(None, f"chat_format is left out: {reasons['user',]}")


def _note(roles: tuple[Role, ...], reasons: dict[tuple[Role, ...], str]) -> str | None:
    """The roles that are missing and why; None where all are there."""
    missing: list[Role] = [role for role in ROLES[0] if role not in roles]
    if not missing:
        return None
    # The set with the missing roles and as few others as were tried says most clearly what the matter is.
    why = [next(reasons[tried] for tried in reversed(ROLES) if role in tried and tried in reasons) for role in missing]
    return f"chat_format has no {' and no '.join(missing)} messages: {'; '.join(dict.fromkeys(why))}"


# -- what stands between the marks -------------------------------------------------------------------------------------


def _split(template: ChatTemplate, roles: Sequence[Role]) -> ChatFormat:
    """A format for these roles that gives the template's text for the marks.

    Where one piece ends and the next begins is not to be seen in a text. Of the places that fit all conversations those
    are taken that also fit them without a generation prompt, so that pieces are what a person would call them.
    """
    start_user, user_answer = _between(template, ["user"])
    if "system" in roles:
        start_system, system_user, tail = _between(template, ["system", "user"])
        _same(tail, user_answer, "the text after a user's message depends on the system message")
    if "assistant" in roles:
        first, user_assistant, assistant_user, tail = _between(template, ["user", "assistant", "user"])
        _same(first, start_user, "the beginning depends on how many messages follow")
        _same(tail, user_answer, "the text after a user's message depends on its place")

    # The beginning of a user's message: behind the start, an answer or the system message.
    before_user, prefix = [start_user], None
    if "system" in roles:
        before_user.append(system_user)
    if "assistant" in roles:
        before_user.append(assistant_user)
        answer_end = _tail(template, ["user", "assistant"])
        prefix = _first([assistant_user.removeprefix(answer_end)] if answer_end else [], before_user, str.endswith)
    if prefix is None:
        prefix = _common_end(before_user) if len(before_user) > 1 else start_user

    # Its end: before the generation prompt and before an answer.
    after_user, ends = [user_answer], [_tail(template, ["user"])]
    if "assistant" in roles:
        after_user.append(user_assistant)
        ends.append(assistant_user.removesuffix(prefix) or None)  # as an answer ends
    suffix = _first([end for end in ends if end is not None], after_user, str.startswith)
    if suffix is None:
        suffix = _common_beginning(after_user)

    start = start_user.removesuffix(prefix)
    turns: dict[Role, ChatTurn] = {}
    if "system" in roles:
        if not start_system.startswith(start):
            raise _NoFormat(f"without a system message the template begins with {start[:40]!a}")
        turns["system"] = ChatTurn(prefix=start_system.removeprefix(start), suffix=system_user.removesuffix(prefix))
    turns["user"] = ChatTurn(prefix=prefix, suffix=suffix)
    if "assistant" in roles:
        turns["assistant"] = ChatTurn(
            prefix=user_assistant.removeprefix(suffix), suffix=assistant_user.removesuffix(prefix)
        )
    return ChatFormat(start=start, messages=turns, answer=user_answer.removeprefix(suffix))


def _between(template: ChatTemplate, roles: Sequence[Role]) -> list[str]:
    """The texts before, between and after the marks of a conversation with these roles."""
    return _cut(_render(template, _marked(roles)), [mark for _, mark in _numbered(roles)])


def _tail(template: ChatTemplate, roles: Sequence[Role]) -> str | None:
    """What follows the last mark without a generation prompt; None where the template cannot say."""
    try:
        text = _render(template, _marked(roles), add_generation_prompt=False)
        return _cut(text, [mark for _, mark in _numbered(roles)])[-1]
    except _NoFormat:
        return None


def _numbered(roles: Sequence[Role]) -> list[tuple[Role, str]]:
    return [(role, f"{_MARKS[role]}{place}") for place, role in enumerate(roles)]


def _marked(roles: Sequence[Role]) -> list[Message]:
    return [{"role": role, "content": mark} for role, mark in _numbered(roles)]


def _cut(text: str, marks: Iterable[str]) -> list[str]:
    """A text cut at its marks, which must be there once each and in order."""
    pieces, rest = [], text
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found:
            raise _NoFormat("the template moves, repeats or leaves out messages")
        pieces.append(before)
    pieces.append(rest)
    if any(mark in piece for piece in pieces for mark in _MARKS.values()):
        raise _NoFormat("the template moves, repeats or leaves out messages")
    return pieces


def _same(found: str, expected: str, reason: str) -> None:
    if found != expected:
        raise _NoFormat(reason)


def _first(candidates: Sequence[str], texts: Sequence[str], fits: Callable[[str, str], bool]) -> str | None:
    """The first of the candidates that fits all the texts."""
    return next((each for each in candidates if all(fits(text, each) for text in texts)), None)


def _common_end(texts: Sequence[str]) -> str:
    return _common_beginning([text[::-1] for text in texts])[::-1]


def _common_beginning(texts: Sequence[str]) -> str:
    shortest = min(texts, key=len)
    for length in range(len(shortest), 0, -1):
        if all(text.startswith(shortest[:length]) for text in texts):
            return shortest[:length]
    return ""


# -- comparing ---------------------------------------------------------------------------------------------------------


def _compare(
    template: ChatTemplate, at_another_time: ChatTemplate, chat_format: ChatFormat, compared: Iterable[Probe]
) -> None:
    for probe in compared:
        text = _render(template, probe.messages, probe.what)
        if text != _render(at_another_time, probe.messages, probe.what):
            raise _NoFormat("the template writes the date or the time")
        if text != chat_format.join(probe.messages):
            raise _NoFormat(f"the template changes or moves {probe.what}")


def _render(
    template: ChatTemplate, messages: Sequence[Message], what: str = "", add_generation_prompt: bool = True
) -> str:
    try:
        text = template.render(messages, add_generation_prompt)
    except InputError as error:
        reason = str(error).rpartition("cannot render these messages: ")[2]
        roles = " and ".join(dict.fromkeys(message["role"] for message in messages))
        raise _NoFormat(f"the template refuses {what or f'messages of {roles}'}: {reason}") from None
    if len(text) > MAX_FORMAT_CHARS + sum(len(message["content"]) for message in messages):
        raise _NoFormat(f"the template writes more than {MAX_FORMAT_CHARS} characters around messages")
    return text
