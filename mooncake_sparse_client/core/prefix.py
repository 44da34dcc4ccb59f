"""The longest prefix that every group can resume from, and which group kept it short.

A boundary ``T`` is usable when every chunk that any group needs there, draft margin included, is present.
A request of ``N`` tokens may hit at most ``floor((N-1)/A)*A``, and no chunk that ends after ``floor(N/A)*A``
is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidRequestError
from .layout import KVCacheLayout
from .masks import BoolArray, IntArray, needed_ranges, token_count


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """What a store holds of one request, in tokens."""

    #: The longest prefix that all groups can resume from.
    hit_length: int
    #: The longest that the dense groups (full, chunked local) alone could; ``hit_length`` if there are none.
    shared_length: int
    #: The longest that each group alone could, as far as it was asked: nothing that was seen to be missing rules it
    #: out. A sparse group is asked for the chunks of few boundaries only.
    group_lengths: tuple[int, ...]
    #: How far each group was asked: no group is asked beyond what the groups before it allow.
    asked_lengths: tuple[int, ...]
    #: The groups that held the hit back: what was seen to be missing there rules out the boundary after the hit.
    #: Empty when the hit is as long as it may be, or when no group was asked for more.
    limited_by: tuple[int, ...]
    #: The longest hit that the request may have at all.
    cap: int


def longest_usable_prefix(
    layout: KVCacheLayout, num_tokens: int, present: Sequence[BoolArray], *, local_tokens: int = 0
) -> int:
    """The hit length, in tokens, for a request of ``num_tokens`` whose chunks ``present`` exist.

    ``present``: one boolean array a group, indexed by absolute chunk; what lies beyond an array's end is
    absent. ``local_tokens``: a prefix that the engine holds itself; the hit is never below it (rounded down
    to the alignment), nor above the cap. 0 when nothing is usable.
    """
    return explain_prefix(layout, num_tokens, present, local_tokens=local_tokens).hit_length


def explain_prefix(
    layout: KVCacheLayout,
    num_tokens: int,
    present: Sequence[BoolArray],
    *,
    local_tokens: int = 0,
    asked: Sequence[BoolArray] | None = None,
    asked_lengths: Sequence[int] | None = None,
) -> PrefixReport:
    """Like ``longest_usable_prefix``, with the reasons.

    ``asked``: the chunks that were looked up, arrays like ``present``; default: all. What was not is neither there
    nor missing. ``asked_lengths``: how far each group was looked up, in tokens; default: as far as the request may hit.

    Raises ``InvalidRequestError`` for counts or arrays that cannot be.
    """
    num_tokens = token_count(num_tokens, "num_tokens")
    boundaries, cap = candidate_boundaries(layout, num_tokens), layout.hit_cap(num_tokens)
    usable = usable_boundaries(layout, num_tokens, present, local_tokens=local_tokens)
    possible = usable
    for name, given in (("asked", asked), ("asked_lengths", asked_lengths)):
        if given is not None and len(given) != len(layout.groups):
            raise InvalidRequestError(f"{name} must have one entry a group: {len(layout.groups)}, not {len(given)}")
    if asked is not None:
        may_be = [_or_unasked(there, known) for there, known in zip(present, asked, strict=True)]
        possible = usable_boundaries(layout, num_tokens, may_be, local_tokens=local_tokens)
    wanted = (cap,) * len(layout.groups) if asked_lengths is None else tuple(min(most, cap) for most in asked_lengths)
    lengths = tuple(
        longest(boundaries, (row & (boundaries <= most))[None]) for row, most in zip(possible, wanted, strict=True)
    )
    hit, dense = longest(boundaries, usable), [number for number, spec in enumerate(layout.groups) if spec.dense]
    return PrefixReport(
        hit_length=hit,
        shared_length=longest(boundaries, usable[dense]) if dense else hit,
        group_lengths=lengths,
        asked_lengths=wanted,
        limited_by=tuple(
            number
            for number, (row, most) in enumerate(zip(possible, wanted, strict=True))
            if most > hit and not row[hit // layout.alignment]
        ),
        cap=cap,
    )


def _or_unasked(present: BoolArray, asked: BoolArray) -> BoolArray:
    return np.asarray(present) | ~np.asarray(asked)


def candidate_boundaries(layout: KVCacheLayout, num_tokens: int) -> IntArray:
    """Every hit length that a request of ``num_tokens`` may have, 0 aside, ascending."""
    return np.arange(layout.alignment, layout.hit_cap(num_tokens) + 1, layout.alignment, dtype=np.int64)


def longest(boundaries: IntArray, usable: BoolArray) -> int:
    """The last of ``boundaries`` that is usable in every row of ``usable``, else 0."""
    hits = boundaries[np.logical_and.reduce(usable, axis=0)]
    return int(hits[-1]) if len(hits) else 0


def longest_without(layout: KVCacheLayout, boundary: int, lost: Iterable[tuple[int, int]]) -> int:
    """The longest boundary at or below ``boundary`` (tokens) that needs none of the ``lost`` ``(group, chunk)``, the
    draft margin counted; 0 if all need some.

    Of what ``boundary`` needs, a shorter one needs just those chunks that end at or below it: the rest is of no use to
    any of them.
    """
    boundaries = np.arange(layout.alignment, boundary + 1, layout.alignment, dtype=np.int64)
    possible = np.ones(len(boundaries), dtype=np.bool_)
    chunks: dict[int, list[int]] = {}
    for group, chunk in lost:
        chunks.setdefault(group, []).append(chunk)
    for group, missing in chunks.items():
        missing.sort()
        starts, stops = needed_ranges(layout.groups[group], boundaries)
        possible &= np.searchsorted(missing, starts) == np.searchsorted(missing, stops)
    return longest(boundaries, possible[None])


def longest_arrived_prefix(
    layout: KVCacheLayout,
    num_tokens: int,
    present: Sequence[BoolArray],
    arrived: Sequence[BoolArray],
    *,
    local_tokens: int,
) -> int:
    """The longest usable prefix whose load mask has wholly arrived, else what the engine holds itself."""
    usable = usable_boundaries(layout, num_tokens, present, local_tokens=local_tokens)
    loaded = usable_boundaries(layout, num_tokens, arrived, local_tokens=local_tokens, margin=False)
    return longest(candidate_boundaries(layout, num_tokens), usable & loaded)


def usable_boundaries(
    layout: KVCacheLayout,
    num_tokens: int,
    present: Sequence[BoolArray],
    *,
    local_tokens: int = 0,
    margin: bool = True,
) -> BoolArray:
    """Shape ``(groups, candidate boundaries)``: whether the group has all that it needs there.

    ``margin``: whether the draft margin's chunk must be present as well.
    """
    if len(present) != len(layout.groups):
        raise InvalidRequestError(
            f"present must be one boolean array a group: the layout has {len(layout.groups)}, not {len(present)}"
        )
    boundaries = candidate_boundaries(layout, num_tokens)
    local = layout.align(token_count(local_tokens, "local_tokens"))
    usable = np.zeros((len(layout.groups), len(boundaries)), dtype=np.bool_)
    for number, spec in enumerate(layout.groups):
        limit = layout.align(num_tokens) // spec.block_size
        before = _present_before(present[number], limit, local // spec.block_size)
        starts, stops = needed_ranges(spec, boundaries, margin=margin)
        # A margin chunk behind the limit is counted as needed and never as present.
        usable[number] = before[np.minimum(stops, limit)] - before[starts] == stops - starts
    usable[:, boundaries <= local] = True
    return usable


def _present_before(present: BoolArray, limit: int, local: int) -> IntArray:
    """How many of the chunks before each index are present; the first ``local`` are held by the engine."""
    known = np.asarray(present)
    if known.ndim != 1 or (known.size and known.dtype != np.bool_):
        raise InvalidRequestError(
            f"present must be flat boolean arrays, one a group, not {known.ndim} dimension(s) of {known.dtype}"
        )
    row = np.zeros(limit, dtype=np.bool_)
    known = known[:limit]
    row[: len(known)] = known
    row[:local] = True
    counts = np.zeros(limit + 1, dtype=np.int64)
    np.cumsum(row, out=counts[1:])
    return counts
