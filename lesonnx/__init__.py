"""lesonnx: run Mixture-of-Experts language models larger than memory on ONNX Runtime.

>>> import lesonnx
>>> with lesonnx.load("bundle", expert_budget_bytes=2_000_000) as model:
...     for token in model.generate("In the beginning God"):
...         print(token.text, end="")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lesonnx.generate import GenerationOptions as GenerationOptions
    from lesonnx.generate import GenerationReport as GenerationReport
    from lesonnx.generate import Token as Token
    from lesonnx.model import Generation as Generation
    from lesonnx.model import LoadOptions as LoadOptions
    from lesonnx.model import Model as Model
    from lesonnx.model import load as load
    from lesonnx.sampling import SamplingOptions as SamplingOptions

# Public name -> its module. Imported on first use, so that `lesonnx --help` does not wait for ONNX Runtime.
_PUBLIC = {
    "Generation": "model",
    "GenerationOptions": "generate",
    "GenerationReport": "generate",
    "LoadOptions": "model",
    "Model": "model",
    "SamplingOptions": "sampling",
    "Token": "generate",
    "load": "model",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lesonnx' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lesonnx.{_PUBLIC[name]}"), name)
