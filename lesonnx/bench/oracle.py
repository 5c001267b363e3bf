"""Drafts of a stated acceptance where no drafter can be right: an oracle that knows what plain decoding gives.

For a model of random weights whose routing comes from a trace. It knows the sequence that will come, and tells the
routing which rows of a pass are right: these route as the trace goes on, the others as some other place of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lesonnx.bench.routing import Ids, TraceRouting
from lesonnx.runner import Runner
from lesonnx.sampling import Logits, Sampler, SamplingOptions
from lesonnx.speculative.drafter import MAX_DRAFT_TOKENS, Draft, DraftSampler


class KnownSampler(Sampler):
    """Chooses greedily and then gives the token that is known to come, as soon as one is: rounding decides nothing.

    ``known``: the tokens behind the prompt so far; what is chosen beyond them is added.
    """

    def __init__(self, known: list[int], prompt_ids: Sequence[int]) -> None:
        super().__init__(SamplingOptions())
        self._known = known
        self._place = -len(prompt_ids)
        self.accept_all(prompt_ids)

    def accept(self, token: int) -> None:
        self._place += 1
        super().accept(token)

    def retract(self, token: int) -> None:
        self._place -= 1
        super().retract(token)

    def sample(self, logits: Logits) -> int:
        token = super().sample(logits)
        if self._place == len(self._known):
            self._known.append(token)
        return self._known[self._place]


class OracleDrafter:
    """Proposes each known token with probability ``acceptance``, else another one; seeded by place, not by call."""

    name = "oracle"
    max_tokens = MAX_DRAFT_TOKENS
    is_free = True
    layer_idxs: tuple[int, ...] = ()

    def __init__(self, known: list[int], num_prompt_tokens: int, acceptance: float, vocab_size: int) -> None:
        self._known, self._first = known, num_prompt_tokens
        self._vocab_size = vocab_size
        self._is_right = np.random.default_rng(0).random(1 << 16) < acceptance

    def propose(self, token_ids: Sequence[int], max_tokens: int, sampler: DraftSampler) -> Draft:
        """What comes after ``token_ids``, as far as it is known."""
        begin = len(token_ids) - self._first
        tokens = self._known[begin : begin + max_tokens]
        right = self._is_right[begin : begin + len(tokens)]
        return Draft(
            [token if good else (token + 1) % self._vocab_size for token, good in zip(tokens, right, strict=True)]
        )

    def num_right(self, position: int, num_drafts: int) -> int:
        """How many of the drafts behind the token at ``position`` of the sequence are right, from the first on."""
        begin = position + 1 - self._first
        right = self._is_right[begin : begin + num_drafts]
        return num_drafts if right.all() else int(np.argmin(right))

    def observe(self, position: int, layer_outputs: NDArray[np.float32]) -> None:
        """Never called: it reads no layers."""

    def rewind(self, num_tokens: int) -> None:
        """Nothing to forget: it goes by places."""

    def close(self) -> None:
        """Nothing to free."""


class DraftedRouting(TraceRouting):
    """The trace by places of the runner's sequence, which goes back behind rejected drafts.

    A row is at its place of the trace if all drafts up to it are right, else half a trace away.
    """

    def __init__(
        self, steps: Ids, num_experts: int, recall: float, runner: Runner, oracle: OracleDrafter | None
    ) -> None:
        super().__init__(steps, num_experts, recall)
        self._runner = runner
        self.oracle = oracle

    def begin_step(self, num_rows: int) -> None:
        """The rows of the runner's next step."""
        position, count = self._runner.num_tokens, len(self._steps)
        right = num_rows - 1 if self.oracle is None else self.oracle.num_right(position, num_rows - 1)
        self._rows = [(position + row + (count // 2 if row > right else 0)) % count for row in range(num_rows)]
