"""How a picture is cut: the sizes that it is resized to, and the grids of crops; pure arithmetic on sizes.

It knows neither pixels nor prompts. Every runtime has the same functions, held to these by ``tests/data/vision.json``.
All of it is float64, each operation rounded once as IEEE 754 says, in the order that is written here; ``round`` goes to
the nearest integer, ties to even. Only the logarithms are a library's: docs/vision.md says what that asks of a host.
Heights come before widths, rows before columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lesonnx.errors import InputError
from lesonnx.manifest import AnyVision, Vision

Size = tuple[int, int]


@dataclass(frozen=True)
class View:
    """A picture as a whole, once: resized to ``size`` [height, width] pixels, cut in ``grid`` [rows, columns] crops."""

    size: Size
    grid: Size

    @property
    def num_crops(self) -> int:
        """Crops of the grid."""
        return self.grid[0] * self.grid[1]

    @property
    def crop_size(self) -> Size:
        """Height and width of each crop, in pixels."""
        return self.size[0] // self.grid[0], self.size[1] // self.grid[1]

    def crop_patches(self, vision: AnyVision) -> Size:
        """Rows and columns of patches of each crop: the tower's ``target_size``."""
        return self.crop_size[0] // vision.patch_size, self.crop_size[1] // vision.patch_size

    def crop_tokens(self, vision: AnyVision) -> Size:
        """Rows and columns of image tokens of each crop."""
        rows, columns = self.crop_patches(vision)
        return rows // vision.token_patches, columns // vision.token_patches

    def num_tokens(self, vision: AnyVision) -> int:
        """Image tokens of all crops."""
        rows, columns = self.crop_tokens(vision)
        return self.num_crops * rows * columns


def max_crop_tokens(vision: Vision) -> int:
    """Image tokens of the largest crop that `views` gives: twice those of a square one.

    Sides are never less than a token, so a crop grows without bound as a picture gets narrower; this bounds what the
    tower needs of memory. With 448 pixels a square crop has 64 tokens, and pictures up to about 256:1 pass.
    """
    return 2 * math.ceil(vision.scale_resolution / _unit(vision)) ** 2


def views(height: int, width: int, vision: Vision) -> list[View]:
    """How a picture of ``height`` x ``width`` pixels is seen: as a whole, its overview, and if it is large in slices.

    One or two views. InputError for a picture without pixels, and for one so narrow that a crop would have more than
    `max_crop_tokens`.
    """
    if height < 1 or width < 1:
        raise InputError(f"a picture has at least one pixel, found {width} x {height}")
    found = cut(height, width, vision)
    most = max_crop_tokens(vision)
    for view in found:
        rows, columns = view.crop_tokens(vision)
        if rows * columns > most:
            raise InputError(
                f"a picture of {width} x {height} pixels is too narrow: a crop of it would have {columns} x {rows} "
                f"image tokens, expected at most {most}"
            )
    return found


def cut(height: int, width: int, vision: Vision) -> list[View]:
    """`views` without its bound: what the model's own processor does with any size."""
    grid = _grid(height, width, vision)
    if grid is None:
        return [View(_fitted(height, width, vision, forced=True), (1, 1))]
    rows, columns = grid
    cell = max(round(height / rows), 1), max(round(width / columns), 1)
    cell_height, cell_width = _fitted(*cell, vision, forced=True)
    overview = View(_fitted(height, width, vision, forced=False), (1, 1))
    return [overview, View((rows * cell_height, columns * cell_width), grid)]


def _grid(height: int, width: int, vision: Vision) -> Size | None:
    """Rows and columns of slices; None where there are none."""
    multiple = min(math.ceil(width * height / vision.scale_resolution**2), vision.max_slice_nums)
    if multiple <= 1:
        return None
    log_ratio = math.log(width / height)
    best, least = (1, 1), math.inf
    for num_slices in (multiple - 1, multiple, multiple + 1):
        if num_slices == 1 or num_slices > vision.max_slice_nums:
            continue
        for rows in range(1, num_slices + 1):
            if num_slices % rows == 0:
                columns = num_slices // rows
                error = abs(log_ratio - math.log(columns / rows))
                if error < least or (error == least and rows > best[0]):
                    best, least = (rows, columns), error
    return best


def _fitted(height: int, width: int, vision: Vision, *, forced: bool) -> Size:
    """A size near ``scale_resolution`` squared pixels where there are more (or where forced), of whole image tokens."""
    if forced or height * width > vision.scale_resolution**2:
        ratio = width / height
        height = math.floor(vision.scale_resolution / math.sqrt(ratio))
        width = math.floor(height * ratio)
    unit = _unit(vision)
    return max(round(height / unit) * unit, unit), max(round(width / unit) * unit, unit)


def _unit(vision: Vision) -> int:
    """Pixels of an image token, a side."""
    return vision.token_patches * vision.patch_size
