"""``lesonnx chat``: a conversation in the terminal, by the bundle's chat template."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from lesonnx.commands.options import BUNDLE, load_options, make_generation_options, make_load_options, sampling_options
from lesonnx.commands.run import summary
from lesonnx.errors import ContextError, InputError


@click.command()
@click.argument("bundle", type=BUNDLE)
@click.option("--system", help="What the model is told before the conversation.")
@sampling_options
@load_options
def chat(bundle: Path, system: str | None, **values: Any) -> None:
    """Talk with the bundle BUNDLE; /reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    from lesonnx.bundle import Bundle
    from lesonnx.model import load

    files = Bundle(bundle).manifest.tokenizer
    if files is None or files.chat_template is None:
        raise InputError(f"{bundle}: has no chat template; use `lesonnx run {bundle} --prompt TEXT`")
    options = make_generation_options(values)
    beginning = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, str]] = list(beginning)
    with load(bundle, make_load_options(values)) as model:
        for note in model.notes:
            print(f"note: {note}", file=sys.stderr)
        while True:
            line = _ask()
            if line is None or line.strip() == "/exit":
                return
            if line.strip() == "/reset":
                messages = list(beginning)
                continue
            if not line.strip():
                continue
            asked = [*messages, {"role": "user", "content": line}]
            answer = ""
            try:
                generation = model.chat(asked, options)
                with stop_on_interrupt() as stopped:
                    for token in generation:
                        answer += token.text
                        print(token.text, end="", flush=True)
                        if stopped:
                            print(" [stopped]", end="")
                            break
            except ContextError as error:
                print(f"error: {error}; /reset begins anew", file=sys.stderr)
                continue
            print()
            print(summary(model, generation.report), file=sys.stderr)
            messages = [*asked, {"role": "assistant", "content": answer}]


@contextmanager
def stop_on_interrupt() -> Iterator[list[int]]:
    """Ctrl-C between two tokens: the list is no longer empty after the first, the second interrupts as usual.

    An interrupt in the middle of a step would leave experts half loaded.
    """
    received: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def _ask() -> str | None:
    """One line of the user's; None at the end of input."""
    try:
        return None if sys.stdin is None else input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        print()
        return None
