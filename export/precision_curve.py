"""``lesonnx bench precision``: expert bytes against KL to the float model, for uniform bits and for mixed precision.

It exports a checkpoint several times and evaluates every bundle; none of their work is done here.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from lesonnx.bench.plot import check_plot
from lesonnx.bundle import Bundle
from lesonnx.errors import InputError
from lesonnx.manifest import Bits
from lesonnx.memory import format_bytes
from lesonnx_export.evaluate.evaluation import open_evaluator
from lesonnx_export.evaluate.float_reference import opened_reference
from lesonnx_export.evaluate.overlap import read_text
from lesonnx_export.exporter import export_bundle
from lesonnx_export.plan import BASELINE_BITS, TOPICS, ExportOptions
from lesonnx_export.plot_curve import plot_curve

UNIFORM_BITS: tuple[Bits, ...] = (2, 4, 8)
TARGETS = (0.55, 0.65, 0.733, 0.85, 1.0)
PLAIN, CALIBRATED, MIXED = "rounded", "calibrated", "mixed"


@dataclass(frozen=True)
class Point:
    """One bundle. ``share`` is of the bytes of uniform 4 bits; ``kl`` in nats a token, over all texts.

    ``line_kl`` is what the straight line between plainly rounded 4 and 2 bits has at these bytes; None outside it.
    """

    series: str
    name: str
    expert_bytes: int
    share: float
    kl: float
    top1_agreement: float
    perplexity: float
    line_kl: float | None = None


def plan_points(targets: Sequence[float], base: ExportOptions) -> Iterator[tuple[str, str, ExportOptions]]:
    """Series, name and options of every bundle of the curve."""
    plain = replace(base, calibration=None, calibration_directory=None)
    for bits in UNIFORM_BITS:
        yield PLAIN, f"{bits} bits", replace(plain, bits=bits)
    for bits in UNIFORM_BITS:
        yield CALIBRATED, f"{bits} bits", replace(base, bits=bits)
    for target in targets:
        yield MIXED, f"{target:g}", replace(base, experts_target_size=target)


def measure_curve(
    checkpoint: Path,
    texts: Sequence[str],
    base: ExportOptions,
    targets: Sequence[float],
    tokens: int,
    temp: Path,
    console: Console,
) -> list[Point]:
    """Export and evaluate every point; bundles lie in ``temp``, one at a time beside the float one."""
    points = []
    with opened_reference(checkpoint, temp, console) as reference:
        for series, name, options in plan_points(targets, base):
            console.print(f"{series}, {name}", style="dim", highlight=False)
            bundle = Bundle(export_bundle(checkpoint, temp / "point.bundle", options).bundle)
            evaluator = open_evaluator(bundle, reference.bundle)
            try:
                windows = [window for text in texts for window in evaluator.text_windows(text, tokens)]
                sums = evaluator.read(windows)
            finally:
                evaluator.close()
            points.append(
                Point(
                    series=series,
                    name=name,
                    expert_bytes=bundle.expert_bytes,
                    share=0.0,
                    kl=sums.mean_kl or 0.0,
                    top1_agreement=sums.top1_agreement or 0.0,
                    perplexity=sums.perplexity,
                )
            )
            shutil.rmtree(bundle.directory)
    return compared(points)


def compared(points: Sequence[Point]) -> list[Point]:
    """The points with their share of uniform 4 bits, and the straight line between plainly rounded 4 and 2 bits."""
    plain = {point.name: point for point in points if point.series == PLAIN}
    low, high = plain["2 bits"], plain[f"{BASELINE_BITS} bits"]

    def line(num_bytes: int) -> float | None:
        if not low.expert_bytes <= num_bytes <= high.expert_bytes:
            return None
        place = (num_bytes - low.expert_bytes) / (high.expert_bytes - low.expert_bytes)
        return low.kl + place * (high.kl - low.kl)

    return [
        replace(point, share=point.expert_bytes / high.expert_bytes, line_kl=line(point.expert_bytes))
        for point in points
    ]


def _targets(context: click.Context, parameter: click.Parameter, value: str) -> list[float]:
    try:
        targets = [float(word) for word in value.split(",")]
    except ValueError:
        targets = []
    if not targets or not all(target > 0 for target in targets):
        raise click.BadParameter(f"expected shares with commas between, such as 0.65,0.733; got {value!r}")
    return targets


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="Text to evaluate on (several times: several texts); not the one that is calibrated on.",
)
@click.option("--tokens", type=click.IntRange(1), default=8192, show_default=True, help="Most tokens of each text.")
@click.option(
    "--targets",
    default=",".join(f"{target:g}" for target in TARGETS),
    show_default=True,
    callback=_targets,
    help="Sizes of mixed precision, as shares of uniform 4 bits.",
)
@click.option("--calibration", default=TOPICS, show_default=True, metavar="FILE", help="Text to calibrate on.")
@click.option(
    "--block-size",
    type=click.Choice(["128", "64", "32", "16"]),
    default="128",
    show_default=True,
    help="As for export.",
)
@click.option(
    "--temp", type=click.Path(path_type=Path), help="Directory for bundles: room for a float one and another."
)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the curve to this PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def precision(
    checkpoint: Path,
    texts: tuple[Path, ...],
    tokens: int,
    targets: list[float],
    calibration: str,
    block_size: str,
    temp: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure CHECKPOINT's experts in uniform bits and in mixed precision: bytes, and KL to float on texts.

    The rest of every bundle is float32, so that the KL is that of the experts.
    """
    if plot is not None:
        check_plot(plot)
    if temp is not None and not temp.is_dir():
        raise InputError(f"--temp {temp}: no such directory")
    contents = [read_text(path) for path in texts]
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="lesonnx-precision-", dir=temp) as name:
        base = ExportOptions(
            dense_bits=32,
            block_size=int(block_size),
            calibration=TOPICS if calibration == TOPICS else Path(calibration),
            calibration_directory=Path(name) / "calibration",
        )
        points = measure_curve(checkpoint, contents, base, targets, tokens, Path(name), console)
    if as_json:
        print(json.dumps({"checkpoint": checkpoint.name, "points": [asdict(point) for point in points]}))
    else:
        Console().print(curve_table(points))
    if plot is not None:
        plot_curve(points, checkpoint.resolve().name, plot)


def curve_table(points: Sequence[Point]) -> Table:
    """A row a bundle."""
    table = Table("experts", "", title="Expert bytes and KL to float", title_justify="left")
    columns: tuple[Any, ...] = ("bytes", "of 4 bits", "KL", "line 4 to 2 bits", "same likeliest", "perplexity")
    for column in columns:
        table.add_column(column, justify="right")
    before = None
    for point in points:
        if before not in (None, point.series):
            table.add_section()
        before = point.series
        table.add_row(
            point.series,
            point.name,
            format_bytes(point.expert_bytes),
            f"{point.share:.3f}",
            f"{point.kl:.4f}",
            "" if point.line_kl is None else f"{point.line_kl:.4f}",
            f"{point.top1_agreement:.2%}",
            f"{point.perplexity:.3f}",
        )
    return table
