"""Plain formats of chat templates: which styles have one, and that they give the template's text on any contents."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_templates import SPECIAL_TOKENS, TEMPLATES
from conftest import Outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_level
from test_export_tokenizer import checkpoint
from test_generate import chat_bundle  # noqa: F401  (a fixture)

import lesonnx as package
from lesonnx.bundle import Bundle
from lesonnx.chat import ChatTemplate
from lesonnx.manifest import ChatFormat
from lesonnx_export.chat_format import DerivedFormat, derive_chat_format
from lesonnx_export.chat_probes import probes, texts_in
from lesonnx_export.tokenizer import export_tokenizer

ALL = ["system", "user", "assistant"]
# Style -> the roles that its format has, and what the report says; no roles: no format.
EXPECTED: dict[str, tuple[list[str], str]] = {
    "chatml": (ALL, ""),
    "qwen2": (["user", "assistant"], "no system messages: without a system message the template begins with "),
    "qwen3": (
        ["system", "user"],
        "no assistant messages: the template changes or moves assistant messages with thoughts",
    ),
    "qwen3-instruct": (ALL, ""),
    "llama2": ([], "left out: the template changes or moves user messages with white space around them"),
    "llama3": ([], "left out: the template changes or moves user messages with white space around them"),
    "llama3-date": ([], "left out: the template writes the date or the time"),
    "mistral": (["user", "assistant"], "no system messages: the template refuses messages of system and user: Conv"),
    "mistral-v3": (
        ["user", "assistant"],
        "no system messages: the template changes or moves messages of several turns",
    ),
    "mixtral": (ALL, ""),
    "gemma": ([], "left out: the template changes or moves user messages with white space around them"),
    "phi3": (ALL, ""),
    "phi3.5": (["user", "assistant"], "no system messages: the template changes or moves system messages that are emp"),
    "deepseek-v2": (ALL, ""),
    "deepseek-r1": (["system", "user"], "no assistant messages: the template changes or moves assistant messages with"),
    "zephyr": (ALL, ""),
    "olmoe": (ALL, ""),
}
WITH_FORMAT = [style for style, (roles, _) in EXPECTED.items() if roles]


def template_of(text: str, now: datetime | None = None) -> ChatTemplate:
    clock = {"now": lambda: now} if now else {}
    return ChatTemplate({"default": text}, SPECIAL_TOKENS, **clock)  # type: ignore[arg-type]


def derive(text: str, *special_tokens: str) -> DerivedFormat:
    return derive_chat_format(
        template_of(text), template_of(text, datetime(1999, 1, 1)), special_tokens, texts_in(text)
    )


def format_of(style: str) -> ChatFormat:
    found = derive(TEMPLATES[style]).format
    assert found is not None
    return found


def test_every_style_is_expected() -> None:
    assert set(EXPECTED) == set(TEMPLATES)


@pytest.mark.parametrize("style", EXPECTED)
def test_which_styles_become_a_format(style: str) -> None:
    roles, note = EXPECTED[style]
    derived = derive(TEMPLATES[style], "<s>", "<think>")
    assert (list(derived.format.messages) if derived.format else []) == roles
    if roles == ALL:
        assert derived.note is None
    else:
        assert derived.note is not None
        assert derived.note.startswith(f"chat_format {'has' if roles else 'is'} {note}")
        assert "\n" not in derived.note


@pytest.mark.parametrize(
    ("style", "start", "user", "assistant", "answer"),
    [
        ("chatml", "", ("<|im_start|>user\n", "<|im_end|>\n"), ("<|im_start|>assistant\n", "<|im_end|>\n"), None),
        ("mistral", "<s>", ("[INST] ", " [/INST]"), ("", "</s>"), ""),
        ("phi3", "", ("<|user|>\n", "<|end|>\n"), ("<|assistant|>\n", "<|end|>\n"), None),
        ("zephyr", "", ("<|user|>\n", "</s>\n"), ("<|assistant|>\n", "</s>\n"), None),
        ("olmoe", "<s>", ("<|user|>\n", "\n"), ("<|assistant|>\n", "</s>\n"), None),
        ("deepseek-v2", "<s>", ("User: ", "\n\n"), ("Assistant: ", "</s>"), "Assistant:"),
    ],
)
def test_pieces_are_what_a_person_would_call_them(
    style: str, start: str, user: tuple[str, str], assistant: tuple[str, str], answer: str | None
) -> None:
    found = format_of(style)
    assert found.start == start
    assert (found.messages["user"].prefix, found.messages["user"].suffix) == user
    assert (found.messages["assistant"].prefix, found.messages["assistant"].suffix) == assistant
    assert found.answer == (assistant[0] if answer is None else answer)


CONTENT = st.one_of(
    st.text(max_size=12),
    st.lists(
        st.sampled_from(
            [
                " ",
                "\n",
                "<think>",
                "</think>",
                "<tool_response>",
                "</tool_response>",
                "<|im_end|>",
                "</s>",
                "{{ a }}",
                "x",
            ]
        ),
        max_size=4,
    ).map("".join),
)


@settings(max_examples=60, deadline=None)
@given(
    style=st.sampled_from(WITH_FORMAT),
    system=st.none() | CONTENT,
    contents=st.lists(CONTENT, min_size=1, max_size=9),
)
def test_a_format_gives_the_template_s_text_on_any_contents(
    style: str, system: str | None, contents: list[str]
) -> None:
    found = format_of(style)
    if "assistant" not in found.messages:
        contents = contents[:1]
    contents = contents[: (len(contents) - 1) // 2 * 2 + 1]  # a question is last
    messages = [{"role": "system", "content": system}] if system is not None and "system" in found.messages else []
    for place, content in enumerate(contents):
        messages.append({"role": "assistant" if place % 2 else "user", "content": content})
    assert found.join(messages) == template_of(TEMPLATES[style]).render(messages)


def test_probes_end_with_a_question_and_keep_to_their_roles() -> None:
    for roles in (("system", "user", "assistant"), ("user", "assistant"), ("system", "user"), ("user",)):
        seen = set()
        for probe in probes(roles, ["<x>"]):  # type: ignore[arg-type]
            names = [message["role"] for message in probe.messages]
            seen.update(names)
            assert names[-1] == "user"
            questions = names[names[0] == "system" :]
            assert questions == [("user", "assistant")[place % 2] for place in range(len(questions))]
        assert seen == set(roles)


def loop(content: str) -> str:
    return "{% for m in messages %}[{{ " + content + " }}]{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (loop("m.content | replace('<x>', '')"), "user messages that name special tokens"),
        (loop("m.content | upper"), "moves, repeats or leaves out messages"),
        (loop("m.content | truncate(4000)"), "user messages that are long"),
        (loop("m.content | e"), "user messages"),
        (loop("m.content or 'nothing'"), "user messages that are empty"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "moves, repeats or leaves out messages"),
        ("no messages at all", "moves, repeats or leaves out messages"),
        ("{{ messages | tojson }}", "user messages"),
        ("{{ raise_exception('not\ntoday') }}", "refuses messages of user: not today"),
        ("{{ 'a' * 200000 }}{{ messages[0].content }}", "more than 100000 characters"),
        ("{{ strftime_now('%H:%M:%S') }}{{ messages[0].content }}", "the date or the time"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "iterations"),
    ],
)
def test_what_plain_text_cannot_say_is_left_out(template: str, reason: str) -> None:
    derived = derive(template, "<x>")
    assert derived.format is None
    assert derived.note is not None
    assert derived.note.startswith("chat_format is left out: the template ")
    assert reason in derived.note
    assert "\n" not in derived.note


def test_a_template_s_own_words_are_tried() -> None:
    """No list of usual contents has this word; the template has it."""
    template = loop("'[hidden]' if m.content.startswith('abracadabra') else m.content")
    assert texts_in(template) == ["[hidden]", "abracadabra"]
    derived = derive(template)
    assert derived.format is None
    assert (
        derived.note
        == "chat_format is left out: the template changes or moves user messages that hold texts of the template"
    )


def test_texts_of_a_template() -> None:
    assert texts_in("{{ 'a\\n' + \"it's\" }} 'outside' {# 'comment' #}{% if x == 'a\\n' %}{% endif %}") == [
        "a\n",
        "it's",
    ]
    assert texts_in("{% generation %}{{ '' + 'x' * 3 }}{% endgeneration %}") == ["x"]
    assert texts_in("{{ 'two\nlines' + 'é\\u00e9' }}") == ["two\nlines", "éé"]
    assert texts_in("{{ 'unfinished }}") == []
    assert texts_in("{{ '\\x' }}") == []


def test_turns_that_depend_on_their_place_leave_single_questions() -> None:
    numbered = "{% for m in messages %}{{ loop.index }}[{{ m.content }}]{% endfor %}"
    derived = derive(numbered)
    assert derived.format is not None
    assert derived.format.join([{"role": "user", "content": "x"}]) == "1[x]"
    assert derived.format.join([{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]) == "1[s]2[x]"
    assert "assistant" not in derived.format.messages
    assert derived.note is not None
    assert derived.note.startswith("chat_format has no assistant messages: ")

    derived = derive("{% if messages[0].role == 'system' %}{{ 1 / 0 }}{% endif %}" + numbered)
    assert derived.format is not None
    assert list(derived.format.messages) == ["user"]
    assert derived.note is not None
    assert re.match("chat_format has no system and no assistant messages: the template refuses .*; the ", derived.note)


def exported(tmp_path: Path, **config: Any) -> tuple[ChatFormat | None, list[str]]:
    files, notes = export_tokenizer(checkpoint(tmp_path / "in", byte_level(), **config), tmp_path / "tokenizer")
    assert files is not None
    return files.chat_format, notes


def test_export_writes_the_format(tmp_path: Path) -> None:
    chat_format, notes = exported(tmp_path, chat_template=TEMPLATES["mistral"], bos_token="<b>", eos_token="<e>")
    assert chat_format is not None
    assert chat_format.start == "<b>"
    assert chat_format.messages["assistant"].suffix == "<e>"
    assert len(notes) == 1


def test_export_says_why_there_is_no_format(tmp_path: Path) -> None:
    chat_format, notes = exported(tmp_path, chat_template=TEMPLATES["gemma"])
    assert chat_format is None
    assert notes == [f"chat_format is {EXPECTED['gemma'][1]}"]


def test_export_of_a_broken_template_says_so(tmp_path: Path) -> None:
    chat_format, notes = exported(tmp_path, chat_template="{% if %}")
    assert chat_format is None
    assert len(notes) == 1
    assert notes[0].startswith("chat_format is left out: ")
    assert "not a Jinja template: line 1" in notes[0]


def test_a_tokenizer_s_own_tokens_are_tried(tmp_path: Path) -> None:
    """No list of usual names has <|endoftext|>; the tokenizer's own has."""
    chat_format, notes = exported(tmp_path, chat_template=loop("m.content | replace('<|endoftext|>', '')"))
    assert chat_format is None
    assert "special tokens" in notes[0]


def test_joined_text_has_the_tokens_of_a_chat(chat_bundle: Path) -> None:  # noqa: F811
    """What a phone tokenizes is what `Model.chat` runs."""
    files = Bundle(chat_bundle).manifest.tokenizer
    assert files is not None
    assert files.chat_format is not None
    messages = [
        {"role": "user", "content": " In the beginning "},
        {"role": "assistant", "content": "<|endoftext|>"},
        {"role": "user", "content": "And\nthen?"},
    ]
    with package.load(chat_bundle) as model:
        assert model.tokenizer is not None
        run: list[list[int]] = []
        prefill = model.runner.prefill
        model.runner.prefill = lambda ids: (run.append(list(ids.token_ids)), prefill(ids))[1]  # type: ignore[method-assign]
        model.chat(messages, package.GenerationOptions(max_new_tokens=1)).text()
        assert run == [model.encode(files.chat_format.join(messages), add_special_tokens=False)]


@pytest.mark.parametrize(
    ("change", "line", "roles"),
    [
        ({}, "by its template; plain format of system, user, assistant messages", ALL),
        ({"chat_format": None}, "by its template; no plain format, so hosts without Jinja offer completion", None),
        ({"chat_template": None, "chat_format": None}, "no chat template: completion only", None),
        (
            {"chat_format": {"start": "", "messages": {"user": {"prefix": "", "suffix": ""}}, "answer": ""}},
            "by its template; plain format of user messages, one question at a time",
            ["user"],
        ),
    ],
)
def test_inspect_says_who_can_chat(
    lesonnx: Callable[..., Outcome],
    chat_bundle: Path,  # noqa: F811
    tmp_path: Path,
    change: dict[str, Any],
    line: str,
    roles: list[str] | None,
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(chat_bundle, bundle)
    document = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    document["tokenizer"] |= change
    (bundle / "manifest.json").write_text(json.dumps(document), encoding="utf-8")
    shown = lesonnx("inspect", bundle).out
    assert re.search(rf"^chat +{re.escape(line)} *$", shown, re.MULTILINE), shown
    assert json.loads(lesonnx("inspect", bundle, "--json").out)["chat"] == {
        "template": document["tokenizer"]["chat_template"] is not None,
        "plain_roles": roles,
    }


def test_the_sample_has_no_format(sample_bundle: Path) -> None:
    document = json.loads((sample_bundle / "manifest.json").read_text(encoding="utf-8"))
    assert document["tokenizer"]["chat_template"] is None
    assert document["tokenizer"]["chat_format"] is None
