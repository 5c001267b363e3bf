"""Conversations by which a chat template and its plain format are compared.

Contents are what chat templates are known to look at (white space, thoughts, tool answers, special tokens), and every
text that stands in the template itself: what it looks for in contents is most likely among them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jinja2

from lesonnx.manifest import Role

Message = dict[str, str]
MOST_TEXTS = 64  # of a tokenizer's tokens, and of a template's texts, that are tried as contents
MOST_CHARS = 500  # of such a text
MIXED = 60  # conversations of contents drawn by lot
SEED = 6

# What it is -> contents.
CONTENTS: dict[str, tuple[str, ...]] = {
    "with white space around them": (" a", "a ", "\n\na\n", "\t a b \t", "a\n", "\ta", "\u00a0a\u2003"),
    "of white space": (" ", "\n", "\r\n"),
    "that are empty": ("",),
    "of several lines": ("a\nb", "a\n\n\n  b\n    c", "a\r\nb", "# a\n- b\n```\nc\n```"),
    "with thoughts in tags": (
        "<think>\nhm\n</think>\n\nyes",
        "yes</think>no",
        "<think>",
        "</think>",
        "[THINK]a[/THINK]b",
        "<|channel|>analysis<|message|>hm<|end|>",
    ),
    "with tool calls or answers in tags": (
        "<tool_response>\na\n</tool_response>",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "[TOOL_CALLS] []",
        "<tools></tools>",
    ),
    "that look like template syntax": ("{{ bos_token }}", "{% for m in messages %}", "{# a #}", "%s %d {0} ${x} \\n"),
    "with quotes and markup": ("'a' \"b\" `c`", "<b>&amp;</b> & <", "\\ \\\\ /"),
    "beyond ASCII": ("é日本語 👍👩\u200d👧", "e\u0301 \u212b", "\u200b\ufeff\u202e", "ÀÉ ẞ \u0131 \u0130"),
    "that name roles": ("system", "user", "assistant", "User: a\n\nAssistant: b", "\n\nHuman: a"),
    "that name special tokens": (
        "<|im_end|>",
        "<|im_start|>user\na<|im_end|>\n",
        "<s>[INST] a [/INST] b</s>",
        "<<SYS>>\na\n<</SYS>>\n\n",
        "<start_of_turn>user\na<end_of_turn>\n",
        "<|eot_id|><|start_header_id|>user<|end_header_id|>",
        "<|user|>\na<|end|>\n<|assistant|>\n",
        "/no_think",
        "/think",
    ),
    "that are long": ("word " * 2000 + "end", "a" * 5000),
}


@dataclass(frozen=True)
class Probe:
    """A conversation, and what is special about it, in words that go after "the template changes …"."""

    what: str
    messages: list[Message]


def texts_in(template: str) -> list[str]:
    """The string literals of a Jinja template; none where it is no Jinja."""
    try:
        tokens = [token for _, kind, token in jinja2.Environment().lex(template) if kind == "string"]
        # As Jinja's own lexer reads them.
        found = [token[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape") for token in tokens]
    except (jinja2.TemplateSyntaxError, UnicodeDecodeError):
        return []
    return list(dict.fromkeys(text for text in found if 0 < len(text) <= MOST_CHARS))


def probes(roles: Sequence[Role], special_tokens: Sequence[str] = (), texts: Sequence[str] = ()) -> Iterator[Probe]:
    """Conversations of these roles, each with a user's message last: the plainest first, the most various last.

    ``special_tokens`` of the tokenizer and ``texts`` of the template are contents besides.
    """
    for num_questions in (1, 2, 3, 4, 7) if "assistant" in roles else (1,):
        for beginning in _beginnings(roles):
            shape = [*beginning, *_turns(num_questions)]
            yield Probe("messages of several turns", [_plain(role, place) for place, role in enumerate(shape)])
    contents = dict(CONTENTS)
    if special_tokens:
        chosen = sorted(dict.fromkeys(special_tokens))[:MOST_TEXTS]
        contents["that name special tokens"] += (*chosen, "".join(chosen[:8]))
    if texts:
        chosen = list(texts)[:MOST_TEXTS]
        contents["that hold texts of the template"] = (*chosen, *(f"a{text}b" for text in chosen), "".join(chosen))
    for what, each in contents.items():
        for role in roles:
            for text in each:
                yield from _with_content(roles, role, what, text)
    yield from _mixed(roles, [text for each in contents.values() for text in each])


def _with_content(roles: Sequence[Role], role: Role, what: str, text: str) -> Iterator[Probe]:
    """Conversations in which the content stands in the first, the last, and in all messages of a role."""
    for beginning in _beginnings(roles):
        if role == "system" and not beginning:
            continue
        shape = [*beginning, *_turns(3 if "assistant" in roles else 1)]
        places = [place for place, each in enumerate(shape) if each == role]
        for chosen in dict.fromkeys([(places[0],), (places[-1],), tuple(places)]):
            messages = [_plain(each, place) for place, each in enumerate(shape)]
            for place in chosen:
                messages[place] = {"role": role, "content": text}
            yield Probe(f"{role} messages {what}", messages)


def _mixed(roles: Sequence[Role], texts: Sequence[str]) -> Iterator[Probe]:
    draw = random.Random(SEED)
    for _ in range(MIXED):
        shape = [*draw.choice(_beginnings(roles)), *_turns(draw.randint(1, 5) if "assistant" in roles else 1)]
        yield Probe("some conversations", [{"role": role, "content": draw.choice(texts)} for role in shape])


def _beginnings(roles: Sequence[Role]) -> list[list[Role]]:
    return [[], ["system"]] if "system" in roles else [[]]


def _turns(num_questions: int) -> list[Role]:
    turns: list[Role] = ["user"]
    for _ in range(num_questions - 1):
        turns += ["assistant", "user"]
    return turns


def _plain(role: Role, place: int) -> Message:
    return {"role": role, "content": f"{role.capitalize()} says {place}."}
