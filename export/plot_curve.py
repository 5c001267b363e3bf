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
        # Those of uniform bits lie below each other, those of mixed precision below all.
        place, side = ((-7, -12), "right") if series == "mixed" else ((7, 5), "left")
        for share, kl, label in drawn:
            if series != "calibrated":
                axes.annotate(
                    label, (share, kl), xytext=place, ha=side, textcoords="offset points", color=colour, size=8
                )
    axes.set_yscale("log")
    axes.margins(x=0.08, y=0.08)
    axes.set_xlabel("bytes of the experts, as a share of uniform 4 bits")
    axes.set_ylabel("KL to float, nats a token")
    axes.set_title(name)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise InputError(f"{path}: the plot cannot be written: {error.strerror or error}") from None
