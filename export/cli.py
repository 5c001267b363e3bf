"""``lesonnx export``: the command, its progress bar and its summary."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from lesonnx.memory import format_bytes
from lesonnx_export.decisions import print_decisions
from lesonnx_export.executors import RunTasks, dask_tasks
from lesonnx_export.exporter import ExportReport, can_resume, export_bundle
from lesonnx_export.plan import BASELINE_BITS, TOPICS, ExportOptions, ExportPlan
from lesonnx_export.precision import Decision


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--bits", type=click.Choice(["32", "8", "4", "2"]), help="Bits of expert weights.  [default: 4]")
@click.option(
    "--experts-target-size",
    type=click.FloatRange(0, min_open=True),
    metavar="SHARE",
    help="Instead of --bits: 2, 4 or 8 bits by layer and matrix, whatever loses least, for experts of that share of the"
    " bytes of uniform 4 bits (0.733, say).",
)
@click.option(
    "--calibration",
    metavar="FILE",
    help="Quantize experts for what they do on this text, or on Python's help topics: 'topics'."
    "  [default: none; topics with --experts-target-size]",
)
@click.option(
    "--calibration-directory",
    type=click.Path(path_type=Path),
    help="Keep here what calibration finds, and take it from here: several exports of CHECKPOINT calibrate once.",
)
@click.option(
    "--dense-bits", type=click.Choice(["32", "8", "4"]), help="Bits of the rest.  [default: 32 with --bits 32, else 4]"
)
@click.option(
    "--block-size",
    type=click.Choice(["128", "64", "32", "16"]),
    default="128",
    show_default=True,
    help="Weights that share a scale; smaller where a matrix is no multiple.",
)
@click.option(
    "--kv-bits",
    type=click.Choice(["32", "16", "8"]),
    default="32",
    show_default=True,
    help="Bits of attention caches; 16 and 8 need ONNX Runtime 1.29, 8 runs the model once on a text.",
)
@click.option(
    "--target",
    type=click.Choice(["desktop", "android", "ios"]),
    default="desktop",
    show_default=True,
    help="Where it will run. iOS's ONNX Runtime is 1.24.2: what it lacks is not used, or refused.",
)
@click.option(
    "--operators",
    type=click.Choice(["native", "portable"]),
    help="Recurrences by ONNX Runtime 1.25.1's own operator, or by plain ones that older versions run, slower."
    "  [default: native, for ios portable]",
)
@click.option(
    "--drafter",
    type=click.Path(path_type=Path),
    help="A DSpark drafter's checkpoint directory, trained for CHECKPOINT: the bundle can then draft with it.",
)
@click.option("--no-vision", is_flag=True, help="Leave out the parts that take pictures in, where the model has them.")
@click.option(
    "--vision-bits",
    type=click.Choice(["32", "8", "4"]),
    help="Bits of those parts.  [default: 8, or as dense parts if these are 32]",
)
@click.option(
    "--prefill-chunk", type=click.IntRange(1), default=512, show_default=True, help="Prompt tokens a pass, by default."
)
@click.option(
    "--accelerate",
    type=click.Choice(["dense"]),
    help="Dense parts once more in float16 and fixed shapes, for CoreML (ios, desktop) or QNN (android).",
)
@click.option(
    "--twin-capacity",
    type=click.IntRange(1, 15360),
    default=2048,
    show_default=True,
    help="With --accelerate: tokens of the cache that they take; longer contexts go on without.",
)
@click.option(
    "--twin-bits",
    type=click.Choice(["16", "32"]),
    default="16",
    show_default=True,
    help="With --accelerate: 32 is for NNAPI and XNNPACK, which take no float16.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes that quantize.  [default: all cores, at most 8]")
@click.option("--dask", metavar="ADDRESS", help="Let the workers of this Dask cluster quantize.")
@click.option("--resume", is_flag=True, help="Go on with an export that was broken off.")
def export(
    checkpoint: Path,
    bundle: Path,
    bits: str | None,
    experts_target_size: float | None,
    calibration: str | None,
    calibration_directory: Path | None,
    dense_bits: str | None,
    block_size: str,
    kv_bits: str,
    target: str,
    operators: str | None,
    drafter: Path | None,
    no_vision: bool,
    vision_bits: str | None,
    prefill_chunk: int,
    accelerate: str | None,
    twin_capacity: int,
    twin_bits: str,
    workers: int | None,
    dask: str | None,
    resume: bool,
) -> None:
    """Export the Hugging Face checkpoint directory CHECKPOINT to the new bundle directory BUNDLE."""
    if bits is not None and experts_target_size is not None:
        raise click.UsageError("--bits and --experts-target-size exclude each other: give one of both")
    if workers is not None and dask is not None:
        raise click.UsageError("--workers and --dask exclude each other: give one of both")
    context = click.get_current_context()
    for name in ("twin_capacity", "twin_bits"):
        if accelerate is None and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name.replace('_', '-')} is without effect here: it goes with --accelerate")
    chosen: dict[str, Any] = {"num_workers": workers} if workers else {}
    options = ExportOptions(
        bits=int(bits or BASELINE_BITS),  # type: ignore[arg-type]
        experts_target_size=experts_target_size,
        calibration=calibration if calibration in (None, TOPICS) else Path(calibration),  # type: ignore[arg-type]
        calibration_directory=calibration_directory,
        dense_bits=int(dense_bits) if dense_bits else None,  # type: ignore[arg-type]
        block_size=int(block_size),
        kv_bits=int(kv_bits),  # type: ignore[arg-type]
        target=target,  # type: ignore[arg-type]
        operators=operators,  # type: ignore[arg-type]
        drafter=drafter,
        vision=not no_vision,
        vision_bits=int(vision_bits) if vision_bits else None,  # type: ignore[arg-type]
        prefill_chunk_tokens=prefill_chunk,
        accelerate=accelerate,  # type: ignore[arg-type]
        twin_capacity_tokens=twin_capacity,
        twin_bits=int(twin_bits),  # type: ignore[arg-type]
        **chosen,
    )
    try:
        with nullcontext() if dask is None else dask_tasks(dask) as run_tasks:
            export_with_progress(checkpoint, bundle, options, resume=resume, run_tasks=run_tasks)
    except KeyboardInterrupt:
        if not can_resume(bundle):
            raise
        print("interrupted; go on with --resume", file=sys.stderr)
        sys.exit(130)


def export_with_progress(
    checkpoint: Path,
    bundle: Path,
    options: ExportOptions,
    *,
    resume: bool = False,
    console: Console | None = None,
    run_tasks: RunTasks | None = None,
) -> ExportReport:
    """Export with a progress bar on the terminal, the choice of precisions where there is one, and the summary."""
    console = console or Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console)
    task = bar.add_task("reading", total=None)

    def announce(plan: ExportPlan) -> None:
        # The bar appears when it is known that there is something to do.
        bar.update(task, total=plan.total_bytes)
        bar.start()

    def decided(plan: ExportPlan, decisions: list[Decision]) -> None:
        bar.update(task, total=plan.total_bytes)
        print_decisions(bar.console, plan, options, decisions)

    def progress(what: str, num_bytes: int) -> None:
        bar.update(task, description=what, advance=num_bytes)

    try:
        report = export_bundle(
            checkpoint,
            bundle,
            options,
            resume=resume,
            progress=progress,
            announce=announce,
            decided=decided,
            run_tasks=run_tasks,
        )
        bar.update(task, description="done")
    finally:
        if bar.live.is_started:
            bar.stop()
    print_summary(console, report)
    return report


def print_summary(console: Console, report: ExportReport) -> None:
    """Parts, bits, bytes, and where they went."""
    manifest = report.manifest
    kinds = manifest.expert_kinds
    table = Table("", "count", "bits", "bytes", "where", title=f"{report.bundle}", title_justify="left")
    dense_bits = _bits(manifest.quantization.dense_bits)
    drafter_parts = len(manifest.drafter.parts) if manifest.drafter else 0
    table.add_row(
        "dense parts", str(len(manifest.parts) + drafter_parts), dense_bits, format_bytes(report.dense_bytes), "dense/"
    )
    if manifest.vision is not None and report.vision_bits is not None:
        count = str(len(manifest.vision.parts))
        table.add_row("vision parts", count, _bits(report.vision_bits), format_bytes(report.vision_bytes), "vision/")
    experts = sum(layer.num_experts + (layer.shared_kind is not None) for layer in manifest.expert_layers)
    blocks = sorted({m.block_size for kind in kinds for m in kind.matrices.values()} - {0})
    shown = _bits(*manifest.expert_bits) + (f", blocks of {', '.join(map(str, blocks))}" if blocks else "")
    table.add_row("experts", str(experts), shown, format_bytes(report.expert_bytes), "experts/layer_*/")
    rest = report.total_bytes - report.dense_bytes - report.vision_bytes - report.expert_bytes
    table.add_row("graphs, tokenizer, manifest", "", "", format_bytes(rest), "")
    table.add_row("all", "", "", format_bytes(report.total_bytes), "", style="bold")
    table.add_row("checkpoint", "", "", format_bytes(report.checkpoint_bytes), "", style="dim")
    console.print(table)
    for line in left_out(manifest.skipped_tensors):
        console.print(line, highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", highlight=False)


def left_out(skipped: Mapping[str, str]) -> list[str]:
    """A line for each reason why tensors are left out: a tensor's name, or how many there are."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        by_reason.setdefault(reason, []).append(name)
    return [
        f"left out: {names[0]} ({reason})"
        if len(names) == 1
        else f"left out: {len(names)} tensors ({reason}); manifest.json has their names"
        for reason, names in by_reason.items()
    ]


def _bits(*bits: int) -> str:
    return "float32" if bits == (32,) else f"int{'/'.join(map(str, bits))}"
