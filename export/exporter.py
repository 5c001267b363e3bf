"""The export itself: rehearse, write parts and packs beside the target, rename when whole; resume what was broken off.

The main path is `export_bundle`. It knows no family and no operator.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial as bind
from pathlib import Path

import numpy as np
import onnx

from lesonnx import __version__
from lesonnx.errors import CheckpointError, InputError, LesonnxError
from lesonnx.manifest import Manifest, Twins
from lesonnx_export.calibrate import cache_spans
from lesonnx_export.calibrated import DIRECTORY as CALIBRATION_DIRECTORY
from lesonnx_export.calibrated import (
    Calibrated,
    Text,
    calibrate,
    check_calibration,
    check_directory,
    choose,
    existing_base,
    extra_bytes,
    kept_bytes,
    read_text,
)
from lesonnx_export.checkpoint import Checkpoint, Weights
from lesonnx_export.contract import check_target, make_manifest, model_facts
from lesonnx_export.executors import RunTasks
from lesonnx_export.expert import PACK_NAME
from lesonnx_export.journal import NAME as JOURNAL_NAME
from lesonnx_export.journal import Journal
from lesonnx_export.kv_cache import quantize_caches, scales_of
from lesonnx_export.pack import layer_directory, write_models, write_packs
from lesonnx_export.partial import held
from lesonnx_export.parts import Progress, check_length, write_parts, write_vision
from lesonnx_export.plan import ExportOptions, ExportPlan, make_plan
from lesonnx_export.precision import Decision
from lesonnx_export.sources import Sources
from lesonnx_export.stage import stage_model
from lesonnx_export.tokenizer import export_tokenizer
from lesonnx_export.twin_graph import TwinStore
from lesonnx_export.twins import TwinBuilder, write_twins
from lesonnx_export.workers import run_tasks as run_on_processes

# What an export is asked with and answers with, beside its own names.
__all__ = [
    "ExportOptions",
    "ExportPlan",
    "ExportReport",
    "Progress",
    "can_resume",
    "export_bundle",
    "make_manifest",
    "make_plan",
]

# Room left on the disk beside what the export itself needs.
SPARE_BYTES = 16 << 20
Decided = Callable[[ExportPlan, list[Decision]], None]


@dataclass
class ExportReport:
    """What was written, for the summary; ``vision_bits`` is None without eyes."""

    bundle: Path
    manifest: Manifest
    dense_bytes: int
    expert_bytes: int
    vision_bytes: int
    vision_bits: int | None
    total_bytes: int
    checkpoint_bytes: int
    notes: list[str]


def export_bundle(
    checkpoint_directory: Path,
    bundle: Path,
    options: ExportOptions | None = None,
    *,
    resume: bool = False,
    progress: Progress = lambda what, num_bytes: None,
    announce: Callable[[ExportPlan], None] = lambda plan: None,
    decided: Decided = lambda plan, decisions: None,
    run_tasks: RunTasks | None = None,
) -> ExportReport:
    """Export a checkpoint directory to a bundle directory that does not exist yet.

    Everything is written to ``.NAME.partial`` beside the target, which is renamed at the end. An export that was broken
    off leaves that directory: ``resume`` goes on with it, otherwise it is begun anew. ``progress`` is called with what
    is being done and the bytes written since the last call; ``announce`` once with the plan, and ``decided`` with what
    became of it where calibration chose the precisions. ``run_tasks`` does the work on experts (`executors.run_on` for
    an executor); without it ``options.num_workers`` processes do. None of that changes a byte.

    Raises CheckpointError or InputError for bad input (nothing is written then), LesonnxError when work fails.
    """
    options = options or ExportOptions()
    partial = _partial_of(bundle)
    with _failures_in_one_line(partial):
        _check_target(bundle)
        check_directory(options, bundle, partial)
        plan = make_plan(Checkpoint(checkpoint_directory), options)
        check_target(plan.architecture, options, plan.vision.eyes if plan.vision else None)
        check_calibration(plan, options)
        text = None if options.resolved_calibration is None else read_text(options.resolved_calibration)
        fingerprint = _fingerprint(plan, options, text)
        _check_disks(plan, options, partial)
        with held(partial, resume):
            journal = (Journal.reopen if resume else Journal.create)(partial, fingerprint)
            try:
                announce(plan)
                run_tasks = run_tasks or bind(run_on_processes, num_workers=options.num_workers)
                work = Work(options, partial, journal, progress, decided, run_tasks)
                report = _export(plan, text, work)
                _check_target(bundle)
                journal.remove()
                partial.replace(bundle)
            except CheckpointError:
                # Another try would meet the same tensor: nothing is left that looks as if it could be gone on with.
                shutil.rmtree(partial, ignore_errors=True)
                raise
            finally:
                journal.close()
    report.bundle = bundle
    return report


def can_resume(bundle: Path) -> bool:
    """Whether an export to this bundle was begun and broken off."""
    return (_partial_of(bundle) / JOURNAL_NAME).is_file()


def _partial_of(bundle: Path) -> Path:
    return bundle.absolute().parent / f".{bundle.name}.partial"


def _check_target(bundle: Path) -> None:
    if os.path.lexists(bundle):
        raise InputError(f"{bundle}: already exists; remove it or choose another name")
    if not bundle.absolute().parent.is_dir():
        raise InputError(f"{bundle.parent}: no such directory to write the bundle into")


@dataclass(frozen=True)
class Work:
    """What all steps of an export share."""

    options: ExportOptions
    partial: Path
    journal: Journal
    progress: Progress
    decided: Decided
    run_tasks: RunTasks


def _export(plan: ExportPlan, text: Text | None, work: Work) -> ExportReport:
    options, partial, journal, progress = work.options, work.partial, work.journal, work.progress
    # First, since a broken tokenizer or token id should not show after hours of quantizing.
    model_facts(plan)
    shutil.rmtree(partial / "tokenizer", ignore_errors=True)
    progress("tokenizer", 0)
    tokenizer, warnings = export_tokenizer(plan.checkpoint.directory, partial / "tokenizer")
    calibrated = None
    if text is not None:
        path = partial / tokenizer.json_path if tokenizer and tokenizer.json_path else None
        calibrated = calibrate(plan, options, text, path, partial, journal, progress)
        plan, decisions = choose(plan, options, calibrated, journal, work.run_tasks, progress)
        if decisions:
            work.decided(plan, decisions)
        if path is None:
            warnings.append("without a tokenizer, experts are calibrated on random tokens: use --calibration with one")
    dense = write_parts(plan, options, partial, journal, progress, Weights(plan.checkpoint))
    vision = write_vision(plan, partial, journal, progress, Weights(plan.checkpoint))
    losses = _write_experts(plan, calibrated, work)
    shutil.rmtree(partial / CALIBRATION_DIRECTORY, ignore_errors=True)
    write_stages(plan, partial)
    record = calibrated.record(losses) if calibrated else None
    twins = write_all_twins(plan, options, partial, progress, Weights(plan.checkpoint))
    manifest = make_manifest(plan, options, dense, tokenizer, record, twins, vision)
    if options.kv_bits == 8:
        manifest = quantize_kv(partial, journal, progress, manifest)
        if tokenizer is None:
            warnings.append("without a tokenizer, the scales of the attention caches are those of random tokens")
    return finish(plan, partial, progress, manifest, warnings)


def finish(
    plan: ExportPlan, partial: Path, progress: Progress, manifest: Manifest, warnings: list[str]
) -> ExportReport:
    """Write the manifest and the checksums: the bundle is whole once the journal goes."""
    (partial / "manifest.json").write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    progress("checksums", 0)
    total_bytes = write_checksums(partial)
    return ExportReport(
        bundle=partial,
        manifest=manifest,
        dense_bytes=plan.dense_bytes,
        expert_bytes=plan.expert_bytes,
        vision_bytes=plan.vision_bytes,
        vision_bits=None if plan.vision is None else plan.vision.precision.dense_bits,
        total_bytes=total_bytes,
        checkpoint_bytes=sum(info.num_bytes for info in plan.checkpoint.tensors.values()),
        notes=[*plan.notes, *warnings],
    )


def write_all_twins(
    plan: ExportPlan, options: ExportOptions, partial: Path, progress: Progress, weights: Weights
) -> Twins | None:
    """Twins for accelerators, where they were asked for; every run makes them anew, they take little beside experts."""
    twins = options.twins(plan.architecture.max_position_embeddings)
    if twins is None:
        return None
    progress("twins", 0)
    store = TwinStore(partial / "dense" / TwinStore.location)
    try:
        builder = TwinBuilder(plan.architecture, weights, store, options.precision, twins)
        return write_twins(builder, partial, lambda num_bytes: progress("twins", num_bytes))
    finally:
        store.close()


def _write_experts(plan: ExportPlan, calibrated: Calibrated | None, work: Work) -> dict[int, float | None]:
    """Write the packs that the journal does not hold; gives the expected loss by layer where there is calibration."""
    partial, journal, progress = work.partial, work.journal, work.progress
    losses = {int(entry["layer_idx"]): entry["expected_loss"] for entry in journal.entries("experts")}
    done = set(losses)
    for layer in plan.layers:
        if layer.layer_idx in done:
            check_length(layer_directory(partial, layer.layer_idx) / PACK_NAME, layer.pack_bytes, exactly=True)
            # Small and derived from the plan alone: written again, so a power cut cannot have left them half there.
            write_models(partial, layer)
    progress("experts", sum(layer.pack_bytes for layer in plan.layers if layer.layer_idx in done))
    todo = [layer for layer in plan.layers if layer.layer_idx not in done]
    if todo:
        sources = calibrated.sources if calibrated else Sources(plan.checkpoint.directory)
        packs = write_packs(sources, partial, todo, work.run_tasks, lambda num_bytes: progress("experts", num_bytes))
        with closing(packs) as layers:
            for written in layers:
                layer = written.plan
                losses[layer.layer_idx] = written.expected_loss
                journal.add("experts", layer.pack_bytes, layer_idx=layer.layer_idx, expected_loss=written.expected_loss)
    return losses


def quantize_kv(partial: Path, journal: Journal, progress: Progress, manifest: Manifest) -> Manifest:
    """Turn the caches of what is written to 8 bits: run it once on the calibration text, then rewrite its parts.

    What the run found is in the journal before the first part changes, so a broken export goes on from there.
    """
    if not journal.entries("caches"):
        # The runner opens what is there as a bundle.
        (partial / "manifest.json").write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        progress("calibrating caches", 0)
        journal.add("caches", 0, spans={name: span.tolist() for name, span in cache_spans(partial).items()})
    spans = {name: np.array(span, np.float32) for name, span in journal.entries("caches")[0]["spans"].items()}
    return quantize_caches(partial, manifest, scales_of(spans))


def write_stages(plan: ExportPlan, partial: Path) -> None:
    """One model a kind: the kernel engine's, which takes weights as an input."""
    routed = {id(layer.kind) for layer in plan.layers}
    for kind in plan.kinds:
        slots = plan.architecture.num_experts_per_tok if id(kind) in routed else 1
        (partial / str(kind.stage)).write_bytes(stage_model(kind, slots).SerializeToString())


def write_checksums(root: Path) -> int:
    """Write ``checksums.json`` (size and SHA-256 of every file); gives the bytes of all files together."""
    files: dict[str, dict[str, int | str]] = {}
    total_bytes = 0
    left_out = {root / "checksums.json", root / JOURNAL_NAME}
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p not in left_out):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(root).as_posix()] = {"size_bytes": path.stat().st_size, "sha256": digest}
        total_bytes += path.stat().st_size
    text = json.dumps({"algorithm": "sha256", "files": files}, indent=1) + "\n"
    (root / "checksums.json").write_text(text, encoding="utf-8")
    return total_bytes + len(text)


def _fingerprint(plan: ExportPlan, options: ExportOptions, text: Text | None) -> str:
    """What a broken export must share with this one to be gone on with: the options, the texts, the checkpoint."""
    files = {}
    for path in sorted({info.file for info in plan.checkpoint.tensors.values()}):
        stat = path.stat()
        owner = "" if path.parent == plan.checkpoint.directory else "drafter/"
        files[owner + path.name] = [stat.st_size, stat.st_mtime_ns]
    what = {
        "version": __version__,
        "config": plan.checkpoint.config,
        "drafter": plan.drafter and plan.drafter.config.values,
        "files": files,
        "bits": [options.bits, options.kv_bits, *asdict(options.precision).values()],
        "target": options.target,
        "twins": repr(options.twins(plan.architecture.max_position_embeddings)),
        "vision": repr(plan.vision),
        "precisions": [options.precisions, options.experts_target_size, text and text.sha256],
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _allocated_bytes(directory: Path) -> int:
    """What a broken export takes on the disk already; its packs are sparse until they are written."""
    blocks = (getattr(path.stat(), "st_blocks", 0) for path in directory.rglob("*") if path.is_file())
    return 512 * sum(blocks)


def _check_disks(plan: ExportPlan, options: ExportOptions, partial: Path) -> None:
    """LesonnxError where the bundle or a calibration that is kept does not fit its disk, or both do not fit one."""
    needed_bytes = plan.total_bytes + extra_bytes(plan, options) - _allocated_bytes(partial)
    directory = options.calibration_directory
    kept = kept_bytes(plan, options)
    if directory is not None and kept:
        base = existing_base(directory)
        kept = max(0, kept - _allocated_bytes(directory))
        if base.stat().st_dev == partial.parent.stat().st_dev:
            needed_bytes += kept
        else:
            _check_disk(base, kept, "the calibration")
    _check_disk(partial.parent, needed_bytes)


def _check_disk(directory: Path, needed_bytes: int, what: str = "the bundle") -> None:
    needed_bytes = max(needed_bytes, 0) + SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise LesonnxError(f"{directory}: {what} needs {needed_bytes:,} bytes, the disk has {free:,} free")


@contextmanager
def _failures_in_one_line(partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise LesonnxError(f"{partial}: the disk is full; make room and export again with --resume") from None
        raise LesonnxError(f"{error.filename or partial}: {error.strerror or error}") from None
    except onnx.checker.ValidationError as error:
        raise LesonnxError(f"a part did not pass the ONNX checker: {str(error).splitlines()[0]}") from None
