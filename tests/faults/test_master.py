"""A master that ends, hangs and comes back, under a client that stays."""

from __future__ import annotations

import asyncio
import time

import pytest
from ground import Ground
from workload import Workload, fails, new_seed, whole, workload

from mooncake_sparse_client.errors import StoreTimeoutError, StoreUnavailableError

pytestmark = [pytest.mark.usefixtures("native_library"), pytest.mark.timeout(180)]
LOOKUPS = 10_000


@pytest.mark.parametrize(
    ("what", "gap"),
    [
        ("idle", 0.2),
        pytest.param("put", 4.0, marks=pytest.mark.faults),
        pytest.param("get", 4.0, marks=pytest.mark.faults),
        pytest.param("put", 0.2, marks=pytest.mark.faults),
        pytest.param("get", 0.2, marks=pytest.mark.faults),
        pytest.param("idle", 15.0, marks=pytest.mark.faults),
    ],
)
async def test_a_master_is_killed_and_comes_back(what: str, gap: float, fresh: str) -> None:
    async with Ground() as ground, workload(ground, "remote", fresh) as load:
        assert await load.round_trip()
        outcome = await load.during(what, ground.master.kill)
        if what == "put":
            assert fails(outcome), outcome  # nobody takes what was left to write
        await asyncio.sleep(gap)
        if gap > 1:
            assert fails(await load.bounded(load.get(1)))
        if gap > 10:
            assert await lookups_while_down(load) < 1.0
            assert not (await load.client.health()).ok
        await ground.master.start()
        await load.recovers()


async def lookups_while_down(load: Workload) -> float:
    """Seconds for 10,000 lookups of a store that is known to be down, the least of three tries."""
    sequence = load.sequence(new_seed(), 320)
    assert len(sequence.block_hashes) == 20
    took = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(LOOKUPS):
            try:
                await load.client.lookup(sequence)
            except (StoreUnavailableError, StoreTimeoutError):
                continue
            raise AssertionError("a master that is gone answered")
        took.append(time.perf_counter() - began)
    return min(took)


@pytest.mark.faults
@pytest.mark.parametrize("what", ["idle", "put", "get"])
async def test_a_master_is_stopped_and_goes_on(what: str, fresh: str) -> None:
    async with Ground() as ground, workload(ground, "remote", fresh) as load:
        assert await load.round_trip()

        async def stop() -> None:
            ground.master.stop()

        outcome = await load.during(what, stop)
        if what == "put":
            assert fails(outcome), outcome
        assert fails(await load.bounded(load.get(1), calls=2))
        ground.master.go_on()
        await load.recovers()


@pytest.mark.faults
async def test_what_is_stored_is_there_when_a_stopped_master_goes_on(fresh: str) -> None:
    async with Ground() as ground, workload(ground, "remote", fresh) as load:
        seed = new_seed()
        assert not (await load.put(seed)).failures
        await ground.master.pause(3)
        await load.recovers()
        assert (await load.get(seed)).hit_length == whole(320)
