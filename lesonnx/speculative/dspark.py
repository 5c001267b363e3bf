"""The DSpark drafter of a bundle: a block of tokens in one pass over what the target's layers gave, then slot by slot.

It keeps keys and values of every token that the target ran, projected from the outputs of some of its layers; the
block's own are dropped after each draft. It knows nothing of verification or price; docs/bundle.md has its parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lesonnx import ort
from lesonnx.bundle import Bundle
from lesonnx.errors import InputError
from lesonnx.manifest import DrafterRole
from lesonnx.speculative.drafter import MAX_DRAFT_TOKENS, Distribution, Draft, DraftSampler, fixed_confidence
from lesonnx.states import GROWTH_TOKENS

Float32 = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]
# Rows of layer outputs are projected when a draft needs them, or when there are so many: few runs of many rows cost
# less than many of one, and what is kept unprojected stays small.
PENDING_TOKENS = 64


class DSparkDrafter:
    """Proposes up to a block of tokens; see `lesonnx.speculative.drafter.Drafter`. Not thread-safe.

    Owns three sessions, its caches and the rows that are not projected yet. InputError where the bundle has no drafter.
    """

    name = "dspark"
    is_free = False

    def __init__(self, bundle: Bundle, num_threads: int | None = None) -> None:
        record = bundle.manifest.drafter
        if record is None:
            raise InputError(f"{bundle.directory}: this bundle has no dspark drafter; export with --drafter CHECKPOINT")
        self.record = record
        self.max_tokens = min(record.block_size, MAX_DRAFT_TOKENS)
        self.layer_idxs = tuple(record.target_layer_ids)
        self.model = bundle.manifest.model
        options = ort.session_options(optimise=True, num_threads=num_threads)
        self._sessions = {part.role: ort.open_session(bundle.part_file(part), options) for part in record.parts}
        for part in record.parts:
            ort.check_part(self._sessions[part.role], part, bundle.part_file(part))
        self._sizes = record.cache_sizes
        self._caches: dict[str, Float32] = {
            name: np.zeros((1, 0, size), np.float32) for name, size in self._sizes.items()
        }
        width = len(self.layer_idxs) * self.model.hidden_size
        self._pending = ort.empty_aligned((PENDING_TOKENS, width), np.float32)
        # Tokens whose keys and values are in the caches, and those behind them whose rows are kept.
        self._num_projected = 0
        self._num_pending = 0
        self._block = _Block(self)
        self._warm_up()

    def close(self) -> None:
        """Free sessions and caches."""
        self._block.chain.clear()
        self._sessions.clear()
        self._caches.clear()

    # -- context -----------------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, from its beginning, whose layer outputs it has."""
        return self._num_projected + self._num_pending

    def observe(self, position: int, layer_outputs: Float32) -> None:
        """Outputs [T, n*H] of the tokens from ``position`` on; what it had from there on is forgotten.

        ValueError where tokens before ``position`` are missing.
        """
        if position > self.num_tokens:
            raise ValueError(f"the drafter has seen {self.num_tokens} tokens, and is told of token {position}")
        self.rewind(position)
        count = len(layer_outputs)
        if self._num_pending + count > PENDING_TOKENS:
            self._flush()
        if count > PENDING_TOKENS:
            self._project(layer_outputs)
            return
        self._pending[self._num_pending : self._num_pending + count] = layer_outputs
        self._num_pending += count

    def rewind(self, num_tokens: int) -> None:
        """Forget what comes behind the first ``num_tokens`` tokens: two numbers, nothing is moved."""
        self._num_projected = min(self._num_projected, num_tokens)
        self._num_pending = min(self._num_pending, num_tokens - self._num_projected)

    def _flush(self) -> None:
        """Project the rows that are pending."""
        if self._num_pending:
            rows = self._pending[: self._num_pending]
            self._num_pending = 0
            self._project(rows)

    def _project(self, rows: Float32) -> None:
        """Append rows [T, n*H] to the caches."""
        first, total = self._num_projected, self._num_projected + len(rows)
        self._reserve(total)
        positions = np.arange(first, total, dtype=np.int64)[None]
        outputs = {name: cache[:, first:total] for name, cache in self._caches.items()}
        inputs: Arrays = {"layer_outputs": np.ascontiguousarray(rows)[None], "position_ids": positions}
        self.bind("drafter_context", inputs, outputs).run()
        self._num_projected = total

    def _reserve(self, num_tokens: int) -> None:
        """Room for that many tokens: caches grow as attention's do."""
        capacity = self._capacity_for(num_tokens)
        for name, cache in self._caches.items():
            if cache.shape[1] < num_tokens:
                grown = np.zeros((1, capacity, self._sizes[name]), np.float32)
                grown[:, : self._num_projected] = cache[:, : self._num_projected]
                self._caches[name] = grown

    def _capacity_for(self, num_tokens: int) -> int:
        return min(-(-num_tokens // GROWTH_TOKENS) * GROWTH_TOKENS, max(self.model.max_position_embeddings, num_tokens))

    def bytes_at(self, num_tokens: int) -> int:
        """What caches and pending rows take for a sequence of that many tokens."""
        return self._capacity_for(num_tokens) * sum(self._sizes.values()) * 4 + self._pending.nbytes

    def _warm_up(self) -> None:
        """Run every part once on nothing.

        So the weights that it maps count as this process's before memory is shared out, and the first draft takes no
        longer than others.
        """
        self.observe(0, np.zeros((1, self._pending.shape[1]), np.float32))
        self._flush()
        self._block.run(0, 1, self.max_tokens)
        for slot in range(self.max_tokens):
            self._block.slot(slot, 0)
        self.rewind(0)

    # -- drafting ----------------------------------------------------------------------------------------------------

    def propose(self, token_ids: Sequence[int], max_tokens: int, sampler: DraftSampler) -> Draft:
        """Up to ``max_tokens`` tokens after ``token_ids``, and how likely each is right if those before it are.

        ValueError where it has not seen what the target gave for all but the last of ``token_ids``.
        """
        start, count = len(token_ids) - 1, min(max_tokens, self.max_tokens)
        if start > self.num_tokens:
            raise ValueError(f"the drafter has seen {self.num_tokens} tokens, expected {start}")
        self.rewind(start)
        self._flush()
        self._block.run(token_ids[-1], start, count)
        tokens: list[int] = []
        distributions: list[Distribution] = []
        confidence: list[int] = []
        before = token_ids[-1]
        with sampler:
            for slot in range(count):
                logits, probability = self._block.slot(slot, before)
                before, distribution = sampler.choose(logits)
                tokens.append(before)
                if distribution is not None:
                    distributions.append(distribution)
                confidence.append(fixed_confidence(probability))
        return Draft(
            tokens, distributions if sampler.draws else None, confidence if self.record.has_confidence else None
        )

    def bind(self, role: DrafterRole, inputs: Arrays, outputs: Mapping[str, NDArray[Any]]) -> ort.Binding:
        """A part bound to arrays."""
        return ort.Binding(self._sessions[role], inputs, outputs)

    def context(self, num_tokens: int) -> dict[str, Float32]:
        """The caches [1, num_tokens, size], by name; views that hold until it observes more."""
        return {name: cache[:, :num_tokens] for name, cache in self._caches.items()}


class _Block:
    """The buffers of one draft: B slots, one after the other. Owned by a drafter."""

    def __init__(self, drafter: DSparkDrafter) -> None:
        self._drafter = drafter
        size, model = drafter.record.block_size, drafter.model
        self._ids = np.full((1, size), drafter.record.mask_token_id, np.int64)
        self._positions = np.zeros((1, size), np.int64)
        self._rows = np.arange(size, dtype=np.int64)
        self._hidden = ort.empty_aligned((size, model.hidden_size), np.float32)
        self._base_logits = ort.empty_aligned((size, model.vocab_size), np.float32)
        self._token = np.zeros(1, np.int64)
        self._logits = ort.empty_aligned((1, model.vocab_size), np.float32)
        self._confidence = np.ones(1, np.float32)
        # The Markov part bound to each slot's rows, made on first use.
        self.chain: dict[int, ort.Binding] = {}

    def run(self, anchor: int, start: int, count: int) -> None:
        """The pass over all slots; ``count`` of them get logits. ``anchor``, at ``start``, is the last token so far."""
        self._ids[0, 0] = anchor
        self._positions[0] = np.arange(start, start + self._positions.size)
        inputs: Arrays = {"input_ids": self._ids, "position_ids": self._positions, "logit_rows": self._rows[:count]}
        outputs = {"slot_hidden": self._hidden[:count], "base_logits": self._base_logits[:count]}
        self._drafter.bind("drafter_block", inputs | self._drafter.context(start), outputs).run()

    def slot(self, slot: int, before: int) -> tuple[Float32, float]:
        """Logits [V] of a slot after the token before it (valid until the next), and the confidence in it."""
        if slot not in self.chain:
            rows = slice(slot, slot + 1)
            inputs: Arrays = {
                "token_id": self._token,
                "base_logits": self._base_logits[rows],
                "slot_hidden": self._hidden[rows],
            }
            outputs = {"logits": self._logits}
            if self._drafter.record.has_confidence:
                outputs["confidence"] = self._confidence
            self.chain[slot] = self._drafter.bind("drafter_markov", inputs, outputs)
        self._token[0] = before
        self.chain[slot].run()
        return self._logits[0], float(self._confidence[0])
