"""Calls that are given up in each of their phases, and an event loop that ends under a client."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from ground import Ground
from workload import LONG, SLACK, TIMEOUT, Workload, client_of, new_seed, whole, workload

from mooncake_sparse_client.errors import ClientClosedError, SparseStoreError, StoreError
from mooncake_sparse_client.stores.local import LocalMooncake

pytestmark = [pytest.mark.usefixtures("native_library"), pytest.mark.timeout(180)]
CALLS = ("lookup", "get", "put", "exists", "remove", "health")
#: Seconds in which a cancelled call has ended; one that waits for a native call on staged memory does not wait for it.
PROMPT = 1.5


def call_of(load: Workload, name: str, seed: int) -> Any:
    """The call, over a prompt that is already there, but for put."""
    sequence = load.sequence(seed, LONG)
    if name == "put":
        return load.put(new_seed(), LONG)
    if name == "get":
        return load.get(seed, LONG)
    return load.client.health() if name == "health" else getattr(load.client, name)(sequence)


async def given_up(task: asyncio.Task[Any], after: float) -> float:
    """Cancel it so many seconds from now; the seconds it took to end then. It may have ended before."""
    await asyncio.sleep(after)
    began = time.monotonic()
    task.cancel()
    try:
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 30)
    finally:
        assert task.done()
    if not task.cancelled() and (error := task.exception()) is not None:
        assert isinstance(error, StoreError), repr(error)
    return time.monotonic() - began


@pytest.mark.parametrize("mode", ["remote", pytest.param("shared", marks=pytest.mark.faults)])
async def test_calls_that_are_given_up(mode: str, serving_master: LocalMooncake, fresh: str) -> None:
    """Before anything is sent, and with requests on the wire. Nobody notices."""
    draw = random.Random(5)
    async with workload(serving_master, mode, fresh) as load:
        for name in CALLS:
            seed = new_seed()
            for after in (0.0, *(draw.uniform(0, 0.03) for _ in range(8))):
                if name in {"get", "remove"} or after == 0.0:
                    assert not (await load.put(seed, LONG)).failures
                await given_up(asyncio.ensure_future(call_of(load, name, seed)), after)
            task = asyncio.ensure_future(call_of(load, name, seed))
            task.cancel()  # it never began
            await asyncio.gather(task, return_exceptions=True)
            await load.recovers()


@pytest.mark.faults
@pytest.mark.parametrize(("mode", "who"), [("remote", "master"), ("remote", "owner"), ("shared", "owner")])
async def test_calls_to_a_process_that_hangs_are_given_up_at_once(mode: str, who: str, fresh: str) -> None:
    async with Ground() as ground, workload(ground, mode, fresh) as load:
        seed = new_seed()
        assert not (await load.put(seed, LONG)).failures
        subject = getattr(ground, who)
        for name in CALLS:
            subject.stop()
            try:
                took = await given_up(asyncio.ensure_future(call_of(load, name, seed)), 0.2)
                assert took < PROMPT, name
            finally:
                subject.go_on()
            await load.recovers(90)


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["remote", "shared"])
async def test_connecting_is_given_up(mode: str, fresh: str) -> None:
    draw = random.Random(6)
    async with Ground() as ground:
        for after in (0.0, *(draw.uniform(0, 0.5) for _ in range(5))):

            async def connect() -> None:
                async with workload(ground, mode, fresh):
                    pass

            await given_up(asyncio.ensure_future(connect()), after)
        getattr(ground, "owner" if mode == "shared" else "master").stop()
        took = await given_up(asyncio.ensure_future(connect()), 0.5)
        assert took < TIMEOUT + SLACK
        ground.master.go_on()
        ground.owner.go_on()
        async with workload(ground, mode, fresh) as load:
            await load.recovers()


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["remote", "shared"])
async def test_closing_is_given_up(mode: str, fresh: str) -> None:
    """It is carried out all the same; also under calls, and with a process that hangs."""
    async with Ground() as ground:
        for hangs in (False, True):
            async with workload(ground, mode, fresh) as load:
                seed = new_seed()
                assert not (await load.put(seed, LONG)).failures
                calls = [asyncio.ensure_future(call_of(load, name, seed)) for name in ("get", "put")]
                await asyncio.sleep(0.05)
                if hangs:
                    ground.owner.stop()
                closing = asyncio.ensure_future(load.client.aclose())
                await asyncio.sleep(0.01)
                closing.cancel()
                await asyncio.wait([closing, *calls], timeout=60)
                ground.owner.go_on()
                assert closing.done()
                for call in calls:
                    assert call.done()
                    assert call.exception() is None or isinstance(call.exception(), SparseStoreError)
                with pytest.raises(ClientClosedError):
                    await load.client.lookup(load.sequence(seed, LONG))


@pytest.mark.parametrize("mode", ["remote", pytest.param("shared", marks=pytest.mark.faults)])
def test_an_event_loop_ends_under_a_client(mode: str, serving_master: LocalMooncake, fresh: str) -> None:
    """With calls under way. The next loop goes on with the same client, and closes it."""

    async def first() -> Workload:
        load = Workload(await client.__aenter__())
        assert not (await load.put(seed, LONG)).failures
        tasks.extend(asyncio.ensure_future(call_of(load, name, seed)) for name in CALLS)
        await asyncio.sleep(0.003)
        return load

    async def second(load: Workload) -> None:
        await load.recovers()
        assert (await load.get(seed, LONG)).hit_length in {0, whole(LONG)}  # it was being removed
        await load.client.aclose()

    tasks: list[Any] = []
    seed, client = new_seed(), client_of(serving_master, mode, fresh)
    load = asyncio.run(first())
    asyncio.run(second(load))
