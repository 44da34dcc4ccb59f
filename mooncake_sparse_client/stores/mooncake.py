"""MooncakeStore: the real store, behind a guard.

The native library ends the process when it is misused, blocks for seconds, and holds the interpreter's lock in
``setup`` and ``close``. ``guard.py`` has the states in which it may be called, and the threads that call it;
``connecting.py`` how it is set up; ``native_memory.py`` in which order all of it is let go of.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from ..config import MooncakeConfig
from ..core.results import Health
from ..errors import ClientClosedError, StoreAnswerError, StoreError, StoreTimeoutError, StoreUnavailableError
from . import leaving, spares
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
    check_prefix,
)
from .connecting import Opened, open_native_store, opened_by
from .guard import Guard, State
from .keeper import Keeper
from .native_calls import ask_in_parts, copied_in, copy_out, get_placed, in_parts, put_placed, room_for, starting_with
from .native_memory import NativeMemory
from .regions import StoreMemory

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: The native read's answer is a 32-bit length.
_MAX_VALUE_BYTES: Final = (1 << 31) - 1
_HEALTH_KEY: Final = "mooncake-sparse-client:health"
#: Pieces that may be under way over TCP at once. With some two thousand and more, in however many calls, the library
#: stalls for seconds and fails transfers that would work.
_NETWORK_PIECES: Final = 1024
#: Seconds in which the other side must answer for the native client to be closed. What is dead takes the library four.
_CLOSE_PATIENCE: Final = 5.0


class MooncakeStore:
    """A Mooncake store; ``connect`` makes one that is. ``async with`` or ``aclose`` lets go of it."""

    def __init__(self, config: MooncakeConfig, *, timeout: float = 30.0, close_timeout: float = 60.0) -> None:
        self._config = config
        self._timeout, self._close_timeout = timeout, close_timeout
        self._closing: asyncio.Task[None] | None = None
        self._memory: NativeMemory | None = None
        self._keeper: Keeper | None = None
        # Over the network each thread that waits spins on a core; elsewhere the library's own threads do the work.
        threads = 2 if config.mode == "remote" else 4
        self._pieces = _NETWORK_PIECES // threads if config.mode == "remote" else None
        self._guard = Guard(self._where, data_threads=threads, question_threads=12)

    @classmethod
    async def connect(cls, config: MooncakeConfig, *, timeout: float = 30.0) -> MooncakeStore:
        """Probe the master (in shared mode the owner process), then set the native client up, with its memory.
        The native library's own time-outs are set to ``timeout`` seconds too, unless the user has set them; a
        call to a dead master still takes it some four.

        Raises ``ConnectError``, ``MissingLibraryError`` or ``ConfigError``.
        """
        store = cls(config, timeout=timeout)
        await store.open()
        return store

    async def open(self) -> None:
        """Connect, once. If it fails, or is cancelled, nothing is left open."""
        self._guard.become(State.CONNECTING)
        try:
            self._attach(await self._opened())
        finally:
            if self._guard.state is State.CONNECTING:
                self._guard.become(State.CLOSED)

    async def _opened(self) -> Opened:
        spare = await asyncio.to_thread(spares.take, self._config, self._timeout)
        if spare is None:
            return await open_native_store(self._config, timeout=self._timeout)
        return await opened_by(functools.partial(NativeMemory.open, spare, self._config))

    def _attach(self, opened: Opened) -> None:
        self._memory = opened.memory
        self._native = opened.memory.native
        self._guard.become(State.OPEN)
        opened.memory.run_on(functools.partial(self._guard.ask, hold=True))
        if opened.memory.sharing is not None:
            self._keeper = Keeper(self._guard, opened.memory.sharing)
            self._keeper.watch()

    async def __aenter__(self) -> MooncakeStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._guard.state is State.OPEN and self._guard.of_this_process:
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
        if self._memory is None:
            raise ClientClosedError(f"the connection to {self._where} is {self._guard.state.value}")
        return self._memory

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self._guard.check()
        check_distinct(keys)
        what = f"asking {self._where} for {len(keys)} keys"
        answer = await self._guard.ask(lambda: ask_in_parts(self._native, keys))
        _check_length(answer, len(keys), what)
        if answer.count(1) == len(answer):
            return [True] * len(answer)
        for code in {*answer} - {0, 1}:
            if codes.is_no_answer(code):
                raise codes.error_of(code, what)
        return [code == 1 for code in answer]

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        self._guard.check()
        check_items(items, writable=False)
        native, memory, replication = self._native, self._own_memory, self._config.replication

        def call() -> list[int]:
            batch, _ = (items, None) if isinstance(items, PlacedPuts) else copied_in(items, memory)
            parts = in_parts(batch, self._pieces)
            return [code for part in parts for code in put_placed(native, part, memory, replication)]

        return self._outcome(items, await self._moved(call) if items else [], "writing")

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        self._guard.check()
        check_items(items, writable=True)
        native, memory = self._native, self._own_memory

        def call() -> list[Failure | int | None]:
            batch, pieces = (items, None) if isinstance(items, PlacedGets) else room_for(items, memory)
            answer = [code for part in in_parts(batch, self._pieces) for code in get_placed(native, part)]
            if pieces is not None:
                copy_out(items, pieces, answer)
            return answer

        return self._outcome(items, await self._moved(call) if items else [], "reading")

    async def _moved(self, call: Callable[[], Sequence[T]]) -> Sequence[T]:
        """Run a transfer; once more where it was refused since the owner process had lost the memory."""
        if self._keeper is None:
            return await self._guard.move(call)
        self._keeper.watch()
        answer = await self._guard.move(call)
        if codes.INVALID_PARAMS in answer and await self._keeper.mend():
            answer = await self._guard.move(call)
        return answer

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
        self._guard.check()
        check_distinct(keys)
        what = f"removing {len(keys)} keys from {self._where}"
        answer = await self._guard.ask(lambda: self._native.batch_remove(list(keys), force))
        _check_length(answer, len(keys), what)
        if not any(answer):
            return [RemoveOutcome.REMOVED] * len(keys)
        return [_removed(code, what) for code in answer]

    async def remove_prefix(self, prefix: str, *, force: bool = False) -> int:
        self._guard.check()
        check_prefix(prefix)
        pattern = starting_with(prefix)
        answer = await self._guard.ask(lambda: self._native.remove_by_regex(pattern, force))
        if answer < 0:
            raise codes.error_of(answer, f"removing the keys at {self._where} that start with {prefix!r}")
        return answer

    async def health(self) -> Health:
        self._guard.check()
        # The library's own check is a flag that a client without a segment never updates: ask for real.
        code = await self._guard.ask(lambda: self._native.is_exist(_HEALTH_KEY))
        if codes.is_no_answer(code):
            error: StoreError = codes.error_of(code, f"asking {self._where}")
            return Health(ok=False, kind=error.kind, detail=str(error))
        if self._keeper is not None:
            try:
                await self._keeper.mend()
            except StoreUnavailableError as lost:
                return Health(ok=False, kind=lost.kind, detail=str(lost))
        return Health(ok=True)

    async def aclose(self) -> None:
        """Refuse new calls, wait for those in flight, then let go of the native client and its memory.

        In mode ``embedded`` the native client is closed, so that its segment leaves the store in order: that holds the
        interpreter's lock for some two seconds. In the other modes a few are kept for the next connection alike, or
        for the end of the process. Where the other side does not answer, all is left to the end of the process.

        Raises ``StoreTimeoutError`` when calls stay in flight for longer than the bound.
        """
        self._guard.check_process()
        if self._closing is None:
            if self._guard.state in (State.NEW, State.CLOSED):
                return  # never open
            self._guard.become(State.CLOSING)
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._keeper is not None:
            self._keeper.stop()
        memory = self._own_memory
        late = await self._guard.drained(self._close_timeout)
        if late or not await asyncio.to_thread(self._can_close):
            memory.leave()
            self._guard.become(State.BROKEN)
            self._guard.let_threads_go()
            if late:
                raise StoreTimeoutError(
                    f"{late} native calls to {self._where} did not end within {self._close_timeout:g} s; the "
                    "connection is left to the end of the process"
                )
            logger.warning(
                "%s does not answer; the connection is left to the end of the process, as closing it would stop all "
                "threads for up to minutes",
                self._where,
            )
            return
        await asyncio.to_thread(memory.close, self._spared)
        self._guard.become(State.CLOSED)
        self._guard.let_threads_go()

    def _can_close(self) -> bool:
        """Whether closing the native client takes but a second or two. Runs on a thread."""
        code = leaving.answer_within(_CLOSE_PATIENCE, lambda: self._native.is_exist(_HEALTH_KEY))
        lends_memory = bool(self._config.global_segment_size)
        return code is not None and not (lends_memory and codes.is_no_answer(code))

    def _spared(self) -> bool:
        """Keep the native client, which knows of no memory any more, for another connection."""
        return spares.keep(self._config, self._timeout, self._own_memory.plain_native)

    @property
    def _own_memory(self) -> NativeMemory:
        assert self._memory is not None  # noqa: S101 - it is open, or being closed
        return self._memory

    @property
    def _where(self) -> str:
        return f"the Mooncake store at {self._config.where}"


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
