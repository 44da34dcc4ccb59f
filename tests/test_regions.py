"""Memory that values move through: who has which part of it, and when a part is free again."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import mmap
import random
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_sparse_client.errors import ConfigError, InvalidBufferError, InvalidRequestError
from mooncake_sparse_client.stores.regions import (
    HeapMemory,
    MemoryPool,
    Region,
    SpaceAllocator,
    StoreMemory,
    anonymous_pool,
)

#: No deadline: a loaded machine is no failure. The same examples every time.
quick = settings(max_examples=300, deadline=None, derandomize=True)


class Bytes:
    """A space as a slow, obvious model: who has each byte."""

    def __init__(self, size: int) -> None:
        self.owners: list[int | None] = [None] * size

    def gaps(self) -> list[int]:
        """The lengths of the runs of bytes that nobody has."""
        runs = "".join("." if owner is None else "x" for owner in self.owners).split("x")
        return [len(run) for run in runs if run]

    def take(self, offset: int, nbytes: int, alignment: int) -> None:
        asked = range(offset, offset + nbytes)
        assert asked.stop <= len(self.owners)
        assert all(self.owners[at] is None for at in asked)
        end = min(-(-asked.stop // alignment) * alignment, len(self.owners))
        for at in range(offset, end):
            self.owners[at] = offset

    def give_back(self, offset: int) -> None:
        self.owners = [None if owner == offset else owner for owner in self.owners]


# A number is a part to ask for, a fraction one to give back: which of those that are out.
moves = st.lists(st.integers(1, 70) | st.floats(0, 0.999), max_size=40)


@quick
@given(size=st.integers(1, 200), alignment=st.integers(1, 17), moves=moves)
def test_parts_never_overlap_and_all_join_to_one_gap(size: int, alignment: int, moves: list[int | float]) -> None:
    space, model = SpaceAllocator(size, alignment), Bytes(size)
    out: list[int] = []
    for move in moves:
        if isinstance(move, int):
            fits = move <= max(model.gaps(), default=0)
            offset = space.take(move)
            assert (offset is not None) == fits
            if offset is not None:
                assert offset % alignment == 0
                model.take(offset, move, alignment)
                out.append(offset)
        elif out:
            offset = out.pop(int(move * len(out)))
            space.give_back(offset)
            model.give_back(offset)
        assert space.free_bytes == sum(model.gaps())
        assert space.largest_gap == max(model.gaps(), default=0)
    for offset in out:
        space.give_back(offset)
    assert (space.free_bytes, space.largest_gap) == (size, size)
    assert space.take(size) == 0


def test_the_smallest_gap_that_is_large_enough_is_taken() -> None:
    space = SpaceAllocator(1000, 10)
    offsets = [space.take(nbytes) for nbytes in (300, 10, 100, 10, 200, 10)]
    assert offsets == [0, 300, 310, 410, 420, 620]
    for offset in (0, 310, 420):
        space.give_back(offset)
    assert [space.take(nbytes) for nbytes in (95, 150, 150)] == [310, 420, 0]


@pytest.mark.parametrize("offset", [1, 64, 128, -1, 5000])
def test_only_what_was_taken_can_be_given_back_and_once(offset: int) -> None:
    space = SpaceAllocator(1000)
    assert (space.take(64), space.take(1)) == (0, 64)
    space.give_back(64)
    with pytest.raises(InvalidRequestError, match=rf"no part begins at offset {offset}\b"):
        space.give_back(offset)
    assert isinstance(InvalidRequestError("x"), ValueError)
    assert space.free_bytes == 1000 - 64


@pytest.mark.parametrize(("size", "alignment", "named"), [(0, 1, "size"), (1.5, 1, "size"), (9, 0, "alignment")])
def test_a_space_has_a_size_and_an_alignment(size: Any, alignment: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SpaceAllocator(size, alignment)


def heap() -> HeapMemory:
    return HeapMemory()


def small_pool() -> MemoryPool:
    return anonymous_pool(1 << 20)


@pytest.mark.parametrize("make", [heap, small_pool])
def test_a_region_is_flat_writable_bytes_at_its_address(make: Callable[[], HeapMemory | MemoryPool]) -> None:
    memory = make()
    region = memory.allocate(1000)
    assert isinstance(region, Region)
    assert region.nbytes == 1000
    assert (region.view.format, region.view.shape, region.view.readonly) == ("B", (1000,), False)
    assert (region.array.dtype.name, region.array.shape, region.array.flags.writeable) == ("uint8", (1000,), True)
    region.view[:3] = b"abc"
    region.array[997:] = [1, 2, 3]
    assert ctypes.string_at(region.address, 3) == b"abc"
    assert ctypes.string_at(region.address + 997, 3) == b"\1\2\3"
    assert memory.covers(region.address, region.nbytes)
    assert memory.covers(region.address + 10, 1)
    other = memory.allocate(1)
    assert not region.address <= other.address < region.address + 1000


@pytest.mark.parametrize("make", [heap, small_pool])
@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True, "1", None])
def test_memory_is_asked_for_in_whole_bytes(make: Callable[[], HeapMemory | MemoryPool], nbytes: Any) -> None:
    with pytest.raises(InvalidRequestError, match="nbytes"):
        make().allocate(nbytes)


async def test_memory_of_the_heap_is_all_alike() -> None:
    memory: StoreMemory = HeapMemory()
    theirs = bytearray(5)
    address = ctypes.addressof(ctypes.c_char.from_buffer(theirs))
    assert memory.covers(address, 5)
    assert await memory.register(address, 5) is True
    await memory.unregister(address, 5)
    big = memory.allocate(64 << 20)
    assert big.nbytes == 64 << 20
    kept = memory.allocate(4).array[1:]
    gc.collect()
    kept[:] = 7
    assert kept.tolist() == [7, 7, 7]


def test_a_pool_covers_exactly_its_own_memory() -> None:
    pool = anonymous_pool(8192)
    start, end = pool.address, pool.address + 8192
    assert pool.nbytes == 8192
    inside = [(start, 8192), (start, 1), (end - 1, 1), (end, 0)]
    outside = [(start - 1, 1), (start - 1, 100), (start, 8193), (end, 1), (end - 1, 2), (0, 1), (start + 9, -1)]
    assert [pool.covers(*where) for where in inside] == [True] * 4
    assert [pool.covers(*where) for where in outside] == [False] * 7


def test_parts_are_pages_of_the_pool() -> None:
    pool = anonymous_pool(10 * 4096)
    regions = [pool.allocate(nbytes) for nbytes in (1, 4096, 4097, 4095)]
    assert [region.address - pool.address for region in regions] == [0, 4096, 8192, 16384]
    assert pool.address % mmap.PAGESIZE == 0
    assert pool.free_bytes == 5 * 4096
    assert MemoryPool(bytearray(100), alignment=8).allocate(93).nbytes == 93


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    pool = MemoryPool(bytearray(1000), alignment=100)
    regions = [pool.allocate(100) for _ in range(10)]
    del regions[2], regions[5:7]
    with pytest.raises(InvalidRequestError) as caught:
        pool.allocate(201)
    text = str(caught.value)
    for words in ("201 bytes", "pool of 1000", "largest gap has 200", "(300 are free", "larger pool_size"):
        assert words in text
    assert pool.allocate(200).nbytes == 200  # nothing was lost by asking


MAKERS: list[Callable[[Region], Any]] = [
    lambda region: region,
    lambda region: region.view,
    lambda region: region.view[10:20],
    lambda region: region.view[10:20][2:3],
    lambda region: region.view[::7],
    lambda region: region.view.cast("I")[3:],
    lambda region: region.view.toreadonly(),
    lambda region: memoryview(region.view),
    lambda region: region.view.obj,
    lambda region: np.asarray(region.view.obj)[5:6],
    lambda region: region.array,
    lambda region: region.array[10:20],
    lambda region: region.array[10:20][2:3],
    lambda region: region.array.reshape(10, 10)[3:, ::2].T,
    lambda region: region.array.view(np.float32)[5:],
    lambda region: region.array[10:].data,
    lambda region: np.asarray(region.view)[4:],
    lambda region: np.frombuffer(region.view, dtype=np.int16, offset=4)[1:],
    lambda region: np.lib.stride_tricks.as_strided(region.array, (3,), (2,)),
    lambda region: np.from_dlpack(region.array)[3:],  # as tensors are made
    lambda region: (ctypes.c_char * 10).from_buffer(region.view, 5),
    lambda region: [region.view[1:2], region.array[5:]],
]


@pytest.mark.parametrize("make", MAKERS, ids=range(len(MAKERS)))
def test_any_view_keeps_its_part_and_the_last_one_frees_it(make: Callable[[Region], Any]) -> None:
    pool = MemoryPool(bytearray(300), alignment=100)
    kept = make(pool.allocate(100))
    gc.collect()
    assert pool.free_bytes == 200
    others = [pool.allocate(100) for _ in range(2)]
    with pytest.raises(InvalidRequestError):
        pool.allocate(1)
    del kept
    assert pool.free_bytes == 100  # at once, without a collection
    assert pool.allocate(100).nbytes == 100
    assert len(others) == 2


class Phoenix:
    """Garbage in a cycle that uses its memory when it is finalized, and comes back."""

    risen: list[Phoenix]

    def __init__(self, region: Region) -> None:
        self.region = region
        self.me = self

    def __del__(self) -> None:
        self.risen.append(self)


def test_memory_that_a_finalizer_still_uses_is_not_given_out() -> None:
    pool = MemoryPool(bytearray(200), alignment=100)
    Phoenix.risen = []
    Phoenix(pool.allocate(100))
    gc.collect()
    (phoenix,) = Phoenix.risen
    assert pool.free_bytes == 100
    phoenix.region.view[:] = b"p" * 100
    pool.allocate(100).view[:] = b"q" * 100
    assert bytes(phoenix.region.view) == b"p" * 100
    Phoenix.risen.clear()
    phoenix.me = phoenix  # the cycle alone
    del phoenix
    gc.collect()  # a finalizer runs once
    assert pool.free_bytes == 200


def test_a_full_pool_looks_for_garbage_before_it_refuses() -> None:
    class Ring:
        def __init__(self, region: Region) -> None:
            self.region, self.me = region, self

    pool = MemoryPool(bytearray(8 * 4096))
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            Ring(pool.allocate(8 * 4096))
            assert pool.free_bytes == 0
    finally:
        gc.enable()


def test_garbage_may_come_back_in_the_midst_of_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector runs where it likes; here, in ``allocate`` while that holds the pool."""
    pool = MemoryPool(bytearray(400), alignment=100)

    class Cycle:
        def __init__(self) -> None:
            self.kept = (pool.allocate(100).array[5:], self)

    real = SpaceAllocator.take

    def take(space: SpaceAllocator, nbytes: int) -> int | None:
        gc.collect()
        return real(space, nbytes)

    gc.disable()
    try:
        for _ in range(3):
            Cycle()
        monkeypatch.setattr(SpaceAllocator, "take", take)
        part = pool.allocate(100)
    finally:
        gc.enable()
    assert part.address == pool.address + 300
    assert pool.free_bytes == 300


def test_parts_come_and_go_on_any_thread() -> None:
    pool = MemoryPool(bytearray(64 * 100), alignment=100)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        dice = random.Random(number)
        kept: list[tuple[Region, int]] = []
        try:
            for turn in range(400):
                if len(kept) == 6 or (kept and dice.random() < 0.4):
                    region, mark = kept.pop(dice.randrange(len(kept)))
                    assert region.array.tolist() == [mark] * region.nbytes
                    del region
                else:
                    region = pool.allocate(dice.randint(1, 200))
                    mark = (number * 83 + turn) % 256
                    region.array[:] = mark
                    kept.append((region, mark))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert pool.free_bytes == pool.nbytes


async def test_asking_on_an_event_loop_blocks_nothing() -> None:
    pool = anonymous_pool(1 << 20)
    kept = await asyncio.gather(*(asyncio.to_thread(pool.allocate, 100) for _ in range(8)))
    kept.append(pool.allocate(100))
    assert pool.free_bytes == (1 << 20) - 9 * 4096


@pytest.mark.parametrize(
    "base",
    [
        (ctypes.c_ubyte * 4096)(),
        (ctypes.c_uint64 * 512)(),
        ((ctypes.c_uint16 * 64) * 32)(),
        bytearray(4096),
        memoryview(bytearray(5000))[100:4196],
        array("Q", [0] * 512),
        np.zeros((64, 64), dtype=np.uint8),
        mmap.mmap(-1, 4096),
    ],
    ids=["bytes", "words", "table", "bytearray", "view", "array", "numpy", "mmap"],
)
def test_a_pool_is_made_from_anything_writable(base: Any) -> None:
    pool = MemoryPool(base, alignment=64)
    assert pool.nbytes == 4096
    region = pool.allocate(4096)
    region.view[:5] = b"there"
    assert bytes(memoryview(base).cast("B")[:5]) == b"there"
    assert ctypes.string_at(pool.address, 5) == b"there"


@pytest.mark.parametrize(
    "base",
    [b"constant", bytearray(), memoryview(bytearray(10))[::2], np.zeros((4, 4))[:, ::2], "text", 5, None],
    ids=["constant", "empty", "strided", "columns", "text", "number", "nothing"],
)
def test_a_pool_cannot_be_made_from_anything_else(base: Any) -> None:
    with pytest.raises(InvalidBufferError, match="base of a pool"):
        MemoryPool(base)


@pytest.mark.parametrize("order", list(itertools.permutations(("pool", "region", "slice"))), ids="-".join)
def test_the_memory_is_let_go_of_after_the_pool_and_all_views(order: tuple[str, ...]) -> None:
    calls: list[str] = []
    native = ctypes.create_string_buffer(1000)
    base = (ctypes.c_ubyte * 1000).from_address(ctypes.addressof(native))
    pool = MemoryPool(base, lambda: calls.append("unused"), alignment=1)
    kept: dict[str, object] = {"pool": pool, "region": pool.allocate(100), "slice": pool.allocate(50).array[7:]}
    spare = pool.allocate(50)
    del spare, pool  # a part that comes back ends nothing
    for name in order:
        gc.collect()
        assert calls == []
        del kept[name]
    assert calls == ["unused"]


def test_the_base_lives_as_long_as_the_last_view() -> None:
    """Memory that Python owns needs no ``on_unused``."""
    pool = anonymous_pool(4096)
    view = pool.allocate(4096).view[1:]
    del pool
    gc.collect()
    view[:] = b"x" * 4095  # unmapped, it would end the process
    assert view[4094] == ord("x")


def test_the_end_of_the_process_lets_go_of_nothing() -> None:
    """What is native may be gone by then."""
    code = """
import sys
from mooncake_sparse_client.stores.regions import MemoryPool
pool = MemoryPool(bytearray(8192), lambda: print("unused", flush=True))
part = pool.allocate(100)
other = MemoryPool(bytearray(8192), lambda: print("other", flush=True))
del other
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (answer.stdout, answer.stderr) == ("other\n", "")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_an_anonymous_pool_takes_only_what_is_used() -> None:
    before = resident_bytes()
    pool = anonymous_pool(1 << 30)
    region = pool.allocate(1 << 30)
    region.view[-1] = 1
    assert resident_bytes() - before < 1 << 29
    assert region.view[0] == 0


@pytest.mark.parametrize("nbytes", [0, -1, "1GB", 1.5, (1 << 63) - 1, 1 << 62])
def test_a_pool_that_cannot_be_is_refused(nbytes: Any) -> None:
    with pytest.raises(ConfigError, match="pool_size"):
        anonymous_pool(nbytes)
