"""The rules of reachability as plain sets and loops: slow, and independent of the package's own masks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mooncake_sparse_client import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    KVCacheLayout,
    MambaSpec,
    SlidingWindowSpec,
)

Chunks = list[set[int]]


def alignment(layout: KVCacheLayout) -> int:
    """Least common multiple of the block sizes."""
    return math.lcm(*(spec.block_size for spec in layout.groups))


def down(layout: KVCacheLayout, tokens: int) -> int:
    """``tokens`` rounded down to a boundary, never below 0."""
    return max(tokens - tokens % alignment(layout), 0)


def has_draft(layout: KVCacheLayout) -> bool:
    """Whether any group has draft layers."""
    return any(spec.eagle for spec in layout.groups)


def is_sparse(spec: GroupSpec) -> bool:
    """Whether retention decides what the group keeps."""
    return isinstance(spec, SlidingWindowSpec | MambaSpec)


def needed(spec: GroupSpec, boundary: int, *, margin: bool = True) -> set[int]:
    """The chunks of one group that a hit at ``boundary`` needs."""
    if boundary <= 0:
        return set()
    size = spec.block_size
    end = boundary // size
    behind = {end} if margin and spec.eagle else set()
    match spec:
        case FullAttentionSpec():
            return set(range(end)) | behind
        case SlidingWindowSpec(sliding_window=window):
            count = math.ceil((window - 1) / size)
            return set(range(max(0, end - count), end)) | behind if count else set()
        case ChunkedLocalAttentionSpec(attention_chunk_size=run):
            return set(range(boundary // run * run // size, end))
        case MambaSpec():
            return {end - 1}


def retained(
    layout: KVCacheLayout, horizon: int, interval: int | None, prompt: int | None, positions: Iterable[int]
) -> set[int]:
    """Every retained boundary up to ``horizon`` tokens."""
    step = alignment(layout)
    period = step if interval is None else interval
    found = set(range(period, horizon + 1, period)) if period else set()
    draft = has_draft(layout)
    if prompt is not None:
        back = step if draft else 0
        found |= {down(layout, prompt - 1) - back, down(layout, prompt) - back}
    for position in positions:
        found.add(down(layout, position))
        if draft:
            found.add(down(layout, position) - step)
    return {boundary for boundary in found if boundary > 0}


def horizon_of(layout: KVCacheLayout, num_tokens: int, interval: int | None) -> int:
    """A position so far behind ``num_tokens`` that no boundary beyond it needs any chunk before."""
    widest = max(spec.window for spec in layout.groups)
    return num_tokens + widest + 3 * alignment(layout) + 2 * (interval or 0)


def chunks_to_store(
    layout: KVCacheLayout,
    num_tokens: int,
    *,
    start_token: int = 0,
    interval: int | None = None,
    prompt: int | None = None,
    positions: Iterable[int] = (),
) -> Chunks:
    """What the store mask must be, a set a group."""
    horizon = horizon_of(layout, num_tokens, interval)
    kept = retained(layout, horizon, interval, prompt, positions)
    multiples = range(alignment(layout), horizon + 1, alignment(layout))
    answer = []
    for spec in layout.groups:
        if isinstance(spec, FullAttentionSpec):
            chunks = set(range(num_tokens // spec.block_size))
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            chunks = set().union(*(needed(spec, boundary) for boundary in multiples))
        else:
            chunks = set().union(*(needed(spec, boundary) for boundary in kept))
        size = spec.block_size
        answer.append({chunk for chunk in chunks if chunk * size >= start_token and (chunk + 1) * size <= num_tokens})
    return answer


def is_usable(
    spec: GroupSpec, layout: KVCacheLayout, boundary: int, num_tokens: int, present: set[int], local: int
) -> bool:
    """Whether one group can resume at ``boundary``."""
    if boundary <= down(layout, local):
        return True
    size = spec.block_size
    return all(
        (chunk + 1) * size <= down(layout, local)
        or (chunk in present and (chunk + 1) * size <= down(layout, num_tokens))
        for chunk in needed(spec, boundary)
    )


def longest_hit(
    layout: KVCacheLayout,
    num_tokens: int,
    present: Sequence[set[int]],
    local: int = 0,
    groups: Iterable[int] | None = None,
) -> int:
    """The longest hit by a search over all boundaries, downwards; of some groups alone if they are named."""
    numbers = range(len(layout.groups)) if groups is None else list(groups)
    for boundary in range(down(layout, num_tokens - 1), 0, -alignment(layout)):
        if all(is_usable(layout.groups[n], layout, boundary, num_tokens, present[n], local) for n in numbers):
            return boundary
    return 0


def longest_loadable(
    layout: KVCacheLayout, num_tokens: int, present: Sequence[set[int]], loads: Sequence[set[int]], local: int
) -> int:
    """The longest hit whose chunks, draft margin aside and what the engine holds, are all among ``loads`` too."""

    def loadable(group: int, boundary: int) -> bool:
        size = layout.groups[group].block_size
        chunks = needed(layout.groups[group], boundary, margin=False)
        return all(chunk in loads[group] or (chunk + 1) * size <= local for chunk in chunks)

    for boundary in range(down(layout, num_tokens - 1), 0, -alignment(layout)):
        if all(
            boundary <= local
            or (is_usable(spec, layout, boundary, num_tokens, present[n], local) and loadable(n, boundary))
            for n, spec in enumerate(layout.groups)
        ):
            return boundary
    return 0
