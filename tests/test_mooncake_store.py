"""MooncakeStore over a real master: the contract of every store, and what only native code can do wrong."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from conftest import LoopThread
from store_contract import OpenStore, Room, StoreContract, read, value

from mooncake_sparse_client.config import MooncakeConfig, load_config
from mooncake_sparse_client.errors import (
    ConfigError,
    ConnectError,
    InvalidRequestError,
    MissingLibraryError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnknownCodeError,
)
from mooncake_sparse_client.stores.base import Store
from mooncake_sparse_client.stores.connecting import Opened
from mooncake_sparse_client.stores.guard import State
from mooncake_sparse_client.stores.local import LocalMooncake
from mooncake_sparse_client.stores.mooncake import MooncakeStore
from mooncake_sparse_client.stores.native_memory import NativeMemory
from mooncake_sparse_client.stores.regions import anonymous_pool

MIB = 1 << 20


def config_for(address: str, **settings: object) -> MooncakeConfig:
    return load_config(
        "embedded",
        **{
            "master_server_address": address,
            "global_segment_size": 16 * MIB,
            "local_hostname": "127.0.0.1",
            "environ": {},
            **settings,
        },  # type: ignore[arg-type]
    )


class TestMooncakeStore(StoreContract):
    leases = True

    @pytest.fixture
    def store(self, mooncake_store: MooncakeStore) -> Store:
        return mooncake_store

    @pytest.fixture
    def new_store(self, master: LocalMooncake) -> OpenStore:
        async def open_one() -> Store:
            return await MooncakeStore.connect(config_for(master.master_address))

        return open_one


class TestSharedStore(StoreContract):
    """The same store with the memory of an owner process, through memory that both share."""

    leases = True

    @pytest.fixture
    def store(self, shared_store: MooncakeStore) -> Store:
        return shared_store

    @pytest.fixture
    def new_store(self, serving_master: LocalMooncake) -> OpenStore:
        async def open_one() -> Store:
            return await MooncakeStore.connect(shared_config(serving_master, pool_size=16 * MIB))

        return open_one


@pytest.fixture(scope="module")
def shared_store(serving_master: LocalMooncake, fixtures_loop: LoopThread) -> Iterator[MooncakeStore]:
    store = fixtures_loop.run(MooncakeStore.connect(shared_config(serving_master, pool_size=64 * MIB)))
    yield store
    fixtures_loop.run(store.aclose())


def shared_config(local: LocalMooncake, *, pool_size: int) -> MooncakeConfig:
    assert local.owner_address is not None
    return load_config("shared", owner_address=local.owner_address, pool_size=pool_size, environ={})


async def test_a_segment_bounds_a_value(mooncake_store: MooncakeStore) -> None:
    assert mooncake_store.max_value_bytes == mooncake_store.config.global_segment_size
    assert mooncake_store.lease_seconds == mooncake_store.config.lease_seconds


async def test_a_pure_user_knows_only_what_an_answer_can_say(serving_master: LocalMooncake, fresh: str) -> None:
    config = load_config("remote", master_server_address=serving_master.master_address, environ={})
    async with await MooncakeStore.connect(config) as store:
        assert store.max_value_bytes == (1 << 31) - 1
        assert await store.put([value(fresh, b"over the ", b"network")]) == [None]
        assert await read(store, fresh, 16) == b"over the network"


def run_script(script: str, *arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """A process of its own: what ends it does not end the tests."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MC_")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )


CONNECT = """
import asyncio, os, sys, time
from mooncake_sparse_client.config import load_config
from mooncake_sparse_client.errors import ForkedProcessError, SparseStoreError
from mooncake_sparse_client.stores.base import GetItem, PutItem
from mooncake_sparse_client.stores.mooncake import MooncakeStore
from mooncake_sparse_client.stores.native_memory import NativeMemory
from mooncake_sparse_client.stores.regions import anonymous_pool

KEY = f"key of {os.getpid()}"  # what a process that ends badly leaves is there for a while
config = load_config(
    "embedded", master_server_address=sys.argv[1], global_segment_size="16MB", local_hostname="127.0.0.1", environ={}
)
"""

FORK = (
    CONNECT
    + """
async def use_after_fork(store):
    view = memoryview(bytearray(5))
    calls = [
        lambda: store.exists([KEY]), lambda: store.put([PutItem(KEY, (view,))]),
        lambda: store.get([GetItem(KEY, (view,))]), lambda: store.remove([KEY]), store.health,
    ]
    for call in calls:
        try:
            await asyncio.wait_for(call(), 5)
        except ForkedProcessError as error:
            assert error.kind == "forked"
            assert str(os.getppid()) in str(error) and str(os.getpid()) in str(error)
        else:
            raise AssertionError("a forked store was used")

async def close_after_fork(store):
    try:
        await asyncio.wait_for(store.aclose(), 5)
    except ForkedProcessError:
        pass

async def main():
    global store
    store = await MooncakeStore.connect(config)
    assert await store.put([PutItem(KEY, (memoryview(b"first"),))]) == [None]

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
child = os.fork()
if child == 0:
    status = 1
    try:
        asyncio.run({"use": use_after_fork, "close": close_after_fork}[sys.argv[2]](store))
        print("child is fine", flush=True)
        status = 0
    finally:
        os._exit(status)
_, status = os.waitpid(child, 0)
assert status == 0, status
async def finish():
    room = bytearray(5)
    assert await store.get([GetItem(KEY, (memoryview(room),))]) == [None] and room == b"first"
    await store.aclose()
loop.run_until_complete(finish())
loop.close()
print("parent goes on")
"""
)


@pytest.mark.parametrize("what", ["use", "close"])
def test_a_fork_may_not_use_the_connection(master: LocalMooncake, what: str) -> None:
    """Nor may closing it, as leaving ``async with`` in the child does, end the child or touch the parent's."""
    done = run_script(FORK, master.master_address, what)
    assert done.stdout.split("\n") == ["child is fine", "parent goes on", ""], done
    assert done.returncode == 0, done


QUIET = (
    CONNECT
    + """
async def main():
    async with await MooncakeStore.connect(config) as store:
        assert await store.exists([KEY]) == [False]
        assert (await store.get([GetItem(KEY, (memoryview(bytearray(1)),))]))[0].kind == "missing"
        assert await store.put([PutItem(KEY, (memoryview(b"first"),))]) == [None]

asyncio.run(main())
"""
)


def test_the_native_library_is_quiet(master: LocalMooncake) -> None:
    done = run_script(QUIET, master.master_address)
    assert done.returncode == 0, done
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) <= 2, done.stderr


LEAVES_IT_OPEN = (
    CONNECT
    + """
async def main():
    store = await MooncakeStore.connect(config)
    assert await store.health()
    del store

asyncio.run(main())
"""
)


def test_a_store_that_is_never_closed_is_warned_about(master: LocalMooncake) -> None:
    done = run_script(LEAVES_IT_OPEN, master.master_address)
    assert f"a MooncakeStore on {master.master_address} was never closed" in done.stderr
    assert "ResourceWarning" in done.stderr


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


async def test_where_nothing_listens_the_address_and_the_remedy_are_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(ConnectError) as caught:
        await MooncakeStore.connect(config_for(address), timeout=20)
    assert time.monotonic() - started < 10
    assert address in str(caught.value)
    assert "mooncake_master" in str(caught.value)
    assert "master_server_address" in str(caught.value)
    assert caught.value.kind == "connect_failed"


async def test_an_unknown_host_is_named() -> None:
    started = time.monotonic()
    with pytest.raises(ConnectError, match=r"no-such-host\.invalid:50051"):
        await MooncakeStore.connect(config_for("no-such-host.invalid:50051"), timeout=30)
    assert time.monotonic() - started < 40


@pytest.mark.parametrize("address", ["", "host", "host:", ":50051", "host:0", "host:70000", "http://host:1"])
def test_an_address_that_cannot_be_is_refused_before_anything_is_called(address: str) -> None:
    with pytest.raises(ConfigError, match="master"):
        config_for(address)


@pytest.mark.parametrize(
    ("error", "remedies"),
    [
        (
            ModuleNotFoundError("No module named 'mooncake'"),
            [
                "pip install mooncake-transfer-engine-non-cuda",
                "pip install mooncake-transfer-engine ",
                "pip install mooncake-transfer-engine-cuda13",
            ],
        ),
        (
            ImportError("libnuma.so.1: cannot open shared object file: No such file or directory"),
            ["apt-get install -y libibverbs1 libnuma1 libcurl4"],
        ),
        (
            ImportError("libcuda.so.1: cannot open shared object file: No such file or directory"),
            ["pip install mooncake-transfer-engine-non-cuda"],
        ),
        (
            ImportError("/lib/libc.so.6: version `GLIBC_2.34' not found"),
            ["pip install mooncake-transfer-engine-non-cuda"],
        ),
    ],
)
async def test_a_library_that_does_not_load_comes_with_its_own_words_and_a_remedy(
    error: ImportError, remedies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "mooncake.store" or name == "mooncake":
                raise error

    for name in [name for name in sys.modules if name == "mooncake" or name.startswith("mooncake.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with socket.create_server(("127.0.0.1", 0)) as master, pytest.raises(MissingLibraryError) as caught:
        await MooncakeStore.connect(config_for(f"127.0.0.1:{master.getsockname()[1]}"))
    assert isinstance(caught.value, ImportError)
    assert caught.value.__cause__ is error
    assert str(error) in str(caught.value)
    for remedy in remedies:
        assert remedy in str(caught.value)


class FakeNative:
    """A native store that answers what a test wants, on the pools of a real ``MooncakeStore``."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls = 0

    def _answer(self, count: int) -> list[int]:
        self.calls += 1
        return [self.code] * count

    def setup(self, config: dict[str, str | int]) -> int:
        return 0

    def close(self) -> int:
        return 0

    def health_check(self) -> int:
        return 0

    def is_exist(self, key: str) -> int:
        return self.code

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return self._answer(len(keys))

    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        return self._answer(len(keys))

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        return self._answer(len(keys))

    def batch_put_from(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        return self._answer(len(keys))

    def batch_get_into(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        return self._answer(len(keys))

    def register_buffer(self, pointer: int, size: int) -> int:
        return 0

    def unregister_buffer(self, pointer: int) -> int:
        return 0

    def upsert_from(self, key: str, pointer: int, size: int) -> int:
        return self._answer(1)[0]

    def get_size(self, key: str) -> int:
        return self.code

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        return self._answer(len(keys))

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        return self._answer(1)[0]


def fake_store(native: FakeNative) -> MooncakeStore:
    config = config_for("127.0.0.1:1")
    memory = NativeMemory(native, anonymous_pool(MIB), config)  # type: ignore[arg-type]
    store = MooncakeStore(config)
    store._guard.become(State.CONNECTING)
    store._attach(Opened(native, memory))  # type: ignore[arg-type]
    return store


@pytest.mark.parametrize(
    ("code", "kind", "retriable"),
    [
        (-703, "busy", True),
        (-704, "missing", False),
        (-707, "lease_expired", True),
        (-800, "transfer", True),
        (-200, "full", True),
        (-987654, "unknown", False),
    ],
)
async def test_a_keys_own_code_is_a_failure_with_a_word(code: int, kind: str, retriable: bool) -> None:
    async with fake_store(FakeNative(code)) as store:
        for (failure,) in (
            await store.put([value("a", b"first")]),
            await store.put([value("a", b"first", replace=True)]),
            await store.get([Room("a", 5).item]),
        ):
            assert failure is not None
            assert (failure.kind, failure.retriable) == (kind, retriable)
            assert len(failure.detail) > 20


@pytest.mark.parametrize(("code", "error"), [(-900, StoreUnavailableError), (-901, StoreTimeoutError)])
async def test_a_master_out_of_reach_is_an_exception_for_the_whole_call(code: int, error: type[Exception]) -> None:
    async with fake_store(FakeNative(code)) as store:
        calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
            lambda: store.exists(["a"]),
            lambda: store.put([value("a", b"first")]),
            lambda: store.put([value("a", b"first", replace=True)]),
            lambda: store.get([Room("a", 5).item]),
            lambda: store.remove(["a"]),
            lambda: store.remove_prefix("a"),
        ]
        for call in calls:
            with pytest.raises(error, match=r"127\.0\.0\.1:1\b"):
                await call()
        health = await store.health()
        assert not health.ok
        assert health.kind == error.kind  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", [-987654, 2, 7])
async def test_an_existence_answer_that_nobody_knows_is_none(code: int) -> None:
    async with fake_store(FakeNative(code)) as store:
        with pytest.raises(UnknownCodeError) as caught:
            await store.exists(["a", "b"])
        assert caught.value.code == code
        if code > 0:  # where 0 is success
            (failure,) = await store.put([value("a", b"first")])
            assert failure is not None
            assert failure.kind == "unknown"
            assert str(code) in failure.detail
            with pytest.raises(UnknownCodeError):
                await store.remove(["a"])


async def test_a_question_that_did_not_reach_the_master_fails_as_a_whole() -> None:
    async with fake_store(FakeNative(-1)) as store:
        with pytest.raises(StoreUnavailableError):
            await store.exists(["a"])
        with pytest.raises(StoreUnavailableError):
            await store.remove_prefix("a")


async def test_a_prefix_is_not_so_long_that_the_master_could_end() -> None:
    native = FakeNative(0)
    async with fake_store(native) as store:
        assert await store.remove_prefix("x" * 8192) == 0
        with pytest.raises(InvalidRequestError, match="8192 bytes, not 8193"):
            await store.remove_prefix("x" * 8193)
        assert native.calls == 1


@pytest.mark.usefixtures("native_library")
async def test_a_master_that_dies_is_told_in_words() -> None:
    """SIGKILL to the master under an open connection: every call says that the store is out of reach."""
    local = await LocalMooncake.start()
    store = await MooncakeStore.connect(config_for(local.master_address), timeout=5)
    try:
        assert await store.put([value("a", b"first")]) == [None]
        assert (await store.health()).ok
        os.kill(local.master_pid, signal.SIGKILL)
        calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
            lambda: store.exists(["a"]),
            lambda: store.put([value("b", b"first")]),
            lambda: store.get([Room("a", 5).item]),
            lambda: store.remove(["a"]),
        ]
        health, errors = await asyncio.gather(
            store.health(), asyncio.gather(*(call() for call in calls), return_exceptions=True)
        )
        assert health.ok is False
        assert health.kind in ("unavailable", "timeout")
        for error in errors:
            assert isinstance(error, StoreUnavailableError | StoreTimeoutError), error
            assert error.retriable
            assert local.master_address in str(error)
            assert not re.fullmatch(r"[^a-z]*", str(error))
    finally:
        await store.aclose()
        await local.aclose()
