"""Prompts with pictures that a reference file recorded, and how far a bundle is from them: eyes, positions, answers.

It knows arrays and a loaded model; how figures are judged, `compare` says.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import InputError
from lesonnx.manifest import AnyVision, Manifest
from lesonnx.model import Model
from lesonnx.prompt import Prompt
from lesonnx.vision.cutting import View
from lesonnx.vision.eyes import Crop, Eyes, cut_packed
from lesonnx.vision.prompts import place
from lesonnx_export.compare import CaseComparison, Logits, LogitsTally, largest_difference
from lesonnx_export.reference import continue_greedily, integers, read_arrays

ARRAYS = (
    "pixel_values",
    "target_sizes",
    "input_ids",
    "position_ids",
    "image_features",
    "logits",
    "greedy_ids",
)
# Beside them, of models that add to image tokens behind their first layers.
DEEPSTACK = "deepstack_features"
_NAME = re.compile(r"(case\d+)_\w+")


@dataclass(frozen=True)
class Case:
    """A prompt with its pictures prepared, and what is right for it: arrays as docs/verify.md has them."""

    name: str
    crops: list[list[Crop]]
    prompt: Prompt
    position_ids: NDArray[np.int64]
    image_features: NDArray[np.float32]
    logits: Logits
    greedy_ids: list[int]


def case_names(path: Path) -> list[str]:
    """The cases that a ``.npz`` file has arrays of, by name."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = {match[1] for name in archive.namelist() if (match := _NAME.match(name))}
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise InputError(f"{path}: not readable: {' '.join(str(error).split())}") from None
    return sorted(found, key=lambda name: (len(name), name))


def read_case(path: Path, name: str, manifest: Manifest, vision: AnyVision) -> Case:
    """One case of a ``.npz`` file; InputError in one line for what does not fit together, or not to the bundle."""
    names = [*ARRAYS, *([DEEPSTACK] if vision.deepstack_layers else [])]
    arrays = read_arrays(path, [f"{name}_{array}" for array in names])
    own = {array: arrays[f"{name}_{array}"] for array in names}
    model = manifest.model

    def fail(array: str, expected: str, found: object) -> InputError:
        return InputError(f"{path}: {name}_{array} is {found}, expected {expected}")

    def shape(array: str) -> str:
        return f"{own[array].dtype} {list(own[array].shape)}"

    ids = integers(path, f"{name}_input_ids", own["input_ids"], 1)
    greedy_ids = integers(path, f"{name}_greedy_ids", own["greedy_ids"], 1)
    for array, values in (("input_ids", ids), ("greedy_ids", greedy_ids)):
        if values.size and not 0 <= values.min() <= values.max() < model.vocab_size:
            worst = int(values.min() if values.min() < 0 else values.max())
            raise InputError(f"{path}: {name}_{array} holds {worst}, expected ids from 0 to {model.vocab_size - 1}")
    if not len(ids) or len(ids) + len(greedy_ids) > model.max_position_embeddings:
        most = model.max_position_embeddings
        raise InputError(f"{path}: {name} has {len(ids)} tokens and {len(greedy_ids)}, expected 1 to {most} together")
    sizes = own["target_sizes"]
    if sizes.ndim != 2 or sizes.shape[1:] != (2,) or sizes.dtype.kind not in "iu":
        raise fail("target_sizes", "integers [crops,2]", shape("target_sizes"))
    if sizes.size and (sizes.min() < 1 or (sizes % vision.token_patches).any() or sizes.max() >= 1 << 16):
        raise fail("target_sizes", f"multiples of {vision.token_patches} patches", sizes.tolist())
    width = int(sizes.astype(np.int64).prod(axis=1).sum()) * vision.patch_size
    num_rows = width // vision.patch_size // vision.token_patches**2
    expected: dict[str, tuple[str, list[int]]] = {
        "pixel_values": ("f", [1, 3, vision.patch_size, width]),
        "position_ids": ("iu", [3, len(ids)]),
        "image_features": ("f", [num_rows, model.hidden_size]),
        "logits": ("f", [len(ids), model.vocab_size]),
    }
    if DEEPSTACK in own:
        expected[DEEPSTACK] = ("f", [vision.deepstack_layers, num_rows, model.hidden_size])
    for array, (kinds, dimensions) in expected.items():
        if own[array].dtype.kind not in kinds or list(own[array].shape) != dimensions:
            raise fail(array, f"{'floats' if kinds == 'f' else 'integers'} {dimensions}", shape(array))
        if kinds == "f" and not np.isfinite(own[array]).all():
            raise InputError(f"{path}: {name}_{array} holds values that are not finite")
    target_sizes = [(int(rows), int(columns)) for rows, columns in sizes]
    try:
        pictures = pictures_of(ids.tolist(), target_sizes, vision)
        prompt = place(ids.tolist(), pictures, [str(number) for number in range(len(pictures))], vision)
    except (ValueError, InputError) as error:
        raise InputError(f"{path}: {name}_input_ids and {name}_target_sizes do not fit: {error}") from None
    crops = cut_packed(own["pixel_values"].astype(np.float32, copy=False), target_sizes, vision.patch_size)
    return Case(
        name,
        [list(islice(crops, sum(view.num_crops for view in picture))) for picture in pictures],
        prompt,
        own["position_ids"].astype(np.int64),
        np.concatenate([own["image_features"], *own.get(DEEPSTACK, ())], axis=1).astype(np.float32, copy=False),
        own["logits"].astype(np.float32, copy=False),
        greedy_ids.tolist(),
    )


def pictures_of(
    token_ids: Sequence[int], target_sizes: Sequence[tuple[int, int]], vision: AnyVision
) -> list[list[View]]:
    """The views of a prompt's pictures, by its marks; ValueError where these are not as many as the crops."""
    patch = vision.patch_size
    if vision.kind == "qwen3_vl":
        return [[View((rows * patch, columns * patch), (1, 1))] for rows, columns in target_sizes]
    tokens = vision.tokens
    pictures: list[list[View]] = []
    left = list(target_sizes)
    # Of the picture at hand: the slices of each row so far, and how they are cut.
    rows: list[int] = []
    for index, token in enumerate(token_ids):
        if token not in (tokens.image_start, tokens.slice_start) or token_ids[index + 1 : index + 2] != [tokens.image]:
            continue
        if not left:
            raise ValueError(f"more than {len(target_sizes)} crops are marked")
        height, width = (count * patch for count in left.pop(0))
        if token == tokens.image_start:
            pictures.append([View((height, width), (1, 1))])
            rows = []
            continue
        if not pictures:
            raise ValueError("a slice comes before any picture")
        if not rows or token_ids[index - 1] == tokens.newline:
            rows.append(0)
        rows[-1] += 1
        view = View((len(rows) * height, rows[0] * width), (len(rows), rows[0]))
        if pictures[-1][1:] and pictures[-1][1].crop_size != view.crop_size:
            raise ValueError("slices of a picture differ in size")
        pictures[-1][1:] = [view]
    if left:
        raise ValueError(f"{len(target_sizes) - len(left)} crops are marked, expected {len(target_sizes)}")
    return pictures


def measure_case(case: Case, model: Model) -> CaseComparison:
    """Read the case's crops, run its prompt with what the eyes gave, and go on greedily; a case may be text alone."""
    features: dict[str, NDArray[np.float32]] = {}
    with Eyes(model.bundle, model.options.num_threads) as eyes:
        for number, crops in enumerate(case.crops):
            features[str(number)] = np.concatenate([eyes.see(crop) for crop in crops])
    runner = model.runner
    runner.rewind(0)
    logits = runner.prefill(case.prompt.with_features(features), all_logits=True)
    tally = LogitsTally()
    tally.add(case.logits, logits)
    found = continue_greedily(runner, logits[-1], len(case.greedy_ids))
    return CaseComparison(
        name=case.name,
        image_tokens=len(case.image_features),
        # Rows of no picture in front: a case may have none.
        features_max_abs_diff=largest_difference(
            case.image_features, np.concatenate([case.image_features[:0], *features.values()])
        ),
        position_ids_match=bool(np.array_equal(runner.history.positions(case.prompt), case.position_ids)),
        **asdict(tally.with_greedy(case.greedy_ids, found)),
    )
