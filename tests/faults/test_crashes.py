"""What ends a process that uses the native store directly, tried through this package: it ends with our errors instead.

Each row runs in a process of its own, which says which errors it met and leaves with status 3; one that a signal ends
has a negative status. Rows that stand elsewhere: ``tests/test_guard.py`` (a store that was never opened, every state,
the end of the process while idle, under calls, terminated, by an exception and in a fork, closing what hangs, a store
that is not closed), ``tests/test_mooncake_store.py`` (calls and closing in a fork that ends by ``os._exit``,
impossible master addresses, a failed connect's words), ``tests/test_config.py`` (what is refused of the settings) and
``tests/store_contract.py`` (duplicate keys, buffers that are no bytes, on every store).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from mooncake_sparse_client.stores.local import LocalMooncake

slow = pytest.mark.faults
#: Closing in embedded mode takes the native library seconds.
MODES = (pytest.param("embedded", marks=slow), "remote", "shared")

PRELUDE = """
import asyncio, contextlib, gc, os, sys
import numpy as np
from mooncake_sparse_client import *
from mooncake_sparse_client.errors import *

mode, master, owner = sys.argv[1:4]
lent = {"global_segment_size": 64 << 20, "local_hostname": "127.0.0.1"} if mode == "embedded" else {}
CONFIG = load_config(
    mode, master_server_address=master, owner_address=owner, environ={}, pool_size=24 << 20, **lent
)
LAYOUT = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=4000)])
KEY = f"of {os.getpid()}"
VIEW = memoryview(b"first")
LIMITS = Limits(max_batch_bytes=1 << 20, staging_bytes=4 << 20)

def client_over(store):
    return SparseStoreClient(store, LAYOUT, model_name=KEY, retention_interval=None, limits=LIMITS)

def calls_of(store):
    room = memoryview(bytearray(5))
    return [
        lambda: store.exists([KEY]), lambda: store.put([PutItem(KEY, (VIEW,))]),
        lambda: store.put([PutItem(KEY, (VIEW,), replace=True)]), lambda: store.get([GetItem(KEY, (room,))]),
        lambda: store.remove([KEY]), lambda: store.remove([KEY], force=True), store.health,
    ]

def calls_of_client(client, paged=None):
    sequence = client.sequence(range(50))
    page = lambda group, chunk: bytes(4000)
    return [
        lambda: client.lookup(sequence), lambda: client.exists(sequence), lambda: client.get(sequence),
        lambda: client.get(sequence, into=lambda group, chunk: bytearray(4000)),
        lambda: client.put(sequence, page), lambda: client.remove(sequence),
    ]

async def refused(error, *calls):
    for call in calls:
        try:
            answer = call()
            if asyncio.iscoroutine(answer):
                answer = await asyncio.wait_for(answer, 20)
        except error as met:
            print(type(met).__name__)
        else:
            raise AssertionError(f"answered {answer!r}")

def stored(answer):
    # What is put while a process that has just ended badly is known to the master may be meant for that.
    assert all(failure is None or failure.kind == "transfer" for failure in answer), answer
    return answer == [None] * len(answer)

async def put(store, key, content):
    while not stored(await store.put([PutItem(key, (memoryview(content),))])):
        await asyncio.sleep(0.1)

async def read(store, key, length):
    room = bytearray(length)
    assert await store.get([GetItem(key, (memoryview(room),))]) == [None]
    return bytes(room)

def leave():
    sys.stdout.flush()
    sys.exit(3)
"""


def run(script: str, mode: str, master: str, owner: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MC_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + script, mode, master, str(owner), *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 3, done
    return done


def over(local: LocalMooncake, script: str, mode: str, *arguments: str) -> list[str]:
    """What the script prints, over a master and an owner that serve."""
    return run(script, mode, local.master_address, local.owner_address, *arguments).stdout.split()


AFTER_CLOSE = """
async def main():
    store = await MooncakeStore.connect(CONFIG)
    client = client_over(store)
    async with client:
        region = client.allocate(4000)
        region.view[:5] = b"still"
        await client.put(client.sequence(range(50)), lambda group, chunk: bytes([chunk]) * 4000)
        got = await client.get(client.sequence(range(50)))
        paged = PagedKVCache([[region.array.reshape(1, 4000)]])
        await client.register(paged)
    for call in (lambda: client.allocate(5), lambda: client.register(paged), lambda: client.unregister(paged)):
        await refused(ClientClosedError, call)
    await refused(ClientClosedError, lambda: client.sequence(range(5)), client.health)
    await store.aclose()
    await store.aclose()
    await refused(ClientClosedError, *calls_of(store))
    # Memory and results stay what they were, whoever is closed.
    assert bytes(region.view[:5]) == b"still"
    region.array[:] = 7
    assert all(bytes(view) == bytes([chunk]) * 4000 for (_, chunk), view in got.chunks.items())
    async with await MooncakeStore.connect(CONFIG) as again:
        await put(again, KEY, region.view)
        assert await read(again, KEY, 4000) == b"\\7" * 4000
        del region, got, paged, store, client
        gc.collect()
        await put(again, KEY + " more", b"more")
    await refused(ClientClosedError, *calls_of(again))

asyncio.run(main())
leave()
"""


@pytest.mark.parametrize("mode", MODES)
def test_after_closing_and_connecting_again(serving_master: LocalMooncake, mode: str) -> None:
    """Every call is refused, and memory of the closed client is as valid as it was, in the next connection too."""
    assert over(serving_master, AFTER_CLOSE, mode) == ["ClientClosedError"] * (3 + 2 + 7 + 7)


AFTER_FAILURE = """
async def main():
    store = MooncakeStore(CONFIG, timeout=5)
    client = SparseStoreClient.connect(
        LAYOUT, model_name=KEY, config=CONFIG, retention_interval=None, limits=LIMITS, timeout=5
    )
    await refused(ClientClosedError, *calls_of_client(client), lambda: client.allocate(5))
    await refused(ConnectError, store.open, client.__aenter__)
    await refused(ClientClosedError, *calls_of(store), lambda: store.memory)
    await refused(ClientClosedError, *calls_of_client(client), lambda: client.allocate(5), store.open)
    await client.aclose()
    await store.aclose()

asyncio.run(main())
leave()
"""


@pytest.mark.parametrize("mode", MODES)
def test_before_and_after_a_failed_connect(native_library: None, mode: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nobody = f"127.0.0.1:{probe.getsockname()[1]}"
    said = run(AFTER_FAILURE, mode, nobody, nobody).stdout.split()
    assert said == ["ClientClosedError"] * 7 + ["ConnectError"] * 2 + ["ClientClosedError"] * (8 + 8)


IN_FLIGHT = """
def everything(store, client):
    keys = [f"{KEY} {number}" for number in range(20000)]
    large = memoryview(bytes(8 << 20))
    rooms = [memoryview(bytearray(8 << 20)) for _ in range(2)]
    return [
        store.exists(keys), store.remove(keys), store.health(),
        store.put([PutItem(KEY + "a", (large,))]), store.put([PutItem(KEY + "a", (large,), replace=True)]),
        *(store.get([GetItem(KEY + "large", (room,))]) for room in rooms),
        *(call() for _ in range(4) for call in calls_of_client(client)),
    ]

async def main():
    store = await MooncakeStore.connect(CONFIG)
    client = client_over(store)
    await put(store, KEY + "large", bytes(8 << 20))
    calls = [asyncio.create_task(call) for call in everything(store, client)]
    await asyncio.sleep(float(sys.argv[5]))
    if sys.argv[4] == "exit":
        sys.exit(3)
    await asyncio.wait_for((store if sys.argv[4] == "store" else client).aclose(), 60)
    _, late = await asyncio.wait(calls, timeout=60)
    assert not late, late
    for call in calls:
        error = call.exception()
        assert error is None or isinstance(error, SparseStoreError), repr(error)
    await client.aclose()
    await store.aclose()

asyncio.run(main())
leave()
"""


@pytest.mark.parametrize("after", [pytest.param(0.0, marks=slow), 0.003, pytest.param(0.02, marks=slow)])
@pytest.mark.parametrize("what", ["store", "client", "exit"])
@pytest.mark.parametrize("mode", MODES)
def test_closing_and_leaving_under_calls_of_every_kind(
    serving_master: LocalMooncake, mode: str, what: str, after: float
) -> None:
    """Each call is over by its result or by an error of ours, and then the process is, with its own status."""
    over(serving_master, IN_FLIGHT, mode, what, str(after))


SETTINGS = """
async def main():
    async def enter(**settings):
        async with SparseStoreClient.connect(LAYOUT, model_name="m", mode=mode, **settings):
            pass

    where = {"owner_address": owner} if mode == "shared" else {"master_server_address": master}
    for name in where:
        await refused(ConfigError, lambda: enter(**{name: ""}))
    if mode != "shared":
        await refused(ConfigError, lambda: enter(**where, metadata_server="redis://127.0.0.1:1"))
        await refused(ConfigError, lambda: enter(**where, metadata_server="REDIS://127.0.0.1:1"))
    # A config that nobody has checked.
    unchecked = MooncakeConfig(mode=mode, global_segment_size=lent.get("global_segment_size", 0))
    await refused(SetupError, lambda: MooncakeStore.connect(unchecked, timeout=5))

asyncio.run(main())
leave()
"""


@pytest.mark.parametrize("mode", MODES)
def test_settings_that_end_the_process(serving_master: LocalMooncake, mode: str) -> None:
    said = over(serving_master, SETTINGS, mode)
    assert len(said) == (2 if mode == "shared" else 4)
    assert set(said) <= {"ConfigError", "ConnectError"}


BUFFERS = """
async def main():
    async with await MooncakeStore.connect(CONFIG) as store, client_over(store) as client:
        await put(store, KEY, bytes(range(200)))
        # Shorter or longer than the value: an answer, and no byte beyond the buffer.
        for length in (1, 199, 201, 1 << 20):
            around = bytearray(length + 64)
            (failure,) = await store.get([GetItem(KEY, (memoryview(around)[32:-32],))])
            assert failure.kind == "length", failure
            assert not any(around[:32]) and not any(around[-32:])
        # No memory at all: addresses that are NULL.
        empty = memoryview(bytearray(0))
        for pieces in ((), (empty,), (empty, empty)):
            (failure,) = await store.get([GetItem(KEY, pieces)])
            assert failure is not None and failure.kind in ("length", "rejected"), failure
            (failure,) = await store.put([PutItem(KEY + "empty", pieces)])
            assert failure.kind == "rejected", failure
        for address in (0, -1, 1 << 64):
            await refused(InvalidBufferError, lambda: BlockMemory(address, 4000, 4000, 3))
        # Paged memory that nothing may be read into, that is too short, too long, strided or of objects.
        fixed = np.zeros((3, 4000), np.uint8)
        fixed.flags.writeable = False
        paged = PagedKVCache([[fixed]], [[0, 1, 2]])
        sequence = client.sequence(range(50))
        await client.register(paged)
        put_result = await client.put(sequence, paged)
        assert put_result.written.chunks == 3, put_result
        await refused(InvalidBufferError, lambda: client.get(sequence, into=paged))
        room = np.zeros((3, 4000), np.uint8)
        short = PagedKVCache([[room]], [[0, 1]])
        await client.register(short)
        await refused(
            InvalidBufferError,
            lambda: client.get(sequence, into=short),
            lambda: client.put(client.sequence(range(100, 150)), short),
            lambda: client.get(sequence, into=short.at([[0, 1, 3]])),
            lambda: client.get(sequence, into=short.at([[0, 1, 1]])),
            lambda: client.get(sequence, into=short.at([[0, 1, -1]])),
            lambda: client.register(PagedKVCache([[np.zeros((3, 3999), np.uint8)]])),
            lambda: client.register(PagedKVCache([[np.zeros((3, 4001), np.uint8)]])),
            lambda: PagedKVCache([[np.zeros((3, 8000), np.uint8)[:, ::2]]]),
            lambda: PagedKVCache([[np.zeros((3, 500), object)]]),
            lambda: PagedKVCache([[np.zeros((0, 4000), np.uint8)]]),
        )
        await refused(SparseStoreError, lambda: client.get(sequence, into=PagedKVCache([[room]], [[0, 1, 2]])))
        # What a caller's sink or source hands out.
        for wrong in (b"x" * 4000, bytearray(3999), memoryview(bytearray(8000))[::2], np.zeros(1000, np.float32)[::-1]):
            await refused(InvalidBufferError, lambda: client.get(sequence, into=lambda group, chunk: wrong))
        assert (await client.get(sequence, into=short.at([[2, 1, 0]]))).hit_length == 48

asyncio.run(main())
leave()
"""


@pytest.mark.parametrize("mode", MODES)
def test_buffers_that_cannot_be(serving_master: LocalMooncake, mode: str) -> None:
    assert over(serving_master, BUFFERS, mode)


TWO = """
async def main():
    first, second = await MooncakeStore.connect(CONFIG), await MooncakeStore.connect(CONFIG)
    await put(first, KEY, b"first")
    assert await read(second, KEY, 5) == b"first"
    regions = [store.memory.allocate(1 << 20) for store in (first, second)]
    for number, region in enumerate(regions):
        region.array[:] = number
    reading = [asyncio.create_task(read(second, KEY, 5)) for _ in range(50)] if mode != "embedded" else []
    await first.aclose()
    assert set(await asyncio.gather(*reading)) <= {b"first"}
    await refused(ClientClosedError, lambda: first.exists([KEY]))
    await put(second, KEY + "second", regions[1].view)
    await put(second, KEY + "third", regions[0].view)  # memory of the one that is closed
    assert await read(second, KEY + "second", 1 << 20) == bytes(regions[1].view) == b"\\1" * (1 << 20)
    assert await read(second, KEY + "third", 1 << 20) == bytes(regions[0].view) == bytes(1 << 20)
    third = await MooncakeStore.connect(CONFIG)
    assert await read(third, KEY + "second", 1 << 20) == bytes(regions[1].view)
    await asyncio.gather(second.aclose(), third.aclose())

asyncio.run(main())
leave()
"""


@pytest.mark.parametrize("mode", MODES)
def test_two_stores_in_one_process(serving_master: LocalMooncake, mode: str) -> None:
    over(serving_master, TWO, mode)


FORK = """
async def opened():
    store = await MooncakeStore.connect(CONFIG)
    client = client_over(store)
    await put(store, KEY, b"first")
    region = client.allocate(4000)
    region.array[:] = 7
    return store, client, region

async def in_the_child():
    await refused(ForkedProcessError, *calls_of_client(client), client.aclose, store.aclose)
    assert bytes(region.view) == b"\\7" * 4000

async def finish():
    # A child that ends in order may cost the parent the connection that both had; the next call makes another.
    with contextlib.suppress(StoreUnavailableError):
        await store.exists([KEY])
    assert await read(store, KEY, 5) == b"first"
    await client.aclose()
    await store.aclose()

# No event loop is open at the fork: both processes would share its descriptors, and the child's end would take
# the parent's from it.
store, client, region = asyncio.run(opened())
child = os.fork()
if child == 0:
    asyncio.run(in_the_child())
    sys.stdout.flush()
    if sys.argv[4] == "os._exit":
        os._exit(6)
    if sys.argv[4] == "collected":
        del client, store, region
        gc.collect()
    sys.exit(6)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 6, status
asyncio.run(finish())
leave()
"""


@pytest.mark.parametrize("end", ["sys.exit", *(pytest.param(end, marks=slow) for end in ("os._exit", "collected"))])
@pytest.mark.parametrize("mode", MODES)
def test_a_fork_uses_closes_and_ends(serving_master: LocalMooncake, mode: str, end: str) -> None:
    """The child's calls are refused, it ends with its own status, and the parent's connection is as it was."""
    assert over(serving_master, FORK, mode, end) == ["ForkedProcessError"] * 8
