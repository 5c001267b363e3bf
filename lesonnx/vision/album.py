"""The pictures that a model is shown: opened, read when a prompt needs them, and their features kept for a while.

It knows the runner as what gives memory; which tokens stand for a picture, `vision.prompts` says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lesonnx.bundle import Bundle
from lesonnx.errors import InputError
from lesonnx.prompt import Features
from lesonnx.runner import Runner
from lesonnx.vision import pictures as decoding
from lesonnx.vision.cutting import View
from lesonnx.vision.eyes import Crop, Eyes, record_of
from lesonnx.vision.pictures import Picture
from lesonnx.vision.rules import views, working_bytes

# Features are kept as long as they take no more than this together: at a hidden size of 2048, those of three pictures
# of ten crops, or of thirty small ones.
KEPT_BYTES = 16 << 20
# What a pixel takes at most while it is decoded, and while it is prepared: its own three bytes, and 4.2 were measured.
DECODING_BYTES = 16
PREPARING_BYTES = 8
# What sessions take beside their weights' own bytes, while they open and later: for towers of 150 MB to 1 GB, in 4, 8
# and 32 bits, 15 % to 38 % more were measured.
SESSION_SHARE = 1 / 3
SESSION_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class Shown:
    """A picture that was opened once and can be again: what it is known by, its size, how it is cut, where it is.

    Its pixels are not in it. It can stand wherever a picture is asked for, and saves opening that one another time.
    """

    key: str
    height: int
    width: int
    views: tuple[View, ...]
    source: Any


class Album:
    """The pictures of one model. Not thread-safe; belongs to the thread that runs the runner, between its steps.

    InputError where the bundle takes no pictures.
    """

    def __init__(self, bundle: Bundle, runner: Runner, num_threads: int | None = None) -> None:
        self.vision = record_of(bundle)
        self._bundle = bundle
        self._runner = runner
        self._num_threads = num_threads
        self._kept: OrderedDict[str, Features] = OrderedDict()

    def open(self, source: Any) -> Shown:
        """Open a picture: a path, bytes, a Pillow image, an array, or what was opened before.

        InputError in one line for what is no picture, or none that can be cut; BudgetError where it has no room.
        """
        if isinstance(source, Shown):
            return source
        picture = self._decode(source)
        cut = tuple(views(picture.height, picture.width, self.vision))
        return Shown(picture.key, picture.height, picture.width, cut, source)

    def _decode(self, source: Any) -> Picture:
        return decoding.open_picture(source)

    def look(self, pictures: Sequence[Shown], keys: Iterable[str], found: dict[str, Features]) -> Generator[None]:
        """Put the features of those of ``pictures`` that have one of the keys into ``found``, by key.

        What is not kept is read, crop by crop, and control given back after each: whoever stops there loses that
        picture's crops and nothing else. Experts lend the memory that reading takes. BudgetError where they cannot.
        """
        by_key = {shown.key: shown for shown in pictures}
        unknown: dict[str, Shown] = {}
        for key in keys:
            if key in self._kept:
                self._kept.move_to_end(key)
                found[key] = self._kept[key]
            else:
                unknown[key] = by_key[key]
        if not unknown:
            return
        needed = max(reading_bytes(self._bundle, shown) for shown in unknown.values())
        needed += sum(features_bytes(self._bundle, shown) for shown in unknown.values())
        idle = self._runner.free_chunks()
        with self._runner.lend(max(0, needed - idle)), Eyes(self._bundle, self._num_threads) as eyes:
            for key, shown in unknown.items():
                features = []
                for crop in self._crops(eyes, shown):
                    features.append(eyes.see(crop))
                    yield
                found[key] = np.concatenate(features)
                self._keep(key, found[key])

    def _crops(self, eyes: Eyes, shown: Shown) -> list[Crop]:
        """A picture's crops; the picture itself is gone when the first of them is read."""
        picture = self._decode(shown.source)
        if picture.key != shown.key:
            raise InputError(f"{shown.source}: has changed since it was opened")
        return eyes.crops(picture.pixels, shown.views)

    def _keep(self, key: str, features: Features) -> None:
        """Keep features, and forget those that were used least lately."""
        self._kept[key] = features
        while sum(kept.nbytes for kept in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)


def reading_bytes(bundle: Bundle, shown: Shown) -> int:
    """What reading a picture takes at most: the sessions, and the picture while it is prepared or its crops later."""
    vision = record_of(bundle)
    weights = bundle.file(vision.data).stat().st_size
    sessions = weights + int(weights * SESSION_SHARE) + SESSION_BYTES
    packed = sum(view.size[0] * view.size[1] * 3 for view in shown.views) * np.dtype(np.float32).itemsize
    preparing = shown.height * shown.width * max(DECODING_BYTES, PREPARING_BYTES) + packed
    return sessions + packed + max(preparing, *(working_bytes(view, vision) for view in shown.views))


def features_bytes(bundle: Bundle, shown: Shown) -> int:
    """What a picture's features take."""
    vision = record_of(bundle)
    num_tokens = sum(view.num_tokens(vision) for view in shown.views)
    row = (1 + vision.deepstack_layers) * bundle.manifest.model.hidden_size
    return num_tokens * row * np.dtype(np.float32).itemsize
