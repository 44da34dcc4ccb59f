"""What a client is pointed at is no master: it says so in time, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from ground import MIB, Ground
from workload import LAYOUT, LIMITS, SLACK, TIMEOUT, Workload, workload

from mooncake_sparse_client import LocalMooncake, SparseStoreClient
from mooncake_sparse_client.errors import ConnectError

pytestmark = [pytest.mark.usefixtures("native_library"), pytest.mark.timeout(120)]
#: Seconds that the event loop may be held up.
DELAY = 0.05
#: A master of another version, as ``host:port``.
OTHER = "MOONCAKE_SPARSE_OTHER_MASTER"
other_master = os.environ.get(OTHER, "")


@asynccontextmanager
async def port(kind: str) -> AsyncIterator[str]:
    """The address of what is no master."""
    if kind == "absent":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            yield f"127.0.0.1:{free.getsockname()[1]}"
    elif kind == "unknown name":
        yield "no-such-host.invalid:50051"
    elif kind == "stopped":
        async with Ground() as ground:
            ground.master.stop()
            yield ground.master_address
    else:
        answer = {"silent": None, "http": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "closing": b""}[
            kind
        ]
        writers: list[asyncio.StreamWriter] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            if answer is None:
                return
            if answer:
                await reader.read(100)
                writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for writer in writers:
                writer.close()
            await asyncio.sleep(0)


def client_at(address: str, mode: str, layout: object, model: str) -> SparseStoreClient:
    where = {"owner_address": address} if mode == "shared" else {"master_server_address": address}
    return SparseStoreClient.connect(
        layout, model_name=model, mode=mode, timeout=TIMEOUT, limits=LIMITS, pool_size=24 * MIB,
        retention_interval=None, **where,
    )  # fmt: skip


async def delay_of(call: Callable[[], Awaitable[None]]) -> float:
    """The longest that the event loop was held up by the call, in seconds; the least of a few tries."""
    least = 60.0
    for _ in range(8):
        task = asyncio.ensure_future(call())
        longest = 0.0
        while not task.done():
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - began - 0.005)
        await task
        least = min(least, longest)
        if least < DELAY:
            break
    return least


STEPS = {
    "absent": {"refused"},
    "unknown name": {"resolve"},
    "silent": {"handshake"},
    "http": {"handshake"},
    "closing": {"handshake"},
    "stopped": {"handshake"},
}


@pytest.mark.parametrize(
    "kind", ["absent", *(pytest.param(kind, marks=pytest.mark.faults) for kind in STEPS if kind != "absent")]
)
async def test_connecting_to_what_is_no_master(kind: str, fresh: str) -> None:
    async with port(kind) as address:

        async def connect() -> None:
            began = time.monotonic()
            with pytest.raises(ConnectError) as met:
                async with client_at(address, "remote", LAYOUT, fresh):
                    pass
            assert met.value.step in STEPS[kind], met.value
            assert address in str(met.value)
            assert time.monotonic() - began < TIMEOUT + SLACK

        assert await delay_of(connect) < DELAY


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["absent", "http", "silent"])
async def test_connecting_to_what_is_no_owner_process(kind: str, fresh: str) -> None:
    async with port(kind) as address:

        async def connect() -> None:
            began = time.monotonic()
            with pytest.raises(ConnectError):
                async with client_at(address, "shared", LAYOUT, fresh):
                    pass
            assert time.monotonic() - began < TIMEOUT + SLACK

        assert await delay_of(connect) < DELAY


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["remote", "shared"])
async def test_connecting_does_not_hold_the_event_loop_up(mode: str, serving_master: LocalMooncake, fresh: str) -> None:
    address = serving_master.owner_address if mode == "shared" else serving_master.master_address
    clients = []

    async def connect() -> None:
        clients.append(await client_at(str(address), mode, LAYOUT, fresh).__aenter__())

    try:
        assert await delay_of(connect) < DELAY
        for client in clients:
            assert await Workload(client).round_trip()
    finally:
        for client in clients:
            await client.aclose()


@pytest.mark.faults
@pytest.mark.skipif(not other_master, reason=f"{OTHER} names no master of another version")
async def test_a_master_of_another_version(fresh: str) -> None:
    with pytest.raises(ConnectError) as met:
        async with client_at(other_master, "remote", LAYOUT, fresh):
            pass
    assert met.value.step in {"version", "handshake"}


@pytest.mark.faults
async def test_after_a_failed_connect_the_next_one_is_well(fresh: str) -> None:
    async with Ground() as ground:
        ground.master.stop()
        with pytest.raises(ConnectError):
            async with workload(ground, "remote", fresh):
                pass
        ground.master.go_on()
        async with workload(ground, "remote", fresh) as load:
            await load.recovers()
