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
from lesonnx.vision.reading import Sized, bytes_to_read
from lesonnx.vision.rules import views, working_bytes
from lesonnx_export.checkpoint import Weights, read_json
from lesonnx_export.config import Config
from lesonnx_export.contract import VISION_DATA
from lesonnx_export.plan import ExportOptions, check_vision_bits, make_plan
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


@dataclass(frozen=True)
class VisionSizes:
    """What eyes take: their weights, and by width x height what reading a picture takes at most and gives of tokens.

    ``working_bytes`` is the tower's, beside weights, for the smallest typical picture, ``photo_working_bytes`` that for
    the photo: they are alike unless a picture is seen in as many pixels as it has.
    """

    bits: int
    num_parameters: int
    weights_bytes: int
    working_bytes: int
    photo_working_bytes: int
    reading_bytes: dict[str, int]
    image_tokens: dict[str, int]

    @property
    def photo_bytes(self) -> int:
        """What reading a photo of 12 megapixels takes; it is gone afterwards."""
        return list(self.reading_bytes.values())[-1]

    @property
    def seeing_bytes(self) -> int:
        """What a device must have to be said to see: room for a photo, or where that grows without end, for a tile."""
        return next(iter(self.reading_bytes.values())) if self.grows else self.photo_bytes

    @property
    def grows(self) -> bool:
        """Whether a picture is seen in as many pixels as it has."""
        return self.photo_working_bytes != self.working_bytes


@dataclass(frozen=True)
class Sizes:
    """All bytes unless named otherwise. ``suggested_memory_bytes`` is for a context of 2,048 tokens.

    Parameters and the bundle's bytes hold those of eyes; active ones are those of a token, and eyes see none. While
    pictures are read, experts give way.
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
    eyes = plan.architecture.eyes_of_shape(config, directory) if options.vision else None
    check_vision_bits(plan.architecture, eyes, options)
    vision = _vision_sizes(eyes, weights, options, plan.architecture.hidden_size) if eyes else None
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
        num_parameters=plan.num_parameters + (vision.num_parameters if vision else 0),
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


def _vision_sizes(eyes: Eyes, weights: Weights, options: ExportOptions, hidden_size: int) -> VisionSizes:
    store = VisionStore(None)
    parts = [eyes.build(name, weights, store, options.vision_precision).part for name in eyes.names]
    record = eyes.record(parts, VISION_DATA)
    reading, tokens, working = {}, {}, []
    for height, width in TYPICAL_PICTURES:
        cut, size = views(height, width, record), f"{width}x{height}"
        reading[size] = bytes_to_read([Sized(height, width, cut)], record, store.end_bytes, hidden_size)
        tokens[size] = sum(view.num_tokens(record) for view in cut)
        working.append(max(working_bytes(view, record) for view in cut))
    bits = options.vision_precision.dense_bits
    return VisionSizes(bits, record.num_parameters, store.end_bytes, working[0], working[-1], reading, tokens)


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

    Everything is all experts, and a photo while few of them stay. None where even the least does not fit.
    """
    usable = int(memory_bytes * USABLE_SHARE)
    everything = max(
        sizes.suggested_memory_bytes, sizes.memory_without_experts_bytes + sizes.expert_bytes, photo_budget(sizes)
    )
    return min(usable, everything) if sizes.least_memory_bytes <= usable else None


def photo_budget(sizes: Sizes) -> int:
    """The least ``--memory-budget`` that reads a photo of 12 megapixels; 0 where no pictures are taken."""
    if sizes.vision is None:
        return 0
    return sizes.memory_without_experts_bytes + sizes.least_budget_bytes + sizes.vision.photo_bytes


def verdict(sizes: Sizes, memory_bytes: int) -> str:
    """Whether a device of that memory will run it, in one line. Half of its memory counts as the application's."""
    usable = int(memory_bytes * USABLE_SHARE)
    device, may = format_bytes(memory_bytes), format_bytes(usable)
    budget = suggested_budget(sizes, memory_bytes)
    if budget is None:
        return (
            f"a device of {device} will not run it: it wants at least {format_bytes(sizes.least_memory_bytes)} of {may}"
        )
    experts = min(budget - sizes.memory_without_experts_bytes, sizes.expert_bytes)
    advice = (
        f"; --memory-budget {_no_less(budget)} leaves {format_bytes(experts)} for experts,"
        f" {experts / sizes.token_demand_bytes:.1f} tokens' worth"
    )
    if budget < photo_budget(sizes):
        advice += f"; a photo of 12 megapixels would want {_no_less(photo_budget(sizes))}, smaller ones less"
    if sizes.suggested_memory_bytes <= usable:
        wanted = format_bytes(sizes.suggested_memory_bytes)
        return f"a device of {device} will run it well: it wants {wanted} of {may}{advice}"
    return (
        f"a device of {device} will run it slowly: with {may}, few experts stay in memory from token to token;"
        f" {format_bytes(sizes.suggested_memory_bytes)} would be well{advice}"
    )


def print_sizes(shape: str, options: ExportOptions, memory_bytes: int | None, as_json: bool) -> None:
    """What ``lesonnx inspect --shape`` prints."""
    config, directory = read_shape(shape)
    try:
        sizes = sizes_of(config, options, directory)
    except CheckpointError as error:
        raise CheckpointError(f"{shape}: {error}") from None
    said = None if memory_bytes is None else verdict(sizes, memory_bytes)
    if as_json:
        budget = None if memory_bytes is None else suggested_budget(sizes, memory_bytes)
        bits = {"bits": options.bits, "dense_bits": options.resolved_dense_bits}
        print(json.dumps(asdict(sizes) | bits | {"verdict": said, "suggested_budget_bytes": budget}))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "model": f"{sizes.model_type}, {_count(sizes.num_parameters)} parameters{_of_eyes(sizes.vision)},"
        f" {_count(sizes.num_active_parameters)} active a token",
        "bundle": f"{format_bytes(sizes.bundle_bytes)}: experts {format_bytes(sizes.expert_bytes)} in {options.bits}"
        f" bits, {_rest(sizes, options)}",
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


def _no_less(num_bytes: int) -> str:
    """A size as an option's value of three digits that is not below it."""
    step = 10 ** max(0, len(str(num_bytes)) - 3)
    return format_bytes(-(-num_bytes // step) * step).replace(" ", "")


def _of_eyes(vision: VisionSizes | None) -> str:
    return "" if vision is None else f" ({_count(vision.num_parameters)} of them eyes)"


def _rest(sizes: Sizes, options: ExportOptions) -> str:
    shown = f"the rest {format_bytes(sizes.dense_bytes)} in {options.resolved_dense_bits}"
    if sizes.vision is None:
        return shown
    return f"eyes {format_bytes(sizes.vision.weights_bytes)} in {sizes.vision.bits}, {shown}"


def _vision_rows(vision: VisionSizes) -> dict[str, str]:
    """What reading takes: as the runtime counts it, so a part of it is never added up by who reads this."""
    reading = ", ".join(f"{size} {format_bytes(count)}" for size, count in vision.reading_bytes.items())
    tokens = ", ".join(f"{size} {count}" for size, count in vision.image_tokens.items())
    return {
        "pictures": f"at most while one is read, experts give way for that: {reading}",
        "image tokens": tokens,
    }


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"
