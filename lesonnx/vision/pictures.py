"""Pictures as pixels: a file, bytes, a Pillow image or an array becomes upright 8-bit RGB.

It knows nothing of models. Pillow decodes where it is installed, else `without_pillow` does, which reads less.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Union

import numpy as np
import numpy.typing as npt

from lesonnx.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
Source = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview, "Image", Pixels, "Picture"]
# Is told a height and a width before a picture of that size is decoded.
Admit = Callable[[int, int], None]
# 134 megapixels: cameras stay below it, and so does Pillow's own bound. A decoded picture takes up to 400 MB then.
MAX_PIXELS = 1 << 27


@dataclass(frozen=True, eq=False)
class Picture:
    """Upright RGB pixels, uint8 [Y, X, 3], which nothing changes; safe to share between threads."""

    pixels: Pixels

    @property
    def height(self) -> int:
        """Rows of pixels."""
        return int(self.pixels.shape[0])

    @property
    def width(self) -> int:
        """Columns of pixels."""
        return int(self.pixels.shape[1])

    @cached_property
    def key(self) -> str:
        """What equal pictures share: SHA-256 of shape and pixels, in hex."""
        digest = hashlib.sha256(f"{self.height} {self.width} ".encode())
        digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.hexdigest()


def open_picture(source: Source, admit: Admit = lambda height, width: None) -> Picture:
    """The picture in a file, in a file's bytes, in a Pillow image, or in an array uint8 [Y, X, 3] of RGB.

    Upright, as EXIF says; colours are RGB of 8 bits, see docs/vision.md; the first frame of an animation. The source is
    left as it is. InputError in one line for what is no picture, is broken, or has more than 134 megapixels.
    ``admit`` is called before pixels are decoded or copied, with their height and width; what it raises passes.
    """
    if isinstance(source, Picture):
        return source
    if isinstance(source, np.ndarray):
        return _finished(_of_array(source, admit), 1, "the array")
    if isinstance(source, bytes | bytearray | memoryview):
        return _of_bytes(memoryview(source), admit)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        return _of_file(path, admit)
    if "PIL.Image" in sys.modules:
        from lesonnx.vision import with_pillow

        if with_pillow.is_image(source):
            pixels, orientation = with_pillow.read(source, "the Pillow image", MAX_PIXELS, admit)
            return _finished(pixels, orientation, "the Pillow image")
    raise InputError(f"a picture is a path, bytes, a Pillow image or a uint8 array, found {type(source).__name__}")


def check_size(height: int, width: int, name: str) -> None:
    """InputError for a size that is not decoded."""
    if height < 1 or width < 1:
        raise InputError(f"{name}: a picture has at least one pixel, found {width} x {height}")
    if height * width > MAX_PIXELS:
        raise InputError(
            f"{name}: {width} x {height} pixels are too many, expected at most {MAX_PIXELS // 10**6} megapixels"
        )


def has_pillow() -> bool:
    """Whether Pillow is installed and can be used."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return False
    return True


def readable_formats() -> list[str]:
    """The formats of pictures that are decoded here: by Pillow, or by onnxruntime-extensions where that is not."""
    if has_pillow():
        from lesonnx.vision import with_pillow

        return with_pillow.readable_formats()
    return ["JPEG", "PNG"]


def _of_bytes(view: memoryview, admit: Admit) -> Picture:
    name = f"a picture of {view.nbytes} bytes"
    if not view.nbytes:
        raise InputError(f"{name}: expected a picture, found nothing")
    # What is not in one piece, a slice with a step, is put into one.
    return _decoded(BytesIO(view if view.c_contiguous else view.tobytes()), name, admit)


def _of_file(path: Path, admit: Admit) -> Picture:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise InputError(f"{path}: expected a picture, found a directory")
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: expected a picture, found what is no regular file")
        if not status.st_size:
            raise InputError(f"{path}: expected a picture, found an empty file")
        with path.open("rb") as file:
            return _decoded(file, str(path), admit)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{path}: cannot be read: {reason}") from None


def _decoded(file: BinaryIO, name: str, admit: Admit) -> Picture:
    if has_pillow():
        from lesonnx.vision import with_pillow

        return _finished(*with_pillow.decode(file, name, MAX_PIXELS, admit), name)
    from lesonnx.vision import without_pillow

    def check(height: int, width: int, name: str) -> None:
        check_size(height, width, name)
        admit(height, width)

    return _finished(*without_pillow.decode(file.read(), name, check), name)


def _of_array(array: npt.NDArray[np.generic], admit: Admit) -> Pixels:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise InputError(f"a picture's array is uint8 [Y, X, 3], found {array.dtype} {list(array.shape)}")
    # An array may claim more than it holds in memory: a copy of it comes last.
    check_size(array.shape[0], array.shape[1], "the array")
    admit(array.shape[0], array.shape[1])
    return np.array(array, np.uint8, order="C")


def _finished(pixels: Pixels, orientation: int, name: str) -> Picture:
    """Turn as EXIF's ``orientation`` 1 to 8 says, and seal."""
    check_size(pixels.shape[0], pixels.shape[1], name)
    turned = np.ascontiguousarray(upright(pixels, orientation))
    turned.setflags(write=False)
    return Picture(turned)


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Pixels turned as EXIF's orientation says how they are stored; what is none of its values changes nothing."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels
