"""``lesonnx bench speculate`` and the ladder's rows that draft: structure, not speed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BundleFactory

import lesonnx as package
from lesonnx.bench import ladder as ladder_module
from lesonnx.bench.drafting import STRETCH, Task, Turn, decode, figures, measure
from lesonnx.bench.flash import FlashSpeed
from lesonnx.bench.oracle import DraftedRouting, KnownSampler, OracleDrafter
from lesonnx.bench.row import run_row
from lesonnx.bench.speculate import print_rows
from lesonnx.sampling import Sampler, SamplingOptions
from lesonnx.speculative.drafter import DraftSampler
from lesonnx.speculative.ngram import NgramDrafter
from lesonnx.speculative.speculator import DraftCounts

Lesonnx = Callable[..., Any]
SAMPLER = DraftSampler(Sampler(SamplingOptions()))
FIGURES = ("acceptance", "ratio", "acceptance_by_position", "union", "bytes_per_token", "plain_bytes_per_token")


def write_trace(path: Path, layers: int, experts: int, per_tok: int, steps: int = 24) -> Path:
    """A routing trace of decode steps, seeded."""
    rng = np.random.default_rng(2)
    lines = [f"# layer={layer} expert_bytes=4096" for layer in range(layers)]
    lines.append("phase,step,layer,slot,expert")
    for step in range(steps):
        for layer in range(layers):
            chosen = rng.permutation(experts)[:per_tok]
            lines += [f"1,{step},{layer},{slot},{expert}" for slot, expert in enumerate(chosen)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_every_text_and_mode_is_a_row(lesonnx: Lesonnx, sample_bundle: Path) -> None:
    done = lesonnx("bench", "speculate", sample_bundle, "--tokens", "12", "--warmup", "6", "--rounds", "1", "--json")
    assert done.code == 0
    found = json.loads(done.out)
    modes = ("streaming", "resident")
    texts = ("repetitive", "code-like", "free")
    expected = [(mode, text, "ngram") for mode in modes for text in texts]
    assert [(row["mode"], row["text"], row["drafter"]) for row in found["rows"]] == expected
    for row in found["rows"]:
        assert all(name in row for name in FIGURES)
        assert row["ratio"] > 0
        assert len(row["ratios"]) == 1
        assert row["tokens_per_pass"] >= 1
    assert all(row["bytes_per_token"] == 0 for row in found["rows"] if row["mode"] == "resident")
    assert all(row["plain_bytes_per_token"] > 0 for row in found["rows"] if row["mode"] == "streaming")


def test_a_trace_is_drafted_for_by_an_oracle(lesonnx: Lesonnx, sample_bundle: Path, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "routes.csv", 6, 32, 4)
    arguments = ("--routing", trace, "--acceptance", "0.9", "--tokens", "30", "--warmup", "20", "--rounds", "1")
    done = lesonnx("bench", "speculate", sample_bundle, "--modes", "streaming", *arguments)
    assert done.code == 0
    assert "trace" in done.out
    assert "oracle" in done.out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--modes", "streaming,fast"), "--modes 'fast' is not one of streaming, resident"),
        (("--drafter", "oracle"), "drafter 'oracle' is not one of none, ngram"),
        (("--drafter", "none"), "there is nothing to measure"),
        (("--drafter", "dspark"), "has no dspark drafter"),
        (("--tokens", "5000"), "do not fit the model's context"),
    ],
)
def test_bad_arguments_are_one_line(
    lesonnx: Lesonnx, sample_bundle: Path, arguments: tuple[str, ...], problem: str
) -> None:
    done = lesonnx("bench", "speculate", sample_bundle, *arguments)
    assert done.code != 0
    assert problem in done.err
    assert done.err.strip().count("\n") == 0


def test_a_bundle_without_tokenizer_needs_a_trace(lesonnx: Lesonnx, bundle_of: BundleFactory) -> None:
    done = lesonnx("bench", "speculate", bundle_of("qwen3_moe"))
    assert done.code != 0
    assert "has no tokenizer for texts; give --routing TRACE.csv" in done.err


# -- the oracle --------------------------------------------------------------------------------------------------------


def test_the_oracle_is_right_as_often_as_it_says_and_tells_which_rows_are() -> None:
    known = list(range(100, 1100))
    oracle = OracleDrafter(known, 5, 0.7, 2000)
    right = []
    for place in range(900):
        sequence = [0] * 5 + known[: place + 1]
        drafted = list(oracle.propose(sequence, 6, SAMPLER).token_ids)
        good = [one == other for one, other in zip(drafted, known[place + 1 : place + 7], strict=True)]
        right.append(good[0])
        assert oracle.num_right(len(sequence) - 1, 6) == (good.index(False) if False in good else 6)
    assert np.mean(right) == pytest.approx(0.7, abs=0.05)


def test_rows_of_wrong_drafts_route_elsewhere(sample_bundle: Path) -> None:
    steps = np.arange(10 * 6 * 4).reshape(10, 6, 4) % 32
    with package.load(sample_bundle) as model:
        oracle = OracleDrafter([1, 2, 3, 4, 5, 6], 1, 1.0, 2048)
        routing = DraftedRouting(steps, 32, 1.0, model.runner, oracle)
        routing.begin_step(4)
        assert routing.ids(2).tolist() == steps[0:4, 2].tolist()
        oracle._is_right[:] = [place != 1 for place in range(len(oracle._is_right))]
        routing.begin_step(4)
        # The second draft is wrong, and so is all that stands on it.
        assert routing.ids(2).tolist() == steps[[0, 1, 7, 8], 2].tolist()


def test_a_known_sampler_gives_what_is_known_whatever_the_logits() -> None:
    known: list[int] = []
    first = KnownSampler(known, [7, 7])
    logits = np.zeros((3, 9), np.float32)
    logits[range(3), (4, 2, 8)] = 1
    for row in logits:
        first.accept(first.sample(row))
    assert known == [4, 2, 8]
    again = KnownSampler(known, [7, 7])
    found = []
    for row in logits[::-1]:
        found.append(again.sample(row))
        again.accept(found[-1])
    assert found == known


def test_stretches_with_and_without_drafts_take_turns(sample_bundle: Path) -> None:
    with package.load(sample_bundle, schedule="resident") as model:
        prompt_ids = model.encode("CREATE TABLE t (a integer);\n" * 4)

        def sampler() -> Sampler:
            chosen = Sampler(SamplingOptions())
            chosen.accept_all(prompt_ids)
            return chosen

        row = measure(model.runner, Task(prompt_ids, 8, 24, sampler, NgramDrafter()), 2)
        assert len(row["ratios"]) == 2
        assert row["ratio"] == pytest.approx(np.mean(row["ratios"]))
        assert row["same_tokens"]
        assert all(1 <= growth <= rows for rows, growth in row["union"].items())


def test_every_token_is_measured_with_and_without_drafts(sample_bundle: Path) -> None:
    with package.load(sample_bundle, schedule="resident") as model:
        prompt_ids = model.encode("CREATE TABLE t (a integer);\n" * 4)
        task = Task(prompt_ids, 8, 3 * STRETCH, lambda: Sampler(SamplingOptions()), NgramDrafter())
        turns = Turn(), Turn()
        runs = [decode(model.runner, task, drafts_first, turns) for drafts_first in (False, True)]
        assert runs[0] == runs[1]
        assert turns[0].tokens + turns[1].tokens == 2 * 3 * STRETCH
        # A draft may lead beyond its stretch.
        assert 3 * STRETCH <= turns[1].tokens <= 4 * STRETCH + 15
        assert not turns[0].counts
        assert sum(sum(one.accepted) for one in turns[1].counts) > 0


def test_the_ratio_is_the_median_of_rounds() -> None:
    plain = [Turn(seconds, 10) for seconds in (1.0, 1.0, 2.0)]
    drafted = [Turn(seconds, 20, 0, [DraftCounts()], {1: [4]}) for seconds in (2.0, 4.0, 4.0)]
    row = figures(plain, drafted, 4)
    assert row["ratios"] == [1.0, 0.5, 1.0]
    assert row["ratio"] == 1.0


@pytest.mark.parametrize(("tokens_per_pass", "is_noise"), [(1.0, True), (1.004, True), (1.01, False)])
def test_noise_is_called_so(capsys: pytest.CaptureFixture[str], tokens_per_pass: float, is_noise: bool) -> None:
    turn = Turn(0.25, 1, 0, [DraftCounts()], {1: [4]})
    row = figures([turn], [turn], 4) | {"tokens_per_pass": tokens_per_pass, "same_tokens": True}
    row |= {"mode": "resident", "text": "free", "drafter": "dspark"}
    print_rows({"bundle": "b", "expert_budget_bytes": 1, "tokens": 9, "rows": [row], "notes": []})
    assert ("what is left of the ratio is mostly noise" in capsys.readouterr().out) is is_noise


# -- the ladder --------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_module, "run_process", run_row)
    monkeypatch.setattr(ladder_module, "measure_flash", lambda bundle, loaders: FlashSpeed(1e9, loaders, True))


@pytest.mark.usefixtures("no_processes")
def test_the_ladder_ends_with_drafts(lesonnx: Lesonnx, sample_bundle: Path, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "routes.csv", 6, 32, 4)
    for rows, more in (("governed,ngram", ()), ("governed,oracle", ("--routing", trace, "--acceptance", "0.8"))):
        done = lesonnx(
            "bench", "ladder", sample_bundle, "--rows", rows, "--tokens", "8", "--warmup", "4", "--json", *more
        )
        assert done.code == 0, done.err
        found = json.loads(done.out)["rows"]
        assert [row["name"] for row in found] == [*rows.split(","), "governed"]
        assert "acceptance" in found[1]


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("name", ["dspark", "oracle"])
def test_a_row_whose_drafter_is_not_there_is_refused(lesonnx: Lesonnx, sample_bundle: Path, name: str) -> None:
    done = lesonnx("bench", "ladder", sample_bundle, "--rows", name)
    assert done.code != 0
    assert f"--rows {name} needs" in done.err
