"""Attention caches of 8 bits: the scales of their channels, and parts and states that use them.

It takes parts whose caches are float32 and changes them; it measures nothing itself. A code q stands for ``q * scale``,
the scale of its channel (of one head), fixed at export: ONNX Runtime rounds half to even and clips to -128..127.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from lesonnx.errors import LesonnxError
from lesonnx.manifest import Manifest, Part, State, Value
from lesonnx_export.calibrate import Spans

CODE_LIMIT = 127
# What a channel may exceed of what the calibration text showed before it is clipped.
HEADROOM = 1.25
# GroupQueryAttention's inputs, by number.
PAST_KEY, PAST_VALUE, KEY_SCALE, VALUE_SCALE = 3, 4, 12, 13
ATTENTION = "GroupQueryAttention"


def scales_of(spans: Spans) -> dict[str, NDArray[np.float32]]:
    """The scale of each channel [kv heads, head size] of every state; LesonnxError where a span is not finite."""
    scales = {}
    for name, span in spans.items():
        if not np.isfinite(span).all():
            raise LesonnxError(f"the attention cache {name} is not finite on the calibration text")
        # A channel that was always zero takes a share of its head's: no scale may be zero.
        least = np.maximum(span.max(axis=1, keepdims=True) * np.float32(1e-3), np.float32(1e-6))
        scales[name] = np.maximum(span, least) * np.float32(HEADROOM / CODE_LIMIT)
    return scales


def quantize_caches(directory: Path, manifest: Manifest, scales: Mapping[str, NDArray[np.float32]]) -> Manifest:
    """Rewrite the parts that carry caches, but those rewritten before; gives the manifest that describes them."""
    # Convolutions and recurrences are few values, which all that follows depends on: they stay float32.
    caches = [state for state in manifest.states if state.is_attention]
    states = {state.input: state for state in caches}
    for part in manifest.parts:
        if any(state.part == part.name for state in caches):
            path = directory / part.path
            model = onnx.load(str(path), load_external_data=False)
            if rewrite(model, states, scales):
                beside = path.with_name(f"{path.name}.new")
                beside.write_bytes(model.SerializeToString())
                onnx.checker.check_model(str(beside))
                beside.replace(path)
    quantization = manifest.quantization.model_copy(update={"kv_bits": 8})
    return manifest.model_copy(
        update={
            "quantization": quantization,
            "parts": [_with_int8(part, caches) for part in manifest.parts],
            "states": [
                state.model_copy(update={"dtype": "int8"}) if state.is_attention else state for state in manifest.states
            ],
        }
    )


def rewrite(model: onnx.ModelProto, states: Mapping[str, State], scales: Mapping[str, NDArray[np.float32]]) -> bool:
    """Let a part's attention read and write int8 caches; False if it does already. ``states`` are by input name."""
    changed = False
    caches: set[str] = set()
    for node in model.graph.node:
        if node.op_type != ATTENTION:
            continue
        pair = [states[node.input[place]] for place in (PAST_KEY, PAST_VALUE)]
        caches |= {name for state in pair for name in (state.input, state.output)}
        if len(node.input) > KEY_SCALE:
            continue
        changed = True
        names = [f"{state.name}.scale" for state in pair]
        node.input.extend([""] * (KEY_SCALE - len(node.input)) + names)
        for name, state in zip(names, pair, strict=True):
            heads, size = scales[state.name].shape
            model.graph.initializer.append(numpy_helper.from_array(scales[state.name].reshape(1, heads, 1, size), name))
        for key in ("k_quant_type", "v_quant_type"):
            node.attribute.append(helper.make_attribute(key, "PER_CHANNEL"))
        node.attribute.append(helper.make_attribute("kv_cache_bit_width", 8))
    for value in (*model.graph.input, *model.graph.output):
        if value.name in caches:
            value.type.tensor_type.elem_type = TensorProto.INT8
    return changed


def _with_int8(part: Part, states: list[State]) -> Part:
    caches = {name for state in states if state.part == part.name for name in (state.input, state.output)}

    def changed(values: list[Value]) -> list[Value]:
        return [value.model_copy(update={"dtype": "int8"}) if value.name in caches else value for value in values]

    return part.model_copy(update={"inputs": changed(part.inputs), "outputs": changed(part.outputs)})
