"""What each precision would cost the model: experts of every layer, quantized half by half, against the float ones.

A layer's experts are sampled in the order of their use; it writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from lesonnx.errors import LesonnxError
from lesonnx.manifest import ExpertKind
from lesonnx_export.blas import on_one_thread
from lesonnx_export.compensate import expected_loss, quantize_expert
from lesonnx_export.executors import RunTasks
from lesonnx_export.precision import HALVES, Group, GroupLosses
from lesonnx_export.sources import ExpertReader, Sources
from lesonnx_export.statistics import LayerStatistics, StatisticsDirectory

# Routed experts of a layer that are tried: their sum is scaled up by the tokens that the others saw.
SAMPLED_EXPERTS = 8
# Rows of an expert on which its losses are judged, on average; it is quantized for all that it read.
JUDGED_ROWS = 256


@dataclass(frozen=True)
class _Task:
    """An expert and the layouts to try on it; ``place`` is its group's number."""

    place: int
    layer_idx: int
    expert_idx: int | None
    kinds: list[ExpertKind]


def weigh(
    sources: Sources, groups: Sequence[Group], run_tasks: RunTasks, progress: Callable[[int], None]
) -> list[GroupLosses]:
    """The expected loss of every group, for each half, at each of its precisions (see `Group.precisions`).

    ``progress`` is called with the experts weighed since the last call, ``num_weighed(groups)`` in all. What an expert
    loses at one half does not depend on the other as far as losses are small, so halves are tried alone.
    """
    if sources.statistics is None:
        raise LesonnxError("losses cannot be weighed without calibration")
    directory = StatisticsDirectory(sources.statistics)
    found: list[dict[int | None, list[float]]] = [{} for _ in groups]
    shares = []
    tasks = []
    for place, group in enumerate(groups):
        chosen, share = _sampled(group, directory.layer(group.layer_idx))
        shares.append(share)
        kinds = [
            group.half_kind(half, precision) for half in range(len(HALVES)) for precision in group.precisions(half)
        ]
        tasks += [_Task(place, group.layer_idx, expert_idx, kinds) for expert_idx in chosen]
    with on_one_thread(), closing(run_tasks(_open_sources, sources, iter(tasks))) as done:
        for task, losses in done:
            found[task.place][task.expert_idx] = losses
            progress(1)
    return [list(_halves(group, rows, share)) for group, rows, share in zip(groups, found, shares, strict=True)]


def num_weighed(groups: Sequence[Group]) -> int:
    """How many experts `weigh` tries at most."""
    return sum(min(group.num_experts, SAMPLED_EXPERTS) for group in groups)


def _sampled(group: Group, statistics: LayerStatistics) -> tuple[list[int | None], float]:
    """Experts of a group spread over all degrees of use, and the tokens of all by those of the sampled."""
    if group.is_shared:
        return [None], 1.0
    tokens = statistics.expert_tokens
    order = np.lexsort((np.arange(len(tokens)), -tokens))
    used = int(np.count_nonzero(tokens))
    count = min(SAMPLED_EXPERTS, used)
    # The middle of each of so many equal stretches.
    chosen = order[(2 * np.arange(count) + 1) * used // (2 * max(count, 1))]
    seen = int(tokens[chosen].sum())
    return [int(expert_idx) for expert_idx in chosen], int(tokens.sum()) / seen if seen else 0.0


def _halves(group: Group, rows: dict[int | None, list[float]], share: float) -> Iterator[list[float]]:
    """Sums over the experts, cut into halves; rounded once, so that the order of the tasks' ends is without effect."""
    start = 0
    for half in range(len(HALVES)):
        end = start + len(group.precisions(half))
        yield [share * math.fsum(losses[number] for losses in rows.values()) for number in range(start, end)]
        start = end


def _open_sources(sources: Sources) -> Callable[[_Task], list[float]]:
    """What does a task, opened once a process."""
    reader = sources.open()
    return lambda task: _weigh_expert(reader, task)


def _weigh_expert(reader: ExpertReader, task: _Task) -> list[float]:
    """The loss of one expert in each layout."""
    statistics = reader.statistics(task.layer_idx)
    if statistics is None:
        raise LesonnxError(f"layer {task.layer_idx} has no statistics")
    tensors = reader.tensors(task.layer_idx, task.expert_idx)
    name = f"layer {task.layer_idx} expert {'shared' if task.expert_idx is None else task.expert_idx}"
    judged = _thinned(statistics, task.expert_idx)
    losses = []
    for kind in task.kinds:
        quantized = quantize_expert(kind, tensors, statistics, task.expert_idx, name)
        losses.append(expected_loss(kind, tensors, quantized, judged, task.expert_idx))
    return losses


def _thinned(statistics: LayerStatistics, expert_idx: int | None) -> LayerStatistics:
    """Every so-manieth token of a layer's statistics, so that the expert has about `JUDGED_ROWS` rows."""
    num_rows = statistics.num_tokens if expert_idx is None else int(statistics.expert_tokens[expert_idx])
    step = max(1, num_rows // JUDGED_ROWS)
    shared = statistics.shared_weights
    return replace(
        statistics,
        inputs=statistics.inputs[::step],
        topk_ids=statistics.topk_ids[::step],
        topk_weights=statistics.topk_weights[::step],
        shared_weights=None if shared is None else shared[::step],
    )
