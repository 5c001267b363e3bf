"""The largest crop that a picture can lead to, which is what memory is asked for.

It follows the rule of fitting in docs/bundle.md, Vision.
"""

from __future__ import annotations

# Pictures longer than that lead to larger crops yet: one side cannot shrink below one image token.
LONGEST_ASPECT = 100


def largest_patches(scale_resolution: int, patch_size: int, token_patches: int) -> int:
    """The patches of the largest crop of any picture whose longer side is at most ``LONGEST_ASPECT`` shorter ones."""
    unit = patch_size * token_patches

    def tokens(side: int) -> int:
        return max(round(side / unit), 1)

    area = scale_resolution**2
    # A fitted crop has a shorter side of some pixels before rounding, and at most area / shorter the other way.
    least = max(1, int(scale_resolution / LONGEST_ASPECT**0.5))
    most = max(tokens(shorter) * tokens(area // shorter) for shorter in range(least, scale_resolution + 1))
    return most * token_patches**2
