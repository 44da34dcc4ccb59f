"""Replaying a trace on a client: look up, read what hits, check every byte, put the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..client import SparseStoreClient
from ..core.tally import NOTHING, Tally
from .trace import ChunkContent, Request


@dataclass(slots=True)
class ReplayCounts:
    """What a replay did so far."""

    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    #: A tally a group.
    written: list[Tally] = field(default_factory=list)
    existing: Tally = NOTHING
    unreachable: Tally = NOTHING
    failed: Tally = NOTHING
    read: Tally = NOTHING
    verified_bytes: int = 0
    wrong_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


async def replay(client: SparseStoreClient, requests: Iterable[Request]) -> ReplayCounts:
    """Serve each request as an engine would; every byte that comes back is compared with what it should be."""
    layout = client.layout
    content = ChunkContent(layout)
    counts = ReplayCounts(written=[NOTHING] * len(layout.groups))
    for request in requests:
        await _serve(client, request, content, counts)
    return counts


async def _serve(client: SparseStoreClient, request: Request, content: ChunkContent, counts: ReplayCounts) -> None:
    sequence = client.sequence(request.token_ids())
    hit = await client.lookup(sequence)
    got = await client.get(hit)
    for (group, chunk), found in got.chunks.items():
        _compare(found, content.of(request, group, chunk), counts)

    offered: list[int] = []

    def computed(group: int, chunk: int) -> memoryview:
        offered.append(group)
        return content.of(request, group, chunk)

    put = await client.put(sequence, computed, hit=hit)
    # What the store asked for it then has, but for the failures.
    for group in offered:
        counts.written[group] += Tally(1, client.layout.page_sizes[group])
    for failure in put.failures:
        counts.written[failure.group] += Tally(-1, -client.layout.page_sizes[failure.group])
    counts.requests += 1
    counts.tokens += request.num_tokens
    counts.hit_tokens += got.hit_length
    counts.read += got.loaded
    counts.existing += put.existing
    counts.unreachable += put.unreachable
    counts.failed += put.failed


def _compare(found: memoryview, wanted: memoryview, counts: ReplayCounts) -> None:
    counts.verified_bytes += wanted.nbytes
    if found != wanted:
        left, right = np.frombuffer(found, dtype=np.uint8), np.frombuffer(wanted, dtype=np.uint8)
        counts.wrong_bytes += int(np.count_nonzero(left != right))
