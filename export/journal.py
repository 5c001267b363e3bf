"""The journal of an export under way: what is finished and safely on disk, one JSON line each.

It knows nothing of what the entries mean.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

from lesonnx.errors import InputError

NAME = "journal.jsonl"


class Journal:
    """Append-only; an entry counts once its line ends. One writer."""

    def __init__(self, path: Path, entries: list[dict[str, Any]], file: TextIO) -> None:
        self._path = path
        self._entries = entries
        self._file = file

    @classmethod
    def create(cls, directory: Path, fingerprint: str) -> Journal:
        """A new journal in an empty directory."""
        path = directory / NAME
        journal = cls(path, [], path.open("w", encoding="utf-8"))
        journal._append({"fingerprint": fingerprint})
        return journal

    @classmethod
    def reopen(cls, directory: Path, fingerprint: str) -> Journal:
        """Go on with a journal; InputError where it is not there or belongs to another export."""
        path = directory / NAME
        try:
            lines = path.read_bytes().split(b"\n") if path.exists() else []
            # What follows the last line's end was being written when the export broke off.
            whole = lines[:-1]
            records = [dict(json.loads(line)) for line in whole]
            complete = all(entry["what"] and int(entry["bytes"]) >= 0 for entry in records[1:])
        except (ValueError, TypeError, KeyError):
            complete = False
        if not complete:
            raise InputError(f"{path}: not readable; export without --resume to begin anew")
        if not records or records[0].get("fingerprint") != fingerprint:
            raise InputError(
                f"{directory}: was begun with another checkpoint or options; export without --resume to begin anew"
            )
        with path.open("r+b") as file:
            file.truncate(sum(len(line) + 1 for line in whole))
        return cls(path, records[1:], path.open("a", encoding="utf-8"))

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def add(self, what: str, num_bytes: int, **details: Any) -> None:
        """Record something finished; its files must be on disk by now."""
        entry = {"what": what, "bytes": num_bytes, **details}
        self._entries.append(entry)
        self._append(entry)

    def entries(self, what: str) -> list[dict[str, Any]]:
        return [entry for entry in self._entries if entry["what"] == what]

    def remove(self) -> None:
        """The export is whole: the journal goes."""
        self._file.close()
        self._path.unlink()

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
