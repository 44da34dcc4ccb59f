"""What the tests share: a guard against blocking calls, a real Mooncake, and names of a test's own."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Coroutine, Iterator
from importlib.util import find_spec
from typing import Any, TypeVar

import pytest
from blockbuster import BlockBuster

from mooncake_sparse_client.config import RETENTION_VARIABLES, load_config
from mooncake_sparse_client.errors import MissingLibraryError
from mooncake_sparse_client.stores.local import LocalMooncake
from mooncake_sparse_client.stores.mooncake import MooncakeStore
from mooncake_sparse_client.stores.native import new_native_store

pytest.register_assert_rewrite("store_contract", "tiny_models", "example_runs")
#: `make test-models` installs what these want, and fails where it finds no test.
collect_ignore = [] if find_spec("torch") and find_spec("transformers") else ["models"]

T = TypeVar("T")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """A call that would block the event loop raises, whoever makes it: package, library or test."""
    guard = BlockBuster()
    guard.activate()
    try:
        yield
    finally:
        guard.deactivate()


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests are not theirs."""
    for name in (*RETENTION_VARIABLES, *(name for name in os.environ if name.startswith("MOONCAKE_"))):
        monkeypatch.delenv(name, raising=False)


class LoopThread:
    """An event loop on a thread of its own: what lives longer than one test's loop lives here."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fixtures")
        self._thread.start()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(timeout=90)

    def stop(self) -> None:
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def native_library() -> None:
    """Skips where no build of Mooncake loads, with the loader's own words."""
    try:
        new_native_store()
    except MissingLibraryError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fixtures_loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.stop()


@pytest.fixture(scope="module")
def master(native_library: None, fixtures_loop: LoopThread) -> Iterator[LocalMooncake]:
    """A real master without memory of its own. One a module: other files check that no process is left."""
    local = fixtures_loop.run(LocalMooncake.start())
    yield local
    fixtures_loop.run(local.aclose())


@pytest.fixture(scope="module")
def serving_master(native_library: None, fixtures_loop: LoopThread) -> Iterator[LocalMooncake]:
    """A real master, and another process that holds the memory."""
    local = fixtures_loop.run(LocalMooncake.start(memory=512 * MIB))
    yield local
    fixtures_loop.run(local.aclose())


@pytest.fixture(scope="module")
def mooncake_store(master: LocalMooncake, fixtures_loop: LoopThread) -> Iterator[MooncakeStore]:
    """A real store with a segment in this process. Closing one takes seconds, so a module's tests share it;
    ``fresh`` keeps their keys apart."""
    config = load_config(
        "embedded",
        master_server_address=master.master_address,
        global_segment_size=512 * MIB,
        local_hostname="127.0.0.1",
        environ={},
    )
    store = fixtures_loop.run(MooncakeStore.connect(config))
    yield store
    fixtures_loop.run(store.aclose())


@pytest.fixture
def fresh() -> str:
    """A prefix for keys, or a model's name, that no other test uses."""
    return uuid.uuid4().hex
