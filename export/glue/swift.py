"""Swift for iOS: one file with the enumeration ``ModelSpec``, which has no cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lesonnx_export.glue import naming

FILE = "ModelSpec.swift"
TEMPLATE = "ModelSpec.swift.jinja"


def _option(value: int | None) -> str:
    return "nil" if value is None else naming.digits(value)


def _shape(shape: list[int | str]) -> str:
    return f"[{', '.join(size if isinstance(size, str) else naming.digits(size) for size in shape)}]"


def _options(options: Mapping[str, str]) -> str:
    pairs = (f"{naming.swift_string(key)}: {naming.swift_string(value)}" for key, value in options.items())
    return f"[{', '.join(pairs) or ':'}]"


FILTERS: dict[str, Callable[..., Any]] = {
    "string": naming.swift_string,
    "int": naming.digits,
    "int_or_nil": _option,
    "shape": _shape,
    "options": _options,
    "comment": naming.comment,
}
