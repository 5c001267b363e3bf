"""Seeded experts for the kernel's tests and their float64 reference: packing, dequantizing, quantizing inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lesonnx.manifest import ExpertKind, ExpertMatrix

Layouts = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # (bits, block) of gate, up, down
LAYOUTS = [(bits, block) for bits in (2, 4, 8) for block in (16, 32, 64, 128)]


def align(offset: int, to: int = 64) -> int:
    return -(-offset // to) * to


@dataclass
class Packed:
    """One matrix as it lies in the pack, and its exact values."""

    weight: np.ndarray  # uint8
    scales: np.ndarray | None
    bias: np.ndarray | None
    exact: np.ndarray  # float64 [rows, columns]
    levels: np.ndarray  # [rows, blocks, block] integers less the zero point


def pack_bits(levels: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned levels [..., n] to bytes [..., n * bits / 8], low bits first."""
    per_byte = 8 // bits
    grouped = levels.astype(np.uint8).reshape(*levels.shape[:-1], -1, per_byte)
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
    packed: np.ndarray = np.bitwise_or.reduce(grouped << shifts, axis=-1).astype(np.uint8)
    return packed


def random_matrix(
    rng: np.random.Generator, rows: int, columns: int, bits: int, block: int, bias: bool = False
) -> Packed:
    """A random matrix; padding of the last block holds random levels, which must not matter."""
    offset = rng.standard_normal(rows).astype(np.float32) if bias else None
    if bits == 32:
        values = (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)
        return Packed(values.view(np.uint8).reshape(-1), None, offset, values.astype(np.float64), values)
    blocks = -(-columns // block)
    levels = rng.integers(0, 2**bits, (rows, blocks, block))
    scales = (rng.uniform(0.5, 1.5, (rows, blocks)) / 2 ** (bits - 1) / np.sqrt(columns)).astype(np.float32)
    signed = levels - 2 ** (bits - 1)
    exact = (signed * scales.astype(np.float64)[..., None]).reshape(rows, -1)[:, :columns]
    return Packed(pack_bits(levels, bits).reshape(-1), scales, offset, exact, signed)


def quantize_input(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """int8 levels [m, blocks, block] and float32 scales [m, blocks], as accuracy_level=4 makes them."""
    m, columns = x.shape
    blocks = -(-columns // block)
    padded = np.zeros((m, blocks * block), np.float32)
    padded[:, :columns] = x
    grouped = padded.reshape(m, blocks, block)
    largest = np.abs(grouped).max(axis=-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0)).astype(np.float32)
    return np.rint(grouped * inverse[..., None]), (largest / np.float32(127)).astype(np.float32)


def exact_product(x: np.ndarray, packed: Packed, bits: int, block: int) -> np.ndarray:
    """The product in float64, on the same int8 input where weights are quantized."""
    if bits == 32:
        y: np.ndarray = x.astype(np.float64) @ packed.exact.T
    else:
        assert packed.scales is not None
        q, scale = quantize_input(x, block)
        sums = np.einsum("mbk,nbk->mnb", q, packed.levels.astype(np.float64))
        y = np.einsum("mnb,mb,nb->mn", sums, scale.astype(np.float64), packed.scales.astype(np.float64))
    if packed.bias is not None:
        y = y + packed.bias
    return y


def activate(kind: ExpertKind, g: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The activation in float64, by the manifest's formulas."""
    if kind.activation == "swiglu":
        h: np.ndarray = g / (1 + np.exp(-g)) * u
    elif kind.activation == "geglu":
        h = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
    elif kind.activation == "reglu":
        h = np.maximum(g, 0) * u
    else:
        g, u = np.minimum(g, kind.limit), np.clip(u, -kind.limit, kind.limit)
        h = (u + 1) * g / (1 + np.exp(-kind.alpha * g))
    return h


class Experts:
    """A kind and ``count`` random experts of it in one cache."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        layouts: Layouts,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        count: int = 1,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        shapes = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
        names = ("gate_proj", "up_proj", "down_proj")
        self.matrices = [
            {
                name: random_matrix(rng, *shape, *layout, bias=bias)
                for name, shape, layout in zip(names, shapes, layouts, strict=True)
            }
            for _ in range(count)
        ]
        at = 0
        records: dict[str, ExpertMatrix] = {}
        for name, shape, (bits, block) in zip(names, shapes, layouts, strict=True):
            packed = self.matrices[0][name]
            offsets: dict[str, int] = {}
            for part in ("weight", "scales", "bias"):
                tensor = getattr(packed, part)
                if tensor is not None:
                    offsets[f"{part}_offset_bytes"] = at
                    at = align(at + tensor.nbytes)
            record = {"rows": shape[0], "columns": shape[1], "bits": bits, "block_size": block}
            records[name] = ExpertMatrix.model_validate(record | offsets)
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "length_bytes": at}
        self.kind = ExpertKind.model_validate({"name": "test", "activation": activation} | sizes | records)
        stride = align(at, 4096)
        self.offsets = np.arange(count, dtype=np.int64) * stride
        # The last expert ends with the cache: reading past it is reading past the buffer.
        self.cache = np.zeros(stride * (count - 1) + at, np.uint8)
        for offset, matrices in zip(self.offsets, self.matrices, strict=True):
            for name, matrix in records.items():
                for part in ("weight", "scales", "bias"):
                    tensor = getattr(matrices[name], part)
                    if tensor is not None:
                        start = int(offset) + getattr(matrix, f"{part}_offset_bytes")
                        self.cache[start : start + tensor.nbytes] = tensor.reshape(-1).view(np.uint8)

    def exact(self, expert: int, x: np.ndarray) -> np.ndarray:
        """The expert's output in float64, quantizing inputs where the kernel does."""
        m, k = self.matrices[expert], self.kind
        gate = exact_product(x, m["gate_proj"], k.gate_proj.bits, k.gate_proj.block_size)
        up = exact_product(x, m["up_proj"], k.up_proj.bits, k.up_proj.block_size)
        h = activate(k, gate, up).astype(np.float32)
        return exact_product(h, m["down_proj"], k.down_proj.bits, k.down_proj.block_size)
