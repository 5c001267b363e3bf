"""Execution providers as a manifest lists them, and what of a list the installed ONNX Runtime has.

It opens no session and knows no part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lesonnx.manifest import Provider

CPU = "CPUExecutionProvider"
# These compute where the CPU provider does, so a model may be shared between them.
ON_THE_PROCESSOR = (CPU, "XnnpackExecutionProvider")
# Stands for a directory of the host's own, one a bundle, in the value of an option.
CACHE_DIRECTORY = "{cache}"


def installed(listed: Iterable[Provider], available: Collection[str]) -> tuple[list[Provider], list[str]]:
    """Those of a list that are there, in order, without options that need a directory; and a line on each other."""
    found, notes = [], []
    for provider in listed:
        if provider.name not in available:
            notes.append(f"the installed ONNX Runtime has no {provider.name}")
            continue
        options = {key: value for key, value in provider.options.items() if CACHE_DIRECTORY not in value}
        found.append(Provider(name=provider.name, options=options))
    return found, notes
