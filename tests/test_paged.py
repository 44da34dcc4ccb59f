"""Paged KV memory: where chunks lie, what is copied and viewed, and what a wrong description says."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import weakref
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mooncake_sparse_client.block_memory import BlockMemory, clash
from mooncake_sparse_client.chunks import check_source, open_sink, read_source
from mooncake_sparse_client.errors import InvalidBufferError
from mooncake_sparse_client.paged import PagedKVCache

ROOT = Path(__file__).parents[1]
Arrays = list[list[NDArray[Any]]]
Tables = list[list[int]]


def refused(words: list[str], call: Callable[[], object]) -> None:
    """``call`` raises InvalidBufferError with all ``words``."""
    with pytest.raises(InvalidBufferError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def indices(*chunks: int) -> NDArray[np.intp]:
    return np.array(chunks, dtype=np.intp)


def filled(shape: tuple[int, ...], dtype: Any = np.uint16) -> NDArray[Any]:
    """An array in which no two elements near one another are the same."""
    return np.random.default_rng(7).integers(0, 1 << 15, shape).astype(dtype)


# Layouts ------------------------------------------------------------------------------------------------------


def one_array() -> tuple[Arrays, Tables]:
    return [[filled((6, 4, 2))]], [[5, 0, 3]]


def layers() -> tuple[Arrays, Tables]:
    return [[filled((6, 4, 2)), filled((8, 3)), filled((9, 2, 2), np.float32)]], [[5, 0, 3, 1]]


def keys_and_values_apart() -> tuple[Arrays, Tables]:
    first, second = filled((2, 6, 4, 2)), filled((2, 7, 4, 2))
    return [[first[0], first[1]], [second[0], second[1]]], [[4, 2], [6, 0, 1]]


def interleaved() -> tuple[Arrays, Tables]:
    memory = filled((6, 3, 2, 5), np.uint8)
    return [[memory[:, layer, kv] for layer in range(3) for kv in range(2)]], [[1, 5, 2]]


def shared_pool() -> tuple[Arrays, Tables]:
    pools = [filled((10, 8)) for _ in range(3)]
    return [pools, pools[:2], [pools[2], filled((4, 3))]], [[9, 3], [4, 0, 5], [2, 1]]


def bare_numbers() -> tuple[Arrays, Tables]:
    return [[filled((5,), np.float64)[::2]]], [[2, 0]]


def one_block() -> tuple[Arrays, Tables]:
    memory = filled((1, 2, 6))
    return [[memory[:, 0], memory[:, 1]], [memory[:, 1], memory[:, 0]]], [[0], []]


LAYOUTS = [one_array, layers, keys_and_values_apart, interleaved, shared_pool, bare_numbers, one_block]


@pytest.fixture(params=LAYOUTS, ids=lambda layout: layout.__name__)
def layout(request: pytest.FixtureRequest) -> tuple[Arrays, Tables]:
    found: tuple[Arrays, Tables] = request.param()
    return found


def chunk_bytes(memories: list[NDArray[Any]], block: int) -> bytes:
    return b"".join(memory[block].tobytes() for memory in memories)


def every_chunk(tables: Tables) -> Iterator[tuple[int, int, int]]:
    """``(group, chunk, block)``."""
    for group, table in enumerate(tables):
        for chunk, block in enumerate(table):
            yield group, chunk, block


def test_views_are_the_chunks_in_place(layout: tuple[Arrays, Tables]) -> None:
    groups, tables = layout
    cache = PagedKVCache(groups, tables)
    for group, chunk, block in every_chunk(tables):
        views = cache.views(group, chunk)
        assert all((view.format, view.ndim, view.readonly) == ("B", 1, False) for view in views)
        assert b"".join(views) == chunk_bytes(groups[group], block)
        for view in views:
            view[:] = bytes([group + 1]) * view.nbytes
        assert chunk_bytes(groups[group], block) == bytes([group + 1]) * cache.page_sizes[group]


def test_writing_one_chunk_leaves_all_others(layout: tuple[Arrays, Tables]) -> None:
    groups, tables = layout
    cache = PagedKVCache(groups, tables)
    before = {(group, chunk): chunk_bytes(groups[group], block) for group, chunk, block in every_chunk(tables)}
    for view in cache.views(0, 0):
        view[:] = b"\xa5" * view.nbytes
    before[0, 0] = b"\xa5" * cache.page_sizes[0]
    assert before == {(group, chunk): chunk_bytes(groups[group], block) for group, chunk, block in every_chunk(tables)}


def test_places_are_the_addresses_of_the_views(layout: tuple[Arrays, Tables]) -> None:
    groups, tables = layout
    cache = PagedKVCache(groups, tables)
    for group, (memories, table) in enumerate(zip(groups, tables, strict=True)):
        chunks = indices(*reversed(range(len(table))))
        places = cache.places(group, chunks)
        assert (places.dtype, places.shape) == (np.dtype(np.int64), (len(table), len(memories)))
        for row, chunk in zip(places.tolist(), chunks, strict=True):
            assert row == [memory[table[chunk] :].ctypes.data for memory in memories]
        assert cache.piece_sizes(group) == tuple(memory[0].nbytes for memory in memories)
        assert cache.page_sizes[group] == sum(cache.piece_sizes(group))


def test_spans_cover_all_blocks_and_nothing_twice(layout: tuple[Arrays, Tables]) -> None:
    groups, tables = layout
    spans = PagedKVCache(groups, tables).spans()
    for (start, size), (later, _) in itertools.pairwise(spans):
        assert start + size < later
    for memory in itertools.chain(*groups):
        for block in range(len(memory)):
            start = memory[block:].ctypes.data
            assert any(low <= start and start + memory[0].nbytes <= low + size for low, size in spans)
    ends = {span[0] + span[1] for span in spans}
    assert ends <= {memory[-1:].ctypes.data + memory[0].nbytes for memory in itertools.chain(*groups)}


def test_it_is_a_source_and_a_sink(layout: tuple[Arrays, Tables]) -> None:
    groups, tables = layout
    cache = PagedKVCache(groups, tables)
    check_source(cache)
    for group, chunk, block in every_chunk(tables):
        size = cache.page_sizes[group]
        found = read_source(cache, group, chunk, size)
        assert found is not None
        assert b"".join(found) == chunk_bytes(groups[group], block)
        assert len(open_sink(cache, group, chunk, size)) == len(groups[group])


# The face -----------------------------------------------------------------------------------------------------


def test_the_properties() -> None:
    keys, values = filled((6, 4), np.uint8), filled((5, 3), np.uint16)
    cache = PagedKVCache(((keys,), [values, BlockMemory.of(keys)]))
    assert cache.groups == ((BlockMemory.of(keys),), (BlockMemory.of(values), BlockMemory.of(keys)))
    assert cache.page_sizes == (4, 10)
    assert cache.block_tables is None
    assert (cache.on_device, cache.readonly) == (False, False)
    other = cache.at([[1], [2, -1]])
    assert cache.block_tables is None
    assert other.block_tables is not None
    assert [table.tolist() for table in other.block_tables] == [[1], [2, -1]]
    assert other.memory is cache.memory
    assert other.at([[], []]).memory is cache.memory
    assert other.groups == cache.groups
    assert PagedKVCache([[keys]]).memory != PagedKVCache([[keys]]).memory
    assert len({cache.memory, other.memory, PagedKVCache([[keys]]).memory}) == 2
    assert weakref.ref(cache.memory)() is cache.memory


def test_tables_are_copied_and_cannot_be_changed() -> None:
    memory = filled((9, 4))
    numbers = np.array([3, 4])
    listed = [5, 6]
    held = array("i", [7, 8])
    cache = PagedKVCache([[memory]]).at([numbers])
    caches = [cache, cache.at([listed]), cache.at([held])]  # type: ignore[list-item]
    numbers[0] = listed[0] = held[0] = 0
    found = [tables[0] for each in caches if (tables := each.block_tables)]
    assert [table.tolist() for table in found] == [[3, 4], [5, 6], [7, 8]]
    for table in found:
        assert table.dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 1


@pytest.mark.parametrize(
    "table",
    [
        [3, -1, 0],
        (3, -1, 0),
        [np.int32(3), -1, np.uint8(0)],
        array("h", [3, -1, 0]),
        array("q", [3, -1, 0]),
        np.array([3, -1, 0], dtype=np.int8),
        np.array([3, -1, 0], dtype=">i4"),
        np.array([3, 9, -1, 9, 0], dtype=np.int64)[::2],
        memoryview(array("i", [3, -1, 0])),
        range(3, -1, -4),
    ],
    ids=lambda table: type(table).__name__,
)
def test_what_a_table_may_be(table: Any) -> None:
    cache = PagedKVCache([[filled((4, 4))]], [table])
    assert cache.block_tables is not None
    assert cache.block_tables[0].tolist() == list(table)


@pytest.mark.parametrize("table", [[], (), range(0), np.array([]), np.array([], dtype=np.int32), array("i")])
def test_a_table_may_be_empty(table: Any) -> None:
    cache = PagedKVCache([[filled((4, 4))]], [table])
    assert cache.has(0, indices()).tolist() == []
    assert cache.places(0, indices()).shape == (0, 1)
    refused(["group 0", "no chunk 0", "0 entries"], lambda: cache.has(0, indices(0)))


def test_tables_may_be_one_array_of_rows() -> None:
    memory = filled((4, 4))
    cache = PagedKVCache([[memory], [memory]]).at(np.array([[0, 1], [2, 3]]))  # type: ignore[arg-type]
    assert cache.places(1, indices(1)).tolist() == [[memory[3:].ctypes.data]]


@pytest.mark.parametrize(
    "table",
    [
        [0.0],
        [0, 1.5],
        [True, False],
        [0, True],
        ["0"],
        "01",
        b"01",
        [[0, 1]],
        [None],
        [1 << 70],
        [-(1 << 70)],
        np.zeros(2),
        np.zeros(2, dtype=bool),
        np.zeros((2, 2), dtype=int),
        np.zeros((), dtype=int),
        np.zeros(2, dtype="m8[s]"),
        np.zeros(2, dtype=object),
        array("d", [0.0]),
        {0: 1},
        {0, 1},
        None,
        3,
    ],
    ids=repr,
)
def test_what_no_table_may_be(table: Any) -> None:
    cache = PagedKVCache([[filled((4, 4))]] * 2)
    refused(["block_tables[1]", "ints"], lambda: cache.at([[0], table]))


def test_a_tensor_of_a_device_is_no_table() -> None:
    class OfDevice:
        def __array__(self, dtype: object = None, copy: object = None) -> NDArray[Any]:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    table: Any = OfDevice()
    refused(["block_tables[0]", "cuda:0"], lambda: PagedKVCache([[filled((4, 4))]], [table]))


@pytest.mark.parametrize("tables", [[], [[0]], [[0], [1], [2]], "a", 5, {}, None], ids=repr)
def test_a_table_for_every_group(tables: Any) -> None:
    cache = PagedKVCache([[filled((4, 4))]] * 2)
    refused(["block_tables", "2 tables"], lambda: cache.at(tables))


@pytest.mark.parametrize("kind", [list, np.array, lambda entries: np.array(entries, dtype=np.uint64)])
@pytest.mark.parametrize("entry", [6, 7, (1 << 63) - 1])
def test_an_entry_is_a_block_of_every_memory_in_its_group(kind: Any, entry: int) -> None:
    cache = PagedKVCache([[filled((9, 4))], [filled((9, 4)), filled((6, 4))]])
    assert cache.at([[8], kind([5])]).has(1, indices(0)).all()
    refused(
        ["block_tables[1][2]", str(entry), "group 1", "6 blocks"],
        lambda: cache.at([[8], kind([0, 5, entry, entry])]),
    )


def test_an_unsigned_entry_does_not_turn_negative() -> None:
    cache = PagedKVCache([[filled((9, 4))]])
    refused([str(2**64 - 1), "9 blocks"], lambda: cache.at([np.array([2**64 - 1], dtype=np.uint64)]))


def test_without_tables_nothing_has_a_place() -> None:
    cache = PagedKVCache([[filled((4, 4))]])
    calls: list[Callable[[], object]] = [
        lambda: cache.has(0, indices(0)),
        lambda: cache.places(0, indices(0)),
        lambda: cache.views(0, 0),
        lambda: cache(0, 0),
        lambda: cache.check_sink([indices(0)]),
    ]
    for call in calls:
        refused(["at(block_tables)"], call)
    assert cache.piece_sizes(0) == (8,)
    assert len(cache.spans()) == 1


def test_chunks_without_a_block() -> None:
    cache = PagedKVCache([[filled((4, 4))], [filled((4, 4))]], [[0], [3, -7, 0, -1]])
    assert cache.has(1, indices(0, 1, 2, 3, 1)).tolist() == [True, False, True, False, False]
    assert cache(1, 1) is None
    assert read_source(cache, 1, 3, 8) is None
    refused(["chunk 1", "no block"], lambda: cache.places(1, indices(2, 1, 3)))
    calls: list[Callable[[], object]] = [
        lambda: cache.places(1, indices(2, 3)),
        lambda: cache.views(1, 3),
        lambda: cache.check_sink([indices(), indices(0, 3)]),
    ]
    for call in calls:
        refused(["chunk 3", "group 1", "no block"], call)


@pytest.mark.parametrize("chunk", [3, 4, 1 << 40, -1, -3])
def test_chunks_beyond_the_table(chunk: int) -> None:
    cache = PagedKVCache([[filled((4, 4))], [filled((4, 4))]], [[0], [3, -1, 2]])
    calls: list[Callable[[], object]] = [
        lambda: cache.has(1, indices(0, chunk)),
        lambda: cache.places(1, indices(0, chunk)),
        lambda: cache.views(1, chunk),
        lambda: cache(1, chunk),
        lambda: cache.check_sink([indices(), indices(0, chunk)]),
    ]
    for call in calls:
        refused([f"chunk {chunk}:", "group 1", "3 entries"], call)


@pytest.mark.parametrize("group", [2, -1])
def test_groups_that_are_not_there(group: int) -> None:
    cache = PagedKVCache([[filled((4, 4))], [filled((4, 4))]], [[0], [3]])
    calls: list[Callable[[], object]] = [
        lambda: cache.has(group, indices(0)),
        lambda: cache.places(group, indices(0)),
        lambda: cache.views(group, 0),
        lambda: cache(group, 0),
        lambda: cache.piece_sizes(group),
    ]
    for call in calls:
        refused([f"no group {group}", "2 groups"], call)


@pytest.mark.parametrize("chunks", [[0], np.zeros(1), np.zeros((1, 1), dtype=np.intp), np.ones(1, dtype=bool)])
def test_chunks_are_index_arrays(chunks: Any) -> None:
    cache = PagedKVCache([[filled((4, 4))]], [[0]])
    refused(["chunks of group 0", "1-D array of ints"], lambda: cache.places(0, chunks))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64, ">i8"])
def test_narrow_indices_do_too(dtype: Any) -> None:
    cache = PagedKVCache([[filled((4, 4))]], [[0, 3, 1]])
    assert (cache.places(0, np.array([2, 1], dtype=dtype)) == cache.places(0, indices(2, 1))).all()


# Sinks --------------------------------------------------------------------------------------------------------


def test_no_chunks_need_nothing() -> None:
    frozen = filled((4, 4))
    frozen.flags.writeable = False
    cache = PagedKVCache([[frozen]], [[-1]])
    assert cache.places(0, indices()).shape == (0, 1)
    assert cache.has(0, indices()).tolist() == []
    cache.check_sink([indices()])


def test_read_only_memory_is_a_source_alone() -> None:
    memory, frozen = filled((4, 4)), filled((4, 2))
    frozen.flags.writeable = False
    cache = PagedKVCache([[memory], [filled((4, 4)), frozen]], [[0], [1]])
    assert cache.readonly
    assert [[one.readonly for one in group] for group in cache.groups] == [[False], [False, True]]
    _, view = cache.views(1, 0)
    assert view == frozen[1].tobytes()
    assert [view.readonly for view in cache.views(1, 0)] == [False, True]
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1
    refused(["group 1", "read-only"], lambda: cache.check_sink([indices(0), indices(0)]))
    refused(["read-only"], lambda: open_sink(cache, 1, 0, 12))
    cache.check_sink([indices(0), indices()])


def test_two_chunks_of_a_hit_never_share_a_block() -> None:
    pool = filled((10, 4))
    cache = PagedKVCache([[pool], [pool], [filled((10, 4))]], [[1, 2, 2, 3], [4, 3, 1], [1, 2, 3]])
    cache.check_sink([indices(0, 1, 3), indices(0), indices(0, 1, 2)])
    refused(["(0, 1) and (0, 2)", "block 2"], lambda: cache.check_sink([indices(0, 1, 2), indices(), indices()]))
    refused(["(0, 3) and (1, 1)", "block 3"], lambda: cache.check_sink([indices(1, 3), indices(0, 1), indices()]))
    refused(["(2, 1) and (2, 1)"], lambda: cache.check_sink([indices(), indices(), indices(1, 1)]))
    refused(["2 arrays", "3 groups"], lambda: cache.check_sink([indices(), indices()]))


def test_groups_share_by_memory_and_not_by_their_neighbours() -> None:
    first, second, third = (filled((4, 4)) for _ in range(3))
    cache = PagedKVCache([[first, second], [second, third], [third]], [[0, 1], [2, 3], [1, 0]])
    cache.check_sink([indices(0, 1), indices(0, 1), indices(0, 1)])
    clashing = cache.at([[0, 1], [2, 3], [3, 0]])
    refused(["(1, 1) and (2, 0)", "block 3"], lambda: clashing.check_sink([indices(0, 1)] * 3))


@given(st.data())
def test_sinks_are_checked_like_a_list_of_taken_places(data: st.DataObject) -> None:
    pools = [np.zeros((6, 1), dtype=np.uint8) for _ in range(3)]
    uses = data.draw(st.lists(st.lists(st.sampled_from(range(3)), min_size=1, unique=True), min_size=1, max_size=4))
    tables = [data.draw(st.lists(st.integers(0, 5), max_size=3)) for _ in uses]
    cache = PagedKVCache([[pools[use] for use in group] for group in uses], tables)
    taken = [(use, block) for group, table in zip(uses, tables, strict=True) for block in table for use in group]
    chunks = [indices(*range(len(table))) for table in tables]
    if len(set(taken)) == len(taken):
        cache.check_sink(chunks)
    else:
        refused(["the same block"], lambda: cache.check_sink(chunks))


# Which memories can be ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0, 4, 4, 1), ["address"]),
        ((-5, 4, 4, 1), ["address", "-5"]),
        ((1.0, 4, 4, 1), ["address", "1.0"]),
        ((8, 4, 0, 1), ["block_bytes"]),
        ((8, 0, 4, 1), ["block_stride"]),
        ((8, 4, 4, 0), ["num_blocks"]),
        ((8, 4, 4, True), ["num_blocks", "True"]),
        ((8, 4, 5, 1), ["block_stride 4", "block_bytes 5"]),
        (((1 << 63) - 4, 4, 4, 1), ["end of 1 blocks"]),
        ((8, 1 << 61, 4, 5), ["end of 5 blocks"]),
        ((8, 4, 4, 1, None, 1), ["on_device"]),
        ((8, 4, 4, 1, None, False, "no"), ["readonly"]),
    ],
)
def test_blocks_that_cannot_be(values: tuple[Any, ...], words: list[str]) -> None:
    refused(words, lambda: BlockMemory(*values))


def test_blocks_by_their_numbers() -> None:
    memory = BlockMemory(np.int64(100), 10, np.uint8(4), 3)  # type: ignore[arg-type]
    assert memory.span == (100, 24)
    assert all(type(number) is int for number in (memory.address, memory.block_bytes))
    assert memory == BlockMemory(100, 10, 4, 3, owner=object())
    assert hash(memory) == hash(BlockMemory(100, 10, 4, 3, owner=[]))
    assert "owner" not in repr(memory)
    assert BlockMemory((1 << 63) - 5, 4, 4, 1).end == (1 << 63) - 1


class OfItsOwn(np.ndarray[Any, Any]):
    """A kind of array with rules of its own."""

    def __getitem__(self, index: Any) -> str:
        return "mine"


def test_blocks_of_arrays() -> None:
    memory = filled((5, 2, 3))
    address = memory.ctypes.data
    assert BlockMemory.of(memory) == BlockMemory(address, 12, 12, 5)
    assert BlockMemory.of(memory).owner is memory
    assert BlockMemory.of(memory[1::2]) == BlockMemory(address + 12, 24, 12, 2)
    assert BlockMemory.of(memory[:, 1]) == BlockMemory(address + 6, 12, 6, 5)
    assert BlockMemory.of(memory[:, :1, :2]) == BlockMemory(address, 12, 4, 5)
    # One block has no next one: how its axis strides says nothing.
    assert BlockMemory.of(memory[2:3][::-1]) == BlockMemory(address + 24, 12, 12, 1)
    assert BlockMemory.of(np.broadcast_to(memory[2], (1, 2, 3))).block_stride == 12
    assert BlockMemory.of(memory.view(OfItsOwn)).address == address
    assert BlockMemory.of(np.zeros(3, dtype=[("k", "<f4"), ("v", "<u2")])).block_bytes == 6
    memory.flags.writeable = False
    assert BlockMemory.of(memory).readonly


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (np.zeros(()), ["shape ()"]),
        (np.zeros((0, 4)), ["shape (0, 4)"]),
        (np.zeros((4, 0)), ["shape (4, 0)"]),
        (np.zeros((4, 2), dtype=object), ["plain data"]),
        (np.zeros((4, 6))[:, ::2], ["C-contiguous"]),
        (np.zeros((4, 3, 2)).transpose(0, 2, 1), ["C-contiguous"]),
        (np.zeros((4, 3, 2))[:, :, :1], ["C-contiguous"]),
        (np.zeros((4, 2))[::-1], ["stride of -16"]),
        (np.broadcast_to(np.zeros(2), (4, 2)), ["stride of 0"]),
        (np.lib.stride_tricks.sliding_window_view(np.zeros(9), 3), ["stride of 8", "blocks of 24"]),
        (bytearray(8), ["BlockMemory", "bytearray"]),
        ([1, 2], ["BlockMemory", "list"]),
        (None, ["BlockMemory", "NoneType"]),
    ],
)
def test_arrays_that_are_no_blocks(memory: Any, words: list[str]) -> None:
    refused(words, lambda: BlockMemory.of(memory))
    refused(
        ["groups[1][2]", *words], lambda: PagedKVCache([[filled((2, 2))], [filled((2, 2)), filled((2, 2)), memory]])
    )


@pytest.mark.parametrize("groups", [[], (), None, 5, filled((2, 3, 2)), {}])
def test_groups_are_a_list(groups: Any) -> None:
    refused(["groups"], lambda: PagedKVCache(groups))


@pytest.mark.parametrize("group", [[], None, filled((3, 2)), BlockMemory(8, 4, 4, 1)])
def test_a_group_is_a_list_of_memories(group: Any) -> None:
    refused(["groups[1]"], lambda: PagedKVCache([[filled((3, 2))], group]))


def covered(memory: BlockMemory) -> set[int]:
    """Every byte of the blocks."""
    starts = range(memory.address, memory.end, memory.block_stride)
    return {start + byte for start in starts for byte in range(memory.block_bytes)}


memories = st.builds(
    lambda address, size, gap, count: BlockMemory(address, size + gap, size, count),
    st.integers(1, 60),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(1, 6),
)


@given(memories, memories)
def test_memories_clash_if_their_blocks_have_a_byte_in_common(one: BlockMemory, other: BlockMemory) -> None:
    common = "have bytes in common" if covered(one) & covered(other) else ""
    assert clash(one, other) == clash(other, one) == common


@given(memories, st.integers(0, 40), st.integers(1, 9), st.integers(1, 6))
def test_memories_of_one_stride_clash_alike(one: BlockMemory, offset: int, size: int, count: int) -> None:
    other = BlockMemory(one.address + offset, one.block_stride, min(size, one.block_stride), count)
    assert bool(clash(one, other)) == bool(covered(one) & covered(other))


@given(st.lists(st.lists(memories, min_size=1, max_size=3), min_size=1, max_size=3))
def test_memories_that_may_stand_together(groups: list[list[BlockMemory]]) -> None:
    def same(one: BlockMemory, other: BlockMemory) -> bool:
        return (one.address, one.block_stride, one.block_bytes) == (
            other.address,
            other.block_stride,
            other.block_bytes,
        )

    placed = [(group, memory) for group, memories in enumerate(groups) for memory in memories]
    fine = all(
        not covered(one) & covered(other) or (group != another and same(one, other))
        for (group, one), (another, other) in itertools.combinations(placed, 2)
    )
    if not fine:
        refused(["groups["], lambda: PagedKVCache(groups))
        return
    spans = PagedKVCache(groups).spans()
    spanned = [byte for start, size in spans for byte in range(start, start + size)]
    assert len(spanned) == len(set(spanned))
    assert set().union(*(covered(memory) for _, memory in placed)) <= set(spanned)
    assert set(spanned) == {byte for _, memory in placed for byte in range(memory.address, memory.end)}


def test_memories_that_share_bytes_are_named() -> None:
    memory = filled((6, 4))
    pool = [filled((6, 4)), memory]
    refused(["groups[0][0] and groups[0][2]", "same blocks"], lambda: PagedKVCache([[memory, filled((2, 2)), memory]]))
    refused(["groups[0][1] and groups[1][0]", "in common"], lambda: PagedKVCache([pool, [memory[:, :2]]]))
    refused(["groups[0][1] and groups[1][0]", "in common"], lambda: PagedKVCache([pool, [memory[1:]]]))
    refused(["groups[1][0] and groups[0][1]", "in common"], lambda: PagedKVCache([[pool[0], memory[1:]], [memory]]))
    refused(["in common"], lambda: PagedKVCache([pool, [memory[::2]]]))
    # The same blocks, of which one group knows fewer.
    PagedKVCache([pool, [memory[:3]], [memory]])
    # More of the blocks than the first group knows are still blocks of the pool.
    wider = filled((8, 4))
    refused(["in common"], lambda: PagedKVCache([[wider[:2]], [wider], [wider[4:]]]))


def test_memories_that_cannot_be_told_apart_are_refused() -> None:
    many = 1 << 23
    groups = [[BlockMemory(1 << 20, 8, 1, many)], [BlockMemory((1 << 20) + 1, 16, 1, many)]]
    refused(["groups[0][0] and groups[1][0]", "too many blocks"], lambda: PagedKVCache(groups))
    # One stride, or few blocks on one side, are told apart whatever the number.
    PagedKVCache([[BlockMemory(1 << 20, 8, 1, many)], [BlockMemory((1 << 20) + 1, 8, 7, many)]])
    PagedKVCache([[BlockMemory(1 << 20, 8, 1, many)], [BlockMemory((1 << 20) + 1, 16, 7, 5)]])


def test_spans_of_a_device_stay_apart() -> None:
    touching = [(100, 10), (110, 10), (115, 3), (130, 5)]
    for on_device, spans in [(False, [(100, 20), (130, 5)]), (True, [(100, 10), (110, 10), (130, 5)])]:
        groups = [
            [BlockMemory(100, 10, 10, 1, on_device=on_device), BlockMemory(110, 9, 1, 2, on_device=on_device)],
            [BlockMemory(115, 3, 3, 1, on_device=on_device), BlockMemory(130, 5, 5, 1, on_device=on_device)],
        ]
        assert [memory.span for group in groups for memory in group] == touching
        assert PagedKVCache(groups).spans() == spans


def test_views_keep_the_memory_alive() -> None:
    class Owned(np.ndarray[Any, Any]):
        """An array that tells when it goes."""

    memory = filled((4, 4)).view(Owned)
    gone = weakref.ref(memory)
    expected = memory[2].tobytes()
    cache = PagedKVCache([[memory]], [[2]])
    del memory
    (view,) = cache.views(0, 0)
    described = cache.memory
    del cache
    gc.collect()
    assert gone() is not None
    del described
    gc.collect()
    assert bytes(view) == expected
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


# Tensors ------------------------------------------------------------------------------------------------------


class FakeTensor:
    """What PyTorch's tensors answer, over an array."""

    def __init__(self, memory: NDArray[Any], device: str = "cpu", address: int | None = None) -> None:
        self._memory = memory
        self._address = address
        self.shape = memory.shape
        self.device = SimpleNamespace(type=device)
        self.requires_grad = True

    def data_ptr(self) -> int:
        return self._memory.ctypes.data if self._address is None else self._address

    def element_size(self) -> int:
        return self._memory.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self._memory.itemsize for step in self._memory.strides)

    def is_contiguous(self) -> bool:
        return self._memory.flags.c_contiguous

    def __getitem__(self, index: int) -> FakeTensor:
        return FakeTensor(self._memory[index, ...])

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


@pytest.mark.parametrize(
    "cut",
    [
        lambda memory: memory,
        lambda memory: memory[1::2],
        lambda memory: memory[:, 1],
        lambda memory: memory[:, 0, :2],
        lambda memory: memory[3:],
        lambda memory: memory[:, 1, 1],
    ],
)
def test_a_tensor_is_described_like_its_array(cut: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    memory = cut(filled((5, 2, 3)))
    tensor = FakeTensor(memory)
    described = BlockMemory.of(tensor)
    assert described == BlockMemory.of(memory)
    assert described.owner is tensor
    assert (described.on_device, described.readonly) == (False, False)
    assert bytes(PagedKVCache([[tensor]], [[1]]).views(0, 0)[0]) == memory[1].tobytes()


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (np.zeros(()), ["shape ()"]),
        (np.zeros((0, 4)), ["shape (0, 4)"]),
        (np.zeros((4, 0)), ["shape (4, 0)"]),
        (np.zeros((4, 6))[:, ::2], ["contiguous"]),
        (np.broadcast_to(np.zeros(2), (4, 2)), ["stride of 0"]),
        (np.lib.stride_tricks.sliding_window_view(np.zeros(9), 3), ["stride of 8", "blocks of 24"]),
    ],
)
def test_tensors_that_are_no_blocks(memory: NDArray[Any], words: list[str]) -> None:
    refused(words, lambda: BlockMemory.of(FakeTensor(memory)))


def test_tensors_without_memory() -> None:
    class Sparse(FakeTensor):
        def stride(self) -> tuple[int, ...]:
            raise RuntimeError("sparse tensors do not have strides")

    memory = filled((4, 2))
    refused(["data_ptr() is 0"], lambda: BlockMemory.of(FakeTensor(memory, "meta", address=0)))
    refused(["sparse tensors"], lambda: BlockMemory.of(Sparse(memory)))
    refused(["groups[0][1]", "sparse"], lambda: PagedKVCache([[filled((2, 2)), Sparse(memory)]]))


def test_a_tensor_is_no_table_if_it_cannot_be_an_array() -> None:
    table: Any = FakeTensor(np.zeros(2, dtype=np.int64))
    refused(["block_tables[0]", "requires grad"], lambda: PagedKVCache([[filled((2, 2))]], [table]))


def test_memory_of_a_device_has_addresses_alone() -> None:
    host = filled((4, 4))
    address = 0x7F00_0000_0000
    cache = PagedKVCache([[host], [filled((9, 2)), FakeTensor(host, "cuda", address)]], [[3], [1, -1, 2]])
    assert cache.on_device
    assert [[memory.on_device for memory in group] for group in cache.groups] == [[False], [False, True]]
    assert cache.places(1, indices(0, 2))[:, 1].tolist() == [address + 8, address + 16]
    assert cache.spans()[-1] == (address, 32)
    cache.check_sink([indices(0), indices(0, 2)])
    assert cache(1, 1) is None
    assert b"".join(cache.views(0, 0)) == host[3].tobytes()
    calls: list[Callable[[], object]] = [
        lambda: cache.views(1, 0),
        lambda: cache(1, 0),
    ]
    for call in calls:
        refused(["group 1", "CPU cannot reach"], call)


def test_real_tensors() -> None:
    torch: Any = pytest.importorskip("torch")
    memory = torch.arange(48, dtype=torch.bfloat16).reshape(4, 2, 6)
    memory.requires_grad_()
    cache = PagedKVCache([[memory[:, 0], memory[:, 1]]], [torch.tensor([3, -1, 0])])
    assert cache.piece_sizes(0) == (12, 12)
    assert cache.places(0, indices(2)).tolist() == [[memory.data_ptr(), memory.data_ptr() + 12]]
    views = cache.views(0, 0)
    assert b"".join(views) == memory[3].detach().view(torch.uint8).numpy().tobytes()
    refused(["contiguous"], lambda: BlockMemory.of(memory.transpose(1, 2)))
    refused(["stride of 0"], lambda: BlockMemory.of(memory[:1].expand(4, 2, 6)))
    refused(["data_ptr() is 0"], lambda: BlockMemory.of(torch.empty(4, 2, device="meta")))


def test_torch_is_never_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    code = """
import sys
import numpy as np
from mooncake_sparse_client.paged import PagedKVCache
class Tensor:
    shape, device = (2, 4), type("Device", (), {"type": "cuda"})
    def data_ptr(self): return 1 << 40
    def element_size(self): return 2
    def stride(self): return 4, 1
    def is_contiguous(self): return True
    def __getitem__(self, index): return self
cache = PagedKVCache([[np.zeros((2, 4)), Tensor()]], [np.array([1])])
assert cache.places(0, np.array([0]))[0, 1] == (1 << 40) + 8
assert "torch" not in sys.modules
import torch
"""
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": paths})
