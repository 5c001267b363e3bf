"""`lesonnx doctor` and `lesonnx bench kernel`: what they measure, and their output for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lesonnx import doctor as module
from lesonnx.errors import InputError
from lesonnx.native import library_path
from lesonnx.vision import pictures


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_bandwidth", lambda library, threads, **_: 1e9 * threads)


def test_flash_is_read_to_the_last_page(tmp_path: Path) -> None:
    path = tmp_path / "experts.pack"
    path.write_bytes(bytes(5 * 4096 + 100))
    reading = module.flash_bandwidth(path)
    assert reading.bytes_per_second > 0
    (tmp_path / "tiny").write_bytes(b"x")
    with pytest.raises(InputError, match="1 bytes, expected at least 4096"):
        module.flash_bandwidth(tmp_path / "tiny")


def test_doctor_prints_one_json_object(quick: None, tmp_path: Path) -> None:
    pack = tmp_path / "experts" / "layer_000" / "experts.pack"
    pack.parent.mkdir(parents=True)
    pack.write_bytes(bytes(1 << 16))
    result = CliRunner().invoke(module.doctor, [str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["flash"]["path"] == str(pack)
    assert found["engine"] == ("session" if library_path() is None else "kernel")
    assert found["cores"] >= 1
    assert found["memory_bytes_per_second"] == 1e9 * found["cores"]


def test_doctor_without_a_library_says_what_to_do(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "library_path", lambda: None)
    result = CliRunner().invoke(module.doctor)
    assert result.exit_code == 0, result.output
    assert "session (the kernel's library is not built)" in result.output
    assert "install a C compiler" in result.output


def test_doctor_says_which_pictures_can_be_read(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def row() -> str:
        result = CliRunner().invoke(module.doctor)
        assert result.exit_code == 0, result.output
        # Rows are as wide as the terminal, so a long one has several lines.
        return " ".join(result.output.partition(" pictures ")[2].partition(" faster ")[0].split())

    monkeypatch.setattr(pictures, "has_pillow", lambda: False)
    monkeypatch.setattr(module, "has_pillow", lambda: False)
    assert row() == "JPEG, PNG (without Pillow; for more formats: pip install 'lesonnx[vision]')"
    monkeypatch.undo()
    pytest.importorskip("PIL")
    monkeypatch.setattr(module, "memory_bandwidth", lambda library, threads, **_: 1e9 * threads)
    formats, by = row().split(" (")
    assert {"JPEG", "PNG"} < set(formats.split(", "))
    assert by == "Pillow)"


def test_doctor_refuses_a_directory_that_is_no_bundle(quick: None, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a bundle"):
        module.diagnose(tmp_path)


@pytest.mark.skipif(library_path() is None, reason="the kernel's library is not built")
def test_bench_kernel_prints_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx")
    from lesonnx.bench import kernel as bench

    monkeypatch.setattr(bench, "memory_bandwidth", lambda library, threads, **_: 1e9)
    monkeypatch.setattr(bench, "last_level_cache_bytes", lambda: 0)
    monkeypatch.setattr(bench, "COLD_BYTES", 1 << 20)
    sizes = ["--hidden-size", "256", "--intermediate-size", "128", "--bits", "4", "--rows", "1,3", "--threads", "1"]
    result = CliRunner().invoke(bench.kernel, [*sizes, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)["rows"]
    assert [(row["bits"], row["rows"], row["threads"]) for row in rows] == [(4, 1, 1), (4, 3, 1)]
    assert all(row["kernel_cold_ms"] > 0 and row["session_cold_ms"] > 0 for row in rows)
    assert "kernel cold" in CliRunner().invoke(bench.kernel, sizes).output
