"""The ladder as a picture: speed by technique, and where a token's milliseconds go. It measures nothing.

Needs matplotlib, the extra ``plot``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from lesonnx.errors import InputError
from lesonnx.memory import format_bytes

if TYPE_CHECKING:
    from lesonnx.bench.ladder_result import Ladder

# What a token's time consists of, in the order of stacking, with a colour each.
PARTS = (
    ("dense_ms", "dense parts", "#4c72b0"),
    ("expert_ms", "experts", "#55a868"),
    ("lookahead_ms", "lookahead", "#8172b3"),
    ("schedule_ms", "scheduler", "#ccb974"),
    ("other_ms", "other", "#8c8c8c"),
    ("stall_ms", "waiting for flash", "#dd8452"),
)
BAR = "#4c72b0"


def check_plot(path: Path) -> None:
    """InputError, before anything is measured, where the picture could not be drawn or saved."""
    if path.suffix.lower() != ".png":
        raise InputError(f"--plot {path}: expected a name that ends in .png")
    if not path.parent.is_dir():
        raise InputError(f"--plot {path}: no such directory as {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs the package matplotlib: pip install 'lesonnx[plot]'")


def plot_ladder(found: Ladder, path: Path) -> None:
    """Draw the ladder; InputError where the file cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = found.rows
    places = list(range(len(rows)))
    labels = [row["technique"] for row in rows]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 1.8 + 0.42 * len(rows)), sharey=True, layout="constrained"
    )
    speeds = [row["tokens_per_s"] for row in rows]
    left.barh(places, speeds, color=BAR, height=0.62)
    for place, row in zip(places, rows, strict=True):
        text = f" {row['tokens_per_s']:.2f}"
        ratio = row["ratio_plain"] or row["ratio"]
        left.text(row["tokens_per_s"], place, text if ratio is None else f"{text}  ({ratio:.1f}x)", va="center", size=9)
    left.set_xlim(0, max(speeds) * 1.28)
    left.set_yticks(places, labels)
    left.invert_yaxis()
    left.set_xlabel("tokens/s" + (" (times the first row)" if rows[0]["ratio_plain"] == 1 else ""))

    starts = [0.0] * len(rows)
    for name, title, colour in PARTS:
        widths = [max(0.0, row[name]) for row in rows]
        right.barh(places, widths, left=starts, color=colour, label=title, height=0.62)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, row in zip(places, rows, strict=True):
        label = "roofline" if place == 0 else None
        right.plot([row["roofline_ms"]] * 2, [place - 0.42, place + 0.42], color="black", linewidth=2, label=label)
    right.set_xlabel("ms a token")
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=9, frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)

    title = f"{found.bundle}: {format_bytes(found.expert_budget_bytes)} of experts in memory"
    figure.suptitle(title if found.label is None else f"{title}\n{found.label}", fontsize=11)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise InputError(f"{path}: the plot cannot be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)
