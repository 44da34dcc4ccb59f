"""Why a put keeps a chunk, or does not: a number for each chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from .layout import KVCacheLayout
from .masks import BoolArray, needed_chunks, periodic_mask

#: A ``Reason`` for each chunk of a group.
ReasonArray = NDArray[np.uint8]


class Reason(IntEnum):
    """Why a put keeps a chunk, or does not. Of several that keep it, the first in this order counts."""

    #: The chunk lies before ``start_token``: an earlier step's affair.
    OUTSIDE = 0
    #: No retained boundary needs it: never offered to the store.
    SKIPPED = 1
    #: Full and chunked local attention keep whatever some boundary needs, whatever the retention.
    DENSE = 2
    #: A boundary of the retention interval needs it.
    SEGMENT = 3
    #: A replay boundary of the prompt needs it: where a resend or an extension resumes.
    REPLAY = 4
    #: One of the caller's boundaries needs it.
    BOUNDARY = 5
    #: The junction that the request's own lookup showed needs it.
    JUNCTION = 6


def chunk_reasons(
    layout: KVCacheLayout,
    store_masks: Sequence[BoolArray],
    start_token: int,
    retention_interval: int | None,
    boundaries: Mapping[Reason, Sequence[int]],
) -> tuple[ReasonArray, ...]:
    """Why each chunk of ``store_masks`` is kept or not: one array of ``Reason`` a group.

    ``boundaries``: those that are retained besides the interval's, as they are retained, by the reason in the order
    in which it counts. Whatever is kept must be kept for the interval or one of them.
    """
    answer = []
    for spec, kept in zip(layout.groups, store_masks, strict=True):
        reasons = np.full(len(kept), Reason.SKIPPED, dtype=np.uint8)
        reasons[: start_token // spec.block_size] = Reason.OUTSIDE
        periodic = periodic_mask(layout, spec, len(kept), retention_interval)
        reasons[kept & periodic] = Reason.DENSE if spec.dense else Reason.SEGMENT
        for reason, positions in boundaries.items():
            for position in positions:
                needed = needed_chunks(spec, position)
                part = reasons[needed.start : needed.stop]
                part[kept[needed.start : needed.stop] & (part == Reason.SKIPPED)] = reason
        answer.append(reasons)
    return tuple(answer)
