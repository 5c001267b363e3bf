"""Our header of ONNX Runtime's C interface against the real one: indices, values and the layout of OrtCustomOp.

The real header is looked for in LESONNX_ORT_INCLUDE and where Debian's libonnxruntime-dev puts it; without it the test
is skipped. Function types are compared by the compiler, entry by entry.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parent.parent / "lesonnx" / "native"
PLACES = [os.environ.get("LESONNX_ORT_INCLUDE", ""), "/usr/include/onnxruntime", "/usr/local/include/onnxruntime"]
COMPILER = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def real_include() -> str | None:
    return next((place for place in PLACES if place and (Path(place) / "onnxruntime_c_api.h").is_file()), None)


def compare(include: str, header: str, work: Path) -> subprocess.CompletedProcess[str]:
    """Compiles assertions over both headers; ours under other names, since they declare the same things."""
    ours = re.sub(r"\b(Ort|ORT_)(\w+)", r"Our_\1\2", header)
    # Pointers to the interface's own objects are the same types in both.
    for name in re.findall(r"typedef struct Our_(Ort\w+) Our_\1;", ours):
        if name not in ("OrtApi", "OrtCustomOp"):
            ours = ours.replace(f"typedef struct Our_{name} Our_{name};", f"typedef struct {name} Our_{name};")
    # Where the real header has an enumeration ours has int (the sizes are compared below).
    for mine, real in {
        "CreateStatus)(int code": "CreateStatus)(OrtErrorCode code",
        "const Our_OrtTensorTypeAndShapeInfo *info, int *out": "const OrtTensorTypeAndShapeInfo *info, "
        "enum ONNXTensorElementDataType *out",
        "Our_OrtCustomOpDomain *domain, const Our_OrtCustomOp *op": "OrtCustomOpDomain *domain, const OrtCustomOp *op",
    }.items():
        assert mine in ours
        ours = ours.replace(mine, real)
    indices = re.findall(r"^    ORT_(\w+) = (\d+)", header, re.M)
    entries = [name for name, _ in indices if f"(LESONNX_ORT_CALL *Ort{name})" in header]
    assert len(entries) > 15
    lines = ["#include <onnxruntime_c_api.h>", ours]
    lines += ["#define SAME(a, b) _Static_assert((a) == (b), #a)"]
    lines += [f"SAME(offsetof(OrtApi, {name}) / sizeof(void *), Our_ORT_{name});" for name in entries]
    for real, mine in {
        "ORT_FAIL": "Our_ORT_FAIL",
        "ORT_INVALID_ARGUMENT": "Our_ORT_INVALID_ARGUMENT",
        "ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT": "Our_ORT_TENSOR_FLOAT",
        "ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8": "Our_ORT_TENSOR_UINT8",
        "ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64": "Our_ORT_TENSOR_INT64",
        "INPUT_OUTPUT_REQUIRED": "0",
        "OrtMemTypeDefault": "0",
        "sizeof(enum ONNXTensorElementDataType)": "sizeof(int)",
        "sizeof(OrtErrorCode)": "sizeof(int)",
    }.items():
        lines.append(f"SAME((long)({real}), (long)({mine}));")
    members = re.findall(r"LESONNX_ORT_CALL \*(\w+)\)", header[header.index("struct OrtCustomOp {") :])
    assert len(members) == 25
    lines += [f"SAME(offsetof(OrtCustomOp, {name}), offsetof(Our_OrtCustomOp, {name}));" for name in members]
    lines += ["SAME(sizeof(OrtCustomOp), sizeof(Our_OrtCustomOp));", "SAME(offsetof(OrtApiBase, GetVersionString), "
              "offsetof(Our_OrtApiBase, GetVersionString));"]  # fmt: skip
    lines += ["void types(const OrtApi *api) {"]
    lines += [f"    Our_Ort{name} f_{name} = api->{name}; (void)f_{name};" for name in entries]
    lines += ["}"]
    source = work / "compare.c"
    source.write_text("\n".join(lines) + "\n")
    flags = ["-std=c11", "-fsyntax-only", "-Werror=incompatible-pointer-types", "-I", include]
    assert COMPILER is not None
    return subprocess.run([COMPILER, *flags, str(source)], capture_output=True, text=True, check=False)


@pytest.mark.skipif(real_include() is None, reason="onnxruntime_c_api.h is not installed (libonnxruntime-dev)")
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_our_header_agrees_with_the_real_one(tmp_path: Path) -> None:
    include = real_include()
    assert include is not None
    header = (NATIVE / "ort_api.h").read_text()
    result = compare(include, header, tmp_path)
    assert result.returncode == 0, result.stderr
    wrong = header.replace("ORT_GetDimensions = 62", "ORT_GetDimensions = 63")
    assert compare(include, wrong, tmp_path).returncode != 0
