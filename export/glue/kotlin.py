"""Kotlin for Android: one file with the object ``ModelSpec`` in the app's own package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lesonnx_export.glue import naming

FILE = "ModelSpec.kt"
TEMPLATE = "ModelSpec.kt.jinja"


def _option(value: int | None) -> str:
    return "null" if value is None else naming.kotlin_int(value)


def _shape(shape: list[int | str]) -> str:
    sizes = [size if isinstance(size, str) else naming.kotlin_int(size) for size in shape]
    return f"listOf({', '.join(sizes)})"


def _options(options: Mapping[str, str]) -> str:
    pairs = (f"{naming.kotlin_string(key)} to {naming.kotlin_string(value)}" for key, value in options.items())
    return f"mapOf({', '.join(pairs)})"


FILTERS: dict[str, Callable[..., Any]] = {
    "package": naming.kotlin_package,
    "string": naming.kotlin_string,
    "int": naming.kotlin_int,
    "long": naming.kotlin_long,
    "int_or_null": _option,
    "shape": _shape,
    "options": _options,
    "comment": naming.comment,
}
