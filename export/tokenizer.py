from __future__ import annotations

from pathlib import Path

from lesonnx.manifest import TokenizerFiles


def export_tokenizer(checkpoint: Path, target: Path) -> tuple[TokenizerFiles | None, list[str]]:
    return None, []
