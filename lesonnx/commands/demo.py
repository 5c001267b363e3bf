"""``lesonnx demo``: the embedded sample from checkpoint to tokens, under a budget smaller than its experts."""

from __future__ import annotations

import shutil
from importlib.resources import as_file, files
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from lesonnx.bundle import Bundle
from lesonnx.commands.run import summary
from lesonnx.errors import InputError, LesonnxError
from lesonnx.memory import format_bytes

PROMPTS = ("In the beginning God", "The list.append() method")
MARKER = "manifest.json"


@click.command()
@click.option(
    "--into", type=click.Path(path_type=Path), default=Path("demo"), show_default=True, help="Where the bundle goes."
)
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens a prompt.")
def demo(into: Path, max_tokens: int) -> None:
    """Export the embedded sample checkpoint and generate from it with a quarter of its experts in memory."""
    from lesonnx.generate import GenerationOptions
    from lesonnx.model import load
    from lesonnx_export.cli import export_with_progress
    from lesonnx_export.exporter import ExportOptions

    console = Console()
    bundle_path = into / "sample.bundle"
    if bundle_path.exists():
        if not (bundle_path / MARKER).exists():
            raise InputError(f"{bundle_path}: exists and is no bundle; choose another place with --into")
        shutil.rmtree(bundle_path)
    into.mkdir(parents=True, exist_ok=True)
    with as_file(files("lesonnx.sample")) as checkpoint:
        console.print(f"[bold]1. Export[/bold] the embedded checkpoint to {bundle_path}")
        export_with_progress(checkpoint, bundle_path, ExportOptions(bits=4, dense_bits=8), console=console)
    bundle = Bundle(bundle_path)
    budget = bundle.expert_bytes // 4
    console.print(
        f"\n[bold]2. Run[/bold] it with at most {format_bytes(budget)} of its {format_bytes(bundle.expert_bytes)}"
        f" of experts in memory: lesonnx run {bundle_path} --expert-budget {budget} --prompt …"
    )
    with load(bundle, expert_budget_bytes=budget) as model:
        for note in model.notes:
            console.print(f"note: {note}", highlight=False)
        for prompt in PROMPTS:
            model.runner.loader.reset_telemetry()
            console.print(f"\n[bold green]{prompt}[/bold green]", end="")
            generation = model.generate(prompt, GenerationOptions(max_new_tokens=max_tokens))
            for token in generation:
                console.print(token.text, end="", markup=False, highlight=False, soft_wrap=True)
            console.print(f"\n[dim]{summary(model, generation.report)}[/dim]", highlight=False)
    console.print("\n[bold]3. Compare[/bold] the schedules under that budget: other loads, the same tokens")
    console.print(compare_schedules(bundle, budget, max_tokens))
    console.print(
        "[dim]A model this small is read in no time: look at what is read and waited for, not at tokens/s.[/dim]"
    )


def compare_schedules(bundle: Bundle, budget_bytes: int, max_tokens: int) -> Table:
    """Each schedule on the same prompt; LesonnxError if one of them says something else."""
    from lesonnx.generate import GenerationOptions
    from lesonnx.model import load

    table = Table("schedule", "tokens/s", "hits", "late", "read a token", "waiting a token")
    expected: list[int] | None = None
    for schedule in ("on-demand", "cache", "les"):
        with load(bundle, schedule=schedule, expert_budget_bytes=budget_bytes) as model:
            generation = model.generate(PROMPTS[0], GenerationOptions(max_new_tokens=max_tokens))
            generation.text()
            report, telemetry = generation.report, model.telemetry
        expected = expected or report.token_ids
        if report.token_ids != expected:
            raise LesonnxError(f"schedule {schedule} gave other tokens: {report.token_ids}, expected {expected}")
        required = telemetry.hits + telemetry.late + telemetry.misses
        tokens = len(report.token_ids)
        table.add_row(
            schedule,
            f"{report.tokens_per_s:.0f}",
            f"{telemetry.hits / required:.0%}",
            f"{telemetry.late / required:.0%}",
            format_bytes(telemetry.read_bytes / tokens),
            f"{telemetry.stall_ms / tokens:.2f} ms",
        )
    return table
