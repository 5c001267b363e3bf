"""Model families: one module per ``model_type``, named exactly as ``config.json`` spells it, found by that name."""

from __future__ import annotations

import importlib
import pkgutil

from lesonnx_export.architectures.base import Decoder
from lesonnx_export.config import Config, check_text_config, unknown_family
from lesonnx_export.prequantized import check_quantization


def supported() -> list[str]:
    """The ``model_type`` names that can be exported."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def make_decoder(config: Config) -> Decoder:
    """The architecture of a checkpoint's configuration; CheckpointError where its family is not supported."""
    names = supported()
    if config.model_type not in names:
        raise unknown_family(config.model_type, names)
    check_text_config(config)
    module = importlib.import_module(f"{__name__}.{config.model_type}")
    check_quantization(config, module.Architecture.quantization_methods)
    decoder: Decoder = module.Architecture(config)
    return decoder
