"""Write ``tests/data/sampling.json``: the golden vectors that the Python, Kotlin and Swift samplers must reproduce.

Usage: ``python tools/make_sampling_vectors.py [FILE]``. The same file every time: all randomness is PCG32's.

Numbers are decimals that a correctly rounding parser turns into the same float64, and logits into the same float32.
``pcg32``: seed, stream and the first outputs. ``exp``: [x, exp_non_positive(x)] pairs. ``cases``: options, tokens to
accept first, and steps; a step samples from its logits, checks the token (and the distribution, where given) and
accepts the token. Where a case has ``vocab_size`` its steps have no logits: each step makes them from one PCG32
(``logits_seed``, stream 1) that goes on from step to step, logit = (next_u32() >> 17) / 2048 - 8.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lesonnx.sampling import Logits, Pcg32, Sampler, SamplingOptions, exp_non_positive

DEFAULT_FILE = Path(__file__).resolve().parent.parent / "tests" / "data" / "sampling.json"
LOGITS_STREAM = 1

CASES: list[tuple[str, dict[str, Any], list[int]]] = [
    ("greedy", {}, []),
    ("greedy with penalty", {"repetition_penalty": 1.3}, [0, 1, 2, 3, 3]),
    ("temperature", {"temperature": 1.0, "seed": 1}, []),
    ("cold", {"temperature": 0.05, "seed": 2}, []),
    ("hot", {"temperature": 3.5, "seed": 3}, []),
    ("top-k", {"temperature": 1.0, "top_k": 5, "seed": 4}, []),
    ("top-p", {"temperature": 1.0, "top_p": 0.8, "seed": 5}, []),
    ("min-p", {"temperature": 1.0, "min_p": 0.1, "seed": 6}, []),
    ("penalty", {"temperature": 0.9, "repetition_penalty": 1.5, "seed": 7}, [4, 5, 6, 7]),
    (
        "all",
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 2**53 - 1},
        [1, 1, 8],
    ),
]
LARGE_CASES: list[tuple[str, dict[str, Any], int]] = [
    ("large, no filter", {"temperature": 1.0, "seed": 11}, 20000),
    ("large, top-p", {"temperature": 1.5, "top_p": 0.95, "seed": 12}, 20000),
    ("large, min-p", {"temperature": 1.2, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 13}, 20000),
    ("large, top-k", {"temperature": 1.0, "top_k": 1000, "top_p": 0.99, "seed": 14}, 20000),
]


def made_logits(random: Pcg32, vocab_size: int) -> Logits:
    """The logits [V] of a step of a large case: multiples of 1/2048 in [-8, 8), with many ties."""
    return np.array([(random.next_u32() >> 17) / 2048 - 8 for _ in range(vocab_size)], np.float32)


def small_logits(random: Pcg32, step: int) -> Logits:
    """Logits [24] of many kinds: full float32 values, coarse ones with ties, excluded ones, zeros of both signs."""
    values = np.array([random.uniform() * 12 - 6 for _ in range(24)], np.float32)
    if step % 3 == 1:
        values = np.round(values)
    if step % 3 == 2:
        values[[3, 9, 21]] = -np.inf
        values[[5, 6]] = [-0.0, 0.0]
    return values


def step_record(sampler: Sampler, logits: Logits, with_distribution: bool) -> dict[str, Any]:
    """What one step must give; the token is accepted."""
    record: dict[str, Any] = {}
    if with_distribution:
        ids, probabilities = sampler.distribution(logits)
        record = {"ids": ids.tolist(), "probabilities": probabilities.tolist()}
    record["token"] = sampler.sample(logits)
    sampler.accept(record["token"])
    return record


def vectors() -> dict[str, Any]:
    """The whole document."""
    document: dict[str, Any] = {"pcg32": [], "exp": [], "cases": []}
    for seed, stream in ((42, 54), (0, 54), (2**53 - 1, 1)):
        random = Pcg32(seed, stream)
        document["pcg32"].append({"seed": seed, "stream": stream, "outputs": [random.next_u32() for _ in range(12)]})
    points = np.concatenate([-np.arange(16) / 7, -np.logspace(-9, np.log10(720), 40), [-700.0, -700.5]])
    document["exp"] = [[float(x), float(y)] for x, y in zip(points, exp_non_positive(points), strict=True)]
    for number, (name, options, accepted) in enumerate(CASES):
        sampler = Sampler(SamplingOptions(**options))
        sampler.accept_all(accepted)
        random, steps = Pcg32(100 + number, LOGITS_STREAM), []
        for step in range(9):
            logits = small_logits(random, step)
            shown = [value if np.isfinite(value) else None for value in logits.tolist()]
            steps.append({"logits": shown} | step_record(sampler, logits, with_distribution=True))
        document["cases"].append({"name": name, "options": asdict(sampler.options), "accept": accepted, "steps": steps})
    for number, (name, options, vocab_size) in enumerate(LARGE_CASES):
        sampler = Sampler(SamplingOptions(**options))
        random = Pcg32(200 + number, LOGITS_STREAM)
        steps = [step_record(sampler, made_logits(random, vocab_size), with_distribution=False) for _ in range(4)]
        record = {"name": name, "options": asdict(sampler.options), "accept": [], "steps": steps}
        document["cases"].append(record | {"vocab_size": vocab_size, "logits_seed": 200 + number})
    return document


def text() -> str:
    """The file's content: null stands for a logit of -inf."""
    return json.dumps(vectors(), indent=None, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_FILE).write_text(text(), encoding="utf-8")
