"""``lesonnx bench lookahead``: how well the next layers' experts are foreseen, by layer and moment, and what it costs.

It runs a bundle token by token with a loader of its own that asks for predictions at every moment; nothing is cached.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from lesonnx import ort
from lesonnx.bench.console import wide_console
from lesonnx.bundle import Bundle
from lesonnx.commands.options import BUNDLE
from lesonnx.engines import LayerWork, make_engine
from lesonnx.errors import InputError
from lesonnx.loader import ExpertLoader, Lookahead, slab_lengths
from lesonnx.runner import Runner
from lesonnx.sampling import Sampler, SamplingOptions
from lesonnx.schedule import SchedulerConfig
from lesonnx.step_buffers import StepBuffers

# When a prediction is made: which of the current layer's experts have run by then.
AFTER_ATTENTION, AFTER_STRONGEST, AFTER_ALL = "after attention", "+ strongest half", "+ all experts"
MOMENTS = (AFTER_ATTENTION, AFTER_STRONGEST, AFTER_ALL)
PREVIOUS = "the previous token's experts"
MAX_AHEAD = 2
DEFAULT_PROMPT = "The list.append() method"
# Predictions of the first tokens take time for other reasons.
UNTIMED_TOKENS = 4


@dataclass(frozen=True)
class LookaheadRow:
    """Recall of one kind of prediction: by predicted MoE layer, None where it cannot be made, and the mean.

    ``top_k`` counts among as many experts as a token takes, ``top_wide`` among half as many more. ``recall_per_ms`` is
    the mean top-k recall by the time of one prediction, None for what takes none.
    """

    moment: str
    layers_ahead: int
    top_k: list[float | None]
    top_wide: list[float | None]
    mean_top_k: float
    mean_top_wide: float
    ms: float
    recall_per_ms: float | None


class ProbeRunner(Runner):
    """A runner that predicts one and two layers ahead whenever its loader asks, and keeps what was predicted."""

    def __init__(self, bundle: Bundle, loader: ExpertLoader) -> None:
        super().__init__(bundle, loader)
        # (place, ahead, moment) -> scores [E] of this step; (ahead, moment) -> seconds of every prediction.
        self.scores: dict[tuple[int, int, str], NDArray[np.float32]] = {}
        self.seconds: dict[tuple[int, str], list[float]] = {}
        self._ahead: dict[tuple[int, int], ort.Binding] = {}

    def _lookahead(self, buffers: StepBuffers, place: int) -> Lookahead | None:
        buffers.shared_out.fill(0)

        def predict(ready: NDArray[np.bool_]) -> NDArray[np.float32]:
            buffers.ready[...] = ready
            moment = MOMENTS[0 if not ready.any() else 2 if ready.all() else 1]
            for ahead in range(1, MAX_AHEAD + 1):
                if place + ahead < len(self._segments):
                    began = time.perf_counter()
                    self._predict_ahead(buffers, place, ahead).run()
                    self.seconds.setdefault((ahead, moment), []).append(time.perf_counter() - began)
                    self.scores[place + ahead, ahead, moment] = buffers.lookahead_scores[0].copy()
            return buffers.lookahead_scores

        return predict

    def _predict_ahead(self, buffers: StepBuffers, place: int, ahead: int) -> ort.Binding:
        """Every lookahead part takes the same inputs, so one can look from farther away than it was made for."""
        if (place, ahead) not in self._ahead:
            part = self.bundle.manifest.part("lookahead", self._segments[place + ahead].layer_idx)
            inputs = self._inputs(buffers, part, place + 1)
            outputs = {"scores": buffers.lookahead_scores}
            self._ahead[place, ahead] = ort.Binding(self._sessions[part.name], inputs, outputs)
        return self._ahead[place, ahead]


class ProbeLoader(ExpertLoader):
    """Loads a layer's experts, computes them strongest first, and asks for predictions before, between and after."""

    def __init__(self, bundle: Bundle, engine_name: str) -> None:
        config = SchedulerConfig(lookahead=True)
        super().__init__(bundle, make_engine(engine_name, bundle), config, bundle.least_budget_bytes, 1)
        # A slab of this loader's own, beside those of the scheduler, which decides nothing here.
        lengths = slab_lengths(self.scheduler)
        self._slab = len(lengths)
        self._slot_bytes = max(expert.cost_bytes for expert in bundle.experts)
        slots = 1 + max(shape.num_experts_per_tok for shape in self.scheduler.layers)
        self.engine.resize([*lengths, slots * self._slot_bytes])
        # place -> this step's experts in the router's order.
        self.chosen: dict[int, list[int]] = {}

    def run_layer(
        self,
        place: int,
        work: LayerWork,
        lookahead: Lookahead | None,
        before_experts: Callable[[], None] | None = None,
    ) -> None:
        if before_experts is not None:
            before_experts()
        first, shape = self.scheduler.first[place], self.scheduler.layers[place]
        ids = work.topk_ids[0].tolist()
        self.chosen[place] = ids
        numbers = [first + expert_idx for expert_idx in ids]
        if shape.shared_cost_bytes:
            numbers.append(first + shape.num_experts)
        for slot, number in enumerate(numbers):
            self.engine.load(self._experts[number], self._slab, slot * self._slot_bytes)
        ready = np.zeros(work.topk_ids.shape, np.bool_)
        half = max(1, len(ids) // 2)
        if lookahead is not None:
            lookahead(ready)
        # The shared expert does not depend on the router: it is among the first.
        self._compute([*numbers[:half], *numbers[len(ids) :]], work)
        ready[0, :half] = True
        if lookahead is not None and half < len(ids):
            lookahead(ready)
        self._compute(numbers[half : len(ids)], work)
        ready[...] = True
        if lookahead is not None:
            lookahead(ready)
        for number in numbers:
            self.engine.evict(self._experts[number])

    def _compute(self, numbers: list[int], work: LayerWork) -> None:
        if numbers:
            self.engine.compute([self._experts[number] for number in numbers], work)


def measure_lookahead(bundle: Bundle, text: str | None, num_tokens: int, engine_name: str) -> list[LookaheadRow]:
    """Recall over a text's tokens, or over ones that the model samples. InputError where there are too few."""
    if len(bundle.manifest.expert_layers) < 2:
        raise InputError(f"{bundle.directory}: has one MoE layer, a lookahead needs two")
    loader = ProbeLoader(bundle, engine_name)
    runner = ProbeRunner(bundle, loader)
    num_layers = len(bundle.manifest.expert_layers)
    found: dict[tuple[str, int], list[list[tuple[float, float]]]] = {}

    def note(moment: str, ahead: int, place: int, top_k: float, top_wide: float) -> None:
        found.setdefault((moment, ahead), [[] for _ in range(num_layers)])[place].append((top_k, top_wide))

    previous: dict[int, list[int]] = {}
    try:
        for number, _ in enumerate(_steps(bundle, runner, text, num_tokens)):
            if number < UNTIMED_TOKENS:
                runner.seconds.clear()
            for (place, ahead, moment), scores in runner.scores.items():
                chosen = loader.chosen[place]
                order = np.argsort(-scores, kind="stable")
                wide = len(chosen) + (len(chosen) + 1) // 2
                note(moment, ahead, place, *(_recall(chosen, order[:count]) for count in (len(chosen), wide)))
            for place, before in previous.items():
                recall = _recall(loader.chosen[place], np.array(before))
                note(PREVIOUS, 0, place, recall, recall)
            previous = dict(loader.chosen)
    finally:
        runner.close()
    kinds = [(moment, ahead) for ahead in range(1, MAX_AHEAD + 1) for moment in MOMENTS] + [(PREVIOUS, 0)]
    return [
        _row(moment, ahead, found[moment, ahead], runner.seconds.get((ahead, moment), []))
        for moment, ahead in kinds
        if (moment, ahead) in found
    ]


def _recall(chosen: list[int], named: NDArray[np.int64]) -> float:
    return len(set(chosen) & set(named.tolist())) / len(chosen)


def _row(moment: str, ahead: int, layers: list[list[tuple[float, float]]], seconds: list[float]) -> LookaheadRow:
    means = [np.mean(layer, axis=0).tolist() if layer else None for layer in layers]
    known = np.array([mean for mean in means if mean is not None])
    ms = float(np.median(seconds)) * 1e3 if seconds else 0.0
    top_k, top_wide = known.mean(axis=0).tolist()
    return LookaheadRow(
        moment,
        ahead,
        [None if mean is None else mean[0] for mean in means],
        [None if mean is None else mean[1] for mean in means],
        top_k,
        top_wide,
        ms,
        top_k / ms if ms else None,
    )


def _steps(bundle: Bundle, runner: Runner, text: str | None, num_tokens: int) -> Iterator[None]:
    """Run tokens one by one: a text's, or a prompt's and then sampled ones."""
    files = bundle.manifest.tokenizer
    limit = min(num_tokens, bundle.manifest.model.max_position_embeddings)
    if files is None or files.json_path is None:
        if text is not None:
            raise InputError(f"{bundle.directory}: has no tokenizer for --text; leave it out")
        token_ids = [bundle.manifest.model.bos_token_id or 0]
    else:
        from lesonnx.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_file(bundle.file(files.json_path))
        token_ids = tokenizer.encode(DEFAULT_PROMPT if text is None else text, add_special_tokens=True)
    if text is not None and len(token_ids) < 2:
        raise InputError("--text holds fewer than two tokens")
    sampler = Sampler(SamplingOptions(temperature=1.0))
    for number in range(limit):
        if number == len(token_ids):
            return
        logits = runner.step([token_ids[number]], [0])[0]
        yield
        if text is None and number + 1 == len(token_ids):
            token_ids.append(sampler.sample(logits))


@click.command()
@click.argument("bundle", type=BUNDLE)
@click.option("--text", type=BUNDLE, help="A text to read.  [default: what the model samples]")
@click.option("--tokens", type=click.IntRange(2), default=200, show_default=True, help="Most tokens of it.")
@click.option(
    "--engine",
    type=click.Choice(["auto", "kernel", "session"]),
    default="auto",
    show_default=True,
    help="What computes an expert.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def lookahead(bundle: Path, text: Path | None, tokens: int, engine: str, as_json: bool) -> None:
    """Measure how well BUNDLE's lookahead foresees the next layers' experts."""
    source = None
    if text is not None:
        try:
            source = text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{text}: not readable as text: {error}") from None
    opened = Bundle(bundle)
    ort.check_version(opened.manifest.onnxruntime_at_least)
    rows = measure_lookahead(opened, source, tokens, engine)
    found = {"bundle": opened.directory.name, "random_weights": is_random(opened), "rows": [asdict(r) for r in rows]}
    if as_json:
        print(json.dumps(found))
    else:
        print_rows(opened, rows)


def is_random(bundle: Bundle) -> bool:
    """Whether the bundle is one of ``bench synth``: its routers mean nothing."""
    return "random weights" in bundle.manifest.producer


def print_rows(bundle: Bundle, rows: list[LookaheadRow]) -> None:
    """Recall by predicted layer, top-k / top-1.5k, in percent."""
    k = max(layer.num_experts_per_tok for layer in bundle.manifest.expert_layers)
    title = f"{bundle.directory.name}: recall %, top-{k} / top-{k + (k + 1) // 2}, by predicted MoE layer"
    table = Table(title=title + ("; random weights" if is_random(bundle) else ""), title_justify="left")
    for column in ("prediction", "ahead"):
        table.add_column(column, no_wrap=True)
    # A deep model's layers do not fit a line: show some of them, evenly.
    num_layers = len(bundle.manifest.expert_layers)
    shown = sorted({round(place) for place in np.linspace(0, num_layers - 1, min(num_layers, 8))})
    for place in shown:
        table.add_column(str(bundle.manifest.expert_layers[place].layer_idx), justify="right", no_wrap=True)
    for column in ("mean", "ms", "recall/ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [_cell(row.top_k[place], row.top_wide[place], row.ms == 0) for place in shown]
        per_ms = "" if row.recall_per_ms is None else f"{row.recall_per_ms:.1f}"
        mean = _cell(row.mean_top_k, row.mean_top_wide, row.ms == 0)
        ms = f"{row.ms:.3f}" if row.ms else ""
        table.add_row(row.moment, str(row.layers_ahead or ""), *cells, mean, ms, per_ms)
    console = wide_console()
    console.print(table, highlight=False)


def _cell(top_k: Any, top_wide: Any, single: bool) -> str:
    if top_k is None:
        return "-"
    return f"{top_k * 100:.0f}" if single else f"{top_k * 100:.0f} / {top_wide * 100:.0f}"
