"""The owner process whose memory applications share ends, hangs and comes back; the applications stay."""

from __future__ import annotations

import asyncio

import pytest
from ground import Ground
from workload import Workload, fails, new_seed, workload

pytestmark = [pytest.mark.usefixtures("native_library"), pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("what", "gap"),
    [
        ("idle", 0.1),
        pytest.param("put", 0.1, marks=pytest.mark.faults),
        pytest.param("get", 0.1, marks=pytest.mark.faults),
        pytest.param("idle", 3.0, marks=pytest.mark.faults),
        pytest.param("put", 3.0, marks=pytest.mark.faults),
        pytest.param("get", 10.0, marks=pytest.mark.faults),
    ],
)
async def test_the_owner_is_killed_and_comes_back(what: str, gap: float, fresh: str) -> None:
    async with Ground(client_ttl=4) as ground, workload(ground, "shared", fresh) as load:
        assert await load.round_trip()
        region = load.client.allocate(4096)
        region.view[:] = b"\7" * 4096
        outcome = await load.during(what, ground.owner.kill)
        if what != "idle":
            assert fails(outcome), outcome
        if gap > 1:
            assert fails(await load.bounded(load.get(new_seed()), calls=2))
        await asyncio.sleep(gap)
        await ground.owner.start()
        await load.recovers()
        assert region.view == b"\7" * 4096  # memory that was handed out is where and as it was


@pytest.mark.faults
@pytest.mark.parametrize(("what", "seconds"), [("idle", 2.0), ("put", 8.0), ("get", 8.0)])
async def test_the_owner_is_stopped_and_goes_on(what: str, seconds: float, fresh: str) -> None:
    async with Ground() as ground, workload(ground, "shared", fresh) as load:
        assert await load.round_trip()

        async def stop() -> None:
            ground.owner.stop()

        outcome = await load.during(what, stop)
        if what != "idle":
            assert fails(outcome), outcome
        assert fails(await load.bounded(load.get(new_seed()), calls=2))
        await asyncio.sleep(seconds)
        ground.owner.go_on()
        await load.recovers(90)


@pytest.mark.faults
async def test_two_applications_on_one_owner(fresh: str) -> None:
    """Each is cured by itself, and what one puts the other reads."""
    async with Ground(client_ttl=4) as ground, workload(ground, "shared", fresh) as one:
        async with workload(ground, "shared", fresh) as other:
            for gap in (0.1, 3.0):
                await asyncio.gather(one.during("put", ground.owner.kill), at_work(other))
                await asyncio.sleep(gap)
                await ground.owner.start()
                await asyncio.gather(one.recovers(), other.recovers())
            seed = new_seed()
            assert not (await one.put(seed, confirm=True)).failures
            assert (await other.get(seed)).hit_length == (await one.get(seed)).hit_length > 0
        assert await one.round_trip()  # the other has left


@pytest.mark.faults
async def test_a_client_that_has_closed_does_not_keep_another_from_the_owner(fresh: str) -> None:
    """The native library tells an owner that is new of all the memory of the process, and takes no for no, for good."""
    async with Ground(client_ttl=4) as ground, workload(ground, "shared", fresh) as load:
        async with workload(ground, "shared", fresh) as other:
            assert await other.round_trip()
        assert await load.round_trip()
        await ground.owner.restart(4)  # idle, and long enough to be noticed
        await load.recovers()


async def at_work(load: Workload) -> None:
    for _ in range(5):
        await load.bounded(load.round_trip(), calls=3)
