"""What the client is measured against: a plain loop of native batch calls, and Mooncake's own asyncio class."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...config import DEFAULT_LOCAL_BUFFER
from ...errors import ConnectError, StoreAnswerError
from ...stores.native import new_native_store
from .measure import in_tasks, on_thread


class PlainCalls(Protocol):
    """The native calls of a plain loop. Each answer may be a negative code."""

    def register_buffer(self, pointer: int, size: int) -> int: ...
    def unregister_buffer(self, pointer: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_put_from(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]: ...
    def batch_get_into(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...


class AsyncCalls(PlainCalls, Protocol):
    """The part of ``MooncakeDistributedStoreAsync`` that is used: each call on a thread of the loop's own pool."""

    def setup(self, config: dict[str, str]) -> int: ...
    def close(self) -> int: ...
    def async_batch_is_exist(self, keys: list[str]) -> Awaitable[list[int]]: ...
    def async_batch_put_from(self, keys: list[str], pointers: list[int], sizes: list[int]) -> Awaitable[list[int]]: ...
    def async_batch_get_into(self, keys: list[str], pointers: list[int], sizes: list[int]) -> Awaitable[list[int]]: ...
    def async_get_into(self, key: str, pointer: int, size: int) -> Awaitable[int]: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one native call, made before anything is timed."""

    keys: list[str]
    sources: list[int]
    sinks: list[int]
    sizes: list[int]


def batches(prefix: str, source: int, sink: int, *, count: int, nbytes: int, per_batch: int) -> list[Batch]:
    """``count`` values of ``nbytes`` that lie one after another at the two addresses."""

    def batch(numbers: range) -> Batch:
        return Batch(
            keys=[f"{prefix}{number}" for number in numbers],
            sources=[source + number * nbytes for number in numbers],
            sinks=[sink + number * nbytes for number in numbers],
            sizes=[nbytes] * len(numbers),
        )

    return [batch(range(start, min(start + per_batch, count))) for start in range(0, count, per_batch)]


class PlainLoop:
    """A plain loop of the native batch calls. Each method blocks until all batches are through.

    Each raises ``StoreAnswerError`` where the store does not do what it should, since a loop that fails is fast.
    """

    def __init__(self, native: PlainCalls, batches: Sequence[Batch], *, keys_per_question: int) -> None:
        self._native = native
        self._batches = batches
        keys = [key for batch in batches for key in batch.keys]
        self._questions = [keys[start : start + keys_per_question] for start in range(0, len(keys), keys_per_question)]

    def put(self) -> None:
        """Write all values without asking whether they are there."""
        for batch in self._batches:
            _expect(self._native.batch_put_from(batch.keys, batch.sources, batch.sizes), 0, "put")

    def put_asking(self) -> None:
        """Write all values, which must be absent, and ask so batch by batch first."""
        for batch in self._batches:
            _expect(self._native.batch_is_exist(batch.keys), 0, "existence")
            _expect(self._native.batch_put_from(batch.keys, batch.sources, batch.sizes), 0, "put")

    def get(self) -> None:
        for batch in self._batches:
            answer = self._native.batch_get_into(batch.keys, batch.sinks, batch.sizes)
            _expect(answer, batch.sizes[0], "get")

    def exists(self) -> None:
        """Ask for all values, which must be there."""
        for keys in self._questions:
            _expect(self._native.batch_is_exist(keys), 1, "existence")

    def remove(self) -> None:
        for keys in self._questions:
            self._native.batch_remove(keys, True)


class AsyncRival:
    """Mooncake's own asyncio class, driven by tasks. Each of ``prefixes`` is one request of a task.

    The methods have the tasks share the prefixes, and return when all are through.
    """

    def __init__(self, store: AsyncCalls, prefixes: Sequence[Batch]) -> None:
        self._store = store
        self._prefixes = prefixes

    async def put(self, tasks: int) -> None:
        """Write each prefix, which must be absent, by a question and a batch."""
        await in_tasks(tasks, self._prefixes, self._put)

    async def get(self, tasks: int, times: int = 1) -> None:
        """Read each prefix by one batch, so many times."""
        await in_tasks(tasks, [*self._prefixes] * times, self._get)

    async def get_chunkwise(self, tasks: int) -> None:
        """Read each prefix chunk by chunk."""
        await in_tasks(tasks, self._prefixes, self._get_chunkwise)

    async def fill(self) -> None:
        """Write what is not there."""
        for prefix in self._prefixes:
            await on_thread(partial(self._store.batch_put_from, prefix.keys, prefix.sources, prefix.sizes))

    async def remove(self) -> None:
        keys = [key for prefix in self._prefixes for key in prefix.keys]
        await on_thread(partial(self._store.batch_remove, keys, True))

    async def _put(self, prefix: Batch) -> None:
        _expect(await self._store.async_batch_is_exist(prefix.keys), 0, "existence")
        _expect(await self._store.async_batch_put_from(prefix.keys, prefix.sources, prefix.sizes), 0, "put")

    async def _get(self, prefix: Batch) -> None:
        answer = await self._store.async_batch_get_into(prefix.keys, prefix.sinks, prefix.sizes)
        _expect(answer, prefix.sizes[0], "get")

    async def _get_chunkwise(self, prefix: Batch) -> None:
        for key, sink, size in zip(prefix.keys, prefix.sinks, prefix.sizes, strict=True):
            _expect([await self._store.async_get_into(key, sink, size)], size, "get")


@asynccontextmanager
async def async_store(master_address: str, segment_bytes: int) -> AsyncIterator[AsyncCalls]:
    """Mooncake's asyncio class, set up with a segment of this process. No call may be in flight at the end.

    Raises ``ConnectError``, ``MissingLibraryError``.
    """
    store = await on_thread(partial(_set_up, master_address, segment_bytes))
    try:
        yield store
    finally:
        await on_thread(store.close)


def _set_up(master_address: str, segment_bytes: int) -> AsyncCalls:
    new_native_store()  # where the library does not load, this says why; and it quiets the native log
    from mooncake.async_store import MooncakeDistributedStoreAsync

    store: AsyncCalls = MooncakeDistributedStoreAsync()
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    settings = {
        "local_hostname": f"127.0.0.1:{port}",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": str(segment_bytes),
        "local_buffer_size": str(DEFAULT_LOCAL_BUFFER),
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": master_address,
    }
    if code := store.setup(settings):
        raise ConnectError(f"Mooncake's asyncio class could not be set up at {master_address}: code {code}")
    return store


def register(native: PlainCalls, memory: NDArray[np.uint8]) -> None:
    """Tell the native library of memory that values move to and from. Raises ``ConnectError``."""
    if code := native.register_buffer(memory.ctypes.data, memory.nbytes):
        raise ConnectError(f"{memory.nbytes} bytes of memory could not be registered: code {code}")


def write_once(native: PlainCalls, source: int, nbytes: int) -> None:
    """Write ``nbytes`` to the store, each value the MiB at ``source``, and remove them again.

    The pages of its memory are slow when they are first written to. Values that it has no room for do not matter.
    """
    keys = [f"bench-first-{number}" for number in range(nbytes >> 20)]
    for start in range(0, len(keys), 32):
        some = keys[start : start + 32]
        native.batch_put_from(some, [source] * len(some), [1 << 20] * len(some))
    native.batch_remove(keys, True)


def _expect(answers: Sequence[int], wanted: int, what: str) -> None:
    """Every answer is ``wanted``. Raises ``StoreAnswerError``."""
    if answers.count(wanted) != len(answers):
        wrong = next(answer for answer in answers if answer != wanted)
        raise StoreAnswerError(
            f"a native {what} of {len(answers)} keys answered {wrong} where {wanted} is right; "
            "is the memory for the store too small, or another program at work on it?"
        )
