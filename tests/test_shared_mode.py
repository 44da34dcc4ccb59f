"""Shared mode over a real owner process: its memory, what is checked before native code is called, replication."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_sparse_client.config import MooncakeConfig, load_config
from mooncake_sparse_client.errors import ConfigError, ConnectError
from mooncake_sparse_client.replication import Replication
from mooncake_sparse_client.stores import connecting
from mooncake_sparse_client.stores.connecting import open_native_store
from mooncake_sparse_client.stores.local import LocalMooncake
from mooncake_sparse_client.stores.native import NativeStore, native_replication, new_native_store
from mooncake_sparse_client.stores.native_memory import NativeMemory
from mooncake_sparse_client.stores.regions import Region
from mooncake_sparse_client.stores.shared_setup import check_free_memory, check_owner

KIB, MIB = 1 << 10, 1 << 20
MISSING = -704


class Client:
    """A native client and its memory, by themselves."""

    def __init__(self, native: NativeStore, memory: NativeMemory) -> None:
        self.native, self.memory = native, memory

    @classmethod
    async def open(cls, config: MooncakeConfig) -> Client:
        return cls(*await open_native_store(config, timeout=30))

    async def aclose(self) -> None:
        await asyncio.to_thread(self.memory.close)

    def filled(self, nbytes: int, seed: int = 0) -> Region:
        region = self.memory.allocate(nbytes)
        region.view[:] = np.random.default_rng(seed).bytes(nbytes)
        return region

    async def put(self, key: str, region: Region, config: object | None = None) -> int:
        more = [] if config is None else [config]
        call = (self.native.batch_put_from, [key], [region.address], [region.nbytes], *more)
        (code,) = await asyncio.to_thread(*call)
        return code

    async def get(self, key: str, region: Region) -> int:
        (length,) = await asyncio.to_thread(self.native.batch_get_into, [key], [region.address], [region.nbytes])
        return length


def shared(local: LocalMooncake, **settings: Any) -> MooncakeConfig:
    return load_config("shared", environ={}, **{"owner_address": local.owner_address, "pool_size": 4 * MIB, **settings})


@asynccontextmanager
async def opened(config: MooncakeConfig) -> AsyncIterator[Client]:
    client = await Client.open(config)
    try:
        yield client
    finally:
        await client.aclose()


@pytest.fixture(scope="module")
def client(serving_master: LocalMooncake, fixtures_loop: Any) -> Iterator[Client]:
    """One of the module's: closing takes a second."""
    client: Client = fixtures_loop.run(Client.open(shared(serving_master)))
    yield client
    fixtures_loop.run(client.aclose())


def mapped() -> list[str]:
    """The shared memory that this process has, one line each."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "mooncake_shm" in line]


async def shared_memory() -> list[str]:
    return await asyncio.to_thread(mapped)


# Moving values


async def test_values_move_through_the_pool(client: Client, fresh: str) -> None:
    source, target = client.filled(100_001), client.memory.allocate(100_001)
    target.array[:] = 0
    assert await client.put(fresh, source) == 0
    assert await client.get(fresh, target) == 100_001
    assert target.view == source.view


async def test_a_value_of_several_pieces(client: Client, fresh: str) -> None:
    source, target = client.filled(30 * KIB), client.memory.allocate(30 * KIB)
    pieces = [(source.address + 20 * KIB, 10 * KIB), (source.address, 3), (source.address + 5000, 10_000)]
    addresses, sizes = ([list(column)] for column in zip(*pieces, strict=True))
    assert await asyncio.to_thread(client.native.batch_put_from_multi_buffers, [fresh], addresses, sizes) == [0]
    total = sum(sizes[0])
    into = [[target.address, target.address + 777]], [[777, total - 777]]
    assert await asyncio.to_thread(client.native.batch_get_into_multi_buffers, [fresh], *into) == [total]
    wanted = bytes(source.view[20 * KIB :]) + bytes(source.view[:3]) + bytes(source.view[5000:15_000])
    assert bytes(target.view[:total]) == wanted


async def test_values_cannot_move_elsewhere_and_it_is_known(client: Client, fresh: str) -> None:
    heap = np.zeros(KIB, np.uint8)
    address = heap.ctypes.data
    assert not await client.memory.register(address, KIB)
    assert not client.memory.covers(address, KIB)
    # What would happen: the owner knows no such memory.
    assert await asyncio.to_thread(client.native.batch_put_from, [fresh], [address], [KIB]) == [-600]


async def test_another_client_reads_what_this_one_wrote(
    client: Client, serving_master: LocalMooncake, fresh: str
) -> None:
    source = client.filled(50_000)
    assert await client.put(fresh, source) == 0
    remote = load_config("remote", environ={}, master_server_address=serving_master.master_address, pool_size="1MB")
    async with opened(remote) as other:
        target = other.memory.allocate(50_000)
        assert await other.get(fresh, target) == 50_000
        assert target.view == source.view


# Closing and opening


async def test_held_memory_stays_until_the_last_view_is_gone(serving_master: LocalMooncake, fresh: str) -> None:
    before = await shared_memory()
    # A pool of an odd size, and no buffer of the library's own, to be seen apart from others.
    config = shared(serving_master, pool_size=3 * MIB + 5, local_buffer_size=0)
    client = await Client.open(config)
    region = client.filled(10_000)
    assert await client.put(fresh, region) == 0
    (line,) = set(await shared_memory()) - set(before)
    begin, end = (int(text, 16) for text in line.split()[0].split("-"))
    assert begin <= region.address < begin + 3 * MIB + 5 <= end
    wanted, tail = bytes(region.view), region.array[9_000:]
    await client.aclose()
    assert bytes(region.view) == wanted
    del region
    assert line in await shared_memory()
    # The same process and the same owner, beside that memory, which the library knew.
    async with opened(config) as again:
        await check_transfers(again, fresh, wanted, 1)
    assert bytes(tail) == wanted[9_000:]
    tail[:] = 1
    assert await shared_memory() == sorted([*before, line])
    del tail
    assert await shared_memory() == before
    # And in its place.
    async with opened(config) as again:
        await check_transfers(again, fresh, wanted, 2)
    assert await shared_memory() == before


async def check_transfers(client: Client, key: str, wanted: bytes, number: int) -> None:
    """``key`` has ``wanted``, and another value comes back as it was written."""
    target, other = client.memory.allocate(len(wanted)), client.filled(len(wanted), seed=number)
    assert await client.get(key, target) == len(wanted)
    assert bytes(target.view) == wanted
    key += f" {number}"
    assert await client.put(key, other) == 0
    assert await client.get(key, target) == len(wanted)
    assert target.view == other.view


# What is refused before native code is called


@pytest.fixture
def no_native_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native set-up would hold the interpreter's lock, for half a minute at worst."""

    def refuse() -> NativeStore:
        raise AssertionError("the native library was reached")

    monkeypatch.setattr(connecting, "new_native_store", refuse)


async def refused(address: str | None, words: list[str], **settings: Any) -> None:
    config = load_config("shared", environ={}, **{"owner_address": address, **settings})
    with pytest.raises(ConnectError) as caught:
        await open_native_store(config, timeout=30)
    for word in [str(address), *words]:
        assert word in str(caught.value)


@pytest.mark.usefixtures("no_native_call")
async def test_a_port_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    await refused(
        f"127.0.0.1:{port}", ["owner process", "mooncake_client", "serve", "owner_address", "MOONCAKE_CLIENT"]
    )
    await refused(f"[::1]:{port}", ["owner process"])


@pytest.mark.usefixtures("no_native_call")
async def test_a_host_that_nobody_knows() -> None:
    await refused("no-such-host.invalid:50052", ["owner_address", "not known"])


@pytest.mark.usefixtures("no_native_call")
async def test_a_port_of_another_program(serving_master: LocalMooncake) -> None:
    words = ["is open", "no Mooncake owner process", "on this host", "network namespace", "serve", "MOONCAKE_CLIENT"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        await refused(f"127.0.0.1:{other.getsockname()[1]}", words)
    await refused(serving_master.master_address, words)
    await refused(f"127.0.0.1:{serving_master.metrics_port}", words)


def test_an_owner_is_known_by_its_socket(tmp_path: Path) -> None:
    table = tmp_path / "proc/net/unix"
    table.parent.mkdir(parents=True)
    line = "00000000c8428712: 00000002 00000000 00010000 0001 01 290175 @@mooncake_client_34747.sock\n"
    table.write_text(f"Num       RefCount Protocol Flags    Type St Inode Path\n{line}0: 2 0 1 1 1 7\n")
    check_owner("127.0.0.1:34747", tmp_path)
    check_owner("[::1]:34747", tmp_path)
    for port in (4747, 3474, 347471, 50052):
        with pytest.raises(ConnectError, match=rf"127\.0\.0\.1:{port} is open"):
            check_owner(f"127.0.0.1:{port}", tmp_path)


# Memory


async def test_more_memory_than_there_is_is_refused(serving_master: LocalMooncake) -> None:
    before = await shared_memory()
    with pytest.raises(ConfigError, match=r"pool_size is \d+ .*only \d+ are free .*meminfo") as caught:
        await open_native_store(shared(serving_master, pool_size="100TB"), timeout=5)
    assert str(100 << 40) in str(caught.value)
    assert await shared_memory() == before


def system(root: Path, available: int | None, group: str = "", **files: str) -> Path:
    """A machine that has ``available`` bytes, and this process in a control group; ``files`` by their paths."""
    texts = {"proc/self/cgroup": f"4:memory:/elsewhere\n0::/{group}\n"}
    if available is not None:
        texts["proc/meminfo"] = f"MemTotal: 1 kB\nMemFree: 1 kB\nMemAvailable:   {available // 1024} kB\n"
    for name, text in {**texts, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def fits(root: Path, nbytes: int) -> bool:
    config = MooncakeConfig(mode="shared", owner_address="a:1", pool_size=nbytes)
    try:
        check_free_memory(config, root)
    except ConfigError as error:
        said = re.search(r"pool_size is (\d+) bytes.*smaller pool_size", str(error))
        return said is None or said[1] != str(nbytes)
    return True


GROUP = "sys/fs/cgroup/a/b"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 100),
        ({f"{GROUP}/memory.max": "max\n", f"{GROUP}/memory.current": f"{90 * MIB}\n"}, 100),
        ({f"{GROUP}/memory.max": f"{50 * MIB}\n", f"{GROUP}/memory.current": f"{30 * MIB}\n"}, 20),
        ({f"{GROUP}/memory.max": f"{500 * MIB}\n", f"{GROUP}/memory.current": f"{30 * MIB}\n"}, 100),
        # What a group above allows counts as well, and the least of all.
        ({"sys/fs/cgroup/a/memory.max": f"{50 * MIB}\n", "sys/fs/cgroup/a/memory.current": f"{10 * MIB}\n"}, 40),
        ({"sys/fs/cgroup/memory.max": f"{50 * MIB}\n", "sys/fs/cgroup/memory.current": f"{20 * MIB}\n"}, 30),
        # Cached files make way.
        (
            {
                f"{GROUP}/memory.max": f"{50 * MIB}\n",
                f"{GROUP}/memory.current": f"{45 * MIB}\n",
                f"{GROUP}/memory.stat": f"anon 5\ninactive_file {20 * MIB}\nactive_file 9\n",
            },
            25,
        ),
    ],
)
def test_free_memory_is_what_machine_and_control_groups_leave(tmp_path: Path, files: dict[str, str], free: int) -> None:
    root = system(tmp_path, 100 * MIB, "a/b", **files)
    assert fits(root, free * MIB)
    assert not fits(root, free * MIB + 1)


def test_a_system_that_says_nothing_of_memory_is_trusted(tmp_path: Path) -> None:
    assert fits(tmp_path, 1 << 50)
    assert fits(system(tmp_path, None), 1 << 50)


# What goes wrong behind the checks


class Wrapped:
    """A native store whose answers are changed; ``log`` has what it was asked."""

    def __init__(self, **answers: Callable[..., Any]) -> None:
        self._native = new_native_store()
        self._answers = answers
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.log.append(name)
            answer = getattr(self._native, name)
            return self._answers[name](answer, *arguments) if name in self._answers else answer(*arguments)

        return call


def wrapped(monkeypatch: pytest.MonkeyPatch, **answers: Callable[..., Any]) -> Wrapped:
    native = Wrapped(**answers)
    monkeypatch.setattr(connecting, "new_native_store", lambda: native)
    return native


@pytest.mark.parametrize(
    ("name", "answer", "error", "words"),
    [
        ("setup_dummy", -1, ConnectError, ["could not be set up", "(-1)", "mooncake_client"]),
        ("alloc_from_mem_pool", 0, ConfigError, ["refuses", "pool_size=4194304"]),
        ("register_buffer", -1, ConnectError, ["did not take 4194304 bytes", "(-1)", "on this host"]),
        ("batch_get_into", [-600], ConnectError, ["cannot move values", "(-600)", "on this host"]),
        ("batch_get_into", [-900], ConnectError, ["cannot move values", "(-900)", "master"]),
    ],
)
async def test_a_set_up_that_fails_half_way_leaves_nothing(
    serving_master: LocalMooncake,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    answer: Any,
    error: type[Exception],
    words: list[str],
) -> None:
    before = await shared_memory()
    native = wrapped(monkeypatch, **{name: lambda call, *arguments: answer})
    with pytest.raises(error) as caught:
        await open_native_store(shared(serving_master), timeout=30)
    for word in [str(serving_master.owner_address), *words]:
        assert word in str(caught.value)
    assert ("close" in native.log) is (name != "setup_dummy")
    if name == "batch_get_into":
        assert native.log[-2:] == ["unregister_buffer", "close"]
    assert await shared_memory() == before


async def test_a_cancelled_set_up_leaves_nothing(
    serving_master: LocalMooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await shared_memory()
    reached, go_on = threading.Event(), threading.Event()

    def slow(call: Callable[..., int], *arguments: Any) -> int:
        reached.set()
        assert go_on.wait(30)
        return call(*arguments)

    native = wrapped(monkeypatch, register_buffer=slow)
    opening = asyncio.create_task(open_native_store(shared(serving_master), timeout=30))
    assert await asyncio.to_thread(reached.wait, 30)
    opening.cancel()
    await asyncio.wait([opening], timeout=0.05)
    assert not opening.done()  # native code is still at it
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert native.log[-2:] == ["unregister_buffer", "close"]
    assert await shared_memory() == before


async def test_what_the_library_lacks_is_told_before_it_is_set_up(
    serving_master: LocalMooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mooncake import store as library

    class Older:
        replica_num = 1

    monkeypatch.setattr(library, "ReplicateConfig", Older)
    native = wrapped(monkeypatch)
    for settings, native_name in (({"group_id": "g"}, "group_ids"), ({"soft_pin": False}, "soft_pin_action")):
        config = shared(serving_master, replication=Replication(**settings))  # type: ignore[arg-type]
        (name,) = settings
        with pytest.raises(ConfigError, match=rf"Replication\.{name} .*no {native_name} .*leave {name} out"):
            await open_native_store(config, timeout=30)
    assert native.log == []


# Replication

ASKED = [
    Replication(replica_num=2),
    Replication(replica_num=1000),
    Replication(soft_pin=True),
    Replication(soft_pin=False),
    Replication(soft_pin=True, soft_pin_ttl_seconds=0.0001),
    Replication(soft_pin=True, soft_pin_ttl_seconds=24 * 3600),
    Replication(hard_pin=True),
    Replication(preferred_segments=("nowhere:1", "nowhere:2")),
    Replication(group_id="Gruppe größer"),
    Replication(2, soft_pin=True, soft_pin_ttl_seconds=60, preferred_segments=("nowhere:1",), group_id="g"),
]


@pytest.mark.parametrize("replication", ASKED, ids=range(len(ASKED)))
async def test_the_store_takes_every_replication_in_every_write(
    client: Client, fresh: str, replication: Replication
) -> None:
    three, one = native_replication(replication, 3), native_replication(replication, 1)
    source, target = client.filled(3 * KIB), client.memory.allocate(3 * KIB)
    addresses, sizes = [source.address + at * KIB for at in range(3)], [KIB] * 3
    keys = {how: [f"{fresh} {how} {number}" for number in range(3)] for how in ("plain", "parts")}
    native = client.native

    def write() -> list[int]:
        answer = native.batch_put_from(keys["plain"], addresses, sizes, three)
        answer += native.batch_put_from_multi_buffers(keys["parts"], [[a] for a in addresses], [[KIB]] * 3, three)
        return [*answer, *(native.upsert_from(f"{fresh} upsert", source.address, KIB, one) for _ in range(2))]

    assert await asyncio.to_thread(write) == [0] * 8
    for names in keys.values():
        target.array[:] = 0
        into = [target.address + at * KIB for at in range(3)]
        assert await asyncio.to_thread(native.batch_get_into, names, into, sizes) == sizes
        assert target.view == source.view


def test_the_default_is_the_library_s(native_library: None) -> None:
    assert native_replication(Replication(), 5) is None
    found: Any = native_replication(Replication(group_id="g"), 5)
    assert found.group_ids == ["g"] * 5
    assert found.replica_num == 1


async def test_copies_lie_on_several_segments(serving_master: LocalMooncake, fresh: str) -> None:
    config = load_config(
        "embedded",
        environ={},
        master_server_address=serving_master.master_address,
        global_segment_size="16MB",
        local_hostname="127.0.0.1",
        pool_size="1MB",
    )
    async with opened(config) as client:
        native: Any = client.native
        for copies in (1, 2):
            source = client.filled(KIB)
            assert await client.put(f"{fresh}{copies}", source, native_replication(Replication(copies), 1)) == 0
            assert len(await asyncio.to_thread(native.get_replica_desc, f"{fresh}{copies}")) == copies


@pytest.fixture(scope="module")
def small_store(native_library: None, fixtures_loop: Any) -> Iterator[Client]:
    """A store of 32 MiB that forgets quickly what was asked for."""
    local = fixtures_loop.run(LocalMooncake.start(memory=32 * MIB, lease_ttl_seconds=0.05))
    client: Client = fixtures_loop.run(Client.open(shared(local)))
    yield client
    fixtures_loop.run(client.aclose())
    fixtures_loop.run(local.aclose())


@pytest.fixture
async def empty_store(small_store: Client) -> Client:
    native: Any = small_store.native
    await asyncio.to_thread(native.remove_all, True)
    return small_store


async def fill(client: Client, keys: dict[str, Replication]) -> None:
    """Write 1 MiB for each key, and as often as it takes for there to be room."""
    source = client.filled(MIB)
    async with asyncio.timeout(60):
        for key, replication in keys.items():
            while code := await client.put(key, source, native_replication(replication, 1)):
                assert code == -200
                await asyncio.sleep(0.01)


async def left(client: Client, keys: list[str]) -> int:
    return sum(await asyncio.to_thread(client.native.batch_is_exist, keys))


async def test_pins_decide_what_is_evicted(empty_store: Client) -> None:
    kinds = {
        "plain": Replication(),
        "hard": Replication(hard_pin=True),
        "soft": Replication(soft_pin=True),
        "brief": Replication(soft_pin=True, soft_pin_ttl_seconds=0.05),
    }
    names = {kind: [f"{kind} {number}" for number in range(3)] for kind in kinds}
    await fill(empty_store, {name: kinds[kind] for kind in kinds for name in names[kind]})
    await asyncio.sleep(0.1)
    await fill(empty_store, {f"pressure {number}": Replication() for number in range(100)})
    found = {kind: await left(empty_store, names[kind]) for kind in kinds}
    assert found == {"plain": 0, "hard": 3, "soft": 3, "brief": 0}
    target = empty_store.memory.allocate(MIB)
    assert await empty_store.get("hard 1", target) == MIB
    assert await empty_store.get("plain 1", target) == MISSING


async def test_a_group_is_evicted_as_a_whole(empty_store: Client) -> None:
    groups = [f"group {number}" for number in range(6)]
    # One of each group, then the next of each: by age alone, each would lose some.
    await fill(empty_store, {f"{name} {at}": Replication(group_id=name) for at in range(4) for name in groups})
    await fill(empty_store, {f"pressure {number}": Replication() for number in range(16)})
    found = [await left(empty_store, [f"{name} {at}" for at in range(4)]) for name in groups]
    assert set(found) <= {0, 4}
    assert 0 in found
