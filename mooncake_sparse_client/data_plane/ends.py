"""The caller's end of a staged transfer: where the bytes of each chunk are, or go.

Buffers are asked for on the event loop, a batch at a time; they are copied on threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from ..chunks import Sink, SinkPlaces, Source, open_sink, read_source
from ..core.masks import BoolArray
from ..paged import PagedKVCache
from .checking import Views
from .transfer import Jobs

#: The caller's memory for the job of a number.
Pieces: TypeAlias = Callable[[int], Views]


class OpenSource(NamedTuple):
    """What a source says to one batch."""

    #: Which of the jobs it has bytes for.
    there: BoolArray
    #: Where they are; numbers count those jobs alone.
    pieces: Pieces


class End(Protocol):
    """A source or sink."""

    #: What was read where there is no sink, by ``(group, chunk)``.
    chunks: dict[tuple[int, int], memoryview]

    def check(self, masks: Sequence[BoolArray]) -> None:
        """Raises ``InvalidBufferError`` if the source can never be asked for these chunks."""

    def aim(self, masks: Sequence[BoolArray]) -> None:
        """The chunks that a read wants now. Raises ``InvalidBufferError`` if the sink cannot take them."""

    def room(self) -> tuple[BoolArray, ...] | None:
        """The chunks that the sink has room for, one boolean array a group; None if it does not say."""

    def open_source(self, jobs: Jobs) -> OpenSource: ...
    def open_sink(self, jobs: Jobs) -> Pieces: ...


class BufferEnd:
    """A callable or mapping; fresh memory in place of a sink where it is None."""

    def __init__(self, end: Source | Sink | None, page_sizes: Sequence[int]) -> None:
        self._end = end
        self._page_sizes = page_sizes
        self._places = SinkPlaces()
        self.chunks: dict[tuple[int, int], memoryview] = {}

    def check(self, masks: Sequence[BoolArray]) -> None:
        pass  # it says what it has when it is asked

    def aim(self, masks: Sequence[BoolArray]) -> None:
        self._places.keep(lambda where: where[1] < len(masks[where[0]]) and bool(masks[where[0]][where[1]]))

    def room(self) -> tuple[BoolArray, ...] | None:
        if not isinstance(self._end, Mapping):
            return None
        room = []
        for group in range(len(self._page_sizes)):
            chunks = [chunk for of, chunk in self._end if of == group and chunk >= 0]
            room.append(np.zeros(max(chunks, default=-1) + 1, dtype=np.bool_))
            room[-1][chunks] = True
        return tuple(room)

    def open_source(self, jobs: Jobs) -> OpenSource:
        assert self._end is not None  # noqa: S101 - a put has a source
        found = [read_source(self._end, group, chunk, self._page_sizes[group]) for group, chunk in jobs.where()]
        payloads = [payload for payload in found if payload is not None]
        return OpenSource(np.array([payload is not None for payload in found], dtype=np.bool_), payloads.__getitem__)

    def open_sink(self, jobs: Jobs) -> Pieces:
        where = list(jobs.where())
        end = self._end
        if end is None:

            def fresh(number: int) -> Views:
                group, chunk = where[number]
                room = np.empty(self._page_sizes[group], dtype=np.uint8).data
                self.chunks[group, chunk] = room
                return (room,)

            return fresh
        sinks: list[Views] = []
        for group, chunk in where:
            sinks.append(open_sink(end, group, chunk, self._page_sizes[group]))  # type: ignore[arg-type]  # a get has a sink
            self._places.take((group, chunk), sinks[-1])
        return sinks.__getitem__


class PagedSide:
    """What paged memory says of chunks, whether or not they are staged."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self.chunks: dict[tuple[int, int], memoryview] = {}

    def check(self, masks: Sequence[BoolArray]) -> None:
        for group, mask in enumerate(masks):
            self._cache.has(group, np.flatnonzero(mask))

    def aim(self, masks: Sequence[BoolArray]) -> None:
        self._cache.check_sink([np.flatnonzero(mask) for mask in masks])

    def room(self) -> tuple[BoolArray, ...] | None:
        return tuple(table >= 0 for table in self._cache.block_tables or ())

    def has(self, jobs: Jobs) -> BoolArray:
        """Which of the jobs' chunks have a block."""
        return np.concatenate([self._cache.has(group, jobs.chunks[run]) for group, run in jobs.runs])


class PagedEnd(PagedSide):
    """Paged memory."""

    def open_source(self, jobs: Jobs) -> OpenSource:
        there = self.has(jobs)
        return OpenSource(there, self._pieces(jobs.pick(np.flatnonzero(there))))

    def open_sink(self, jobs: Jobs) -> Pieces:
        return self._pieces(jobs)

    def _pieces(self, jobs: Jobs) -> Pieces:
        where = list(jobs.where())
        return lambda number: self._cache.views(*where[number])
