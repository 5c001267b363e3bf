"""What drafting is worth: the same tokens with and without it, in turns, on one loaded bundle.

It knows runner, speculator and sampler, neither the command nor its table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from lesonnx.runner import Runner
from lesonnx.sampling import Sampler
from lesonnx.scheduler import Scheduler
from lesonnx.speculative.drafter import Drafter
from lesonnx.speculative.pricing import Pricing
from lesonnx.speculative.speculator import DraftCounts, Speculator


class WatchedPricing(Pricing):
    """Notes of every pass its rows and how many experts its layers required."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self.forget()

    def forget(self) -> None:
        """Begin anew, as the scheduler's counters have."""
        self._required = _required(self._scheduler)
        self.experts: dict[int, list[int]] = {}

    def passed(self, rows: int, *measured: Any) -> None:
        super().passed(rows, *measured)
        before, self._required = self._required, _required(self._scheduler)
        self.experts.setdefault(rows, []).append(self._required - before)


def _required(scheduler: Scheduler) -> int:
    counters = scheduler.counters
    return counters.hits + counters.late + counters.misses


@dataclass
class Turn:
    """One run: its speed and what it read. ``counts`` and ``experts`` (of passes by rows) with drafts only."""

    tokens_per_s: float
    bytes_per_token: float
    token_ids: list[int]
    counts: DraftCounts | None = None
    experts: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What is decoded: a prompt, so many tokens as a warm-up and so many measured; a sampler a run. Owns nothing."""

    prompt_ids: Sequence[int]
    warmup_tokens: int
    tokens: int
    sampler: Callable[[], Sampler]
    drafter: Drafter


def measure(runner: Runner, task: Task, rounds: int) -> dict[str, Any]:
    """Without, with, without, … : ``rounds`` runs with drafts, each between two without. Gives a row's figures."""
    decode(runner, task, drafts=False)
    plain = [decode(runner, task, drafts=False)]
    drafted = []
    for _ in range(rounds):
        drafted.append(decode(runner, task, drafts=True))
        plain.append(decode(runner, task, drafts=False))
    shapes = runner.loader.scheduler.layers
    return figures(plain, drafted, sum(shape.num_experts_per_tok + (shape.shared_cost_bytes > 0) for shape in shapes))


def decode(runner: Runner, task: Task, drafts: bool) -> Turn:
    """One run from the prompt; what is measured begins behind the warm-up, whose drafts teach the pricing."""
    sampler = task.sampler()
    runner.rewind(0)
    runner.layer_reader = None
    speculator: Speculator | None = None
    pricing: WatchedPricing | None = None
    if drafts:
        pricing = WatchedPricing(runner.loader.scheduler)
        speculator = Speculator(runner, task.drafter, pricing)
        speculator.begin(task.prompt_ids, 0, sampler)
    token = sampler.sample(runner.prefill(task.prompt_ids))
    sampler.accept(token)
    token_ids = run_tokens(runner, speculator, sampler, token, task.warmup_tokens)
    runner.loader.reset_telemetry()
    if pricing is not None and speculator is not None:
        pricing.forget()
        speculator.counts = DraftCounts()
    began = time.perf_counter()
    token_ids += run_tokens(runner, speculator, sampler, token_ids[-1], task.tokens)[1:]
    seconds = time.perf_counter() - began
    read_bytes = runner.loader.telemetry.read_bytes
    counts = speculator.counts if speculator else None
    return Turn(task.tokens / seconds, read_bytes / task.tokens, token_ids, counts, pricing.experts if pricing else {})


def run_tokens(runner: Runner, speculator: Speculator | None, sampler: Sampler, token: int, count: int) -> list[int]:
    """``token``, which has not run, and ``count`` tokens behind it."""
    token_ids = [token]
    while (most := count + 1 - len(token_ids)) > 0:
        if speculator is not None:
            coming = speculator.next(token_ids[-1], most, ()).token_ids
        else:
            coming = [sampler.sample(runner.step([token_ids[-1]], [0])[0])]
        token_ids += coming
        sampler.accept_all(coming)
    return token_ids


def figures(plain: Sequence[Turn], drafted: Sequence[Turn], row_experts: int) -> dict[str, Any]:
    """A row from its runs; ``row_experts``: how many experts one row requires, of all layers."""
    counts = [turn.counts for turn in drafted if turn.counts is not None]
    by_slot = {
        name: [sum(column) for column in zip(*(getattr(one, name) for one in counts), strict=True)] for name in COUNTS
    }
    judged, accepted = sum(by_slot["judged"]), sum(by_slot["accepted"])
    experts: dict[int, list[int]] = {}
    for turn in drafted:
        for rows, passes in turn.experts.items():
            experts.setdefault(rows, []).extend(passes)
    speed, plain_speed = (mean(turn.tokens_per_s for turn in turns) for turns in (drafted, plain))
    num_passes = sum(len(of_width) for of_width in experts.values())
    # Of runs beside each other: a machine that gets slower meanwhile does not count as what drafts did.
    ratios = [
        2 * turn.tokens_per_s / (before.tokens_per_s + after.tokens_per_s)
        for before, turn, after in zip(plain, drafted, plain[1:], strict=False)
    ]
    return {
        "acceptance": accepted / judged if judged else None,
        "acceptance_by_position": [
            right / count if count else None
            for right, count in zip(by_slot["accepted"], by_slot["judged"], strict=True)
        ],
        "ratio": median(ratios),
        "ratios": ratios,
        "tokens_per_s": speed,
        "plain_tokens_per_s": plain_speed,
        "tokens_per_pass": (num_passes + accepted) / num_passes,
        "drafted": sum(by_slot["drafted"]),
        "accepted": accepted,
        "passes_with_drafts": sum(one.passes for one in counts),
        "draft_ms": mean(one.draft_ms for one in counts) if counts else 0.0,
        "bytes_per_token": mean(turn.bytes_per_token for turn in drafted),
        "plain_bytes_per_token": mean(turn.bytes_per_token for turn in plain),
        "union": {rows: mean(of_width) / row_experts for rows, of_width in sorted(experts.items())},
        "same_tokens": all(turn.token_ids == plain[0].token_ids for turn in drafted),
    }


COUNTS = ("drafted", "judged", "accepted")
