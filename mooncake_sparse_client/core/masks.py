"""Which chunks a boundary needs, which chunks to store, which chunks to load.

A hit at ``T`` tokens (a positive multiple of the alignment) needs of a group with block size ``b``:

=====================  ====================================  ==============================
spec                   chunks                                with the draft margin
=====================  ====================================  ==============================
full                   ``[0, T/b)``                          ``[0, T/b + 1)``
sliding window ``w``   ``[max(0, T/b - n), T/b)``            ``[max(0, T/b - n), T/b + 1)``
chunked local ``c``    ``[floor(T/c)*c/b, T/b)``             not allowed
recurrent              ``T/b - 1`` alone                     the same
=====================  ====================================  ==============================

with ``n = ceil((w-1)/b)``; a window of 1 needs nothing, margin or not. A chunk is worth storing when a
boundary that is retained needs it. The idea, and the meaning of the retention interval, are those of vLLM's
reachable-block mask; the recurrent states, the extension boundary of a block-aligned prompt and the start of
a draft window differ from vLLM 0.32.0 on purpose (see ``docs/concepts.md``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..checks import items_of, whole_number
from ..errors import InvalidRequestError, InvalidRetentionError
from .layout import ChunkedLocalAttentionSpec, FullAttentionSpec, GroupSpec, KVCacheLayout, MambaSpec

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
#: One number, or many.
Tokens = TypeVar("Tokens", int, IntArray)


def needed_ranges(spec: GroupSpec, boundaries: Tokens, *, margin: bool = True) -> tuple[Tokens, Tokens]:
    """First needed chunk and one past the last, for each of ``boundaries`` (tokens, positive, aligned), or for one.

    ``margin``: with the draft margin where the spec has one; loads go without.
    """
    ends = boundaries // spec.block_size
    extra = 1 if margin and spec.eagle else 0
    if isinstance(spec, FullAttentionSpec):
        return ends * 0, ends + extra
    if isinstance(spec, ChunkedLocalAttentionSpec):
        size = spec.attention_chunk_size
        return boundaries // size * size // spec.block_size, ends
    if isinstance(spec, MambaSpec):
        return ends - 1, ends
    window = spec.window_chunks
    if window == 0:
        return ends, ends
    return (ends - window) * (ends > window), ends + extra


def needed_chunks(spec: GroupSpec, hit_length: int, *, margin: bool = True) -> range:
    """The chunks of one group that a hit of ``hit_length`` tokens needs; none at 0."""
    return range(*needed_ranges(spec, hit_length, margin=margin)) if hit_length else range(0)


def check_retention_interval(layout: KVCacheLayout, retention_interval: int | None) -> int | None:
    """The interval in tokens if it is None (keep every boundary), 0 (none) or a positive multiple of the
    alignment; else ``InvalidRetentionError``."""
    if retention_interval is None:
        return None
    interval = whole_number(retention_interval, "retention_interval", InvalidRetentionError)
    if interval % layout.alignment:
        raise InvalidRetentionError(
            f"retention_interval must be None, 0 or a positive multiple of the alignment "
            f"{layout.alignment}, not {interval}"
        )
    return interval


def retained_boundaries(
    layout: KVCacheLayout, num_prompt_tokens: int | None, boundaries: Iterable[int]
) -> tuple[int, ...]:
    """The boundaries kept besides the interval's: the replay boundaries of a prompt and the caller's.

    Positive multiples of the alignment, ascending. With draft layers a resume steps one alignment back, since
    prompts that part at a position share no margin chunk behind it.
    """
    step = layout.alignment if layout.use_eagle else 0
    found: set[int] = set()
    if num_prompt_tokens is not None:
        prompt = token_count(num_prompt_tokens, "num_prompt_tokens")
        found |= {layout.align(prompt - 1) - step, layout.align(prompt) - step}
    for position in items_of(boundaries, "boundaries", InvalidRequestError):
        boundary = layout.align(token_count(position, "boundaries"))
        found |= {boundary, boundary - step}
    return tuple(sorted(boundary for boundary in found if boundary > 0))


def store_mask(
    layout: KVCacheLayout,
    num_tokens: int,
    *,
    start_token: int = 0,
    retention_interval: int | None = None,
    num_prompt_tokens: int | None = None,
    boundaries: Iterable[int] = (),
) -> tuple[BoolArray, ...]:
    """The chunks to keep of the first ``num_tokens`` tokens (a multiple of the alignment).

    Returns one boolean array a group, ``num_tokens // block_size`` long, indexed by absolute chunk. Chunks
    that start before ``start_token`` are False. ``retention_interval`` in tokens: None keeps the windows of
    every boundary, 0 those of ``num_prompt_tokens``'s replay boundaries and of ``boundaries`` alone.

    Raises ``InvalidRequestError`` for impossible counts, ``InvalidRetentionError`` for the interval.
    """
    interval = check_retention_interval(layout, retention_interval)
    total = token_count(num_tokens, "num_tokens")
    if total % layout.alignment:
        raise InvalidRequestError(f"num_tokens must be a multiple of the alignment {layout.alignment}, not {total}")
    first_token = token_count(start_token, "start_token")
    return kept_chunks(layout, first_token, total, interval, retained_boundaries(layout, num_prompt_tokens, boundaries))


def kept_chunks(
    layout: KVCacheLayout, first_token: int, total: int, interval: int | None, retained: Iterable[int]
) -> tuple[BoolArray, ...]:
    """``store_mask`` of tokens ``[first_token, total)``, for boundaries as they are retained; all of it checked."""
    singles = np.array(list(retained), dtype=np.int64)
    masks = []
    for spec in layout.groups:
        mask = periodic_mask(layout, spec, total // spec.block_size, interval)
        if not spec.dense:
            starts, stops = needed_ranges(spec, singles)
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                mask[start:stop] = True
        mask[: -(-first_token // spec.block_size)] = False
        masks.append(mask)
    return tuple(masks)


def periodic_mask(layout: KVCacheLayout, spec: GroupSpec, count: int, interval: int | None) -> BoolArray:
    """The first ``count`` chunks of a group that the interval's boundaries need, which go on without an upper
    end. ``interval`` in tokens, checked; None: every multiple of the alignment."""
    if isinstance(spec, FullAttentionSpec):
        return np.ones(count, dtype=np.bool_)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return _chunked_mask(layout, spec, count)
    below = 1 if isinstance(spec, MambaSpec) else spec.window_chunks
    if interval == 0 or below == 0:
        return np.zeros(count, dtype=np.bool_)
    period = (layout.alignment if interval is None else interval) // spec.block_size
    if below >= period:  # each window reaches back to the boundary before
        return np.ones(count, dtype=np.bool_)
    mask = np.zeros(count, dtype=np.bool_)
    # From the first window on, since boundary 0 has none, every period starts with a window and its margin.
    windows = mask[period - below :]
    whole = len(windows) // period * period
    for part in (windows[:whole].reshape(-1, period), windows[whole:]):
        part[..., : below + int(spec.eagle)] = True
    return mask


def _chunked_mask(layout: KVCacheLayout, spec: ChunkedLocalAttentionSpec, count: int) -> BoolArray:
    """The first ``count`` chunks of a chunked local group that multiples of the alignment need."""
    size, run, alignment = spec.block_size, spec.attention_chunk_size, layout.alignment
    # Runs and boundaries fall together again after their least common multiple.
    period = min(math.lcm(run, alignment) // size, count)
    chunks = np.arange(period, dtype=np.int64)
    # If any boundary needs a chunk, the first aligned one at or behind its end does.
    first = -(-(chunks + 1) * size // alignment) * alignment
    needed = np.equal(first // run, chunks * size // run)
    return np.tile(needed, -(-count // max(period, 1)))[:count]


def load_mask(layout: KVCacheLayout, hit_length: int, *, local_tokens: int = 0) -> tuple[BoolArray, ...]:
    """The chunks to read for a hit of ``hit_length`` tokens (a multiple of the alignment).

    One boolean array a group, ``hit_length // block_size`` long: the needed chunks without the draft margin,
    less those that end at or below ``local_tokens`` (rounded down to the alignment), which the engine holds.
    """
    hit = token_count(hit_length, "hit_length")
    if hit % layout.alignment:
        raise InvalidRequestError(f"hit_length must be a multiple of the alignment {layout.alignment}, not {hit}")
    local = layout.align(token_count(local_tokens, "local_tokens"))
    masks = []
    for spec in layout.groups:
        mask = np.zeros(hit // spec.block_size, dtype=np.bool_)
        needed = needed_chunks(spec, hit, margin=False)
        mask[max(needed.start, local // spec.block_size) : needed.stop] = True
        masks.append(mask)
    return tuple(masks)


def read_only(masks: Iterable[BoolArray]) -> tuple[BoolArray, ...]:
    """The same arrays, closed to writing: plans and hits are values."""
    closed = tuple(masks)
    for mask in closed:
        mask.flags.writeable = False
    return closed


def token_count(value: int, name: str) -> int:
    """``value`` as a plain int that is not negative; ``InvalidRequestError`` names ``name``."""
    return whole_number(value, name, InvalidRequestError)
