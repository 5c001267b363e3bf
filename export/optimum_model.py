"""A checkpoint as one whole ONNX model, made by optimum: a reference that shares no code with this exporter.

Needs the ``optimum`` extra (torch and transformers 4), which nothing else does. It knows no bundle.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lesonnx import ort
from lesonnx.errors import InputError, LesonnxError
from lesonnx_export.checkpoint import INDEX_NAME, Checkpoint
from lesonnx_export.compare import Logits
from lesonnx_export.optimum_export import INSTALL
from lesonnx_export.transformers4 import to_transformers4

# optimum traces the model once; what it traced must give torch's own logits, or it is no reference.
TRACE_TOLERANCE = 1e-3


class OptimumModel:
    """A whole model as ONNX, run without a cache: each call computes all its tokens anew.

    Owns a temporary directory with the model; close it. Not thread-safe.
    """

    def __init__(self, checkpoint_directory: Path, sample_ids: Sequence[int]) -> None:
        """Export a checkpoint, and compare the result with torch on some token ids.

        InputError where the extra is missing or optimum does not know the family; LesonnxError where it exported a
        model that does not compute what torch does.
        """
        checkpoint = Checkpoint(checkpoint_directory)
        config = to_transformers4(checkpoint.config)
        if config.get("quantization_config") is not None:
            raise InputError(
                f"{checkpoint_directory}: is quantized, which optimum does not export; use a .npz reference"
            )
        require_optimum()
        self.name = str(checkpoint_directory)
        self._workspace = Path(tempfile.mkdtemp(prefix="lesonnx-reference-"))
        try:
            copy_checkpoint(checkpoint, config, self._workspace / "checkpoint")
            expected = _export(self._workspace, self.name, sample_ids)
            model_path = self._workspace / "onnx" / "model.onnx"
            self._session = ort.open_session(model_path, ort.session_options(optimise=True))
            self._inputs = {value.name for value in self._session.get_inputs()}
            found = self.logits(sample_ids)
            check_trace(self.name, expected, found)
        except BaseException:
            self.close()
            raise
        self.vocab_size = int(found.shape[1])
        self.max_tokens = int((config.get("text_config") or config).get("max_position_embeddings", len(sample_ids)))

    def logits(self, token_ids: Sequence[int]) -> Logits:
        ids = np.asarray([token_ids], np.int64)
        feeds = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(ids.shape[1], dtype=np.int64)[None],
        }
        found: Logits = self._session.run(["logits"], {name: feeds[name] for name in self._inputs})[0][0]
        return found

    def greedy(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        ids = list(prompt_ids)
        for _ in range(num_tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt_ids) :]

    def close(self) -> None:
        """Free the session and remove the temporary directory."""
        self._session = None
        shutil.rmtree(self._workspace, ignore_errors=True)


def require_optimum() -> None:
    """InputError that says how to install the extra, where it is missing."""
    for name in ("torch", "transformers", "optimum", "optimum.exporters.onnx"):
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise InputError(f"a checkpoint as the reference needs {name}: {INSTALL}")


def copy_checkpoint(checkpoint: Checkpoint, config: dict[str, Any], target: Path) -> None:
    """A directory with that config and links to the checkpoint's tensors: no code of it, nothing pickled."""
    target.mkdir(parents=True)
    names = {info.file.name for info in checkpoint.tensors.values()}
    names |= {name for name in (INDEX_NAME, "generation_config.json") if (checkpoint.directory / name).exists()}
    for name in names:
        (target / name).symlink_to((checkpoint.directory / name).resolve())
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")


def check_trace(name: str, expected: Logits, found: Logits) -> None:
    """LesonnxError where the ONNX model does not give torch's logits."""
    difference = float(np.abs(found - expected).max()) if found.shape == expected.shape else float("nan")
    if not difference <= TRACE_TOLERANCE:
        raise LesonnxError(f"{name}: optimum's ONNX model is no reference, it differs from torch by {difference:.3g}")


def _export(workspace: Path, name: str, sample_ids: Sequence[int]) -> Logits:
    """Have ``onnx/model.onnx`` written in a process of its own; gives torch's logits [T,V] of the token ids."""
    np.save(workspace / "sample_ids.npy", np.asarray(sample_ids, np.int64), allow_pickle=False)
    command = [sys.executable, "-m", "lesonnx_export.optimum_export", str(workspace), name]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    error_path = workspace / "error.json"
    if error_path.exists():
        document = json.loads(error_path.read_text(encoding="utf-8"))
        raise (InputError if document["exit_code"] == 2 else LesonnxError)(document["message"])
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise LesonnxError(f"{name}: the process that runs optimum ended early: {last[:300]}")
    expected: Logits = np.load(workspace / "torch_logits.npy", allow_pickle=False)
    return expected
