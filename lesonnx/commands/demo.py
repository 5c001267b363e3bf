"""``lesonnx demo``: the embedded sample from checkpoint to tokens, under a budget smaller than its experts."""

from __future__ import annotations

import shutil
from importlib.resources import as_file, files
from pathlib import Path

import click
from rich.console import Console

from lesonnx.commands.run import summary
from lesonnx.errors import InputError
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
    from lesonnx.bundle import Bundle
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
        for prompt in PROMPTS:
            model.runner.loader.reset_telemetry()
            console.print(f"\n[bold green]{prompt}[/bold green]", end="")
            generation = model.generate(prompt, GenerationOptions(max_new_tokens=max_tokens))
            for token in generation:
                console.print(token.text, end="", markup=False, highlight=False, soft_wrap=True)
            console.print(f"\n[dim]{summary(model, generation.report)}[/dim]", highlight=False)
