"""The arrays of a step, and the parts bound to them: what flows between parts lies in memory that is made once a width.

It knows the bundle's shapes and no session; the runner binds and runs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lesonnx import ort
from lesonnx.bundle import Bundle
from lesonnx.drafter_wiring import EMBEDDING_IDX
from lesonnx.twins import BoundTwin


@dataclass
class Stream:
    """What flows from one part to the next; two of them, since a part may not write what it reads."""

    residual: NDArray[np.float32]
    topk_weights: NDArray[np.float32]
    shared_weights: NDArray[np.float32]


class StepBuffers:
    """The arrays of a step of T rows, and the parts bound to them. Valid until a state moves."""

    def __init__(self, bundle: Bundle, num_rows: int, layer_idxs: Sequence[int] = ()) -> None:
        model = bundle.manifest.model
        hidden, slots, experts = model.hidden_size, model.num_experts_per_tok, model.num_experts
        self.input_ids = ort.empty_aligned((1, num_rows), np.int64)
        # One position a token [1, T], or three [3, 1, T].
        self._position_shape = (1,) if bundle.manifest.position_rows == 1 else (bundle.manifest.position_rows, 1)
        self.position_ids = ort.empty_aligned((*self._position_shape, num_rows), np.int64)
        self.hidden = ort.empty_aligned((1, num_rows, hidden), np.float32)
        # What is added behind the first layers, zeros but for image tokens.
        self.deepstack = ort.empty_aligned((bundle.manifest.deepstack_layers, num_rows, hidden), np.float32)
        self.streams = [
            Stream(
                ort.empty_aligned((1, num_rows, bundle.manifest.residual_size), np.float32),
                ort.empty_aligned((num_rows, slots), np.float32),
                ort.empty_aligned((num_rows, 1), np.float32),
            )
            for _ in range(2)
        ]
        # What a mixer makes of the residual: it may not write the one it reads, and the other one's weights are in use.
        has_mixers = any(part.role == "mixer" for part in bundle.manifest.parts)
        mixed = bundle.manifest.residual_size if has_mixers else 0
        self.mixed_residual = ort.empty_aligned((1, num_rows, mixed), np.float32)
        self.moe_input = ort.empty_aligned((num_rows, hidden), np.float32)
        self.topk_ids = ort.empty_aligned((num_rows, slots), np.int64)
        self.router_scores = ort.empty_aligned((num_rows, experts), np.float32)
        self.expert_out = ort.empty_aligned((num_rows, slots, hidden), np.float32)
        self.shared_out = ort.empty_aligned((num_rows, hidden), np.float32)
        self.ready = ort.empty_aligned((num_rows, slots), np.bool_)
        self.lookahead_scores = ort.empty_aligned((num_rows, experts), np.float32)
        self.logit_rows = ort.empty_aligned((1,), np.int64)
        self.logits = ort.empty_aligned((1, model.vocab_size), np.float32)
        # What drafters read, layer by layer; of one row that is side by side already.
        self.layer_idxs = layer_idxs
        self.layer_outputs = ort.empty_aligned((len(layer_idxs), num_rows, hidden), np.float32)
        # Of a step with drafts, every row's: made when there is one.
        self.draft_logits = np.empty((0, model.vocab_size), np.float32)
        # By part and side of the states, the head by side and number of logit rows.
        self.bindings: dict[tuple[str, int], ort.Binding] = {}
        self.heads: dict[tuple[int, int], ort.Binding] = {}
        self.twins: dict[str, BoundTwin] = {}

    def first_rows(self, num_rows: int) -> StepBuffers:
        """The same memory for a step of fewer rows, to which parts are bound apart."""
        narrow = copy.copy(self)
        for name in ("input_ids", "hidden", "mixed_residual"):
            setattr(narrow, name, getattr(self, name)[:, :num_rows])
        # Three rows cut short would not lie side by side.
        narrow.position_ids = ort.empty_aligned((*self._position_shape, num_rows), np.int64)
        for name in ("moe_input", "topk_ids", "router_scores", "expert_out", "shared_out", "ready", "lookahead_scores"):
            setattr(narrow, name, getattr(self, name)[:num_rows])
        narrow.streams = [
            Stream(one.residual[:, :num_rows], one.topk_weights[:num_rows], one.shared_weights[:num_rows])
            for one in self.streams
        ]
        narrow.deepstack = self.deepstack[:, :num_rows]
        narrow.layer_outputs = self.layer_outputs[:, :num_rows]
        narrow.draft_logits = self.draft_logits[:num_rows]
        narrow.bindings, narrow.heads, narrow.twins = {}, {}, {}
        return narrow

    def layer_rows(self) -> NDArray[np.float32]:
        """What drafters read of the step, each token's layers side by side: [T, n*H]."""
        if EMBEDDING_IDX in self.layer_idxs:
            self.layer_outputs[self.layer_idxs.index(EMBEDDING_IDX)] = self.hidden[0]
        num_rows = self.layer_outputs.shape[1]
        return self.layer_outputs.transpose(1, 0, 2).reshape(num_rows, -1)

    @staticmethod
    def bytes_for(bundle: Bundle, num_rows: int, num_layers_read: int = 0) -> int:
        """What the arrays of a step of that many rows take, without what ONNX Runtime needs inside a part."""
        model = bundle.manifest.model
        row = 3 * bundle.manifest.residual_size + model.hidden_size * (3 + model.num_experts_per_tok)
        row += bundle.manifest.deepstack_layers * model.hidden_size
        row += model.num_experts + 6 * model.num_experts_per_tok + 2 * num_layers_read * model.hidden_size
        return num_rows * row * 4
