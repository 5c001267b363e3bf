"""KL that rounding experts alone costs, dense parts and activations in float32: plain against calibrated rounding.

    python tools/measure_rounding.py CHECKPOINT --text FILE --text FILE --precision 2,2,4 --block-size 64

Each precision is the bits of gate, up and down. A few windows of 512 tokens, spread over each text, are judged.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from lesonnx.tokenizer import Tokenizer
from lesonnx_export.activations import FloatRun, ReadExpert, run_calibration
from lesonnx_export.blas import on_one_thread
from lesonnx_export.calibrated import read_text, token_ids
from lesonnx_export.checkpoint import Checkpoint, Weights
from lesonnx_export.compare import Logits, LogitsTally
from lesonnx_export.compensate import quantize_expert
from lesonnx_export.expert import ExpertPrecision, ExpertTensors, MatrixPrecision, make_mixed_kind
from lesonnx_export.pack import LayerPlan
from lesonnx_export.plan import ExportOptions, ExportPlan, make_plan
from lesonnx_export.sources import read_expert
from lesonnx_export.statistics import StatisticsDirectory

WINDOW_TOKENS = 512


def spread(text: str, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Windows spread evenly over a text."""
    starts = [place * len(text) // count for place in range(count)]
    return [tokenizer.encode(text[s : s + 8 * WINDOW_TOKENS], add_special_tokens=False)[:WINDOW_TOKENS] for s in starts]


def logits_of(plan: ExportPlan, scratch: Path, windows: Sequence[Sequence[int]], read: ReadExpert) -> list[Logits]:
    """Logits at every position of each window."""
    run = FloatRun(plan, scratch, read)
    flowing = run.begin(windows)
    for place in range(len(plan.layers)):
        run.compute(place, flowing, run.route(place, flowing))
    with run.judge() as logits:
        return [logits(window, np.arange(len(window.ids))) for window in flowing]


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--text", "texts", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--precision", "precisions", multiple=True, default=["2,2,2", "2,2,4", "4,4,4", "8,8,8"])
@click.option("--block-size", type=int, default=64)
@click.option("--windows", "num_windows", type=int, default=4, help="Of each text.")
@click.option("--calibration", type=click.Path(path_type=Path), help="A text.  [default: Python's help topics]")
def measure(
    checkpoint: Path,
    texts: tuple[Path, ...],
    precisions: tuple[str, ...],
    block_size: int,
    num_windows: int,
    calibration: Path | None,
) -> None:
    """Print KL and agreement with the float model for each precision, rounded plainly and for the calibration text."""
    plan = make_plan(Checkpoint(checkpoint), ExportOptions(block_size=block_size))
    weights = Weights(plan.checkpoint)
    tokenizer = Tokenizer.from_file(checkpoint / "tokenizer.json")
    windows = [w for path in texts for w in spread(path.read_text(encoding="utf-8"), tokenizer, num_windows)]
    ids = token_ids(read_text(calibration or "topics"), checkpoint / "tokenizer.json", plan.architecture.vocab_size)
    with tempfile.TemporaryDirectory() as directory, on_one_thread():
        scratch = Path(directory)
        statistics = run_calibration(plan, ids, scratch / "statistics")

        def exact(layer: LayerPlan, expert_idx: int | None) -> ExpertTensors:
            return read_expert(plan.architecture, weights, layer.layer_idx, expert_idx)

        reference = logits_of(plan, scratch, windows, exact)
        click.echo(f"{sum(map(len, windows))} tokens of {len(texts)} texts; calibrated on {len(ids)}")
        for precision in precisions:
            bits = [int(word) for word in precision.split(",")]
            for known in (None, statistics):
                report(plan, scratch, exact, known, bits, block_size, windows, reference, [path.stem for path in texts])


def report(
    plan: ExportPlan,
    scratch: Path,
    exact: ReadExpert,
    known: StatisticsDirectory | None,
    bits: Sequence[int],
    block_size: int,
    windows: Sequence[Sequence[int]],
    reference: Sequence[Logits],
    names: Sequence[str],
) -> None:
    """Quantize all experts and print what that does."""
    began = time.process_time()
    rounded: dict[tuple[int, int | None], ExpertTensors] = {}
    length_bytes = 0
    for layer in plan.layers:
        for expert_idx in layer.places:
            shape = plan.architecture.expert_shape() if expert_idx is not None else None
            shape = shape or plan.architecture.shared_expert_shape()
            if shape is None:
                continue
            precision = ExpertPrecision(*(MatrixPrecision(n, block_size) for n in bits))  # type: ignore[arg-type]
            kind = make_mixed_kind("kind", shape, precision)
            length_bytes = max(length_bytes, kind.length_bytes)
            tensors = exact(layer, expert_idx)
            statistics = known.layer(layer.layer_idx) if known else None
            found = quantize_expert(kind, tensors, statistics, expert_idx)
            rounded[layer.layer_idx, expert_idx] = {**tensors, **found.tensors(kind)}
    took = time.process_time() - began
    found_logits = logits_of(plan, scratch, windows, lambda layer, idx: rounded[layer.layer_idx, idx])
    tallies = [LogitsTally() for _ in names]
    for place, (expected, found) in enumerate(zip(reference, found_logits, strict=True)):
        tallies[place * len(names) // len(windows)].add(expected, found)
    tokens = sum(tally.tokens for tally in tallies)
    kl = sum(tally.kl * tally.tokens for tally in tallies) / tokens
    agreed = sum(tally.top1_agreement * tally.tokens for tally in tallies) / tokens
    by_text = " ".join(f"{name} {tally.kl:.4f}" for name, tally in zip(names, tallies, strict=True))
    how = "calibrated" if known else "plain     "
    click.echo(f"{bits} {how} {length_bytes} bytes: KL {kl:.4f}, same token {agreed:.2%}, {took:.1f} s; {by_text}")


if __name__ == "__main__":
    measure()
