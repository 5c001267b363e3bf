"""Where the benchmarks' tables are printed: wide enough for every column, whatever the terminal's width."""

from __future__ import annotations

from typing import Any

from rich.console import Console

# A terminal that is narrower wraps the lines; a table that is squeezed into it loses figures.
LEAST_COLUMNS = 160


def wide_console(**options: Any) -> Console:
    """A console of at least 160 columns."""
    console = Console(**options)
    return console if console.width >= LEAST_COLUMNS else Console(width=LEAST_COLUMNS, **options)
