"""MooncakeStore: the real store, behind threads of its own.

The native library ends the process when it is called before ``setup`` or after ``close``, or closed under a
running call; blocks for seconds; and holds the interpreter's lock in ``setup`` and ``close``. So every call
runs on one of two pools (few threads for bytes, since each waits by spinning; more for questions), is
counted while it runs, and is refused outside the open state.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from ..config import MooncakeConfig
from ..core.results import Health
from ..errors import ClientClosedError, ForkedProcessError, StoreAnswerError, StoreTimeoutError
from ..views import address_of
from ..waiting import held
from . import native_codes as codes
from .base import Failure, GetItem, PutItem, RemoveOutcome, check_distinct, check_items
from .connecting import open_native_store
from .native import NativeStore

T = TypeVar("T")

#: The native read's answer is a 32-bit length.
_MAX_VALUE_BYTES: Final = (1 << 31) - 1
_HEALTH_KEY: Final = "mooncake-sparse-client:health"
#: Stores whose calls never came back: closing or collecting them would end the process.
_stranded: list[MooncakeStore] = []


class MooncakeStore:
    """A connected Mooncake store. Made by ``connect``; ``async with`` or ``aclose`` lets go of it."""

    def __init__(self, native: NativeStore, config: MooncakeConfig, *, close_timeout: float = 60.0) -> None:
        self._native = native
        self._config = config
        self._close_timeout = close_timeout
        self._pid = os.getpid()
        self._closing: asyncio.Task[None] | None = None
        self._in_flight: set[Future[object]] = set()
        cores = os.cpu_count() or 2
        self._data = ThreadPoolExecutor(max(2, min(cores, 4)), thread_name_prefix="mooncake-data")
        self._questions = ThreadPoolExecutor(8, thread_name_prefix="mooncake-ask")

    @classmethod
    async def connect(cls, config: MooncakeConfig, *, timeout: float = 30.0) -> MooncakeStore:
        """Probe the master, then set the native client up. The native library's own time-outs are set to
        ``timeout`` seconds too, unless the user has set them; a call to a dead master still takes it some four.

        Raises ``ConnectError``, ``MissingLibraryError`` or ``ConfigError``.
        """
        return cls(await open_native_store(config, timeout=timeout), config)

    async def __aenter__(self) -> MooncakeStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._closing is None and self._pid == os.getpid():
            warnings.warn(
                f"a MooncakeStore on {self._config.master_server_address} was never closed", ResourceWarning, 2
            )

    @property
    def config(self) -> MooncakeConfig:
        return self._config

    @property
    def max_value_bytes(self) -> int | None:
        return min(self._config.global_segment_size or _MAX_VALUE_BYTES, _MAX_VALUE_BYTES)

    @property
    def lease_seconds(self) -> float | None:
        return self._config.lease_seconds

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self._check_open()
        check_distinct(keys)
        what = f"asking {self._where} for {len(keys)} keys"
        answer = await self._run(self._questions, lambda: self._native.batch_is_exist(list(keys)))
        _check_length(answer, len(keys), what)
        for code in answer:
            # A replica that is busy or out of reach is not there; anything else is no answer.
            if code < 0 and codes.meaning_of(code).kind not in ("missing", "busy", "transfer"):
                raise codes.error_of(code, what)
        return [code == 1 for code in answer]

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        self._check_open()
        check_items(items, writable=False)
        what = f"writing {len(items)} values to {self._where}"
        answer = await self._run(self._data, lambda: _native_put(self._native, items), hold=True)
        _check_length(answer, len(items), what)
        _check_reached(answer, what)
        return [
            codes.failure_of(code, f"writing {item.key!r}") if code else None
            for item, code in zip(items, answer, strict=True)
        ]

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        self._check_open()
        check_items(items, writable=True)
        what = f"reading {len(items)} values from {self._where}"
        answer = await self._run(self._data, lambda: _native_get(self._native, items), hold=True)
        _check_length(answer, len(items), what)
        _check_reached([code for code in answer if isinstance(code, int)], what)
        return [
            codes.failure_of(code, f"reading {item.key!r}") if isinstance(code, int) else code
            for item, code in zip(items, answer, strict=True)
        ]

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        self._check_open()
        check_distinct(keys)
        what = f"removing {len(keys)} keys from {self._where}"
        answer = await self._run(self._questions, lambda: self._native.batch_remove(list(keys), force))
        _check_length(answer, len(keys), what)
        return [_removed(code, what) for code in answer]

    async def health(self) -> Health:
        self._check_open()
        # The library's own check is a flag that a client without a segment never updates: ask for real.
        code = await self._run(self._questions, lambda: self._native.is_exist(_HEALTH_KEY))
        if code >= 0:
            return Health(ok=True)
        error = codes.error_of(code, f"asking {self._where}")
        return Health(ok=False, kind=error.kind, detail=str(error))

    async def aclose(self) -> None:
        """Refuse new calls, wait for those in flight, then close the native client.

        Raises ``StoreTimeoutError`` when calls stay in flight for longer than the bound: the native client is
        then left open, since closing it under a call would end the process.
        """
        self._check_process()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        calls = [asyncio.wrap_future(call) for call in list(self._in_flight)]
        if calls:
            _, late = await asyncio.wait(calls, timeout=self._close_timeout)
            if late:
                _stranded.append(self)
                raise StoreTimeoutError(
                    f"{len(late)} native calls to {self._where} did not end within {self._close_timeout:g} s; "
                    "the connection is left open, since closing it under a call would end the process"
                )
        await asyncio.wrap_future(self._questions.submit(self._native.close))
        self._data.shutdown(wait=False)
        self._questions.shutdown(wait=False)

    @property
    def _where(self) -> str:
        return f"the Mooncake store at {self._config.master_server_address}"

    def _check_open(self) -> None:
        if self._closing is not None:
            raise ClientClosedError(f"the connection to {self._where} is closed; connect again")
        self._check_process()

    def _check_process(self) -> None:
        # Not even closing is safe there: it would end the child.
        if self._pid != os.getpid():
            raise ForkedProcessError(
                f"the connection to {self._where} was opened in process {self._pid} and cannot be used in its fork "
                f"{os.getpid()}; connect in the child (start it by spawn, or connect after the fork)"
            )

    async def _run(self, pool: ThreadPoolExecutor, call: Callable[[], T], *, hold: bool = False) -> T:
        """Run a native call on ``pool``. ``hold``: it works on the caller's memory, so a cancelled wait goes
        on until the call is back; the cancellation is raised then."""
        running = pool.submit(call)
        self._in_flight.add(running)  # type: ignore[arg-type]  # a future of T is one of object here
        running.add_done_callback(self._in_flight.discard)
        return await (held(running) if hold else asyncio.wrap_future(running))


def _check_length(answer: Sequence[object], wanted: int, what: str) -> None:
    if len(answer) != wanted:
        raise StoreAnswerError(f"{what}: {len(answer)} answers came back for {wanted} keys")


def _check_reached(answer: Sequence[int], what: str) -> None:
    for code in answer:
        if codes.fails_whole_call(code):
            raise codes.error_of(code, what)


def _removed(code: int, what: str) -> RemoveOutcome:
    if code == codes.OK:
        return RemoveOutcome.REMOVED
    kind = codes.meaning_of(code).kind
    if kind == "missing":
        return RemoveOutcome.ABSENT
    if kind == "busy":
        return RemoveOutcome.LEASED
    raise codes.error_of(code, what)


def _addresses(buffers: tuple[memoryview, ...]) -> list[int]:
    return [address_of(buffer) for buffer in buffers]


def _sizes(buffers: tuple[memoryview, ...]) -> list[int]:
    return [buffer.nbytes for buffer in buffers]


def _native_put(native: NativeStore, items: Sequence[PutItem]) -> list[int]:
    """Runs on a thread. The items keep the buffers alive until the call is back."""
    plain = [item for item in items if not item.replace]
    answer: dict[str, int] = {}
    if plain:
        written = native.batch_put_from_multi_buffers(
            [item.key for item in plain],
            [_addresses(item.buffers) for item in plain],
            [_sizes(item.buffers) for item in plain],
        )
        if len(written) != len(plain):
            return list(written)  # of a wrong length, which the caller reports
        answer = {item.key: code for item, code in zip(plain, written, strict=True)}
    for item in items:
        if item.replace:
            # Rare (it heals damage), so one copy: the native upsert takes a single buffer.
            value = memoryview(bytearray().join(item.buffers))
            answer[item.key] = native.upsert_from(item.key, address_of(value), value.nbytes)
    return [answer[item.key] for item in items]


def _native_get(native: NativeStore, items: Sequence[GetItem]) -> list[Failure | int | None]:
    """Runs on a thread: None for a value that arrived, a code or a reason for one that did not."""
    if not items:
        return []
    lengths = native.batch_get_into_multi_buffers(
        [item.key for item in items],
        [_addresses(item.buffers) for item in items],
        [_sizes(item.buffers) for item in items],
    )
    if len(lengths) != len(items):
        return list(lengths)
    return [_arrival(native, item, length) for item, length in zip(items, lengths, strict=True)]


def _arrival(native: NativeStore, item: GetItem, length: int) -> Failure | int | None:
    wanted = sum(buffer.nbytes for buffer in item.buffers)
    if length == wanted:
        return None
    if length in (codes.INVALID_PARAMS, codes.TRANSFER_FAIL):
        # A value of another size is answered like a failed transfer; its size tells them apart.
        size = native.get_size(item.key)
        length = size if size != wanted else length
    if length >= 0:
        return Failure("length", False, f"{item.key!r} has {length} bytes, not {wanted}")
    return length
