"""The curve of expert bytes against KL: its line, its table and picture, and a run on one layer of the sample."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import SAMPLE, derive
from conftest import Outcome

import lesonnx_export.calibrated as calibrated
import lesonnx_export.precision_curve as precision_curve
from lesonnx_export.plot_curve import plot_curve
from lesonnx_export.precision_curve import CALIBRATED, MIXED, PLAIN, Point, compared, curve_table

Call = Callable[..., Outcome]


def point(series: str, name: str, num_bytes: int, kl: float) -> Point:
    return Point(series, name, num_bytes, 0.0, kl, 0.9, 10.0)


POINTS = [
    point(PLAIN, "2 bits", 600, 0.3),
    point(PLAIN, "4 bits", 1000, 0.02),
    point(PLAIN, "8 bits", 1900, 0.001),
    point(CALIBRATED, "2 bits", 600, 0.1),
    point(MIXED, "0.7", 700, 0.04),
]


def test_the_line_between_four_and_two_bits() -> None:
    found = {(p.series, p.name): p for p in compared(POINTS)}
    assert found[MIXED, "0.7"].share == 0.7
    assert found[MIXED, "0.7"].line_kl == pytest.approx(0.02 + 0.75 * 0.28)
    assert found[PLAIN, "2 bits"].line_kl == 0.3
    assert found[PLAIN, "4 bits"].line_kl == pytest.approx(0.02)
    assert found[PLAIN, "8 bits"].line_kl is None


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    plot_curve(compared(POINTS), "model", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[1:4] == b"PNG"
    assert curve_table(compared(POINTS)).row_count == len(POINTS)


def test_one_layer_of_the_sample(lesonnx: Call, quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = derive(
        "sample",
        quick_path / "checkpoint",
        config=lambda config: config | {"num_hidden_layers": 1},
        tensors=lambda tensors: {key: value for key, value in tensors.items() if not is_later(key)},
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).write_bytes((SAMPLE / name).read_bytes())
    monkeypatch.setattr(precision_curve, "UNIFORM_BITS", (2, 4))
    monkeypatch.setattr(calibrated, "MOST_WINDOWS", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    (quick_path / "text.txt").write_text("And the light shone in the garden, and all was good. " * 30)
    arguments = ("--text", quick_path / "text.txt", "--tokens", "512", "--targets", "0.75", "--json")
    outcome = lesonnx("bench", "precision", checkpoint, *arguments)
    assert outcome.code == 0, outcome.err
    points = {(p["series"], p["name"]): p for p in json.loads(outcome.out)["points"]}
    assert points[PLAIN, "4 bits"]["kl"] < points[PLAIN, "2 bits"]["kl"]
    mixed = points[MIXED, "0.75"]
    assert mixed["share"] <= 0.75
    assert 0 < mixed["kl"] < mixed["line_kl"]


def is_later(key: str) -> bool:
    """Whether a tensor belongs to a layer behind the first."""
    return ".layers." in key and ".layers.0." not in key


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--text'"),
        (["--text", "{}/none.txt"], "none.txt: not readable as UTF-8 text"),
        (["--text", __file__, "--targets", "small"], "expected shares with commas between"),
        (["--text", __file__, "--temp", "{}/none"], "--temp {}/none: no such directory"),
    ],
)
def test_bad_input_is_one_line(lesonnx: Call, quick_path: Path, arguments: list[str], message: str) -> None:
    outcome = lesonnx("bench", "precision", SAMPLE, *(word.format(quick_path) for word in arguments))
    assert outcome.code == 2
    assert message.format(quick_path) in outcome.error
