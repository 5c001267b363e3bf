"""Generation: a prompt's token ids in, tokens with their text out, one by one.

The main path is `generate`. It knows the runner and the sampler, not how experts get into memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from lesonnx.errors import ContextError, InputError
from lesonnx.prompt import Features, Prompt
from lesonnx.runner import Runner
from lesonnx.sampling import Sampler, SamplingOptions
from lesonnx.speculative.speculator import DraftCounts, Speculator
from lesonnx.tokenizer import StopChecker, StreamDecoder, Tokenizer

DEFAULT_MAX_NEW_TOKENS = 256
FinishReason = Literal["eos", "stop", "length"]
# Puts the features of pictures, by key, into a dict, crop by crop; gives the keys of those that were not known.
Look = Callable[[list[str], dict[str, Features]], Generator[None, None, list[str]]]


@dataclass(frozen=True)
class GenerationOptions:
    """What to generate. ``max_new_tokens`` None means up to 256, less where the context ends earlier.

    ``stop`` strings end the text before themselves, wherever tokens begin and end.
    """

    max_new_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: Sequence[str] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Token:
    """One generated token. ``text`` is what became certain with it, perhaps nothing; all texts in a row are the output.

    ``id`` is None for text that was held back until the end, and for the empty tokens that come while pictures are
    read: one after each picture that is prepared and each crop that is read.
    """

    id: int | None
    text: str


@dataclass
class GenerationReport:
    """How a generation went; complete once it has ended. ``drafts`` is None where nothing could be drafted.

    ``pictures`` and ``image_tokens`` are those of the prompt, whether they had to be read or were known;
    ``pictures_read`` and ``image_tokens_read`` are those that were read, each once; ``vision_ms`` is what that took. Of
    the ``prompt_tokens``, ``reused_tokens`` had run already.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    pictures: int = 0
    image_tokens: int = 0
    pictures_read: int = 0
    image_tokens_read: int = 0
    vision_ms: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    drafts: DraftCounts | None = None

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: tokens after the first, which the prefill gives, by the time they took."""
        steps = len(self.token_ids) - 1
        return steps / (self.decode_ms / 1e3) if steps > 0 and self.decode_ms > 0 else 0.0


def token_limit(prompt_tokens: int, options: GenerationOptions, max_tokens: int) -> int:
    """How many tokens may come after the prompt; ContextError where what was asked for does not fit."""
    room = max_tokens - prompt_tokens
    if room < 1:
        raise ContextError(f"a prompt of {prompt_tokens} tokens leaves no room in the model's context of {max_tokens}")
    wanted = options.max_new_tokens
    if wanted is None:
        return min(DEFAULT_MAX_NEW_TOKENS, room)
    if wanted < 1:
        raise InputError(f"max_new_tokens is {wanted}, expected at least 1")
    if wanted > room:
        raise ContextError(
            f"a prompt of {prompt_tokens} tokens and {wanted} new ones do not fit the model's context of {max_tokens}"
        )
    return wanted


def generate(
    runner: Runner,
    tokens: Sequence[int] | Prompt,
    options: GenerationOptions,
    report: GenerationReport,
    tokenizer: Tokenizer | None = None,
    *,
    reuse: bool = False,
    speculator: Speculator | None = None,
    look: Look | None = None,
) -> Generator[Token]:
    """Generate from a prompt. Without a tokenizer, texts are empty. Close the iterator to stop early.

    A runner has one sequence: a generation that is asked to go on after another one has begun raises InputError.

    ``reuse`` keeps the longest common beginning of the runner's sequence and the prompt instead of computing it again;
    then chunks begin elsewhere, so a quantized bundle may round differently than from scratch. A ``speculator`` drafts.
    ``look`` reads the pictures of a prompt that has some, see `Album.look`; meanwhile empty tokens come, whose id is
    None, so that one can stop there. Text that was held back until the end has no id either.
    Raises InputError or ContextError at once, before any work, for a prompt or options that cannot be served.
    """
    model = runner.bundle.manifest.model
    prompt = Prompt.of(tokens)
    check_prompt(prompt.token_ids, model.vocab_size)
    limit = token_limit(len(prompt), options, runner.states.max_tokens)
    sampler = Sampler(options.sampling)
    sampler.accept_all(prompt.token_ids)
    decoder = StreamDecoder(tokenizer) if tokenizer else None
    stop = StopChecker(options.stop)
    if options.stop and tokenizer is None:
        raise InputError("stop strings need a tokenizer, which this bundle lacks")
    eos = frozenset() if options.ignore_eos else frozenset(model.eos_token_ids)
    report.prompt_tokens, report.image_tokens = len(prompt), len(prompt.image_rows)
    return _steps(runner, prompt, limit, sampler, decoder, stop, eos, report, reuse, speculator, look)


def check_prompt(prompt_ids: Sequence[int], vocab_size: int) -> None:
    """InputError for a prompt without tokens or with one that the model does not know."""
    if not len(prompt_ids):
        raise InputError("the prompt is empty: at least one token is needed")
    for token in prompt_ids:
        if not 0 <= token < vocab_size:
            raise InputError(f"token id {token} is outside 0..{vocab_size - 1}")


def _steps(
    runner: Runner,
    prompt: Prompt,
    limit: int,
    sampler: Sampler,
    decoder: StreamDecoder | None,
    stop: StopChecker,
    eos: frozenset[int],
    report: GenerationReport,
    reuse: bool,
    speculator: Speculator | None,
    look: Look | None,
) -> Generator[Token]:
    """The generator itself: pictures, prefill, then a step at a time, which gives a token, or several by drafts."""
    # 1. Pictures that the sequence does not begin with. Until they are read, nothing of it is touched.
    runner.owner = report
    report.reused_tokens = runner.common_tokens(prompt) if reuse else 0
    features: dict[str, Features] = {}
    if look is not None and (keys := prompt.keys_from(report.reused_tokens)):
        with closing(look(keys, features)) as crops:
            while _next_crop(crops, features, report):
                yield Token(None, "")
                _check_owner(runner, report)

    # 2. The prompt, but for what the sequence begins with already. Its last token always runs: it gives the logits.
    runner.rewind(report.reused_tokens)
    if speculator is not None:
        report.drafts = speculator.begin(prompt.token_ids, report.reused_tokens, sampler)
    began = time.perf_counter()
    with runner.lend(sum(array.nbytes for array in features.values())) if features else nullcontext():
        logits = runner.prefill(prompt.part(report.reused_tokens).with_features(features))
    features.clear()
    report.prefill_ms = (time.perf_counter() - began) * 1e3

    # 3. Token by token, until the end-of-sequence token, a stop string or the limit. What the caller does between two
    #    tokens is not counted.
    began = time.perf_counter()
    coming = deque([sampler.sample(logits)])
    report.decode_ms += (time.perf_counter() - began) * 1e3
    try:
        while True:
            token = coming.popleft()
            report.token_ids.append(token)
            if token in eos:
                report.finish_reason = "eos"
                break
            sampler.accept(token)
            text = stop.push(decoder.push(token)) if decoder else ""
            yield Token(token, text)
            if stop.stopped_by is not None:
                report.finish_reason = "stop"
                return
            if len(report.token_ids) == limit:
                report.finish_reason = "length"
                break
            _check_owner(runner, report)
            if not coming:
                began = time.perf_counter()
                most = limit - len(report.token_ids)
                coming.extend(_next_tokens(runner, speculator, sampler, token, most, eos))
                report.decode_ms += (time.perf_counter() - began) * 1e3
    finally:
        # The last token has not run, as without drafts; what was drafted behind it has.
        if runner.owner is report:
            runner.rewind(min(runner.num_tokens, len(prompt) + len(report.token_ids) - 1))

    # 4. What was held back: half a character, or the beginning of a stop string.
    if decoder and (text := stop.push(decoder.flush()) + stop.flush()):
        yield Token(None, text)


def _next_crop(
    crops: Generator[None, None, list[str]], features: Mapping[str, Features], report: GenerationReport
) -> bool:
    """Read one more crop; False where there is none. What the caller does between two is not counted."""
    began = time.perf_counter()
    try:
        next(crops)
    except StopIteration as end:
        report.pictures_read = len(end.value)
        report.image_tokens_read = sum(len(features[key]) for key in end.value)
        return False
    finally:
        report.vision_ms += (time.perf_counter() - began) * 1e3
    return True


def _check_owner(runner: Runner, report: GenerationReport) -> None:
    if runner.owner is not report:
        raise InputError("this generation is over: another one has begun on the same model since")


def _next_tokens(
    runner: Runner, speculator: Speculator | None, sampler: Sampler, token: int, most: int, eos: frozenset[int]
) -> list[int]:
    """What comes after ``token``, which has not run: one token, or up to ``most``."""
    if speculator is not None:
        return speculator.next(token, most, eos).token_ids
    return [sampler.sample(runner.step([token], [0])[0])]
