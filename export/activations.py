"""The float run over calibration text that `statistics` keeps: layer by layer, each of the checkpoint's layers read once.

It drives dense parts and experts; what is done with what it finds, `compensate` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lesonnx_export.plan import ExportPlan
from lesonnx_export.statistics import StatisticsDirectory

Progress = Callable[[str, int], None]


def run_calibration(
    plan: ExportPlan,
    ids: Sequence[int],
    directory: Path,
    progress: Progress = lambda what, steps: None,
) -> StatisticsDirectory:
    """Run the checkpoint in float32 over token ids and write its layers' statistics into a directory.

    Windows of 512 tokens, each from an empty context, all of them through a layer before the next one. A directory in
    which a run has finished is taken as it is. ``progress`` is called with what is done and a count of layers since the
    last call, ``calibration_steps(plan)`` in all.
    """
    raise NotImplementedError


def calibration_steps(plan: ExportPlan) -> int:
    """How many steps ``progress`` counts."""
    return len(plan.layers) + 1
