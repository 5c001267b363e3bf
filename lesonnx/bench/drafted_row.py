"""A row of the ladder that drafts: the full system. With a trace an oracle drafts, for want of a text.

It knows runner, speculator and a row's spec; the tokens are counted as any row's.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from lesonnx.bench.drafting import run_tokens
from lesonnx.bench.oracle import DraftedRouting, KnownSampler, OracleDrafter
from lesonnx.bundle import Bundle
from lesonnx.errors import InputError
from lesonnx.runner import Runner
from lesonnx.sampling import Sampler, SamplingOptions
from lesonnx.speculative.drafter import MAX_DRAFT_TOKENS, Drafter
from lesonnx.speculative.drafters import make_drafter
from lesonnx.speculative.speculator import DraftCounts, Speculator

ORACLE = "oracle"


def measure_drafted(
    runner: Runner, bundle: Bundle, draft: str, prompt_ids: list[int], warmup_tokens: int, tokens: int
) -> tuple[float, list[int], dict[str, Any]]:
    """Greedy decoding with a drafter: seconds of the tokens after the warm-up, all ids, figures of drafts."""
    drafter = make_drafter(draft, bundle)
    if drafter is None:
        raise InputError(f"a row drafts with {draft}: expected a drafter")
    sampler = Sampler(SamplingOptions())
    sampler.accept_all(prompt_ids)
    return _measure(runner, drafter, sampler, prompt_ids, warmup_tokens, tokens)


def measure_oracle(
    runner: Runner,
    bundle: Bundle,
    steps: list[list[list[int]]],
    recall: float,
    acceptance: float,
    prompt_ids: list[int],
    warmup_tokens: int,
    tokens: int,
) -> tuple[float, list[int], dict[str, Any]]:
    """The same on routing steps [steps][layers][k]. Weights are random, so any tokens will do: they are stated."""
    model = bundle.manifest.model
    count = warmup_tokens + tokens + MAX_DRAFT_TOKENS + 2
    known = [place * 7919 % model.vocab_size for place in range(count)]
    oracle = OracleDrafter(known, len(prompt_ids), acceptance, model.vocab_size)
    runner.routing = DraftedRouting(np.array(steps, np.int64), model.num_experts, recall, runner, oracle)
    return _measure(runner, oracle, KnownSampler(known, prompt_ids), prompt_ids, warmup_tokens, tokens)


def _measure(
    runner: Runner, drafter: Drafter, sampler: Sampler, prompt_ids: list[int], warmup_tokens: int, tokens: int
) -> tuple[float, list[int], dict[str, Any]]:
    speculator = Speculator(runner, drafter)
    speculator.begin(prompt_ids, 0, sampler)
    token = sampler.sample(runner.prefill(prompt_ids))
    sampler.accept(token)
    token_ids = run_tokens(runner, speculator, sampler, token, warmup_tokens)
    runner.loader.reset_telemetry()
    speculator.counts = counts = DraftCounts()
    began = time.perf_counter()
    token_ids += run_tokens(runner, speculator, sampler, token_ids[-1], tokens)[1:]
    seconds = time.perf_counter() - began
    judged, accepted = sum(counts.judged), sum(counts.accepted)
    speculator.close()
    return seconds, token_ids, {"acceptance": accepted / judged if judged else None, "accepted_drafts": accepted}
