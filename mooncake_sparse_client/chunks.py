"""Where a chunk's bytes live on the caller's side: sources for ``put``, sinks for ``get``."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidBufferError

#: Plain, C-contiguous bytes in memory.
Buffer: TypeAlias = "bytes | bytearray | memoryview | NDArray[np.generic] | array[int] | array[float] | mmap.mmap"
#: A chunk in one piece, or in several that stand for one after another (K and V, or a piece a layer).
ChunkBuffers: TypeAlias = "Buffer | list[Buffer] | tuple[Buffer, ...]"
#: Asked for ``(group, chunk)``; None, or an absent key: the chunk's bytes are not to be had.
Source: TypeAlias = "Callable[[int, int], ChunkBuffers | None] | Mapping[tuple[int, int], ChunkBuffers]"
#: Asked for ``(group, chunk)``: writable memory of exactly the group's page size.
Sink: TypeAlias = "Callable[[int, int], ChunkBuffers] | Mapping[tuple[int, int], ChunkBuffers]"


def check_source(source: Source) -> None:
    """Raises ``InvalidBufferError`` for something that can never be asked for a chunk."""
    if not callable(source) and not isinstance(source, Mapping):
        raise InvalidBufferError(
            f"a source or sink is a callable (group, chunk) -> buffer, or a mapping, not {source!r}"
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
    """The memory that one get reads into: no two chunks may share any of it."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[int, int]] = {}

    def take(self, views: Mapping[tuple[int, int], tuple[memoryview, ...]]) -> None:
        """Note where a batch's chunks go. Raises ``InvalidBufferError`` for chunks that would meet: the bytes of
        one would be found under the other, and taken for damage of what is stored."""
        places = sorted((address_of(view), view.nbytes, where) for where, some in views.items() for view in some)
        last_end, last_owner = 0, (-1, -1)
        for start, nbytes, where in places:
            other = last_owner if start < last_end else self._owners.get(start, where)
            if other != where or start < last_end:
                raise InvalidBufferError(
                    f"the sink's buffers for (group, chunk) {other} and {where} overlap; give each its own memory"
                )
            self._owners[start] = where
            last_end, last_owner = start + nbytes, where


def address_of(view: memoryview) -> int:
    """Where a view's bytes begin, writable or not."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def _views(found: ChunkBuffers, what: str, nbytes: int) -> tuple[memoryview, ...]:
    # An array of numbers is a sequence too; only a list or tuple means several pieces.
    pieces = found if isinstance(found, list | tuple) else [found]
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
