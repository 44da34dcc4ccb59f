"""Cutting many items into batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def cut_batches(sizes: Sequence[int] | NDArray[np.int64], *, max_bytes: int, max_count: int) -> list[range]:
    """Consecutive runs of items of at most ``max_bytes`` and ``max_count``; an item that is larger than
    ``max_bytes`` goes alone."""
    ends = np.cumsum(sizes, dtype=np.int64)
    batches: list[range] = []
    first = before = 0
    while first < len(ends):
        fits = int(np.searchsorted(ends, before + max_bytes, side="right"))
        stop = max(min(fits, first + max_count), first + 1)
        batches.append(range(first, stop))
        first, before = stop, int(ends[stop - 1])
    return batches
