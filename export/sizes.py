"""``lesonnx inspect --shape``: how large a bundle would be and what memory it wants, from a configuration alone.

It rehearses an export: no weights are read or made.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lesonnx.errors import CheckpointError, InputError
from lesonnx.memory import format_bytes
from lesonnx_export.checkpoint import read_json
from lesonnx_export.config import Config
from lesonnx_export.plan import ExportOptions, make_plan
from lesonnx_export.shapes import SHAPES
from lesonnx_export.synth import SyntheticCheckpoint, SyntheticWeights

# What a run takes beside weights and states: the runtime's libraries, sessions and buffers. Measured: 0.2 to 0.3 GB.
RUNTIME_BYTES = 300 << 20
CONTEXT_TOKENS = 2048
# Experts that two and a half tokens use hold two thirds of what the next one wants (docs/benchmarks.md).
SUGGESTED_DEMANDS = 2.5
# What an application may take of a device before the system turns on it: phones differ, half is safe.
USABLE_SHARE = 0.5
FLOAT_BYTES = {"float32": 4, "float16": 2, "int8": 1}


@dataclass(frozen=True)
class Sizes:
    """All bytes unless named otherwise. ``suggested_memory_bytes`` is for a context of 2,048 tokens."""

    model_type: str
    num_parameters: int
    num_active_parameters: int
    bundle_bytes: int
    dense_bytes: int
    expert_bytes: int
    least_budget_bytes: int
    token_demand_bytes: int
    state_bytes_per_token: int
    fixed_state_bytes: int
    least_memory_bytes: int
    suggested_memory_bytes: int


def sizes_of(config: dict[str, Any], options: ExportOptions) -> Sizes:
    """What a configuration's bundle would take; CheckpointError where its family or a setting is not supported."""
    checkpoint = SyntheticCheckpoint(config)
    tied = bool(Config(config).values.get("tie_word_embeddings", False))
    plan = make_plan(
        checkpoint, replace(options, vision=False), SyntheticWeights(checkpoint, rehearsal=True, tied=tied)
    )
    per_token = plan.architecture.num_experts_per_tok
    demands = []
    for layer in plan.layers:
        shared = 0 if layer.shared_kind is None else layer.shared_kind.cost_bytes
        demands.append(per_token * layer.kind.cost_bytes + shared)
    growing, fixed = 0, 0
    for state in plan.states:
        count = FLOAT_BYTES[state.dtype]
        for size in state.shape:
            count *= size if isinstance(size, int) else 1
        if "S" in state.shape:
            growing += count * options.kv_bits // options.precision.kv_bits
        else:
            fixed += 2 * count
    basis = RUNTIME_BYTES + plan.dense_bytes + CONTEXT_TOKENS * growing + fixed
    wanted = min(plan.expert_bytes, int(SUGGESTED_DEMANDS * sum(demands)))
    return Sizes(
        model_type=plan.architecture.model_type,
        num_parameters=plan.num_parameters,
        num_active_parameters=plan.num_active_parameters,
        bundle_bytes=plan.total_bytes,
        dense_bytes=plan.dense_bytes,
        expert_bytes=plan.expert_bytes,
        least_budget_bytes=max(demands),
        token_demand_bytes=sum(demands),
        state_bytes_per_token=growing,
        fixed_state_bytes=fixed,
        least_memory_bytes=basis + min(plan.expert_bytes, sum(demands)),
        suggested_memory_bytes=basis + wanted,
    )


def read_shape(shape: str) -> dict[str, Any]:
    """The configuration of a known name, a config.json or a directory with one; InputError names what is missing."""
    if shape in SHAPES:
        return SHAPES[shape]
    path = Path(shape)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise InputError(f"{shape}: no such configuration file, nor one of {', '.join(SHAPES)}")
    return read_json(path)


def verdict(sizes: Sizes, memory_bytes: int) -> str:
    """Whether a device of that memory will run it, in one line. Half of its memory counts as the application's."""
    usable = int(memory_bytes * USABLE_SHARE)
    device, may = format_bytes(memory_bytes), format_bytes(usable)
    if sizes.suggested_memory_bytes <= usable:
        return f"a device of {device} will run it well: it wants {format_bytes(sizes.suggested_memory_bytes)} of {may}"
    if sizes.least_memory_bytes <= usable:
        return (
            f"a device of {device} will run it slowly: with {may}, few experts stay in memory from token to token;"
            f" {format_bytes(sizes.suggested_memory_bytes)} would be well"
        )
    return f"a device of {device} will not run it: it wants at least {format_bytes(sizes.least_memory_bytes)} of {may}"


def print_sizes(shape: str, bits: int, memory_bytes: int | None, as_json: bool) -> None:
    """What ``lesonnx inspect --shape`` prints."""
    config = read_shape(shape)
    try:
        sizes = sizes_of(config, ExportOptions(bits=bits))  # type: ignore[arg-type]
    except CheckpointError as error:
        raise CheckpointError(f"{shape}: {error}") from None
    said = None if memory_bytes is None else verdict(sizes, memory_bytes)
    if as_json:
        print(json.dumps(asdict(sizes) | {"bits": bits, "verdict": said}))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "model": f"{sizes.model_type}, {sizes.num_parameters / 1e9:.1f} B parameters,"
        f" {sizes.num_active_parameters / 1e9:.1f} B active a token",
        "bundle": f"{format_bytes(sizes.bundle_bytes)} with experts of {bits} bits:"
        f" experts {format_bytes(sizes.expert_bytes)}, the rest {format_bytes(sizes.dense_bytes)}",
        "one token": f"{format_bytes(sizes.token_demand_bytes)} of experts; a layer at least"
        f" {format_bytes(sizes.least_budget_bytes)}",
        "states": f"{format_bytes(sizes.state_bytes_per_token)} a token of context"
        + (f", {format_bytes(sizes.fixed_state_bytes)} of fixed shape" if sizes.fixed_state_bytes else ""),
        "memory": f"{format_bytes(sizes.suggested_memory_bytes)} suggested for {CONTEXT_TOKENS:,} tokens of context,"
        f" {format_bytes(sizes.least_memory_bytes)} at least",
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", value)
    console = Console()
    console.print(table)
    if said:
        console.print(said)
