"""The pictures that a model is shown: opened, read when a prompt needs them, and their features kept for a while.

It knows the runner as what gives memory; which tokens stand for a picture, `vision.prompts` says.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lesonnx.bundle import Bundle
from lesonnx.errors import BudgetError, InputError
from lesonnx.prompt import Features
from lesonnx.runner import Runner
from lesonnx.timeline import DENSE
from lesonnx.vision.cutting import View
from lesonnx.vision.eyes import Crop, Eyes, record_of
from lesonnx.vision.pictures import open_picture
from lesonnx.vision.reading import DECODING_BYTES, Sized, bytes_of_features, bytes_to_read
from lesonnx.vision.rules import views

# Features are kept as long as they take no more than this together: at a hidden size of 2048, those of three large
# pictures, or of thirty small ones.
KEPT_BYTES = 16 << 20


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
        self._is_reading = False

    def open(self, source: Any) -> Shown:
        """Open a picture: a path, bytes, a Pillow image, an array, or what was opened before.

        InputError in one line for what is no picture, or none that can be cut; BudgetError where it has no room.
        """
        if isinstance(source, Shown):
            return source
        with ExitStack() as lent:

            def admit(height: int, width: int) -> None:
                # No prefill is under way, so its room is free; but open eyes count on that room already.
                idle = 0 if self._is_reading else self._runner.free_chunks()
                try:
                    lent.enter_context(self._runner.lend(max(0, height * width * DECODING_BYTES - idle)))
                except BudgetError:
                    # One refusal says all that the picture needs: reading it takes more.
                    needed = 0
                    with suppress(InputError):
                        sized = Shown("", height, width, tuple(views(height, width, self.vision)), source)
                        needed = reading_bytes(self._bundle, [sized])
                    with self._runner.lend(max(0, needed - idle)):
                        raise

            picture = open_picture(source, admit)
            try:
                cut = tuple(views(picture.height, picture.width, self.vision))
            except InputError as error:
                # As errors of files begin; what has no name is said by its size alone.
                named = f"{source}: " if isinstance(source, str | os.PathLike) else ""
                raise InputError(f"{named}{error}") from None
            return Shown(picture.key, picture.height, picture.width, cut, source)

    def look(
        self, pictures: Sequence[Shown], keys: Iterable[str], found: dict[str, Features]
    ) -> Generator[None, None, list[str]]:
        """Put the features of those of ``pictures`` that have one of the keys into ``found``, by key.

        What is not kept is read. Control is given back after each picture that is prepared and each crop that is read:
        whoever stops there loses the features of the picture at hand and of those after it, and nothing else. Experts
        lend the memory that reading takes. Gives the keys that were read, not kept. BudgetError where experts cannot.
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
            return []
        idle = self._runner.free_chunks()
        needed = reading_bytes(self._bundle, unknown.values())
        with self._runner.lend(max(0, needed - idle)), Eyes(self._bundle, self._num_threads) as eyes:
            self._is_reading = True
            try:
                prepared: dict[str, list[Crop]] = {}
                for key, shown in unknown.items():
                    prepared[key] = self._crops(eyes, shown)
                    yield
                for key in unknown:
                    features = []
                    for crop in prepared.pop(key):
                        features.append(self._see(eyes, crop))
                        yield
                    found[key] = np.concatenate(features)
                    self._keep(key, found[key])
            finally:
                self._is_reading = False
        return list(unknown)

    def _crops(self, eyes: Eyes, shown: Shown) -> list[Crop]:
        """A picture's crops. Of the picture itself nothing stays."""
        picture = open_picture(shown.source)
        if picture.key != shown.key:
            name = shown.source if isinstance(shown.source, str | Path) else "a picture"
            raise InputError(f"{name}: has changed since it was opened")
        return eyes.crops(picture.pixels, shown.views)

    def _see(self, eyes: Eyes, crop: Crop) -> Features:
        began = time.perf_counter()
        features = eyes.see(crop)
        if timeline := self._runner.loader.timeline:
            rows, columns = crop.target_size
            timeline.span(DENSE, "vision_tower", began, time.perf_counter(), rows=rows, columns=columns)
        return features

    def _keep(self, key: str, features: Features) -> None:
        """Keep features, and forget those that were used least lately."""
        self._kept[key] = features
        while sum(kept.nbytes for kept in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)


def reading_bytes(bundle: Bundle, pictures: Collection[Shown]) -> int:
    """What reading pictures of a bundle takes at most; see `bytes_to_read`."""
    vision = record_of(bundle)
    sized = [Sized(shown.height, shown.width, shown.views) for shown in pictures]
    weights_bytes = bundle.file(vision.data).stat().st_size
    return bytes_to_read(sized, vision, weights_bytes, bundle.manifest.model.hidden_size)


def features_bytes(bundle: Bundle, shown: Shown) -> int:
    """What a picture's features take."""
    return bytes_of_features(shown.views, record_of(bundle), bundle.manifest.model.hidden_size)
