"""Calibration within an export: its text, its run, and the precisions that follow. What is done is not done again.

It wires the run, the weighing and the choice together; none of their work is done here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

from lesonnx import __version__
from lesonnx.errors import InputError, LesonnxError
from lesonnx.manifest import CalibratedLayer, Calibration
from lesonnx.tokenizer import Tokenizer
from lesonnx_export.activations import RANDOM_SHARE, WINDOW_TOKENS, calibration_steps, run_calibration
from lesonnx_export.calibrate import random_ids
from lesonnx_export.drafter import PREFIX as DRAFTER_PREFIX
from lesonnx_export.executors import RunTasks
from lesonnx_export.journal import Journal
from lesonnx_export.plan import TOPICS, ExportOptions, ExportPlan, plan_experts
from lesonnx_export.precision import (
    HALVES,
    Decision,
    Group,
    GroupLosses,
    baseline_bytes,
    decide,
    groups_of,
    layer_precisions,
    target_bytes,
)
from lesonnx_export.sources import Sources
from lesonnx_export.statistics import StatisticsDirectory
from lesonnx_export.weigh import num_weighed, weigh

# Where statistics lie while an export is under way.
DIRECTORY = "calibration"
# In a directory that is kept: what it is of, and the losses that were weighed.
STAMP_NAME, LOSSES_NAME = "calibrated", "losses.json"
# Tokens that are run, in windows spread over the text: what more of them would add is small (docs/quantization.md).
MOST_WINDOWS = 32
LEAST_TOKENS = 256
# Characters that hold a window's tokens in any script that a tokenizer knows well.
WINDOW_CHARACTERS = 8 * WINDOW_TOKENS
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Text:
    """A calibration text and its digest, which belongs to an export: another text makes other experts."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()

    def windows(self) -> list[str]:
        """Stretches spread evenly over the text, each from a line's beginning if one is near; all of a short text."""
        count = max(1, min(MOST_WINDOWS, -(-len(self.content) // WINDOW_CHARACTERS)))
        starts = [place * len(self.content) // count for place in range(count)]
        pieces = []
        for start, end in zip(starts, [*starts[1:], len(self.content)], strict=True):
            piece = self.content[start:end][: 2 * WINDOW_CHARACTERS]
            line = piece.find("\n") + 1 if start else 0
            pieces.append(piece[line:] if line < len(piece) // 2 else piece)
        return pieces


def read_text(source: Path | Literal["topics"]) -> Text:
    """A calibration text; InputError where the file is not readable as UTF-8."""
    if source == TOPICS:
        return Text("Python's help topics", "\n".join(topics[name] for name in sorted(topics)))
    path = Path(source)
    try:
        return Text(str(path), path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not readable as UTF-8 text: {error}") from None


def token_ids(text: Text, tokenizer: Path | None, vocab_size: int) -> list[int]:
    """The tokens to run, window after window; random ones without a tokenizer. InputError for too short a text."""
    if tokenizer is None:
        return random_ids(vocab_size)
    encoder = Tokenizer.from_file(tokenizer)
    ids: list[int] = []
    for piece in text.windows():
        ids += encoder.encode(piece, add_special_tokens=False)[:WINDOW_TOKENS]
    if len(ids) < LEAST_TOKENS:
        raise InputError(f"{text.name}: holds {len(ids)} tokens to calibrate on, expected at least {LEAST_TOKENS}")
    return ids


@dataclass(frozen=True)
class Calibrated:
    """What an export knows of its calibration: where its statistics lie, and what the manifest says of it."""

    sources: Sources
    text_sha256: str | None
    num_tokens: int
    baseline_bytes: int
    target_size: float | None

    def record(self, losses: Mapping[int, float | None]) -> Calibration:
        """The manifest's record; ``losses`` by layer."""
        return Calibration(
            text_sha256=self.text_sha256,
            num_tokens=self.num_tokens,
            target_size=self.target_size,
            baseline_bytes=self.baseline_bytes,
            layers=[
                CalibratedLayer(layer_idx=layer_idx, expected_loss=loss or 0.0)
                for layer_idx, loss in sorted(losses.items())
            ],
        )


def check_calibration(plan: ExportPlan, options: ExportOptions) -> None:
    """InputError, before any work, for options that do not go together and for a target size that no choice has."""
    if options.bits == 32 and options.precisions is None and options.resolved_calibration is not None:
        raise InputError("--calibration is for experts of 8, 4 or 2 bits: float32 is an exact copy")
    if options.calibration_directory is not None and options.resolved_calibration is None:
        raise InputError("--calibration-directory is without effect here: it goes with --calibration or a target size")
    if options.experts_target_size is not None:
        if options.precisions is not None:
            raise InputError("precisions and a target size are given: one of them says how experts are stored")
        target_bytes(groups_of(plan.architecture), options.experts_target_size, options.block_size)


def check_directory(options: ExportOptions, bundle: Path, partial: Path) -> None:
    """InputError, before any work, for a calibration directory that is none, or that the export itself needs.

    It need not be there yet, and may be read-only once it holds all that is wanted of it.
    """
    directory = options.calibration_directory
    if directory is None:
        return
    for place in (bundle, partial):
        if directory.resolve().is_relative_to(place.resolve()):
            raise InputError(f"--calibration-directory {directory}: lies in {place}, which becomes the bundle")
    base = existing_base(directory)
    if not base.is_dir():
        raise InputError(f"{directory}: cannot be a calibration directory: {base} is not a directory")
    losses_there = options.experts_target_size is None or (directory / LOSSES_NAME).is_file()
    is_whole = StatisticsDirectory(directory).is_complete and losses_there
    if not os.access(base, os.R_OK | os.X_OK | (0 if is_whole else os.W_OK)):
        raise InputError(f"{directory}: the calibration directory cannot be {'read' if is_whole else 'written'}")


def existing_base(directory: Path) -> Path:
    """The directory, or what there is already of the way to it."""
    whole = directory.absolute()
    return next(path for path in (whole, *whole.parents) if path.exists())


def extra_bytes(plan: ExportPlan, options: ExportOptions) -> int:
    """What calibration takes of the bundle's disk beside the planned bundle: statistics, unless they are kept
    elsewhere, and experts that may become larger."""
    if options.resolved_calibration is None:
        return 0
    share = options.experts_target_size or 0.0
    statistics = 0 if options.calibration_directory else _statistics_bytes(plan)
    return statistics + max(0, int(share * plan.expert_bytes) - plan.expert_bytes)


def kept_bytes(plan: ExportPlan, options: ExportOptions) -> int:
    """What calibration will write into a directory of its own: statistics, and for a while the largest dense part."""
    directory = options.calibration_directory
    if directory is None or StatisticsDirectory(directory).is_complete:
        return 0
    return _statistics_bytes(plan) + 4 * plan.architecture.vocab_size * plan.architecture.hidden_size


def _statistics_bytes(plan: ExportPlan) -> int:
    architecture = plan.architecture
    num_tokens = int((1 + RANDOM_SHARE) * MOST_WINDOWS) * WINDOW_TOKENS
    return len(plan.layers) * num_tokens * (2 * architecture.hidden_size + 8 * architecture.num_experts_per_tok + 4)


def calibrate(
    plan: ExportPlan,
    options: ExportOptions,
    text: Text,
    tokenizer: Path | None,
    partial: Path,
    journal: Journal,
    progress: Progress,
) -> Calibrated:
    """Run the calibration text through the checkpoint, unless statistics of it are there or none are needed any more.

    InputError for statistics that are not whole or another calibration's; LesonnxError for a full disk.
    """
    ids = token_ids(text, tokenizer, plan.architecture.vocab_size)
    kept = options.calibration_directory
    directory = kept or partial / DIRECTORY
    if _is_needed(plan, options, journal):
        with _full_disk_in_one_line(directory):
            if kept is not None:
                _claim(kept, _stamp(plan, ids))
            _run(plan, ids, directory, journal, progress)
        if not journal.entries("calibration"):
            journal.add("calibration", 0, directory=str(kept.absolute()) if kept else None)
    return Calibrated(
        sources=Sources(plan.checkpoint.directory, directory),
        text_sha256=None if tokenizer is None else text.sha256,
        num_tokens=len(ids),
        baseline_bytes=baseline_bytes(groups_of(plan.architecture), options.block_size),
        target_size=options.experts_target_size,
    )


def _is_needed(plan: ExportPlan, options: ExportOptions, journal: Journal) -> bool:
    """Whether statistics are still read: not once all precisions are chosen and all experts are written."""
    is_chosen = options.experts_target_size is None or bool(journal.entries("losses"))
    return not is_chosen or len(journal.entries("experts")) < len(plan.layers)


def _run(plan: ExportPlan, ids: Sequence[int], directory: Path, journal: Journal, progress: Progress) -> None:
    """Have whole statistics in the directory: those that are there, or those of a run."""
    statistics = StatisticsDirectory(directory)
    if statistics.is_complete:
        architecture = plan.architecture
        num_slots = architecture.num_experts_per_tok
        for layer in plan.layers:
            has_shared = layer.shared_kind is not None
            statistics.check(layer.layer_idx, architecture.hidden_size, architecture.num_experts, num_slots, has_shared)
    else:
        for entry in journal.entries("calibration"):
            before = entry.get("directory")
            if before and Path(before) != directory.absolute() and StatisticsDirectory(Path(before)).is_complete:
                raise InputError(
                    f"{directory}: does not hold the calibration that this export was begun with:"
                    f" go on with --calibration-directory {before}"
                )
        steps = _counted(progress, "calibrating: step", calibration_steps(plan))
        run_calibration(plan, ids, directory, lambda what, count: steps(count))


@contextmanager
def _full_disk_in_one_line(directory: Path) -> Iterator[None]:
    """LesonnxError, naming the directory, where its disk is full. NumPy says so of an array without an errno."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or (error.errno is None and "requested and" in str(error)):
            raise LesonnxError(f"{directory}: the disk is full; make room and export again with --resume") from None
        raise


def _stamp(plan: ExportPlan, ids: Sequence[int]) -> str:
    """What a kept calibration is of: the checkpoint, without a drafter's, and the tokens that were run."""
    tensors = plan.checkpoint.tensors.items()
    files = sorted({info.file for name, info in tensors if not name.startswith(DRAFTER_PREFIX)})
    facts = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    what = [__version__, plan.checkpoint.config, facts, list(ids)]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _claim(directory: Path, stamp: str) -> None:
    """Make a directory for what calibration finds; InputError where it holds another one's."""
    path = directory / STAMP_NAME
    temporary = path.with_name(f"{STAMP_NAME}.partial")
    if directory.is_dir() and any(found != temporary for found in directory.iterdir()):
        if not path.is_file() or path.read_bytes() != stamp.encode():
            raise InputError(
                f"{directory}: holds something else than this calibration, as {path.name} in it says;"
                " choose an empty directory"
            )
        return
    directory.mkdir(parents=True, exist_ok=True)
    # A stamp that a full disk cut would make the directory another calibration's.
    temporary.write_text(stamp, encoding="utf-8")
    temporary.replace(path)


def choose(
    plan: ExportPlan,
    options: ExportOptions,
    calibrated: Calibrated,
    journal: Journal,
    run_tasks: RunTasks,
    progress: Progress,
) -> tuple[ExportPlan, list[Decision]]:
    """The plan with the precision of every layer chosen for the target size, and the choice."""
    if options.experts_target_size is None:
        return plan, []
    groups = groups_of(plan.architecture)
    if not journal.entries("losses"):
        journal.add("losses", 0, losses=_losses(groups, calibrated, run_tasks, progress))
    losses = journal.entries("losses")[0]["losses"]
    most_bytes = target_bytes(groups, options.experts_target_size, options.block_size)
    decisions = decide(groups, losses, most_bytes, options.block_size)
    kinds, layers = plan_experts(plan.architecture, layer_precisions(decisions))
    return replace(plan, kinds=kinds, layers=layers), decisions


def _losses(
    groups: Sequence[Group], calibrated: Calibrated, run_tasks: RunTasks, progress: Progress
) -> list[GroupLosses]:
    """The losses of all groups at all of their precisions; taken from a directory that holds them already."""
    path = (calibrated.sources.statistics or Path()) / LOSSES_NAME
    if path.is_file():
        return _read_losses(path, groups)
    weighed = _counted(progress, "weighing precisions: expert", num_weighed(groups))
    losses = weigh(calibrated.sources, groups, run_tasks, weighed)
    temporary = path.with_name(f"{LOSSES_NAME}.partial")
    with _full_disk_in_one_line(path.parent):
        temporary.write_text(json.dumps(losses), encoding="utf-8")
        temporary.replace(path)
    return losses


def _read_losses(path: Path, groups: Sequence[Group]) -> list[GroupLosses]:
    """Losses that were kept; InputError where they are not one finite number for each precision of each group."""
    again = "remove it, and they are weighed again"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as the losses of precisions ({error}); {again}") from None
    wanted = [[len(group.precisions(half)) for half in range(len(HALVES))] for group in groups]
    try:
        found = [[len(half) for half in halves] for halves in kept]
        numbers = [number for halves in kept for half in halves for number in half]
        is_whole = found == wanted and all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
    except (TypeError, OverflowError):
        is_whole = False
    if not is_whole:
        raise InputError(
            f"{path}: expected a finite loss for each precision of {len(groups)} groups of experts; {again}"
        )
    losses: list[GroupLosses] = kept
    return losses


def _counted(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """Say what is done, and how much of it; the bytes of the bundle are none of it."""
    done = 0

    def count(steps: int) -> None:
        nonlocal done
        done += steps
        progress(f"{what} {done} of {total}", 0)

    count(0)
    return count
