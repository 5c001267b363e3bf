"""Draft, price, verify: the tokens that come next, from one pass of the target over a token and its drafts.

It knows the runner's steps, a drafter and the clock; neither text nor when a generation ends but by its end tokens.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lesonnx.runner import LayerReader, Runner
from lesonnx.sampling import Sampler
from lesonnx.speculative.drafter import MAX_DRAFT_TOKENS, NO_DRAFT, Draft, Drafter, DraftSampler
from lesonnx.speculative.pricing import Pricing
from lesonnx.speculative.verify import Verified, verify


@dataclass
class DraftCounts:
    """The drafts of a generation, by position: how many were verified, and how many of them were right.

    ``drafted[j]`` counts the drafts that had a slot j, ``judged[j]`` those of which all slots before j were right, so
    that ``accepted[j] / judged[j]`` is the acceptance at j. ``passes``: with drafts; ``draft_ms``: what a drafter took
    that is not free.
    """

    drafted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    judged: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    passes: int = 0
    draft_ms: float = 0.0

    def count(self, drafted: int, accepted: int) -> None:
        """A pass that verified so many drafts."""
        self.passes += 1
        for slot in range(drafted):
            self.drafted[slot] += 1
            self.judged[slot] += slot <= accepted
            self.accepted[slot] += slot < accepted


class Speculator:
    """Gives a sequence's next tokens, several at once where drafts are right. Not thread-safe.

    Owns the drafter and what was measured, which outlives a sequence; the runner is the caller's.
    """

    def __init__(self, runner: Runner, drafter: Drafter, pricing: Pricing | None = None) -> None:
        self.runner = runner
        self.drafter = drafter
        self.pricing = pricing or Pricing()
        runner.takes_drafts = True
        if isinstance(drafter, LayerReader):
            runner.layer_reader = drafter
        self.counts = DraftCounts()
        self._sequence: list[int] = []
        self._sampler: Sampler | None = None
        self._draft_sampler: DraftSampler | None = None
        # A draft that was not verified: its first token, held against the next one.
        self._unverified = NO_DRAFT

    def close(self) -> None:
        """Free the drafter."""
        self.drafter.close()

    def begin(self, prompt_ids: Sequence[int], num_kept: int, sampler: Sampler) -> DraftCounts:
        """A generation from a prompt begins; the runner keeps ``num_kept`` tokens of its sequence. Gives its counts."""
        self.counts = DraftCounts()
        self._sequence = list(prompt_ids)
        self._sampler, self._draft_sampler = sampler, DraftSampler(sampler)
        self._unverified = NO_DRAFT
        self.drafter.rewind(num_kept)
        return self.counts

    def next(self, token: int, most: int, ends: Collection[int]) -> Verified:
        """The tokens after ``token``, the latest one, which the target has not run: at least one, at most ``most``.

        Ends behind one of ``ends``. Afterwards the target has run ``token`` and those that were drafted.
        """
        sampler, draft_sampler = self._sampler, self._draft_sampler
        if sampler is None or draft_sampler is None:
            raise ValueError("next before begin")
        if self._unverified.token_ids:
            self._judge_unverified(token)
        self._sequence.append(token)
        pricing, drafter = self.pricing, self.drafter
        draft, draft_us = NO_DRAFT, None
        room = min(most - 1, drafter.max_tokens)
        asked = self._ask(room)
        if asked > 0 and drafter.is_free:
            draft = drafter.propose(self._sequence, asked, draft_sampler)
        elif asked > 0:
            began = time.perf_counter_ns()
            draft = drafter.propose(self._sequence, asked, draft_sampler)
            draft_us = (time.perf_counter_ns() - began) // 1000
            self.counts.draft_ms += draft_us / 1e3
        length, new_bytes = self._choose(draft) if draft.token_ids and pricing.may_draft else (0, [])
        return self._run(token, draft, length, sampler, ends, draft_us, new_bytes)

    def _ask(self, room: int) -> int:
        """How many tokens to have drafted. What a pass would read is looked at where it pays to draft without reads."""
        pricing, is_free = self.pricing, self.drafter.is_free
        if is_free or room < 1 or not pricing.may_draft:
            return pricing.ask(room, is_free, ())
        asked = pricing.ask(room, is_free, ())
        return pricing.ask(room, is_free, self._new_bytes(room)) if asked and self._streams else asked

    def _choose(self, draft: Draft) -> tuple[int, Sequence[int]]:
        """How many of a draft's tokens to verify, and what each row of that pass is expected to read."""
        drafted, confidence, is_drawn = len(draft.token_ids), draft.confidence, draft.probabilities is not None
        length = self.pricing.choose(drafted, confidence, self.drafter.is_free, is_drawn, ())
        if not length or not self._streams:
            return length, ()
        new_bytes = self._new_bytes(drafted)
        return self.pricing.choose(drafted, confidence, self.drafter.is_free, is_drawn, new_bytes), new_bytes

    @property
    def _streams(self) -> bool:
        return not self.runner.loader.keeps_all

    def _new_bytes(self, num_drafts: int) -> list[int]:
        return self.runner.loader.expected_new_bytes(num_drafts + 1)

    def _run(
        self,
        token: int,
        draft: Draft,
        length: int,
        sampler: Sampler,
        ends: Collection[int],
        draft_us: int | None,
        new_bytes: Sequence[int],
    ) -> Verified:
        """One pass over the token and ``length`` drafts, and what it gives."""
        runner, telemetry = self.runner, self.runner.loader.telemetry
        if length:
            runner.prepare_drafts(length + 1)
        stall_ms, read_bytes = telemetry.stall_ms, telemetry.read_bytes
        began = time.perf_counter_ns()
        if length:
            drafted = list(draft.token_ids[:length])
            logits = runner.step([token, *drafted], range(length + 1), length)
            verified = verify(draft, logits, sampler, ends)
            runner.keep(1 + verified.accepted)
            # Behind an end token nothing was judged.
            judged = min(length, len(verified.token_ids))
            self.counts.count(judged, verified.accepted)
            self.pricing.judge(judged, verified.accepted, draft.confidence)
            self._sequence += verified.token_ids[: verified.accepted]
        else:
            logits = runner.step([token], [0])
            verified = Verified([sampler.sample(logits[0])], 0)
            self._unverified = draft
        pass_us = (time.perf_counter_ns() - began) // 1000
        stall_us = int((telemetry.stall_ms - stall_ms) * 1e3)
        read = telemetry.read_bytes - read_bytes
        new_tokens = len(verified.token_ids)
        self.pricing.passed(length + 1, pass_us, stall_us, read, new_bytes, new_tokens, draft_us)
        return verified

    def _judge_unverified(self, token: int) -> None:
        """The token that came without drafts tells whether the draft's first one would have been right."""
        self.pricing.judge(1, int(self._unverified.token_ids[0] == token), self._unverified.confidence)
        self._unverified = NO_DRAFT
