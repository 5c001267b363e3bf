"""``lesonnx bench ladder``, ``lookahead``, ``prefill`` and the recorder, on the sample: structure, not speed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BundleFactory

from lesonnx import native
from lesonnx.bench import ladder as ladder_module
from lesonnx.bench.busy import busy_cores
from lesonnx.bench.flash import FlashSpeed
from lesonnx.bench.ladder import AGAIN, BY_NAME, check_equal, hits_spec, run_ladder, run_process
from lesonnx.bench.lookahead import PREVIOUS, measure_lookahead
from lesonnx.bench.prefill import measure_prefill
from lesonnx.bench.recorder import NEAR_MISSES, near_misses
from lesonnx.bench.routing import TraceRouting, predictions
from lesonnx.bench.row import RowSpec, decode_all, run_row
from lesonnx.bench.tensor_major import tensor_ranges, write_copy
from lesonnx.bench.trace import read_trace
from lesonnx.bench.turns import turns_of
from lesonnx.bundle import Bundle
from lesonnx.errors import InputError, LesonnxError
from lesonnx_export.plan import LayerPrecision

Lesonnx = Callable[..., Any]
needs_kernel = pytest.mark.skipif(native.library_path() is None, reason="the kernel's library is not built")
TRACE_COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows run in this process, and flash has a known speed: quick, and the same everywhere."""
    monkeypatch.setattr(ladder_module, "run_process", run_row)
    monkeypatch.setattr(ladder_module, "measure_flash", lambda bundle, loaders: FlashSpeed(1e9, loaders, True))


def spec_for(bundle: Path, **changes: Any) -> RowSpec:
    base = RowSpec(
        bundle=str(bundle),
        engine="kernel",
        schedule="les",
        num_loaders=2,
        policy=None,
        compute_first=None,
        lookahead=None,
        expert_budget_bytes=Bundle(bundle).token_demand_bytes,
        prompt_ids=[5, 6, 7],
        warmup_tokens=1,
        tokens=3,
    )
    return replace(base, **changes)


def trace_for(bundle: Path, path: Path, steps: int = 4) -> Path:
    """A trace of the bundle's shape: token after token, each layer's first experts, moved on by one."""
    layers = Bundle(bundle).manifest.expert_layers
    lines = [f"# n_expert={layers[0].num_experts}"]
    lines += [f"# layer={layer.layer_idx} expert_bytes=4096" for layer in layers]
    lines.append(TRACE_COLUMNS)
    for step in range(steps):
        for layer in layers:
            for slot in range(layer.num_experts_per_tok):
                expert = (slot + step) % layer.num_experts
                lines.append(f"0,1,{step},{layer.layer_idx},{slot},{expert},0.1,0,4096")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def mixed_sample(bundle_of: BundleFactory) -> Path:
    """The sample in 2 bits but for its first and last layers."""
    precisions = tuple(LayerPrecision.uniform(bits, 64) for bits in (4, 2, 2, 2, 2, 4))
    return bundle_of("sample", bits=4, dense_bits=8, precisions=precisions)


# -- the ladder --------------------------------------------------------------------------------------------------------


@needs_kernel
def test_every_technique_generates_the_same(
    bundle_of: BundleFactory, sample_bundle: Path, tmp_path: Path, no_processes: None
) -> None:
    mixed = mixed_sample(bundle_of)
    # Those that draft have a test of their own: their logits come from passes of several rows.
    techniques = [technique for technique in BY_NAME.values() if technique.draft is None]
    found = run_ladder(Bundle(sample_bundle), spec_for(sample_bundle), techniques, tmp_path, mixed=mixed)
    assert [row["name"] for row in found.rows] == [*(technique.name for technique in techniques), "serial"]
    assert found.rows[-1]["technique"].startswith(AGAIN)
    # One digest an engine; run_ladder itself refuses others.
    assert len({(row["engine"], row["digest"]) for row in found.rows if not row["is_mixed"]}) == 2
    assert "mixed precision is another model" in found.notes[0]
    assert len(found.notes) == 1 or "first differ" in found.notes[1]
    assert not list(tmp_path.iterdir())
    by_name = {row["name"]: row for row in found.rows}
    assert by_name["serial-packs"]["hit_rate"] == 0 == by_name["plain"]["hit_rate"]
    assert by_name["cache"]["hit_rate"] > 0 < by_name["les"]["hit_rate"]
    assert by_name["lookahead"]["lookahead_loads_per_token"] > 0 == by_name["les"]["lookahead_loads_per_token"]
    assert by_name["mixed"]["digest"] != by_name["lookahead"]["digest"]
    assert 0 < by_name["mixed"]["bytes_per_token"] < by_name["lookahead"]["bytes_per_token"]
    assert by_name["serial"]["bytes_per_token"] <= by_name["serial-packs"]["bytes_per_token"]
    assert by_name["plain"]["warm_tokens_per_s"] > 0
    for row in found.rows:
        assert row["hit_rate"] + row["late_rate"] + row["miss_rate"] == pytest.approx(1)
        assert row["flash_ms"] == pytest.approx(row["bytes_per_token"] / 1e9 * 1e3)
        assert row["roofline_ms"] == max(row["flash_ms"], found.compute_ms)
        assert row["peak_bytes"] > 0
    assert by_name["serial-packs"]["ratio_same_loader"] == 1 == by_name["plain"]["ratio_plain"]


@needs_kernel
def test_rows_in_mixed_precision_are_held_to_each_other(
    lesonnx: Lesonnx, bundle_of: BundleFactory, sample_bundle: Path, no_processes: None
) -> None:
    arguments = ("bench", "ladder", sample_bundle, "--tokens", "2", "--warmup", "1")
    mixed = ("--mixed", mixed_sample(bundle_of))
    done = lesonnx(*arguments, *mixed, "--rows", "mixed,lookahead,mixed", "--json")
    assert [row["is_mixed"] for row in json.loads(done.out)["rows"]] == [True, False, True, True]
    # Every row adds one: what the table has behind mixed precision keeps it, what comes before does not.
    done = lesonnx(*arguments, *mixed, "--rows", "governed,mixed,lookahead,ngram", "--json")
    assert [row["is_mixed"] for row in json.loads(done.out)["rows"]] == [False, True, False, True, False]
    assert "+ mixed precision" in lesonnx(*arguments, *mixed, "--rows", "lookahead,mixed").out
    refused = lesonnx(*arguments, "--rows", "mixed")
    assert (refused.code, refused.error) == (2, "error: --rows 'mixed' needs a bundle: --mixed")
    other = lesonnx(*arguments, "--mixed", bundle_of("qwen2_moe"))
    assert (other.code, "is of another model" in other.error) == (2, True)


def test_a_plain_row_of_recurrent_layers(bundle_of: BundleFactory) -> None:
    """Its tokens run again from where they began, which recurrent states do not reach by a rewind."""
    bundle = bundle_of("qwen3_next")
    spec = spec_for(bundle, engine="plain", schedule="on-demand", num_loaders=1)
    row = run_row(spec)
    assert row["warm_tokens_per_s"] > 0
    assert row["token_ids"] == run_row(replace(spec, engine="session"))["token_ids"]


@needs_kernel
def test_the_ladder_as_json_from_its_own_processes(lesonnx: Lesonnx, sample_bundle: Path, tmp_path: Path) -> None:
    trace = trace_for(sample_bundle, tmp_path / "routes.csv")
    done = lesonnx(
        *("bench", "ladder", sample_bundle, "--tokens", "2", "--warmup", "1", "--rows", "lookahead"),
        *("--routing", trace, "--recall", "1", "--json"),
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["label"] == "routing from routes.csv, random weights"
    wanted = {"technique", "tokens_per_s", "hit_rate", "bytes_per_token", "stall_ms", "peak_bytes", "roofline_share"}
    (row,) = found["rows"]
    assert wanted <= set(row)
    # Two of three tokens' experts are the token's before, moved on by one.
    assert row["hit_rate"] > 0.5


@needs_kernel
def test_beside_busy_cores_in_turns(lesonnx: Lesonnx, sample_bundle: Path, no_processes: None) -> None:
    arguments = ("bench", "ladder", sample_bundle, "--tokens", "2", "--warmup", "1", "--busy", "1")
    names = "compute-first,governed,compute-first,governed,compute-first"
    found = json.loads(lesonnx(*arguments, "--rows", names, "--json").out)
    assert (found["busy"], found["label"]) == (1, "beside 1 spinning processes")
    turns = found["turns"]
    assert (turns["name"], turns["against"], len(turns["ratios"])) == ("governed", "compute-first", 2)
    speeds = [row["tokens_per_s"] for row in found["rows"]]
    assert turns["ratios"][1] == pytest.approx(speeds[3] * 2 / (speeds[2] + speeds[4]))
    assert [row["looks_ahead"] for row in found["rows"][:2]] == [False, True]
    shown = lesonnx(*arguments, "--rows", names).out
    assert "beside 1 spinning processes" in shown
    assert "governed by the compute-first rows around it: median" in shown


def test_turns_need_rows_on_both_sides() -> None:
    def rows(text: str) -> list[dict[str, Any]]:
        return [{"name": name, "tokens_per_s": number + 1.0} for number, name in enumerate(text)]

    turns = turns_of(rows("abababa"))
    assert turns is not None
    assert turns.ratios == [1.0] * 3 == [turns.median] * 3
    assert all(turns_of(rows(text)) is None for text in ("", "a", "aba", "abcabc", "aaaaa", "abba"))


def test_busy_processes_spin_and_end() -> None:
    with busy_cores(2) as pids:
        deadline = time.monotonic() + 20
        # Processor time in ticks, fields 14 and 15 of the line, counted from behind the name in brackets.
        while not all(spent_ticks(pid) > 2 for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(spent_ticks(pid) > 2 for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def spent_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_busy_process_outlives_nobody() -> None:
    """Whoever measures may be killed: what spins for it ends by itself."""
    script = (
        "import os, signal; from lesonnx.bench.busy import busy_cores; busy = busy_cores(1);"
        " print(*busy.__enter__(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


@needs_kernel
def test_the_table_says_where_the_routing_is_from(
    lesonnx: Lesonnx, sample_bundle: Path, tmp_path: Path, no_processes: None
) -> None:
    pytest.importorskip("matplotlib")
    trace, plot = trace_for(sample_bundle, tmp_path / "routes.csv"), tmp_path / "ladder.png"
    done = lesonnx(
        *("bench", "ladder", sample_bundle, "--tokens", "2", "--warmup", "0", "--rows", "serial,les,les"),
        *("--routing", trace, "--plot", plot),
    )
    assert done.code == 0, done.err
    assert "routing from routes.csv, random weights" in done.out
    assert "roofline: the larger of flash, 1 GB/s" in done.out
    assert "note: tensor-major rows are left out: no --temp was given" in done.out
    assert done.out.count("+ les eviction") == 3  # twice as asked for, once more for drift
    assert plot.read_bytes().startswith(b"\x89PNG")


@needs_kernel
def test_one_token_s_experts_over_and_over_are_all_hits(sample_bundle: Path) -> None:
    figures = run_row(hits_spec(Bundle(sample_bundle), spec_for(sample_bundle)))
    assert figures["hit_rate"] == 1
    assert figures["bytes_per_token"] == 0


def test_rows_of_one_engine_that_differ_are_refused() -> None:
    row = {"name": "cache", "is_mixed": False, "engine": "kernel", "digest": "a", "token_ids": [1, 2]}
    assert check_equal([row, {**row, "name": "les"}]) == []
    with pytest.raises(LesonnxError, match="rows cache and les gave different logits"):
        check_equal([row, {**row, "name": "les", "digest": "b"}])
    other = {**row, "name": "plain", "engine": "plain", "digest": "c", "token_ids": [1, 3]}
    assert check_equal([row, other]) == ["engines kernel and plain first differ at token 1"]


def test_a_row_s_error_becomes_the_command_s(sample_bundle: Path) -> None:
    with pytest.raises(InputError, match="expert budget is 1 bytes"):
        run_process(spec_for(sample_bundle, engine="session", expert_budget_bytes=1))


@needs_kernel
def test_the_tensor_major_copy_holds_every_tensor(bundle_of: Any, tmp_path: Path) -> None:
    bundle = Bundle(bundle_of("qwen2_moe"))  # with a shared expert
    write_copy(bundle, tmp_path)
    layer = bundle.manifest.expert_layers[0]
    kind = bundle.manifest.expert_kinds[layer.kind]
    pack, copy = bundle.pack_file(layer.layer_idx).read_bytes(), (tmp_path / "layer_000.tensors").read_bytes()
    offset, length = tensor_ranges(kind)[0]
    for expert_idx in range(layer.num_experts):
        start = expert_idx * kind.cost_bytes + offset
        assert copy[expert_idx * length : (expert_idx + 1) * length] == pack[start : start + length]
    packs = run_row(spec_for(bundle.directory, schedule="on-demand"))
    tensors = run_row(spec_for(bundle.directory, schedule="on-demand", engine="tensor-major", copy=str(tmp_path)))
    assert packs["digest"] == tensors["digest"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "nonsense"), "--rows 'nonsense' is not one of plain, serial"),
        (("--rows", "serial"), "no row is left to run: tensor-major rows are left out: no --temp was given"),
        (("--rows", "serial", "--temp", "nowhere"), "--temp nowhere: no such directory"),
        (("--plot", "ladder.pdf"), "--plot ladder.pdf: expected a name that ends in .png"),
        (("--plot", "nowhere/ladder.png"), "no such directory as nowhere"),
        (("--prompt", ""), "--prompt is empty"),
        (("--tokens", "100000"), "do not fit the model's context"),
        (("--routing", "nowhere.csv"), "nowhere.csv: No such file"),
        (("--expert-budget", "1", "--rows", "les"), "the expert budget is 1 bytes"),
    ],
)
def test_bad_input_is_one_line(lesonnx: Lesonnx, sample_bundle: Path, arguments: tuple[str, ...], message: str) -> None:
    done = lesonnx("bench", "ladder", sample_bundle, *arguments)
    assert done.code == 2
    assert message in done.err.splitlines()[-1]


def test_a_trace_of_another_shape_is_refused(
    lesonnx: Lesonnx, bundle_of: Any, sample_bundle: Path, tmp_path: Path
) -> None:
    trace = trace_for(bundle_of("mixtral"), tmp_path / "routes.csv")
    done = lesonnx("bench", "ladder", sample_bundle, "--routing", trace)
    assert done.code == 2
    assert "is of 3 layers, 2 of 8 experts a token" in done.error


def test_a_plot_without_matplotlib(lesonnx: Lesonnx, sample_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = lesonnx("bench", "ladder", sample_bundle, "--plot", "ladder.png")
    assert done.code == 2
    assert done.error == "error: --plot needs the package matplotlib: pip install 'lesonnx[plot]'"


# -- routing from a trace ----------------------------------------------------------------------------------------------


def test_routing_goes_round_and_predicts_at_its_recall() -> None:
    steps = np.arange(4 * 2 * 3).reshape(4, 2, 3) % 16
    routing = TraceRouting(steps, 16, 1.0, first_step=-1)
    for step in (3, 0, 1):
        routing.begin_step(1)
        assert routing.ids(1).tolist() == [steps[step, 1].tolist()]
        scores = routing.scores(1)
        assert set(np.argsort(-scores[0])[:3]) == set(steps[step, 1])
    routing.begin_step(2)
    assert routing.ids(0).tolist() == steps[2:4, 0].tolist()
    assert routing.scores(0).shape == (2, 16)
    many = predictions(np.tile(np.arange(8), (4000, 1)), 64, 0.75, (1,))
    hit = np.mean([len(set(np.argsort(-row)[:8]) & set(range(8))) / 8 for row in many])
    assert hit == pytest.approx(0.75, abs=0.02)
    # All experts chosen: there are no wrong ones.
    assert predictions(np.arange(4)[None], 4, 0.0, (1,)).shape == (1, 4)
    with pytest.raises(InputError, match="recall is 2"):
        TraceRouting(steps, 16, 2)


# -- lookahead ---------------------------------------------------------------------------------------------------------


def test_recall_by_layer_and_moment(sample_bundle: Path) -> None:
    bundle = Bundle(sample_bundle)
    rows = measure_lookahead(bundle, None, 40, "auto")
    by_kind = {(row.moment, row.layers_ahead): row for row in rows}
    assert len(rows) == 7
    layers = len(bundle.manifest.expert_layers)
    for (moment, ahead), row in by_kind.items():
        first = ahead if moment != PREVIOUS else 0
        assert [value is None for value in row.top_k] == [place < first for place in range(layers)]
        assert row.mean_top_k <= row.mean_top_wide
    # What is known of the current layer helps, and nothing is foreseen worse than by the last token's experts.
    early, late = by_kind["after attention", 1], by_kind["+ all experts", 1]
    assert early.mean_top_k < late.mean_top_k
    assert by_kind[PREVIOUS, 0].mean_top_k < by_kind["after attention", 2].mean_top_k < late.mean_top_k
    assert late.recall_per_ms is not None
    assert by_kind[PREVIOUS, 0].recall_per_ms is None


def test_predictions_change_nothing(sample_bundle: Path) -> None:
    """The probe's own loader computes what the real one does."""
    from lesonnx.bench.lookahead import ProbeLoader, ProbeRunner
    from lesonnx.model import load

    bundle = Bundle(sample_bundle)
    probe = ProbeRunner(bundle, ProbeLoader(bundle, "auto"))
    try:
        probe.prefill([5])
        _, ids, digest = decode_all(probe, 6, 3)
    finally:
        probe.close()
    with load(bundle) as model:
        model.runner.prefill([5])
        assert decode_all(model.runner, 6, 3)[1:] == (ids, digest)


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral"])
def test_lookahead_command(lesonnx: Lesonnx, bundle_of: Any, name: str) -> None:
    bundle = bundle_of(name)
    assert "recall %, top-2 / top-3" in lesonnx("bench", "lookahead", bundle, "--tokens", "6").out
    found = json.loads(lesonnx("bench", "lookahead", bundle, "--tokens", "6", "--json").out)
    assert {row["moment"] for row in found["rows"]} >= {"after attention", "+ all experts"}


def test_lookahead_reads_a_text(lesonnx: Lesonnx, sample_bundle: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("In the beginning", encoding="utf-8")
    assert lesonnx("bench", "lookahead", sample_bundle, "--text", text).code == 0
    text.write_text("", encoding="utf-8")
    assert "fewer than two tokens" in lesonnx("bench", "lookahead", sample_bundle, "--text", text).error
    assert "not readable as text" in lesonnx("bench", "lookahead", sample_bundle, "--text", tmp_path / "none").error


# -- prefill -----------------------------------------------------------------------------------------------------------


def test_no_expert_is_read_twice_in_a_chunk(sample_bundle: Path) -> None:
    bundle = Bundle(sample_bundle)
    ids = list(range(40))
    budget = bundle.expert_bytes // 4
    small, large = (measure_prefill(bundle, ids, chunk, budget) for chunk in (10, 40))
    assert (small.chunks, large.chunks) == (4, 1)
    assert (small.most_reads, large.most_reads) == (1, 1)
    assert large.read_bytes < small.read_bytes
    assert 0 < large.touched <= 1
    # With room for one row's experts alone, a later prediction may take the place of one that comes true after all.
    assert measure_prefill(bundle, ids, 40, bundle.least_budget_bytes).most_reads <= 2


def test_prefill_command(lesonnx: Lesonnx, sample_bundle: Path) -> None:
    done = lesonnx("bench", "prefill", sample_bundle, "--tokens", "12", "--chunks", "6,12", "--json")
    assert done.code == 0, done.err
    assert [row["chunk_tokens"] for row in json.loads(done.out)["rows"]] == [6, 12]
    for chunks, message in (("a", "not a list of numbers"), ("0", "at least 1 token")):
        assert message in lesonnx("bench", "prefill", sample_bundle, "--chunks", chunks).error


# -- the recorder ------------------------------------------------------------------------------------------------------


def test_a_recorded_run_is_a_trace(lesonnx: Lesonnx, sample_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "routes.csv"
    done = lesonnx(
        *("run", sample_bundle, "--prompt-ids", "5,6,7", "--max-tokens", "4", "--ignore-eos"),
        *("--record-routing", path, "--json"),
    )
    assert done.code == 0, done.err
    trace = read_trace(path)
    layers = Bundle(sample_bundle).manifest.expert_layers
    assert trace.num_experts_per_tok == [layer.num_experts_per_tok for layer in layers]
    # Three tokens of prompt in one step, then one each for all but the last that was generated.
    assert [(step.is_decode, len(step.layers[0])) for step in trace.steps] == [(False, 3), *[(True, 1)] * 3]
    assert trace.has_near_misses
    for step in trace.steps:
        for rows, near_rows in zip(step.layers, step.near, strict=True):
            for row, near in zip(rows, near_rows, strict=True):
                assert len(near) == NEAR_MISSES
                assert not set(row) & set(near)
                # The best of those not chosen, none better than the weakest that was.
                assert list(near.values()) == sorted(near.values(), reverse=True)
                assert 0 < max(near.values()) <= 1
    assert json.loads(done.out)["tokens"]
    done = lesonnx("run", sample_bundle, "--prompt-ids", "5", "--max-tokens", "1", "--record-routing", tmp_path / "a/b")
    assert done.code == 2
    assert "no such directory to write into" in done.err


def test_near_misses_are_the_best_not_chosen() -> None:
    scores = np.array([[0.1, 0.3, 0.2, 0.2, 0.05, 0.15], [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]], np.float32)
    assert near_misses(np.array([[1], [0]]), scores).tolist() == [[2, 3, 5, 0], [1, 2, 3, 4]]
    # Fewer experts than there would be near misses.
    assert near_misses(np.array([[1, 2, 3, 0], [1, 2, 3, 0]]), scores).tolist() == [[5, 4], [4, 5]]


def test_specs_pass_as_json(sample_bundle: Path) -> None:
    spec = spec_for(sample_bundle, routing=[[[1, 2]]])
    assert RowSpec(**json.loads(json.dumps(asdict(spec)))) == spec
