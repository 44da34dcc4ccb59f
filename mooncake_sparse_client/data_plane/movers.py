"""Movers: how one batch of chunks gets from the caller's memory to the store, or back.

``DirectMover``: paged memory that the store knows; bytes move without a copy of ours, and only the headers of
framed values lie in a staging slot. ``StagedMover``: everything else; values are copied through a slot, on a
thread.

Each answers one entry a chunk: None for one that is stored or has arrived, else why not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..core.masks import BoolArray
from ..paged import PagedKVCache
from ..stores.base import Failure, PlacedGets, PlacedPuts
from .checking import Views, checked, checksums, framed
from .ends import End, PagedEnd, PagedSide
from .lane import Answers
from .ledger import members
from .staged import StagedBatch
from .staging import Slot
from .transfer import Jobs, Numbers, Transport

#: The answer for a chunk that the source has no bytes for.
ABSENT = Failure("absent", False, "the source has no bytes for it")


class PutOnly(Protocol):
    async def put(self, jobs: Jobs, replace: frozenset[str]) -> Answers: ...


class PutMover(PutOnly, Protocol):
    """Writes batches from one source."""

    @property
    def pieces(self) -> int:
        """The most pieces that a value has."""

    def check(self, masks: Sequence[BoolArray]) -> None:
        """Raises ``InvalidBufferError`` if the source can never be asked for these chunks."""


class GetMover(Protocol):
    """Reads batches into one sink."""

    @property
    def pieces(self) -> int: ...

    @property
    def chunks(self) -> dict[tuple[int, int], memoryview]:
        """What was read where there is no sink."""

    def aim(self, masks: Sequence[BoolArray]) -> None:
        """The chunks that are wanted now. Raises ``InvalidBufferError`` if the sink cannot take them."""

    def room(self) -> tuple[BoolArray, ...] | None:
        """The chunks that the sink has room for, one boolean array a group; None if it does not say."""

    async def get(self, jobs: Jobs) -> Answers: ...


class DirectMover(PagedSide):
    """To and from registered paged memory."""

    def __init__(self, transport: Transport, cache: PagedKVCache, pieces: int) -> None:
        super().__init__(cache)
        self._transport = transport
        self._format = transport.identity.value_format
        self.pieces = pieces

    async def put(self, jobs: Jobs, replace: frozenset[str]) -> Answers:
        there = self.has(jobs)
        replaced = there & members(jobs.keys, replace)
        if self.pieces > 1 and replaced.any():
            answers: Answers = [ABSENT] * len(jobs)
            await self._fill_in(answers, jobs, there & ~replaced, self)
            # The store replaces values in one piece: by way of a slot, which they have then.
            stager = _Refusing() if self._cache.on_device else StagedMover(self._transport, PagedEnd(self._cache))
            await self._fill_in(answers, jobs, replaced, stager, replace)
            return answers
        if there.all():
            return await self._put(jobs, replace)
        answers = [ABSENT] * len(jobs)
        await self._fill_in(answers, jobs, there, self, replace)
        return answers

    async def _fill_in(
        self,
        answers: Answers,
        jobs: Jobs,
        which: BoolArray,
        mover: PutOnly,
        replace: frozenset[str] = frozenset(),
    ) -> None:
        """Put some of the jobs by a mover, and set their answers."""
        numbers = np.flatnonzero(which)
        if len(numbers):
            _place(answers, numbers, await mover.put(jobs.pick(numbers), replace))

    async def _put(self, jobs: Jobs, replace: frozenset[str]) -> Answers:
        lane, replace = self._transport.lane, replace.intersection(jobs.keys)
        if not self._format.header_size:
            return await lane.carry(PlacedPuts(*self._columns(jobs, None), replace))
        async with self._transport.staging.slot(self._format.header_size * len(jobs)) as headers:
            heads = headers.array.reshape(len(jobs), -1)

            def frame() -> None:
                sums = checksums(self._cache.views(*where) for where in jobs.where())
                framed(self._transport.identity, jobs, sums, heads.__getitem__)

            await self._transport.copy(frame)
            return await lane.carry(PlacedPuts(*self._columns(jobs, headers), replace))

    async def get(self, jobs: Jobs) -> Answers:
        if not self._format.header_size:
            return await self._transport.lane.carry(PlacedGets(*self._columns(jobs, None)))
        async with self._transport.staging.slot(self._format.header_size * len(jobs)) as headers:
            answers = await self._transport.lane.carry(PlacedGets(*self._columns(jobs, headers)))
            heads = headers.array.reshape(len(jobs), -1)
            where = list(jobs.where())

            def payload(number: int) -> Views:
                return self._cache.views(*where[number])

            def check() -> Answers:
                return checked(self._transport.identity, jobs, heads.__getitem__, payload, answers)

            return await self._transport.copy(check)

    def _columns(
        self, jobs: Jobs, headers: Slot | None
    ) -> tuple[list[str], list[int], list[int], int, list[int] | None]:
        """What ``Places`` is made of: each value's header, where there is one, and then its pieces."""
        addresses: list[int] = []
        sizes: list[int] = []
        counts: list[int] = []
        nbytes = 0
        for group, run in jobs.runs:
            places = self._cache.places(group, jobs.chunks[run])
            pieces = self._cache.piece_sizes(group)
            if headers is not None:
                size = self._format.header_size
                places = np.column_stack((headers.address + size * np.arange(run.start, run.stop), places))
                pieces = (size, *pieces)
            addresses += places.ravel().tolist()
            sizes += pieces * len(places)
            counts += [len(pieces)] * len(places)
            nbytes += sum(pieces) * len(places)
        return jobs.keys, addresses, sizes, nbytes, None if len(addresses) == len(counts) else counts


class StagedMover:
    """To and from memory that the store does not know, or would take too long to gather."""

    pieces = 1

    def __init__(self, transport: Transport, end: End) -> None:
        self._transport = transport
        self._end = end

    @property
    def chunks(self) -> dict[tuple[int, int], memoryview]:
        return self._end.chunks

    def check(self, masks: Sequence[BoolArray]) -> None:
        self._end.check(masks)

    def aim(self, masks: Sequence[BoolArray]) -> None:
        self._end.aim(masks)

    def room(self) -> tuple[BoolArray, ...] | None:
        return self._end.room()

    async def put(self, jobs: Jobs, replace: frozenset[str]) -> Answers:
        source = self._end.open_source(jobs)
        numbers = np.flatnonzero(source.there)
        answers: Answers = [ABSENT] * len(jobs)
        if not len(numbers):
            return answers
        some = jobs.pick(numbers)
        async with StagedBatch(self._transport, some) as staged:
            await self._transport.copy(lambda: staged.fill(source.pieces))
            stored = await staged.carry(PlacedPuts(*staged.columns(), None, replace.intersection(some.keys)))
        _place(answers, numbers, stored)
        return answers

    async def get(self, jobs: Jobs) -> Answers:
        pieces = self._end.open_sink(jobs)
        async with StagedBatch(self._transport, jobs) as staged:
            answers = await staged.carry(PlacedGets(*staged.columns()))
            return await self._transport.copy(lambda: staged.deliver(pieces, answers))


def _place(answers: Answers, numbers: Numbers, some: Answers) -> None:
    for number, answer in zip(numbers.tolist(), some, strict=True):
        answers[number] = answer


class _Refusing:
    """For what cannot be replaced: pieces of an accelerator's memory, which the CPU cannot join."""

    async def put(self, jobs: Jobs, replace: frozenset[str]) -> Answers:
        return [Failure("rejected", False, "a value in pieces on a device cannot be replaced")] * len(jobs)
