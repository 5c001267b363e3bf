"""The export itself: rehearse, write parts and packs beside the target, rename when whole; resume what was broken off.

The main path is `export_bundle`. It knows no family and no operator.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import onnx

from lesonnx import __version__
from lesonnx.errors import CheckpointError, InputError, LesonnxError
from lesonnx.manifest import (
    Bits,
    ExpertKind,
    ExpertLayer,
    Manifest,
    ModelFacts,
    Part,
    Quantization,
    State,
    TokenizerFiles,
)
from lesonnx_export.architectures import make_decoder
from lesonnx_export.architectures.base import Decoder
from lesonnx_export.blocks import DenseBits, KvBits, Operators, Precision
from lesonnx_export.checkpoint import Checkpoint, Weights, read_json
from lesonnx_export.config import Config
from lesonnx_export.expert import PACK_NAME, make_kind
from lesonnx_export.graph import DenseStore, StoredTensor
from lesonnx_export.journal import NAME as JOURNAL_NAME
from lesonnx_export.journal import Journal
from lesonnx_export.pack import LayerPlan, layer_directory, read_expert, write_models, write_packs
from lesonnx_export.segments import BuiltPart, PartBuilder
from lesonnx_export.stage import stage_model
from lesonnx_export.tokenizer import export_tokenizer

ONNXRUNTIME_AT_LEAST = "1.24"
# Its GroupQueryAttention takes float32 queries over a float16 cache; 1.24 does not.
ONNXRUNTIME_AT_LEAST_FOR_FLOAT16_CACHES = "1.29"
# Room left on the disk beside what the export itself needs.
SPARE_BYTES = 16 << 20
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class ExportOptions:
    """What the user chose. ``num_workers`` processes quantize experts; it does not change a byte of the result."""

    bits: Bits = 4
    dense_bits: DenseBits | None = None
    block_size: int = 128
    kv_bits: KvBits = 32
    operators: Operators = "native"
    prefill_chunk_tokens: int = 512
    num_workers: int = field(default_factory=lambda: max(1, min(os.cpu_count() or 1, 8)))

    @property
    def resolved_dense_bits(self) -> DenseBits:
        return self.dense_bits or (32 if self.bits == 32 else 4)

    @property
    def precision(self) -> Precision:
        return Precision(self.resolved_dense_bits, self.block_size, self.kv_bits, self.operators)


@dataclass
class ExportReport:
    """What was written, for the summary."""

    bundle: Path
    manifest: Manifest
    dense_bytes: int
    expert_bytes: int
    total_bytes: int
    checkpoint_bytes: int
    notes: list[str]


@dataclass
class ExportPlan:
    """A whole export, known before any work: what will be written, from which tensors, and how large it is."""

    checkpoint: Checkpoint
    architecture: Decoder
    part_names: list[str]
    layers: list[LayerPlan]
    kinds: list[ExpertKind]
    dense_bytes: int
    part_ends: list[int]
    skipped: dict[str, str]
    notes: list[str]
    num_parameters: int
    num_active_parameters: int

    @property
    def expert_bytes(self) -> int:
        return sum(layer.pack_bytes for layer in self.layers)

    @property
    def total_bytes(self) -> int:
        return self.dense_bytes + self.expert_bytes


def make_plan(checkpoint: Checkpoint, options: ExportOptions, weights: Weights | None = None) -> ExportPlan:
    """Walk through the whole export without reading weights; CheckpointError for anything that cannot be exported."""
    config = Config(checkpoint.config)
    try:
        return _rehearse(checkpoint, config, options, weights or Weights(checkpoint, rehearsal=True))
    except CheckpointError as error:
        if not config.defaulted:
            raise
        left_out = ", ".join(sorted(config.defaulted))
        raise CheckpointError(f"{error} (config.json leaves out {left_out}: transformers' defaults hold)") from None


def _rehearse(checkpoint: Checkpoint, config: Config, options: ExportOptions, weights: Weights) -> ExportPlan:
    architecture = make_decoder(config)
    if not architecture.moe_layers:
        raise CheckpointError("config.json: no layer has experts; lesonnx exports Mixture-of-Experts models only")
    store = DenseStore(None)
    builder = PartBuilder(architecture, weights, store, options.precision)
    part_ends = []
    for _ in builder.build_all():
        part_ends.append(store.end_bytes)
    dense_used = set(weights.used)
    kinds, layers = plan_experts(architecture, options)
    for layer in layers:
        for expert_idx in layer.places:
            read_expert(architecture, weights, layer.layer_idx, expert_idx)
    skipped = _skipped(architecture, weights)
    expert_parameters = architecture.expert_shape().num_parameters
    shared_shape = architecture.shared_expert_shape()
    pinned = sum(_size(checkpoint, name) for name in dense_used)
    pinned += len(layers) * (shared_shape.num_parameters if shared_shape else 0)
    notes = []
    if unread := config.unread():
        notes.append(f"config.json: keys without effect on the export: {', '.join(unread)}")
    if "lm_head.weight" not in checkpoint and config.raw("tie_word_embeddings", None) is False:
        notes.append("tie_word_embeddings is false but there is no lm_head.weight: the embedding serves as the head")
    used_blocks = sorted({m.block_size for kind in kinds for m in kind.matrices.values()} - {0})
    if used_blocks and used_blocks != [options.block_size]:
        shown = ", ".join(map(str, used_blocks))
        notes.append(f"block size {options.block_size} does not divide every expert matrix: used {shown}")
    return ExportPlan(
        checkpoint=checkpoint,
        architecture=architecture,
        part_names=builder.names,
        layers=layers,
        kinds=kinds,
        dense_bytes=store.end_bytes,
        part_ends=part_ends,
        skipped=skipped,
        notes=notes,
        num_parameters=pinned + len(layers) * architecture.num_experts * expert_parameters,
        num_active_parameters=pinned + len(layers) * architecture.num_experts_per_tok * expert_parameters,
    )


def _size(checkpoint: Checkpoint, name: str) -> int:
    count = 1
    for length in checkpoint.info(name).shape:
        count *= length
    return count


def plan_experts(architecture: Decoder, options: ExportOptions) -> tuple[list[ExpertKind], list[LayerPlan]]:
    """The kinds of experts and which layer has which."""
    # Routed and shared experts never share a kind: their stages write outputs of different shapes.
    shared_shape = architecture.shared_expert_shape()
    shapes = [architecture.expert_shape(), *([shared_shape] if shared_shape else [])]
    kinds = [
        make_kind(f"stage_{place}", shape, options.bits, options.block_size, f"experts/stage_{place}.onnx")
        for place, shape in enumerate(shapes)
    ]
    shared_kind = kinds[1] if shared_shape is not None else None
    layers = [
        LayerPlan(layer_idx, architecture.num_experts, kinds[0], shared_kind) for layer_idx in architecture.moe_layers
    ]
    return kinds, layers


def _skipped(architecture: Decoder, weights: Weights) -> dict[str, str]:
    """Tensors that are left out, with the reason; CheckpointError names any that nobody accounts for."""
    skipped = {}
    for name in sorted(set(weights.checkpoint.tensors) - weights.used):
        reason = next((why for pattern, why in architecture.skipped.items() if re.fullmatch(pattern, name)), None)
        if reason is None:
            info = weights.checkpoint.info(name)
            raise CheckpointError(
                f"{info.file.name}: tensor {info.key!r} {list(info.shape)} is not part of a"
                f" {architecture.model_type} model; refusing to leave it out silently"
            )
        skipped[weights.checkpoint.info(name).key] = reason
    return skipped


def export_bundle(
    checkpoint_directory: Path,
    bundle: Path,
    options: ExportOptions | None = None,
    *,
    resume: bool = False,
    progress: Progress = lambda what, num_bytes: None,
    announce: Callable[[ExportPlan], None] = lambda plan: None,
) -> ExportReport:
    """Export a checkpoint directory to a bundle directory that does not exist yet.

    Everything is written to ``.NAME.partial`` beside the target, which is renamed at the end. An export that was broken
    off leaves that directory: ``resume`` goes on with it, otherwise it is begun anew. ``progress`` is called with what
    is being written and the bytes written since the last call; ``announce`` once with the plan.

    Raises CheckpointError or InputError for bad input (nothing is written then), LesonnxError when work fails.
    """
    options = options or ExportOptions()
    partial = bundle.absolute().parent / f".{bundle.name}.partial"
    with _failures_in_one_line(partial):
        _check_target(bundle)
        plan = make_plan(Checkpoint(checkpoint_directory), options)
        fingerprint = _fingerprint(plan, options)
        _check_disk(partial.parent, plan.total_bytes - _allocated_bytes(partial))
        journal = _open_journal(partial, fingerprint, resume)
        try:
            announce(plan)
            report = _export(plan, options, partial, journal, progress)
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


def _check_target(bundle: Path) -> None:
    if os.path.lexists(bundle):
        raise InputError(f"{bundle}: already exists; remove it or choose another name")
    if not bundle.absolute().parent.is_dir():
        raise InputError(f"{bundle.parent}: no such directory to write the bundle into")


def _export(
    plan: ExportPlan, options: ExportOptions, partial: Path, journal: Journal, progress: Progress
) -> ExportReport:
    # First, since a broken tokenizer or token id should not show after hours of quantizing.
    _facts(plan)
    shutil.rmtree(partial / "tokenizer", ignore_errors=True)
    progress("tokenizer", 0)
    tokenizer, warnings = export_tokenizer(plan.checkpoint.directory, partial / "tokenizer")
    dense = write_parts(plan, options, partial, journal, progress, Weights(plan.checkpoint))
    _write_experts(plan, options, partial, journal, progress)
    write_stages(plan, partial)
    return finish(plan, partial, progress, make_manifest(plan, options, dense, tokenizer), warnings)


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
        total_bytes=total_bytes,
        checkpoint_bytes=sum(info.num_bytes for info in plan.checkpoint.tensors.values()),
        notes=[*plan.notes, *warnings],
    )


def make_manifest(
    plan: ExportPlan, options: ExportOptions, dense: Sequence[WrittenPart], tokenizer: TokenizerFiles | None
) -> Manifest:
    """What was planned and written, as the bundle's contract."""
    kind_of = {id(kind): place for place, kind in enumerate(plan.kinds)}
    return Manifest(
        producer=f"lesonnx {__version__}",
        onnxruntime_at_least=_onnxruntime_at_least(plan.architecture, options),
        model=_facts(plan),
        quantization=Quantization(
            expert_bits=options.bits,
            dense_bits=options.resolved_dense_bits,
            kv_bits=options.kv_bits,
            block_size=0 if options.bits == 32 else options.block_size,  # type: ignore[arg-type]
        ),
        prefill_chunk_tokens=options.prefill_chunk_tokens,
        parts=[built.part for built in dense],
        states=[state for built in dense for state in built.states],
        expert_kinds=plan.kinds,
        expert_layers=[
            ExpertLayer(
                layer_idx=layer.layer_idx,
                pack=f"{layer_directory(Path(), layer.layer_idx).as_posix()}/{PACK_NAME}",
                num_experts=layer.num_experts,
                num_experts_per_tok=plan.architecture.num_experts_per_tok,
                kind=kind_of[id(layer.kind)],
                shared_kind=None if layer.shared_kind is None else kind_of[id(layer.shared_kind)],
            )
            for layer in plan.layers
        ],
        tokenizer=tokenizer,
        skipped_tensors=plan.skipped,
    )


def _onnxruntime_at_least(architecture: Decoder, options: ExportOptions) -> str:
    """The oldest ONNX Runtime that has all operators used."""
    needed = [ONNXRUNTIME_AT_LEAST]
    if options.kv_bits == 16:
        needed.append(ONNXRUNTIME_AT_LEAST_FOR_FLOAT16_CACHES)
    if options.operators == "native" and architecture.native_operators_since is not None:
        needed.append(architecture.native_operators_since)
    return max(needed, key=lambda version: [int(number) for number in version.split(".")])


@dataclass(frozen=True)
class WrittenPart:
    """A part that is on disk, and its states."""

    part: Part
    states: list[State]


def write_parts(
    plan: ExportPlan, options: ExportOptions, partial: Path, journal: Journal, progress: Progress, weights: Weights
) -> list[WrittenPart]:
    """Write the dense parts in order; parts that the journal holds are taken from there."""
    directory = partial / "dense"
    directory.mkdir(parents=True, exist_ok=True)
    written = [
        WrittenPart(Part.model_validate(entry["part"]), [State.model_validate(state) for state in entry["states"]])
        for entry in journal.entries("part")
    ]
    start = plan.part_ends[len(written) - 1] if written else 0
    if start:
        _check_length(directory / DenseStore.location, start)
    store = DenseStore(directory / DenseStore.location, start)
    for entry in journal.entries("part"):
        store.shared |= {
            key: StoredTensor(**{**value, "shape": tuple(value["shape"])}) for key, value in entry["shared"].items()
        }
    progress("dense parts", start)
    builder = PartBuilder(plan.architecture, weights, store, options.precision)
    try:
        for name in plan.part_names[len(written) :]:
            before = store.end_bytes
            built = builder.build(name)
            save_part(built, partial)
            store.sync()
            journal.add(
                "part",
                store.end_bytes - before,
                part=built.part.model_dump(mode="json"),
                states=[state.model_dump(mode="json") for state in built.states],
                shared={key: asdict(tensor) for key, tensor in store.shared.items()},
            )
            written.append(WrittenPart(built.part, built.states))
            progress("dense parts", store.end_bytes - before)
    finally:
        store.close()
    return written


def _check_length(path: Path, length_bytes: int, exactly: bool = False) -> None:
    """Whether a file still holds what the journal says was finished."""
    found = path.stat().st_size if path.is_file() else 0
    if found < length_bytes or (exactly and found != length_bytes):
        raise InputError(
            f"{path}: has {found:,} bytes, the journal says {length_bytes:,}; export without --resume to begin anew"
        )


def save_part(built: BuiltPart, partial: Path) -> None:
    """Write a part's model beside its weights."""
    path = partial / built.part.path
    with path.open("wb") as file:
        file.write(built.model.SerializeToString())
        file.flush()
        os.fsync(file.fileno())
    # The checker also follows the external data, so a part that names bytes beyond the file ends here.
    onnx.checker.check_model(str(path))


def _write_experts(
    plan: ExportPlan, options: ExportOptions, partial: Path, journal: Journal, progress: Progress
) -> None:
    done = {int(entry["layer_idx"]) for entry in journal.entries("experts")}
    for layer in plan.layers:
        if layer.layer_idx in done:
            _check_length(layer_directory(partial, layer.layer_idx) / PACK_NAME, layer.pack_bytes, exactly=True)
            # Small and derived from the plan alone: written again, so a power cut cannot have left them half there.
            write_models(partial, layer)
    progress("experts", sum(layer.pack_bytes for layer in plan.layers if layer.layer_idx in done))
    todo = [layer for layer in plan.layers if layer.layer_idx not in done]
    if not todo:
        return
    packs = write_packs(
        plan.checkpoint.directory,
        partial,
        todo,
        options.num_workers,
        lambda num_bytes: progress("experts", num_bytes),
    )
    with closing(packs) as layers:
        for layer in layers:
            journal.add("experts", layer.pack_bytes, layer_idx=layer.layer_idx)


def write_stages(plan: ExportPlan, partial: Path) -> None:
    """One model a kind: the kernel engine's, which takes weights as an input."""
    routed = {id(layer.kind) for layer in plan.layers}
    for kind in plan.kinds:
        slots = plan.architecture.num_experts_per_tok if id(kind) in routed else 1
        (partial / str(kind.stage)).write_bytes(stage_model(kind, slots).SerializeToString())


def _facts(plan: ExportPlan) -> ModelFacts:
    architecture, config = plan.architecture, plan.architecture.config
    generation_path = plan.checkpoint.directory / "generation_config.json"
    generation = Config(read_json(generation_path)) if generation_path.exists() else config
    eos = generation.token_ids("eos_token_id") or config.token_ids("eos_token_id")
    bos = generation.token_ids("bos_token_id") or config.token_ids("bos_token_id")
    pad = generation.token_ids("pad_token_id") or config.token_ids("pad_token_id")
    return ModelFacts(
        model_type=architecture.model_type,
        hidden_size=architecture.hidden_size,
        num_hidden_layers=architecture.num_hidden_layers,
        vocab_size=architecture.vocab_size,
        num_experts=architecture.num_experts,
        num_experts_per_tok=architecture.num_experts_per_tok,
        moe_intermediate_size=architecture.moe_intermediate_size,
        max_position_embeddings=architecture.max_position_embeddings,
        num_parameters=plan.num_parameters,
        num_active_parameters=plan.num_active_parameters,
        eos_token_ids=eos,
        bos_token_id=bos[0] if bos else None,
        pad_token_id=pad[0] if pad else None,
    )


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


def _fingerprint(plan: ExportPlan, options: ExportOptions) -> str:
    """What a broken export must share with this one to be gone on with: the options and the checkpoint's files."""
    files = {}
    for path in sorted({info.file for info in plan.checkpoint.tensors.values()}):
        stat = path.stat()
        files[path.name] = [stat.st_size, stat.st_mtime_ns]
    what = {
        "version": __version__,
        "config": plan.checkpoint.config,
        "files": files,
        "bits": [options.bits, *asdict(options.precision).values()],
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _open_journal(partial: Path, fingerprint: str, resume: bool) -> Journal:
    if resume:
        if not partial.is_dir():
            raise InputError(f"{partial}: nothing to resume; export without --resume")
        return Journal.reopen(partial, fingerprint)
    if partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial)
    else:
        partial.unlink(missing_ok=True)
    partial.mkdir()
    return Journal.create(partial, fingerprint)


def _allocated_bytes(directory: Path) -> int:
    """What a broken export takes on the disk already; its packs are sparse until they are written."""
    blocks = (getattr(path.stat(), "st_blocks", 0) for path in directory.rglob("*") if path.is_file())
    return 512 * sum(blocks)


def _check_disk(directory: Path, needed_bytes: int) -> None:
    needed_bytes = max(needed_bytes, 0) + SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise LesonnxError(f"{directory}: the bundle needs {needed_bytes:,} bytes, the disk has {free:,} free")


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
