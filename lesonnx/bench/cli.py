"""``lesonnx bench``: the benchmarks' table of subcommands."""

from __future__ import annotations

import click

from lesonnx.cli import LazyGroup

BENCHMARKS = {
    "cache": "lesonnx.bench.cache:cache",
    "kernel": "lesonnx.bench.kernel:kernel",
    "load": "lesonnx.bench.load:load",
    "ladder": "lesonnx.bench.ladder:ladder",
    "lookahead": "lesonnx.bench.lookahead:lookahead",
    "precision": "lesonnx_export.precision_curve:precision",
    "prefill": "lesonnx.bench.prefill:prefill",
    "speculate": "lesonnx.bench.speculate:speculate",
    "synth": "lesonnx_export.synth:synth",
}


@click.group(cls=LazyGroup, commands_at=BENCHMARKS)
def bench() -> None:
    """Measure: speed, hits, bytes and memory, on this machine."""
