"""Records which experts a model chooses, in the CSV format of routing traces, for ``bench cache`` and ``bench ladder``.

It knows positions, layers and the runner's hook; it writes nothing before it is told to. What the columns mean,
``bench.trace`` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lesonnx.bundle import Bundle
from lesonnx.files import write_whole

COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,chosen,score"
# Experts recorded beside those chosen, in a row: the best that were not.
NEAR_MISSES = 4


@dataclass(frozen=True)
class _Visit:
    """What one layer chose for the rows of one step, [T,k], then its near misses: [T,k + NEAR_MISSES] in all.

    Near misses have no weight.
    """

    position: int
    place: int
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    scores: NDArray[np.float32]
    resident: NDArray[np.bool_]


class RoutingRecorder:
    """A runner's ``recorder``; owned by the thread that computes. Keeps some 20 bytes an expert, row and layer."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._visits: list[_Visit] = []

    def route(
        self,
        position: int,
        place: int,
        ids: NDArray[np.int64],
        weights: NDArray[np.float32],
        scores: NDArray[np.float32],
        resident: list[bool],
    ) -> None:
        """MoE layer number ``place`` chose ``ids`` [T,k] by ``scores`` [T,E] for the rows from ``position`` on.

        ``resident``: which experts of the layer are in memory.
        """
        named = np.concatenate([ids, near_misses(ids, scores)], axis=1)
        in_memory = np.array(resident, np.bool_)[named]
        named_scores = np.take_along_axis(scores, named, axis=1)
        self._visits.append(_Visit(position, place, named, weights.copy(), named_scores, in_memory))

    def save(self, path: Path, prompt_tokens: int) -> None:
        """Write the trace; the first ``prompt_tokens`` positions are prefill. InputError where that cannot be."""
        manifest = self._bundle.manifest
        model, layers = manifest.model, manifest.expert_layers
        costs = [manifest.expert_kinds[layer.kind].length_bytes for layer in layers]
        lines = [
            "# route_trace v2",
            f"# model={self._bundle.directory.name} arch={model.model_type} n_layer={model.num_hidden_layers}"
            f" n_expert={model.num_experts} n_expert_used={model.num_experts_per_tok}",
        ]
        for layer, cost in zip(layers, costs, strict=True):
            lines.append(f"# layer={layer.layer_idx} expert_bytes={cost}")
        lines.append(COLUMNS)
        rows = [
            (visit.position + row, visit.place, visit, row) for visit in self._visits for row in range(len(visit.ids))
        ]
        rows.sort(key=lambda item: item[:2])
        for step, place, visit, row in rows:
            phase = 0 if step < prompt_tokens else 1
            num_chosen = visit.weights.shape[1]
            for slot, expert in enumerate(visit.ids[row].tolist()):
                chosen = int(slot < num_chosen)
                weight = visit.weights[row, slot] if chosen else 0.0
                resident, score = int(visit.resident[row, slot]), visit.scores[row, slot]
                lines.append(
                    f"0,{phase},{step},{layers[place].layer_idx},{slot},{expert},{weight:.6g},{resident},{costs[place]}"
                    f",{chosen},{score:.6g}"
                )
        write_whole(path, "\n".join(lines) + "\n", "routing")


def near_misses(ids: NDArray[np.int64], scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """The best experts by ``scores`` [T,E] that are not among ``ids`` [T,k], best first: [T, at most NEAR_MISSES]."""
    others = scores.copy()
    np.put_along_axis(others, ids, -np.inf, axis=1)
    count = min(NEAR_MISSES, scores.shape[1] - ids.shape[1])
    return np.argsort(-others, axis=1, kind="stable")[:, :count]
