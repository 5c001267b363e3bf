"""How good a bundle's DSpark drafter is: acceptance by slot, its confidence before and after calibration, its cost.

    python tools/measure_drafter.py BUNDLE TEXT...

Generates greedily after pieces of the texts, a whole block drafted and verified every pass, whatever it costs: whether
drafting pays, `lesonnx bench speculate` measures. Calibration is what drafting uses: it learns pass by pass, and each
pass is judged by what was known before it. The expected calibration error is the mean distance of stated and found
acceptance over 16 bins of the stated, weighted by their drafts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import lesonnx
from lesonnx.eviction import ONE
from lesonnx.model import Model
from lesonnx.sampling import Sampler, SamplingOptions
from lesonnx.speculative.acceptance import Acceptance
from lesonnx.speculative.drafter import DraftSampler
from lesonnx.speculative.dspark import DSparkDrafter

BINS = 16
PROMPT_TOKENS, NEW_TOKENS = 64, 64


@dataclass
class Drafts:
    """Every pass: confidences [B] of `ONE` and how many drafts were accepted; milliseconds of drafts and steps."""

    confidence: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_ms: list[float] = field(default_factory=list)
    pass_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)


def generate(model: Model, drafter: DSparkDrafter, prompt_ids: list[int], drafts: Drafts) -> None:
    """One generation, a block drafted every pass; then as many plain steps, for what they take."""
    runner, sampler = model.runner, DraftSampler(Sampler(SamplingOptions()))
    runner.rewind(0)
    sequence = [*prompt_ids, int(np.argmax(runner.prefill(prompt_ids)))]
    while len(sequence) < len(prompt_ids) + NEW_TOKENS:
        began = time.perf_counter()
        draft = drafter.propose(sequence, drafter.max_tokens, sampler)
        drafted = time.perf_counter()
        rows = runner.step([sequence[-1], *draft.token_ids], list(range(len(draft.token_ids) + 1)))
        ended = time.perf_counter()
        chosen = np.argmax(rows, axis=-1).tolist()
        right = [ours == theirs for ours, theirs in zip(draft.token_ids, chosen, strict=False)]
        accepted = right.index(False) if False in right else len(right)
        runner.rewind(len(sequence) + accepted)
        sequence += chosen[: accepted + 1]
        drafts.accepted.append(accepted)
        drafts.confidence.append(list(draft.confidence or []))
        drafts.draft_ms.append((drafted - began) * 1e3)
        drafts.pass_ms.append((ended - drafted) * 1e3)
    runner.rewind(len(prompt_ids))
    for token in sequence[len(prompt_ids) :][: NEW_TOKENS // 4]:
        began = time.perf_counter()
        runner.step([token], [0])
        drafts.step_ms.append((time.perf_counter() - began) * 1e3)


def calibration_error(stated: list[float], right: list[bool]) -> float:
    """The expected calibration error, and 0 of nothing."""
    bins = np.minimum((np.array(stated) * BINS).astype(int), BINS - 1)
    hits, total = np.array(right, float), 0.0
    for number in np.unique(bins):
        chosen = bins == number
        total += chosen.mean() * abs(float(np.mean(np.array(stated)[chosen])) - float(hits[chosen].mean()))
    return float(total)


def report(drafts: Drafts) -> dict[str, object]:
    """All figures. A slot counts where all before it were accepted: behind the first wrong one nothing is known."""
    calibrated, stated, learned, right = Acceptance(), list[float](), list[float](), list[bool]()
    for confidence, accepted in zip(drafts.confidence, drafts.accepted, strict=True):
        for slot in range(min(len(confidence), accepted + 1)):
            stated.append(confidence[slot] / ONE)
            learned.append(calibrated.odds(slot, confidence) / ONE)
            right.append(slot < accepted)
        calibrated.judge(len(confidence), accepted, confidence)
    accepted_array = np.array(drafts.accepted)
    size = max(map(len, drafts.confidence))
    return {
        "passes": len(drafts.accepted),
        "accepted_a_pass": round(float(accepted_array.mean()), 3),
        "accepted_by_slot": [round(float((accepted_array > slot).mean()), 3) for slot in range(size)],
        "calibration_error": round(calibration_error(stated, right), 4) if stated else None,
        "calibration_error_after": round(calibration_error(learned, right), 4) if stated else None,
        "draft_ms": round(statistics.median(drafts.draft_ms), 3),
        "step_ms": round(statistics.median(drafts.step_ms), 3),
        "pass_ms": round(statistics.median(drafts.pass_ms), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path, nargs="+", metavar="TEXT")
    parser.add_argument("--pieces", type=int, default=40, help="Pieces of each text, evenly apart.")
    parser.add_argument("--expert-budget", type=int, help="Most bytes of experts in memory.")
    arguments = parser.parse_args()
    drafts = Drafts()
    with lesonnx.load(arguments.bundle, expert_budget_bytes=arguments.expert_budget) as model:
        drafter = DSparkDrafter(model.bundle)
        model.runner.layer_reader = drafter
        for path in arguments.texts:
            text = path.read_text(encoding="utf-8", errors="replace")
            for piece in range(arguments.pieces):
                start = len(text) * (2 * piece + 1) // (2 * arguments.pieces)
                # The first few tokens may be half a word.
                prompt_ids = model.encode(text[start : start + 16 * PROMPT_TOKENS])[4 : 4 + PROMPT_TOKENS]
                if len(prompt_ids) == PROMPT_TOKENS:
                    generate(model, drafter, prompt_ids, drafts)
        drafter.close()
    print(json.dumps(report(drafts)))


if __name__ == "__main__":
    main()
