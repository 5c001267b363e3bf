"""The precision curve as a picture: expert bytes against KL. It measures nothing.

Needs matplotlib, the extra ``plot``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lesonnx.errors import InputError

STYLES = {"rounded": ("o--", "#8c8c8c"), "calibrated": ("s--", "#4c72b0"), "mixed": ("D-", "#c44e52")}
TITLES = {
    "rounded": "uniform bits, rounded",
    "calibrated": "uniform bits, calibrated",
    "mixed": "mixed precision, calibrated",
}


class Drawn(Protocol):
    """What is drawn of a point."""

    @property
    def series(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def share(self) -> float: ...
    @property
    def kl(self) -> float: ...


def plot_curve(points: Sequence[Drawn], name: str, path: Path) -> None:
    """Draw the curve; InputError where the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for series, (style, colour) in STYLES.items():
        drawn = sorted((point.share, point.kl, point.name) for point in points if point.series == series)
        if not drawn:
            continue
        axes.plot(*zip(*[row[:2] for row in drawn], strict=True), style, color=colour, label=TITLES[series])
        for share, kl, label in drawn:
            if series != "mixed":
                axes.annotate(label, (share, kl), xytext=(6, 6), textcoords="offset points", color=colour, size=8)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of the experts, as a share of uniform 4 bits")
    axes.set_ylabel("KL to float, nats a token")
    axes.set_title(name)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise InputError(f"{path}: the plot cannot be written: {error.strerror or error}") from None
