"""The golden traces: this scheduler gives the actions written there, and the traces are those the tool makes."""

from __future__ import annotations

import json
import runpy
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from golden_traces import ARGUMENTS, answer, end_state, make_scheduler
from plain_scheduler import PlainScheduler

from lesonnx.lookahead import fixed_scores

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
TRACES = sorted((DATA / "traces").glob("*.json"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_trace_replays_exactly(path: Path) -> None:
    trace = json.loads(path.read_text(encoding="utf-8"))
    scheduler = make_scheduler(trace)
    for number, event in enumerate(trace["events"]):
        assert answer(scheduler, event) == event, f"event {number}"
    assert end_state(scheduler) == trace["end"]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_plain_scheduler_written_from_the_text_gives_the_same(path: Path) -> None:
    trace = json.loads(path.read_text(encoding="utf-8"))
    plain = PlainScheduler(trace["layers"], trace["budget_bytes"], trace["config"])
    for number, event in enumerate(trace["events"]):
        assert plain.answer(event) == event, f"event {number}"
    assert plain.level == trace["end"]["lookahead_level"]


def test_the_traces_cover_every_event_and_action() -> None:
    seen: Counter[str] = Counter()
    for path in TRACES:
        for event in json.loads(path.read_text(encoding="utf-8"))["events"]:
            actions = event.get("actions", [])
            seen.update([event["event"], *(action[0] for action in actions)])
            seen["error"] += "error" in event
            seen["lookahead"] += any(action[0] == "load" and action[2] == "lookahead" for action in actions)
    expected = [*ARGUMENTS, "load", "evict", "compute", "promote", "cancel", "error", "lookahead"]
    assert [name for name in expected if not seen[name]] == []


def test_the_traces_are_what_the_tool_makes(tmp_path: Path) -> None:
    make_golden_traces = runpy.run_path(str(ROOT / "tools" / "make_golden_traces.py"))
    make_golden_traces["main"](tmp_path / "traces")
    made = sorted((tmp_path / "traces").glob("*.json"))
    assert [path.name for path in made] == [path.name for path in TRACES]
    for new, old in zip(made, TRACES, strict=True):
        assert new.read_bytes() == old.read_bytes(), f"{old.name} is stale: run tools/make_golden_traces.py"
    assert (tmp_path / "fixed_scores.json").read_bytes() == (DATA / "fixed_scores.json").read_bytes()


def test_fixed_scores_of_the_vectors() -> None:
    vectors = json.loads((DATA / "fixed_scores.json").read_text(encoding="utf-8"))
    scores = np.array([struct.unpack("<f", struct.pack("<I", bits))[0] for bits in vectors["float32_bits"]], np.float32)
    assert fixed_scores(scores[None])[0].tolist() == vectors["fixed"]
