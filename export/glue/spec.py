"""What an app may want to know of a bundle before it has it, read from the bundle. It knows no language."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from lesonnx.bundle import Bundle, read_checksums
from lesonnx.commands.inspect import dense_bytes, state_bytes_per_token
from lesonnx.commands.vision_facts import vision_bytes
from lesonnx.errors import BundleError
from lesonnx.manifest import (
    ChatFormat,
    ExpertKind,
    ExpertLayer,
    ModelFacts,
    Part,
    Provider,
    Quantization,
    State,
    Target,
    Value,
)
from lesonnx.step_states import StepStates
from lesonnx.vision.cutting import max_crop_tokens

# Symbolic dimensions -> the negative number by which generated code writes them, and what they count.
SYMBOLS = {"T": (-1, "tokens of the step"), "R": (-2, "rows of logits"), "S": (-3, "tokens that a cache has room for")}
# Where a part names none for a target.
DEFAULT_PROVIDERS = [Provider(name="CPUExecutionProvider")]


@dataclass(frozen=True)
class LayerSizes:
    """A MoE layer, the bytes of its pack and what one token needs of it."""

    layer: ExpertLayer
    pack_bytes: int
    demand_bytes: int


@dataclass(frozen=True)
class Budget:
    """An expert budget worth offering."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class VisionSpec:
    """How pictures come in: slices that one is seen in at most beside the whole of it (0: none), tokens that it takes
    of the prompt at most, bytes of the eyes' files, and of what they work in. Both are there only while they read.
    """

    max_slices: int
    max_image_tokens: int
    vision_bytes: int
    working_bytes: int


@dataclass(frozen=True)
class Spec:
    """All that is rendered, for one target. Bytes of a cache are for one more token of context."""

    title: str
    manifest_sha256: str
    target: Target
    model: ModelFacts
    quantization: Quantization
    onnxruntime_at_least: str
    prefill_chunk_tokens: int
    download_bytes: int
    dense_bytes: int
    expert_bytes: int
    least_budget_bytes: int
    token_demand_bytes: int
    state_bytes_per_token: int
    fixed_state_bytes: int
    budgets: list[Budget]
    parts: list[Part]
    providers: dict[str, list[Provider]]
    states: list[State]
    kinds: list[ExpertKind]
    layers: list[LayerSizes]
    chat_format: ChatFormat | None
    vision: VisionSpec | None


def read_spec(bundle: Bundle, target: Target, title: str | None = None) -> Spec:
    """The spec of a bundle; BundleError where it has no usable ``checksums.json`` or an unknown dimension.

    It depends on what the bundle holds alone: not on where it lies, nor on the machine.
    """
    manifest = bundle.manifest
    for owner, name, shape in _shapes(manifest.parts, manifest.states):
        for size in shape:
            if isinstance(size, str) and size not in SYMBOLS:
                raise BundleError(f"{bundle.directory}: {owner}: {name} has dimension {size!r}, expected T, R or S")
    checksums = bundle.file("checksums.json")
    download = sum(size for size, _ in read_checksums(checksums).values()) + checksums.stat().st_size
    return Spec(
        title=title or default_title(manifest.model, manifest.expert_bits),
        manifest_sha256=hashlib.sha256(bundle.file("manifest.json").read_bytes()).hexdigest(),
        target=target,
        model=manifest.model,
        quantization=manifest.quantization,
        onnxruntime_at_least=manifest.onnxruntime_at_least,
        prefill_chunk_tokens=manifest.prefill_chunk_tokens,
        download_bytes=download,
        dense_bytes=dense_bytes(bundle),
        expert_bytes=bundle.expert_bytes,
        least_budget_bytes=bundle.least_budget_bytes,
        token_demand_bytes=bundle.token_demand_bytes,
        state_bytes_per_token=state_bytes_per_token(bundle),
        fixed_state_bytes=StepStates(manifest).num_bytes,
        budgets=suggest_budgets(bundle.least_budget_bytes, bundle.token_demand_bytes, bundle.expert_bytes),
        parts=manifest.parts,
        providers={part.name: part.providers.get(target) or DEFAULT_PROVIDERS for part in manifest.parts},
        states=manifest.states,
        kinds=manifest.expert_kinds,
        layers=[
            LayerSizes(layer, bundle.pack_bytes(layer), bundle.layer_demand_bytes(layer))
            for layer in manifest.expert_layers
        ],
        chat_format=manifest.tokenizer.chat_format if manifest.tokenizer else None,
        vision=_vision(bundle),
    )


def _vision(bundle: Bundle) -> VisionSpec | None:
    vision = bundle.manifest.vision
    if vision is None:
        return None
    if vision.kind != "minicpmv":
        raise BundleError(
            f"{bundle.directory}: pictures of kind {vision.kind} are not read by apps yet; export with --no-vision"
        )
    max_slices = vision.max_slice_nums if vision.max_slice_nums > 1 else 0
    return VisionSpec(
        max_slices=max_slices,
        max_image_tokens=(1 + max_slices) * max_crop_tokens(vision),
        vision_bytes=vision_bytes(bundle),
        working_bytes=vision.working_bytes,
    )


def default_title(model: ModelFacts, expert_bits: Sequence[int]) -> str:
    """A title where none is given: ``qwen3_moe, 30.5 B parameters, int4``; with mixed precision, ``int2/4/8``."""
    count = model.num_parameters
    size = f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
    precision = "float32" if list(expert_bits) == [32] else f"int{'/'.join(map(str, expert_bits))}"
    return f"{model.model_type}, {size} parameters, {precision}"


def suggest_budgets(least_bytes: int, token_demand_bytes: int, expert_bytes: int) -> list[Budget]:
    """Budgets from the least to all experts, no two alike.

    Under one token's demand nothing can stay from token to token; above, every step up gives more hits.
    """
    wanted = {
        "least": least_bytes,
        "one token": token_demand_bytes,
        "a quarter": expert_bytes // 4,
        "half": expert_bytes // 2,
        "all": expert_bytes,
    }
    budgets: list[Budget] = []
    for name, num_bytes in sorted(wanted.items(), key=lambda item: item[1]):
        if num_bytes >= least_bytes and num_bytes not in [budget.num_bytes for budget in budgets]:
            budgets.append(Budget(name, num_bytes))
    return budgets


def _shapes(parts: list[Part], states: list[State]) -> list[tuple[str, str, list[int | str]]]:
    values: list[tuple[str, Value]] = [(part.name, value) for part in parts for value in (*part.inputs, *part.outputs)]
    return [(part, value.name, value.shape) for part, value in values] + [
        (state.part, state.name, state.shape) for state in states
    ]
