"""Messages to the text of a prompt, by the chat template that comes with a model.

It knows nothing of tokens. Templates are foreign programs: they run in Jinja's immutable sandbox, without access to
attributes that begin with an underscore, and with bounds on iterations, calls, what operators build, and their output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lesonnx.errors import BundleError, InputError

MAX_STEPS = 1_000_000  # iterations of all loops and calls of one rendering together
MAX_INTEGER_BITS = 4096  # of any number that an operator makes
# Filters that make a text as long as a number says, or take forever on a long one; no chat template needs them.
UNBOUNDED_FILTERS = ("center", "format", "pprint", "slice", "batch", "urlize", "wordwrap")
MAX_INDENT = 16
MAX_TEXT_CHARS = 20_000_000  # of the prompt, and of any string that an operator makes
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
_TOKEN_SUFFIX = "_token"
_COUNTER = "_lesonnx_steps"


class ChatTemplate:
    """A model's chat template, compiled. Immutable; threads may share it."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
        source: str = "chat template",
    ) -> None:
        """Compile ``templates`` (name to text; ``default`` must be there, ``tool_use`` serves messages with tools).

        ``special_tokens`` (``bos_token`` and so on) are variables of the template; ``now`` is what ``strftime_now``
        formats; errors name ``source``. BundleError where a template is no Jinja or there is no default.
        """
        if "default" not in templates:
            raise BundleError(f"{source}: has templates {sorted(templates)}, expected one named 'default'")
        self._source = source
        self._special_tokens = dict(special_tokens or {})
        environment = _Environment(now)
        try:
            self._templates = {name: environment.bounded_template(text) for name, text in templates.items()}
        except jinja2.TemplateSyntaxError as error:
            raise BundleError(f"{source}: not a Jinja template: line {error.lineno}: {_one_line(error)}") from None
        except RecursionError:
            raise BundleError(f"{source}: not a Jinja template: nested too deeply") from None

    @classmethod
    def load(cls, directory: Path, now: Callable[[], datetime] = datetime.now) -> ChatTemplate | None:
        """The template of a bundle's or checkpoint's tokenizer directory; None where there is none.

        ``chat_template.jinja`` comes first, then ``chat_template`` of ``tokenizer_config.json`` (a text, or a list of
        named ones), then that of ``chat_template.json``. Special tokens are those of ``tokenizer_config.json`` and
        ``special_tokens_map.json``. BundleError for a file that is not what it should be.
        """
        config = _read_json(directory / "tokenizer_config.json")
        templates: dict[str, str] = {}
        for name in ("chat_template.json", "tokenizer_config.json"):
            document = config if name == "tokenizer_config.json" else _read_json(directory / name)
            templates |= _named_templates(document.get("chat_template"), directory / name)
        file = directory / "chat_template.jinja"
        if file.is_file():
            try:
                templates["default"] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BundleError(f"{file}: cannot be read: {_one_line(error)}") from None
        if not templates:
            return None
        special_tokens = _special_tokens(_read_json(directory / "special_tokens_map.json")) | _special_tokens(config)
        return cls(templates, special_tokens, now, str(file if file.is_file() else directory))

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt of a conversation; ``extra`` (``tools``, ``enable_thinking``, …) are variables of the template.

        InputError in one line where the template refuses the messages, fails or exceeds its bounds.
        """
        name = "tool_use" if extra.get("tools") and "tool_use" in self._templates else "default"
        variables = {"tools": None, "documents": None} | self._special_tokens | extra
        variables |= {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            _COUNTER: _StepCounter(),
        }
        pieces, length = [], 0
        try:
            for piece in self._templates[name].generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_TEXT_CHARS:
                    raise SecurityError(f"the prompt passes {MAX_TEXT_CHARS} characters")
        except Exception as error:  # noqa: BLE001  (a template can raise anything)
            reason = _one_line(error) or type(error).__name__
            raise InputError(f"{self._source}: cannot render these messages: {reason}") from None
        return "".join(pieces)


class _StepCounter:
    """Counts the loop iterations and calls of one rendering."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def __call__(self, items: Iterable[Any]) -> Iterable[Any]:
        if isinstance(items, Sequence | Mapping):  # stays as it is: loop.length and loop.last need its length
            self.take(len(items))
            return items
        return self._counted(items)

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.take(1)
            yield item

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise SecurityError(f"the template passes {MAX_STEPS} iterations and calls")


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}``, by which transformers marks the assistant's text: its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment that transformers compiles chat templates in (``utils/chat_template_utils.py``), with bounds."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _to_json
        self.filters["indent"] = _indent
        for name in UNBOUNDED_FILTERS:
            del self.filters[name]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)

    def bounded_template(self, source: str) -> jinja2.Template:
        """A template whose every ``for`` counts its iterations."""
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Call(nodes.Name(_COUNTER, "load"), [loop.iter], [], None, None, lineno=loop.lineno)
        # `a ~ b` joins without asking: as a sum of texts it is bounded like any other.
        _bound_concat(tree)
        tree.set_environment(self)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        counter = __context.resolve(_COUNTER)
        if isinstance(counter, _StepCounter):
            counter.take(1)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
            raise SecurityError("the template raises to a power beyond 64")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("the template formats to a width of more than 999")
        if (
            operator in "+*"
            and isinstance(left, int)
            and isinstance(right, int)
            and _bits(left, right) > MAX_INTEGER_BITS
        ):
            raise SecurityError(f"the template makes a number of more than {MAX_INTEGER_BITS} bits")
        if operator in "+*" and _length(left, right, operator) > MAX_TEXT_CHARS:
            raise SecurityError(f"the template makes a value of more than {MAX_TEXT_CHARS} characters or items")
        return super().call_binop(context, operator, left, right)


def _bits(left: int, right: int) -> int:
    """The most bits that a sum or product of two whole numbers has."""
    return left.bit_length() + right.bit_length()


def _bound_concat(node: nodes.Node) -> None:
    """Replace every ``a ~ b ~ c`` below a node by sums of texts."""
    for field_name, value in node.iter_fields():
        if isinstance(value, list):
            for place, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _bound_concat(item)
                    value[place] = _as_sum(item)
        elif isinstance(value, nodes.Node):
            _bound_concat(value)
            setattr(node, field_name, _as_sum(value))


def _as_sum(node: nodes.Node) -> nodes.Node:
    if not isinstance(node, nodes.Concat):
        return node
    texts = [nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes]
    total: nodes.Expr = texts[0]
    for text in texts[1:]:
        total = nodes.Add(total, text, lineno=node.lineno)
    return total


def _length(left: Any, right: Any, operator: str) -> int:
    """The length of the sequence that ``left + right`` or ``left * right`` makes; 0 for numbers."""
    sizes = [len(value) if isinstance(value, str | list | tuple) else None for value in (left, right)]
    if operator == "+":
        return sum(size for size in sizes if size is not None)
    if sizes == [None, None]:
        return 0
    times = right if sizes[1] is None else left
    return (sizes[0] or sizes[1] or 0) * times if isinstance(times, int) else 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' ``tojson``: unlike Jinja's own it escapes no HTML."""
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise SecurityError(f"the template indents by {indent}, more than {MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's ``indent``, up to a width that a prompt can have use for."""
    if not isinstance(width, int) or width > MAX_INDENT:
        raise SecurityError(f"the template indents by {width!r}, more than {MAX_INDENT}")
    return do_indent(text, width, first, blank)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where the file is not there."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: cannot be read as JSON: {_one_line(error)}") from None
    if not isinstance(document, dict):
        raise BundleError(f"{path}: holds a {type(document).__name__}, expected a JSON object")
    return document


def _named_templates(value: Any, path: Path) -> dict[str, str]:
    """``chat_template`` in its two forms: a text, or a list of ``{"name", "template"}``."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        named = {str(entry["name"]): entry["template"] for entry in value}
    except (TypeError, KeyError):
        named = {"": None}
    if not all(isinstance(text, str) for text in named.values()):
        raise BundleError(f"{path}: chat_template is a {type(value).__name__}, expected text or named templates")
    if len(named) == 1:
        return {"default": next(iter(named.values()))}
    return named


def _special_tokens(document: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like, each a text or an object with ``content``; null ones are left undefined."""
    tokens = {}
    for key, value in document.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith(_TOKEN_SUFFIX) and isinstance(text, str):
            tokens[key] = text
    return tokens
