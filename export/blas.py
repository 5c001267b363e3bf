"""Matrix products on one thread: experts are many and small, and a sum over several threads may round otherwise.

It knows NumPy's libraries alone.
"""

from __future__ import annotations

from typing import Any

from threadpoolctl import threadpool_limits


def on_one_thread() -> Any:
    """From here on products run on one thread; as a context, until its end. Holds for the whole process."""
    return threadpool_limits(limits=1, user_api="blas")
