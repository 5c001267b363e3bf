"""PNG and JPEG without Pillow: size and orientation from the file's own headers, pixels by onnxruntime-extensions.

Its decoders end the process where a file is broken, or never end; so they run in one of their own: ``python -m`` of
this module takes a file on its standard input and gives height, width, channels and pixels. Alpha and palettes become
what `with_pillow` makes of them; numbers of 16 bits lose their lower 8.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lesonnx.errors import InputError

Pixels = npt.NDArray[np.uint8]
_EXTRA = "install Pillow for more: pip install 'lesonnx[vision]'"
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_EXIF = b"Exif\0\0"
_ORIENTATION = 0x0112
_SHORT = 3
# Frames of JPEG begin with one of these: all but tables (C4), an extension (C8) and arithmetic's conditions (CC).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_END = 0xD9
_APP1 = 0xE1
# What follows FF and begins no segment: a byte FF of a scan, filling, TEM, restarts, the start of an image.
_BARE = frozenset({0x00, 0xFF, 0x01, *range(0xD0, 0xD9)})
# A decoder that is led astray does not end by itself. Decoding takes some 20 ms a megapixel.
_START_SECONDS, _SECONDS_A_MEGAPIXEL = 20, 1
_SHAPE = struct.Struct("<III")
_NO_DECODER = 3


@dataclass(frozen=True)
class Header:
    """What a file says of its picture before any pixel."""

    height: int
    width: int
    channels: int
    orientation: int


def decode(data: bytes, name: str, check_size: Callable[[int, int, str], None]) -> tuple[Pixels, int]:
    """RGB [Y, X, 3] as stored, and EXIF's orientation. InputError where it cannot be."""
    header = read_header(data, name)
    check_size(header.height, header.width, name)
    if header.channels == 4 and data.startswith(_JPEG):
        raise InputError(f"{name}: a JPEG of four colours; {_EXTRA}")
    limit = _START_SECONDS + _SECONDS_A_MEGAPIXEL * header.height * header.width / 1e6
    command = [sys.executable, "-m", __name__]
    try:
        run = subprocess.run(command, input=data, capture_output=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        raise InputError(f"{name}: a broken picture: decoding did not end within {limit:.0f} s") from None
    except OSError as error:
        raise InputError(f"{name}: no process could be started that decodes it: {error.strerror}; {_EXTRA}") from None
    if run.returncode == _NO_DECODER:
        raise InputError(f"{name}: onnxruntime-extensions cannot be imported; {_EXTRA}")
    if run.returncode or b"Premature end" in run.stderr or len(run.stdout) < _SHAPE.size:
        raise InputError(f"{name}: a broken picture")
    height, width, channels = _SHAPE.unpack_from(run.stdout)
    pixels = np.frombuffer(run.stdout, np.uint8, offset=_SHAPE.size)
    if (height, width) != (header.height, header.width) or pixels.size != height * width * channels:
        raise InputError(f"{name}: a broken picture")
    pixels = pixels.reshape(height, width, channels)
    return (np.repeat(pixels, 3, axis=2) if channels == 1 else pixels), header.orientation


def read_header(data: bytes, name: str) -> Header:
    """Size, channels and orientation of a PNG or a JPEG; InputError for what is neither, or ends too early."""
    if data.startswith(_PNG):
        read: Callable[[bytes], Header | None] = _png
    elif data.startswith(_JPEG):
        read = _jpeg
    else:
        raise InputError(f"{name}: expected a PNG or a JPEG; {_EXTRA}")
    try:
        header = read(data)
    except (struct.error, IndexError):
        header = None
    if header is None:
        raise InputError(f"{name}: a broken picture: it ends too early")
    return header


def _png(data: bytes) -> Header | None:
    size: tuple[int, int] | None = None
    orientation, at = 1, len(_PNG)
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        content = data[at + 8 : at + 8 + length] if kind in (b"IHDR", b"eXIf") else b""
        if kind == b"IHDR":
            width, height = struct.unpack_from(">II", content)
            size = height, width
        elif kind == b"eXIf":
            orientation = _orientation(content)
        elif kind == b"IEND" and size is not None:
            return Header(*size, 3, orientation)
        at += 12 + length
    return None


def _jpeg(data: bytes) -> Header | None:
    orientation = 1
    size: tuple[int, int, int] | None = None
    for marker, content in _segments(data):
        if marker == _APP1 and content.startswith(_EXIF) and orientation == 1:
            orientation = _orientation(content[len(_EXIF) :])
        elif marker in _FRAMES and size is None:
            height, width, channels = struct.unpack_from(">HHB", content, 1)
            size = height, width, channels
        elif marker == _END and size is not None:
            return Header(*size, orientation)
    return None


def _segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Marker and content of each segment; what lies between, scans and what fills up, is passed over."""
    at = data.find(b"\xff", 2)
    while at >= 0:
        marker, at = data[at + 1], at + 1
        if marker not in _BARE:
            at += 1
            length = 0
            if marker != _END:
                (length,) = struct.unpack_from(">H", data, at)
            yield marker, data[at + 2 : at + length]
            at += length
        at = data.find(b"\xff", at)


def _orientation(tiff: bytes) -> int:
    """Orientation in EXIF's first directory; 1 where there is none, or EXIF is broken."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, at)
        for index in range(count):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tiff, at + 2 + 12 * index)
            if tag == _ORIENTATION and kind == _SHORT:
                return int(value)
    except struct.error:
        pass
    return 1


def _field(number: int, value: bytes | int) -> bytes:
    """A field of a protobuf message: a number below 128, or fewer than 16384 bytes."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    length = len(value)
    return bytes([number << 3 | 2, *([length] if length < 128 else [length & 127 | 128, length >> 7])]) + value


def decoder_model() -> bytes:
    """A model whose one operator decodes: ``data`` uint8 [N] to ``image`` uint8 [Y, X, C]; by hand, without onnx."""
    domain = b"com.microsoft.extensions"
    color = _field(1, b"color_space") + _field(4, b"rgb") + b"\xa0\x01\x03"
    node = _field(1, b"data") + _field(2, b"image") + _field(4, b"DecodeImage") + _field(5, color) + _field(7, domain)
    values = []
    for name, sides in ((b"data", (b"N",)), (b"image", (b"Y", b"X", b"C"))):
        shape = b"".join(_field(1, _field(2, side)) for side in sides)
        tensor = _field(1, 2) + _field(2, shape)
        values.append(_field(1, name) + _field(2, _field(1, tensor)))
    graph = _field(1, node) + _field(2, b"decode") + _field(11, values[0]) + _field(12, values[1])
    opsets = _field(8, _field(1, b"") + _field(2, 17)) + _field(8, _field(1, domain) + _field(2, 1))
    return _field(1, 8) + _field(7, graph) + opsets


def main() -> None:
    """Decode standard input to standard output."""
    try:
        import onnxruntime
        import onnxruntime_extensions
    except ImportError:
        sys.exit(_NO_DECODER)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(decoder_model(), options, providers=["CPUExecutionProvider"])
    data = np.frombuffer(sys.stdin.buffer.read(), np.uint8)
    (image,) = session.run(None, {"data": data})
    sys.stdout.buffer.write(_SHAPE.pack(*image.shape))
    sys.stdout.buffer.write(np.ascontiguousarray(image).data)


if __name__ == "__main__":
    main()
