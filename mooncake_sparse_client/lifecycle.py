"""Making, opening and closing a client: what ``SparseStoreClient`` is before and after its calls."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from enum import Enum
from typing import Self, Unpack

from .asking import Asker
from .config import DEFAULT_POOL, FROM_ENV, FromEnv, Limits, MooncakeConfig, load_config, load_retention
from .config_values import Mode
from .core.framing import ValueFormatName
from .core.hashing import BlockHasher
from .core.keys import KeySchema
from .core.layout import KVCacheLayout
from .core.masks import check_retention_interval
from .data_plane.reading import Reader
from .data_plane.registry import Registry
from .data_plane.transfer import Transport
from .errors import (
    OUT_OF_REACH,
    ClientClosedError,
    ConfigError,
    ForkedProcessError,
    InvalidRequestError,
    InvalidRetentionError,
    StoreTimeoutError,
)
from .identity import Profile, resolve_identity
from .resilience import DEFAULT_RESILIENCE, Resilience
from .settings import (
    DEFAULT_TIMEOUT,
    ClientSettings,
    ConnectSettings,
    StoreOpener,
    WhenDown,
    check_room,
    checked_resilience,
    checked_timeout,
    checked_when_down,
    lends_memory,
    local_config,
    open_connected,
    open_local,
    split_settings,
    within_timeout,
)
from .stores.base import Store
from .waiting import Bound, settled

logger = logging.getLogger(__name__)

_DEFAULT_LIMITS = Limits()


class _State(Enum):
    NEW = "not opened yet; use `async with client:`"
    OPENING = "being opened by another task; wait for it"
    OPEN = "open"
    CLOSED = "closed; make a new one"


class ClientLifecycle:
    """The states of a client (new, open, closed), and what it holds while open."""

    def __init__(
        self,
        store: Store | StoreOpener,
        layout: KVCacheLayout,
        *,
        model_name: str,
        dtype: str = "bfloat16",
        revision: str = "",
        profile: Profile = "native",
        keys: KeySchema | None = None,
        hasher: BlockHasher | None = None,
        value_format: ValueFormatName | None = None,
        retention_interval: int | FromEnv | None = FROM_ENV,
        limits: Limits = _DEFAULT_LIMITS,
        timeout: float = DEFAULT_TIMEOUT,
        when_down: WhenDown = "raise",
        resilience: Resilience = DEFAULT_RESILIENCE,
    ) -> None:
        self._state = _State.NEW
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()
        #: Those that ask the store now.
        self._calls: set[Bound] = set()
        self._lends_memory = False
        if not isinstance(limits, Limits):
            raise ConfigError(f"limits must be a Limits, not {limits!r}")
        self._limits = limits
        self._timeout = checked_timeout(timeout)
        self._resilience = checked_resilience(resilience)
        # What of a store that is out of reach counts as a miss, and is not raised.
        self._misses = OUT_OF_REACH if checked_when_down(when_down) == "miss" else ()
        self._identity = resolve_identity(
            layout,
            model_name=model_name,
            dtype=dtype,
            revision=revision,
            profile=profile,
            keys=keys,
            hasher=hasher,
            value_format=value_format,
        )
        self._retention = load_retention(retention_interval)
        try:
            check_retention_interval(self.layout, self._retention.interval)
        except InvalidRetentionError as error:
            raise InvalidRetentionError(f"{error} (from {self._retention.origin})") from error
        logger.info("retention interval: %s (from %s)", self._retention.interval, self._retention.origin)
        self._opener = store if isinstance(store, StoreOpener) else None
        if not isinstance(store, StoreOpener):
            self._attach(store)

    @classmethod
    def connect(
        cls,
        layout: KVCacheLayout,
        *,
        model_name: str,
        mode: Mode | None = None,
        config: MooncakeConfig | str | os.PathLike[str] | None = None,
        **settings: Unpack[ConnectSettings],
    ) -> Self:
        """A client of a running Mooncake, connected when entered.

        ``mode``: ``remote`` (the default) uses other processes' memory over the network; ``shared`` that of an
        owner process on this host, at ``owner_address``; ``embedded`` lends a segment of this one's. Store
        settings given here override environment, file (``config``, else the one that ``MOONCAKE_CONFIG_PATH``
        names) and defaults. Entering raises ``ConfigError`` and ``ConnectError``.
        """
        ours, theirs = split_settings(settings)
        timeout = ours.get("timeout", DEFAULT_TIMEOUT)

        async def opened(stack: AsyncExitStack) -> Store:
            # On a thread, since it may read a file.
            found = await asyncio.to_thread(load_config, mode, config=config, **theirs)
            return await open_connected(stack, found, timeout)

        return cls(StoreOpener(opened), layout, model_name=model_name, **ours)

    @classmethod
    def local(
        cls,
        layout: KVCacheLayout,
        *,
        model_name: str,
        segment_size: int | str = "1GB",
        pool_size: int | str = DEFAULT_POOL,
        **settings: Unpack[ClientSettings],
    ) -> Self:
        """A client with a Mooncake of its own, started when entered and gone when left, with all its data.

        ``segment_size``: the memory of this process that holds the data, ``pool_size``: that which values move
        through (staging, and ``allocate``); in bytes or as text like "1GB".
        """
        local_config(segment_size, pool_size)  # a wrong size is told now, not when the client is entered
        timeout = settings.get("timeout", DEFAULT_TIMEOUT)
        opener = StoreOpener(lambda stack: open_local(stack, segment_size, pool_size, timeout))
        return cls(opener, layout, model_name=model_name, **settings)

    def _attach(self, store: Store) -> None:
        if isinstance(store, type) or not isinstance(store, Store):
            raise ConfigError(f"store must be a Store such as MemoryStore(), not {store!r}; see connect() and local()")
        largest = max(self._identity.value_bytes(group) for group in range(len(self.layout.groups)))
        check_room(largest, store, self._limits)
        try:
            staging = store.memory.allocate(self._limits.staging_bytes)
        except InvalidRequestError as error:
            raise ConfigError(
                f"the store's memory has no room for Limits.staging_bytes={self._limits.staging_bytes}: {error}"
            ) from error
        resilience = within_timeout(self._resilience, self._timeout)
        self._transport = Transport(store, self._identity, self._limits, resilience, staging, on_hang=self._cut_calls)
        self._asker, self._reader = Asker(self._transport), Reader(self._transport)
        self._registry = Registry(self._transport.memory, self._identity)
        self._lends_memory = lends_memory(store)
        self._state = _State.OPEN

    async def __aenter__(self) -> Self:
        if self._state is _State.NEW and self._opener is not None:
            self._state = _State.OPENING
            self._opening = asyncio.get_running_loop().create_future()
            try:
                await self._open(self._opener)
            finally:
                self._opening.set_result(None)
                if self._state is _State.OPENING:
                    self._state = _State.NEW  # it failed, and may be tried again
        self._check_open()
        return self

    async def _open(self, opener: StoreOpener) -> None:
        async with AsyncExitStack() as opening:
            store = await opener.open(opening)
            if self._state is not _State.OPENING:
                raise ClientClosedError("the client was closed while it was being opened")
            self._attach(store)
            self._stack = opening.pop_all()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Refuse new calls, wait for native calls in flight within a bound, and close what this client opened.

        All of it is done when this returns, whoever calls it again or cancels it meanwhile.
        """
        if self._state is _State.OPEN:
            self._check_open()
            self._closing = asyncio.create_task(self._close())
        self._state = _State.CLOSED
        if self._opening is not None and not self._opening.done():
            await asyncio.wait([self._opening])  # who opens it finds it closed, and lets go of what was opened
        if self._closing is not None:
            await settled(self._closing)

    async def _close(self) -> None:
        try:
            await self._transport.settle(self._timeout)
            self._registry.close()
            # Under a call that has not ended by now, memory stays registered; a store lets go of it by itself.
            if self._transport.lane.idle:
                await self._release()
        finally:
            await self._stack.aclose()

    async def _release(self) -> None:
        releasing = asyncio.create_task(self._registry.release())
        _, late = await asyncio.wait([releasing], timeout=self._timeout)
        if late:
            raise StoreTimeoutError(f"registered memory was not let go of within {self._timeout:g} s")
        releasing.result()

    @property
    def layout(self) -> KVCacheLayout:
        """The layout in force: its hash block is the profile's unless the caller gave one."""
        return self._identity.layout

    @property
    def keys(self) -> KeySchema:
        """The key schema in force, its namespace filled in."""
        return self._identity.keys.schema

    @property
    def hasher(self) -> BlockHasher:
        return self._identity.hasher

    @property
    def fingerprint(self) -> str:
        """16 hex digits over what makes two caches incompatible."""
        return self._identity.value_format.fingerprint

    @property
    def retention_interval(self) -> int | None:
        """In tokens; None keeps the windows of every boundary, 0 of none but the request's own."""
        return self._retention.interval

    @property
    def retention_origin(self) -> str:
        """Where the retention interval was set: ``argument``, a variable's name or ``default``."""
        return self._retention.origin

    @property
    def when_down(self) -> WhenDown:
        """Whether a store that cannot be reached raises, or counts as one that has nothing."""
        return "miss" if self._misses else "raise"

    @property
    def lends_memory(self) -> bool:
        """Whether this process holds memory of the Mooncake that it uses (``local``, or mode ``embedded``): what lies
        there goes when the client is closed. False before the client is open."""
        return self._lends_memory

    def _bounded(self, what: str, seconds: float | None = None) -> Bound:
        """Let a block take so long, at most ``timeout`` seconds."""
        self._check_open()
        return Bound(min(seconds or self._timeout, self._timeout), what, lambda: "", set())

    def _asking(self, what: str, so_far: Callable[[], str] = lambda: "", *, moving: bool = False) -> Bound:
        """The same for a block that asks the store, or is ``moving`` values: it ends when the store is found to hang.
        ``so_far`` says what one that is cut off had done. Raises ``StoreDownError`` if the store is down."""
        self._check_open()
        self._transport.check_up(moving=moving)
        return Bound(self._timeout, what, so_far, self._calls)

    def _cut_calls(self, down: str) -> None:
        for call in tuple(self._calls):
            call.cut(down)

    def _check_open(self) -> None:
        if self._state is not _State.OPEN:
            raise ClientClosedError(f"this client is {self._state.value}")
        if self._pid != os.getpid():
            raise ForkedProcessError(
                f"this client was made in process {self._pid}, and its threads are not in the fork {os.getpid()}; "
                "make one in the child"
            )
        self._check_loop()

    def _check_not_closed(self) -> None:
        """For calls that need no store."""
        if self._state is _State.CLOSED:
            raise ClientClosedError(f"this client is {self._state.value}")

    def _check_loop(self) -> None:
        """What waits belongs to an event loop: one at a time, and a new one only after the last has ended."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise InvalidRequestError(
                    "this client is in use on another event loop; make one client for each, over the same store address"
                )
            self._transport.enter_loop()
        self._loop = loop
