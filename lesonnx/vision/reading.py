"""What reading pictures takes in memory, from their sizes alone: no file, no session.

Whoever runs a bundle asks its experts for that much; whoever plans one shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lesonnx.manifest import AnyVision
from lesonnx.vision.cutting import View
from lesonnx.vision.rules import working_bytes

# What a pixel takes at most while it is decoded (10 to 14 were measured for JPEG and PNG, 19.5 for JPEG 2000), and
# while it is prepared: its own three bytes, and 4.2.
DECODING_BYTES = 20
PREPARING_BYTES = 8
# What sessions take beside their weights' own bytes, while they open and later: for towers of 150 MB to 1 GB, in 4, 8
# and 32 bits, 15 % to 38 % more were measured.
SESSION_SHARE = 1 / 3
SESSION_BYTES = 16 << 20
FLOAT32_BYTES = 4


class Sized(NamedTuple):
    """A picture's size, and how it is cut."""

    height: int
    width: int
    views: Sequence[View]


def bytes_to_read(pictures: Sequence[Sized], vision: AnyVision, weights_bytes: int, hidden_size: int) -> int:
    """What reading pictures takes at most: all their crops and features, and first one picture, then the tower."""
    views = [view for picture in pictures for view in picture.views]
    pixels = max(picture.height * picture.width for picture in pictures) * max(DECODING_BYTES, PREPARING_BYTES)
    working = max(working_bytes(view, vision) for view in views)
    tower = weights_bytes + int(weights_bytes * SESSION_SHARE) + SESSION_BYTES + working
    # While one picture is prepared, its crops are there twice.
    crops = [view.size[0] * view.size[1] * 3 * FLOAT32_BYTES for view in views]
    return sum(crops) + bytes_of_features(views, vision, hidden_size) + max(pixels + max(crops), tower)


def bytes_of_features(views: Sequence[View], vision: AnyVision, hidden_size: int) -> int:
    """What the features of a picture's views take."""
    num_tokens = sum(view.num_tokens(vision) for view in views)
    return num_tokens * (1 + vision.deepstack_layers) * hidden_size * FLOAT32_BYTES
