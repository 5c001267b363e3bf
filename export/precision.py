"""The precisions that experts may have, what each costs in bytes, and the choice for a share of uniform 4 bits.

It knows shapes and layouts; what a precision costs the model, `weigh` says, and how to choose, `allocate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lesonnx.errors import InputError
from lesonnx.manifest import Bits, ExpertKind
from lesonnx_export.allocate import Option, allocate
from lesonnx_export.architectures.base import Decoder
from lesonnx_export.expert import ExpertPrecision, ExpertShape, MatrixPrecision, make_mixed_kind
from lesonnx_export.plan import BASELINE_BITS, LayerPrecision
from lesonnx_export.quantize import fitting_block_size

# Gate and up read the same rows and fill the same ones: they share a precision. Down is another matter.
HALVES = (("gate_proj", "up_proj"), ("down_proj",))
# Bits that are tried, with the blocks. Smaller blocks of 2 bits cost what 4 bits do, and 8 bits gain nothing by them.
BLOCKS: dict[Bits, tuple[int, ...]] = {2: (128, 64, 32), 4: (128, 64, 32), 8: (128,)}
FLOAT = MatrixPrecision(32, 0)


@dataclass(frozen=True)
class Group:
    """Experts that get one precision: the routed ones of a MoE layer, or its shared one."""

    layer_idx: int
    is_shared: bool
    shape: ExpertShape
    num_experts: int

    def kind(self, precision: ExpertPrecision) -> ExpertKind:
        """The layout of these experts at a precision."""
        return make_mixed_kind("", self.shape, precision)

    def cost_bytes(self, precision: ExpertPrecision) -> int:
        """What all of them take, in whole pages an expert."""
        return self.num_experts * self.kind(precision).cost_bytes

    def precisions(self, half: int) -> list[MatrixPrecision]:
        """What a half of an expert may have: every block size is one that its columns allow."""
        _, columns = self.shape.matrix_shape(HALVES[half][0])
        fitting = {
            MatrixPrecision(bits, fitting_block_size(columns, block))
            for bits, blocks in BLOCKS.items()
            for block in blocks
        }
        return sorted(fitting)

    def options(self) -> Iterator[tuple[int, int, ExpertPrecision]]:
        """Every precision of an expert: the numbers of its halves' precisions, and what they make together."""
        for inner, gate_up in enumerate(self.precisions(0)):
            for outer, down in enumerate(self.precisions(1)):
                yield inner, outer, ExpertPrecision(gate_up, gate_up, down)

    def half_kind(self, half: int, precision: MatrixPrecision) -> ExpertKind:
        """The layout of an expert of which one half alone is rounded much: it shows what that half's rounding costs.

        Down is rounded to 8 bits where gate and up are tried: as it will be, it is fitted to what they give it.
        """
        if half == 0:
            return self.kind(ExpertPrecision(precision, precision, MatrixPrecision(8, max(BLOCKS[8]))))
        return self.kind(ExpertPrecision(FLOAT, FLOAT, precision))


def groups_of(architecture: Decoder) -> list[Group]:
    """The groups of a model, layer by layer, a layer's shared expert after its routed ones."""
    shape, shared_shape = architecture.expert_shape(), architecture.shared_expert_shape()
    groups = []
    for layer_idx in architecture.moe_layers:
        groups.append(Group(layer_idx, False, shape, architecture.num_experts))
        if shared_shape is not None:
            groups.append(Group(layer_idx, True, shared_shape, 1))
    return groups


def baseline_bytes(groups: Sequence[Group], block_size: int) -> int:
    """What a target size is a share of: all experts in 4 bits of that block size, in whole pages."""
    baseline = ExpertPrecision.uniform(BASELINE_BITS, block_size)
    return sum(group.cost_bytes(baseline) for group in groups)


def target_bytes(groups: Sequence[Group], share: float, block_size: int) -> int:
    """The most bytes for a share of the baseline; InputError where no choice has so few, or none so many."""
    baseline = baseline_bytes(groups, block_size)
    costs = [[group.cost_bytes(precision) for *_, precision in group.options()] for group in groups]
    least, most = (sum(pick(row) for row in costs) for pick in (min, max))
    if not least <= share * baseline <= most:
        raise InputError(
            f"--experts-target-size {share:g}: experts of this model can have {math.ceil(1e3 * least / baseline) / 1e3}"
            f" to {math.floor(1e3 * most / baseline) / 1e3} of the {baseline:,} bytes of uniform {BASELINE_BITS} bits"
        )
    return int(share * baseline)


# The losses of a group: for each half, those of its precisions.
GroupLosses = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Decision:
    """What a group gets, and what it is expected to cost there and at uniform 2 and 4 bits (nats of KL a token)."""

    group: Group
    precision: ExpertPrecision
    cost_bytes: int
    loss: float
    loss_at_2: float
    loss_at_4: float


def decide(groups: Sequence[Group], losses: Sequence[GroupLosses], most_bytes: int, block_size: int) -> list[Decision]:
    """The precision of each group: the least sum of losses that the bytes allow. An expert's halves add up."""
    options = [list(group.options()) for group in groups]
    weighed = [
        [Option(group.cost_bytes(precision), inner[i] + outer[o]) for i, o, precision in row]
        for group, (inner, outer), row in zip(groups, losses, options, strict=True)
    ]
    numbers = allocate(weighed, most_bytes)
    decisions = []
    for group, group_losses, row, costs, number in zip(groups, losses, options, weighed, numbers, strict=True):
        decisions.append(
            Decision(
                group,
                row[number][2],
                costs[number].cost_bytes,
                costs[number].loss,
                *(_uniform_loss(group, group_losses, bits, block_size) for bits in (2, BASELINE_BITS)),
            )
        )
    return decisions


def _uniform_loss(group: Group, losses: GroupLosses, bits: Bits, block_size: int) -> float:
    """What a group is expected to lose at one number of bits, at the block size nearest to the user's."""
    total = 0.0
    for half, row in enumerate(losses):
        precisions = group.precisions(half)
        alike = [number for number, precision in enumerate(precisions) if precision.bits == bits]
        total += row[min(alike, key=lambda number: abs(precisions[number].block_size - block_size))]
    return total


def layer_precisions(decisions: Sequence[Decision]) -> tuple[LayerPrecision, ...]:
    """The decisions, layer by layer."""
    routed = {d.group.layer_idx: d.precision for d in decisions if not d.group.is_shared}
    shared = {d.group.layer_idx: d.precision for d in decisions if d.group.is_shared}
    return tuple(LayerPrecision(precision, shared.get(idx, precision)) for idx, precision in routed.items())
