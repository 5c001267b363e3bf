"""Chat templates: as transformers renders them, from every place a checkpoint keeps them, and safely."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lesonnx.chat import ChatTemplate
from lesonnx.errors import BundleError, InputError

MESSAGES = [{"role": "user", "content": "Hi <b> & é"}]
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def render(template: str, messages: list[dict[str, Any]] = MESSAGES, **extra: Any) -> str:
    return ChatTemplate({"default": template}, {"bos_token": "<s>"}).render(messages, **extra)


def test_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b> & é<|im_end|>\n"
    assert render(CHATML, messages, add_generation_prompt=False) == text
    assert render(CHATML, messages) == text + "<|im_start|>assistant\n"


def test_blocks_are_trimmed_and_stripped() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_special_tokens_and_extra_variables() -> None:
    assert render("{{ bos_token }}|{{ eos_token }}|{{ enable_thinking }}", enable_thinking=True) == "<s>||True"
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"


def test_tojson_is_transformers_own() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi <b> & é"}'
    assert render("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, indent=1, sort_keys=true) }}") == (
        '{\n "a": "\\u00e9",\n "b": 1\n}'
    )
    assert render("{{ [1, 2] | tojson(separators=(',', ':')) }}") == "[1,2]"


def test_strftime_now() -> None:
    template = ChatTemplate({"default": "{{ strftime_now('%d %b %Y') }}"}, now=lambda: datetime(2025, 3, 4))
    assert template.render(MESSAGES) == "04 Mar 2025"


def test_loop_controls_and_loop_variables() -> None:
    assert (
        render(
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% if i == 4 %}{% break %}"
            "{% endif %}{% endfor %}"
        )
        == "0134"
    )
    assert (
        render(
            "{% for k, v in messages[0].items() %}{{ k }}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}"
        )
        == "role1/2False content2/2True "
    )
    assert render("{% for m in messages if m.role == 'tool' %}x{% else %}none{% endfor %}") == "none"
    assert render("{% for x in nothing %}x{% endfor %}|") == "|"


def test_generation_blocks_are_their_content() -> None:
    assert render("{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}") == "user"


def test_macros_and_namespaces() -> None:
    source = "{% macro f(x) %}[{{ x }}]{% endmacro %}{% set ns = namespace(n=0) %}"
    assert render(source + "{% for m in messages * 2 %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ f(ns.n) }}") == "[2]"


def test_raise_exception() -> None:
    with pytest.raises(InputError) as caught:
        render("{{ raise_exception('Roles must\nalternate') }}")
    assert str(caught.value) == "chat template: cannot render these messages: Roles must alternate"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[3].role }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.content }}",
        "{{ 1 / 0 }}",
        "{{ messages[0] | tojson(indent='x', separators=3) }}",
        "{% include 'other' %}",
    ],
)
def test_failing_templates_are_one_line(template: str) -> None:
    with pytest.raises(InputError) as caught:
        render(template)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("chat template: cannot render these messages: ")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "range"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "iterations"),
        ("{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}", "iterations"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a' * 10 ** 12 }}", "characters"),
        ("{{ [0] * 10 ** 12 }}", "characters"),
        ("{{ 9 ** 999999999 }}", "power"),
        ("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "characters"),
        ("{% set x = 'a' * 10 ** 7 %}{{ x }}{{ x }}{{ x }}", "characters"),
    ],
)
def test_hostile_templates_end_soon(template: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        render(template, x=list(range(1000)))


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "x"}]
    render("{{ messages | length }}", messages)
    assert messages == [{"role": "user", "content": "x"}]


def write(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        file = directory / {"jinja": "chat_template.jinja", "config": "tokenizer_config.json"}.get(name, f"{name}.json")
        file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return directory


def test_load_from_config(tmp_path: Path) -> None:
    write(
        tmp_path,
        config={
            "chat_template": "{{ bos_token }}{{ eos_token }}{{ image_token }}",
            "bos_token": None,
            "eos_token": {"content": "</s>", "special": True},
            "image_token": "<image>",
            "add_bos_token": True,
        },
        special_tokens_map={"bos_token": "<s>", "eos_token": "other"},
    )
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == "<s></s><image>"


def test_the_file_comes_before_the_config(tmp_path: Path) -> None:
    template = ChatTemplate.load(write(tmp_path, jinja="file", config={"chat_template": "config"}))
    assert template is not None
    assert template.render(MESSAGES) == "file"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = ChatTemplate.load(write(tmp_path, config={"chat_template": named}))
    assert template is not None
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, tools=[{"name": "f"}]) == "tools"


def test_template_of_a_processor(tmp_path: Path) -> None:
    template = ChatTemplate.load(write(tmp_path, chat_template={"chat_template": "processor"}))
    assert template is not None
    assert template.render(MESSAGES) == "processor"


def test_no_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(write(tmp_path, config={"eos_token": "x"})) is None


@pytest.mark.parametrize(
    "files",
    [
        {"jinja": "{% if %}"},
        {"jinja": "{{ 'a' | no_such_filter }}"},
        {"jinja": "(" * 10 + "{{ " + "(" * 3000 + " }}"},
        {"config": "{"},
        {"config": []},
        {"config": {"chat_template": 3}},
        {"config": {"chat_template": [{"name": "default"}]}},
        {"config": {"chat_template": [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}]}},
    ],
)
def test_broken_files(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(BundleError) as caught:
        ChatTemplate.load(write(tmp_path, **files))
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)
