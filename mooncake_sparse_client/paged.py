"""Paged KV memory, as inference engines keep it: a source for ``put``, a sink for ``get``, without a copy."""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .block_memory import BlockGroup, BlockMemory, Blocks, PagedMemory
from .core.masks import BoolArray, IntArray
from .errors import InvalidBufferError

T = TypeVar("T")

#: One request's block tables, one a group: ``tables[group][chunk]`` is a block number, or negative for none.
BlockTables: TypeAlias = "Sequence[Sequence[int] | NDArray[np.integer]]"


class PagedKVCache:
    """The paged memory of an engine, seen through the block tables of one request.

    ``groups[g]`` lists the memories whose blocks, one after another in the order given, make a chunk of group
    ``g``: one a layer, or K and V apart. Each is a ``BlockMemory``, or an array or tensor for ``BlockMemory.of``.
    Chunk ``i`` of group ``g`` lies in block ``block_tables[g][i]`` of each; a negative entry is no block (an
    engine freed it), so a source answers None. The tables are copied: later changes of yours do not matter.

    Make it once, without tables, and take ``cache.at(block_tables)`` for each request. Groups may share a pool
    if they name the very same blocks; no other two memories may have a byte in common. Raises
    ``InvalidBufferError``, which names group and number in it.
    """

    __slots__ = ("_memory", "_tables")

    _memory: PagedMemory
    _tables: tuple[IntArray, ...] | None

    def __init__(self, groups: Sequence[Sequence[Blocks]], block_tables: BlockTables | None = None) -> None:
        self._memory = PagedMemory(_checked_groups(groups))
        self._tables = None if block_tables is None else _checked_tables(block_tables, self._memory)

    def at(self, block_tables: BlockTables) -> PagedKVCache:
        """The same memory, seen through the block tables of another request. Costs microseconds."""
        other = object.__new__(PagedKVCache)
        other._memory = self._memory
        other._tables = _checked_tables(block_tables, self._memory)
        return other

    @property
    def memory(self) -> PagedMemory:
        """What every ``at`` of this cache shares; it keeps the owners of the memory alive."""
        return self._memory

    @property
    def groups(self) -> tuple[tuple[BlockMemory, ...], ...]:
        return tuple(group.memories for group in self._memory.groups)

    @property
    def block_tables(self) -> tuple[IntArray, ...] | None:
        """The tables as read-only arrays of this object's own."""
        return self._tables

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Bytes of one chunk, a number a group."""
        return tuple(group.page_size for group in self._memory.groups)

    @property
    def on_device(self) -> bool:
        """Whether any of the memory is an accelerator's."""
        return any(group.on_device for group in self._memory.groups)

    @property
    def readonly(self) -> bool:
        """Whether any of the memory is read-only."""
        return any(group.readonly for group in self._memory.groups)

    def spans(self) -> list[tuple[int, int]]:
        """Sorted, separate ``(address, nbytes)`` ranges that cover all blocks, for registration.

        Ranges that overlap or touch are one; those of a device only if they overlap, since two allocations may
        touch, and drivers register them apart.
        """
        spans: list[tuple[int, int]] = []
        for memory in self._memory.distinct:
            start, size = memory.span
            before, length = spans[-1] if spans else (-1, 0)
            gap = start - (before + length)
            if gap < 0 or (gap == 0 and not memory.on_device):
                spans[-1] = (before, max(length, memory.end - before))
            else:
                spans.append((start, size))
        return spans

    def has(self, group: int, chunks: NDArray[np.intp]) -> BoolArray:
        """Whether each chunk has a block. A chunk beyond the table's end raises ``InvalidBufferError``."""
        present: BoolArray = self._entries(group, chunks) >= 0
        return present

    def places(self, group: int, chunks: NDArray[np.intp]) -> IntArray:
        """Addresses of the pieces of ``chunks``: a row a chunk, a column a piece. Each needs a block."""
        blocks = self._blocks(group, chunks)
        memories = self._memory.groups[group]
        places: IntArray = blocks[:, None] * memories.strides
        places += memories.addresses
        return places

    def piece_sizes(self, group: int) -> tuple[int, ...]:
        """Bytes of each piece of a chunk, in their order."""
        return self._group(group).sizes

    def views(self, group: int, chunk: int) -> tuple[memoryview, ...]:
        """The pieces of one chunk as bytes in place, writable unless the memory is not. It needs a block."""
        if (views := self(group, chunk)) is None:
            raise _no_block(group, chunk)
        return tuple(views)

    def __call__(self, group: int, chunk: int) -> list[memoryview] | None:
        """The pieces of one chunk as bytes in place, None if it has no block: a source or sink like any other."""
        table = self._table(group)
        if not 0 <= chunk < len(table):
            raise _no_such_chunk(group, chunk, len(table))
        block = table.item(chunk)
        return None if block < 0 else self._memory.groups[group].cut(block)

    def check_sink(self, chunks: Sequence[NDArray[np.intp]]) -> None:
        """Raises ``InvalidBufferError`` unless these chunks, an array a group, can all be read into: each has a
        block, of its own, in writable memory."""
        count = len(self._memory.groups)
        if len(chunks) != count:
            raise InvalidBufferError(f"{len(chunks)} arrays of chunks for {count} groups; give one a group")
        blocks = [self._blocks(group, wanted) for group, wanted in enumerate(chunks)]
        for group, taken in enumerate(blocks):
            if taken.size:
                self._check_writable(group)
        for sharing in self._memory.sharing:
            taken = blocks[sharing[0]] if len(sharing) == 1 else np.concatenate([blocks[group] for group in sharing])
            # By a set, since NumPy lets go of the interpreter's lock to sort, and others would take their time.
            if len(set(taken.tolist())) < taken.size:
                ordered = np.sort(taken)
                same = np.flatnonzero(ordered[1:] == ordered[:-1])
                block = int(ordered[same[0]])
                where = [(g, int(c)) for g in sharing for c in np.asarray(chunks[g])[blocks[g] == block]]
                raise InvalidBufferError(
                    f"the (group, chunk) {where[0]} and {where[1]} lie in the same block {block}, and one would be "
                    "read over the other; give each chunk of the hit a block of its own"
                )

    def _group(self, group: int) -> BlockGroup:
        groups = self._memory.groups
        if not 0 <= group < len(groups):
            raise InvalidBufferError(f"there is no group {group!r}: the paged memory has {len(groups)} groups")
        return groups[group]

    def _table(self, group: int) -> IntArray:
        self._group(group)
        if self._tables is None:
            raise InvalidBufferError(
                "this PagedKVCache has no block tables, so no chunk has a place; call at(block_tables) for the request"
            )
        return self._tables[group]

    def _entries(self, group: int, chunks: NDArray[np.intp]) -> IntArray:
        """What the group's table says of each chunk."""
        table = self._table(group)
        chunks = _indices(chunks, f"the chunks of group {group}")
        # As an unsigned number a negative index is beyond every end.
        if chunks.size and np.maximum.reduce(chunks.view(np.uintp)) >= len(table):
            beyond = chunks[(chunks < 0) | (chunks >= len(table))]
            raise _no_such_chunk(group, int(beyond[0]), len(table))
        entries: IntArray = table[chunks]
        return entries

    def _blocks(self, group: int, chunks: NDArray[np.intp]) -> IntArray:
        blocks = self._entries(group, chunks)
        if blocks.size and np.minimum.reduce(blocks) < 0:
            raise _no_block(group, int(np.asarray(chunks)[blocks < 0][0]))
        return blocks

    def _check_writable(self, group: int) -> None:
        if self._memory.groups[group].readonly:
            raise InvalidBufferError(f"group {group} has read-only memory; nothing can be read into it")


def _checked_groups(groups: Sequence[Sequence[Blocks]]) -> list[tuple[BlockMemory, ...]]:
    return [
        tuple(
            _checked_memory(memory, f"groups[{group}][{number}]")
            for number, memory in enumerate(_listed(memories, f"groups[{group}]"))
        )
        for group, memories in enumerate(_listed(groups, "groups"))
    ]


def _listed(found: Sequence[T], name: str) -> Sequence[T]:
    # An array is none: whether its first axis counts memories or blocks, only the caller knows.
    if not isinstance(found, Sequence):
        raise InvalidBufferError(
            f"{name} must be a list, not {type(found).__name__}: groups lists groups, each a list of memories"
        )
    if not found:
        raise InvalidBufferError(f"{name} is empty: there must be a group, and in each group a memory")
    return found


def _checked_memory(memory: Blocks, name: str) -> BlockMemory:
    try:
        return memory if isinstance(memory, BlockMemory) else BlockMemory.of(memory)
    except InvalidBufferError as error:
        raise InvalidBufferError(f"{name}: {error}") from error


def _indices(chunks: NDArray[np.intp], name: str) -> NDArray[np.intp]:
    if not isinstance(chunks, np.ndarray) or chunks.dtype.kind not in "iu" or chunks.ndim != 1:
        raise InvalidBufferError(f"{name} must be a 1-D array of ints, not {reprlib.repr(chunks)}")
    return chunks if chunks.dtype == np.intp else chunks.astype(np.intp)


def _no_such_chunk(group: int, chunk: int, length: int) -> InvalidBufferError:
    return InvalidBufferError(
        f"group {group} has no chunk {chunk}: its block table has {length} entries; give one for every chunk"
    )


def _no_block(group: int, chunk: int) -> InvalidBufferError:
    return InvalidBufferError(
        f"chunk {chunk} of group {group} has no block (its table's entry is negative), so its bytes have no place"
    )


def _checked_tables(tables: BlockTables, memory: PagedMemory) -> tuple[IntArray, ...]:
    groups = memory.groups
    count = len(tables) if hasattr(tables, "__len__") else "no"
    if count != len(groups):
        raise InvalidBufferError(
            f"block_tables must be a list of {len(groups)} tables, one a group; {reprlib.repr(tables)} has {count}"
        )
    return tuple(_checked_table(table, group, groups[group].num_blocks) for group, table in enumerate(tables))


def _checked_table(table: Sequence[int] | NDArray[np.integer], group: int, num_blocks: int) -> IntArray:
    """A copy of the table, if each entry is negative or a block."""
    entries = _numbers(table, group)
    if entries.size and np.maximum.reduce(entries) >= num_blocks:
        chunk = int(np.argmax(entries >= num_blocks))
        raise InvalidBufferError(
            f"block_tables[{group}][{chunk}] is {entries[chunk]}, but group {group} has {num_blocks} blocks: "
            f"entries must be less than that, or negative where chunk {chunk} has no block"
        )
    copied: IntArray = entries.astype(np.int64)
    copied.flags.writeable = False
    return copied


def _numbers(table: Sequence[int] | NDArray[np.integer], group: int) -> NDArray[np.integer]:
    try:
        if isinstance(table, list | tuple):
            # NumPy would take a bool among numbers for one; array, no float for an int.
            if bool in map(type, table):
                raise TypeError("a bool is no block number")
            return np.frombuffer(array("q", table), dtype=np.int64)
        numbers = np.asarray(table)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidBufferError(
            f"block_tables[{group}] must be a list or array of ints, not {reprlib.repr(table)}: {error}"
        ) from error
    if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and numbers.size):
        raise InvalidBufferError(
            f"block_tables[{group}] must be a 1-D list or array of ints, not {reprlib.repr(table)} "
            f"({numbers.ndim}-D, {numbers.dtype})"
        )
    return numbers
