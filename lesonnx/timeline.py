"""A record of what ran when, in the Chrome trace event format that Perfetto opens (``--trace out.json``).

It knows lanes, spans and markers, not what they mean. Any thread may add to it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lesonnx.files import write_whole

# Lanes in the order in which Perfetto shows them; each loader has one more, after these.
DENSE, EXPERTS, LOOKAHEAD, WAITING = "dense parts", "experts", "lookahead", "waiting for flash"
LANES = (DENSE, EXPERTS, LOOKAHEAD, WAITING)


class Timeline:
    """Spans in lanes, markers and counters; times from ``time.perf_counter``, in seconds.

    Appending to a list is atomic, so threads need no lock.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._events: list[dict[str, Any]] = []

    def _us(self, moment: float) -> float:
        return round((moment - self._start) * 1e6, 1)

    def span(self, lane: str, name: str, began: float, ended: float, **details: Any) -> None:
        """Something that took a while."""
        duration = round((ended - began) * 1e6, 1)
        self._events.append(
            {"ph": "X", "tid": lane, "name": name, "ts": self._us(began), "dur": duration, "args": details}
        )

    def mark(self, lane: str, name: str, **details: Any) -> None:
        """Something that happened now."""
        self._events.append(
            {"ph": "i", "s": "t", "tid": lane, "name": name, "ts": self._us(time.perf_counter()), "args": details}
        )

    def count(self, name: str, value: float) -> None:
        """A number that changed now."""
        event = {"ph": "C", "tid": name, "name": name, "ts": self._us(time.perf_counter()), "args": {name: value}}
        self._events.append(event)

    def save(self, path: Path) -> None:
        """Write the file; InputError where that cannot be."""
        lanes = list(LANES) + sorted({str(e["tid"]) for e in self._events if e["ph"] == "X"} - set(LANES))
        numbers = {lane: number for number, lane in enumerate(lanes, start=1)}
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "lesonnx"}}
        ]
        for lane, number in numbers.items():
            events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": lane}})
            events.append(
                {"ph": "M", "pid": 1, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}
            )
        events += [{**event, "pid": 1, "tid": numbers.get(str(event["tid"]), 0)} for event in self._events]
        write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), "trace")
