"""Memory that an owner process has lost is shared with it anew, while whoever holds it goes on."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from mooncake_sparse_client.config import load_config
from mooncake_sparse_client.errors import StoreUnavailableError
from mooncake_sparse_client.stores import owner, sharing
from mooncake_sparse_client.stores.base import GetItem, PutItem
from mooncake_sparse_client.stores.local import LocalMooncake
from mooncake_sparse_client.stores.mooncake import MooncakeStore

pytestmark = pytest.mark.usefixtures("native_library")
MIB = 1 << 20
#: Seconds in which a lost mapping must be cured; it takes one or two where the machine is idle.
SOON = 30.0


@asynccontextmanager
async def shared_store(pause: float, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[LocalMooncake, Any]]:
    """A store over an owner process that is back ``pause`` seconds after it was killed."""
    monkeypatch.setattr(owner, "PAUSE", pause)
    async with await LocalMooncake.start(memory=64 * MIB) as local:
        config = load_config("shared", owner_address=local.owner_address, environ={}, pool_size=8 * MIB)
        async with await MooncakeStore.connect(config) as store:
            yield local, store


async def kill_owner(local: LocalMooncake) -> None:
    """Kill it, and return once another serves."""
    former, restarts = local.owner_pid, local.owner_restarts
    assert former is not None
    os.kill(former, signal.SIGKILL)
    await until(lambda: local.owner_restarts > restarts and local.owner_serves)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not true():
            await asyncio.sleep(0.02)


async def stored(store: MooncakeStore, key: str, value: memoryview, *, replace: bool = False) -> None:
    """Put until it is there: what is put while a dead owner is known to the master may go to it."""
    async with asyncio.timeout(SOON):
        while True:
            try:
                if await store.put([PutItem(key, (value,), replace)]) == [None]:
                    return
            except StoreUnavailableError:
                pass
            await asyncio.sleep(0.2)


@asynccontextmanager
async def busy(store: MooncakeStore) -> AsyncIterator[None]:
    """Calls are made all the time: that is when an owner's quick restart goes unnoticed."""

    async def ask() -> None:
        room = store.memory.allocate(16)
        while True:
            try:
                await store.exists(["x"])
                await store.get([GetItem("y", (room.view,))])
            except StoreUnavailableError:
                await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(ask()) for _ in range(2)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("pause", [0.1, pytest.param(2.0, marks=pytest.mark.faults)])
async def test_an_owner_that_is_back_soon_is_told_of_the_memory_again(
    pause: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fresh: str
) -> None:
    async with shared_store(pause, monkeypatch) as (local, store):
        region = store.memory.allocate(MIB)
        region.view[:] = (content := np.random.default_rng(3).bytes(MIB))
        await stored(store, f"{fresh}0", region.view)
        for number in range(1, 4):
            async with busy(store):
                await asyncio.sleep(0.3)
                await kill_owner(local)
                await stored(store, f"{fresh}{number}", region.view)
            assert region.view == content  # the memory is where and as it was
            target = store.memory.allocate(MIB)
            assert await store.get([GetItem(f"{fresh}{number}", (target.view,))]) == [None]
            assert target.view == content
            pieces = (target.view[: MIB // 2], target.view[MIB // 2 :])
            target.array[:] = 0
            assert await store.get([GetItem(f"{fresh}{number}", pieces)]) == [None]
            assert target.view == content
        # Replacing a value goes another way to the library.
        await stored(store, f"{fresh}3", memoryview(b"other"), replace=True)
        assert await store.get([GetItem(f"{fresh}3", (target.view[:5],))]) == [None]
        assert bytes(target.view[:5]) == b"other"
        held = store.memory.allocate(5)
    assert [record for record in caplog.records if "shared anew" in record.message]
    held.view[:] = b"still"  # as long as somebody holds it, closed or not
    assert region.view == content


async def test_an_idle_process_notices_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is asked of the store: the look that is taken every second finds and mends it."""
    looks: list[bool] = []
    mend = sharing.Sharing.mend

    def seen(self: sharing.Sharing) -> bool:
        looks.append(mend(self))
        return looks[-1]

    monkeypatch.setattr(sharing.Sharing, "mend", seen)
    async with shared_store(0.1, monkeypatch) as (_, store):
        address = store._own_memory.sharing._address
        assert await asyncio.to_thread(store._own_memory.plain_native.unregister_buffer, address) == 0
        await until(lambda: any(looks))
        assert store._own_memory.sharing.native.shift
        assert (await store.health()).ok


async def test_where_memory_is_short_the_trouble_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sharing anew takes the memory twice for a moment; too much of it would end the process."""
    async with shared_store(0.1, monkeypatch) as (_, store):
        address = store._own_memory.sharing._address
        await stored(store, "a", memoryview(b"first"))
        monkeypatch.setattr(sharing, "free_memory", lambda root: [(MIB, "the test")])
        assert await asyncio.to_thread(store._own_memory.plain_native.unregister_buffer, address) == 0
        with pytest.raises(StoreUnavailableError, match=f"{8 * MIB} bytes, and {MIB} are free"):
            await store.get([GetItem("a", (store.memory.allocate(5).view,))])
        health = await store.health()
        assert (health.ok, health.kind) == (False, "unavailable")
        monkeypatch.undo()
        with caplog.at_level(logging.WARNING):
            await until(lambda: "shared anew" in caplog.text)
        assert await store.get([GetItem("a", (store.memory.allocate(5).view,))]) == [None]


async def test_a_refusal_that_has_another_reason_is_an_answer(monkeypatch: pytest.MonkeyPatch, fresh: str) -> None:
    async with shared_store(0.1, monkeypatch) as (_, store):
        await stored(store, fresh, memoryview(b"first"))
        (failure,) = await store.get([GetItem(fresh, (memoryview(bytearray(3)),))])
        assert failure.kind == "length"
        assert store._own_memory.sharing.native.shift == 0


def test_a_connection_goes_on_in_another_event_loop(serving_master: LocalMooncake) -> None:
    """The looks move to the loop that the connection is used from."""
    config = load_config("shared", owner_address=serving_master.owner_address, environ={}, pool_size=8 * MIB)
    store = asyncio.run(MooncakeStore.connect(config))
    keeper = store._keeper
    assert keeper is not None
    first = keeper._loop

    async def second() -> None:
        room = store.memory.allocate(5)
        await store.get([GetItem("a", (room.view,))])
        assert keeper._loop is asyncio.get_running_loop() is not first
        await store.aclose()
        assert keeper._loop is None

    asyncio.run(second())
