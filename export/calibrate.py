"""What the values of a model's attention caches span, measured by running its bundle on a calibration text.

It knows the runner and the text; what the spans are for, `kv_cache` says.
"""

from __future__ import annotations

import random
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

from lesonnx.bundle import Bundle
from lesonnx.model import LoadOptions, load
from lesonnx.tokenizer import Tokenizer

# Each window begins with an empty context, as a prompt does.
WINDOW_TOKENS = 512
CALIBRATION_TOKENS = 8 * WINDOW_TOKENS
Spans = dict[str, NDArray[np.float32]]


def calibration_ids(bundle: Bundle) -> list[int]:
    """Tokens to calibrate on: Python's own help topics, there in every installation; without a tokenizer random ids."""
    files = bundle.manifest.tokenizer
    if files is None or files.json_path is None:
        return random_ids(bundle.manifest.model.vocab_size)
    tokenizer = Tokenizer.from_file(bundle.file(files.json_path))
    # Topic by topic until there are enough: one long text of them all is a tokenizer's worst case.
    ids: list[int] = []
    for name in sorted(topics):
        ids += tokenizer.encode(topics[name], add_special_tokens=not ids)
        if len(ids) >= CALIBRATION_TOKENS:
            break
    return ids[:CALIBRATION_TOKENS]


def random_ids(vocab_size: int) -> list[int]:
    """Tokens for models that bring no tokenizer: always the same."""
    rng = random.Random(0)
    return [rng.randrange(vocab_size) for _ in range(CALIBRATION_TOKENS)]


def cache_spans(directory: Path) -> Spans:
    """The largest absolute value of each channel [kv heads, head size] of every attention cache, by the state's name.

    Runs the bundle with one layer's experts in memory, or what one token needs if that is more. Takes a prefill of
    ``CALIBRATION_TOKENS``.
    """
    bundle = Bundle(directory)
    layer_bytes = bundle.expert_bytes // len(bundle.manifest.expert_layers)
    options = LoadOptions(expert_budget_bytes=max(layer_bytes, bundle.least_budget_bytes))
    ids = calibration_ids(bundle)
    window = min(WINDOW_TOKENS, bundle.manifest.model.max_position_embeddings)
    caches = [state for state in bundle.manifest.states if state.is_attention]
    spans: Spans = {}
    with load(bundle, options) as model:
        runner = model.runner
        for start in range(0, len(ids), window):
            runner.rewind(0)
            runner.prefill(ids[start : start + window])
            for state in caches:
                held = runner.states.arrays[state.name][0, :, : runner.num_tokens]
                span = np.abs(held).max(axis=1).astype(np.float32)
                spans[state.name] = np.maximum(spans.get(state.name, span), span)
    return spans
