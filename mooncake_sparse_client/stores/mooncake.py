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
from ..waiting import held
from . import native_codes as codes
from .base import (
    Failure,
    GetItem,
    PlacedGets,
    PlacedPuts,
    Places,
    PutItem,
    RemoveOutcome,
    check_distinct,
    check_items,
)
from .connecting import Opened, open_native_store
from .native_calls import ask_in_parts, copied_in, copy_out, get_placed, in_parts, put_placed, room_for
from .regions import StoreMemory

T = TypeVar("T")

#: The native read's answer is a 32-bit length.
_MAX_VALUE_BYTES: Final = (1 << 31) - 1
_HEALTH_KEY: Final = "mooncake-sparse-client:health"
#: Pieces that may be under way over TCP at once. With some two thousand and more, in however many calls, the library
#: stalls for seconds and fails transfers that would work.
_NETWORK_PIECES: Final = 1024
#: Stores whose calls never came back: closing or collecting them would end the process.
_stranded: list[MooncakeStore] = []


class MooncakeStore:
    """A connected Mooncake store. Made by ``connect``; ``async with`` or ``aclose`` lets go of it."""

    def __init__(self, opened: Opened, config: MooncakeConfig, *, close_timeout: float = 60.0) -> None:
        self._native = opened.native
        self._config = config
        self._close_timeout = close_timeout
        self._pid = os.getpid()
        self._closing: asyncio.Task[None] | None = None
        self._in_flight: set[Future[object]] = set()
        # Over the network each thread that waits spins on a core; elsewhere the library's own threads do the work.
        threads = 2 if config.mode == "remote" else 4
        self._pieces = _NETWORK_PIECES // threads if config.mode == "remote" else None
        self._data = ThreadPoolExecutor(threads, thread_name_prefix="mooncake-data")
        self._questions = ThreadPoolExecutor(12, thread_name_prefix="mooncake-ask")
        self._memory = opened.memory
        self._memory.run_on(self._run_on_memory)

    @classmethod
    async def connect(cls, config: MooncakeConfig, *, timeout: float = 30.0) -> MooncakeStore:
        """Probe the master (in shared mode the owner process), then set the native client up, with its memory.
        The native library's own time-outs are set to ``timeout`` seconds too, unless the user has set them; a
        call to a dead master still takes it some four.

        Raises ``ConnectError``, ``MissingLibraryError`` or ``ConfigError``.
        """
        return cls(await open_native_store(config, timeout=timeout), config)

    async def __aenter__(self) -> MooncakeStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._closing is None and self._pid == os.getpid():
            warnings.warn(f"a MooncakeStore on {self._config.where} was never closed", ResourceWarning, 2)

    @property
    def config(self) -> MooncakeConfig:
        return self._config

    @property
    def max_value_bytes(self) -> int | None:
        return min(self._config.global_segment_size or _MAX_VALUE_BYTES, _MAX_VALUE_BYTES)

    @property
    def lease_seconds(self) -> float | None:
        return self._config.lease_seconds

    @property
    def memory(self) -> StoreMemory:
        """A pool of ``config.pool_size`` bytes, and what is registered besides."""
        return self._memory

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self._check_open()
        check_distinct(keys)
        what = f"asking {self._where} for {len(keys)} keys"
        answer = await self._run(self._questions, lambda: ask_in_parts(self._native, keys))
        _check_length(answer, len(keys), what)
        if answer.count(1) == len(answer):
            return [True] * len(answer)
        for code in answer if min(answer, default=0) < 0 else ():
            if codes.is_no_answer(code):
                raise codes.error_of(code, what)
        return [code == 1 for code in answer]

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        self._check_open()
        check_items(items, writable=False)
        native, replication = self._native, self._config.replication

        def call() -> list[int]:
            batch, _ = (items, None) if isinstance(items, PlacedPuts) else copied_in(items, self._memory)
            parts = in_parts(batch, self._pieces)
            return [code for part in parts for code in put_placed(native, part, self._memory, replication)]

        answer = await self._run(self._data, call, hold=True) if items else []
        return self._outcome(items, answer, "writing")

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        self._check_open()
        check_items(items, writable=True)
        native = self._native

        def call() -> list[Failure | int | None]:
            batch, pieces = (items, None) if isinstance(items, PlacedGets) else room_for(items, self._memory)
            answer = [code for part in in_parts(batch, self._pieces) for code in get_placed(native, part)]
            if pieces is not None:
                copy_out(items, pieces, answer)
            return answer

        answer = await self._run(self._data, call, hold=True) if items else []
        return self._outcome(items, answer, "reading")

    def _outcome(
        self, items: Sequence[PutItem] | Sequence[GetItem], answer: Sequence[Failure | int | None], doing: str
    ) -> list[Failure | None]:
        """What became of each value, from the codes and failures of a native call."""
        what = f"{doing} {len(items)} values at {self._where}"
        _check_length(answer, len(items), what)
        if not any(answer):
            return [None] * len(items)
        for code in answer:
            if isinstance(code, int) and codes.fails_whole_call(code):
                raise codes.error_of(code, what)
        keys = items.keys if isinstance(items, Places) else [item.key for item in items]
        return [_failure(code, f"{doing} {key!r}") for key, code in zip(keys, answer, strict=True)]

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        self._check_open()
        check_distinct(keys)
        what = f"removing {len(keys)} keys from {self._where}"
        answer = await self._run(self._questions, lambda: self._native.batch_remove(list(keys), force))
        _check_length(answer, len(keys), what)
        if not any(answer):
            return [RemoveOutcome.REMOVED] * len(keys)
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
        await asyncio.wrap_future(self._questions.submit(self._memory.close))
        self._data.shutdown(wait=False)
        self._questions.shutdown(wait=False)

    @property
    def _where(self) -> str:
        return f"the Mooncake store at {self._config.where}"

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

    async def _run_on_memory(self, call: Callable[[], T]) -> T:
        self._check_open()
        return await self._run(self._questions, call, hold=True)

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


def _failure(code: Failure | int | None, what: str) -> Failure | None:
    if isinstance(code, int):
        return codes.failure_of(code, what) if code else None
    return code


def _removed(code: int, what: str) -> RemoveOutcome:
    if code == codes.OK:
        return RemoveOutcome.REMOVED
    kind = codes.meaning_of(code).kind
    if kind == "missing":
        return RemoveOutcome.ABSENT
    if kind == "busy":
        return RemoveOutcome.LEASED
    raise codes.error_of(code, what)
