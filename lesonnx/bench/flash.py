"""How fast this machine reads experts: the flash half of every roofline.

It reads whole experts, chosen at random, past the page cache, with as many reads under way as a run has loaders.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from lesonnx.bundle import Bundle, Expert
from lesonnx.engines.cache import PackFile, Slab
from lesonnx.errors import LesonnxError


@dataclass(frozen=True)
class FlashSpeed:
    """Bytes a second at a number of reads under way; ``is_direct`` where the page cache took no part."""

    bytes_per_s: float
    num_loaders: int
    is_direct: bool


def measure_flash(bundle: Bundle, num_loaders: int, seconds: float = 0.6, seed: int = 0) -> FlashSpeed:
    """Read random experts of a bundle for a while; LesonnxError where a pack cannot be read."""
    packs = {layer.layer_idx: PackFile(bundle.pack_file(layer.layer_idx)) for layer in bundle.manifest.expert_layers}
    totals = [0] * num_loaders
    failures: list[str] = []
    began = time.perf_counter()
    deadline = began + seconds

    def read(number: int, slab: Slab, order: list[Expert]) -> None:
        at = 0
        try:
            while time.perf_counter() < deadline:
                expert = order[at % len(order)]
                packs[expert.layer_idx].read_into(slab.view[: expert.cost_bytes], expert.offset_bytes)
                totals[number] += expert.cost_bytes
                at += 1
        except (OSError, LesonnxError) as error:
            failures.append(str(error))

    largest = max(expert.cost_bytes for expert in bundle.experts)
    rng = random.Random(seed)
    threads = []
    for number in range(num_loaders):
        order = rng.sample(bundle.experts, min(len(bundle.experts), 4096))
        threads.append(threading.Thread(target=read, args=(number, Slab(largest), order)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - began
    is_direct = all(pack.is_direct for pack in packs.values())
    for pack in packs.values():
        pack.close()
    if failures:
        raise LesonnxError(f"{bundle.directory}: experts cannot be read: {failures[0]}")
    return FlashSpeed(sum(totals) / elapsed, num_loaders, is_direct)
