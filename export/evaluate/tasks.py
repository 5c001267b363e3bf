"""Task files: JSON lines of choices, each after a text of its own or several along one passage; reading and checking.

It knows no model and no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from lesonnx.errors import InputError

Thing = TypeVar("Thing")
Choice = Annotated[str, StringConstraints(min_length=1)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Choices(_Record):
    choices: Annotated[list[Choice], Field(min_length=2)]
    answer: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _fits(self) -> _Choices:
        if self.answer >= len(self.choices):
            raise ValueError(f"answer is {self.answer}, expected 0 to {len(self.choices) - 1}")
        if len(set(self.choices)) < len(self.choices):
            twice = next(choice for choice in self.choices if self.choices.count(choice) > 1)
            raise ValueError(f"choices hold {twice!r} twice")
        return self


class Item(_Choices):
    """A question at a place of a passage: which of the choices comes after its first ``at`` characters."""

    at: Annotated[int, Field(ge=0)]


class Passage(_Record):
    """A text, and questions along it."""

    id: str | None = None
    text: str
    items: Annotated[list[Item], Field(min_length=1)]

    @model_validator(mode="after")
    def _fits(self) -> Passage:
        beyond = [item.at for item in self.items if item.at > len(self.text)]
        if beyond:
            raise ValueError(f"an item is at {beyond[0]}, the text has {len(self.text)} characters")
        return self


class _Question(_Choices):
    id: str | None = None
    context: str

    def passage(self) -> Passage:
        item = Item(at=len(self.context), choices=self.choices, answer=self.answer)
        return Passage(id=self.id, text=self.context, items=[item])


@dataclass(frozen=True)
class Task:
    """A file of questions; one with a context of its own is a passage of one item.

    ``digest`` is that of the file's bytes and of how many passages of them were taken at most.
    """

    name: str
    passages: list[Passage]
    digest: str

    @property
    def num_items(self) -> int:
        return sum(len(passage.items) for passage in self.passages)


def read_task(path: Path, most_passages: int | None = None) -> Task:
    """Read a task file; of more than ``most_passages`` that many, spread evenly over the file.

    InputError in one line that names file, line and field for whatever is wrong in any line.
    """
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"{path}: not readable: {error.strerror}") from None
    passages = [_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not passages:
        raise InputError(f"{path}: holds no items")
    if most_passages is not None:
        passages = spread(passages, most_passages)
    return Task(path.stem, passages, hashlib.sha256(content + f"/{most_passages}".encode()).hexdigest())


def spread(things: list[Thing], most: int) -> list[Thing]:
    """At most that many of the things, at even distances."""
    if len(things) <= most:
        return things
    return [things[place * len(things) // most] for place in range(most)]


def _read_line(line: str, where: str) -> Passage:
    try:
        record: Any = json.loads(line)
        if "\\ud" in line.lower():
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: holds half of a surrogate pair, expected valid Unicode") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict) or not ({"text", "context"} & record.keys()):
        raise InputError(f'{where}: expected an object with "context", "choices" and "answer", or "text" and "items"')
    try:
        return Passage.model_validate(record) if "text" in record else _Question.model_validate(record).passage()
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(key) for key in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{where}: {field}: {message}" if field else f"{where}: {message}") from None
