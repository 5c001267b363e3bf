"""Pictures and memory: sessions go when pictures are read, experts give way for that time, and the budget holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Config, Tensors, derive, fixture
from conftest import BundleFactory

from lesonnx.bundle import Bundle

NAME = "minicpmv4_7_moe"
# Sizes of the fixture's eyes -> those of eyes of 52 MB: hidden, intermediate, four neighbours of each.
LARGER = {32: 256, 48: 1024, 128: 4 * 256, 192: 4 * 1024}
EXPERT_SIZE = 512
LAYERS = 8
# Prints resident memory and the experts' budget before, while and after pictures are read, and what bounds them.
SCRIPT = """
import json, sys
import lesonnx
from lesonnx.errors import BudgetError
from lesonnx.generate import GenerationOptions
from lesonnx.memory import current_bytes, peak_bytes
import lesonnx.model
budget = current_bytes() + int(sys.argv[3])
found = {"budget": budget, "now": [], "experts": []}
with lesonnx.load(sys.argv[1], memory_budget_bytes=budget) as model:
    def note():
        found["now"].append(current_bytes())
        found["experts"].append(model.runner.loader.expert_budget_bytes)
    model.generate("Hello", GenerationOptions(max_new_tokens=8, ignore_eos=True)).text()
    note()
    try:
        generation = model.generate("What?", GenerationOptions(max_new_tokens=8, ignore_eos=True), [sys.argv[2]])
        for token in generation:
            if token.id is None:
                note()
        found["tokens"] = len(generation.report.token_ids)
    except BudgetError as error:
        found["error"] = str(error)
    note()
    model.generate("Hello", GenerationOptions(max_new_tokens=8, ignore_eos=True)).text()
found["peak"] = peak_bytes()
print(json.dumps(found))
"""


def enlarge(tensors: Tensors) -> Tensors:
    """Eyes of more layers and wider ones, and wider experts, of random weights."""
    rng = np.random.default_rng(0)
    larger: Tensors = {}
    for name, tensor in tensors.items():
        is_eyes = "vision_tower" in name or "merger" in name
        if not is_eyes and ".experts." not in name:
            larger[name] = tensor
            continue
        sizes = LARGER if is_eyes else {16: EXPERT_SIZE}
        shape = tuple(sizes.get(size, size) for size in tensor.shape)
        layers = range(LAYERS) if ".encoder.layers.0." in name else [0]
        for layer in layers:
            if ".encoder.layers." not in name or ".encoder.layers.0." in name:
                values = rng.standard_normal(shape, dtype=np.float32) * 0.02
                larger[name.replace(".encoder.layers.0.", f".encoder.layers.{layer}.")] = values.astype(
                    ml_dtypes.bfloat16
                )
    return larger


def widen(config: Config) -> Config:
    eyes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": LAYERS}
    return config | {
        "vision_config": config["vision_config"] | eyes,
        "text_config": config["text_config"] | {"moe_intermediate_size": EXPERT_SIZE},
    }


@pytest.fixture(scope="module")
def bundle(bundle_of: BundleFactory, quick_root: Path) -> Path:
    checkpoint = derive(NAME, quick_root / "larger_eyes", config=widen, tensors=enlarge)
    for file in fixture(NAME).iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            (checkpoint / file.name).write_bytes(file.read_bytes())
    return bundle_of(checkpoint)


@pytest.fixture(scope="module")
def picture(quick_root: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    path = quick_root / "picture.jpg"
    pixels = np.add.outer(np.arange(900), np.arange(1200)) % 251
    image.fromarray(np.repeat(pixels.astype(np.uint8)[..., None], 3, axis=2)).save(path)
    return path


def run(bundle: Path, picture: Path, extra_bytes: int) -> dict[str, Any]:
    command = [sys.executable, "-c", SCRIPT, str(bundle), str(picture), str(extra_bytes)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="VmRSS and VmHWM are Linux's")
def test_experts_give_way_while_pictures_are_read(bundle: Path, picture: Path) -> None:
    found = run(bundle, picture, 185_000_000)
    vision = Bundle(bundle).manifest.vision
    assert vision is not None
    weights = Bundle(bundle).file(vision.data).stat().st_size
    before, *reading, after = found["now"]
    experts, *lent, returned = found["experts"]
    assert found["tokens"] == 8
    assert found["peak"] <= found["budget"]
    # The tower is there while crops are read, and gone when the answer is: then there may be all experts.
    assert max(reading) - before > 0.8 * weights
    assert after < max(reading) - 0.8 * weights + experts
    # What was lent came back, and generating goes on as before.
    assert experts == returned == Bundle(bundle).expert_bytes
    assert all(Bundle(bundle).least_budget_bytes <= each < 0.8 * experts for each in lent)


@pytest.mark.skipif(sys.platform != "linux", reason="VmRSS and VmHWM are Linux's")
def test_a_budget_without_room_for_pictures_ends_before_they_are_read(bundle: Path, picture: Path) -> None:
    found = run(bundle, picture, 140_000_000)
    assert "pictures " in found["error"]
    stated = re.search(r"; at least ([\d,]+) bytes are needed ", found["error"])
    assert stated is not None
    enough = run(bundle, picture, 140_000_000 + int(stated[1].replace(",", "")) - found["budget"])
    assert enough["tokens"] == 8
    assert enough["peak"] <= enough["budget"]
    assert "\n" not in found["error"]
    assert "tokens" not in found
    assert found["peak"] <= found["budget"]
    assert found["experts"][0] == found["experts"][-1]
