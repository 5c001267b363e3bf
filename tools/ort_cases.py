"""Writes cases for tools/ort_host.c and compares its outputs with what ONNX Runtime computes here.

ort_cases.py write DIRECTORY      case_N.bin and expected_N.bin (needs onnx and the built kernel)
ort_cases.py compare DIRECTORY    every output_*_N.bin against expected_N.bin, byte for byte
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

CASES = [
    (264, 200, ((4, 128),) * 3, "swiglu", False),
    (264, 200, ((4, 32), (8, 16), (2, 64)), "geglu", True),
    (100, 60, ((32, 0),) * 3, "swiglu_clamped", True),
    (256, 136, ((2, 16), (4, 16), (8, 128)), "reglu", False),
]
SLOTS, TOKENS, COUNT = 2, 40, 4


def write(directory: Path) -> None:
    import onnxruntime as ort
    from kernel_support import Experts

    from lesonnx.native import library_path
    from lesonnx_export.stage import stage_model

    for index, (hidden_size, intermediate, layouts, activation, bias) in enumerate(CASES):
        rng = np.random.default_rng(index)
        experts = Experts(hidden_size, intermediate, layouts, activation=activation, bias=bias, count=COUNT)
        model = stage_model(experts.kind, SLOTS).SerializeToString()
        hidden = rng.standard_normal((TOKENS, hidden_size)).astype(np.float32)
        rows = rng.permutation(TOKENS * SLOTS).astype(np.int64)[:70]
        starts = np.array([0, 1, 20, 20, 70], np.int64)
        header = np.array([len(model), TOKENS, hidden_size, SLOTS, experts.cache.nbytes, COUNT, len(rows)], np.int64)
        arrays: list[np.ndarray] = [hidden, experts.cache, experts.offsets, starts, rows]
        (directory / f"case_{index}.bin").write_bytes(
            header.tobytes() + model + b"".join(array.tobytes() for array in arrays)
        )
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(library_path()))
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        out = np.zeros((TOKENS, SLOTS, hidden_size), np.float32)
        binding = session.io_binding()
        for name, array in zip(("hidden", "cache", "offsets", "row_starts", "rows"), arrays, strict=True):
            binding.bind_cpu_input(name, array)
        binding.bind_output("expert_out", "cpu", 0, np.float32, out.shape, out.ctypes.data)
        session.run_with_iobinding(binding)
        (directory / f"expected_{index}.bin").write_bytes(out.tobytes())


def compare(directory: Path) -> None:
    outputs = sorted(directory.glob("output_*.bin"))
    for output in outputs:
        expected = directory / f"expected_{output.stem.rsplit('_', 1)[1]}.bin"
        if output.read_bytes() != expected.read_bytes():
            sys.exit(f"{output.name} differs from {expected.name}")
    if not outputs:
        sys.exit(f"{directory}: no outputs")
    print(f"{len(outputs)} outputs equal those of this machine, byte for byte")


if __name__ == "__main__":
    {"write": write, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
