"""What a manifest may say of pictures: counts that a model can have, and the file that the tower's weights are in."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import BundleFactory

from lesonnx.bundle import Bundle
from lesonnx.errors import BundleError, CheckpointError
from lesonnx.external import external_files
from lesonnx.manifest import parse_manifest
from lesonnx_export.config import Config

BOUNDS: dict[str, dict[str, list[Any]]] = {
    "minicpmv4_7_moe": {
        "patch_size": [0, 1025],
        "token_patches": [0, 1, 3, 8, 1_000_000],
        "scale_resolution": [0, 8193, 1_000_000],
        "max_slice_nums": [0, 257, 1_000_000],
    },
    "qwen3_vl_moe": {
        "patch_size": [0, 1025],
        "token_patches": [1, 4],
        "min_pixels": [0, 1 << 29],
        "max_pixels": [0, (1 << 28) + 1],
    },
}


@pytest.mark.parametrize("name", BOUNDS)
def test_counts_are_those_that_are_exported(bundle_of: BundleFactory, name: str) -> None:
    document = json.loads((bundle_of(name) / "manifest.json").read_text())
    for key, values in BOUNDS[name].items():
        for value in values:
            changed = document | {"vision": document["vision"] | {key: value}}
            with pytest.raises(BundleError, match=rf"^here: vision\.(\w+\.)?{key}: [^\n]*$"):
                parse_manifest(json.dumps(changed), "here")
    if "scale_resolution" in BOUNDS[name]:
        most = {"token_patches": 2, "scale_resolution": 8192, "max_slice_nums": 256}
        changed = document | {"vision": document["vision"] | most}
        assert parse_manifest(json.dumps(changed), "here").vision is not None


def test_a_patch_that_no_manifest_takes_is_not_exported() -> None:
    with pytest.raises(CheckpointError, match="patch_size is 1025, expected at most 1024"):
        Config({"model_type": "vision_config", "patch_size": 1025}).integer("patch_size")


@pytest.mark.parametrize("name", BOUNDS)
def test_data_is_where_the_towers_weights_are(bundle_of: BundleFactory, name: str, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundle_of(name), bundle)
    path = bundle / "manifest.json"
    document = json.loads(path.read_text())
    vision = document["vision"]
    expected = re.escape(f"{bundle / 'vision/tower.onnx'}: its weights are in vision.bin, expected ")
    for wrong in ("manifest.json", "vision/tower.onnx", "dense/dense.bin"):
        path.write_text(json.dumps(document | {"vision": vision | {"data": wrong}}))
        with pytest.raises(BundleError, match=rf"^{expected}{wrong} as in the manifest$"):
            Bundle(bundle)
    # The same file, said in another way.
    path.write_text(json.dumps(document | {"vision": vision | {"data": "vision/./vision.bin"}}))
    assert Bundle(bundle).manifest.vision is not None
    (bundle / "vision/tower.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match=r"tower\.onnx: its weights are in no file, expected vision/"):
        Bundle(bundle)


def test_models_without_external_data(bundle_of: BundleFactory) -> None:
    bundle = bundle_of("minicpmv4_7_moe")
    assert external_files(bundle / "dense/embed.onnx") == {"dense.bin"}
    assert external_files(bundle / "vision/prepare.onnx") == set()
