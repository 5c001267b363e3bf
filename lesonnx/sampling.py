"""How the next token is chosen, so that every host chooses the same one, bit for bit.

It knows nothing of models, text or tokenizers: float32 logits and token ids go in, a token id comes out.

A Kotlin or Swift mirror follows these steps in this order. Every operation is IEEE 754 float64, rounded to nearest, one
at a time: no fused multiply-add, no library ``exp``, no reassociated sum. ``tests/data/sampling.json`` has the vectors.

1. Repetition penalty, as transformers has it: of a seen token a positive logit is divided by it, any other multiplied;
   computed in float64, rounded to float32. That is the token's *score*; -0 counts as +0.
2. Order: score descending, then id ascending. Temperature 0 takes the first and draws nothing.
3. Temperature: ``x = (score - greatest score) / temperature``; the token's *weight* is ``exp_non_positive(x)``.
4. Top-k: the first k in the order (exactly k, also among ties); 0, or V and more, is off.
5. Top-p: the shortest beginning of the order whose weights reach ``top_p * total``. Weights are added one by one in the
   order; ``total`` is that sum over the k of step 4, or, without top-k, the sum over all tokens by ascending id.
6. Min-p: the longest beginning of what is left whose weights are at least ``min_p`` (the first weight is exactly 1).
   Weights of 0 are cut off in any case.
7. One draw u of PCG32: the first token whose running sum, in the order, exceeds ``(u * 2**-32) * kept``; where
   rounding leaves none, the last one. ``kept`` is the running sum over what is left; where none of steps 4 to 6 is on,
   it is ``total``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from lesonnx.errors import InputError, LesonnxError

Logits = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_MASK_64 = (1 << 64) - 1
_PCG_MULTIPLIER = 6364136223846793005
PCG_STREAM = 54  # the stream of O'Neill's demonstration program; every sampler uses it
_FIRST_CANDIDATES = 256  # the length of the order that is tried first; each further try takes 16 times as many

# exp: Cody and Waite's two-part logarithm of 2 as fdlibm has it (the low 21 bits of the first part are zero, so its
# product with any exponent is exact), then the Taylor polynomial of degree 13, cut off at 5e-18 of the result.
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_TAYLOR = tuple(1.0 / math.factorial(power) for power in range(13, -1, -1))
_LEAST_EXPONENT = -700.0  # below it the result is 0, so no host meets a subnormal number
_EXP_CHUNK = 8192  # so that the polynomial's operands stay in the cache


class Pcg32:
    """PCG-XSH-RR with 64 bits of state and 32 of output: one draw, one number. Not thread-safe; its owner alone draws.

    Source: Melissa O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms for Random
    Number Generation", Harvey Mudd College HMC-CS-2014-0905; ``pcg32_srandom_r`` and ``pcg32_random_r`` of pcg-c-basic.
    """

    def __init__(self, seed: int, stream: int = PCG_STREAM) -> None:
        """Start from ``seed`` (64 bits) on one of 2**63 streams, as ``pcg32_srandom_r(seed, stream)`` does."""
        self._increment = ((stream << 1) | 1) & _MASK_64
        self._state = 0
        self.next_u32()
        self._state = (self._state + seed) & _MASK_64
        self.next_u32()

    def next_u32(self) -> int:
        """The next 32 random bits."""
        old = self._state
        self._state = (old * _PCG_MULTIPLIER + self._increment) & _MASK_64
        shifted = (((old >> 18) ^ old) >> 27) & 0xFFFFFFFF
        rotation = old >> 59
        return ((shifted >> rotation) | (shifted << (-rotation & 31))) & 0xFFFFFFFF

    def uniform(self) -> float:
        """One draw as a float64 in [0, 1): a multiple of 2**-32."""
        return self.next_u32() * 2.0**-32


def exp_non_positive(x: Weights) -> Weights:
    """e**x for x <= 0 (any shape), the same bits on every host; 0 below -700.

    With ``k = floor(x * log2(e) + 0.5)`` and ``r = (x - k * ln2_high) - k * ln2_low``, it is the Taylor polynomial of
    degree 13 in r by Horner's rule (coefficients 1/n!, each rounded once), times 2**k, which is exact. Only + - * and
    floor are used, each rounded once. Within 2 units in the last place of the true value.
    """
    result: Weights = np.zeros(x.shape, np.float64)
    flat, out = x.reshape(-1), result.reshape(-1)
    for start in range(0, flat.size, _EXP_CHUNK):
        chunk = flat[start : start + _EXP_CHUNK]
        bounded = np.maximum(chunk, _LEAST_EXPONENT)
        k = np.floor(bounded * _LOG2_E + 0.5)
        r = (bounded - k * _LN2_HIGH) - k * _LN2_LOW
        value = np.full(chunk.shape, _TAYLOR[0], np.float64)
        for coefficient in _TAYLOR[1:]:
            value *= r
            value += coefficient
        value *= ((k.astype(np.int64) + 1023) << 52).view(np.float64)
        value[chunk < _LEAST_EXPONENT] = 0.0
        out[start : start + _EXP_CHUNK] = value
    return result


@dataclass(frozen=True)
class SamplingOptions:
    """How to choose; checked when made, InputError names the option.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``repetition_penalty`` 1 are off.
    ``seed`` has 64 bits; equal seeds give equal tokens for equal logits, on every host.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), whole=field.name in ("top_k", "seed"))
        _check("temperature", self.temperature, self.temperature >= 0, "at least 0")
        _check("top_k", self.top_k, self.top_k >= 0, "at least 0 (0 is off)")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (1 is off)")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 (off) to 1")
        _check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0 (1 is off)")
        _check("seed", self.seed, 0 <= self.seed <= _MASK_64, "from 0 to 2**64 - 1")


class Sampler:
    """Chooses tokens for one sequence; owns the random numbers and what the repetition penalty has seen.

    Not thread-safe: one sequence, one sampler. ``sample`` does not accept: the caller accepts the prompt's tokens and
    every token that stays, so that a draft can be tried and taken back.
    """

    def __init__(self, options: SamplingOptions) -> None:
        self.options = options
        self.rng = Pcg32(options.seed)
        self._seen: dict[int, int] = {}

    def accept(self, token: int) -> None:
        """Count a token of the prompt or of the output for the repetition penalty."""
        if token < 0:
            raise InputError(f"token id is {token}, expected at least 0")
        self._seen[token] = self._seen.get(token, 0) + 1

    def accept_all(self, tokens: Iterable[int]) -> None:
        """``accept`` each."""
        for token in tokens:
            self.accept(token)

    def retract(self, token: int) -> None:
        """Take back one ``accept`` of this token; InputError where there was none."""
        count = self._seen.get(token, 0)
        if count == 0:
            raise InputError(f"token {token} was never accepted, so it cannot be taken back")
        if count == 1:
            del self._seen[token]
        else:
            self._seen[token] = count - 1

    def sample(self, logits: Logits) -> int:
        """The next token's id from float32 logits [V]: one draw, or none when greedy.

        -inf excludes a token. InputError for another shape or dtype; LesonnxError for NaN, +inf or nothing but -inf.
        """
        scores = self._scores(logits)
        if self.options.temperature == 0:
            return int(np.argmax(scores))
        if self._is_filtered(len(scores)):
            ids, weights = self._filtered(scores)
            running = np.add.accumulate(weights)
            target = self.rng.uniform() * float(running[-1])
            return int(ids[min(int(np.searchsorted(running, target, side="right")), len(ids) - 1)])
        weights = self._weights(scores)
        target = self.rng.uniform() * _sum_in_order(weights)
        for ids in _growing_orders(scores):
            running = np.add.accumulate(weights[ids])
            if running[-1] > target:
                return int(ids[int(np.searchsorted(running, target, side="right"))])
        return int(ids[np.flatnonzero(weights[ids])[-1]])

    def distribution(self, logits: Logits) -> tuple[Ids, Weights]:
        """What ``sample`` would draw from, without drawing: ids int64 [n] in order, probabilities float64 [n].

        A probability is the token's weight divided by ``kept`` (see the module), above 0; greedy gives one id with
        probability 1. Errors as ``sample``.
        """
        scores = self._scores(logits)
        if self.options.temperature == 0:
            return np.array([np.argmax(scores)], np.int64), np.ones(1)
        if self._is_filtered(len(scores)):
            ids, weights = self._filtered(scores)
            return ids, weights / _sum_in_order(weights)
        everything = self._weights(scores)
        ids = _order(scores, len(scores))
        ids, weights = _cut(ids, everything[ids], 0.0)
        return ids, weights / _sum_in_order(everything)

    def _scores(self, logits: Logits) -> Logits:
        """Step 1: checked logits [V], penalised, as a copy without -0."""
        if not isinstance(logits, np.ndarray) or logits.dtype != np.float32 or logits.ndim != 1 or logits.size == 0:
            found = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, np.ndarray) else type(logits).__name__
            raise InputError(f"logits are {found}, expected float32 [V]")
        scores: Logits = logits + np.float32(0)
        penalty = self.options.repetition_penalty
        if penalty != 1 and self._seen:
            seen = np.fromiter((token for token in self._seen if token < len(scores)), np.int64)
            wide = scores[seen].astype(np.float64)
            with np.errstate(over="ignore"):  # a score beyond float32 is caught below or excluded, as -inf is
                scores[seen] = np.where(wide > 0, wide / penalty, wide * penalty).astype(np.float32) + np.float32(0)
        greatest = scores.max()
        if not np.isfinite(greatest):
            what = "NaN" if np.isnan(greatest) else "+inf" if greatest > 0 else "nothing but -inf"
            raise LesonnxError(f"logits hold {what}: the model's output is broken, so no token can be chosen")
        return scores

    def _is_filtered(self, vocab_size: int) -> bool:
        return 0 < self.options.top_k < vocab_size or self.options.top_p < 1 or self.options.min_p > 0

    def _weights(self, scores: Logits) -> Weights:
        """Step 3, for scores [n] that hold the greatest one."""
        with np.errstate(over="ignore"):  # a tiny temperature: -inf is weight 0
            x = (scores.astype(np.float64) - float(scores.max())) / self.options.temperature
        return exp_non_positive(x)

    def _filtered(self, scores: Logits) -> tuple[Ids, Weights]:
        """Steps 4 to 6: ids and weights of what is left, in order; at least one, and no weight 0."""
        options = self.options
        if 0 < options.top_k < len(scores):
            ids = _order(scores, options.top_k)
            weights = self._weights(scores[ids])
            count = len(ids)
            if options.top_p < 1:
                count = _reach(weights, options.top_p * _sum_in_order(weights)) or count
        elif options.top_p < 1:
            everything = self._weights(scores)
            goal = options.top_p * _sum_in_order(everything)
            for ids in _growing_orders(scores):
                weights = everything[ids]
                count = _reach(weights, goal)
                if count:
                    break
            count = count or len(ids)
        else:
            return self._at_least_min_p(scores)
        ids, weights = ids[:count], weights[:count]
        return _cut(ids, weights, options.min_p)

    def _at_least_min_p(self, scores: Logits) -> tuple[Ids, Weights]:
        """Step 6 alone: the order is followed only as far as its weights are great enough."""
        for ids in _growing_orders(scores):
            weights = self._weights(scores[ids])
            if weights[-1] < self.options.min_p:
                break
        return _cut(ids, weights, self.options.min_p)


def _cut(ids: Ids, weights: Weights, min_p: float) -> tuple[Ids, Weights]:
    """The longest beginning with weights of at least ``min_p``, and above 0."""
    small = np.flatnonzero((weights < min_p) | (weights == 0))
    count = int(small[0]) if len(small) else len(ids)
    return ids[:count], weights[:count]


def _sum_in_order(weights: Weights) -> float:
    """The sum, one by one from the first: ``numpy.sum`` adds in pairs, in an order that others could not mirror."""
    return float(np.add.accumulate(weights)[-1])


def _reach(weights: Weights, goal: float) -> int:
    """How many weights from the first on reach the goal; 0 where all together do not."""
    running = np.add.accumulate(weights)
    count = int(np.searchsorted(running, goal, side="left")) + 1
    return count if count <= len(weights) else 0


def _order(scores: Logits, count: int) -> Ids:
    """The first ``count`` ids of the order, sorting few others."""
    if count < len(scores):
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        ids = np.flatnonzero(scores >= least)
    else:
        ids = np.arange(len(scores))
    bits = scores[ids].view(np.uint32)
    # The key ascends as the order does: the score's bits, made descending, above the id.
    descending = np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF)).astype(np.uint64)
    keys = np.sort((descending << np.uint64(32)) | ids.astype(np.uint64))[:count]
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _growing_orders(scores: Logits) -> Iterable[Ids]:
    """Longer and longer beginnings of the order; the last is all of it. Most draws need only the first."""
    count = _FIRST_CANDIDATES
    while count < len(scores):
        yield _order(scores, count)
        count *= 16
    yield _order(scores, len(scores))


def _check_type(name: str, value: object, whole: bool) -> None:
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    expected = "a whole number" if whole else "a finite number"
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise InputError(f"{name} is {value!r}, expected {expected}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} is {value!r}, expected {expected}")


def _check(name: str, value: float, holds: bool, expected: str) -> None:
    if not holds:
        raise InputError(f"{name} is {value!r}, expected {expected}")
