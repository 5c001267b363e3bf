"""A checkpoint as one whole ONNX model, made by optimum: a reference that shares no code with this exporter.

Needs the ``optimum`` extra (torch and transformers 4), which nothing else does. It knows no bundle.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lesonnx import ort
from lesonnx.errors import InputError, LesonnxError
from lesonnx_export.checkpoint import INDEX_NAME, Checkpoint
from lesonnx_export.compare import Logits
from lesonnx_export.transformers4 import to_transformers4

TASK = "text-generation"
# optimum traces the model once; what it traced must give torch's own logits, or it is no reference.
TRACE_TOLERANCE = 1e-3
INSTALL = "pip install 'lesonnx[export,optimum]', in an environment of its own (it brings torch, 5 GB)"


class OptimumModel:
    """A whole model as ONNX, run without a cache: each call computes all its tokens anew.

    Owns a temporary directory with the model; close it. Not thread-safe.
    """

    def __init__(self, checkpoint_directory: Path, sample_ids: Sequence[int]) -> None:
        """Export a checkpoint, and compare the result with torch on some token ids.

        InputError where the extra is missing or optimum does not know the family; LesonnxError where it exported a
        model that does not compute what torch does.
        """
        require_optimum()
        checkpoint = Checkpoint(checkpoint_directory)
        config = to_transformers4(checkpoint.config)
        if config.get("quantization_config") is not None:
            raise InputError(
                f"{checkpoint_directory}: is quantized, which optimum does not export; use a .npz reference"
            )
        self.name = str(checkpoint_directory)
        self._directory = Path(tempfile.mkdtemp(prefix="lesonnx-reference-"))
        try:
            copy = copy_checkpoint(checkpoint, config, self._directory / "checkpoint")
            with _quiet():
                expected = _export(checkpoint_directory, copy, self._directory / "onnx", sample_ids)
            model_path = self._directory / "onnx" / "model.onnx"
            self._session = ort.open_session(model_path, ort.session_options(optimise=True))
            self._inputs = {value.name for value in self._session.get_inputs()}
            found = self.logits(sample_ids)
        except BaseException:
            self.close()
            raise
        self.vocab_size = int(found.shape[1])
        self.max_tokens = int((config.get("text_config") or config).get("max_position_embeddings", len(sample_ids)))
        difference = float(np.abs(found - expected).max())
        if not difference <= TRACE_TOLERANCE:
            self.close()
            raise LesonnxError(
                f"{checkpoint_directory}: optimum's ONNX model is no reference, it differs from torch by {difference:.3g}"
            )

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
        shutil.rmtree(self._directory, ignore_errors=True)


def require_optimum() -> None:
    """InputError that says how to install the extra, where it is missing."""
    for name in ("torch", "transformers", "optimum", "optimum.exporters.onnx"):
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise InputError(f"a checkpoint as the reference needs {name}: {INSTALL}")


def copy_checkpoint(checkpoint: Checkpoint, config: dict[str, Any], target: Path) -> Path:
    """A directory with that config and links to the checkpoint's tensors: no code of it, nothing pickled."""
    target.mkdir(parents=True)
    names = {info.file.name for info in checkpoint.tensors.values()}
    names |= {name for name in (INDEX_NAME, "generation_config.json") if (checkpoint.directory / name).exists()}
    for name in names:
        (target / name).symlink_to((checkpoint.directory / name).resolve())
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


def _export(checkpoint: Path, copy: Path, target: Path, sample_ids: Sequence[int]) -> Logits:
    """Write ``model.onnx`` into a new directory; gives torch's logits [T,V] of the token ids."""
    # Nothing here is on a hub: no library may go and look.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import optimum.exporters.onnx.model_configs  # noqa: F401  (registers the families it knows)
        import torch
        from optimum.exporters.onnx import onnx_export_from_model
        from optimum.exporters.tasks import TasksManager
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise InputError(f"the optimum extra does not work here ({ort.first_line(error)}): {INSTALL}") from None
    try:
        config = AutoConfig.from_pretrained(copy, local_files_only=True)
        tasks = TasksManager.get_supported_tasks_for_model_type(
            config.model_type, exporter="onnx", library_name="transformers"
        )
    except (KeyError, ValueError):
        tasks = {}
    if TASK not in tasks:
        model_type = json.loads((copy / "config.json").read_text(encoding="utf-8")).get("model_type")
        raise InputError(f"{checkpoint}: optimum does not know the family {model_type!r}; use a .npz reference")
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            copy, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        # transformers fills what it does not find with random numbers.
        if missing := sorted(info["missing_keys"]):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise InputError(f"{checkpoint}: transformers 4 finds no tensor {missing[0]!r}{more}; use a .npz reference")
        model.eval()
        model.config.use_cache = False
        with torch.no_grad():
            expected: Logits = model(input_ids=torch.tensor([list(sample_ids)])).logits[0].numpy()
        onnx_export_from_model(model, target, task=TASK, no_post_process=True, do_validation=False)
    except LesonnxError:
        raise
    except Exception as error:  # noqa: BLE001  (torch, transformers and optimum raise many unrelated types)
        raise LesonnxError(f"{checkpoint}: optimum cannot export it: {ort.first_line(error)}") from None
    return expected


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch, transformers and optimum have to say out of the output; stdout belongs to the result."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
