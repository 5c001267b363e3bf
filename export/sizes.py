"""``lesonnx inspect --shape``: how large a bundle would be and what memory it wants, from a configuration alone.

It rehearses an export: no weights are read or made.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lesonnx.errors import CheckpointError, InputError
from lesonnx.memory import format_bytes
from lesonnx.vision.rules import views, working_bytes
from lesonnx_export.checkpoint import Weights, read_json
from lesonnx_export.config import Config
from lesonnx_export.contract import VISION_DATA
from lesonnx_export.plan import ExportOptions, make_plan
from lesonnx_export.shapes import SHAPES
from lesonnx_export.synth import SyntheticCheckpoint, SyntheticWeights
from lesonnx_export.vision.eyes import Eyes
from lesonnx_export.vision.tower import VisionStore

# What a run takes beside weights and states: the runtime's libraries, sessions and buffers. Measured: 0.2 to 0.3 GB.
RUNTIME_BYTES = 300 << 20
CONTEXT_TOKENS = 2048
# Experts that two and a half tokens use hold two thirds of what the next one wants (docs/benchmarks.md).
SUGGESTED_DEMANDS = 2.5
# What an application may take of a device before the system turns on it: phones differ, half is safe.
USABLE_SHARE = 0.5
FLOAT_BYTES = {"float32": 4, "float16": 2, "int8": 1}
# Pictures that image tokens are told of: heights and widths of a tile, a screen, and a photo of 12 megapixels.
TYPICAL_PICTURES = ((448, 448), (1080, 1920), (3000, 4000))
PICTURE_BYTES = 3 * math.prod(TYPICAL_PICTURES[-1])


@dataclass(frozen=True)
class VisionSizes:
    """What eyes take: their weights, and while pictures are read ``working_bytes`` more. Tokens by width x height.

    Where a picture is seen in as many pixels as it has, that is for the smallest typical one; ``photo_working_bytes``
    is for the photo.
    """

    num_parameters: int
    weights_bytes: int
    working_bytes: int
    photo_working_bytes: int
    image_tokens: dict[str, int]

    @property
    def seeing_bytes(self) -> int:
        """All that is in memory while a photo is read, and gone afterwards."""
        return self.weights_bytes + self.working_bytes + PICTURE_BYTES


@dataclass(frozen=True)
class Sizes:
    """All bytes unless named otherwise. ``suggested_memory_bytes`` is for a context of 2,048 tokens.

    The bundle's bytes hold those of eyes, parameters do not. While pictures are read, experts give way.
    """

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
    memory_without_experts_bytes: int
    least_memory_bytes: int
    suggested_memory_bytes: int
    vision: VisionSizes | None = None


def sizes_of(config: dict[str, Any], options: ExportOptions, directory: Path | None = None) -> Sizes:
    """What a configuration's bundle would take; CheckpointError where its family or a setting is not supported.

    ``directory`` may hold a picture processor's files; without one the usual settings stand for it.
    """
    checkpoint = SyntheticCheckpoint(config)
    tied = bool(Config(config).values.get("tie_word_embeddings", False))
    weights = SyntheticWeights(checkpoint, rehearsal=True, tied=tied)
    plan = make_plan(checkpoint, replace(options, vision=False, vision_bits=None), weights)
    vision = _vision_sizes(plan.architecture.eyes_of_shape(config, directory), weights, options)
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
    seeing = basis + max(demands) + (vision.seeing_bytes if vision else 0)
    return Sizes(
        model_type=plan.architecture.model_type,
        num_parameters=plan.num_parameters,
        num_active_parameters=plan.num_active_parameters,
        bundle_bytes=plan.total_bytes + (vision.weights_bytes if vision else 0),
        dense_bytes=plan.dense_bytes,
        expert_bytes=plan.expert_bytes,
        least_budget_bytes=max(demands),
        token_demand_bytes=sum(demands),
        state_bytes_per_token=growing,
        fixed_state_bytes=fixed,
        memory_without_experts_bytes=basis,
        least_memory_bytes=max(seeing, basis + min(plan.expert_bytes, sum(demands))),
        suggested_memory_bytes=max(seeing, basis + wanted),
        vision=vision,
    )


def _vision_sizes(eyes: Eyes | None, weights: Weights, options: ExportOptions) -> VisionSizes | None:
    if eyes is None or not options.vision:
        return None
    store = VisionStore(None)
    parts = [eyes.build(name, weights, store, options.vision_precision).part for name in eyes.names]
    record = eyes.record(parts, VISION_DATA)
    seen = {f"{width}x{height}": views(height, width, record) for height, width in TYPICAL_PICTURES}
    tokens = {size: sum(view.num_tokens(record) for view in cut) for size, cut in seen.items()}
    working = [max(working_bytes(view, record) for view in cut) for cut in seen.values()]
    return VisionSizes(record.num_parameters, store.end_bytes, working[0], working[-1], tokens)


def read_shape(shape: str) -> tuple[dict[str, Any], Path | None]:
    """The configuration of a known name, a config.json or a directory with one, and the directory that it is in.

    InputError names what is missing.
    """
    if shape in SHAPES:
        return SHAPES[shape], None
    path = Path(shape)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise InputError(f"{shape}: no such configuration file, nor one of {', '.join(SHAPES)}")
    return read_json(path), path.parent


def suggested_budget(sizes: Sizes, memory_bytes: int) -> int | None:
    """The ``--memory-budget`` for a device: what an application may take of it, or less where that holds everything.

    None where even the least does not fit.
    """
    usable = int(memory_bytes * USABLE_SHARE)
    everything = max(sizes.suggested_memory_bytes, sizes.memory_without_experts_bytes + sizes.expert_bytes)
    return min(usable, everything) if sizes.least_memory_bytes <= usable else None


def verdict(sizes: Sizes, memory_bytes: int) -> str:
    """Whether a device of that memory will run it, in one line. Half of its memory counts as the application's."""
    usable = int(memory_bytes * USABLE_SHARE)
    device, may = format_bytes(memory_bytes), format_bytes(usable)
    budget = suggested_budget(sizes, memory_bytes)
    if budget is None:
        return (
            f"a device of {device} will not run it: it wants at least {format_bytes(sizes.least_memory_bytes)} of {may}"
        )
    experts = budget - sizes.memory_without_experts_bytes
    advice = (
        f"; --memory-budget {format_bytes(budget).replace(' ', '')} leaves {format_bytes(experts)} for experts,"
        f" {experts / sizes.token_demand_bytes:.1f} tokens' worth"
    )
    if sizes.suggested_memory_bytes <= usable:
        wanted = format_bytes(sizes.suggested_memory_bytes)
        return f"a device of {device} will run it well: it wants {wanted} of {may}{advice}"
    return (
        f"a device of {device} will run it slowly: with {may}, few experts stay in memory from token to token;"
        f" {format_bytes(sizes.suggested_memory_bytes)} would be well{advice}"
    )


def print_sizes(shape: str, bits: int, memory_bytes: int | None, as_json: bool) -> None:
    """What ``lesonnx inspect --shape`` prints."""
    config, directory = read_shape(shape)
    try:
        sizes = sizes_of(config, ExportOptions(bits=bits), directory)  # type: ignore[arg-type]
    except CheckpointError as error:
        raise CheckpointError(f"{shape}: {error}") from None
    said = None if memory_bytes is None else verdict(sizes, memory_bytes)
    if as_json:
        budget = None if memory_bytes is None else suggested_budget(sizes, memory_bytes)
        print(json.dumps(asdict(sizes) | {"bits": bits, "verdict": said, "suggested_budget_bytes": budget}))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "model": f"{sizes.model_type}, {sizes.num_parameters / 1e9:.1f} B parameters,"
        f" {sizes.num_active_parameters / 1e9:.1f} B active a token",
        "bundle": f"{format_bytes(sizes.bundle_bytes)} with experts of {bits} bits:"
        f" experts {format_bytes(sizes.expert_bytes)}, {_dense(sizes)}",
        "one token": f"{format_bytes(sizes.token_demand_bytes)} of experts; a layer at least"
        f" {format_bytes(sizes.least_budget_bytes)}",
        "states": f"{format_bytes(sizes.state_bytes_per_token)} a token of context"
        + (f", {format_bytes(sizes.fixed_state_bytes)} of fixed shape" if sizes.fixed_state_bytes else ""),
        "memory": f"{format_bytes(sizes.suggested_memory_bytes)} suggested for {CONTEXT_TOKENS:,} tokens of context,"
        f" {format_bytes(sizes.least_memory_bytes)} at least",
    }
    if sizes.vision:
        rows |= _vision_rows(sizes.vision)
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", value)
    console = Console()
    console.print(table)
    if said:
        console.print(said)


def _dense(sizes: Sizes) -> str:
    shown = f"the rest {format_bytes(sizes.dense_bytes)}"
    if sizes.vision is None:
        return shown
    return f"eyes {format_bytes(sizes.vision.weights_bytes)}, {shown}"


def _vision_rows(vision: VisionSizes) -> dict[str, str]:
    tokens = ", ".join(f"{size} {count}" for size, count in vision.image_tokens.items())
    more = vision.photo_working_bytes
    return {
        "pictures": f"{format_bytes(vision.seeing_bytes)} while one is read: {vision.num_parameters / 1e6:,.0f} M"
        f" parameters in {format_bytes(vision.weights_bytes)}, {format_bytes(vision.working_bytes)} to work in,"
        f" {format_bytes(PICTURE_BYTES)} for a photo; experts give way for that"
        + ("" if more == vision.working_bytes else f". To work in a photo of 12 megapixels, {format_bytes(more)}"),
        "image tokens": tokens,
    }
