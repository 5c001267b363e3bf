"""The ladder as people read it: a table, its roofline and its notes."""

from __future__ import annotations

from rich.table import Table

from lesonnx.bench.console import wide_console
from lesonnx.bench.ladder_result import Ladder
from lesonnx.bench.turns import turns_line
from lesonnx.memory import format_bytes


def roofline_line(found: Ladder) -> str:
    """What the machine allows, in one line."""
    least, most = (format_bytes(speed) for speed in found.flash_bytes_per_s)
    how = "direct reads" if found.flash_is_direct else "buffered reads, dropped"
    return (
        f"roofline: the larger of flash, {least}/s to {most}/s ({how} of one expert, {found.num_loaders} at once),"
        f" and compute, {found.compute_ms:.1f} ms a token"
    )


def print_ladder(found: Ladder) -> None:
    """The table, its roofline and its notes."""
    title = f"{found.bundle}, {format_bytes(found.expert_budget_bytes)} of experts, {found.tokens} tokens a row"
    table = Table(title=title if found.label is None else f"{title}; {found.label}", title_justify="left")
    columns = ("tokens/s", "ms", "hits", "late", "misses", "read", "stall ms", "peak", "roofline", "x same", "x plain")
    table.add_column("technique", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(
            row["technique"],
            f"{row['tokens_per_s']:.2f}",
            f"{row['ms_per_token']:.1f}",
            f"{row['hit_rate']:.1%}",
            f"{row['late_rate']:.1%}",
            f"{row['miss_rate']:.1%}",
            format_bytes(row["bytes_per_token"]),
            f"{row['stall_ms']:.1f}",
            format_bytes(row["peak_bytes"]),
            f"{row['roofline_share']:.0%}",
            _ratio(row["ratio_same_loader"] or row["ratio"]),
            _ratio(row["ratio_plain"]),
        )
        if "warm_tokens_per_s" in row:
            table.add_row("  the same, page cache warm", f"{row['warm_tokens_per_s']:.2f}")
    console = wide_console()
    console.print(table, highlight=False)
    console.print(roofline_line(found), highlight=False, soft_wrap=True)
    if found.turns is not None:
        console.print(turns_line(found.turns), highlight=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
