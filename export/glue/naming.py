"""Names, texts and numbers as Kotlin and Swift write them: what the templates' filters are made of."""

from __future__ import annotations

import re
import unicodedata

from lesonnx.errors import InputError

_HARD_KEYWORDS = """as break class continue do else false for fun if in interface is null object package return super
    this throw true try typealias typeof val var when while"""
KOTLIN_KEYWORDS = frozenset(_HARD_KEYWORDS.split())
MOST_INT = (1 << 31) - 1


def kotlin_package(name: str) -> str:
    """A package's name with its keywords in backticks; InputError for what is none."""
    pieces = name.split(".")
    if not all(re.fullmatch(r"[A-Za-z_][0-9A-Za-z_]*", piece) for piece in pieces):
        raise InputError(f"--package {name!r} is not a package name such as com.example.app")
    return ".".join(f"`{piece}`" if piece in KOTLIN_KEYWORDS else piece for piece in pieces)


def kotlin_string(text: str) -> str:
    """A Kotlin string literal: ASCII, so that no editor and no encoding can change it."""
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\", "$": "\\$"}
    units = (text.encode("utf-16-be")[place : place + 2] for place in range(0, 2 * _utf16_units(text), 2))
    return '"' + "".join(_kotlin_unit(int.from_bytes(unit, "big"), named) for unit in units) + '"'


def _kotlin_unit(unit: int, named: dict[str, str]) -> str:
    return named.get(chr(unit), chr(unit)) if 32 <= unit < 127 or chr(unit) in named else f"\\u{unit:04x}"


def _utf16_units(text: str) -> int:
    return len(text.encode("utf-16-be")) // 2


def swift_string(text: str) -> str:
    """A Swift string literal: ASCII, so that no editor and no encoding can change it."""
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
    return '"' + "".join(named.get(c, c if 32 <= ord(c) < 127 else f"\\u{{{ord(c):x}}}") for c in text) + '"'


def digits(number: int) -> str:
    """A whole number with its thousands parted: ``15_400_000``."""
    return f"{number:_}"


def kotlin_int(number: int) -> str:
    """A Kotlin Int; InputError for what is none."""
    if not -MOST_INT <= number <= MOST_INT:
        raise InputError(f"{number:,} is more than Kotlin's Int holds, {MOST_INT:,}")
    return digits(number)


def kotlin_long(number: int) -> str:
    return f"{digits(number)}L"


def comment(text: str) -> str:
    """A text for people inside a comment, on one line that cannot end it."""
    plain = "".join(" " if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") else c for c in text)
    return plain.replace("*/", "* /").replace("/*", "/ *")
