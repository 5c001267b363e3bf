"""What reads pictures: the bundle's two vision parts, each open as long as it is needed.

It knows sessions and the manifest's record. How a picture is cut, `vision.cutting` says; what becomes of features,
others know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from lesonnx import ort
from lesonnx.bundle import Bundle
from lesonnx.errors import InputError, LesonnxError
from lesonnx.manifest import AnyVision, VisionRole
from lesonnx.vision.cutting import View

Features = NDArray[np.float32]


class Crop(NamedTuple):
    """A part of a picture as the tower takes it: [1,3,P,W], and its rows and columns of patches."""

    pixel_values: NDArray[np.float32]
    target_size: tuple[int, int]


class Eyes:
    """The vision sessions of a bundle, of which one at a time is open: so a picture and the tower are never in memory
    together. A context manager; not thread-safe. InputError where the bundle has none.
    """

    def __init__(self, bundle: Bundle, num_threads: int | None = None) -> None:
        self.vision = record_of(bundle)
        self._bundle = bundle
        self._options = ort.session_options(optimise=True, num_threads=num_threads)
        self._open: tuple[VisionRole, onnxruntime.InferenceSession] | None = None

    def close(self) -> None:
        """Free the session that is open."""
        self._open = None

    def _session(self, role: VisionRole) -> onnxruntime.InferenceSession:
        if self._open is None or self._open[0] != role:
            # The other one goes first.
            self._open = None
            part = self.vision.part(role)
            path = self._bundle.part_file(part)
            session = ort.open_session(path, self._options)
            ort.check_part(session, part, path)
            self._open = (role, session)
        return self._open[1]

    def __enter__(self) -> Eyes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def crops(self, pixels: NDArray[np.uint8], views: Sequence[View]) -> list[Crop]:
        """A picture [Y,X,3] prepared: the overview, then the slices."""
        crops: list[Crop] = []
        for view in views:
            size, grid = (np.asarray(sides, np.int64) for sides in (view.size, view.grid))
            (packed,) = _run(self._session("vision_prepare"), {"image": pixels, "size": size, "grid": grid})
            crops += cut_packed(packed, [view.crop_patches(self.vision)] * view.num_crops, self.vision.patch_size)
        return crops

    def see(self, crop: Crop) -> Features:
        """The features [I,H] of a crop; with what deepstack adds behind layers, one after the other: [I,(1+D)*H]."""
        target_size = np.asarray(crop.target_size, np.int64)
        pixel_values = np.ascontiguousarray(crop.pixel_values)
        given = _run(self._session("vision_tower"), {"pixel_values": pixel_values, "target_size": target_size})
        return np.concatenate(given, axis=1) if len(given) > 1 else given[0]


def cut_packed(packed: NDArray[np.float32], target_sizes: Sequence[tuple[int, int]], patch_size: int) -> Iterator[Crop]:
    """Crops of these sizes (rows and columns of patches) that lie one after another along W of [1,3,P,W]."""
    start = 0
    for rows, columns in target_sizes:
        stop = start + rows * columns * patch_size
        yield Crop(packed[..., start:stop], (rows, columns))
        start = stop


def record_of(bundle: Bundle) -> AnyVision:
    """The bundle's vision record; InputError where it has none."""
    if bundle.manifest.vision is None:
        raise InputError(f"{bundle.directory}: this bundle has no eyes: it takes no pictures")
    return bundle.manifest.vision


def _run(session: onnxruntime.InferenceSession, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[np.float32]]:
    """The outputs of a session, in the order of its model."""
    try:
        outputs: list[NDArray[np.float32]] = session.run(None, dict(inputs))
    except Exception as error:  # noqa: BLE001  (ONNX Runtime raises many unrelated types)
        raise LesonnxError(f"ONNX Runtime failed on a picture: {ort.first_line(error)}") from None
    return outputs
