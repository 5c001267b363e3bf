"""What reads pictures: the bundle's two vision parts, open as long as they are needed.

It knows sessions and the manifest's record; how a picture is cut, `vision.cutting` says, what is done with features,
others know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from lesonnx import ort
from lesonnx.bundle import Bundle
from lesonnx.errors import InputError, LesonnxError
from lesonnx.manifest import Part, Vision
from lesonnx.vision.cutting import View

Features = NDArray[np.float32]


class Eyes:
    """Both vision sessions of a bundle. A context manager; not thread-safe. InputError where the bundle has none."""

    def __init__(self, bundle: Bundle, num_threads: int | None = None) -> None:
        self.vision = record_of(bundle)
        self._hidden_size = bundle.manifest.model.hidden_size
        options = ort.session_options(optimise=True, num_threads=num_threads)
        self._prepare = _open(bundle, self.vision.part("vision_prepare"), options)
        self._tower = _open(bundle, self.vision.part("vision_tower"), options)

    def close(self) -> None:
        """Free both sessions."""
        del self._prepare, self._tower

    def __enter__(self) -> Eyes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def prepare(self, pixels: NDArray[np.uint8], view: View) -> NDArray[np.float32]:
        """The crops of a view of a picture [Y,X,3], packed: ``pixel_values`` [1,3,P,W], crop after crop along W."""
        inputs = {"image": pixels, "size": np.asarray(view.size, np.int64), "grid": np.asarray(view.grid, np.int64)}
        return _run(self._prepare, inputs)

    def crop_features(self, pixel_values: NDArray[np.float32], target_size: tuple[int, int]) -> Features:
        """Features [I,H] of crops of ``target_size`` (rows, columns of patches) that lie packed along W."""
        inputs = {"pixel_values": pixel_values, "target_size": np.asarray(target_size, np.int64)}
        return _run(self._tower, inputs)

    def crops(self, pixels: NDArray[np.uint8], views: Sequence[View]) -> Iterator[Features]:
        """Features of a picture [Y,X,3], crop by crop: the overview's, then the slices'. Stop between any two."""
        patch = self.vision.patch_size
        for view in views:
            packed = self.prepare(pixels, view)
            rows, columns = (side // count // patch for side, count in zip(view.size, view.grid, strict=True))
            width = rows * columns * patch
            for start in range(0, packed.shape[-1], width):
                yield self.crop_features(np.ascontiguousarray(packed[..., start : start + width]), (rows, columns))

    def see(self, pixels: NDArray[np.uint8], views: Sequence[View]) -> Features:
        """All features [I,H] of a picture [Y,X,3] in its views."""
        return np.concatenate(list(self.crops(pixels, views)))


def record_of(bundle: Bundle) -> Vision:
    """The bundle's vision record; InputError where it has none."""
    if bundle.manifest.vision is None:
        raise InputError(f"{bundle.directory}: this bundle has no eyes: it takes no pictures")
    return bundle.manifest.vision


def _open(bundle: Bundle, part: Part, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    path = bundle.part_file(part)
    session = ort.open_session(path, options)
    ort.check_part(session, part, path)
    return session


def _run(session: onnxruntime.InferenceSession, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """The one output of a session."""
    try:
        output: NDArray[np.float32] = session.run(None, dict(inputs))[0]
    except Exception as error:  # noqa: BLE001  (ONNX Runtime raises many unrelated types)
        raise LesonnxError(f"ONNX Runtime failed on a picture: {ort.first_line(error)}") from None
    return output
