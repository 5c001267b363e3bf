"""Options that several subcommands share, and sizes as an option type."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from lesonnx.errors import InputError
from lesonnx.limits import MAX_LOADERS, MAX_THREADS
from lesonnx.memory import auto_budget_bytes, parse_bytes

Command = TypeVar("Command", bound=Callable[..., Any])
BUNDLE = click.Path(path_type=Path)


class Size(click.ParamType[int]):
    """A size in bytes, with or without a unit: ``3GB``, ``500MiB``, ``4096``."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except InputError as error:
            self.fail(str(error), param, ctx)


class MemorySize(Size):
    """A size, or ``auto``: most of what the system has available."""

    name = "bytes|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "auto":
            return auto_budget_bytes()
        return super().convert(value, param, ctx)


SIZE = Size()


def apply(options: list[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """One decorator from several, in the order in which --help shows them."""

    def decorate(command: Command) -> Command:
        return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)

    return decorate


# How one sequence of given tokens is run; `load_options` can draft what comes too.
run_options = apply(
    [
        click.option(
            "--schedule",
            type=click.Choice(["les", "cache", "on-demand", "resident"]),
            default="les",
            show_default=True,
            help="How experts get into memory.",
        ),
        click.option(
            "--loaders", type=click.IntRange(1, MAX_LOADERS), help="Reads at once.  [default: the schedule's]"
        ),
        click.option(
            "--policy", type=click.Choice(["les", "lru", "lfu"]), help="What is evicted.  [default: the schedule's]"
        ),
        click.option("--compute-first/--no-compute-first", default=None, help="Compute what is there, then wait."),
        click.option("--lookahead/--no-lookahead", default=None, help="Predict and prefetch the next layer's experts."),
        click.option(
            "--engine",
            type=click.Choice(["auto", "kernel", "session"]),
            default="auto",
            show_default=True,
            help="What computes an expert.",
        ),
        click.option("--expert-budget", type=SIZE, help="Most bytes of experts in memory.  [default: all of them]"),
        click.option(
            "--memory-budget", type=MemorySize(), help="Most memory of the whole process; experts get what is left."
        ),
        click.option(
            "--prefill-chunk", type=click.IntRange(1), help="Prompt tokens a pass.  [default: the bundle's, 512]"
        ),
        click.option(
            "--threads", type=click.IntRange(1, MAX_THREADS), help="Threads that compute.  [default: all cores]"
        ),
        click.option(
            "--accelerate",
            type=click.Choice(["auto", "off", "cpu"]),
            default="auto",
            show_default=True,
            help="Dense parts on an accelerator, where bundle and ONNX Runtime have one; cpu tries those parts here.",
        ),
    ]
)

load_options = apply(
    [
        run_options,
        click.option(
            "--draft",
            type=click.Choice(["none", "ngram", "draft-model", "dspark", "mtp"]),
            default="none",
            show_default=True,
            help="What proposes tokens to verify several at once.",
        ),
        click.option("--draft-model", type=BUNDLE, help="The bundle that drafts, for --draft draft-model."),
    ]
)

sampling_options = apply(
    [
        click.option(
            "--max-tokens",
            "--max-new-tokens",
            "max_tokens",
            type=click.IntRange(1),
            help="Most tokens to generate.  [default: 256]",
        ),
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."),
        click.option("--top-k", type=int, default=0, show_default=True, help="Only the k likeliest; 0 is off."),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="Only the likeliest that reach p."),
        click.option("--min-p", type=float, default=0.0, show_default=True, help="Only those at least p as likely."),
        click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="Above 1: repeat less."),
        click.option(
            "--seed",
            type=int,
            default=0,
            show_default=True,
            help="Equal seeds give equal texts, but where drafts are drawn (draft-model, dspark with a temperature).",
        ),
        click.option("--stop", multiple=True, help="End before this text; may be given several times."),
    ]
)


def make_load_options(values: dict[str, Any]) -> Any:
    """Take what ``load_options`` or ``run_options`` added out of a command's arguments."""
    from lesonnx.model import LoadOptions

    return LoadOptions(
        schedule=values.pop("schedule"),
        engine=values.pop("engine"),
        num_loaders=values.pop("loaders"),
        policy=values.pop("policy"),
        compute_first=values.pop("compute_first"),
        lookahead=values.pop("lookahead"),
        expert_budget_bytes=values.pop("expert_budget"),
        memory_budget_bytes=values.pop("memory_budget"),
        prefill_chunk_tokens=values.pop("prefill_chunk"),
        num_threads=values.pop("threads"),
        accelerate=values.pop("accelerate"),
        draft=values.pop("draft", "none"),
        draft_model=values.pop("draft_model", None),
    )


def make_generation_options(values: dict[str, Any], *, ignore_eos: bool = False) -> Any:
    """Take what ``sampling_options`` added out of a command's arguments."""
    from lesonnx.generate import GenerationOptions
    from lesonnx.sampling import SamplingOptions

    sampling = SamplingOptions(
        temperature=values.pop("temperature"),
        top_k=values.pop("top_k"),
        top_p=values.pop("top_p"),
        min_p=values.pop("min_p"),
        repetition_penalty=values.pop("repetition_penalty"),
        seed=values.pop("seed"),
    )
    return GenerationOptions(
        max_new_tokens=values.pop("max_tokens"), sampling=sampling, stop=values.pop("stop"), ignore_eos=ignore_eos
    )
