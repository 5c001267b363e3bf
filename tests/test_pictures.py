"""Pictures as pixels: what Pillow reads, what is read without it, and one line for everything else."""

from __future__ import annotations

import io
import os
import random
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image, ImageOps

from lesonnx.errors import InputError
from lesonnx.vision import pictures, with_pillow, without_pillow
from lesonnx.vision.pictures import MAX_PIXELS, Picture, Pixels, open_picture, upright

IMAGES = Path(__file__).parent / "data" / "checkpoints" / "minicpmv4_7_moe" / "images"
ORIENTATION = 0x0112


def natural(height: int, width: int) -> Pixels:
    """Slow colour gradients, as JPEG likes them, no two rows or columns alike."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [x * 255 / width, y * 255 / height, (x + 2 * y) * 255 / (width + 2 * height)]
    return np.stack(planes, -1).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(height: int, width: int, rows: bytes = b"", *, colour: int = 2, depth: int = 8, more: bytes = b"") -> bytes:
    """A PNG by hand: its header may say what its rows do not hold."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    start = b"\x89PNG\r\n\x1a\n"
    return start + more.join(chunk(*each) for each in chunks)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def failure(call: Callable[..., object], *arguments: object) -> str | None:
    """The one line of an InputError, if that is how a call ends."""
    try:
        call(*arguments)
    except InputError as error:
        line = str(error)
    else:
        return None
    assert line
    assert "\n" not in line
    return line


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Pillow is not installed."""
    monkeypatch.setattr(pictures, "has_pillow", lambda: False)


RGB = natural(37, 53)
IMAGE = Image.fromarray(RGB)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "TGA", "WEBP"])
def test_formats_that_lose_nothing(kind: str, tmp_path: Path) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(IMAGE, kind, **options)
    path = tmp_path / "picture"
    path.write_bytes(data)
    opened = [open_picture(each) for each in (data, bytearray(data), memoryview(data), path, str(path))]
    for picture in opened:
        np.testing.assert_array_equal(picture.pixels, RGB)
    assert {(picture.height, picture.width, picture.key) for picture in opened} == {(37, 53, opened[0].key)}


def test_the_fixtures_pictures_and_a_jpeg_are_pillows() -> None:
    for path in sorted(IMAGES.iterdir()):
        np.testing.assert_array_equal(open_picture(path).pixels, np.asarray(Image.open(path).convert("RGB")))
    data = encoded(IMAGE, "JPEG", quality=80)
    np.testing.assert_array_equal(open_picture(data).pixels, np.asarray(Image.open(io.BytesIO(data))))


def test_a_picture_is_what_it_was_made_of() -> None:
    array = RGB.copy()
    picture = open_picture(array)
    assert open_picture(picture) is picture
    assert picture.key == open_picture(IMAGE).key
    array[0, 0] = 99
    np.testing.assert_array_equal(picture.pixels, RGB)
    with pytest.raises(ValueError, match="read-only"):
        picture.pixels[0, 0] = 0
    other = open_picture(array)
    assert other.key != picture.key
    assert open_picture(RGB[:, ::-1]).pixels.flags.c_contiguous
    flat = np.zeros((2, 6, 3), np.uint8)
    assert open_picture(flat).key != open_picture(flat.reshape(6, 2, 3)).key, "the shape counts"


def test_bytes_in_a_view_with_steps_or_a_shape_are_read() -> None:
    data = encoded(IMAGE, "PNG")
    spread = np.zeros((len(data), 2), np.uint8)
    spread[:, 0] = np.frombuffer(data, np.uint8)
    for view in (
        memoryview(spread.tobytes())[::2],
        memoryview(spread[:, :1]),
        memoryview(data).cast("B", (1, len(data))),
    ):
        np.testing.assert_array_equal(open_picture(view).pixels, RGB)
    wide = memoryview(bytes(80)).cast("d")
    assert (failure(open_picture, wide) or "").startswith("a picture of 80 bytes: ")
    assert (failure(open_picture, wide[:0]) or "").startswith("a picture of 0 bytes: ")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_pictures_are_turned_upright_as_exif_says(kind: str, orientation: int) -> None:
    data = encoded(IMAGE, kind, exif=turned(orientation))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    np.testing.assert_array_equal(open_picture(data).pixels, expected)
    if kind != "TIFF":  # Pillow turns those while it reads them
        np.testing.assert_array_equal(open_picture(Image.open(io.BytesIO(data))).pixels, expected)


def test_exif_that_is_broken_turns_nothing() -> None:
    exif = turned(6).tobytes()
    for broken in (exif[:10], exif[:-20], exif[:6] + b"XX" + exif[8:], b"Exif\0\0"):
        data = encoded(IMAGE, "JPEG", exif=broken)
        assert open_picture(data).pixels.shape == RGB.shape
    np.testing.assert_array_equal(upright(RGB, 0), RGB)
    np.testing.assert_array_equal(upright(RGB, 9), RGB)


def test_modes_other_than_rgb() -> None:
    """Alpha is left out, palettes resolved, grey repeated: as Pillow converts."""
    alpha = Image.fromarray(np.dstack([RGB, np.zeros((37, 53), np.uint8)]))
    palette = IMAGE.quantize(16)
    palette.info["transparency"] = 0
    for image in (alpha, palette, *(IMAGE.convert(mode) for mode in ("L", "LA", "1", "CMYK", "YCbCr", "HSV", "P"))):
        np.testing.assert_array_equal(open_picture(image).pixels, np.asarray(image.convert("RGB")), image.mode)
    np.testing.assert_array_equal(open_picture(encoded(alpha, "PNG")).pixels, RGB)
    indexed = encoded(palette, "PNG", transparency=bytes(range(16)))
    np.testing.assert_array_equal(open_picture(indexed).pixels, np.asarray(palette.convert("RGB")))
    with pytest.raises(InputError, match="floating point"):
        open_picture(Image.fromarray(RGB[..., 0].astype(np.float32)))


def test_greys_of_16_bits_are_scaled() -> None:
    values = np.arange(1 << 16, dtype=np.uint16)
    np.testing.assert_array_equal(with_pillow.scaled(values), np.rint(values / 257).astype(np.uint8))
    grey = values[::16].reshape(64, 64).copy()
    expected = np.repeat(with_pillow.scaled(grey)[..., None], 3, 2)
    sixteen = Image.fromarray(grey)
    big_endian = Image.frombytes("I;16B", (64, 64), grey.astype(">u2").tobytes())
    for image in (sixteen, big_endian, Image.fromarray(grey.astype(np.int32))):
        np.testing.assert_array_equal(open_picture(image).pixels, expected)
    by_hand = b"P5 64 64 65535\n" + grey.astype(">u2").tobytes()
    np.testing.assert_array_equal(open_picture(by_hand).pixels, expected)
    for kind in ("PNG", "TIFF"):
        np.testing.assert_array_equal(open_picture(encoded(sixteen, kind)).pixels, expected)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "lime", "blue")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, lossless=True)
    red = np.broadcast_to(np.uint8([255, 0, 0]), (10, 20, 3))
    np.testing.assert_array_equal(open_picture(data).pixels, red)


def test_one_pixel_and_a_row_of_them() -> None:
    for size in ((1, 1), (1, 300), (300, 1)):
        pixels = natural(*size)
        np.testing.assert_array_equal(open_picture(encoded(Image.fromarray(pixels), "PNG")).pixels, pixels)


def test_what_is_no_picture_is_one_line(tmp_path: Path) -> None:
    text = tmp_path / "notes.png"
    text.write_text("not a picture\n" * 50)
    empty = tmp_path / "empty.jpg"
    empty.touch()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for source, message in (
        (text, f"^{text}: not a picture, expected one of JPEG, PNG"),
        (empty, f"^{empty}: .*an empty file$"),
        (tmp_path, f"^{tmp_path}: .*a directory$"),
        (pipe, f"^{pipe}: .*no regular file$"),
        (tmp_path / "missing.png", "missing.png: no such file$"),
        (text / "below.png", "below.png: cannot be read: Not a directory$"),
        ("nul\0", "cannot be read: embedded null"),
        (b"", "found nothing$"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "^a picture of .* bytes: not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
        (RGB[..., 0], r"uint8 \[Y, X, 3\], found uint8 \[37, 53\]$"),
        (RGB.astype(np.float32), "found float32"),
        (RGB[:0], "at least one pixel, found 53 x 0$"),
        (Image.new("RGB", (0, 5)), "^the Pillow image: .* at least one pixel, found 0 x 5$"),
        (7, "found int$"),
        (None, "found NoneType$"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            open_picture(source)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(encoded(IMAGE, "PNG"))
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read every file")
    with pytest.raises(InputError, match="secret.png: cannot be read: Permission denied"):
        open_picture(path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_broken_files_are_one_line_or_a_picture(kind: str) -> None:
    """Cut anywhere, bytes changed anywhere: no other exception, no warning."""
    data = encoded(IMAGE, kind)
    draw = random.Random(5)
    broken = [data[: len(data) * part // 20] for part in range(1, 20)]
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 8)):
            changed[draw.randrange(len(data))] = draw.randrange(256)
        broken.append(bytes(changed))
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in broken:
            refused += failure(open_picture, each) is not None
    assert refused >= 15


def test_sizes_are_held_to_a_bound_before_anything_is_decoded(without_or_with: None) -> None:
    for height, width in ((60000, 60000), (11600, 11600), (1, 1 << 28), ((1 << 31) - 1, (1 << 31) - 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(InputError, match=r"^a picture of \d+ bytes: .*at most 134 megapixels$"):
                open_picture(png(height, width))
    with pytest.raises(InputError):
        open_picture(png(0, 7))
    assert MAX_PIXELS == 134217728


def test_an_array_is_refused_from_its_shape() -> None:
    """Before its 30 GB are copied, and before memory is asked for."""
    claimed = np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (100_000, 100_000, 3))
    asked: list[tuple[int, int]] = []
    with pytest.raises(InputError, match="^the array: 100000 x 100000 pixels are too many, expected at most 134 meg"):
        open_picture(claimed, lambda height, width: asked.append((height, width)))
    with pytest.raises(InputError, match="^the array: a picture has at least one pixel, found 5 x 0"):
        open_picture(np.zeros((0, 5, 3), np.uint8))
    assert not asked


@pytest.fixture(params=["with Pillow", "without"])
def without_or_with(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr(pictures, "has_pillow", lambda: False)


def test_more_pixels_than_pillow_takes_without_a_warning() -> None:
    """90 million, of one bit each, so that the file is small and the test is quick."""
    height, width = 9_000, 10_000
    row = b"\0" + bytes([0xAA]) * (width // 8)
    data = png(height, width, row * height, colour=0, depth=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = open_picture(data)
    assert (picture.height, picture.width) == (height, width)
    assert picture.pixels[::999, :4, 1].tolist() == [[255, 0, 255, 0]] * 10


# -- without Pillow ----------------------------------------------------------------------------------------------------


def test_the_decoders_model_is_a_model() -> None:
    model = onnx.load_from_string(without_pillow.decoder_model())
    (node,) = model.graph.node
    assert (node.op_type, node.domain) == ("DecodeImage", "com.microsoft.extensions")
    assert model.SerializeToString() == without_pillow.decoder_model()


def test_png_without_pillow_is_pillows(without: None) -> None:
    alpha = open_picture(encoded(Image.fromarray(np.dstack([RGB, RGB[..., 1]])), "PNG"))
    np.testing.assert_array_equal(alpha.pixels, RGB)
    palette = IMAGE.quantize(16)
    turned_left = open_picture(encoded(palette, "PNG", exif=turned(8)))
    np.testing.assert_array_equal(turned_left.pixels, np.rot90(np.asarray(palette.convert("RGB"))))


def test_jpeg_without_pillow_is_near_pillows(without: None) -> None:
    """Within a level; where colour was stored at half the size, it is spread in another way: a few in smooth areas."""
    rows: list[tuple[Image.Image, dict[str, object], int]] = [
        (IMAGE, {"quality": 90, "subsampling": 2, "exif": turned(6)}, 5),
        (IMAGE, {"quality": 90, "subsampling": 0, "progressive": True}, 1),
        (IMAGE.convert("L"), {"exif": turned(3)}, 1),
    ]
    for image, options, levels in rows:
        data = encoded(image, "JPEG", **options)
        expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
        found = open_picture(data).pixels
        assert found.shape == expected.shape
        assert np.abs(found.astype(int) - expected).max() <= levels


@pytest.mark.parametrize("orientation", range(1, 9))
def test_headers_without_pillow(orientation: int) -> None:
    exif = turned(orientation)
    exif[0x010F] = "a maker whose name is no number"
    for kind in ("JPEG", "PNG"):
        header = without_pillow.read_header(encoded(IMAGE, kind, exif=exif), "it")
        assert header == without_pillow.Header(37, 53, 3, orientation)
    big_endian = b"MM\0*\0\0\0\x08\0\x01" + struct.pack(">HHIHH", ORIENTATION, 3, 1, orientation, 0)
    late = png(37, 53, more=chunk(b"eXIf", big_endian))
    assert without_pillow.read_header(late, "it").orientation == orientation


def test_what_is_not_read_without_pillow_is_one_line(without: None) -> None:
    jpeg = encoded(IMAGE, "JPEG", exif=turned(6))
    for data, message in (
        (encoded(IMAGE, "GIF"), r"expected a PNG or a JPEG; .*lesonnx\[vision\]"),
        (encoded(IMAGE.convert("CMYK"), "JPEG"), r"four colours; .*lesonnx\[vision\]"),
        (jpeg[:-100], "ends too early$"),
        (jpeg.replace(b"\xff\xdb", b"\xff\xe5"), "a broken picture$"),
        (encoded(IMAGE, "PNG")[:-60], "ends too early$"),
        (b"\xff\xd8\xff", "ends too early$"),
        (jpeg[:40], "ends too early$"),
        (encoded(IMAGE, "PNG")[:20], "ends too early$"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            open_picture(data)
        assert "\n" not in str(caught.value)


def test_without_a_process_that_decodes(without: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = encoded(IMAGE, "PNG")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(InputError, match=r"no process could be started .*: No such file or directory; .*\[vision\]"):
        open_picture(data)
    refuses = tmp_path / "refuses"
    refuses.write_text("#!/bin/sh\nexit 3\n")
    refuses.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(refuses))
    with pytest.raises(InputError, match=r"cannot be imported; .*\[vision\]"):
        open_picture(data)


def test_headers_of_broken_files_never_fail() -> None:
    draw = random.Random(6)
    for kind in ("JPEG", "PNG"):
        data = encoded(IMAGE, kind, exif=turned(6))
        for _ in range(2000):
            changed = bytearray(data[: draw.randint(3, len(data))])
            for _ in range(draw.randint(0, 6)):
                changed[draw.randrange(min(len(changed), 120))] = draw.randrange(256)
            failure(without_pillow.read_header, bytes(changed), "it")


def test_a_picture_shows_its_size() -> None:
    picture = Picture(RGB)
    assert (picture.height, picture.width) == (37, 53)
