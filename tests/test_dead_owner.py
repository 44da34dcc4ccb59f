"""Real owners of memory that are killed or stopped: what reads and writes of a client make of it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from mooncake_sparse_client import (
    FullAttentionSpec,
    GetItem,
    KVCacheLayout,
    Limits,
    LocalMooncake,
    MooncakeStore,
    PagedKVCache,
    Resilience,
    SparseStoreClient,
)
from mooncake_sparse_client.config import load_config
from mooncake_sparse_client.errors import StoreTimeoutError
from mooncake_sparse_client.stores.base import Failure
from mooncake_sparse_client.stores.ports import HOST, choose_ports
from mooncake_sparse_client.stores.processes import Process
from mooncake_sparse_client.stores.wrapping import WrappedStore

MIB = 1 << 20
PAGE = 64 << 10
LAYOUT = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=PAGE)])
CHUNKS = 128
LIMITS = Limits(max_batch_bytes=MIB, staging_bytes=4 * MIB)  # 15 chunks a batch
TOKENS = range(16 * CHUNKS + 1)


#: So large that they move without a copy.
LARGE = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=4 * PAGE)])


def page(chunk: int, nbytes: int = PAGE) -> bytes:
    return random.Random(chunk).randbytes(nbytes)


def source(group: int, chunk: int) -> bytes:
    return page(chunk)


def intact(got: Any) -> bool:
    return all(bytes(view) == page(chunk) for (_, chunk), view in got.chunks.items())


class Counted(WrappedStore):
    """Counts the read requests."""

    gets = 0

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        self.gets += 1
        return await super().get(items)


async def connected(local: LocalMooncake, *, timeout: float = 30.0) -> MooncakeStore:
    config = load_config("remote", master_server_address=local.master_address, local_hostname="127.0.0.1", environ={})
    return await MooncakeStore.connect(config, timeout=timeout)


def client_of(store: Any, layout: KVCacheLayout = LAYOUT, **settings: Any) -> SparseStoreClient:
    """Without a breaker, which would take over after a while."""
    plain = Resilience(attempts=1, breaker=False)
    return SparseStoreClient(
        store, layout, model_name="m", retention_interval=None, limits=LIMITS, resilience=plain, **settings
    )


@pytest.fixture
async def local(native_library: None) -> AsyncIterator[LocalMooncake]:
    async with await LocalMooncake.start(memory=128 * MIB, restart_owner=False) as local:
        yield local


async def second_owner(local: LocalMooncake) -> Process:
    port = choose_ports({"owner_port": None})["owner_port"]
    arguments = (
        f"--host={HOST} --port={port} --threads=4 --protocol=tcp --master_server_address={local.master_address} "
        f"--metadata_server=P2PHANDSHAKE --global_segment_size={128 * MIB}"
    )
    process = Process("mooncake_client", arguments.split(), [port])
    await process.start(asyncio.get_running_loop().time() + 30)
    return process


def send(local: LocalMooncake, number: signal.Signals) -> None:
    assert local.owner_pid is not None
    os.kill(local.owner_pid, number)


async def test_an_owner_that_was_killed_is_asked_a_few_times_in_all(local: LocalMooncake) -> None:
    async with await connected(local) as native:
        store = Counted(native)
        async with client_of(store) as client:
            sequence = client.sequence(TOKENS)
            await client.put(sequence, source)
            hit = await client.lookup(sequence)
            assert hit.hit_length == 16 * CHUNKS
            send(local, signal.SIGKILL)
            got = await client.get(hit)
            assert (got.hit_length, got.failures[0].reason) == (0, "transfer")
            assert store.gets <= 5  # of 18 that twice nine batches are
            store.gets = 0
            assert (await client.get(hit)).hit_length == 0
            assert (await client.lookup(sequence)).hit_length == 0  # the master says still that all is there
            assert (await client.get(sequence)).hit_length == 0
            assert store.gets == 0


@pytest.mark.faults
async def test_of_two_owners_one_is_killed_and_a_put_mends_what_it_had(local: LocalMooncake) -> None:
    other = await second_owner(local)
    try:
        async with await connected(local) as store, client_of(store) as client:
            sequence = client.sequence(TOKENS)
            put = await client.put(sequence, source)
            assert put.written.chunks == CHUNKS
            hit = await client.lookup(sequence)
            assert hit.hit_length == 16 * CHUNKS
            send(local, signal.SIGKILL)
            got = await client.get(hit)
            assert got.hit_length == 16 * min(failure.chunk for failure in got.failures)
            assert {failure.reason for failure in got.failures} == {"transfer"}
            assert intact(got)
            lookup = await client.lookup(sequence)
            assert lookup.hit_length == got.hit_length
            # What is known to be out of reach is written anew once the master has forgotten the owner, within patience;
            # the next put finds the rest.
            put = await client.put(sequence, source, hit=hit)
            assert (put.written.chunks, put.failures) == (len(got.failures), ())
            put = await client.put(sequence, source)
            assert put.failures == ()
            got = await client.get(sequence)
            assert (got.hit_length, got.failures) == (16 * CHUNKS, ())
            assert intact(got)
    finally:
        await other.end()


async def ends_in_time(call: Any, timeout: float) -> None:
    """The margin is for a busy machine; a native call to a stopped owner takes longer than both."""
    begun = time.monotonic()
    with pytest.raises(StoreTimeoutError):
        await call
    assert time.monotonic() - begun < timeout + 2.0


@pytest.mark.faults
@pytest.mark.parametrize("killed", [False, True], ids=["continued", "killed"])
async def test_calls_to_a_stopped_owner_end_in_time_and_leave_nothing(local: LocalMooncake, killed: bool) -> None:
    timeout = 1.0
    async with await connected(local, timeout=timeout) as store, client_of(store, timeout=timeout) as client:
        sequence, new = client.sequence(TOKENS), client.sequence([5] * 160)
        await client.put(sequence, source)
        hit = await client.lookup(sequence)
        assert (await client.get(hit)).hit_length == 16 * CHUNKS
        staging = client._transport.staging
        send(local, signal.SIGSTOP)
        # More than the staging memory holds: what the native library may still write to is not used by others.
        await asyncio.gather(*(ends_in_time(client.get(hit), timeout) for _ in range(6)))
        assert not staging.idle
        await asyncio.gather(ends_in_time(client.put(new, source), timeout), ends_in_time(client.get(hit), timeout))
        assert (await client.lookup(sequence)).hit_length == 16 * CHUNKS  # the master is well
        assert not client._transport.lane.idle
        send(local, signal.SIGKILL if killed else signal.SIGCONT)
        async with asyncio.timeout(20):
            while not (staging.idle and client._transport.lane.idle):
                await asyncio.sleep(0.05)
        assert client._transport.budget.in_flight == 0
        if not killed:
            assert (await client.put(new, source)).failures == ()
            got = await client.get(sequence)
            assert (got.hit_length, got.failures) == (16 * CHUNKS, ())
            assert intact(got)


async def test_a_read_into_the_callers_memory_ends_when_the_native_call_does(local: LocalMooncake) -> None:
    """It raises after the time-out, but not before the memory is the caller's again."""
    timeout = 1.0
    async with await connected(local, timeout=timeout) as store, client_of(store, LARGE, timeout=timeout) as client:
        sequence = client.sequence(range(65))
        await client.put(sequence, lambda group, chunk: page(chunk, 4 * PAGE))
        hit = await client.lookup(sequence)
        memory = np.zeros((4, 4 * PAGE), np.uint8)
        cache = PagedKVCache([[memory]])
        assert await client.register(cache)
        send(local, signal.SIGSTOP)
        reading = asyncio.create_task(client.get(hit, into=cache.at([np.arange(4)])))
        await asyncio.wait([reading], timeout=0.3)
        send(local, signal.SIGCONT)
        assert (await reading).hit_length == 64
        assert all(memory[chunk].tobytes() == page(chunk, 4 * PAGE) for chunk in range(4))
        send(local, signal.SIGSTOP)
        with pytest.raises(StoreTimeoutError):  # 8 pieces, some three at a time, a second each
            async with asyncio.timeout(20):
                await client.get(hit, into=cache.at([np.arange(4)]))
        assert client._transport.lane.idle
        memory[:] = 0
        send(local, signal.SIGCONT)
        await asyncio.sleep(0.3)
        assert not memory.any()
