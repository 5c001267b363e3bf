"""A checkpoint's config.json in the spelling of transformers 4, whichever version wrote it.

It knows keys, not models: what a model computes is not decided here. Used for the reference that optimum makes.
"""

from __future__ import annotations

from typing import Any

from lesonnx.errors import InputError

# transformers 5 calls the number of experts num_local_experts everywhere; in 4 these families say num_experts.
NUM_EXPERTS_FAMILIES = frozenset({"qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "flex_olmo", "jamba", "lfm2_moe"})
# Parts of transformers 5's rope_parameters that are keys of their own in 4.
ROPE_KEYS = ("rope_theta", "partial_rotary_factor")


def to_transformers4(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config in transformers 4 spelling; one that is spelled so already comes back as it is.

    ``rope_parameters`` becomes ``rope_theta``, ``partial_rotary_factor`` and ``rope_scaling``; ``dtype`` becomes
    ``torch_dtype``; ``num_local_experts`` becomes ``num_experts`` where that is the family's word; ``text_config`` is
    treated alike. InputError for rotary parameters that 4 has no words for.
    """
    old = dict(config)
    if isinstance(old.get("text_config"), dict):
        old["text_config"] = to_transformers4(old["text_config"])
    dtype = old.pop("dtype", None)
    if dtype is not None:
        old.setdefault("torch_dtype", dtype)
    if old.get("model_type") in NUM_EXPERTS_FAMILIES:
        num_experts = old.pop("num_local_experts", None)
        if num_experts is not None:
            old.setdefault("num_experts", num_experts)
    rope = old.pop("rope_parameters", None)
    if rope is not None:
        old |= _rope(rope)
    return old


def _rope(parameters: object) -> dict[str, Any]:
    if not isinstance(parameters, dict):
        raise InputError(f"config.json: rope_parameters must be an object, found {parameters!r}")
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    if by_layer_type:
        # One set for each kind of layer: fine as long as they say the same.
        if len(by_layer_type) != len(parameters) or any(value != by_layer_type[0] for value in by_layer_type):
            raise InputError("config.json: rope_parameters differ by layer type, which transformers 4 cannot say")
        return _rope(by_layer_type[0])
    left = dict(parameters)
    spelled = {key: left.pop(key) for key in ROPE_KEYS if left.get(key) is not None}
    kind = left.pop("rope_type", left.pop("type", "default"))
    spelled["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **left}
    return spelled
