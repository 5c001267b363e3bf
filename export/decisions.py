"""The choice of precisions as people read it: a row a layer, and what it comes to.

It decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lesonnx.memory import format_bytes
from lesonnx_export.expert import ExpertPrecision, ExpertShape
from lesonnx_export.plan import BASELINE_BITS, ExportOptions, ExportPlan
from lesonnx_export.precision import Decision, baseline_bytes, groups_of
from lesonnx_export.quantize import fitting_block_size


def print_decisions(console: Console, plan: ExportPlan, options: ExportOptions, decisions: Sequence[Decision]) -> None:
    """The table: bits and blocks of each layer's matrices, bytes, and expected losses at it and at uniform bits."""
    baseline = baseline_bytes(groups_of(plan.architecture), options.block_size)
    table = Table(
        title=f"Precision of the experts: at most {options.experts_target_size:g} of the bytes of {BASELINE_BITS} bits",
        caption="Bits, with the block size. Expected loss: nats of KL a token, as chosen and at uniform bits.",
        title_justify="left",
        caption_justify="left",
    )
    columns = ("gate, up", "down", "bytes", "share", "loss", f"at {BASELINE_BITS} bits", "at 2 bits")
    table.add_column("layer")
    for column in columns:
        table.add_column(column, justify="right")
    uniform = ExpertPrecision.uniform(BASELINE_BITS, options.block_size)
    for decision in decisions:
        group, precision = decision.group, decision.precision
        name = f"{group.layer_idx}, shared" if group.is_shared else str(group.layer_idx)
        share = decision.cost_bytes / group.cost_bytes(uniform)
        table.add_row(
            name,
            _precision(group.shape, precision, "gate_proj"),
            _precision(group.shape, precision, "down_proj"),
            format_bytes(decision.cost_bytes),
            f"{share:.3f}",
            *(f"{loss:.2g}" for loss in (decision.loss, decision.loss_at_4, decision.loss_at_2)),
        )
    table.add_section()
    total = sum(decision.cost_bytes for decision in decisions)
    sums = [sum(getattr(decision, name) for decision in decisions) for name in ("loss", "loss_at_4", "loss_at_2")]
    table.add_row(
        "all", "", "", format_bytes(total), f"{total / baseline:.3f}", *(f"{loss:.2g}" for loss in sums), style="bold"
    )
    console.print(table)


def _precision(shape: ExpertShape, precision: ExpertPrecision, name: str) -> str:
    matrix = getattr(precision, name)
    _, columns = shape.matrix_shape(name)
    return f"{matrix.bits} ({fitting_block_size(columns, matrix.block_size)})"
