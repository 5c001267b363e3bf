"""Pillow as this package uses it: which formats, what becomes of modes other than RGB, and one line where it fails.

Imported only where Pillow is installed.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeGuard

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError, features

from lesonnx.errors import InputError, LesonnxError

Pixels = npt.NDArray[np.uint8]
# Those that cameras, phones, screens and the web write. Of the others some start programs, EPS for one. HEIF and HEIC
# are there only where a plugin has added them.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA", "ICO", "HEIF")
# Those that an installation may lack, by Pillow's names of what decodes them.
_DECODERS = {"JPEG": "jpg", "PNG": "zlib", "WEBP": "webp", "AVIF": "avif", "JPEG2000": "jpg_2000"}
_ORIENTATION = 0x0112
_BAND_PIXELS = 1 << 20
_LOCK = threading.RLock()


def is_image(source: object) -> TypeGuard[Image.Image]:
    """Whether it is an image of Pillow's."""
    return isinstance(source, Image.Image)


def readable_formats() -> list[str]:
    """The formats of `FORMATS` that this installation of Pillow decodes."""
    Image.init()
    known = [each for each in FORMATS if each in Image.OPEN]
    return [each for each in known if each not in _DECODERS or features.check(_DECODERS[each])]


def decode(file: BinaryIO, name: str, max_pixels: int, admit: Callable[[int, int], None]) -> tuple[Pixels, int]:
    """RGB [Y, X, 3] as stored, and EXIF's orientation, of the first frame in a file. InputError where it cannot be."""
    Image.init()
    formats = [each for each in FORMATS if each in Image.OPEN]
    try:
        with _quiet(), Image.open(file, formats=formats) as image:
            return read(image, name, max_pixels, admit)
    except LesonnxError:
        raise
    except UnidentifiedImageError:
        raise InputError(f"{name}: not a picture, expected one of {', '.join(formats)}") from None
    except Image.DecompressionBombError:
        raise _too_large(name, max_pixels) from None
    except Exception as error:  # noqa: BLE001  (decoders raise whatever a broken file leads them to)
        raise InputError(f"{name}: a broken picture: {_reason(error)}") from None


def read(image: Image.Image, name: str, max_pixels: int, admit: Callable[[int, int], None]) -> tuple[Pixels, int]:
    """`decode` of an image that is open: at the frame that it is at, which it stays at."""
    if image.width * image.height > max_pixels:
        raise _too_large(f"{name}: {image.width} x {image.height} pixels", max_pixels)
    try:
        with _quiet():
            admit(image.height, image.width)
            image.load()
            return _rgb(image, name), _orientation(image)
    except LesonnxError:
        raise
    except Exception as error:  # noqa: BLE001  (decoders raise whatever a broken file leads them to)
        raise InputError(f"{name}: a broken picture: {_reason(error)}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings: they are for who wrote the file, or Pillow. One thread at a time, since filters are global."""
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _rgb(image: Image.Image, name: str) -> Pixels:
    """Alpha is left out and palettes are resolved; greys of 16 bits are scaled, not clipped as Pillow would.

    Band by band, since Pillow's way to an array holds the picture three times.
    """
    if image.mode == "F":
        raise InputError(f"{name}: pixels are floating point numbers, expected 8 or 16 bits")
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    rows = max(_BAND_PIXELS // max(image.width, 1), 1)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        pixels[top:bottom] = _band(image.crop((0, top, image.width, bottom)))
    return pixels


def _band(image: Image.Image) -> Pixels:
    """RGB [Y, X, 3], or grey [Y, X, 1]."""
    if not image.mode.startswith("I"):
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"), np.uint8)
    grey = np.asarray(image)
    narrow = grey.astype(np.uint16) if grey.dtype.kind == "u" else np.clip(grey, 0, 0xFFFF).astype(np.uint16)
    return scaled(narrow)[..., None]


def scaled(values: npt.NDArray[np.uint16]) -> Pixels:
    """Numbers of 16 bits as such of 8: v / 257, rounded."""
    table = np.rint(np.arange(1 << 16) / 257).astype(np.uint8)
    return table[values]


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation; 1 where there is none, or EXIF is broken: the picture is there all the same."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001  (decoders raise whatever a broken file leads them to)
        return 1


def _too_large(what: str, max_pixels: int) -> InputError:
    return InputError(f"{what}: too large, expected at most {max_pixels // 10**6} megapixels")


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "not enough memory for it"
    lines: list[Any] = str(error).splitlines()
    return str(lines[0]) if lines else type(error).__name__
