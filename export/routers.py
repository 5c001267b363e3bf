"""Pieces of routers that several families share: groups of experts, selection apart from weights.

Scores are [T,E], float32; the experts that are chosen and their weights [T,k].
"""

from __future__ import annotations

from typing import Literal

from lesonnx_export.blocks import Step

# Below every score, and finite, so that what is built on it stays a number.
EXCLUDED = -3.0e38


def keep_best_groups(
    step: Step,
    scores: str,
    *,
    num_experts: int,
    n_group: int,
    topk_group: int,
    by: Literal["max", "top2"],
    other: float,
) -> str:
    """Scores [T,E] with ``other`` in place of those outside the best ``topk_group`` of ``n_group`` equal groups.

    A group counts by its best score, or by the sum of its two best.
    """
    if topk_group >= n_group:
        return scores
    graph, size = step.graph, num_experts // n_group
    grouped = graph.op("Reshape", scores, graph.constant([-1, n_group, size], "int64"))
    count = graph.constant([1 if by == "max" else min(2, size)], "int64")
    best, _ = graph.ops("TopK", 2, grouped, count, axis=-1, largest=1, sorted=1)
    strength = graph.op("ReduceSum", best, graph.constant([-1], "int64"), keepdims=0)
    _, chosen = graph.ops("TopK", 2, strength, graph.constant([topk_group], "int64"), axis=-1, largest=1, sorted=1)
    # [T,topk_group,n_group] against the groups' numbers: whether a group is among the chosen.
    numbers = graph.constant(range(n_group), "int64")
    is_it = graph.op("Equal", graph.op("Unsqueeze", chosen, graph.constant([2], "int64")), numbers)
    kept = graph.op("ReduceMax", graph.op("Cast", is_it, to=6), graph.constant([1], "int64"), keepdims=0)
    kept = graph.op("Unsqueeze", graph.op("Cast", kept, to=9), graph.constant([2], "int64"))
    masked = graph.op("Where", kept, grouped, graph.constant(other))
    return graph.op("Reshape", masked, graph.constant([-1, num_experts], "int64"))


def choose(step: Step, choice: str, scores: str, count: int) -> tuple[str, str]:
    """The best ``count`` experts by ``choice`` [T,E], and their ``scores`` [T,E]: ids and weights [T,k].

    For routers that select by something else than what they weigh by.
    """
    graph = step.graph
    _, ids = graph.ops("TopK", 2, choice, graph.constant([count], "int64"), axis=-1, largest=1, sorted=1)
    return ids, graph.op("GatherElements", scores, ids, axis=1)


def normalized(step: Step, weights: str, epsilon: float = 0.0) -> str:
    """Weights [T,k] divided by their sum (plus ``epsilon``, where a family adds one)."""
    graph = step.graph
    total = graph.op("ReduceSum", weights, graph.constant([-1], "int64"), keepdims=1)
    if epsilon:
        total = graph.op("Add", total, graph.constant(epsilon))
    return graph.op("Div", weights, total)
