"""Compare Qwen3-VL's rules for pictures with transformers' own: sizes, and where a prompt's tokens are.

Usage: ``python tools/fuzz_qwen3_vl.py [--cases N] [--seed S]``, where transformers >= 5.24 and torch are beside
lesonnx's own requirements. Neither the product nor a test needs it. Ends with exit code 1 at the first difference.

``sizes``: `views` against the processor's ``smart_resize``, what is refused too, under several bounds.
``positions``: `positions` against the model's ``get_rope_index``, pictures with text between.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from lesonnx.errors import InputError  # noqa: E402
from lesonnx.vision.cutting import View  # noqa: E402
from lesonnx.vision.qwen3_vl import positions, views  # noqa: E402

# Pixels of a token, a side; the least and most of a picture: as published, the fixture's, Qwen2-VL's, no least.
BOUNDS = ((32, 65536, 16777216), (16, 1024, 5120), (28, 3136, 1003520), (32, 1, 1048576))
IMAGE, TEXT = 7, 1
LONGEST = 1 << 14


class Rotations:
    """The model's rules of positions without its weights."""

    get_vision_position_ids = Qwen3VLMoeModel.get_vision_position_ids
    get_rope_index = Qwen3VLMoeModel.get_rope_index
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))


def compare_sizes(chance: random.Random, cases: int) -> None:
    refused = 0
    for _ in range(cases):
        unit, least, most = chance.choice(BOUNDS)
        height, width = (int(LONGEST ** chance.random()) for _ in "hw")
        vision: Any = SimpleNamespace(patch_size=unit // 2, token_patches=2, min_pixels=least, max_pixels=most)
        try:
            expected = smart_resize(height, width, unit, least, most)
        except ValueError:
            expected = None
        try:
            found = views(height, width, vision)[0].size
        except InputError:
            found = None
        refused += expected is None
        check(found == expected, f"{width} x {height}, {unit, least, most}: {found}, transformers {expected}")
    print(f"sizes: {cases} alike, {refused} of them refused")


def compare_positions(chance: random.Random, cases: int) -> None:
    vision: Any = SimpleNamespace(patch_size=8, token_patches=2, tokens=SimpleNamespace(image=IMAGE))
    for _ in range(cases):
        ids, grids = [TEXT] * chance.randint(0, 3), []
        for _ in range(chance.randint(1, 6)):
            rows, columns = chance.randint(1, 12), chance.randint(1, 12)
            grids.append((rows, columns))
            # transformers tells pictures apart by what is between them.
            ids += [IMAGE] * (rows * columns) + [TEXT] * chance.randint(1, 9)
        tokens = torch.tensor([ids])
        sizes = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids])
        expected = Rotations().get_rope_index(tokens, (tokens == IMAGE).int(), sizes)[0][:, 0].numpy()
        found = positions(ids, [[View((16 * rows, 16 * columns), (1, 1))] for rows, columns in grids], vision)
        check(bool((found == expected).all()), f"{ids}, {grids}: {found.tolist()}, transformers {expected.tolist()}")
    print(f"positions: {cases} prompts alike")


def check(alike: bool, shown: str) -> None:
    if not alike:
        sys.exit(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    compare_sizes(chance, options.cases)
    compare_positions(chance, options.cases // 10)


if __name__ == "__main__":
    main()
