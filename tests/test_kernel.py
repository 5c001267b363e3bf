"""The expert kernel: exactness against float64, equal bits everywhere, batch invariance, and refusal of bad input."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_support import LAYOUTS, Experts, Layouts, Packed, align, exact_product, random_matrix

if TYPE_CHECKING:
    from onnx import ModelProto

from lesonnx.errors import InputError, LesonnxError
from lesonnx.manifest import ExpertMatrix
from lesonnx.native import library_path
from lesonnx.native.library import Library

onnx = pytest.importorskip("onnx")
from lesonnx.bench.session_model import session_model  # noqa: E402 (needs onnx)
from lesonnx_export.stage import stage_model  # noqa: E402

NATIVE = Path(__file__).parent.parent / "lesonnx" / "native"
FLAGS = ["-std=c11", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-shared"]


def compile_library(compiler: str, target: Path, *flags: str) -> Path:
    sources = [str(path) for path in sorted(NATIVE.glob("*.c"))]
    subprocess.run([compiler, *FLAGS, *flags, *sources, "-o", str(target), "-lm"], check=True, capture_output=True)
    return target


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed library, or one built for these tests from a clean checkout."""
    built = library_path()
    if built is not None:
        return built
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None:
        pytest.skip("no built library and no C compiler")
    return compile_library(compiler, tmp_path_factory.mktemp("native") / "liblesonnx.so", "-O3")


@pytest.fixture
def library(path: Path) -> Iterator[Library]:
    library = Library(path)
    library.use_isa(None)
    yield library
    library.use_isa(None)


def session(path: Path, model: ModelProto, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(path))
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feed(
    experts: Experts, hidden: np.ndarray, row_lists: list[list[int]], which: list[int] | None = None
) -> dict[str, np.ndarray]:
    """Operator inputs for lists of rows, the i-th computed by expert ``which[i]`` (default i)."""
    which = list(range(len(row_lists))) if which is None else which
    return {
        "hidden": hidden,
        "cache": experts.cache,
        "offsets": experts.offsets[which],
        "row_starts": np.cumsum([0, *map(len, row_lists)]).astype(np.int64),
        "rows": np.array([row for rows in row_lists for row in rows], np.int64),
    }


def one_matrix(
    seed: int, rows: int, columns: int, bits: int, block: int, bias: bool
) -> tuple[Packed, np.ndarray, ExpertMatrix]:
    """A matrix, its bytes in an exactly sized buffer, and its manifest record."""
    packed = random_matrix(np.random.default_rng(seed), rows, columns, bits, block, bias)
    parts: list[np.ndarray] = []
    offsets: dict[str, int] = {}
    at = 0
    for name in ("weight", "scales", "bias"):
        tensor = getattr(packed, name)
        if tensor is not None:
            raw = tensor.reshape(-1).view(np.uint8)
            parts += [np.zeros(align(at) - at, np.uint8), raw]
            offsets[f"{name}_offset_bytes"] = align(at)
            at = align(at) + raw.nbytes
    sizes = {"rows": rows, "columns": columns, "bits": bits, "block_size": block}
    record = ExpertMatrix.model_validate(sizes | offsets)
    return packed, np.concatenate(parts), record


@pytest.mark.parametrize(("bits", "block"), [*LAYOUTS, (32, 0)])
@pytest.mark.parametrize("columns", [16, 40, 272, 1000, 1024])
def test_product_is_exact_and_equal_on_every_instruction_set(
    library: Library, bits: int, block: int, columns: int
) -> None:
    rng = np.random.default_rng(columns)
    for rows, m in ((5, 3), (16, 1), (37, 2), (50, 13), (64, 70)):
        packed, raw, record = one_matrix(rows, rows, columns, bits, block, bias=rows == 37)
        x = rng.standard_normal((m, columns)).astype(np.float32)
        exact = exact_product(x, packed, bits, block)
        library.use_isa("portable")
        reference = library.matmul(record, raw, x)
        error = np.abs(reference - exact).max(axis=1) / np.abs(exact).max(axis=1)
        assert error.max() <= 1e-6
        for isa in library.isas():
            library.use_isa(isa)
            assert library.matmul(record, raw, x).tobytes() == reference.tobytes(), (isa, rows, m)


def test_extreme_inputs_are_equal_on_every_instruction_set(library: Library) -> None:
    """All levels at their extremes (where 16-bit sums would saturate), zeros, tiny and huge values."""
    for bits, block in LAYOUTS:
        _, raw, record = one_matrix(1, 32, 512, bits, block, bias=False)
        size = record.weight_bytes
        x = np.zeros((6, 512), np.float32)
        x[0] = -1.0
        x[1, ::2], x[1, 1::2] = 1.0, -1.0
        x[3] = 1e-38
        x[4] = np.random.default_rng(0).standard_normal(512) * 1e30
        x[5, 7] = 1e-20
        for fill in (0x00, 0xFF, 0xA5):
            raw[:size] = fill
            library.use_isa("portable")
            reference = library.matmul(record, raw, x)
            assert np.isfinite(reference).all()
            assert not reference[2:4].any()
            for isa in library.isas():
                library.use_isa(isa)
                assert library.matmul(record, raw, x).tobytes() == reference.tobytes(), (isa, bits, block, fill)


def test_nan_stays_in_its_row(library: Library) -> None:
    experts = Experts(64, 32, ((4, 32),) * 3)
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    clean = library.experts(experts.kind, 1, x, experts.cache, experts.offsets, [0, 4], range(4))
    x[2, 5] = np.nan
    dirty = library.experts(experts.kind, 1, x, experts.cache, experts.offsets, [0, 4], range(4))
    assert np.isnan(dirty[2]).all()
    assert np.array_equal(np.delete(dirty, 2, 0), np.delete(clean, 2, 0))


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "reglu", "swiglu_clamped"])
@pytest.mark.parametrize("layouts", [((4, 128),) * 3, ((4, 32), (8, 16), (2, 64)), ((2, 16), (32, 0), (8, 128))])
def test_expert_against_float64(library: Library, activation: str, layouts: Layouts) -> None:
    experts = Experts(200, 136, layouts, activation=activation, bias=True)
    x = np.random.default_rng(3).standard_normal((100, 200)).astype(np.float32) * 3
    out = library.experts(experts.kind, 1, x, experts.cache, experts.offsets, [0, 100], range(100))[:, 0]
    exact = experts.exact(0, x)
    error = np.abs(out - exact).max(axis=1) / np.abs(exact).max(axis=1)
    # The intermediate is quantized again: one rounding may move an int8 step.
    assert (error <= 1e-5).mean() >= 0.98
    assert error.max() <= 5e-3


@pytest.mark.parametrize(("bits", "block"), [(2, 64), (4, 16), (4, 32), (4, 128), (8, 32), (8, 128), (32, 0)])
def test_expert_against_the_session(path: Path, bits: int, block: int) -> None:
    experts = Experts(256, 192, ((bits, block),) * 3, seed=bits)
    reference = ort.InferenceSession(
        session_model(experts.kind, experts.cache).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    kernel = session(path, stage_model(experts.kind, 1))
    x = np.random.default_rng(4).standard_normal((200, 256)).astype(np.float32)
    out = kernel.run(None, feed(experts, x, [list(range(200))]))[0][:, 0]
    expected = reference.run(None, {"x": x})[0]
    error = np.abs(out - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert (error <= 1e-5).mean() >= 0.98
    assert error.max() <= 5e-3


PropertyCase = tuple[Experts, np.ndarray, dict[int, ort.InferenceSession], np.ndarray]
PROPERTY_LAYOUTS: list[Layouts] = [((4, 128),) * 3, ((2, 16), (4, 16), (8, 64)), ((32, 0),) * 3]
TOKENS, SLOTS, COUNT = 40, 3, 3


@pytest.fixture(scope="session")
def property_cases(path: Path) -> list[PropertyCase]:
    """For each layout: experts, hidden rows, sessions by thread count, and every row computed alone."""
    cases = []
    for index, layouts in enumerate(PROPERTY_LAYOUTS):
        # Wide enough that the operator does go parallel.
        experts = Experts(264, 200, layouts, count=COUNT, seed=index, bias=index == 1)
        hidden = np.random.default_rng(index).standard_normal((TOKENS, 264)).astype(np.float32)
        sessions = {threads: session(path, stage_model(experts.kind, SLOTS), threads) for threads in (1, 2, 4)}
        alone = np.stack(
            [
                np.stack(
                    [
                        sessions[1].run(None, feed(experts, hidden, [[token * SLOTS]], [expert]))[0][token, 0]
                        for token in range(TOKENS)
                    ]
                )
                for expert in range(COUNT)
            ]
        )
        cases.append((experts, hidden, sessions, alone))
    return cases


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bits_do_not_depend_on_split_order_or_threads(property_cases: list[PropertyCase], data: st.DataObject) -> None:
    experts, hidden, sessions, alone = property_cases[data.draw(st.integers(0, len(property_cases) - 1))]
    seed = data.draw(st.integers(0, 2**31))
    count = data.draw(st.integers(0, TOKENS * SLOTS))
    lists = data.draw(st.integers(1, 6))
    threads = data.draw(st.sampled_from([1, 2, 4]))
    rng = np.random.default_rng(seed)
    rows = rng.permutation(TOKENS * SLOTS)[:count]
    cuts = np.sort(rng.integers(0, count + 1, lists - 1))
    row_lists = [part.tolist() for part in np.split(rows, cuts)]
    which = rng.integers(0, COUNT, lists).tolist()
    out = sessions[threads].run(None, feed(experts, hidden, row_lists, which))[0]
    for expert, part in zip(which, row_lists, strict=True):
        for row in part:
            assert out[row // SLOTS, row % SLOTS].tobytes() == alone[expert, row // SLOTS].tobytes()


def all_rows(library: Library, experts: Experts, hidden: np.ndarray) -> np.ndarray:
    m = len(hidden)
    return library.experts(experts.kind, 1, hidden, experts.cache, experts.offsets, [0, m], range(m))


def test_many_rows_equal_one_row_on_every_instruction_set(library: Library) -> None:
    """Across the row counts where the kernel changes its way: panels, pieces of 64 rows, rounds of intermediates."""
    for layouts in (((4, 128), (4, 32), (8, 128)), ((2, 32), (8, 16), (4, 16))):
        experts = Experts(160, 144, layouts, count=1)
        x = np.random.default_rng(7).standard_normal((150, 160)).astype(np.float32)
        for isa in library.isas():
            library.use_isa(isa)
            alone = np.concatenate([all_rows(library, experts, x[i : i + 1]) for i in range(len(x))])
            for m in (2, 3, 5, 7, 8, 11, 12, 13, 64, 65, 150):
                assert all_rows(library, experts, x[:m]).tobytes() == alone[:m].tobytes(), (isa, m)


def test_only_named_rows_are_written(path: Path) -> None:
    experts = Experts(64, 48, ((4, 16),) * 3, count=2)
    hidden = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    kernel = session(path, stage_model(experts.kind, 2))
    out = np.full((5, 2, 64), 7, np.float32)
    binding = kernel.io_binding()
    for name, array in feed(experts, hidden, [[3, 0], [8]]).items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("expert_out", "cpu", 0, np.float32, out.shape, out.ctypes.data)
    kernel.run_with_iobinding(binding)
    written = np.zeros((5, 2), bool)
    written[[1, 0, 4], [1, 0, 0]] = True
    assert (out[~written] == 7).all()
    assert (out[written] != 7).all()


def test_an_empty_run_is_allowed(path: Path) -> None:
    experts = Experts(64, 48, ((4, 16),) * 3)
    kernel = session(path, stage_model(experts.kind, 2))
    assert kernel.run(None, feed(experts, np.zeros((0, 64), np.float32), []))[0].shape == (0, 2, 64)
    assert kernel.run(None, feed(experts, np.zeros((3, 64), np.float32), [[]]))[0].shape == (3, 2, 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offsets": [-64]}, "offsets"),
        ({"offsets": [64]}, "not inside a cache"),
        ({"offsets": [2**62]}, "not inside a cache"),
        ({"offsets": [0, 0]}, "row_starts has 2 values"),
        ({"row_starts": [0, 3]}, "expected 0 to 2"),
        ({"row_starts": [1, 2]}, "expected 0 to 2"),
        ({"row_starts": [0, 1, 0, 2], "offsets": [0, 0, 0]}, "more than the next"),
        ({"rows": [0, 6]}, "expected 0..5"),
        ({"rows": [-1, 0]}, "rows"),
        ({"rows": [4, 4]}, "second time"),
        ({"hidden": np.zeros((3, 63), np.float32)}, "63"),
        ({"cache": np.zeros(100, np.uint8)}, "not inside a cache of 100"),
    ],
)
def test_bad_inputs_are_errors_of_one_line(path: Path, change: dict[str, Any], words: str) -> None:
    experts = Experts(64, 48, ((4, 16),) * 3)
    model = stage_model(experts.kind, 2)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "any"
    kernel = session(path, model)
    inputs = feed(experts, np.zeros((3, 64), np.float32), [[0, 3]])
    for name, value in change.items():
        inputs[name] = value if isinstance(value, np.ndarray) else np.array(value, np.int64)
    with pytest.raises(Exception, match="lesonnx::Experts: ") as caught:
        kernel.run(None, inputs)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("slots", 0, "slots"),
        ("hidden_size", 0, "shape"),
        ("hidden_size", 65, "not inside"),
        ("intermediate_size", 1 << 40, "shape"),
        ("expert_bytes", 64, "not inside"),
        ("expert_bytes", -1, "expert_bytes"),
        ("gate_bits", 3, "gate: bits is 3"),
        ("up_block_size", 0, "up: block_size is 0"),
        ("down_block_size", 48, "down: block_size is 48"),
        ("gate_weight_offset", -1, "gate: weight"),
        ("up_scales_offset", -1, "up: scales"),
        ("up_scales_offset", 2, "not a multiple of 4"),
        ("down_bias_offset", -2, "down: bias"),
        ("down_weight_offset", 2**62, "down: weight"),
        ("activation", "tanh", "activation"),
        ("gate_bits", 4.0, "gate_bits is missing or of another type"),
        ("limit", None, "limit is missing"),
    ],
)
def test_bad_attributes_are_errors_of_one_line(path: Path, name: str, value: Any, words: str) -> None:
    experts = Experts(64, 48, ((4, 16),) * 3)
    model = stage_model(experts.kind, 2)
    node = model.graph.node[0]
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    if value is not None:
        node.attribute.append(onnx.helper.make_attribute(name, value))
    with pytest.raises(Exception, match="lesonnx::Experts: ") as caught:
        session(path, model)
    assert words in str(caught.value)


def test_plain_functions_refuse_bad_input(library: Library) -> None:
    _, raw, record = one_matrix(0, 16, 64, 4, 32, bias=False)
    with pytest.raises(LesonnxError, match="not inside"):
        library.matmul(record, raw[:-1], np.zeros((1, 64), np.float32))
    with pytest.raises(InputError, match="instruction set 'none'"):
        library.use_isa("none")


def test_lesonnx_isa_forces_or_refuses(path: Path) -> None:
    code = (
        "import sys, onnxruntime as ort\n"
        "from lesonnx.native.library import Library\n"
        "options = ort.SessionOptions()\n"
        "options.register_custom_ops_library(sys.argv[1])\n"
        "from pathlib import Path\n"
        "print(Library(Path(sys.argv[1])).isa())\n"
    )
    for isa in ("portable", "z80"):
        result = subprocess.run(
            [sys.executable, "-c", code, str(path)], env={**os.environ, "LESONNX_ISA": isa}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if isa == "portable":
            assert result.stdout.strip() == "portable"
        else:
            assert result.returncode
            assert "LESONNX_ISA=z80 is not one of: " in result.stderr


@pytest.mark.skipif(shutil.which("clang") is None or shutil.which("gcc") is None, reason="needs gcc and clang")
def test_gcc_and_clang_give_equal_bytes(path: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        flags = {"clang": "-O2", "gcc": "-O1"}
        built = list(pool.map(lambda c: compile_library(c, tmp_path / f"{c}.so", flags[c]), flags))
    libraries = [Library(path), *map(Library, built)]
    x = np.random.default_rng(5).standard_normal((20, 200)).astype(np.float32) * 2
    for layouts in (((4, 128), (4, 32), (8, 64)), ((2, 16), (8, 16), (4, 16)), ((32, 0),) * 3):
        for activation in ("swiglu", "geglu", "swiglu_clamped"):
            experts = Experts(200, 136, layouts, activation=activation, bias=True)
            outputs = set()
            for library in libraries:
                for isa in library.isas():
                    library.use_isa(isa)
                    out = library.experts(experts.kind, 1, x, experts.cache, experts.offsets, [0, 20], range(20))
                    outputs.add(out.tobytes())
                library.use_isa(None)
            assert len(outputs) == 1, (layouts, activation)


def test_avxvnni_in_the_encoding_of_avx512(library: Library, tmp_path: Path) -> None:
    """Processors with AVX-VNNI are rare where tests run: its file, with vpdpbusd as AVX-512 encodes it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if "avx512vnni" not in library.isas() or compiler is None:
        pytest.skip("needs AVX-512 VNNI and a compiler")
    for source in [*NATIVE.glob("*.c"), *NATIVE.glob("*.h")]:
        text = source.read_text()
        if source.name == "avxvnni.c":
            text = text.replace("avx2,fma,avxvnni", "avx2,fma,avx512vl,avx512vnni").replace("dpbusd_avx", "dpbusd")
        if source.name == "dispatch.c":
            text = text.replace("{&lesonnx_avxvnni, has_avxvnni}", "{&lesonnx_avxvnni, has_avx512vnni}")
        (tmp_path / source.name).write_text(text)
    shutil.copytree(NATIVE / "include", tmp_path / "include")
    target = tmp_path / "liblesonnx.so"
    sources = [str(path) for path in sorted(tmp_path.glob("*.c"))]
    subprocess.run([compiler, *FLAGS, "-O1", *sources, "-o", str(target), "-lm"], check=True, capture_output=True)
    other = Library(target)
    x = np.random.default_rng(6).standard_normal((30, 272)).astype(np.float32)
    for bits, block in LAYOUTS:
        experts = Experts(272, 144, ((bits, block),) * 3)
        outputs = set()
        for lib, isa in ((library, "portable"), (other, "avxvnni")):
            lib.use_isa(isa)
            outputs |= {b"".join(all_rows(lib, experts, x[:m]).tobytes() for m in (1, 3, 30))}
        assert len(outputs) == 1, (bits, block)
