"""One evaluation: texts and tasks through a bundle and its reference, side by side.

It wires windows, places and scoring together; what figures are made of their sums, `report` says.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from lesonnx.bundle import Bundle
from lesonnx.errors import InputError
from lesonnx.memory import auto_budget_bytes
from lesonnx.model import LoadOptions, Model, load
from lesonnx.tokenizer import Tokenizer
from lesonnx_export.evaluate.bootstrap import Sums
from lesonnx_export.evaluate.kept import KeptAnswers
from lesonnx_export.evaluate.places import PlacedPassage, place
from lesonnx_export.evaluate.scoring import Answers, answer
from lesonnx_export.evaluate.tasks import Task, spread
from lesonnx_export.evaluate.windows import WindowSums, check_vocabularies, sum_windows
from lesonnx_export.reference import WINDOW_TOKENS, cut_windows

Progress = Callable[[int], None]
# Texts are tokenized in pieces of about so much: one long text is a tokenizer's worst case. It is a window's, however
# long the tokens are.
STRETCH_CHARS = 16_384


def _nothing(count: int) -> None:
    """What hears of progress where nobody asks."""


@dataclass(frozen=True)
class TaskSums:
    """A task's sums by passage: ``groups`` [P,5] holds items, right ones of the bundle by acc and acc_norm, and the
    reference's (zero without one). ``skipped`` counts items that could not be asked, by the reason.
    """

    groups: Sums
    skipped: Counter[str]

    @property
    def num_items(self) -> int:
        """Items that were asked."""
        return int(self.groups[:, 0].sum())


@dataclass
class Evaluator:
    """A loaded bundle and its reference, which is asked the same. Owns both; not thread-safe.

    ``max_tokens`` is the context that both have; tokens are those of the bundle's tokenizer.
    """

    bundle: Model
    reference: Model | None
    kept: KeptAnswers = field(default_factory=lambda: KeptAnswers(None))

    def __post_init__(self) -> None:
        """InputError where the bundle has no tokenizer, or the reference another vocabulary."""
        if self.bundle.tokenizer is None:
            raise InputError(f"{self.bundle.bundle.directory}: has no tokenizer, so texts and tasks mean nothing to it")
        self.tokenizer: Tokenizer = self.bundle.tokenizer
        check_vocabularies(self.bundle, self.reference)
        if self.reference is not None and self.reference.tokenizer is not None:
            _check_tokens(self.bundle, self.tokenizer, self.reference, self.reference.tokenizer)
        models = [self.bundle, self.reference] if self.reference else [self.bundle]
        self.max_tokens = min(model.bundle.manifest.model.max_position_embeddings for model in models)

    def close(self) -> None:
        """Free both."""
        self.bundle.close()
        if self.reference is not None:
            self.reference.close()

    # -- texts -------------------------------------------------------------------------------------------------------

    def text_windows(self, text: str, most_tokens: int | None) -> list[list[int]]:
        """A text in windows of at most 512 tokens, each with what the tokenizer puts before a text.

        Of more than ``most_tokens`` those of about as many, spread evenly over the text.
        """
        before = self._before_text()
        window = min(WINDOW_TOKENS, self.max_tokens)
        most = None if most_tokens is None else max(1, most_tokens // window)
        stretches = _stretches(text)
        if most is not None and len(stretches) > most:
            # A window of each of some is enough; a long text need not be tokenized for that.
            pieces = [ids[: window - len(before)] for ids in self.tokenizer.encode_all(spread(stretches, most))]
        else:
            ids = [token for ids in self.tokenizer.encode_all(stretches) for token in ids]
            pieces = cut_windows(ids, window - len(before))
            pieces = pieces if most is None else spread(pieces, most)
        return [before + piece for piece in pieces if piece]

    def task_windows(self, task: Task, most_tokens: int | None) -> list[list[int]]:
        """The passages of a task as windows, as far as ``most_tokens`` go."""
        window = min(WINDOW_TOKENS, self.max_tokens)
        passages = task.passages if most_tokens is None else spread(task.passages, max(1, most_tokens // window))
        windows = [self.tokenizer.encode_with_ends(passage.text)[0][:window] for passage in passages]
        return [ids for ids in windows if ids]

    def read(self, windows: Sequence[Sequence[int]], progress: Progress = _nothing) -> WindowSums:
        """Run both models on windows; ``progress`` is called with the tokens done."""
        return sum_windows(self.bundle, self.reference, windows, progress)

    def _before_text(self) -> list[int]:
        """What the tokenizer puts before any text."""
        ids, _ = self.tokenizer.encode_with_ends("a")
        return ids[: len(ids) - len(self.tokenizer.encode("a", add_special_tokens=False))]

    # -- tasks -------------------------------------------------------------------------------------------------------

    def ask(self, task: Task, progress: Progress = _nothing) -> TaskSums:
        """Ask both models a task; ``progress`` is called with the items done. InputError where none can be asked."""
        placed: list[PlacedPassage] = []
        skipped: Counter[str] = Counter()
        for passage in task.passages:
            found = place(passage, self.tokenizer, self.max_tokens)
            skipped += found.skipped
            if found.items:
                placed.append(found)
        if not placed:
            reason = ", ".join(f"{count} {what}" for what, count in skipped.items())
            raise InputError(f"{task.name}: no item can be asked: {reason}")
        sizes = np.array([len(passage.items) for passage in placed])
        groups = np.zeros((len(placed), 5))
        groups[:, 0] = sizes
        passed = task.num_items - int(sizes.sum())
        for number, model in enumerate([self.bundle, self.reference] if self.reference else [self.bundle]):
            answers = self._answers(model, task, placed, progress)
            begins = np.cumsum(sizes) - sizes
            groups[:, 1 + 2 * number] = np.add.reduceat(answers.acc.astype(np.float64), begins)
            groups[:, 2 + 2 * number] = np.add.reduceat(answers.acc_norm.astype(np.float64), begins)
            progress(passed)
        return TaskSums(groups, skipped)

    def _answers(self, model: Model, task: Task, placed: list[PlacedPassage], progress: Progress) -> Answers:
        num_items = sum(len(passage.items) for passage in placed)
        digest = self._digest(task)
        answers = self.kept.find(model, digest, num_items)
        if answers is not None:
            progress(num_items)
            return answers
        parts = []
        for passage in placed:
            parts.append(answer(model, passage))
            progress(len(passage.items))
        answers = Answers.joined(parts)
        self.kept.keep(model, digest, answers)
        return answers

    def _digest(self, task: Task) -> str:
        """Of all that makes a task's tokens."""
        files = self.bundle.bundle.manifest.tokenizer
        path = files.json_path if files else None
        content = self.bundle.bundle.file(path).read_bytes() if path else b""
        return f"{task.digest} {hashlib.sha256(content).hexdigest()} {self.max_tokens}"


def _stretches(text: str) -> list[str]:
    """A text in pieces of at most `STRETCH_CHARS` that begin with a line, where there are lines."""
    starts = [0]
    while len(text) - starts[-1] > STRETCH_CHARS:
        end = text.rfind("\n", starts[-1] + STRETCH_CHARS // 2, starts[-1] + STRETCH_CHARS)
        starts.append(end + 1 if end >= 0 else starts[-1] + STRETCH_CHARS)
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def _check_tokens(bundle: Model, ours: Tokenizer, reference: Model, theirs: Tokenizer) -> None:
    """InputError where an id is another token to the reference: the sizes alone would not tell."""
    found, expected = theirs.vocabulary(), ours.vocabulary()
    differing = sorted(found.items() ^ expected.items(), key=lambda entry: entry[1])
    if differing:
        token_id = differing[0][1]
        names = [tokenizer.token_name(token_id) for tokenizer in (theirs, ours)]
        raise InputError(
            f"{reference.bundle.directory}: token {token_id} is {names[0]!r} there,"
            f" {names[1]!r} in {bundle.bundle.directory}; only models of one vocabulary can be compared"
        )


def open_evaluator(
    bundle: Bundle, reference: Bundle | None, options: LoadOptions | None = None, kept: KeptAnswers | None = None
) -> Evaluator:
    """Load a bundle and its reference by the same options, with experts in as much memory as there is for both.

    A budget that is given holds for each of them (for the reference, whose experts are larger, the least it needs where
    that is more); ``accelerate`` holds for the bundle alone. Raises what `load` raises, and InputError where they do
    not go together.
    """
    options = options or LoadOptions()
    bundles = [bundle, reference] if reference else [bundle]
    with ExitStack() as stack:
        models = []
        # All before the first is loaded: what is available then is for all of them.
        for opened, loading in [(opened, _load_options(opened, bundles, options)) for opened in bundles]:
            models.append(load(opened, loading))
            stack.callback(models[-1].close)
        evaluator = Evaluator(models[0], models[1] if reference else None, kept or KeptAnswers(None))
        stack.pop_all()
    return evaluator


def _load_options(bundle: Bundle, bundles: list[Bundle], options: LoadOptions) -> LoadOptions:
    """The options of one of the bundles: the user's, with budgets that it can keep."""
    if bundle is not bundles[0]:
        # A reference without twins: what they round is the first one's to answer for.
        options = replace(options, accelerate="off")
    keeps_all = options.schedule == "resident"
    least = bundle.expert_bytes if keeps_all else bundle.least_budget_bytes
    if options.expert_budget_bytes is not None or options.memory_budget_bytes is not None:
        if bundle is bundles[0]:
            return options
        # The process's bound is the first one's to keep.
        budget = max(options.expert_budget_bytes or 0, least)
        return replace(options, expert_budget_bytes=budget, memory_budget_bytes=None)
    wanted = sum(each.expert_bytes for each in bundles)
    try:
        room = wanted if keeps_all else auto_budget_bytes()
    except InputError:
        room = wanted  # the system does not say
    if wanted <= room:
        return options
    return replace(options, expert_budget_bytes=max(least, int(room * bundle.expert_bytes / wanted)))
