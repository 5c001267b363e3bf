"""A bundle on disk: what opening checks, and that verifying finds any change at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import read_config
from conftest import BundleFactory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lesonnx.bundle import Bundle
from lesonnx.errors import BundleError
from lesonnx.manifest import PAGE_BYTES


@pytest.fixture
def copy(bundle_of: BundleFactory, tmp_path: Path) -> Path:
    """A bundle that a test may break."""
    return Path(shutil.copytree(bundle_of("qwen2_moe", bits=4), tmp_path / "bundle"))


@pytest.fixture(scope="module")
def victim(bundle_of: BundleFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that tests break and mend again, byte by byte."""
    return Path(shutil.copytree(bundle_of("qwen2_moe", bits=4), tmp_path_factory.mktemp("victim") / "bundle"))


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_a_fresh_bundle_is_whole(copy: Path) -> None:
    seen: list[int] = []
    count = Bundle(copy).verify(seen.append)
    assert count == len(files_of(copy)) - 1
    assert sum(seen) == sum(path.stat().st_size for path in files_of(copy) if path.name != "checksums.json")


def test_a_moved_bundle_is_whole(copy: Path) -> None:
    Bundle(copy.rename(copy.parent / "moved with spaces é")).verify()


def test_experts_and_sizes(copy: Path) -> None:
    bundle, config = Bundle(copy), read_config("qwen2_moe")
    layers, experts = config["num_hidden_layers"], config["num_experts"]
    assert [expert.number for expert in bundle.experts] == list(range(layers * (experts + 1)))
    assert [expert.expert_idx for expert in bundle.experts[: experts + 1]] == [*range(experts), None]
    for layer in bundle.manifest.expert_layers:
        of_layer = [expert for expert in bundle.experts if expert.layer_idx == layer.layer_idx]
        end = 0
        for expert in of_layer:
            assert expert.offset_bytes == end
            assert end % PAGE_BYTES == 0
            end += expert.cost_bytes
        assert end == bundle.pack_bytes(layer) == bundle.pack_file(layer.layer_idx).stat().st_size
    assert bundle.expert_bytes == sum(expert.cost_bytes for expert in bundle.experts)
    routed, shared = bundle.experts[0].cost_bytes, bundle.experts[experts].cost_bytes
    assert bundle.least_budget_bytes == config["num_experts_per_tok"] * routed + shared
    assert bundle.token_demand_bytes == layers * bundle.least_budget_bytes


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_is_found(victim: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(files_of(victim)))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(changed)
    try:
        with pytest.raises(BundleError):
            Bundle(victim).verify()
    finally:
        path.write_bytes(content)


def test_any_truncation_or_growth_is_found(victim: Path) -> None:
    for path in files_of(victim):
        content = path.read_bytes()
        for changed in (content[:-1], content[: len(content) // 2], b"", content + b"\0"):
            path.write_bytes(changed)
            with pytest.raises(BundleError, match=str(victim)):
                Bundle(victim).verify()
        path.write_bytes(content)
    Bundle(victim).verify()


def test_any_missing_file_is_found(victim: Path) -> None:
    for path in files_of(victim):
        aside = path.rename(victim.parent / "aside")
        with pytest.raises(BundleError, match="missing|holds no manifest.json"):
            Bundle(victim).verify()
        aside.rename(path)


@pytest.mark.parametrize("name", ["extra.bin", "dense/.hidden", "experts/layer_000/expert_999.onnx"])
def test_any_extra_file_is_found(copy: Path, name: str) -> None:
    (copy / name).write_bytes(b"")
    with pytest.raises(BundleError, match=f"{name}: is not named in checksums.json"):
        Bundle(copy).verify()


def test_an_extra_link_is_found(copy: Path, tmp_path: Path) -> None:
    (copy / "elsewhere").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(BundleError, match="elsewhere: is not named"):
        Bundle(copy).verify()


def test_swapped_files_are_found(copy: Path) -> None:
    one, other = copy / "experts/layer_000/expert_000.onnx", copy / "experts/layer_000/expert_001.onnx"
    one.rename(copy / "aside")
    other.rename(one)
    (copy / "aside").rename(other)
    with pytest.raises(BundleError, match="expert_00"):
        Bundle(copy).verify()


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "dense/segment_001.onnx",
        "experts/stage_0.onnx",
        "experts/layer_001/experts.pack",
        "experts/layer_001/expert_003.onnx",
        "experts/layer_001/shared.onnx",
    ],
)
def test_a_file_that_is_a_link_out_of_the_bundle(copy: Path, name: str) -> None:
    path = copy / name
    target = path.rename(copy.parent / path.name)
    path.symlink_to(target)
    with pytest.raises(BundleError, match=f"{name}: leads out of the bundle"):
        Bundle(copy)


@pytest.mark.parametrize("name", ["dense", "experts", "experts/layer_002"])
def test_a_directory_that_is_a_link_out_of_the_bundle(copy: Path, name: str) -> None:
    target = (copy / name).rename(copy.parent / "aside")
    (copy / name).symlink_to(target, target_is_directory=True)
    with pytest.raises(BundleError, match="leads out of the bundle"):
        Bundle(copy)


def test_a_link_to_the_bundle_itself_is_fine(copy: Path) -> None:
    (copy.parent / "link").symlink_to(copy, target_is_directory=True)
    Bundle(copy.parent / "link").verify()


# -- opening -----------------------------------------------------------------------------------------------------------


def test_no_directory_and_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such bundle directory"):
        Bundle(tmp_path / "nothing")
    with pytest.raises(BundleError, match="holds no manifest.json"):
        Bundle(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{}", b""])
def test_manifest_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError, match="manifest.json"):
        Bundle(tmp_path)


def test_manifest_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(BundleError, match=r"manifest.json: missing from the bundle"):
        Bundle(tmp_path)


def test_pack_of_another_length(copy: Path) -> None:
    pack = copy / "experts/layer_001/experts.pack"
    os.truncate(pack, pack.stat().st_size - PAGE_BYTES)
    with pytest.raises(BundleError, match=r"experts.pack: has [\d,]+ bytes, expected [\d,]+"):
        Bundle(copy)


def break_checksums(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return apply


BAD_CHECKSUMS = {
    "not JSON": lambda path: path.write_text("{"),
    "a list": lambda path: path.write_text("[]"),
    "another algorithm": break_checksums(lambda document: document.update(algorithm="md5")),
    "an unknown key": break_checksums(lambda document: document.update(extra=1)),
    "files as a list": break_checksums(lambda document: document.update(files=[])),
    "an entry without a size": break_checksums(lambda document: document["files"]["manifest.json"].pop("size_bytes")),
    "a path up": break_checksums(
        lambda document: document["files"].update({"../x": {"size_bytes": 1, "sha256": "0" * 64}})
    ),
    "an absolute path": break_checksums(
        lambda document: document["files"].update({"/etc/hostname": {"size_bytes": 1, "sha256": "0" * 64}})
    ),
    "a NUL in a path": break_checksums(
        lambda document: document["files"].update({"a\0b": {"size_bytes": 1, "sha256": "0" * 64}})
    ),
    "a file that is not there": break_checksums(
        lambda document: document["files"].update({"x": {"size_bytes": 1, "sha256": "0" * 64}})
    ),
}


@pytest.mark.parametrize("case", BAD_CHECKSUMS)
def test_bad_checksums(copy: Path, case: str) -> None:
    BAD_CHECKSUMS[case](copy / "checksums.json")
    with pytest.raises(BundleError):
        Bundle(copy).verify()
