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

# Tokens of a stretch with drafts or without.
STRETCH = 32


class WatchedPricing(Pricing):
    """Notes of every pass its rows and how many experts its layers required. While it is paused it learns nothing."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self.is_paused = False
        self.forget()

    def forget(self) -> None:
        """Begin anew: what was noted is forgotten, what was learned is not."""
        self._required = _required(self._scheduler)
        self.experts: dict[int, list[int]] = {}

    def passed(self, rows: int, *measured: Any) -> None:
        if self.is_paused:
            return
        super().passed(rows, *measured)
        before, self._required = self._required, _required(self._scheduler)
        self.experts.setdefault(rows, []).append(self._required - before)


def _required(scheduler: Scheduler) -> int:
    counters = scheduler.counters
    return counters.hits + counters.late + counters.misses


@dataclass
class Turn:
    """Stretches of one kind, with drafts or without, added up: what they took and read.

    ``counts`` and ``experts`` (of passes by rows) with drafts only.
    """

    seconds: float = 0.0
    tokens: int = 0
    read_bytes: int = 0
    counts: list[DraftCounts] = field(default_factory=list)
    experts: dict[int, list[int]] = field(default_factory=dict)

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens

    @property
    def bytes_per_token(self) -> float:
        return self.read_bytes / self.tokens


@dataclass(frozen=True)
class Task:
    """What is decoded: a prompt, so many tokens as a warm-up and so many measured; a sampler a run. Owns nothing."""

    prompt_ids: Sequence[int]
    warmup_tokens: int
    tokens: int
    sampler: Callable[[], Sampler]
    drafter: Drafter


def measure(runner: Runner, task: Task, rounds: int) -> dict[str, Any]:
    """Stretches without and with drafts take turns along one sequence, so what slows the machine slows both.

    A round is two runs, of which the second drafts where the first did not. Gives a row's figures.
    """
    runner.rewind(0)
    runner.layer_reader = None
    sampler = task.sampler()
    token = sampler.sample(runner.prefill(task.prompt_ids))
    sampler.accept(token)
    plain_ids = run_tokens(runner, None, sampler, token, task.warmup_tokens + task.tokens)
    plain, drafted = [], []
    same_tokens = True
    for _ in range(rounds):
        turns = Turn(), Turn()
        for drafts_first in (False, True):
            token_ids = decode(runner, task, drafts_first, turns)
            same_tokens &= all(ours == theirs for ours, theirs in zip(token_ids, plain_ids, strict=False))
        plain.append(turns[0])
        drafted.append(turns[1])
    shapes = runner.loader.scheduler.layers
    row_experts = sum(shape.num_experts_per_tok + (shape.shared_cost_bytes > 0) for shape in shapes)
    return figures(plain, drafted, row_experts) | {"same_tokens": same_tokens}


def decode(runner: Runner, task: Task, drafts_first: bool, turns: tuple[Turn, Turn]) -> list[int]:
    """One run from the prompt, added to turns without and with drafts; gives its tokens.

    The warm-up drafts, which teaches the pricing; stretches without drafts teach it nothing, as if they were not there.
    A drafter that reads layers reads them throughout, so what that costs is on both sides.
    """
    sampler = task.sampler()
    runner.rewind(0)
    runner.layer_reader = None
    pricing = WatchedPricing(runner.loader.scheduler)
    speculator = Speculator(runner, task.drafter, pricing)
    speculator.begin(task.prompt_ids, 0, sampler)
    token = sampler.sample(runner.prefill(task.prompt_ids))
    sampler.accept(token)
    token_ids = run_tokens(runner, speculator, sampler, token, task.warmup_tokens)
    end = len(token_ids) + task.tokens
    drafts = drafts_first
    telemetry = runner.loader.telemetry
    while len(token_ids) < end:
        pricing.forget()
        pricing.is_paused = not drafts
        speculator.counts = DraftCounts()
        read_bytes, begun = telemetry.read_bytes, len(token_ids)
        began = time.perf_counter()
        until = min(begun + STRETCH, end)
        while len(token_ids) < until:
            # The last draft of a stretch may lead beyond it: none is cut short for the sake of measuring.
            coming = speculator.next(token_ids[-1], end - len(token_ids) if drafts else 1, ()).token_ids
            token_ids += coming
            sampler.accept_all(coming)
        turn = turns[drafts]
        turn.seconds += time.perf_counter() - began
        turn.tokens += len(token_ids) - begun
        turn.read_bytes += telemetry.read_bytes - read_bytes
        if drafts:
            turn.counts.append(speculator.counts)
            for rows, passes in pricing.experts.items():
                turn.experts.setdefault(rows, []).extend(passes)
        drafts = not drafts
    return token_ids


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
    """A row from its rounds; ``row_experts``: how many experts one row requires, of all layers."""
    counts = [one for turn in drafted for one in turn.counts]
    by_slot = {
        name: [sum(column) for column in zip(*(getattr(one, name) for one in counts), strict=True)] for name in COUNTS
    }
    judged, accepted = sum(by_slot["judged"]), sum(by_slot["accepted"])
    experts: dict[int, list[int]] = {}
    for turn in drafted:
        for rows, passes in turn.experts.items():
            experts.setdefault(rows, []).extend(passes)
    num_passes = sum(len(of_width) for of_width in experts.values())
    ratios = [without.seconds_per_token / turn.seconds_per_token for without, turn in zip(plain, drafted, strict=True)]
    return {
        "acceptance": accepted / judged if judged else None,
        "acceptance_by_position": [
            right / count if count else None
            for right, count in zip(by_slot["accepted"], by_slot["judged"], strict=True)
        ],
        "ratio": median(ratios),
        "ratios": ratios,
        "tokens_per_s": 1 / mean(turn.seconds_per_token for turn in drafted),
        "plain_tokens_per_s": 1 / mean(turn.seconds_per_token for turn in plain),
        "tokens_per_pass": (num_passes + accepted) / num_passes,
        "drafted": sum(by_slot["drafted"]),
        "accepted": accepted,
        "passes_with_drafts": sum(one.passes for one in counts),
        "draft_ms": sum(one.draft_ms for one in counts) / len(drafted),
        "bytes_per_token": mean(turn.bytes_per_token for turn in drafted),
        "plain_bytes_per_token": mean(turn.bytes_per_token for turn in plain),
        "union": {rows: mean(of_width) / row_experts for rows, of_width in sorted(experts.items())},
    }


COUNTS = ("drafted", "judged", "accepted")
