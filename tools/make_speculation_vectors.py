"""Write ``tests/data/speculation.json``: the vectors that the Python, Kotlin and Swift speculators must reproduce.

Usage: ``python tools/make_speculation_vectors.py [FILE]``. The same file every time: all randomness is PCG32's.

``ngram``: cases of calls; a call appends ``tokens`` to the sequence (or first rewinds it to ``rewind`` tokens) and
proposes. ``draft_sampler`` and ``verify``: logits are made from a PCG32 (``logits_seed``, stream 1), row by row, logit
= (next_u32() >> 17) / 2048 - 8; ``accept`` is accepted first. A verify case has its draft in full, what must come of it
and the next 32 bits of the target's random numbers. ``pricing``: one Pricing a case; a turn calls ``ask`` (gives
``asked``), ``choose`` (``chosen``), ``passed`` with rows = chosen + 1, and ``judge`` where ``judged`` is not 0; then
``odds`` is [slot, odds by position], ``confidence_odds`` [confidence, odds], ``expected_us`` [rows, extra bytes, us].
``new_bytes``: what ``Scheduler.expected_new_bytes(rows)`` gives
after a golden trace has been replayed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from golden_traces import answer, make_scheduler  # noqa: E402  (the tests' own reader of traces)

from lesonnx.eviction import ONE  # noqa: E402
from lesonnx.sampling import Logits, Pcg32, Sampler, SamplingOptions  # noqa: E402
from lesonnx.speculative.drafter import Draft, DraftSampler  # noqa: E402
from lesonnx.speculative.ngram import NgramDrafter  # noqa: E402
from lesonnx.speculative.pricing import Pricing  # noqa: E402
from lesonnx.speculative.verify import verify  # noqa: E402

DEFAULT_FILE = ROOT / "tests" / "data" / "speculation.json"
LOGITS_STREAM = 1
VOCAB_SIZE = 24
NEW_BYTES_ROWS = 8


def made_logits(random: Pcg32) -> Logits:
    """Logits [V]: multiples of 1/2048 in [-8, 8)."""
    return np.array([(random.next_u32() >> 17) / 2048 - 8 for _ in range(VOCAB_SIZE)], np.float32)


# -- ngram -------------------------------------------------------------------------------------------------------------


def ngram_cases() -> Iterator[dict[str, Any]]:
    random = Pcg32(21, LOGITS_STREAM)
    words = [[random.next_u32() % 40 for _ in range(2 + random.next_u32() % 6)] for _ in range(12)]
    text = [token for _ in range(40) for token in words[random.next_u32() % len(words)]]
    cuts = [0, *sorted({random.next_u32() % len(text) for _ in range(24)}), len(text)]
    plans: dict[str, list[dict[str, Any]]] = {
        "nothing": [{"tokens": [], "max_tokens": 4}, {"tokens": [5], "max_tokens": 4}],
        "no pair twice": [{"tokens": [1, 2, 3, 1, 3, 2, 1], "max_tokens": 4}],
        "most recent of equals": [{"tokens": [1, 2, 7, 1, 2, 8, 1, 2], "max_tokens": 2}],
        "longest before most recent": [{"tokens": [9, 1, 2, 7, 5, 1, 2, 8, 9, 1, 2], "max_tokens": 3}],
        "a period goes on": [{"tokens": [4, 1, 2, 3, 1, 2, 3], "max_tokens": 8}, {"tokens": [1], "max_tokens": 15}],
        "one token over and over": [{"tokens": [6] * 30, "max_tokens": 15}],
        "token by token": [{"tokens": [token], "max_tokens": 3} for token in [1, 2, 3, 9, 1, 2, 3, 9, 1, 2]],
        "rewound": [
            {"tokens": [1, 2, 3, 4, 1, 2], "max_tokens": 2},
            {"rewind": 4, "tokens": [3, 4], "max_tokens": 2},
            {"rewind": 0, "tokens": [8, 9, 5, 8, 9], "max_tokens": 2},
        ],
        "beyond the candidates": [
            {"tokens": [3, 1, 2, 70] + [t for n in range(16) for t in (1, 2, 10 + n)] + [3, 1, 2], "max_tokens": 1}
        ],
        "no tokens asked for": [{"tokens": [1, 2, 1, 2], "max_tokens": 0}],
        "a text": [{"tokens": text[one:other], "max_tokens": 15} for one, other in pairwise(cuts)],
    }
    for name, calls in plans.items():
        drafter, sequence = NgramDrafter(), list[int]()
        sampler = DraftSampler(Sampler(SamplingOptions()))
        for call in calls:
            if "rewind" in call:
                del sequence[call["rewind"] :]
                drafter.rewind(call["rewind"])
            sequence += call["tokens"]
            draft = drafter.propose(sequence, call["max_tokens"], sampler)
            call["draft"], call["confidence"] = list(draft.token_ids), list(draft.confidence or ())
        yield {"name": name, "calls": calls}


# -- draws -------------------------------------------------------------------------------------------------------------


def draft_sampler_cases() -> Iterator[dict[str, Any]]:
    options: list[tuple[str, dict[str, Any]]] = [
        ("greedy", {"repetition_penalty": 1.5}),
        ("temperature", {"temperature": 1.0, "seed": 3}),
        ("filtered", {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 2**63 + 5}),
    ]
    for number, (name, chosen) in enumerate(options):
        sampler = Sampler(SamplingOptions(**chosen))
        sampler.accept_all([1, 2, 3])
        draft_sampler, tokens = DraftSampler(sampler), []
        random = Pcg32(40 + number, LOGITS_STREAM)
        for _ in range(3):
            with draft_sampler:
                tokens.append([draft_sampler.choose(made_logits(random))[0] for _ in range(5)])
        # The target's random numbers and what its penalty has seen are as before.
        token = sampler.sample(made_logits(random))
        yield {
            "name": name,
            "options": chosen,
            "accept": [1, 2, 3],
            "logits_seed": 40 + number,
            "drafts": tokens,
            "then": token,
        }


def verify_cases() -> Iterator[dict[str, Any]]:
    greedy, warm = {"repetition_penalty": 1.4}, {"temperature": 1.0, "seed": 7}
    tight = {"temperature": 1.6, "top_k": 8, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 8}
    # Name, options, draft tokens, whether the draft was drawn, how far its logits are from the target's, ends.
    plans: list[tuple[str, dict[str, Any], int, bool, float, bool]] = [
        ("nothing drafted", warm, 0, False, 0, False),
        ("greedy, all right", greedy, 5, False, 0, False),
        ("greedy, some right", greedy, 5, False, 1.5, False),
        ("greedy, an end inside", greedy, 5, False, 0, True),
        ("sampled, chosen drafts", warm, 5, False, 0, False),
        ("sampled, drawn, q is p", warm, 6, True, 0, False),
        ("sampled, drawn, near", warm, 6, True, 0.5, False),
        ("sampled, drawn, far", warm, 6, True, 4, False),
        ("filtered, drawn, near", tight, 6, True, 0.5, False),
        ("filtered, drawn, far", tight, 6, True, 4, False),
        ("drawn, an end inside", warm, 6, True, 0, True),
    ]
    for number, (name, options, length, is_drawn, distance, ends_inside) in enumerate(plans):
        for repeat in range(4 if is_drawn else 1):
            seed = 100 + 10 * number + repeat
            chosen = options | ({"seed": seed} if "seed" in options else {})
            random, noise = Pcg32(seed, LOGITS_STREAM), Pcg32(seed, 2)
            logits = np.stack([made_logits(random) for _ in range(length + 1)])
            sampler = Sampler(SamplingOptions(**chosen))
            sampler.accept_all([0, 1, 2, 2])
            token_ids, distributions = [], []
            with DraftSampler(sampler) as draft_sampler:
                for row in logits[:length]:
                    moved = row + np.float32(distance) * made_logits(noise) / np.float32(8)
                    token, distribution = draft_sampler.choose(moved.astype(np.float32))
                    token_ids.append(token)
                    distributions.append(distribution)
            drawn = [pair for pair in distributions if pair is not None] if is_drawn else None
            ends = token_ids[2:3] if ends_inside else []
            found = verify(Draft(token_ids, drawn), logits, sampler, ends)
            yield {
                "name": f"{name} {repeat}",
                "options": chosen,
                "accept": [0, 1, 2, 2],
                "logits_seed": seed,
                "draft": token_ids,
                "probabilities": drawn and [[ids.tolist(), q.tolist()] for ids, q in drawn],
                "ends": ends,
                "token_ids": found.token_ids,
                "accepted": found.accepted,
                "next_u32": sampler.rng.next_u32(),
            }


# -- pricing -----------------------------------------------------------------------------------------------------------


class World:
    """A machine and a drafter, seeded: what a pass costs and how often a slot is right. All integers."""

    def __init__(self, seed: int, row_share: int, odds: int, kib: int, is_free: bool, is_drawn: bool) -> None:
        self.random = Pcg32(seed, LOGITS_STREAM)
        self.row_share, self.odds, self.kib, self.is_free, self.is_drawn = row_share, odds, kib, is_free, is_drawn

    def below(self, limit: int) -> int:
        return self.random.next_u32() % limit

    def turns(self, count: int) -> Iterator[dict[str, Any]]:
        """A token of the sequence each: what is asked, chosen, measured and judged, and what is then known."""
        pricing = Pricing()
        for number in range(count):
            # In the middle the drafter turns good or bad, at two thirds the machine turns slow.
            odds = self.odds if number < count // 2 else ONE - self.odds
            slow = 3 if number > 2 * count // 3 else 1
            most = 1 + self.below(8 if number % 8 else 15)
            new_bytes = [self.kib * 1024 * (20 - row) // 20 + self.below(4096) for row in range(most + 1)]
            turn: dict[str, Any] = {"most": most, "new_bytes": new_bytes, "may_draft": pricing.may_draft}
            turn["asked"] = asked = pricing.ask(most, self.is_free, new_bytes)
            drafted = min(asked, 1 + self.below(15)) if asked and self.below(4) else 0
            confidence = [min(ONE, odds + 300 * slot + self.below(700)) for slot in range(drafted)]
            turn["drafted"], turn["confidence"] = drafted, confidence if number % 3 else None
            length = pricing.choose(drafted, turn["confidence"], self.is_free, self.is_drawn, new_bytes)
            accepted = 0
            while accepted < length and self.below(ONE) < odds:
                accepted += 1
            stall_us = slow * (sum(new_bytes[: length + 1]) >> 7) + self.below(50)
            hiccup_us = 20000 * (self.below(25) == 0)
            pass_us = slow * (2000 + self.row_share * length) + stall_us + self.below(200) + hiccup_us
            draft_us = None if self.is_free or not asked else 300 + self.below(100)
            read_bytes = sum(new_bytes[: length + 1])
            pricing.passed(length + 1, pass_us, stall_us, read_bytes, new_bytes, accepted + 1, draft_us)
            turn |= {"chosen": length, "pass_us": pass_us, "stall_us": stall_us, "read_bytes": read_bytes}
            turn |= {"new_tokens": accepted + 1, "draft_us": draft_us}
            # What was drafted and not verified is held against the token that came: its first slot.
            turn["judged"] = judged = length or min(drafted, 1)
            turn["accepted"] = accepted if length else int(bool(drafted) and self.below(ONE) < odds)
            if judged:
                pricing.judge(judged, turn["accepted"], turn["confidence"])
            slot, rows, extra, bin_value = self.below(15), 1 + self.below(16), self.below(1 << 20), self.below(ONE + 1)
            turn["odds"] = [slot, pricing.acceptance.odds(slot, None)]
            turn["confidence_odds"] = [bin_value, pricing.acceptance.odds(0, [bin_value])]
            turn["expected_us"] = [rows, extra, pricing.times.pass_us(rows, extra)]
            yield turn


def pricing_cases() -> Iterator[dict[str, Any]]:
    worlds = {
        "free drafts, cheap rows": World(1, 100, ONE * 3 // 4, 0, True, False),
        "free drafts, dear rows": World(2, 1900, ONE // 2, 0, True, False),
        "streaming": World(3, 150, ONE * 4 // 5, 16, True, False),
        "streaming, drawn": World(4, 150, ONE * 4 // 5, 16, False, True),
        "a drafter that costs": World(5, 200, ONE // 5, 4, False, False),
    }
    for name, world in worlds.items():
        turns = list(world.turns(150))
        yield {"name": name, "is_free": world.is_free, "is_drawn": world.is_drawn, "turns": turns}


def new_bytes_cases() -> Iterator[dict[str, Any]]:
    for path in sorted((ROOT / "tests" / "data" / "traces").glob("*.json")):
        trace = json.loads(path.read_text(encoding="utf-8"))
        scheduler = make_scheduler(trace)
        for event in trace["events"]:
            answer(scheduler, event)
        yield {"trace": path.name, "rows": NEW_BYTES_ROWS, "result": scheduler.expected_new_bytes(NEW_BYTES_ROWS)}


def vectors() -> dict[str, Any]:
    """All of the file."""
    return {
        "format": 1,
        "vocab_size": VOCAB_SIZE,
        "ngram": list(ngram_cases()),
        "draft_sampler": list(draft_sampler_cases()),
        "verify": list(verify_cases()),
        "pricing": list(pricing_cases()),
        "new_bytes": list(new_bytes_cases()),
    }


def main(path: Path) -> None:
    """Write the vectors, a case a line."""
    lines = []
    for name, value in vectors().items():
        if isinstance(value, list):
            cases = ",\n".join(json.dumps(case, separators=(",", ":")) for case in value)
            lines.append(f"{json.dumps(name)}: [\n{cases}\n]")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FILE)
