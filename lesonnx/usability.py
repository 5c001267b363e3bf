"""What CoreML or NNAPI would take of a bundle, part by part, by the checker that ONNX Runtime's wheel carries.

The checker knows operators and whether shapes are fixed. What it does not look at, and ONNX Runtime's providers do, is
named beside it: types, long axes, casts of inputs. It opens no session, and needs the ``onnx`` package.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lesonnx.bundle import Bundle
from lesonnx.errors import BundleError, InputError
from lesonnx.manifest import Provider, Target, Twins
from lesonnx.ort import first_line
from lesonnx.providers import CPU

if TYPE_CHECKING:
    from onnx import ModelProto

COREML, NNAPI = "CoreMLExecutionProvider", "NnapiExecutionProvider"
CHECKED: dict[Target, tuple[str, str]] = {"ios": (COREML, "CoreML (ML Program)"), "android": (NNAPI, "NNAPI")}
MLPROGRAM_TABLE = "coreml_supported_mlprogram_ops.md"
LONGEST_AXIS = 16384
WHY_NOT_EXPERTS = "experts stay on the CPU, no kernel for their bits, and a model would be compiled for every one"


@dataclass(frozen=True)
class PartReport:
    """What the provider would take of a model: ``supported`` of its ``nodes``, in so many ``partitions``.

    ``provider`` is the first that the manifest lists for the target. ``blockers`` keep it from being one partition.
    """

    name: str
    provider: str
    nodes: int
    supported: int
    partitions: int
    blockers: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether the provider would take all of it, as one partition."""
        return self.nodes == self.supported and self.partitions == 1 and not self.blockers


@dataclass(frozen=True)
class Report:
    """A bundle's parts, twins first, and the verdict on all in one line."""

    target: Target
    checked: str
    parts: list[PartReport]
    verdict: str


def check_bundle(bundle: Bundle, target: Target) -> Report:
    """The report for a target; InputError where the checker is not installed, BundleError for a broken model."""
    manifest, twins = bundle.manifest, bundle.manifest.twins
    provider, shown = CHECKED[target]
    of_twins = []
    for twin in twins.parts if twins else []:
        path = bundle.file(twin.path)
        listed = twin.providers.get(target, [])
        of_twins.append(check_model(path, f"{twin.part} for {twin.rows} tokens", _first(listed), provider))
    rest = [(part.name, part.path, part.providers.get(target, [])) for part in manifest.parts]
    rest += [(part.name, part.path, []) for part in (manifest.drafter.parts if manifest.drafter else [])]
    rest += [(Path(helper.path).stem, helper.path, []) for helper in _distinct(twins)]
    of_parts = [check_model(bundle.file(path), name, _first(listed), provider) for name, path, listed in rest]
    experts = {expert.kind_idx: expert for expert in reversed(bundle.experts)}
    of_experts = [
        check_model(bundle.model_file(expert), f"experts of kind {expert.kind.name}", CPU, provider, WHY_NOT_EXPERTS)
        for _, expert in sorted(experts.items())
    ]
    verdict = _verdict(target, shown, of_twins, len(of_parts), {p.name for p in _listed(twins, target)})
    return Report(target, shown, [*of_twins, *of_parts, *of_experts], verdict)


def _first(listed: list[Provider]) -> str:
    return listed[0].name if listed else CPU


def _distinct(twins: Twins | None) -> Iterator[Any]:
    seen: set[str] = set()
    for helper in twins.helpers if twins else []:
        if helper.path not in seen:
            seen.add(helper.path)
            yield helper


def _listed(twins: Twins | None, target: Target) -> list[Provider]:
    return [provider for twin in (twins.parts if twins else []) for provider in twin.providers.get(target, [])]


def _verdict(target: Target, shown: str, twins: list[PartReport], num_others: int, listed: set[str]) -> str:
    others = f"{num_others} other parts and the experts stay on the CPU provider"
    if not twins:
        return f"{target}: nothing is for {shown}; {others} (export --accelerate dense makes twins)"
    whole = sum(twin.is_whole for twin in twins)
    counts = Counter(blocker for twin in twins for blocker in twin.blockers)
    why = f" ({'; '.join(f'{blocker} in {count}' for blocker, count in counts.most_common(3))})" if counts else ""
    verdict = f"{target}: {shown} would take {whole} of {len(twins)} twins as one partition each{why}; {others}"
    if not listed:
        verdict += f"; the manifest lists no provider for {target}, so no twin is used there"
    elif other := listed - {COREML, NNAPI}:
        verdict += f"; of {', '.join(sorted(other))} this checker knows nothing"
    return verdict


def check_model(path: Path, name: str, runs_on: str, provider: str, refused: str | None = None) -> PartReport:
    """One model's report; ``refused`` is a reason beside what the model holds."""
    try:
        from onnxruntime.tools.mobile_helpers import usability_checker
        from onnxruntime.tools.onnx_model_utils import ModelProtoWithShapeInfo
    except ImportError as error:
        raise InputError(f"the checker needs the onnx package ({first_line(error)}): pip install onnx") from None
    logging.getLogger("default").setLevel(logging.ERROR)
    try:
        model = ModelProtoWithShapeInfo(path).model_with_shape_info
        if not model.graph.value_info:
            # Nothing could be inferred behind operators that onnx does not know; the checker asks for something.
            model.graph.value_info.extend(model.graph.input)
        if provider == COREML:
            info = usability_checker.check_coreml_partitions(model, True, MLPROGRAM_TABLE)
        else:
            info = usability_checker.check_nnapi_partitions(model, True)
    except Exception as error:  # noqa: BLE001  (onnx raises many unrelated types)
        raise BundleError(f"{path}: the checker does not take it: {first_line(error)}") from None
    blockers = sorted(info.unsupported_ops)
    if info.nodes_unsupported_due_to_dynamic_input:
        blockers.append("sizes that are not fixed")
    blockers += [f"{operator} of too many axes" for operator in sorted(info.ops_with_unsupported_rank)]
    blockers += _what_providers_refuse(model, provider)
    if refused:
        blockers.append(refused)
    return PartReport(name, runs_on, info.num_nodes, info.num_supported_nodes, info.num_partitions, blockers)


def _what_providers_refuse(model: ModelProto, provider: str) -> Iterator[str]:
    """What ONNX Runtime's own code of the provider does not take, beyond the checker's tables."""
    from onnx import TensorProto

    graph = model.graph
    values = [*graph.input, *graph.value_info, *graph.output]
    sizes = [dim.dim_value for value in values for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
    if provider == COREML:
        if any(size > LONGEST_AXIS for size in sizes):
            yield f"an axis longer than {LONGEST_AXIS}"
        inputs = {value.name for value in graph.input}
        if any(node.op_type == "Cast" and node.input[0] in inputs for node in graph.node):
            yield "a Cast of an input"
    elif TensorProto.FLOAT16 in {value.type.tensor_type.elem_type for value in values}:
        yield "float16, where NNAPI takes float32"
    if any(size == 0 for size in sizes):
        yield "an axis of length 0"
