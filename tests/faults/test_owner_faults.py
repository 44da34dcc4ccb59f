"""The process that holds the data ends, hangs or is full, under a remote client that stays."""

from __future__ import annotations

import asyncio
import signal

import pytest
from ground import MIB, Ground
from workload import TIMEOUT, Workload, fails, new_seed, whole, workload

from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout, Limits, Replication

pytestmark = [pytest.mark.usefixtures("native_library"), pytest.mark.timeout(180), pytest.mark.faults]
BIG = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=256 << 10)])
LIMITS = Limits(max_batch_bytes=2 * MIB, staging_bytes=8 * MIB)


@pytest.mark.parametrize("what", ["idle", "put", "get"])
async def test_the_owner_of_the_data_is_killed(what: str, fresh: str) -> None:
    async with Ground() as ground, workload(ground, "remote", fresh) as load:
        seed = new_seed()
        assert not (await load.put(seed)).failures
        outcome = await load.during(what, ground.owner.kill)
        if what != "idle":
            assert fails(outcome), outcome
        # The master speaks of its keys for a while: what cannot be read is no hit.
        lost = await load.bounded(load.get(seed), calls=2)
        assert fails(lost) or lost.hit_length == 0, lost
        await ground.owner.start()
        await load.recovers()


@pytest.mark.parametrize("what", ["put", "get"])
async def test_the_owner_of_the_data_is_stopped_and_goes_on(what: str, fresh: str) -> None:
    async with Ground() as ground, workload(ground, "remote", fresh) as load:
        seed = new_seed()
        assert not (await load.put(seed)).failures

        async def stop() -> None:
            ground.owner.stop()

        assert fails(await load.during(what, stop))
        ground.owner.go_on()
        await load.recovers()
        assert (await load.get(seed)).hit_length in {0, whole(320)}  # forgotten if it was away for too long


async def test_the_owner_of_the_data_closes(fresh: str) -> None:
    """In order: what it held is forgotten at once, and is a miss."""
    async with Ground() as ground, workload(ground, "remote", fresh) as load:
        seed = new_seed()
        assert not (await load.put(seed)).failures
        ground.owner.signal(signal.SIGTERM)
        await ground.owner.end()
        gone = await load.bounded(load.get(seed))
        assert gone.hit_length == 0
        put = await load.bounded(load.put(new_seed()), calls=2)
        assert fails(put), put
        await ground.owner.start()
        await load.recovers()


async def fill(load: Workload, *, leased: bool) -> list[int]:
    """Put prompts of two MiB until one does not fit; those that do."""
    stored: list[int] = []
    for _ in range(30):
        seed = new_seed()
        put = await load.bounded(load.put(seed, 129))
        if put.failures:
            assert {failure.reason for failure in put.failures} == {"full"}
            return stored
        stored.append(seed)
        if leased:
            await load.client.exists(load.sequence(seed, 129), all_chunks=True)
    raise AssertionError("the store never was full")


async def test_a_full_store_makes_room(fresh: str) -> None:
    """What nobody asks for makes way for what is new."""
    async with (
        Ground(memory=32 * MIB, lease_ttl=0.2) as ground,
        workload(ground, "remote", fresh, layout=BIG, limits=LIMITS) as load,
    ):
        seeds = [new_seed() for _ in range(32)]
        for seed in seeds:
            assert not (await load.bounded(load.put(seed, 129))).failures
        for seed in seeds:
            got = await load.bounded(load.get(seed, 129))
            assert got.hit_length <= whole(129)


async def test_a_store_full_of_leases_says_so_and_has_room_later(fresh: str) -> None:
    async with (
        Ground(memory=32 * MIB, lease_ttl=10.0) as ground,
        workload(ground, "remote", fresh, layout=BIG, limits=LIMITS) as load,
    ):
        stored = await fill(load, leased=True)
        assert stored
        await asyncio.sleep(10.5 - TIMEOUT / 2)
        assert not (await load.bounded(load.put(new_seed(), 65), calls=2)).failures


async def test_a_store_full_of_pins_says_so_until_one_is_removed(fresh: str) -> None:
    async with (
        Ground(memory=32 * MIB, lease_ttl=0.1) as ground,
        workload(ground, "remote", fresh, layout=BIG, limits=LIMITS, replication=Replication(hard_pin=True)) as pinning,
        workload(ground, "remote", fresh + "+", layout=BIG, limits=LIMITS) as load,
    ):
        stored = await fill(pinning, leased=False)
        put = await load.bounded(load.put(new_seed(), 129))
        assert {failure.reason for failure in put.failures} == {"full"}
        for seed in stored:
            got = await load.bounded(pinning.get(seed, 129))
            assert got.hit_length == whole(129)
        removed = await pinning.client.remove(pinning.sequence(stored[0], 129), force=True)
        assert removed.removed == 8
        assert not (await load.bounded(load.put(new_seed(), 65))).failures


async def test_a_lease_that_is_shorter_than_the_read(fresh: str) -> None:
    """A read that is over too late counts as none, though its bytes are there."""
    huge = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=8 * MIB)])
    limits = Limits(max_batch_bytes=32 * MIB, staging_bytes=40 * MIB)
    async with (
        Ground(memory=128 * MIB, lease_ttl=0.001) as ground,
        workload(ground, "remote", fresh, layout=huge, limits=limits, pool_size=64 * MIB) as load,
    ):
        seed = new_seed()
        assert not (await load.bounded(load.put(seed, 65))).failures
        reasons = set()
        for _ in range(10):
            got = await load.bounded(load.get(seed, 65))
            reasons |= {failure.reason for failure in got.failures}
            assert (got.hit_length == whole(65)) is not bool(got.failures)
        assert reasons == {"lease_expired"}
