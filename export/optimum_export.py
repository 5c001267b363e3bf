"""The process in which optimum works: ``python -m lesonnx_export.optimum_export WORKSPACE NAME``.

Its own process, because optimum opens ONNX Runtime sessions that cannot live beside this package's common thread pool,
and because torch's memory goes with it. The workspace holds ``checkpoint/`` and ``sample_ids.npy``; this writes
``onnx/model.onnx`` and ``torch_logits.npy``, or ``error.json``. It knows nothing else of this package.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lesonnx.errors import InputError, LesonnxError

TASK = "text-generation"
INSTALL = "pip install 'lesonnx[export,optimum]', in an environment of its own (it brings torch, 5 GB)"


def export_whole_model(workspace: Path, name: str) -> None:
    """Write the model and torch's own logits [T,V] of the sample ids.

    InputError where optimum or transformers 4 do not know the checkpoint, LesonnxError where they fail.
    """
    # Nothing here is on a hub: no library may go and look.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import optimum.exporters.onnx.model_configs  # noqa: F401  (registers the families it knows)
        import torch
        from optimum.exporters.onnx import onnx_export_from_model
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise InputError(f"the optimum extra does not work here ({_line(error)}): {INSTALL}") from None
    copy = workspace / "checkpoint"
    model_type = json.loads((copy / "config.json").read_text(encoding="utf-8")).get("model_type")
    if model_type not in known_families():
        raise InputError(f"{name}: optimum does not know the family {model_type!r}; use a .npz reference")
    sample_ids = np.load(workspace / "sample_ids.npy", allow_pickle=False)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            copy, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        # transformers fills what it does not find with random numbers, and says so only in its log.
        if missing := sorted(info["missing_keys"]):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise InputError(f"{name}: transformers 4 finds no tensor {missing[0]!r}{more}; use a .npz reference")
        model.eval()
        model.config.use_cache = False
        with torch.no_grad():
            expected = model(input_ids=torch.from_numpy(sample_ids)[None]).logits[0].numpy()
        np.save(workspace / "torch_logits.npy", expected, allow_pickle=False)
        onnx_export_from_model(model, workspace / "onnx", task=TASK, no_post_process=True, do_validation=False)
    except LesonnxError:
        raise
    except Exception as error:  # noqa: BLE001  (torch, transformers and optimum raise many unrelated types)
        raise LesonnxError(f"{name}: optimum cannot export it: {_line(error)}") from None


def known_families() -> set[str]:
    """The ``model_type`` names that optimum exports as language models and transformers 4 knows."""
    import optimum.exporters.onnx.model_configs  # noqa: F401
    from optimum.exporters.tasks import TasksManager
    from transformers import CONFIG_MAPPING

    known = set()
    for model_type in CONFIG_MAPPING:
        try:
            tasks: dict[str, Any] = TasksManager.get_supported_tasks_for_model_type(
                model_type, exporter="onnx", library_name="transformers"
            )
        except KeyError:
            continue
        if TASK in tasks:
            known.add(model_type)
    return known


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def main() -> None:
    """Export; what goes wrong is left in ``error.json`` for the process that asked."""
    workspace, name = Path(sys.argv[1]), sys.argv[2]
    try:
        export_whole_model(workspace, name)
    except LesonnxError as error:
        document = {"message": str(error), "exit_code": error.exit_code}
        (workspace / "error.json").write_text(json.dumps(document), encoding="utf-8")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
