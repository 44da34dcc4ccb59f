"""Carrying out a get: read, check, and shorten the prefix until what is left has wholly arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from ..core.masks import BoolArray, load_mask
from ..core.plans import PrefixHit, longest_arrived_prefix, no_presence
from ..core.results import ChunkFailure, GetResult
from ..core.tally import Tally
from ..stores.base import Failure
from .movers import GetMover
from .transfer import Numbers, Transport, chosen, listed, runs_of

_ROUNDS = 3
#: The chunks that a sink has room for, one boolean array a group; None for all.
Room: TypeAlias = "Callable[[], tuple[BoolArray, ...] | None]"


class Search(Protocol):
    """What is believed to be in the store of one hit; goes on looking where chunks turn out to be gone."""

    @property
    def present(self) -> tuple[BoolArray, ...]: ...

    async def hit_length(self, room: Room) -> int: ...

    async def without(self, lost: Iterable[tuple[int, int]], room: Room) -> int: ...

    def lose(self, lost: Iterable[tuple[int, int]]) -> None: ...


@dataclass(slots=True)
class _Progress:
    """What one get knows so far."""

    #: One boolean array a group.
    arrived: tuple[BoolArray, ...]
    failures: list[ChunkFailure] = field(default_factory=list)


class Reader:
    """Reads the chunks of hits through one client's transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._identity = transport.identity

    async def get(self, hit: PrefixHit, search: Search, mover: GetMover) -> GetResult:
        """Read what ``hit`` needs. A chunk that does not arrive counts as absent, the longest prefix below is
        searched for, and what that one lacks is read, for a few rounds."""
        progress = _Progress(no_presence(hit.layout, hit.num_tokens))
        length = await search.hit_length(mover.room)
        for _ in range(_ROUNDS - 1):
            masks = _load_masks(hit, length)
            lost = await self._read(hit, masks, mover, progress)
            if not lost:
                return self._result(length, masks, progress, mover)
            length = await search.without(lost, mover.room)
        search.lose(await self._read(hit, _load_masks(hit, length), mover, progress))
        length = longest_arrived_prefix(
            hit.layout, hit.num_tokens, search.present, progress.arrived, local_tokens=hit.local_tokens
        )
        return self._result(length, _load_masks(hit, length), progress, mover)

    def nothing(self, hit: PrefixHit, reason: str) -> GetResult:
        """The answer of a store that cannot be reached, for those who count it as a miss."""
        failures = tuple(ChunkFailure(group, chunk, reason) for group, chunk in listed(hit.load_masks))
        return GetResult(hit.local_tokens, failures)

    async def _read(
        self, hit: PrefixHit, masks: Sequence[BoolArray], mover: GetMover, progress: _Progress
    ) -> list[tuple[int, int]]:
        """Read what has not arrived of ``masks``; which ``(group, chunk)`` did not. What may come later is tried once
        more."""
        mover.aim(masks)
        missing = [mask & ~arrived[: len(mask)] for mask, arrived in zip(masks, progress.arrived, strict=True)]
        groups, chunks = chosen(missing)
        late = await self._read_batches(hit, groups, chunks, mover)
        again = np.array(sorted(number for number, _, failure in late if failure.retriable), dtype=np.intp)
        lost = [loss for loss in late if not loss.failure.retriable]
        if len(again):
            still_late = await self._read_batches(hit, groups[again], chunks[again], mover)
            lost += [_Loss(int(again[number]), key, failure) for number, key, failure in still_late]
        self._note_arrived(groups, chunks, lost, progress)
        return [(int(groups[loss.number]), int(chunks[loss.number])) for loss in lost]

    async def _read_batches(self, hit: PrefixHit, groups: Numbers, chunks: Numbers, mover: GetMover) -> list[_Loss]:
        losses: list[_Loss] = []

        async def move(batch: slice) -> None:
            # Named a batch at a time, so that a long hit costs no more memory than a short one.
            jobs = self._transport.jobs(hit.block_hashes, groups[batch], chunks[batch])
            answers = await mover.get(jobs)
            if any(answers):
                for number, failure in enumerate(answers):
                    if failure is not None:
                        losses.append(_Loss(batch.start + number, jobs.keys[number], failure))

        await self._transport.each_batch(groups, mover.pieces, move)
        return losses

    def _note_arrived(self, groups: Numbers, chunks: Numbers, lost: Sequence[_Loss], progress: _Progress) -> None:
        came = np.ones(len(groups), dtype=np.bool_)
        came[[loss.number for loss in lost]] = False
        for group, run in runs_of(groups):
            progress.arrived[group][chunks[run][came[run]]] = True
        for number, key, failure in lost:
            progress.failures.append(ChunkFailure(int(groups[number]), int(chunks[number]), failure.kind))
            # Under keys that others write too, they may mend it.
            if failure.kind in _DAMAGE and self._identity.owns_namespace:
                self._transport.ledger.mark_damaged(key)
            else:
                self._transport.ledger.mark_lost(key)

    def _result(self, length: int, masks: Sequence[BoolArray], progress: _Progress, mover: GetMover) -> GetResult:
        counts = list(map(np.count_nonzero, masks))
        nbytes = sum(count * size for count, size in zip(counts, self._identity.page_sizes, strict=True))
        loaded = Tally(int(sum(counts)), int(nbytes))
        chunks = {where: mover.chunks[where] for where in listed(masks)} if mover.chunks else {}
        return GetResult(length, tuple(progress.failures), chunks, loaded)


def _load_masks(hit: PrefixHit, length: int) -> tuple[BoolArray, ...]:
    if length == hit.hit_length:
        return hit.load_masks
    return load_mask(hit.layout, length, local_tokens=hit.local_tokens)


class _Loss(NamedTuple):
    """A chunk that did not arrive: which of those that were to be read, and why."""

    number: int
    key: str
    failure: Failure


#: What a reader finds wrong with bytes that did arrive, or with their number.
_DAMAGE = frozenset({"header", "version", "fingerprint", "group", "length", "name", "checksum"})
