"""Rotary positions: a config's spelling of them, and the inverse frequencies that it means.

Formulas as transformers' ``modeling_rope_utils`` has them. It knows no graph: ``Step.rotary`` computes with the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lesonnx.errors import CheckpointError
from lesonnx_export.checkpoint import Float32
from lesonnx_export.config import FLOAT32_MOST, Config

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True)
class Rope:
    """Rotary positions of one kind of attention.

    ``inverse_frequencies`` [r/2] turn a position into angles; cosines and sines are multiplied by
    ``attention_factor``. Two kinds change with L, the tokens of the sequence, once it exceeds
    ``original_max_position_embeddings``: *longrope* takes the long ones; *dynamic* multiplies
    frequency i by ``(factor * L / original - factor + 1) ** (-2 i / (r - 2))``, with ``dynamic_factor`` as factor.

    ``axes`` [r/2], where tokens have three positions (time, height, width): which of them each frequency turns by.
    """

    inverse_frequencies: Float32
    attention_factor: float = 1.0
    original_max_position_embeddings: int = 0
    dynamic_factor: float | None = None
    long_inverse_frequencies: Float32 | None = None
    long_attention_factor: float = 1.0
    axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for frequencies in (self.inverse_frequencies, self.long_inverse_frequencies):
            if frequencies is not None and not np.isfinite(frequencies).all():
                raise CheckpointError("config.json: the rotary settings give frequencies that are not finite")

    @property
    def rotary_dim(self) -> int:
        """r, the leading values of a head that are rotated."""
        return 2 * len(self.inverse_frequencies)

    @property
    def key(self) -> bytes:
        """What distinguishes it from other rotary positions of the model."""
        long = b"" if self.long_inverse_frequencies is None else self.long_inverse_frequencies.tobytes()
        original = self.original_max_position_embeddings
        facts = (self.attention_factor, self.long_attention_factor, original, self.dynamic_factor, self.axes)
        return self.inverse_frequencies.tobytes() + long + repr(facts).encode()


def rope_parameters(config: Config, layer_type: str | None = None) -> dict[str, Any]:
    """The rotary settings under transformers 5's names: ``rope_type``, ``rope_theta`` (where stated), factors.

    transformers 5 writes ``rope_parameters`` (for some families one for each type of layer), transformers 4
    ``rope_theta``, ``partial_rotary_factor`` and ``rope_scaling``.
    """
    merged: dict[str, Any] = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        value = config.raw(key, None)
        if value is not None:
            merged[key] = value
    for key in ("rope_scaling", "rope_parameters"):
        found = config.raw(key, {})
        if not isinstance(found, dict):
            raise CheckpointError(f"config.json: {key} must be an object, found {found!r:.100}")
        if layer_type is not None and isinstance(found.get(layer_type), dict):
            found = found[layer_type]
        merged |= found
    merged.setdefault("rope_type", merged.pop("type", "default"))
    return merged


def make_rope(
    config: Config,
    head_dim: int,
    *,
    default_theta: float,
    default_partial: float = 1.0,
    layer_type: str | None = None,
) -> Rope:
    """The rotary positions of heads of that size; CheckpointError names a setting that is malformed or unknown."""
    parameters = rope_parameters(config, layer_type)
    rope_type = parameters["rope_type"]
    if rope_type == "mrope":  # the transformers 4 word for sections alone; on text all sections have one position
        rope_type = "default"
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"config.json: rope_type {rope_type!r:.100} is not one of {', '.join(ROPE_TYPES)}")
    theta = number_in(parameters, "rope_theta", default_theta)
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta must be above 1, found {theta!r}")
    if rope_type == "proportional":
        return _proportional(parameters, theta, head_dim)
    rotary_dim = int(head_dim * number_in(parameters, "partial_rotary_factor", default_partial))
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise CheckpointError(f"config.json: partial_rotary_factor leaves {rotary_dim} of {head_dim} values to rotate")
    plain = inverse_frequencies(theta, rotary_dim)
    if rope_type == "default":
        return Rope(plain)
    if rope_type == "longrope":
        return _longrope(config, parameters, theta, rotary_dim)
    if rope_type == "linear":
        return Rope((plain / np.float32(number_in(parameters, "factor"))).astype(np.float32))
    original = _original(config, parameters)
    if rope_type == "dynamic" and parameters.get("alpha"):  # Hunyuan's word for a base stretched once and for all
        stretch = number_in(parameters, "alpha") ** (rotary_dim / max(1, rotary_dim - 2))
        return Rope(inverse_frequencies(theta * stretch, rotary_dim))
    if rope_type == "dynamic":
        return Rope(
            plain,
            original_max_position_embeddings=config.integer("max_position_embeddings"),
            dynamic_factor=number_in(parameters, "factor"),
        )
    if rope_type == "llama3":
        return Rope(_llama3(plain, parameters, original))
    return _yarn(config, parameters, theta, rotary_dim, original)


def on_three_axes(config: Config, rope: Rope, default_section: tuple[int, int, int]) -> Rope:
    """The same rotary positions for tokens of three positions, by ``mrope_section`` [a, b, c], interleaved.

    Frequency i turns by height where i % 3 is 1 and i < 3 b, by width where i % 3 is 2 and i < 3 c, else by time.
    """
    parameters = rope_parameters(config)
    count = len(rope.inverse_frequencies)
    if parameters.get("mrope_interleaved", True) is not True:
        raise CheckpointError(
            f"config.json: mrope_interleaved is {parameters['mrope_interleaved']!r:.100}, only true is supported"
        )
    section = parameters.get("mrope_section")
    if section is None:
        section = list(default_section)
    elif not _is_section(section, count):
        raise CheckpointError(
            f"config.json: mrope_section must be three whole numbers that add up to {count}, found {section!r:.100}"
        )
    ends = {axis: 3 * section[axis] for axis in (1, 2)}
    return replace(rope, axes=tuple(i % 3 if i % 3 and i < ends[i % 3] else 0 for i in range(count)))


def _is_section(section: object, count: int) -> bool:
    return (
        isinstance(section, list)
        and len(section) == 3
        and all(type(size) is int and size >= 0 for size in section)
        and sum(section) == count
    )


def inverse_frequencies(theta: float, rotary_dim: int) -> Float32:
    """Rotary inverse frequencies [rotary_dim / 2]: ``theta ** (-2i / rotary_dim)``, in float32 as in transformers."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequencies: Float32 = (np.float32(1) / np.power(np.float32(theta), exponents)).astype(np.float32)
    return frequencies


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature: ``0.1 * mscale * ln(factor) + 1``, 1 for factors up to 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def number_in(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive number among rotary settings, or the default where it is left out or null; else CheckpointError."""
    value = parameters.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= FLOAT32_MOST:
        raise CheckpointError(f"config.json: {key} must be a positive number, found {value!r:.100}")
    return float(value)


def _original(config: Config, parameters: Mapping[str, Any]) -> int:
    """The window the model was first trained for."""
    key = "original_max_position_embeddings"
    outside = config.raw(key, None)
    if parameters.get(key) is None and outside is None:
        return config.integer("max_position_embeddings")
    original = number_in(parameters, key, outside)
    if not 2 <= original < 1 << 31:
        raise CheckpointError(f"config.json: {key} must be at least 2, found {original!r}")
    return int(original)


def _proportional(parameters: Mapping[str, Any], theta: float, head_dim: int) -> Rope:
    """Gemma 4's: all of a head is paired up, but only the first pairs turn."""
    turning = int(number_in(parameters, "partial_rotary_factor", 1.0) * head_dim // 2)
    frequencies = np.zeros(head_dim // 2, np.float32)
    frequencies[:turning] = inverse_frequencies(theta, head_dim)[:turning]
    return Rope((frequencies / np.float32(number_in(parameters, "factor", 1.0))).astype(np.float32))


def _llama3(plain: Float32, parameters: Mapping[str, Any], original: int) -> Float32:
    """Long wavelengths divided by the factor, short ones as they are, a ramp between."""
    factor = number_in(parameters, "factor")
    low, high = number_in(parameters, "low_freq_factor"), number_in(parameters, "high_freq_factor")
    if low >= high:
        raise CheckpointError(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
    turns = original * plain.astype(np.float64) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - smooth) * plain / factor + smooth * plain).astype(np.float32)


def _yarn(config: Config, parameters: Mapping[str, Any], theta: float, rotary_dim: int, original: int) -> Rope:
    """YaRN (arXiv 2309.00071): frequencies interpolated by how often they turn within the original window."""
    if parameters.get("factor") is None:
        factor = config.integer("max_position_embeddings") / original
    else:
        factor = number_in(parameters, "factor")
    # Zero stands for left out.
    mscale, mscale_all = (
        number_in(parameters, key) if parameters.get(key) else None for key in ("mscale", "mscale_all_dim")
    )
    if parameters.get("attention_factor") is not None:
        attention_factor = number_in(parameters, "attention_factor")
    elif mscale and mscale_all:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    else:
        attention_factor = yarn_mscale(factor)

    def dimension(turns: float) -> float:
        """The index at which a frequency makes that many turns within the original window."""
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(number_in(parameters, "beta_fast", 32.0))
    high = dimension(number_in(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rotary_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    plain = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    return Rope((plain / factor * ramp + plain * (1 - ramp)).astype(np.float32), attention_factor)


def _longrope(config: Config, parameters: Mapping[str, Any], theta: float, rotary_dim: int) -> Rope:
    """LongRoPE (arXiv 2402.13753): a divisor for each frequency, others once the original window is exceeded."""
    original = _original(config, parameters)
    # Families that state the original window outside mean the ratio of windows, whatever ``factor`` says.
    if config.raw("original_max_position_embeddings", None) is not None or parameters.get("factor") is None:
        factor = config.integer("max_position_embeddings") / original
    else:
        factor = number_in(parameters, "factor")
    if parameters.get("attention_factor") is not None:
        attention_factor = number_in(parameters, "attention_factor")
    else:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    plain = inverse_frequencies(theta, rotary_dim)
    short, long = (
        (plain / _factors(parameters, key, rotary_dim // 2)).astype(np.float32)
        for key in ("short_factor", "long_factor")
    )
    # Phi-3.5-MoE states both factors instead of letting them follow from the windows.
    return Rope(
        short,
        number_in(parameters, "short_mscale", attention_factor),
        original,
        long_inverse_frequencies=long,
        long_attention_factor=number_in(parameters, "long_mscale", attention_factor),
    )


def _factors(parameters: Mapping[str, Any], key: str, count: int) -> Float32:
    values = parameters.get(key)
    if not isinstance(values, list) or len(values) != count:
        found = f"{len(values)} of them" if isinstance(values, list) else repr(values)
        raise CheckpointError(f"config.json: {key} must be {count} numbers, found {found}")
    return np.array([number_in({key: value}, key) for value in values], np.float32)
