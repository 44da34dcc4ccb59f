"""The memory that one native client moves values to and from, and the order in which it is let go of.

A native client must be told of memory before it moves values there, and must have forgotten it before the memory
is freed: else it may write to, or hand out, what is somebody else's by then. What it has not forgotten when it is
closed stays unusable for the next client of this process. So: unregister, close, free; in one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar, cast

from ..config import MooncakeConfig
from ..errors import ClientClosedError, ConnectError
from ..waiting import settled
from . import leaving
from . import native_codes as codes
from .native import NativeStore, has_cuda
from .regions import MemoryPool, Region, anonymous_pool
from .registrations import Registrations
from .shared_setup import open_shared_pool
from .sharing import Sharing

T = TypeVar("T")

logger = logging.getLogger(__name__)


#: Over TCP each piece of a value is a transfer of its own, which takes as long as copying so many bytes.
_NETWORK_PIECE: Final = 96 << 10


class Runner(Protocol):
    """Runs a blocking call on a thread."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]: ...


class NativeMemory:
    """The ``StoreMemory`` of a native client: its pool, and what callers register. Made by ``open``.

    With an owner process (``config.mode == "shared"``) the pool is all there is: memory from elsewhere cannot be
    registered. Any thread may allocate, and ask what is covered.
    """

    def __init__(self, native: NativeStore, pool: MemoryPool, config: MooncakeConfig) -> None:
        """``pool``: memory that is registered with ``native``, all of it."""
        self._native = native
        self._pool: MemoryPool | None = pool
        self._where = config.where
        self._only_pool = config.mode == "shared"
        #: How the owner process knows the pool, in shared mode.
        self.sharing = Sharing(native, pool.address, pool.nbytes, config.where) if self._only_pool else None
        self._gather_bytes = _NETWORK_PIECE if config.mode == "remote" else 0
        self._run: Runner = asyncio.to_thread
        #: One change at a time, its native calls included. Held on threads only.
        self._turn = threading.Lock()
        #: Never changed, but replaced, so that it can be read without a lock.
        self._registrations = Registrations()
        self._registrations.add(pool.address, pool.nbytes)

    @classmethod
    def open(cls, native: NativeStore, config: MooncakeConfig) -> NativeMemory:
        """Memory of ``config.pool_size`` bytes for ``native``, which is set up. Runs on a thread.

        Raises ``ConfigError`` or ``ConnectError``; ``native`` has no memory then.
        """
        memory = cls(native, _open_pool(native, config), config)
        leaving.opened(native)
        return memory

    @property
    def native(self) -> NativeStore:
        """What moves values to and from this memory."""
        return self._native if self.sharing is None else cast(NativeStore, self.sharing.native)

    @property
    def plain_native(self) -> NativeStore:
        return self._native

    @property
    def gather_bytes(self) -> int:
        return self._gather_bytes

    @property
    def reaches_devices(self) -> bool:
        return not self._only_pool and has_cuda()

    def run_on(self, run: Runner) -> None:
        """Let ``run`` take native calls to threads, where a store has its own."""
        self._run = run

    def allocate(self, nbytes: int) -> Region:
        """A part of the pool. Its memory outlives the client, as long as something refers to a view of it.

        Raises ``InvalidRequestError`` where there is no room, and ``ClientClosedError``.
        """
        pool = self._pool
        if pool is None:
            raise self._closed()
        return pool.allocate(nbytes)

    def covers(self, address: int, nbytes: int) -> bool:
        return self._registrations.covers(address, nbytes)

    async def register(self, address: int, nbytes: int) -> bool:
        """Make ``nbytes`` at ``address`` memory that values move to and from; False where that cannot be.

        A cancelled call registers nothing, and returns once that is so. Raises ``ClientClosedError``.
        """
        if self._pool is None:
            raise self._closed()
        if self._only_pool:
            return self.covers(address, nbytes)
        registering = asyncio.ensure_future(self._run(lambda: self._add(address, nbytes)))
        try:
            return await settled(registering)
        except asyncio.CancelledError:
            if not registering.cancelled() and registering.exception() is None and registering.result():
                with contextlib.suppress(ClientClosedError):  # which lets go of it too
                    await self.unregister(address, nbytes)
            raise

    async def unregister(self, address: int, nbytes: int) -> None:
        """Take back one ``register``. A cancelled call does so too, and returns once it is done."""
        if not self._only_pool and self._pool is not None:
            await settled(asyncio.ensure_future(self._run(lambda: self._remove(address, nbytes))))

    def _add(self, address: int, nbytes: int) -> bool:
        """Runs on a thread."""
        with self._turn:
            if self._pool is None:
                raise self._closed()
            changed = copy.deepcopy(self._registrations)
            done: list[int] = []
            for begin, size in changed.add(address, nbytes):
                code = self._native.register_buffer(begin, size)
                if code != codes.OK:
                    logger.warning(
                        "the native client of %s does not register %d bytes at %#x: %s (%d)",
                        *(self._where, size, begin, codes.meaning_of(code).text, code),
                    )
                    self._forget(done)
                    return False
                done.append(begin)
            self._registrations = changed
            return True

    def _remove(self, address: int, nbytes: int) -> None:
        """Runs on a thread."""
        with self._turn:
            if self._pool is None:
                return  # all of it is forgotten
            changed = copy.deepcopy(self._registrations)
            gone = changed.remove(address, nbytes)
            self._registrations = changed
            self._forget([begin for begin, _ in gone])

    def _forget(self, begins: list[int]) -> bool:
        """Whether the native client knows of none of them any more."""
        sharing = self.sharing
        answers = [self._native.unregister_buffer(begin) if sharing is None else sharing.forget() for begin in begins]
        for begin, code in zip(begins, answers, strict=True):
            if code != codes.OK:
                # Where the other side is gone, so is what it knew.
                logger.log(
                    logging.DEBUG if codes.fails_whole_call(code) else logging.WARNING,
                    "the native client of %s does not let go of the memory at %#x: %s (%d)",
                    *(self._where, begin, codes.meaning_of(code).text, code),
                )
        return not any(answers)

    def close(self, instead: Callable[[], bool] = lambda: False) -> None:
        """Unregister all memory, close the native client, and let go of the pool. Idempotent.

        ``instead`` of closing it may take the native client, which knows of no memory then, and says whether it did.
        No native call may be in flight. Runs on a thread; closing holds the interpreter's lock, for a second or two
        where the other side answers.
        """
        with self._turn:
            if self._pool is None:
                return
            pieces = self._registrations.pieces()
            self._registrations = Registrations()
            if not (self._forget([begin for begin, _ in pieces]) and instead()):
                self._close_native()
            self._pool = None

    def _close_native(self) -> None:
        began = time.monotonic()
        code = self._native.close()
        leaving.closed(self._native)
        logger.info("closing the native client of %s took %.2f s", self._where, time.monotonic() - began)
        if code != codes.OK:
            logger.warning("closing the native client of %s: %s (%d)", self._where, codes.meaning_of(code).text, code)

    def leave(self) -> None:
        """Leave all of it to the end of the process: the native client cannot be closed."""
        leaving.leave(self._native, self._pool)

    def _closed(self) -> ClientClosedError:
        return ClientClosedError(f"the connection to {self._where} is closed, and with it its memory; connect again")


def _open_pool(native: NativeStore, config: MooncakeConfig) -> MemoryPool:
    if config.mode == "shared":
        return open_shared_pool(native, config)
    pool = anonymous_pool(config.pool_size)
    code = native.register_buffer(pool.address, pool.nbytes)
    if code != codes.OK:
        raise ConnectError(
            f"the native client of {config.where} refuses a pool of pool_size={pool.nbytes} bytes: "
            f"{codes.meaning_of(code).text} ({code})"
        )
    return pool
