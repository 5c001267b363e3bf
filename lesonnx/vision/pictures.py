"""Pictures as pixels: a file, bytes, a Pillow image or an array becomes upright 8-bit RGB.

It knows nothing of models.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Picture:
    """Upright RGB pixels, uint8 [Y, X, 3]. Not to be changed; safe to share between threads."""

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
        digest.update(np.ascontiguousarray(self.pixels))
        return digest.hexdigest()
