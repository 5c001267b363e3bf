"""The manifest of an export: what was planned and written, as the bundle's contract.

It knows the plan and the checkpoint's token ids; it writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lesonnx import __version__
from lesonnx.drafter_wiring import ROLES
from lesonnx.errors import InputError
from lesonnx.manifest import (
    Calibration,
    ExpertLayer,
    Manifest,
    ModelFacts,
    Part,
    Quantization,
    State,
    TokenizerFiles,
    Twins,
)
from lesonnx_export.architectures.base import Decoder
from lesonnx_export.checkpoint import read_json
from lesonnx_export.config import Config
from lesonnx_export.expert import PACK_NAME
from lesonnx_export.pack import layer_directory
from lesonnx_export.plan import ExportOptions, ExportPlan
from lesonnx_export.providers import part_providers
from lesonnx_export.vision.eyes import Eyes
from lesonnx_export.vision.tower import VisionStore

VISION_DIRECTORY = "vision"
VISION_DATA = f"{VISION_DIRECTORY}/{VisionStore.location}"
ONNXRUNTIME_AT_LEAST = "1.24"
# What ONNX Runtime's own Swift package brings.
ONNXRUNTIME_ON_IOS = "1.24.2"
# Its GroupQueryAttention takes float32 queries over caches of float16 and of int8; 1.24 does not.
ONNXRUNTIME_AT_LEAST_FOR_SMALL_CACHES = "1.29"


@dataclass(frozen=True)
class WrittenPart:
    """A part that is on disk, and its states."""

    part: Part
    states: list[State]


def make_manifest(
    plan: ExportPlan,
    options: ExportOptions,
    dense: Sequence[WrittenPart],
    tokenizer: TokenizerFiles | None,
    calibration: Calibration | None = None,
    twins: Twins | None = None,
    vision: Sequence[WrittenPart] = (),
) -> Manifest:
    """What was planned and written, as the bundle's contract."""
    kind_of = {id(kind): place for place, kind in enumerate(plan.kinds)}
    drafter_parts = [built.part for built in dense if built.part.role in ROLES]
    return Manifest(
        producer=f"lesonnx {__version__}",
        onnxruntime_at_least=onnxruntime_at_least(plan.architecture, options),
        model=model_facts(plan),
        quantization=Quantization(
            expert_bits=options.bits,
            dense_bits=options.resolved_dense_bits,
            kv_bits=options.precision.kv_bits,
            block_size=0 if options.bits == 32 else options.block_size,  # type: ignore[arg-type]
            calibration=calibration,
        ),
        prefill_chunk_tokens=options.prefill_chunk_tokens,
        parts=_parts([built for built in dense if built.part.role not in ROLES], options),
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
        twins=twins,
        drafter=None if plan.drafter is None else plan.drafter.record(drafter_parts),
        vision=None if plan.vision is None else plan.vision.eyes.record(_parts(vision, options), VISION_DATA),
        skipped_tensors=plan.skipped,
    )


def _parts(written: Sequence[WrittenPart], options: ExportOptions) -> list[Part]:
    """Parts with the providers that they are for."""
    return [built.part.model_copy(update={"providers": part_providers(options.target)}) for built in written]


def check_target(architecture: Decoder, options: ExportOptions, eyes: Eyes | None = None) -> None:
    """InputError where what was chosen needs an ONNX Runtime, or a runtime of ours, that the target does not have."""
    if options.target != "desktop" and eyes is not None and eyes.kind != "minicpmv":
        raise InputError(
            f"--target {options.target}: its runtime does not read pictures of kind {eyes.kind} yet; add --no-vision"
        )
    needed = onnxruntime_at_least(architecture, options)
    if options.target == "ios" and _numbers(needed) > _numbers(ONNXRUNTIME_ON_IOS):
        chosen = f"--kv-bits {options.kv_bits}" if options.kv_bits != 32 else "--operators native"
        raise InputError(f"{chosen} needs ONNX Runtime {needed}, iOS's package has {ONNXRUNTIME_ON_IOS}")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def onnxruntime_at_least(architecture: Decoder, options: ExportOptions) -> str:
    """The oldest ONNX Runtime that has all operators used."""
    needed = [ONNXRUNTIME_AT_LEAST]
    if options.kv_bits != 32:
        needed.append(ONNXRUNTIME_AT_LEAST_FOR_SMALL_CACHES)
    if options.resolved_operators == "native" and architecture.native_operators_since is not None:
        needed.append(architecture.native_operators_since)
    return max(needed, key=_numbers)


def model_facts(plan: ExportPlan) -> ModelFacts:
    """What hosts must know of the model; CheckpointError for token ids that cannot be."""
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
