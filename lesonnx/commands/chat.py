"""``lesonnx chat``: a conversation in the terminal, by the bundle's chat template."""

from __future__ import annotations

import sys
from pathlib import Path
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
    from lesonnx.chat import ChatTemplate
    from lesonnx.model import load

    if bundle.is_dir() and ChatTemplate.load(bundle / "tokenizer") is None:
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
                for token in generation:
                    answer += token.text
                    print(token.text, end="", flush=True)
            except KeyboardInterrupt:
                print(" [stopped]", end="")
            except ContextError as error:
                print(f"error: {error}; /reset begins anew", file=sys.stderr)
                continue
            print()
            print(summary(model, generation.report), file=sys.stderr)
            messages = [*asked, {"role": "assistant", "content": answer}]


def _ask() -> str | None:
    """One line of the user's; None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        print()
        return None
