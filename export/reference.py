"""What a bundle is compared with: logits and greedy ids recorded in a file, or computed on the spot by another model.

It knows arrays, token ids and the small interface of a model, not how optimum makes one nor how figures are judged.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import InputError
from lesonnx.model import Model
from lesonnx.runner import Runner
from lesonnx_export.compare import Logits

ARRAYS = ("input_ids", "logits", "greedy_prompt_len", "greedy_ids")
# A long text is compared in stretches of this many tokens, each from an empty context.
WINDOW_TOKENS = 512
# Without a recording: the greedy continuation that is compared, as the fixtures have it.
GREEDY_PROMPT_TOKENS = 24
GREEDY_TOKENS = 40


class LanguageModel(Protocol):
    """Anything that gives logits; each call starts from an empty context."""

    name: str
    vocab_size: int
    max_tokens: int

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Logits [T,V] at every position."""

    def greedy(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The likeliest continuation, token by token, that many tokens; no token ends it."""

    def close(self) -> None:
        """Free the model."""


class Reference(Protocol):
    """Windows of token ids with the logits that are right there, and a greedy continuation."""

    windows: list[list[int]]
    greedy_prompt: list[int]

    @property
    def name(self) -> str:
        """What the user called it."""

    def logits(self, place: int) -> Logits:
        """Logits [T,V] of a window."""

    def greedy_ids(self) -> list[int]:
        """What follows ``greedy_prompt``."""

    def close(self) -> None:
        """Free what is loaded."""


# -- recorded --------------------------------------------------------------------------------------------------------


@dataclass
class RecordedReference:
    """A ``.npz`` file, read and checked whole."""

    name: str
    windows: list[list[int]]
    greedy_prompt: list[int]
    _logits: Logits
    _greedy_ids: list[int]

    def logits(self, place: int) -> Logits:
        return self._logits

    def greedy_ids(self) -> list[int]:
        return self._greedy_ids

    def close(self) -> None:
        """Nothing is loaded."""


def read_recorded(path: Path, vocab_size: int, max_tokens: int) -> RecordedReference:
    """Read ``input_ids`` [T], ``logits`` [T,V], ``greedy_prompt_len`` and ``greedy_ids`` [n] of a ``.npz`` file.

    Other arrays in it are left alone. InputError in one line for whatever does not fit together, or does not fit a
    model of that vocabulary and context; pickled objects are refused.
    """
    arrays = read_arrays(path, ARRAYS)
    ids = integers(path, "input_ids", arrays["input_ids"], 1)
    logits = arrays["logits"]
    if logits.ndim != 2 or logits.dtype.kind != "f":
        raise InputError(f"{path}: logits must be floats [T,V], found {logits.dtype} {list(logits.shape)}")
    if len(ids) == 0 or len(ids) != len(logits):
        raise InputError(f"{path}: logits are of {len(logits)} tokens, input_ids are {len(ids)}")
    if logits.shape[1] != vocab_size:
        raise InputError(f"{path}: logits have a vocabulary of {logits.shape[1]}, the bundle's is {vocab_size}")
    if not np.isfinite(logits).all():
        raise InputError(f"{path}: logits hold values that are not finite")
    greedy = integers(path, "greedy_ids", arrays["greedy_ids"], 1)
    prompt_len = int(integers(path, "greedy_prompt_len", arrays["greedy_prompt_len"], 0))
    if not 1 <= prompt_len <= len(ids):
        raise InputError(f"{path}: greedy_prompt_len is {prompt_len}, expected 1 to {len(ids)}, the input_ids' length")
    for name, values in (("input_ids", ids), ("greedy_ids", greedy)):
        if values.size and not 0 <= values.min() <= values.max() < vocab_size:
            worst = int(values.min() if values.min() < 0 else values.max())
            raise InputError(f"{path}: {name} holds {worst}, expected ids from 0 to {vocab_size - 1}")
    if max(len(ids), prompt_len + len(greedy)) > max_tokens:
        raise InputError(f"{path}: has more tokens than the bundle's context of {max_tokens}")
    window = ids.tolist()
    return RecordedReference(
        str(path), [window], window[:prompt_len], logits.astype(np.float32, copy=False), greedy.tolist()
    )


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """These arrays of a ``.npz`` file; InputError in one line where one is missing or cannot be read."""
    # A file that is no archive would be unpickled by numpy if it could be: look first.
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path}: not a .npz file")
    arrays = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            for name in names:
                if name not in archive:
                    raise InputError(f"{path}: has no array {name!r}; expected {', '.join(names)}")
                arrays[name] = np.asarray(archive[name])
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        reason = "pickled objects are refused" if "allow_pickle" in str(error) else " ".join(str(error).split())
        raise InputError(f"{path}: not readable: {reason}") from None
    return arrays


def integers(path: Path, name: str, values: NDArray[Any], ndim: int) -> NDArray[Any]:
    """Integers of so many dimensions as they are; InputError for anything else."""
    if values.ndim != ndim or values.dtype.kind not in "iu":
        wanted = "integers [n]" if ndim else "one integer"
        raise InputError(f"{path}: {name} must be {wanted}, found {values.dtype} {list(values.shape)}")
    return values


# -- computed --------------------------------------------------------------------------------------------------------


@dataclass
class ComputedReference:
    """Another model, run on the same windows. Owns the model."""

    model: LanguageModel
    windows: list[list[int]]
    greedy_prompt: list[int]
    greedy_tokens: int

    @property
    def name(self) -> str:
        return self.model.name

    def logits(self, place: int) -> Logits:
        return self.model.logits(self.windows[place])

    def greedy_ids(self) -> list[int]:
        return self.model.greedy(self.greedy_prompt, self.greedy_tokens)

    def close(self) -> None:
        self.model.close()


def computed(model: LanguageModel, token_ids: Sequence[int], max_tokens: int) -> ComputedReference:
    """A model as the reference on token ids, cut into windows that fit both contexts."""
    context = min(max_tokens, model.max_tokens)
    windows = cut_windows(token_ids, min(WINDOW_TOKENS, context))
    # From the middle of a text: its title is often followed by a rule, which every model continues alike.
    middle = windows[(len(windows) - 1) // 2]
    prompt = middle[: max(1, min(GREEDY_PROMPT_TOKENS, context - GREEDY_TOKENS))]
    return ComputedReference(model, windows, prompt, min(GREEDY_TOKENS, context - len(prompt)))


def cut_windows(token_ids: Sequence[int], window_tokens: int) -> list[list[int]]:
    """Token ids in stretches of that length, the last as short as it comes."""
    return [list(token_ids[start : start + window_tokens]) for start in range(0, len(token_ids), window_tokens)]


def random_ids(num_tokens: int, vocab_size: int) -> list[int]:
    """The same random token ids each time."""
    return [int(token) for token in np.random.default_rng(0).integers(vocab_size, size=num_tokens)]


def continue_greedily(runner: Runner, logits: NDArray[np.float32], num_tokens: int) -> list[int]:
    """The likeliest tokens one after another, from logits [V] of what has run; the last one does not run."""
    found: list[int] = []
    while len(found) < num_tokens:
        if found:
            logits = runner.step(found[-1:], [0])[0]
        found.append(int(logits.argmax()))
    return found


class BundleModel:
    """A loaded bundle behind the interface of `LanguageModel`. Owns it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.name = str(model.bundle.directory)
        self.vocab_size = model.bundle.manifest.model.vocab_size
        self.max_tokens = model.bundle.manifest.model.max_position_embeddings

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with what the tokenizer puts around one."""
        return self.model.encode(text)

    def logits(self, token_ids: Sequence[int]) -> Logits:
        self.model.runner.rewind(0)
        return self.model.runner.prefill(list(token_ids), all_logits=True)

    def greedy(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        runner = self.model.runner
        runner.rewind(0)
        return continue_greedily(runner, runner.prefill(list(prompt_ids)), num_tokens) if num_tokens else []

    def close(self) -> None:
        self.model.close()
