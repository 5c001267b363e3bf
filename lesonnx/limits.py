"""How many threads may compute and how many may read: the bounds that options and the Python API share."""

from __future__ import annotations

MAX_THREADS = 256
MAX_LOADERS = 64
# Reads under way at once.
DEFAULT_LOADERS = 4
