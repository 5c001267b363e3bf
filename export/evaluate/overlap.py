"""Whether a text holds words of another text in a row: what a bundle was calibrated on must not judge it.

Pure functions over texts. Thirteen words in a row are what the field calls an overlap (GPT-3, appendix C).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics

from lesonnx.errors import InputError

RUN_WORDS = 13
_WORD = re.compile(r"\w+")


class Calibration:
    """Texts that evaluations keep away from. Immutable."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Texts shorter than `RUN_WORDS` words are never found again."""
        self._runs = {run for text in texts for run in _runs(text)}

    @classmethod
    def known(cls, files: Iterable[Path]) -> Calibration:
        """Python's help topics, which exports calibrate on by default, and these files."""
        return cls([*topics.values(), *(read_text(path) for path in files)])

    def overlaps(self, text: str) -> bool:
        """Whether `RUN_WORDS` words in a row of a text are in one of these, whatever is between them and their case."""
        return any(run in self._runs for run in _runs(text))

    def share(self, text: str) -> float:
        """The share of a text's runs of `RUN_WORDS` words that are in one of these; 0 for a shorter text."""
        found = [run in self._runs for run in _runs(text)]
        return sum(found) / max(len(found), 1)


def read_text(path: Path) -> str:
    """A file of UTF-8 text; InputError in one line where it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not readable as UTF-8 text: {error}") from None


def _runs(text: str) -> Iterable[int]:
    words = _WORD.findall(text.lower())
    return (hash(tuple(words[start : start + RUN_WORDS])) for start in range(len(words) - RUN_WORDS + 1))
