"""One row of the ladder, in a process of its own: a spec as JSON on standard input, its figures as JSON on output.

A process a row, so that the system's own peak memory belongs to that row alone. `python -m lesonnx.bench.row`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lesonnx import ort
from lesonnx.bench.drafted_row import measure_drafted, measure_oracle
from lesonnx.bench.plain import PlainEngine, drop_pages
from lesonnx.bench.routing import TraceRouting
from lesonnx.bench.tensor_major import TensorMajorEngine
from lesonnx.bundle import Bundle
from lesonnx.engines import ExpertEngine, make_engine
from lesonnx.engines.session import SessionEngine
from lesonnx.errors import LesonnxError
from lesonnx.governor import Governor
from lesonnx.loader import ExpertLoader
from lesonnx.memory import peak_bytes
from lesonnx.model import LoadOptions, check_budget, scheduler_config
from lesonnx.runner import Runner

PLAIN, TENSOR_MAJOR, HITS = "plain", "tensor-major", "hits"


@dataclass(frozen=True)
class RowSpec:
    """What a row runs. ``engine``: one of the engines, ``plain`` or ``tensor-major`` (which needs ``copy``).

    ``routing`` int [steps][layers][k] replaces the routers' choice, ``recall`` is that of its predictions. ``hits``
    routes every token to the same experts, so that nothing is read: the machine's compute alone. ``governor`` looks
    ahead where it pays, as ``lesonnx run`` does by default; its trials count where the warm-up has not seen them.
    ``draft``: the drafter; with routing an oracle whose drafts have ``acceptance``.
    """

    bundle: str
    engine: str
    schedule: str
    num_loaders: int
    policy: str | None
    compute_first: bool | None
    lookahead: bool | None
    expert_budget_bytes: int
    prompt_ids: list[int]
    warmup_tokens: int
    tokens: int
    routing: list[list[list[int]]] | None = None
    recall: float = 1.0
    hits: bool = False
    copy: str | None = None
    num_threads: int | None = None
    governor: bool = False
    draft: str | None = None
    acceptance: float = 0.0


class RunClock:
    """Seconds that the computing thread spends inside ONNX Runtime's bound runs. One a process.

    What is left of a step beside them and the waits is the host's own work.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        run = ort.Binding.run
        computing = threading.get_ident()

        def timed(binding: ort.Binding) -> None:
            began = time.perf_counter()
            run(binding)
            if threading.get_ident() == computing:
                self.seconds += time.perf_counter() - began

        ort.Binding.run = timed  # type: ignore[method-assign,assignment]


def run_row(spec: RowSpec) -> dict[str, Any]:
    """Decode with one combination of techniques; figures are of the tokens after the warm-up."""
    bundle = Bundle(spec.bundle)
    options = LoadOptions(
        schedule=spec.schedule,
        num_loaders=spec.num_loaders,
        policy=spec.policy,
        compute_first=spec.compute_first,
        lookahead=spec.lookahead,
    )
    config, num_loaders = scheduler_config(options)
    check_budget(bundle, spec.expert_budget_bytes, config)
    ort.check_version(bundle.manifest.onnxruntime_at_least)
    engine = _engine(spec, bundle)
    if isinstance(engine, PlainEngine):
        for layer in bundle.manifest.expert_layers:
            drop_pages(bundle.pack_file(layer.layer_idx))
    loader = ExpertLoader(bundle, engine, config, spec.expert_budget_bytes, num_loaders)
    runner = Runner(bundle, loader, num_threads=spec.num_threads)
    if spec.governor:
        runner.governor = Governor()
    try:
        return _measure(spec, bundle, runner, engine)
    finally:
        runner.close()


def _engine(spec: RowSpec, bundle: Bundle) -> ExpertEngine:
    if spec.engine == PLAIN:
        return PlainEngine(bundle)
    if spec.engine == TENSOR_MAJOR:
        return TensorMajorEngine(bundle, Path(spec.copy or ""))
    return make_engine(spec.engine, bundle, spec.num_threads)


def _measure(spec: RowSpec, bundle: Bundle, runner: Runner, engine: ExpertEngine) -> dict[str, Any]:
    if spec.draft is not None:
        return _measure_drafted(spec, bundle, runner, engine, spec.draft)
    clock = RunClock()
    route(spec, bundle, runner)
    token = int(np.argmax(runner.prefill(spec.prompt_ids)))
    before = [token]
    for _ in range(spec.warmup_tokens):
        token = decode(runner, token)[0]
        before.append(token)
    start_tokens = runner.num_tokens
    runner.loader.reset_telemetry()
    clock.seconds = 0.0
    cpu = time.process_time()
    seconds, token_ids, digest = decode_all(runner, token, spec.tokens)
    cpu = time.process_time() - cpu
    figures = row_figures(runner, seconds, spec.tokens)
    if not isinstance(engine, SessionEngine):
        figures["outside_ms"] = (seconds - clock.seconds) * 1e3 / spec.tokens - figures["stall_ms"]
    figures["cpu_ms"] = cpu * 1e3 / spec.tokens
    figures["peak_bytes"] = peak_bytes()
    figures["engine"] = engine.name
    figures["token_ids"] = before + token_ids
    figures["digest"] = digest
    figures["load_average"] = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    figures["looks_ahead"] = runner.loader.uses_lookahead and (runner.governor is None or runner.governor.is_on)
    if spec.hits:
        figures["compute_ms"] = least_compute_ms(runner, token_ids[-1], spec.tokens)
    if isinstance(engine, PlainEngine):
        # The same tokens again, twice: the first fills the page cache.
        engine.drop = False
        for _ in range(2):
            go_back(runner, start_tokens)
            route(spec, bundle, runner, spec.warmup_tokens)
            seconds, _, _ = decode_all(runner, token, spec.tokens)
        figures["warm_tokens_per_s"] = spec.tokens / seconds
        for layer in bundle.manifest.expert_layers:
            drop_pages(bundle.pack_file(layer.layer_idx))
    return figures


def _measure_drafted(spec: RowSpec, bundle: Bundle, runner: Runner, engine: ExpertEngine, draft: str) -> dict[str, Any]:
    """A row that drafts; its logits come from passes of several rows, so they have no digest to compare."""
    tokens = (spec.prompt_ids, spec.warmup_tokens, spec.tokens)
    if spec.routing is not None:
        found = measure_oracle(runner, bundle, spec.routing, spec.recall, spec.acceptance, *tokens)
    else:
        found = measure_drafted(runner, bundle, draft, *tokens)
    seconds, token_ids, drafts = found
    facts = {"engine": engine.name, "token_ids": token_ids, "digest": None, "peak_bytes": peak_bytes(), "draft": draft}
    return row_figures(runner, seconds, spec.tokens) | facts | drafts


def go_back(runner: Runner, num_tokens: int) -> None:
    """Rewind, or compute the sequence's beginning again where recurrent states do not reach so far back."""
    if runner.states.reachable(num_tokens) == num_tokens:
        runner.rewind(num_tokens)
        return
    token_ids = runner.token_ids[:num_tokens]
    runner.rewind(0)
    runner.routing = None
    runner.prefill(token_ids)


def route(spec: RowSpec, bundle: Bundle, runner: Runner, after_tokens: int = -1) -> None:
    """Let the runner take its routing from the spec, if there is one; from the prompt's, or after so many tokens."""
    num_experts = bundle.manifest.model.num_experts
    if spec.hits:
        steps = [[list(range(layer.num_experts_per_tok)) for layer in bundle.manifest.expert_layers]]
        runner.routing = TraceRouting(np.array(steps, np.int64), num_experts, 1.0)
    elif spec.routing is not None:
        # The prompt takes as many steps as it has tokens, from the end: the warm-up begins at the trace's first.
        first = -len(spec.prompt_ids) if after_tokens < 0 else after_tokens
        runner.routing = TraceRouting(np.array(spec.routing, np.int64), num_experts, spec.recall, first_step=first)


def decode(runner: Runner, token: int) -> tuple[int, Any]:
    """One greedy step."""
    logits = runner.step([token], [0])[0]
    return int(np.argmax(logits)), logits


def decode_all(runner: Runner, token: int, num_tokens: int) -> tuple[float, list[int], str]:
    """Greedy steps; seconds, token ids, and a digest of all logits."""
    rows = []
    token_ids = []
    began = time.perf_counter()
    for _ in range(num_tokens):
        token, logits = decode(runner, token)
        token_ids.append(token)
        rows.append(logits)
    seconds = time.perf_counter() - began
    # Hashing is no part of a step.
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.tobytes())
    return seconds, token_ids, digest.hexdigest()


def least_compute_ms(runner: Runner, token: int, num_tokens: int) -> float:
    """What dense parts and experts take at least of a token: a bound, so the least that other programs disturbed."""
    least = float("inf")
    for _ in range(num_tokens):
        runner.loader.reset_telemetry()
        token = decode(runner, token)[0]
        telemetry = runner.loader.telemetry
        least = min(least, telemetry.dense_ms + telemetry.expert_ms)
    return least


def row_figures(runner: Runner, seconds: float, num_tokens: int) -> dict[str, Any]:
    """Speed, shares of the required experts, and what a token costs, from the telemetry since its reset."""
    telemetry = asdict(runner.loader.telemetry)
    required = telemetry["hits"] + telemetry["late"] + telemetry["misses"]
    figures: dict[str, Any] = {
        "tokens_per_s": num_tokens / seconds,
        "ms_per_token": seconds * 1e3 / num_tokens,
        "hit_rate": telemetry["hits"] / required,
        "late_rate": telemetry["late"] / required,
        "miss_rate": telemetry["misses"] / required,
        "bytes_per_token": telemetry["read_bytes"] / num_tokens,
        "loads_per_token": telemetry["loads"] / num_tokens,
        "lookahead_loads_per_token": telemetry["lookahead_loads"] / num_tokens,
        "lookahead_wasted_per_token": telemetry["lookahead_wasted"] / num_tokens,
    }
    for name in ("stall_ms", "dense_ms", "expert_ms", "schedule_ms", "lookahead_ms", "read_ms"):
        figures[name] = telemetry[name] / num_tokens
    return figures


def main(arguments: Sequence[str]) -> int:
    """Read a spec, print figures or ``{"error": …}``; 0, or the error's exit code."""
    spec = RowSpec(**json.load(sys.stdin))
    try:
        print(json.dumps(run_row(spec)))
    except LesonnxError as error:
        print(json.dumps({"error": str(error)}))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
