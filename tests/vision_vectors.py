"""What the tests of pictures' rules share: the golden vectors' file, its records, and the fixture's own."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

from lesonnx.manifest import Vision
from lesonnx.vision.cutting import View, views

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "data" / "vision.json"
GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))
FIXTURE = ROOT / "tests" / "data" / "checkpoints" / "minicpmv4_7_moe"
TOOL = runpy.run_path(str(ROOT / "tools" / "make_vision_vectors.py"))


def vision_of(name: str) -> Vision:
    """The record of these facts, as far as the rules read it."""
    found: Vision = TOOL["vision_of"](GOLDEN["facts"][name])
    return found


def pictures_of(case: dict[str, Any]) -> list[list[View]]:
    """Views of a case's pictures."""
    return [views(*size, vision_of(case["facts"])) for size in case["pictures"]]
