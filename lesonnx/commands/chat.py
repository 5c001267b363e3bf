"""``lesonnx chat``: a conversation in the terminal, by the bundle's chat template."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from lesonnx.commands.options import BUNDLE, load_options, make_generation_options, make_load_options, sampling_options
from lesonnx.commands.run import summary
from lesonnx.errors import ContextError, InputError

if TYPE_CHECKING:
    from lesonnx.model import Model
    from lesonnx.vision.album import Shown

# A word of letters behind a slash; /etc/hosts and "1/2" are none.
_COMMAND = re.compile(r"(/[A-Za-z]+)(?:\s+(.*))?", re.DOTALL)


@click.command()
@click.argument("bundle", type=BUNDLE)
@click.option("--system", help="What the model is told before the conversation.")
@sampling_options
@load_options
def chat(bundle: Path, system: str | None, **values: Any) -> None:
    """Talk with the bundle BUNDLE; /reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer.

    /image FILE shows a picture, before the question that it belongs to; several may come. The line after an answer says
    what was new in it: pictures read or known, prompt tokens run or reused.
    """
    from lesonnx.bundle import Bundle
    from lesonnx.model import load

    files = Bundle(bundle).manifest.tokenizer
    if files is None or files.chat_template is None:
        raise InputError(f"{bundle}: has no chat template; use `lesonnx run {bundle} --prompt TEXT`")
    options = make_generation_options(values)
    beginning = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, Any]] = list(beginning)
    pictures: list[Shown] = []
    with load(bundle, make_load_options(values)) as model:
        for note in model.notes:
            print(f"note: {note}", file=sys.stderr)
        while True:
            line = _ask()
            command, argument = _command(line)
            if line is None or (command == "/exit" and not argument):
                return
            if command:
                try:
                    if command == "/image":
                        pictures.append(_show(model, argument))
                        _tell_shown(argument, pictures)
                    elif command == "/reset" and not argument:
                        if pictures:
                            print(f"note: put away unread: {_count(pictures)}", file=sys.stderr)
                        messages, pictures = list(beginning), []
                    else:
                        raise InputError(_refusal(command))
                except InputError as error:
                    print(f"error: {error}", file=sys.stderr)
                continue
            if not line.strip():
                continue
            asked = [*messages, {"role": "user", "content": _content(pictures, line)}]
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
                generation.close()
            except InputError as error:
                # The conversation is what it was before the question.
                way_out = "; /reset begins anew" if isinstance(error, ContextError) else ""
                put_away = "; the pictures shown for it are put away" if pictures else ""
                print(f"error: {error}{way_out}{put_away}", file=sys.stderr)
                pictures = []
                continue
            print()
            if not generation.report.token_ids:
                print("note: stopped while pictures were read; they wait for the next question", file=sys.stderr)
                continue
            print(summary(model, generation.report), file=sys.stderr)
            messages, pictures = [*asked, {"role": "assistant", "content": answer}], []


def _content(pictures: Sequence[Shown], question: str) -> str | list[dict[str, Any]]:
    """A message's content: its pictures, then the text."""
    if not pictures:
        return question
    return [*({"type": "image", "image": shown} for shown in pictures), {"type": "text", "text": question}]


def _command(line: str | None) -> tuple[str, str]:
    """A command with its slash, and what stands behind it; two empty texts for a question."""
    match = _COMMAND.fullmatch((line or "").strip())
    return (match[1], match[2] or "") if match else ("", "")


def _refusal(command: str) -> str:
    """What to say of a command that is none, or that takes nothing behind it."""
    if command in ("/reset", "/exit"):
        return f"{command} takes nothing behind it"
    return f"unknown command {command}; there are /image FILE, /reset and /exit"


def _show(model: Model, name: str) -> Shown:
    """The picture of a file that the user named, perhaps in quotes; InputError where it is none."""
    if not name:
        raise InputError("/image needs the name of a file")
    path = Path(_unquoted(name))
    try:
        path = path.expanduser()
    except RuntimeError:
        raise InputError(f"{path}: no such user's directory") from None
    try:
        return model.open_picture(path)
    except KeyboardInterrupt:
        raise InputError(f"{path}: stopped") from None


def _tell_shown(name: str, pictures: Sequence[Shown]) -> None:
    """One line on the picture that was shown last, and how many wait."""
    shown = pictures[-1]
    size = f"{shown.width} x {shown.height} pixels"
    waits = f"{_count(pictures)} wait{'s' * (len(pictures) == 1)} for the next question"
    print(f"note: {Path(_unquoted(name)).name}: {size}; {waits}", file=sys.stderr)


def _count(pictures: Sequence[Shown]) -> str:
    return f"{len(pictures)} picture{'s' * (len(pictures) != 1)}"


def _unquoted(name: str) -> str:
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] and name[0] in "'\"" else name


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
