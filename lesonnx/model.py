"""The Python API: `load` a bundle, `Model.generate` from it.

It wires the other modules together and does none of their work.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from lesonnx import memory, ort
from lesonnx.bundle import Bundle
from lesonnx.chat import ChatTemplate
from lesonnx.engines import make_engine
from lesonnx.errors import BudgetError, ContextError, InputError
from lesonnx.eviction import POLICIES
from lesonnx.generate import GenerationOptions, GenerationReport, Token, generate
from lesonnx.governor import Governor
from lesonnx.limits import DEFAULT_LOADERS, MAX_LOADERS, MAX_THREADS
from lesonnx.loader import ExpertLoader, Telemetry
from lesonnx.memory import format_bytes
from lesonnx.messages import split_messages
from lesonnx.prompt import Prompt
from lesonnx.runner import Runner
from lesonnx.schedule import ON_DEMAND, SchedulerConfig
from lesonnx.speculative.draft_model import DraftModelDrafter
from lesonnx.speculative.drafters import NO_DRAFTER, check_drafter, make_drafter
from lesonnx.speculative.speculator import Speculator
from lesonnx.timeline import Timeline
from lesonnx.tokenizer import Tokenizer
from lesonnx.twins import Twins
from lesonnx.vision.album import KEPT_BYTES, Album, Shown
from lesonnx.vision.prompts import expand_ids, place, with_placeholders
from lesonnx.vision.rules import expand

# Schedule -> what it sets, and how many threads read.
SCHEDULES: dict[str, tuple[SchedulerConfig, int]] = {
    "on-demand": (ON_DEMAND, 1),
    "cache": (SchedulerConfig(policy="lru", compute_first=False, lookahead=False), DEFAULT_LOADERS),
    "les": (SchedulerConfig(), DEFAULT_LOADERS),
    "resident": (SchedulerConfig(resident=True, lookahead=False), DEFAULT_LOADERS),
}


@dataclass(frozen=True)
class LoadOptions:
    """How a bundle is run. None of these changes what the model says (``prefill_chunk_tokens`` may change rounding).

    ``expert_budget_bytes`` bounds the expert cache, exactly. ``memory_budget_bytes`` bounds the process: the experts
    get what runtime, dense parts, attention caches and buffers leave. Without either, all experts may be in memory.
    ``accelerate``: ``auto`` runs the bundle's twins of dense parts where their providers are installed, ``off`` never,
    ``cpu`` on the CPU provider; twins round otherwise.
    ``draft`` names what proposes tokens (see ``speculative.drafters``), ``draft_model`` the bundle of ``draft-model``.
    """

    schedule: str = "les"
    engine: str = "auto"
    num_loaders: int | None = None
    policy: str | None = None
    compute_first: bool | None = None
    lookahead: bool | None = None
    expert_budget_bytes: int | None = None
    memory_budget_bytes: int | None = None
    prefill_chunk_tokens: int | None = None
    timeline: Timeline | None = None
    num_threads: int | None = None
    accelerate: str = "auto"
    draft: str = NO_DRAFTER
    draft_model: Path | str | None = None


class Generation:
    """The tokens of one generation, as they come; iterate once. ``report`` is complete at the end."""

    def __init__(self, tokens: Generator[Token], report: GenerationReport) -> None:
        self._tokens = tokens
        self.report = report

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    def text(self) -> str:
        """Run to the end; the text of what had not been taken yet."""
        return "".join(token.text for token in self._tokens)

    def close(self) -> None:
        """End it where it is: pictures that are being read are let go of at once."""
        self._tokens.close()


@dataclass
class Model:
    """A loaded bundle. Not thread-safe; a context manager that frees everything at its end."""

    bundle: Bundle
    runner: Runner
    options: LoadOptions
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    engine_name: str = ""
    notes: list[str] = field(default_factory=list)
    speculator: Speculator | None = None
    album: Album | None = None

    @property
    def telemetry(self) -> Telemetry:
        """Loads, bytes and times since the bundle was loaded."""
        return self.runner.loader.telemetry

    def encode(self, prompt: str | Sequence[int], add_special_tokens: bool = True) -> list[int]:
        """A prompt's token ids; InputError where it is text and the bundle has no tokenizer."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise InputError(f"{self.bundle.directory}: has no tokenizer; give token ids instead of text")
        return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    def generate(
        self, prompt: str | Sequence[int], options: GenerationOptions | None = None, images: Sequence[Any] | None = ()
    ) -> Generation:
        """Generate from a text or token ids, from scratch. Errors of the prompt come before any work.

        ``images`` are paths, bytes, Pillow images, uint8 arrays [Y,X,3] or what `open_picture` gave. A text has a
        placeholder a picture, see `VisionTexts`, or none: then they come first. Ids have an image token a picture.
        None is no pictures. While pictures are read, ``Token(id=None, text="")`` come, so that one can stop there; text
        that was held back until the end has no id either.
        """
        sources = () if images is None else images if isinstance(images, list | tuple) else [images]
        pictures = [self.open_picture(source) for source in sources]
        vision = self.bundle.manifest.vision
        if vision and isinstance(prompt, str):
            prompt = with_placeholders(prompt, len(pictures), vision)
        return self._generate(self._prompt(prompt, pictures), options, reuse=False, pictures=pictures)

    def chat(self, messages: Sequence[Mapping[str, Any]], options: GenerationOptions | None = None) -> Generation:
        """Answer a conversation by the bundle's chat template; what the last answer computed is used again.

        A message's content is a text, or a list of ``{"type": "text", "text": …}`` and
        ``{"type": "image", "image": …}`` with a picture as in `generate` (or ``"path"``: a file's name; or
        ``{"type": "image_url", "image_url": {"url": path}}``, of files only). Tokens may have the id None, as there.
        InputError in one line for anything else in a message.
        """
        if self.chat_template is None:
            raise InputError(f"{self.bundle.directory}: has no chat template; use generate, or `lesonnx run`")
        plain, sources = split_messages(messages)
        pictures = [self.open_picture(source) for source in sources]
        prompt = self._prompt(self.chat_template.render(plain), pictures, add_special_tokens=False)
        return self._generate(prompt, options, reuse=True, pictures=pictures)

    def open_picture(self, source: Any) -> Shown:
        """Look whether a source is a picture that the model can read; what comes back stands for it from then on.

        InputError in one line where it is not, or where the bundle takes no pictures.
        """
        if self.album is None:
            raise InputError(f"{self.bundle.directory}: this bundle has no eyes: it takes no pictures")
        return self.album.open(source)

    def _prompt(
        self, prompt: str | Sequence[int], pictures: Sequence[Shown], add_special_tokens: bool = True
    ) -> Prompt:
        """The prompt with all that stands for its pictures; InputError unless there is a placeholder for each."""
        vision = self.bundle.manifest.vision
        if vision is None or (not pictures and not isinstance(prompt, str)):
            # Among ids, an image token that stands for no picture is a token like any other.
            return Prompt(self.encode(prompt, add_special_tokens))
        views = [shown.views for shown in pictures]
        needed = sum(view.num_tokens(vision) for cut in views for view in cut)
        if needed > self.runner.states.max_tokens:
            # Before a text of that length is built.
            raise ContextError(
                f"the pictures take {needed} tokens, the model's context has {self.runner.states.max_tokens}"
            )
        if isinstance(prompt, str):
            token_ids = self.encode(expand(prompt, views, vision), add_special_tokens)
        elif self.tokenizer is None:
            raise InputError(f"{self.bundle.directory}: has no tokenizer, which a prompt with pictures needs")
        else:
            token_ids = expand_ids(prompt, views, vision, lambda text: self.encode(text, add_special_tokens=False))
        if not pictures:
            return Prompt(token_ids)
        return place(token_ids, views, [shown.key for shown in pictures], vision)

    def _generate(
        self,
        prompt: Sequence[int] | Prompt,
        options: GenerationOptions | None,
        reuse: bool,
        pictures: Sequence[Shown] = (),
    ) -> Generation:
        report = GenerationReport(pictures=len(pictures))
        tokens = generate(
            self.runner,
            prompt,
            options or GenerationOptions(),
            report,
            self.tokenizer,
            reuse=reuse,
            speculator=self.speculator,
            look=partial(self.album.look, pictures) if self.album else None,
        )
        return Generation(tokens, report)

    def close(self) -> None:
        """Free sessions, caches and experts."""
        if self.speculator is not None:
            self.speculator.close()
        self.runner.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def scheduler_config(options: LoadOptions) -> tuple[SchedulerConfig, int]:
    """A schedule's settings with the user's changes, and the number of threads that read; InputError for a bad one."""
    if options.schedule not in SCHEDULES:
        raise InputError(f"schedule {options.schedule!r} is not one of {', '.join(SCHEDULES)}")
    config, num_loaders = SCHEDULES[options.schedule]
    if options.policy is not None and options.policy not in POLICIES:
        raise InputError(f"policy {options.policy!r} is not one of {', '.join(POLICIES)}")
    if options.lookahead and not config.retain:
        raise InputError(f"schedule {options.schedule} keeps nothing, so there is nothing to look ahead for")
    if options.num_loaders is not None and not 1 <= options.num_loaders <= MAX_LOADERS:
        raise InputError(f"num_loaders is {options.num_loaders}, expected 1 to {MAX_LOADERS}")
    num_loaders = options.num_loaders or num_loaders
    chosen = {"policy": options.policy, "compute_first": options.compute_first, "lookahead": options.lookahead}
    changes: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    return replace(config, max_loads=num_loaders, **changes), num_loaders


def check_budget(bundle: Bundle, expert_budget_bytes: int, config: SchedulerConfig) -> None:
    """BudgetError under what the schedule needs: one layer's experts of a token, or everything for ``resident``."""
    least = bundle.expert_bytes if config.resident else bundle.least_budget_bytes
    if expert_budget_bytes < least:
        what = "schedule resident keeps all experts," if config.resident else "this bundle needs at least"
        raise BudgetError(f"the expert budget is {expert_budget_bytes:,} bytes; {what} {least:,}")


def load(bundle: Path | str | Bundle, options: LoadOptions | None = None, **changes: Any) -> Model:
    """Load a bundle: ``lesonnx.load("qwen", expert_budget_bytes=10**9).generate("Hello").text()``.

    Options are those of `LoadOptions`, as an object or by name. Raises BundleError, BudgetError or InputError.
    """
    options = options or LoadOptions(**changes)
    bundle = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    for name in ("expert_budget_bytes", "memory_budget_bytes", "prefill_chunk_tokens", "num_threads", "num_loaders"):
        value = getattr(options, name)
        if value is not None and not isinstance(value, int):
            raise InputError(f"{name} is {value!r}, expected a whole number")
    if options.prefill_chunk_tokens is not None and options.prefill_chunk_tokens < 1:
        raise InputError(f"prefill chunk is {options.prefill_chunk_tokens} tokens, expected at least 1")
    if options.num_threads is not None and not 1 <= options.num_threads <= MAX_THREADS:
        raise InputError(f"num_threads is {options.num_threads}, expected 1 to {MAX_THREADS}")
    check_drafter(options.draft, options.draft_model)
    ort.check_version(bundle.manifest.onnxruntime_at_least)
    memory.return_freed_memory()
    files = bundle.manifest.tokenizer
    tokenizer = Tokenizer.from_file(bundle.file(files.json_path)) if files and files.json_path else None
    template = ChatTemplate.load(bundle.directory / "tokenizer") if files and files.chat_template else None

    config, num_loaders = scheduler_config(options)
    budget = bundle.expert_bytes if options.expert_budget_bytes is None else options.expert_budget_bytes
    check_budget(bundle, budget, config)
    engine = make_engine(options.engine, bundle, options.num_threads)
    loader = ExpertLoader(bundle, engine, config, budget, num_loaders, options.timeline)
    try:
        twins = Twins(bundle, options.accelerate, options.num_threads)
        runner = Runner(bundle, loader, options.prefill_chunk_tokens, options.num_threads, twins)
    except BaseException:
        loader.close()
        raise
    if config.lookahead and options.lookahead is None:
        runner.governor = Governor()
    speculator = None
    try:
        # Before the memory is bounded: a draft model takes its part of it.
        drafter = make_drafter(options.draft, bundle, options.draft_model, options.engine, options.num_threads)
        speculator = None if drafter is None else Speculator(runner, drafter)
        if options.memory_budget_bytes is not None:
            late_bytes = 0
            if isinstance(drafter, DraftModelDrafter):
                late_bytes, runner.bytes_beside = drafter.late_bytes, drafter.bytes_at
            late_bytes += KEPT_BYTES if bundle.manifest.vision else 0
            runner.bound_memory(options.memory_budget_bytes, options.expert_budget_bytes, late_bytes)
    except BaseException:
        if speculator is not None:
            speculator.close()
        runner.close()
        raise
    notes = [*engine.notes, *twins.notes]
    if config.retain and loader.expert_budget_bytes < bundle.token_demand_bytes:
        notes.append(
            f"the experts may take {format_bytes(loader.expert_budget_bytes)}, less than the"
            f" {format_bytes(bundle.token_demand_bytes)} that one token uses: few can stay from one token to the next"
        )
    album = Album(bundle, runner, options.num_threads) if bundle.manifest.vision else None
    return Model(bundle, runner, options, tokenizer, template, engine.name, notes, speculator, album)
