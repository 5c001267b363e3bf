"""Which execution providers run what, by target: the lists that a manifest states.

Dense parts of 4 or 8 bits and experts are for the CPU provider: neither CoreML nor NNAPI has ``MatMulNBits``, and both
compile a model per session. Twins are for accelerators. It knows ONNX Runtime's names and options alone.
"""

from __future__ import annotations

from lesonnx.manifest import Provider, Target
from lesonnx.providers import CACHE_DIRECTORY, CPU

COREML = Provider(
    name="CoreMLExecutionProvider",
    options={
        "ModelFormat": "MLProgram",
        "MLComputeUnits": "ALL",
        "RequireStaticInputShapes": "1",
        "ModelCacheDirectory": CACHE_DIRECTORY,
    },
)
# Qualcomm's, the successor of NNAPI on its chips.
QNN = Provider(
    name="QNNExecutionProvider",
    options={
        "backend_path": "libQnnHtp.so",
        "htp_performance_mode": "sustained_high_performance",
    },
)
# NNAPI_FLAG_USE_FP16 + NNAPI_FLAG_CPU_DISABLED: its own CPU code is slower than the CPU provider.
NNAPI = Provider(name="NnapiExecutionProvider", options={"flags": "5"})
XNNPACK = Provider(name="XnnpackExecutionProvider")


def part_providers(target: Target) -> dict[Target, list[Provider]]:
    """Those of parts that are no twins."""
    return {target: [Provider(name=CPU)]}


def twin_providers(target: Target, float_bits: int) -> dict[Target, list[Provider]]:
    """Those of twins, the best first. NNAPI and XNNPACK take no float16 products: they are for twins of float32."""
    if target == "ios" or target == "desktop":
        return {target: [COREML]}
    return {target: [QNN] if float_bits == 16 else [QNN, NNAPI, XNNPACK]}
