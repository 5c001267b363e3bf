"""Runs a bundle's twins on Qualcomm's provider, which emulates its accelerator on x86-64, and compares with the parts.

    pip install onnxruntime-qnn
    python tools/check_qnn.py BUNDLE --prompt-tokens 70 --tokens 12

Every twin must be taken whole: the CPU provider may run no node of it. It shows arithmetic and that the provider takes
the graphs; an emulator says nothing of speed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import onnxruntime_qnn
from numpy.typing import NDArray

import lesonnx
from lesonnx import ort
from lesonnx.bundle import Bundle
from lesonnx.manifest import Provider
from lesonnx.manifest import Twins as Record
from lesonnx.states import LayerStates
from lesonnx.twins import Twins

QNN = onnxruntime_qnn.get_ep_name()
# A Snapdragon 8 Gen 3 and its accelerator's architecture.
DEVICE = {"soc_model": "57", "htp_arch": "75"}


class QnnTwins(Twins):
    """Twins on the emulated accelerator, with weights handed over from memory."""

    def _providers(self, record: Record, mode: str) -> Sequence[Provider]:
        options = {"backend_path": onnxruntime_qnn.get_qnn_htp_path(), **DEVICE}
        return [Provider(name=QNN, options=options)]

    def _session(self, path: str, provider: Provider, num_threads: int | None) -> onnxruntime.InferenceSession:
        if provider.name != QNN:
            return super()._session(path, provider, num_threads)
        devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == QNN]
        options = self.session_options(num_threads, falls_back=False)
        options.add_provider_for_devices(devices[:1], dict(provider.options))
        return ort.open_session(self._bundle.file(path), options, None)


def generate(bundle: Bundle, ids: list[int], num_tokens: int, on_qnn: bool) -> tuple[list[int], NDArray[np.float32]]:
    """Greedy tokens, and the logits that they were taken from."""
    with lesonnx.load(bundle, accelerate="off") as model:
        runner = model.runner
        if on_qnn:
            runner.twins = QnnTwins(bundle)
            for note in runner.twins.notes:
                raise SystemExit(note)
            runner.states = LayerStates(bundle.manifest, runner.twins.capacity_tokens)
        logits, tokens = [runner.prefill(ids)], []
        for _ in range(num_tokens):
            tokens.append(int(logits[-1].argmax()))
            logits.append(runner.step([tokens[-1]], [0])[0])
    return tokens, np.stack(logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=70)
    parser.add_argument("--tokens", type=int, default=12)
    arguments = parser.parse_args()
    onnxruntime.register_execution_provider_library(QNN, onnxruntime_qnn.get_library_path())
    bundle = Bundle(arguments.bundle)
    vocab_size = bundle.manifest.model.vocab_size
    ids = [int(token) for token in np.random.default_rng(7).integers(0, vocab_size, arguments.prompt_tokens)]
    plain, by_plain = generate(bundle, ids, arguments.tokens, on_qnn=False)
    twins, by_twins = generate(bundle, ids, arguments.tokens, on_qnn=True)
    same = next((n for n, (a, b) in enumerate(zip(plain, twins, strict=True)) if a != b), len(plain))
    difference = np.abs(by_plain[: same + 1] - by_twins[: same + 1]).max() / np.abs(by_plain).max()
    twin_count = len(bundle.manifest.twins.parts) if bundle.manifest.twins else 0
    print(f"{twin_count} twins taken whole; {same} of {len(plain)} greedy tokens the same; ", end="")
    print(f"the largest difference of a logit is {100 * difference:.2f} % of the largest logit", flush=True)
    # Qualcomm's library does not end with the interpreter in good order.
    os._exit(0)


if __name__ == "__main__":
    main()
