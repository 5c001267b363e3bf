"""Write ``tests/data/vision.json``: the vectors that the Python, Kotlin and Swift rules for pictures must reproduce.

Usage: ``python tools/make_vision_vectors.py [FILE]``. The same file every time: all randomness is PCG32's.
tools/fuzz_vision.py compares the rules themselves with transformers. Everything is in docs/bundle.md's words.

``facts``: what a manifest's ``vision`` says of cutting, tokens and texts, by a name that cases refer to; the manifest's
fields that are not here play no part. A size is [height, width], a view [height, width, rows, columns]: the size that
the whole picture is resized to and the grid that it is cut in. ``refused`` true: the host must refuse this input.

``cutting``: by ``facts``, ``sizes`` of pictures and the ``views`` of each, one or two, null where refused.
``expanding``: a ``text`` and the sizes of its ``pictures`` give ``expanded``, or are refused.
``positions``: ``token_ids`` [L] and the sizes of the ``pictures`` give ``positions``, three rows [L]: time, height and
width; and ``next``, the position in all three of a token that follows; or are refused.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from lesonnx.errors import InputError
from lesonnx.manifest import Vision, VisionTexts, VisionTokens
from lesonnx.sampling import Pcg32
from lesonnx.vision.canvas import positions
from lesonnx.vision.cutting import Size, View, views
from lesonnx.vision.placeholders import expand

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_FILE = ROOT / "tests" / "data" / "vision.json"
STREAM = 11
TOKENS = {"image": 373, "image_start": 375, "image_end": 376, "slice_start": 377, "slice_end": 378, "newline": 198}
TEXTS = {
    "placeholder": "<|image_pad|>",
    "image_start": "<image>",
    "image_end": "</image>",
    "slice_start": "<slice>",
    "slice_end": "</slice>",
    "row_end": "\n",
    "id_start": "<image_id>",
    "id_end": "</image_id>",
    "separator": "\n",
}
# The tokenizer of these vectors: ids of what is no character; an id's marks, and digits, are text.
ID_START, ID_END = 379, 380


def _facts(token_patches: int, scale_resolution: int, max_slice_nums: int, **texts: str | None) -> dict[str, Any]:
    return {
        "patch_size": 14,
        "token_patches": token_patches,
        "scale_resolution": scale_resolution,
        "max_slice_nums": max_slice_nums,
        "tokens": TOKENS,
        "texts": TEXTS | texts,
    }


FACTS = {
    "usual": _facts(4, 448, 9),
    "tiny": _facts(4, 112, 9),
    "tiny, no ids": _facts(4, 112, 9, id_start=None, id_end=None),
    "tiny, unsliced": _facts(4, 112, 1),
    "tiny, 4x": _facts(2, 112, 9),
    "other texts": _facts(
        4, 112, 4, placeholder="(img)", image_start="[", image_end="]", row_end=" / ", slice_start=""
    ),
    "4x": _facts(2, 448, 9),
    "many slices": _facts(4, 448, 25),
    "no multiple": _facts(4, 470, 7),
    "seven slices": _facts(4, 448, 7),
    "five slices": _facts(4, 448, 5),
    "smaller than a token": _facts(4, 28, 3),
}


def vision_of(facts: dict[str, Any]) -> Vision:
    """What the rules read of a manifest's record, without its parts."""
    fields = facts | {"tokens": VisionTokens(**facts["tokens"]), "texts": VisionTexts(**facts["texts"])}
    return cast(Vision, SimpleNamespace(**fields))


def shown(found: Sequence[View]) -> list[list[int]]:
    """Views as the file has them."""
    return [[*view.size, *view.grid] for view in found]


# -- cutting -----------------------------------------------------------------------------------------------------------

ODD_SIZES: list[Size] = [
    (1, 1),
    (1, 2),
    (2, 1),
    (1, 3000),
    (3000, 1),
    (1, 100),
    (56, 56),
    (55, 57),
    (448, 448),
    (449, 448),
]
ODD_SIZES += [
    (447, 449),
    (448, 449),
    (1080, 1920),
    (1920, 1080),
    (3000, 4000),
    (4000, 3000),
    (10000, 10000),
    (12, 4000),
]
ODD_SIZES += [(100, 10000), (10000, 100), (1, 200704), (1, 200705), (2, 100353), (20, 5200), (20, 5100), (112, 112)]
# Grids that are equally near to the picture, squares among them: logarithms decide, sometimes by their last bit.
TIED_RATIOS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (3, 4), (2, 9), (4, 9), (1, 5)]
TIED_AREAS = [*range(2, 11), 12, 15, 16, 18, 20, 24]


def ties(scale_resolution: int) -> list[Size]:
    """Sizes of simple ratios, just within that many slices."""
    found = []
    for up, down in TIED_RATIOS:
        for slices in TIED_AREAS:
            side = math.isqrt(slices * scale_resolution**2 // (up * down))
            found += [(up * side, down * side), (down * side, up * side)][: 1 if up == down else 2]
    return found


# Halves, rounded to even: of a token's side without resizing, and of a cell.
HALVES: list[Size] = [(28, 56), (84, 84), (140, 196), (196, 140), (252, 420), (1001, 1003), (1005, 1007), (905, 1357)]


def cutting_cases() -> Iterator[dict[str, Any]]:
    for name, facts in FACTS.items():
        if name in ("tiny, no ids", "other texts"):
            continue
        random = Pcg32(11, STREAM)
        sizes = ODD_SIZES + HALVES + ties(facts["scale_resolution"])
        for most in (160, 700, 2000, 6000):
            sizes = sizes + [(1 + random.next_u32() % most, 1 + random.next_u32() % most) for _ in range(12)]
        vision = vision_of(facts)
        found: list[list[list[int]] | None] = []
        for size in sizes:
            try:
                found.append(shown(views(*size, vision)))
            except InputError:
                found.append(None)
        yield {"facts": name, "sizes": sizes, "views": found}


# -- expanding ---------------------------------------------------------------------------------------------------------

SMALL, TINY, SQUARE, WIDE, TALL, FOUR = (100, 90), (1, 1), (300, 300), (150, 400), (330, 100), (200, 200)


def expanding_cases() -> Iterator[dict[str, Any]]:
    pad = TEXTS["placeholder"]
    plans: list[tuple[str, str, list[Size]]] = [
        ("tiny", "no picture", []),
        ("tiny", "", []),
        ("tiny", pad, [SMALL]),
        ("tiny", f"{pad}\nWhat is this?", [WIDE]),
        ("tiny", f"a {pad}b{pad}{pad}\n", [TALL, TINY, SQUARE]),
        ("tiny", f"Übung 🙂 {pad} ende", [SMALL]),
        ("tiny", f"<|image_pad{pad}|> <image>{pad}", [TINY, TINY]),
        ("tiny", "".join([f"{pad}\n"] * 11) + "which?", [TINY] * 11),
        ("tiny, no ids", f"{pad}{pad}", [WIDE, SMALL]),
        ("tiny, unsliced", f"{pad} and {pad}", [WIDE, TALL]),
        ("tiny, 4x", f"{pad}!", [SQUARE]),
        ("usual", f"{pad}\nRead it.", [(1080, 1920)]),
        ("other texts", f"{pad} (img) and(img)", [SQUARE, WIDE]),
        ("tiny", "none", [SMALL]),
        ("tiny", pad, []),
        ("tiny", f"{pad}{pad}", [SMALL]),
        ("tiny", pad, [SMALL, SMALL]),
    ]
    for name, text, sizes in plans:
        vision = vision_of(FACTS[name])
        case: dict[str, Any] = {"facts": name, "text": text, "pictures": sizes}
        try:
            case["expanded"] = expand(text, [views(*size, vision) for size in sizes], vision)
        except InputError:
            case["refused"] = True
        yield case


# -- positions ---------------------------------------------------------------------------------------------------------


def tokenized(text: str) -> list[int]:
    """Ids of a text whose letters are plain: a mark is its id, any other character is its code."""
    names = {TEXTS["placeholder"]: TOKENS["image"], TEXTS["id_start"]: ID_START, TEXTS["id_end"]: ID_END, "\n": 198}
    names |= {TEXTS[name]: TOKENS[name] for name in ("image_start", "image_end", "slice_start", "slice_end")}
    ids = []
    while text:
        name = next((name for name in names if text.startswith(name)), text[0])
        ids.append(names[name] if name in names else ord(name))
        text = text[len(name) :]
    return ids


def position_plans() -> Iterator[tuple[str, str, list[Size]]]:
    pad = TEXTS["placeholder"]
    for name in ("tiny", "tiny, no ids"):
        yield name, "", []
        yield name, "abc\n\nd", []
        yield name, pad, [SMALL]
        yield name, pad, [WIDE]
        yield name, f"a{pad}", [TALL]
        yield name, f"a{pad}b", [SQUARE]
        yield name, f"ab\n{pad}\ncd", [WIDE]
        yield name, f"{pad}\n\n\nab", [TALL]
        yield name, f"{pad}{pad}", [SMALL, TINY]
        yield name, f"{pad}{pad}{pad}ab", [WIDE, TALL, SMALL]
        yield name, f"a{pad}\n{pad}\nb", [WIDE, SQUARE]
        yield name, f"{pad}\n\n{pad}\n\n{pad}", [SMALL, WIDE, SMALL]
        yield name, f"a{pad}bcd{pad}\nefg", [TALL, SMALL]
        yield name, f"{pad}</slice>\n<slice>a</image>\n{pad}<image>", [TALL, SMALL]
        yield name, f"<image>{pad}<image>\n<slice>{pad}a\n", [SMALL, WIDE]
    yield "tiny, unsliced", f"a{pad}\nb{pad}c", [WIDE, TALL]
    yield "tiny, 4x", f"{pad}\n{pad}a", [SQUARE, WIDE]
    yield "usual", f"a{pad}\nb", [(1080, 1920)]
    # Overviews whose tokens are spread in float32: exact halves would round to other places.
    yield "usual", f"a{pad}b", [(238, 2029)]
    yield "usual", f"a{pad}b", [(3871, 161)]
    random = Pcg32(12, STREAM)
    for _ in range(12):
        sizes = [(40 + random.next_u32() % 360, 40 + random.next_u32() % 360) for _ in range(1 + random.next_u32() % 3)]
        between = ["", "\n", "x", "\n\nxy", "xyz\n"]
        text = "".join(between[random.next_u32() % len(between)] + pad for _ in sizes) + "z"
        yield ("tiny", "tiny, no ids", "tiny, 4x")[random.next_u32() % 3], text, sizes


def position_cases() -> Iterator[dict[str, Any]]:
    for name, text, sizes in position_plans():
        vision = vision_of(FACTS[name])
        pictures = [views(*size, vision) for size in sizes]
        ids = tokenized(expand(text, pictures, vision))
        found = positions(ids, pictures, vision)
        following = int(found.max(initial=-1)) + 1
        yield {"facts": name, "token_ids": ids, "pictures": sizes, "positions": found.tolist(), "next": following}
    vision = vision_of(FACTS["tiny"])
    four = tokenized(expand(f"a{TEXTS['placeholder']}b", [views(*FOUR, vision)], vision))
    image = TOKENS["image"]
    bad: list[tuple[list[int], list[Size]]] = [
        ([1, 2, 3], [SMALL]),  # no image tokens
        (four, []),  # image tokens without a picture
        (four, [SMALL]),  # another picture's
        (four, [FOUR, FOUR]),  # too few
        ([*four, image], [FOUR]),  # one more, later
        (four[:-2], [FOUR]),  # the last mark is missing
        (four[: len(four) // 2], [FOUR]),
        ([image, *four], [FOUR]),
        ([image] * 4, [SMALL]),  # no marks
        ([4 if token == TOKENS["newline"] else token for token in four], [FOUR]),  # rows not parted
    ]
    for ids, sizes in bad:
        try:
            positions(ids, [views(*size, vision) for size in sizes], vision)
        except InputError:
            yield {"facts": "tiny", "token_ids": ids, "pictures": sizes, "refused": True}
        else:
            raise AssertionError(f"taken: {ids} with {sizes}")


def main(path: Path) -> None:
    """Write the vectors, a case a line."""
    sections = {
        "cutting": list(cutting_cases()),
        "expanding": list(expanding_cases()),
        "positions": list(position_cases()),
    }
    facts = ",\n".join(f"{json.dumps(name)}:{_line(value)}" for name, value in FACTS.items())
    lines = ['"format": 1', f'"facts": {{\n{facts}\n}}']
    for name, cases in sections.items():
        lines.append(f"{json.dumps(name)}: [\n" + ",\n".join(_line(case) for case in cases) + "\n]")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FILE)
