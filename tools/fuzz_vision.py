"""Compare the rules for pictures with transformers' own: cutting, what stands for pictures, where their tokens are.

Usage: ``python tools/fuzz_vision.py [--cases N] [--seed S]``, where transformers >= 5.24, torch and Pillow are beside
lesonnx's own requirements. Neither the product nor a test needs it; it vouches for ``tests/data/vision.json``. Ends
with exit code 1 at the first difference, which it shows.

``cutting``: `cut` against the processor's own functions, over random sizes, ties, strips of 1:1000 and settings.
``expanding``: `expand` against the text that the processor gives to its tokenizer, pictures of those sizes in it.
``positions``: `positions` against the model's ``get_rope_index``, from those texts' ids, marks strewn between.
``stored``: ``tests/data/vision.json`` itself, what is taken and not refused.
``spreads``: every overview's spread over every canvas, up to 140 x 1300 tokens, against ``torch.linspace``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model
from transformers.models.minicpmv4_7.processing_minicpmv4_7 import MiniCPMV4_7Processor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from make_vision_vectors import DEFAULT_FILE, TEXTS, TOKENS, shown, tokenized, vision_of  # noqa: E402

from lesonnx.errors import InputError  # noqa: E402
from lesonnx.manifest import Vision  # noqa: E402
from lesonnx.vision.canvas import _spread, positions  # noqa: E402
from lesonnx.vision.cutting import Size, View, cut, views  # noqa: E402
from lesonnx.vision.placeholders import expand  # noqa: E402

BETWEEN = ["", "", "\n", "\n\n", "a", " a\n", "\nb", "</image>", "<slice>", "</slice>\n", "<image>", "\n<image>c"]


class Processor(MiniCPMV4_7Processor):  # type: ignore[misc]
    """The processor without a tokenizer: its texts only."""

    def __init__(self, images: MiniCPMV4_6ImageProcessorPil) -> None:
        self.image_processor = images
        self.slice_mode = images.slice_mode
        for name in ("image_start", "image_end", "slice_start", "slice_end"):
            setattr(self, f"{name}_token", TEXTS[name])
        self.image_token, self.video_token = TEXTS["placeholder"], "<|video_pad|>"
        self.image_id_start_token, self.image_id_end_token = TEXTS["id_start"], TEXTS["id_end"]

    all_special_multimodal_tokens = True  # type: ignore[assignment]

    def expanded(self, text: str, sizes: list[Size]) -> tuple[str, torch.Tensor]:
        """The text and target sizes that ``__call__`` gives for pictures of these sizes."""
        if not sizes:
            return text, torch.zeros((0, 2), dtype=torch.long)
        pictures = [np.zeros((*size, 3), np.uint8) for size in sizes]
        found, texts = self._process_images(pictures, return_tensors="pt", input_data_format="channels_last")
        if self.image_processor.use_image_id:
            texts = self._prepend_local_ids([text], texts, self.image_token)
        return self.get_text_with_replacements([text], texts, [])[0][0], found["target_sizes"]


class Rotations:
    """The model's rules of positions without its weights."""

    _frame_end_idx = staticmethod(MiniCPMV4_7Model._frame_end_idx)
    _group_visual_frames = MiniCPMV4_7Model._group_visual_frames
    get_vision_position_ids = MiniCPMV4_7Model.get_vision_position_ids
    get_rope_index = MiniCPMV4_7Model.get_rope_index

    def __init__(self, downsample_mode: str) -> None:
        marks = {f"{name}_id": token for name, token in TOKENS.items() if name != "image"}
        self.config = SimpleNamespace(downsample_mode=downsample_mode, image_token_id=TOKENS["image"], **marks)


def settings(draw: random.Random) -> tuple[Vision, MiniCPMV4_6ImageProcessorPil]:
    """A record and a processor of the same settings."""
    mode = draw.choice(["16x", "16x", "4x"])
    ids = draw.random() < 0.5
    most = draw.choice([1, 4, 9, 9, 9, 12, 16, 25])
    resolution = draw.choice([112, 112, 112, 224, 448, 448, 470, 100, 28])
    facts = {
        "patch_size": 14,
        "token_patches": 2 if mode == "4x" else 4,
        "scale_resolution": resolution,
        "max_slice_nums": most,
        "tokens": TOKENS,
        "texts": TEXTS if ids else TEXTS | {"id_start": None, "id_end": None},
    }
    return vision_of(facts), processor_of(facts)


def size(draw: random.Random, most: int) -> Size:
    """A picture's size: anything, a square, a simple ratio, a strip, halves of a token's side."""
    side = max(1, int(most ** draw.random()))
    kind = draw.randrange(6)
    if kind == 0:
        return side, side
    if kind == 1:
        up, down = draw.randint(1, 9), draw.randint(1, 9)
        return side * up, side * down
    if kind == 2:
        strip = side, max(1, side // draw.randint(2, 1000))
        return strip if draw.random() < 0.5 else strip[::-1]
    if kind == 3:
        return 28 * draw.randint(1, most // 28 + 1), 28 * draw.randint(1, most // 28 + 1)
    return draw.randint(1, most), draw.randint(1, most)


def reference_cut(height: int, width: int, processor: MiniCPMV4_6ImageProcessorPil) -> list[View]:
    """What the processor does with a picture of this size, as ``_preprocess`` calls its functions."""
    common = (processor.scale_resolution, processor.patch_size, processor.downsample_mode)
    grid = processor.get_sliced_grid((height, width), processor.max_slice_nums, processor.scale_resolution)
    grid = grid if processor.slice_mode else None
    found = [View(processor.find_best_resize((height, width), *common, allow_upscale=grid is None), (1, 1))]
    if grid is not None:
        refined = processor.get_refine_size((height, width), grid, *common, allow_upscale=True)
        found.append(View(refined, (grid[0], grid[1])))
    return found


def fuzz_cutting(draw: random.Random, cases: int) -> str:
    """Sizes of all kinds under all settings, those that `views` refuses among them."""
    refused = sliced = 0
    for _ in range(cases):
        vision, processor = settings(draw)
        for _ in range(100):
            height, width = size(draw, draw.choice([200, 2000, 20000]))
            found, expected = cut(height, width, vision), reference_cut(height, width, processor)
            check(found == expected, f"{height} x {width} under {vision}: {found}, expected {expected}")
            sliced += len(found) > 1
            try:
                check(views(height, width, vision) == found, "views differ from cut")
            except InputError:
                refused += 1
                tokens_a_side = vision.scale_resolution / (vision.token_patches * vision.patch_size)
                ratio = max(height, width) / min(height, width)
                check(ratio > 3 * tokens_a_side**2, f"{height} x {width} refused under {vision}")
    return f"{cases * 100} sizes, {sliced} sliced, {refused} beyond the bound of narrow pictures"


def fuzz_prompts(draw: random.Random, cases: int) -> str:
    """Prompts of up to four pictures, with marks, newlines, text or nothing between."""
    pictures = tokens = 0
    for _ in range(cases):
        vision, processor = settings(draw)
        sizes = []
        while len(sizes) < draw.randint(0, 4):
            candidate = size(draw, vision.scale_resolution * 4)
            if max(candidate) < 3000:
                sizes.append(candidate)
        text = "".join(draw.choice(BETWEEN) + TEXTS["placeholder"] for _ in sizes)
        text += "".join(draw.choice(BETWEEN) for _ in range(draw.randint(0, 2)))
        found = [cut(*each, vision) for each in sizes]
        expanded = expand(text, found, vision)
        expected, target_sizes = Processor(processor).expanded(text, sizes)
        check(expanded == expected, f"{text!r} with {sizes} under {vision}: {expanded!r}, expected {expected!r}")
        flat = [view.crop_patches(vision) for views_of in found for view in views_of for _ in range(view.num_crops)]
        check(flat == [tuple(each) for each in target_sizes.tolist()], f"target sizes {flat}, expected {target_sizes}")
        ids = tokenized(expanded)
        compare_positions(ids, found, vision, processor.downsample_mode, target_sizes)
        pictures, tokens = pictures + len(sizes), tokens + len(ids)
    return f"{cases} prompts, {pictures} pictures, {tokens} tokens"


def compare_positions(
    ids: list[int], pictures: list[list[View]], vision: Vision, mode: str, target_sizes: torch.Tensor
) -> None:
    """`positions` and the next position against ``get_rope_index``."""
    if not ids:
        return
    mine = positions(ids, pictures, vision)
    types = torch.tensor([[int(token == TOKENS["image"]) for token in ids]])
    theirs, delta = Rotations(mode).get_rope_index(torch.tensor([ids]), types, target_sizes)
    expected: Any = theirs[:, 0].numpy()
    at = np.flatnonzero((mine != expected).any(0))
    if len(at):
        first = at[0]
        check(False, f"{ids} with {pictures}: token {first} at {mine[:, first]}, expected {expected[:, first]}")
    following = int(mine.max()) + 1
    check(following == len(ids) + int(delta), f"{ids}: next is {following}, expected {len(ids) + int(delta)}")


def fuzz_stored(_: random.Random, __: int) -> str:
    """The file's views against the processor's, its positions against the model's."""
    golden = json.loads(DEFAULT_FILE.read_text(encoding="utf-8"))
    checked = 0
    for case in golden["cutting"]:
        facts = golden["facts"][case["facts"]]
        processor = processor_of(facts)
        for (height, width), found in zip(case["sizes"], case["views"], strict=True):
            if found is not None:
                check(found == shown(reference_cut(height, width, processor)), f"{height} x {width} under {facts}")
                checked += 1
    for case in golden["positions"]:
        facts = golden["facts"][case["facts"]]
        vision, processor = vision_of(facts), processor_of(facts)
        if "positions" in case:
            pictures = [reference_cut(*size, processor) for size in case["pictures"]]
            crops = [view.crop_patches(vision) for each in pictures for view in each for _ in range(view.num_crops)]
            sizes = torch.tensor(crops or [(0, 0)])[: len(crops)]
            compare_positions(case["token_ids"], pictures, vision, processor.downsample_mode, sizes)
            found = positions(case["token_ids"], pictures, vision)
            check(found.tolist() == case["positions"], f"{case} is not what the rule gives")
            checked += 1
    return f"{checked} vectors"


def processor_of(facts: dict[str, Any]) -> MiniCPMV4_6ImageProcessorPil:
    """The processor of a record's settings."""
    most = facts["max_slice_nums"]
    return MiniCPMV4_6ImageProcessorPil(
        scale_resolution=facts["scale_resolution"],
        patch_size=facts["patch_size"],
        max_slice_nums=9 if most == 1 else most,
        slice_mode=most > 1,
        downsample_mode="4x" if facts["token_patches"] == 2 else "16x",
        use_image_id=facts["texts"]["id_start"] is not None,
    )


def fuzz_spreads(_: random.Random, cases: int) -> str:
    """All pairs of lengths (``cases`` 0: none)."""
    pairs = 0
    for count in range(1, 141 if cases else 1):
        for length in range(1, 1301):
            expected = torch.linspace(0, length - 1, count).round().long().tolist()
            check(
                _spread(count, length) == expected, f"{count} over {length}: {_spread(count, length)}, not {expected}"
            )
            pairs += 1
    return f"{pairs} pairs"


def check(true: bool, otherwise: str) -> None:
    """Ends the program where it is not true."""
    if not true:
        raise SystemExit(f"different: {otherwise}")


def main() -> None:
    """All comparisons, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for fuzz in (fuzz_stored, fuzz_cutting, fuzz_spreads, fuzz_prompts):
        print(fuzz.__name__, fuzz(random.Random(options.seed), options.cases), flush=True)


if __name__ == "__main__":
    main()
