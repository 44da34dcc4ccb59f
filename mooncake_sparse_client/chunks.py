"""Where a chunk's bytes live on the caller's side: sources for ``put``, sinks for ``get``."""

from __future__ import annotations

import bisect
import mmap
import reprlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidBufferError
from .paged import PagedKVCache
from .views import address_of

#: Plain, C-contiguous bytes in memory.
Buffer: TypeAlias = "bytes | bytearray | memoryview | NDArray[np.generic] | array[int] | array[float] | mmap.mmap"
#: ``(group, chunk)``.
ChunkId: TypeAlias = tuple[int, int]
#: A chunk in one piece, or in several that stand for one after another (K and V, or a piece a layer).
ChunkBuffers: TypeAlias = "Buffer | list[Buffer] | tuple[Buffer, ...]"
#: Asked for ``(group, chunk)``; None, or an absent key: the chunk's bytes are not to be had.
Source: TypeAlias = "PagedKVCache | Callable[[int, int], ChunkBuffers | None] | Mapping[tuple[int, int], ChunkBuffers]"
#: Asked for ``(group, chunk)``: writable memory of exactly the group's page size.
Sink: TypeAlias = "PagedKVCache | Callable[[int, int], ChunkBuffers] | Mapping[tuple[int, int], ChunkBuffers]"


def check_source(source: Source) -> None:
    """Raises ``InvalidBufferError`` for something that can never be asked for a chunk."""
    if not callable(source) and not isinstance(source, Mapping):
        raise InvalidBufferError(
            "a source or sink is a PagedKVCache, a callable (group, chunk) -> buffer, or a mapping, "
            f"not {reprlib.repr(source)}"
        )


def read_source(source: Source, group: int, chunk: int, nbytes: int) -> tuple[memoryview, ...] | None:
    """The chunk's bytes as views of ``nbytes`` in all, without a copy; None if the source has none.

    Raises ``InvalidBufferError`` for buffers of another size or that are no contiguous bytes.
    """
    found = source.get((group, chunk)) if isinstance(source, Mapping) else source(group, chunk)
    if found is None:
        return None
    return _views(found, f"the source's buffer for group {group}, chunk {chunk}", nbytes)


def open_sink(sink: Sink, group: int, chunk: int, nbytes: int) -> tuple[memoryview, ...]:
    """The memory to read a chunk into. Raises ``InvalidBufferError`` unless it is writable and fits."""
    what = f"the sink's buffer for group {group}, chunk {chunk}"
    found = sink.get((group, chunk)) if isinstance(sink, Mapping) else sink(group, chunk)
    if found is None:
        raise InvalidBufferError(f"{what} is missing: a sink must have room for every chunk of the load mask")
    views = _views(found, what, nbytes)
    if any(view.readonly for view in views):
        raise InvalidBufferError(f"{what} is read-only; give writable memory such as a bytearray or an array")
    return views


class SinkPlaces:
    """The memory that one get reads into: no two chunks of the hit may share any of it.

    The bytes of one would be found under the other, and taken for damage of what is stored.
    """

    def __init__(self) -> None:
        #: ``(start, end, chunk)`` by address.
        self._taken: list[tuple[int, int, ChunkId]] = []
        # Memory that nobody holds would be given out anew, and be taken for shared.
        self._views: dict[ChunkId, tuple[memoryview, ...]] = {}

    def keep(self, wanted: Callable[[ChunkId], bool]) -> None:
        """Forget the chunks that are no longer part of the hit: their memory may serve others."""
        self._views = {where: views for where, views in self._views.items() if wanted(where)}
        self._taken = [place for place in self._taken if place[2] in self._views]

    def take(self, where: ChunkId, views: tuple[memoryview, ...]) -> None:
        """Note where a chunk goes, instead of where it went before. Raises ``InvalidBufferError``."""
        for view in self._views.get(where, ()):
            start = address_of(view)
            del self._taken[bisect.bisect_left(self._taken, (start, start + view.nbytes, where))]
        self._views[where] = views
        for view in views:
            start = address_of(view)
            place = (start, start + view.nbytes, where)
            at = bisect.bisect(self._taken, place)
            for other in self._taken[max(at - 1, 0) : at + 1]:
                if other[0] < place[1] and place[0] < other[1]:
                    raise InvalidBufferError(
                        f"the sink's buffers for (group, chunk) {other[2]} and {where} overlap; "
                        "each chunk, and each piece of one, needs memory of its own"
                    )
            self._taken.insert(at, place)


def _views(found: ChunkBuffers | list[memoryview], what: str, nbytes: int) -> tuple[memoryview, ...]:
    # An array of numbers is a sequence too; only a list or tuple means several pieces.
    pieces: Sequence[object] = found if isinstance(found, list | tuple) else [found]
    views = tuple(view for piece in pieces if (view := _byte_view(piece, what)).nbytes)
    total = sum(view.nbytes for view in views)
    if total != nbytes:
        raise InvalidBufferError(f"{what} has {total} bytes; the layout's page_size_bytes says {nbytes}")
    return views


def _byte_view(piece: object, what: str) -> memoryview:
    """A flat view of bytes. Native code would cut off wider items and misread strided ones, silently."""
    if isinstance(piece, np.ndarray):
        piece = np.asarray(piece)
        if not piece.flags.c_contiguous or piece.dtype.hasobject:
            raise InvalidBufferError(f"{what} is an array that is not C-contiguous plain data; copy it first")
        return piece.reshape(-1).view(np.uint8).data
    try:
        view = memoryview(piece)  # type: ignore[arg-type]  # what is no buffer raises TypeError, caught here
    except (TypeError, ValueError) as error:
        raise InvalidBufferError(f"{what} is no buffer of bytes: {error}") from error
    if not view.c_contiguous:
        raise InvalidBufferError(f"{what} is a strided view; copy it into contiguous memory first")
    return view.cast("B") if view.nbytes else memoryview(b"")
