"""The languages that glue comes in: a row for each target. A further one is a module, a template and a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lesonnx.manifest import Target
from lesonnx_export.glue import kotlin, swift


@dataclass(frozen=True)
class Outputter:
    """How a target's file is called, from which template it comes, and how the language writes things."""

    target_name: str
    file: str
    template: str
    filters: Mapping[str, Callable[..., Any]]


OUTPUTTERS: dict[Target, Outputter] = {
    "android": Outputter("Android", kotlin.FILE, kotlin.TEMPLATE, kotlin.FILTERS),
    "ios": Outputter("iOS", swift.FILE, swift.TEMPLATE, swift.FILTERS),
}
