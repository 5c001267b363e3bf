"""What an export will write, known before any work: parts, experts, sizes, and the tensors that each comes from.

It reads no weights and writes nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from pydantic import ValidationError

from lesonnx.errors import CheckpointError, InputError
from lesonnx.manifest import Bits, ExpertKind, State, Target
from lesonnx_export.architectures import make_decoder
from lesonnx_export.architectures.base import Decoder
from lesonnx_export.blocks import DenseBits, Operators, Precision
from lesonnx_export.checkpoint import Checkpoint, Weights
from lesonnx_export.config import Config
from lesonnx_export.drafter import PREFIX, SKIPPED, DSpark
from lesonnx_export.expert import ExpertPrecision, ExpertShape, make_mixed_kind
from lesonnx_export.graph import DenseStore
from lesonnx_export.pack import LayerPlan
from lesonnx_export.segments import PartBuilder
from lesonnx_export.sources import read_expert
from lesonnx_export.twin_graph import TwinStore
from lesonnx_export.twins import TwinBuilder, TwinOptions
from lesonnx_export.vision.eyes import Eyes
from lesonnx_export.vision.tower import VisionStore

KvBits = Literal[8, 16, 32]
# In place of a calibration file: Python's own help topics, there in every installation.
TOPICS: Final = "topics"
# What a target size is a share of: experts of so many bits in all layers, at the same block size.
BASELINE_BITS: Bits = 4


class LayerPrecision(NamedTuple):
    """How a layer's experts are stored; ``shared`` is without effect where there is no shared expert."""

    routed: ExpertPrecision
    shared: ExpertPrecision

    @classmethod
    def uniform(cls, bits: Bits, block_size: int) -> LayerPrecision:
        """All of a layer alike."""
        return cls(*[ExpertPrecision.uniform(bits, block_size)] * 2)


@dataclass(frozen=True)
class ExportOptions:
    """What the user chose. ``num_workers`` processes quantize experts; it does not change a byte of the result.

    ``kv_bits`` 8 is reached from float32 caches, once all is written: their scales need a run of the model. ``target``
    is where the bundle will run: iOS's ONNX Runtime is older than some operators. ``operators`` None is what it has.
    ``drafter`` is the checkpoint directory of a DSpark drafter, which the bundle will then hold too.
    ``accelerate``: dense parts come once more as twins for accelerators, over caches of ``twin_capacity_tokens``.

    ``experts_target_size`` lets calibration choose bits and blocks layer by layer, for experts of that share of the
    bytes of uniform 4 bits at ``block_size``. ``calibration`` is the text for that, a UTF-8 file or ``TOPICS``; with it
    alone, experts are quantized to ``bits`` for what they do on that text. ``precisions`` states that of every MoE
    layer instead of ``bits``, in their order. In ``calibration_directory`` is kept what calibration found, and taken
    from there: several exports of a checkpoint then calibrate once.

    ``vision`` False leaves a model's eyes out; ``vision_bits`` are those of their linear maps, None: 8,
    since 4 lose much there and save little, or float32 where dense parts are.
    """

    bits: Bits = BASELINE_BITS
    dense_bits: DenseBits | None = None
    block_size: int = 128
    kv_bits: KvBits = 32
    target: Target = "desktop"
    operators: Operators | None = None
    drafter: Path | None = None
    prefill_chunk_tokens: int = 512
    accelerate: Literal["dense"] | None = None
    twin_capacity_tokens: int = 2048
    twin_bits: Literal[16, 32] = 16
    experts_target_size: float | None = None
    calibration: Path | Literal["topics"] | None = None
    calibration_directory: Path | None = None
    precisions: tuple[LayerPrecision, ...] | None = None
    vision: bool = True
    vision_bits: DenseBits | None = None
    num_workers: int = field(default_factory=lambda: max(1, min(os.cpu_count() or 1, 8)))

    @property
    def resolved_dense_bits(self) -> DenseBits:
        return self.dense_bits or (32 if self.bits == 32 else 4)

    @property
    def resolved_calibration(self) -> Path | Literal["topics"] | None:
        """The text to calibrate on; None where nothing is calibrated."""
        if self.calibration is None and self.experts_target_size is not None:
            return TOPICS
        return self.calibration

    @property
    def resolved_operators(self) -> Operators:
        return self.operators or ("portable" if self.target == "ios" else "native")

    @property
    def precision(self) -> Precision:
        kv_bits = 32 if self.kv_bits == 8 else self.kv_bits
        return Precision(self.resolved_dense_bits, self.block_size, kv_bits, self.resolved_operators)

    @property
    def vision_precision(self) -> Precision:
        """What eyes are stored in; they have no caches and no recurrences."""
        bits = self.vision_bits or (32 if self.resolved_dense_bits == 32 else 8)
        return Precision(bits, self.block_size)

    def twins(self, max_position_embeddings: int) -> TwinOptions | None:
        """What twins there are to be, of a model of that context; None without ``accelerate``."""
        if self.accelerate is None:
            return None
        if self.kv_bits == 8:
            raise InputError("--accelerate dense does not go with --kv-bits 8: twins read float32 or float16 caches")
        capacity = min(self.twin_capacity_tokens, max_position_embeddings)
        return TwinOptions(self.target, capacity, min(self.prefill_chunk_tokens, capacity), self.twin_bits)


@dataclass(frozen=True)
class EyesPlan:
    """What takes pictures in, how its weights are stored, and where in its store each of its parts ends."""

    eyes: Eyes
    precision: Precision
    part_ends: list[int]

    @property
    def num_bytes(self) -> int:
        return self.part_ends[-1]


@dataclass
class ExportPlan:
    """A whole export, known before any work: what will be written, from which tensors, and how large it is."""

    checkpoint: Checkpoint
    architecture: Decoder
    part_names: list[str]
    layers: list[LayerPlan]
    kinds: list[ExpertKind]
    dense_bytes: int
    twin_bytes: int
    part_ends: list[int]
    states: list[State]
    skipped: dict[str, str]
    notes: list[str]
    num_parameters: int
    num_active_parameters: int
    drafter: DSpark | None = None
    vision: EyesPlan | None = None

    @property
    def expert_bytes(self) -> int:
        return sum(layer.pack_bytes for layer in self.layers)

    @property
    def vision_bytes(self) -> int:
        return 0 if self.vision is None else self.vision.num_bytes

    @property
    def total_bytes(self) -> int:
        return self.dense_bytes + self.twin_bytes + self.vision_bytes + self.expert_bytes


def make_plan(checkpoint: Checkpoint, options: ExportOptions, weights: Weights | None = None) -> ExportPlan:
    """Walk through the whole export without reading weights; CheckpointError for anything that cannot be exported."""
    config = Config(checkpoint.config)
    try:
        with _sizes_in_one_line():
            return _rehearse(checkpoint, config, options, weights or Weights(checkpoint, rehearsal=True))
    except CheckpointError as error:
        if not config.defaulted:
            raise
        left_out = ", ".join(sorted(config.defaulted))
        raise CheckpointError(f"{error} (config.json leaves out {left_out}: transformers' defaults hold)") from None


@contextmanager
def _sizes_in_one_line() -> Iterator[None]:
    """What only sizes that no model has lead to, as the CheckpointError it is."""
    try:
        yield
    except ValidationError as error:
        raise CheckpointError(f"config.json: sizes that no bundle can hold: {error.errors()[0]['msg']}") from None
    except (MemoryError, OverflowError):
        raise CheckpointError("config.json: sizes that no memory can hold") from None


def _rehearse(checkpoint: Checkpoint, config: Config, options: ExportOptions, weights: Weights) -> ExportPlan:
    architecture = make_decoder(config)
    if not architecture.moe_layers:
        raise CheckpointError("config.json: no layer has experts; lesonnx exports Mixture-of-Experts models only")
    store = DenseStore(None)
    drafter = DSpark(options.drafter, architecture, weights) if options.drafter else None
    eyes = _eyes(architecture, checkpoint, options)
    deepstack_layers = eyes.deepstack_layers if eyes else 0
    builder = PartBuilder(architecture, weights, store, options.precision, drafter, deepstack_layers)
    part_ends, states = [], []
    for built in builder.build_all():
        part_ends.append(store.end_bytes)
        states += built.states
    twin_store = TwinStore(None)
    if twins := options.twins(architecture.max_position_embeddings):
        if architecture.position_rows != 1:
            raise InputError(
                f"--accelerate dense: twins take one position a token, {architecture.model_type} has three"
            )
        TwinBuilder(architecture, weights, twin_store, options.precision, twins).twins()
    dense_used = {name for name in weights.used if not name.startswith(PREFIX)}
    vision = _plan_vision(eyes, options, weights) if eyes else None
    kinds, layers = plan_experts(architecture, _precisions(architecture, options))
    for layer in layers:
        for expert_idx in layer.places:
            read_expert(architecture, weights, layer.layer_idx, expert_idx)
    skipped = _skipped(architecture, weights, vision)
    expert_parameters = architecture.expert_shape().num_parameters
    shared_shape = architecture.shared_expert_shape()
    pinned = sum(_size(checkpoint, name) for name in dense_used)
    pinned += len(layers) * (shared_shape.num_parameters if shared_shape else 0)
    notes = list(vision.eyes.notes) if vision else []
    if unread := config.unread():
        notes.append(f"config.json: keys without effect on the export: {', '.join(unread)}")
    if drafter and (unread := drafter.config.unread()):
        notes.append(f"{drafter.directory}: config.json: keys without effect on the export: {', '.join(unread)}")
    if "lm_head.weight" not in checkpoint and config.raw("tie_word_embeddings", None) is False:
        notes.append("tie_word_embeddings is false but there is no lm_head.weight: the embedding serves as the head")
    used_blocks = sorted({m.block_size for kind in kinds for m in kind.matrices.values()} - {0})
    if used_blocks and used_blocks != [options.block_size] and options.precisions is None:
        shown = ", ".join(map(str, used_blocks))
        notes.append(f"block size {options.block_size} does not divide every expert matrix: used {shown}")
    return ExportPlan(
        checkpoint=checkpoint,
        architecture=architecture,
        part_names=builder.names,
        layers=layers,
        kinds=kinds,
        dense_bytes=store.end_bytes,
        twin_bytes=twin_store.end_bytes,
        part_ends=part_ends,
        states=states,
        skipped=skipped,
        notes=notes,
        num_parameters=pinned + len(layers) * architecture.num_experts * expert_parameters,
        num_active_parameters=pinned + len(layers) * architecture.num_experts_per_tok * expert_parameters,
        drafter=drafter,
        vision=vision,
    )


@contextmanager
def _a_way_out() -> Iterator[None]:
    """What is wrong with eyes, and that the rest can go without them."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}; --no-vision exports the model without its eyes") from None


def _eyes(architecture: Decoder, checkpoint: Checkpoint, options: ExportOptions) -> Eyes | None:
    """The model's eyes; None where it has none or they are left out."""
    if options.vision:
        with _a_way_out():
            eyes = architecture.eyes(checkpoint)
    else:
        eyes = None
    check_vision_bits(architecture, eyes, options)
    return eyes


def check_vision_bits(architecture: Decoder, eyes: Eyes | None, options: ExportOptions) -> None:
    """InputError where bits are given for eyes that there are not."""
    if eyes is None and options.vision_bits is not None:
        why = f"{architecture.model_type} takes no pictures" if options.vision else "--no-vision leaves them out"
        raise InputError(f"--vision-bits {options.vision_bits} is for the parts that read pictures: {why}")


def _plan_vision(eyes: Eyes, options: ExportOptions, weights: Weights) -> EyesPlan:
    """Eyes, rehearsed."""
    precision = options.vision_precision
    store, ends = VisionStore(None), []
    with _a_way_out():
        for name in eyes.names:
            eyes.build(name, weights, store, precision)
            ends.append(store.end_bytes)
    return EyesPlan(eyes, precision, ends)


def _size(checkpoint: Checkpoint, name: str) -> int:
    count = 1
    for length in checkpoint.info(name).shape:
        count *= length
    return count


def plan_experts(
    architecture: Decoder, precisions: Sequence[LayerPrecision]
) -> tuple[list[ExpertKind], list[LayerPlan]]:
    """The kinds of experts, one for each layout that there is, and which layer has which."""
    shape, shared_shape = architecture.expert_shape(), architecture.shared_expert_shape()
    kinds: dict[tuple[bool, ExpertKind], ExpertKind] = {}

    def kind_of(is_shared: bool, shape: ExpertShape, precision: ExpertPrecision) -> ExpertKind:
        # Routed and shared experts never share a kind: their stages write outputs of different shapes.
        layout = is_shared, make_mixed_kind("", shape, precision)
        if layout not in kinds:
            name = f"stage_{len(kinds)}"
            kinds[layout] = layout[1].model_copy(update={"name": name, "stage": f"experts/{name}.onnx"})
        return kinds[layout]

    layers = [
        LayerPlan(
            layer_idx,
            architecture.num_experts,
            kind_of(False, shape, precision.routed),
            kind_of(True, shared_shape, precision.shared) if shared_shape is not None else None,
        )
        for layer_idx, precision in zip(architecture.moe_layers, precisions, strict=True)
    ]
    return list(kinds.values()), layers


def _precisions(architecture: Decoder, options: ExportOptions) -> Sequence[LayerPrecision]:
    """What the options say of every MoE layer; the baseline where calibration is to choose."""
    num_layers = len(architecture.moe_layers)
    if options.precisions is None:
        return [LayerPrecision.uniform(options.bits, options.block_size)] * num_layers
    if len(options.precisions) != num_layers:
        raise InputError(f"precisions are given for {len(options.precisions)} layers, {num_layers} have experts")
    return options.precisions


def _skipped(architecture: Decoder, weights: Weights, vision: EyesPlan | None) -> dict[str, str]:
    """Tensors that are left out, with the reason; CheckpointError names any that nobody accounts for."""
    skipped = {}
    patterns = {**architecture.skipped, **(vision.eyes.skipped if vision else architecture.of_eyes), **SKIPPED}
    for name in sorted(set(weights.checkpoint.tensors) - weights.used):
        reason = next((why for pattern, why in patterns.items() if re.fullmatch(pattern, name)), None)
        if reason is None:
            info = weights.checkpoint.info(name)
            raise CheckpointError(
                f"{info.file.name}: tensor {info.key!r} {list(info.shape)} is not part of a"
                f" {architecture.model_type} model; refusing to leave it out silently"
            )
        skipped[name if name.startswith(PREFIX) else weights.checkpoint.info(name).key] = reason
    return skipped
