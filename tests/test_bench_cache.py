"""``lesonnx bench cache``: hit rates that can be counted by hand, the bound, and one line for every bad trace."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lesonnx.bench.cache import belady, cache, replay
from lesonnx.bench.trace import read_trace
from lesonnx.errors import InputError

COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
MIB = 1 << 20


def write(path: Path, steps: list[tuple[int, list[list[int]]]], sizes: list[int], head: str = "# n_expert=8") -> Path:
    """A trace of (phase, experts by layer) steps; ``sizes`` are the bytes of an expert, by layer."""
    lines = [head, *(f"# layer={layer} expert_bytes={size} dense_bytes=1" for layer, size in enumerate(sizes)), COLUMNS]
    for step, (phase, layers) in enumerate(steps):
        for layer, experts in enumerate(layers):
            lines += [f"0,{phase},{step},{layer},{slot},{e},0.5,0,1" for slot, e in enumerate(experts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def cycle(tmp_path: Path) -> Path:
    """Three layers of one expert a token, of 1 MiB each; the first alternates, the others never change."""
    steps = [(0, [[0], [0], [0]]), (0, [[1], [0], [0]])] + [(1, [[step % 2], [0], [0]]) for step in range(20)]
    return write(tmp_path / "trace.csv", steps, [MIB, MIB - 100, MIB])


def test_a_trace_is_read_with_its_prefill_as_one_step(cycle: Path) -> None:
    trace = read_trace(cycle)
    assert (trace.num_experts, trace.num_experts_per_tok, trace.cost_bytes) == (8, [1, 1, 1], [MIB, MIB, MIB])
    assert len(trace.steps) == 21
    assert not trace.steps[0].is_decode
    assert trace.steps[0].layers == [[[0], [1]], [[0], [0]], [[0], [0]]]
    assert trace.token_bytes == 3 * MIB


def test_turns_follow_one_another(tmp_path: Path) -> None:
    rows = ["1,0,0,0,0,3", "0,0,0,0,0,1", "0,1,1,0,0,2", "1,1,1,0,0,4", "0,0,5,0,0,6"]
    path = tmp_path / "turns.csv"
    path.write_text("\n".join(["# layer=0 expert_bytes=1", "turn,phase,step,layer,slot,expert", *rows]))
    steps = read_trace(path).steps
    assert [(step.is_decode, step.layers) for step in steps] == [
        (False, [[[1]]]),
        (True, [[[2]]]),
        (False, [[[6]]]),
        (False, [[[3]]]),
        (True, [[[4]]]),
    ]


def test_hit_rates_can_be_counted_by_hand(cycle: Path) -> None:
    trace = read_trace(cycle)
    # Four fit: everything that is used. Below one token's demand, LRU has always just thrown away what comes next.
    assert [replay(trace, 4, policy).hit_rate for policy in ("lru", "lfu", "les")] == [100] * 3
    assert belady(trace, 4).hit_rate == 100
    assert replay(trace, 2, "lru").hit_rate == 0
    assert replay(trace, 2, "les").hit_rate == pytest.approx(100 / 3, abs=2)
    assert belady(trace, 2).hit_rate == pytest.approx(100 / 3, abs=2)
    assert belady(trace, 2).read_mib == pytest.approx(2, abs=0.11)


def write_near(path: Path, rows: list[str]) -> Path:
    """A v2 trace of one layer, 1 MiB an expert; rows of step, slot, expert, chosen, score. All decode."""
    lines = ["# route_trace v2", "# n_expert=8", f"# layer=0 expert_bytes={MIB}"]
    lines.append("phase,step,layer,slot,expert,chosen,score")
    for row in rows:
        step, rest = row.split(",", 1)
        lines.append(f"1,{step},0,{rest}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_near_misses_are_read_apart(tmp_path: Path) -> None:
    rows = ["0,0,3,1,0.5", "0,1,1,1,0.4", "0,2,7,0,0.3", "0,3,2,0,0.1", "1,0,2,1,0.0", "1,1,4,1,0.3", "1,2,5,0,0.2"]
    trace = read_trace(write_near(tmp_path / "near.csv", rows))
    assert [step.layers for step in trace.steps] == [[[[3, 1]]], [[[2, 4]]]]
    assert trace.num_experts_per_tok == [2]
    assert trace.steps[0].near[0][0] == pytest.approx({7: 0.75, 2: 0.25})
    # Without a positive score to measure it by, a near miss counts nothing.
    assert trace.steps[1].near == [[{5: 0.0}]]


def test_near_misses_teach(tmp_path: Path) -> None:
    """Six experts in turns, of which one is always nearly chosen: who learns of that keeps it in memory for two."""
    rows = []
    for step in range(120):
        chosen = 7 if step % 6 == 5 else step % 6
        rows.append(f"{step},0,{chosen},1,0.5")
        if chosen != 7:
            rows.append(f"{step},1,7,0,0.5")
    trace = read_trace(write_near(tmp_path / "near.csv", rows))
    without, with_them = replay(trace, 2, "les"), replay(trace, 2, "les+near", 1.0)
    assert with_them.hit_rate > without.hit_rate + 5
    # Near misses that count nothing change nothing.
    assert replay(trace, 2, "les+near", 0.0).hit_rate == without.hit_rate


def test_near_needs_near_misses(cycle: Path) -> None:
    result = CliRunner().invoke(cache, ["--trace", str(cycle), "--policy", "les+near"])
    assert isinstance(result.exception, InputError)
    assert "holds no near misses" in str(result.exception)


def test_row_by_row(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.csv", [(0, [[0], [1]]), (0, [[2], [3]]), (1, [[4], [5]])], [MIB, MIB]))
    apart = trace.row_by_row()
    assert [step.layers for step in apart.steps] == [[[[0]], [[1]]], [[[2]], [[3]]], [[[4]], [[5]]]]
    assert all(step.is_decode for step in apart.steps)
    assert [step.near for step in apart.steps] == [[[{}], [{}]]] * 3


@pytest.mark.parametrize("policy", ["lru", "lfu", "les"])
def test_the_bound_is_a_bound(tmp_path: Path, policy: str) -> None:
    rng = random.Random(7)
    steps = [(int(step > 5), [sorted(rng.sample(range(4 + layer), 2)) for layer in range(4)]) for step in range(60)]
    trace = read_trace(write(tmp_path / "random.csv", steps, [MIB] * 4))
    for budget in (3, 5, 8, 12, 18):
        bound, row = belady(trace, budget), replay(trace, budget, policy)
        assert 0 <= row.hit_rate <= bound.hit_rate + 0.01
        assert row.read_mib >= bound.read_mib


def test_the_command_prints_rows_and_a_table(cycle: Path) -> None:
    arguments = ["--trace", str(cycle), "--budget-mib", "2,4", "--policy", "lru,belady"]
    result = CliRunner().invoke(cache, [*arguments, "--json"])
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert report["token_mib"] == 3
    assert [(row["budget_mib"], row["policy"], row["hit_rate"]) for row in report["rows"]] == [
        (2, "lru", 0),
        (2, "belady", pytest.approx(100 / 3, abs=2)),
        (4, "lru", 100),
        (4, "belady", 100),
    ]
    result = CliRunner().invoke(cache, arguments)
    assert result.exit_code == 0
    assert "belady" in result.output


def test_a_plot_needs_matplotlib(cycle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["--trace", str(cycle), "--budget-mib", "3", "--policy", "lru", "--plot", str(tmp_path / "plot.png")]
    result = CliRunner().invoke(cache, arguments)
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == "--plot needs the package matplotlib: pip install 'lesonnx[plot]'"


def test_a_plot_is_written(cycle: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    result = CliRunner().invoke(cache, ["--trace", str(cycle), "--budget-mib", "2,3", "--plot", str(plot)])
    assert result.exit_code == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


HEAD = "# layer=0 expert_bytes=4096"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: expected a routing trace"),
        (f"{HEAD}\nphase,step,layer,slot\n", r"line 2: expected the columns .* missing expert"),
        (f"{HEAD}\nphase,step,layer,slot,expert\n", "has no decode steps"),
        (f"{HEAD}\nphase,step,layer,slot,expert\n0,0,0,0,1\n", "has no decode steps"),
        (f"{HEAD}\nphase,step,layer,slot,expert\n1,0,0,0,x\n", "line 3: expected whole numbers"),
        (f"{HEAD}\nphase,step,layer,slot,expert\n1,0,0\n", "line 3: expected whole numbers"),
        (f"{HEAD}\nphase,step,layer,slot,expert\n1,0,0,0,-1\n", "line 3: expected whole numbers"),
        (f"{HEAD}\nphase,step,layer,slot,expert\n1,0,2,0,1\n", "layer 2 has no header line"),
        (f"{HEAD} n_expert=8\nphase,step,layer,slot,expert\n1,0,0,0,8\n", "an expert below 8, got 1, 8"),
        (f"{HEAD}\nphase,step,layer,slot,expert\n2,0,0,0,1\n", "expected phase 0 or 1"),
        (f"{HEAD}\nphase,step,layer,slot,expert\n1,0,0,0,1\n1,0,0,1,1\n", "line 4: slot 1 or expert 1 comes twice"),
        (f"{HEAD}\nphase,step,layer,slot,expert\n1,0,0,0,1\n1,0,0,0,2\n", "line 4: slot 0 or expert 2 comes twice"),
        ("# layer=0\n", "line 1: expected `# layer=N expert_bytes=M`"),
        ("# layer=0 expert_bytes=0\n", "line 1: expected `# layer=N expert_bytes=M`"),
    ],
)
def test_bad_traces_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path, cycle: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(InputError, match="not a text file"):
        read_trace(binary)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--budget-mib", "5,x", "whole MiB"), ("--budget-mib", "0", "whole MiB"), ("--policy", "fifo", "unknown policy")],
)
def test_bad_options_are_usage_errors(cycle: Path, option: str, value: str, message: str) -> None:
    result = CliRunner().invoke(cache, ["--trace", str(cycle), option, value])
    assert result.exit_code == 2
    assert message in result.output
