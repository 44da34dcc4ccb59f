"""What a client is made with, and how the stores behind ``connect`` and ``local`` are opened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypedDict, get_args

from .config import FromEnv, Limits, MooncakeConfig, MooncakeSettings, load_config
from .config_values import checked_segment
from .core.framing import ValueFormatName
from .core.hashing import BlockHasher
from .core.keys import KeySchema
from .errors import ConfigError
from .identity import Profile
from .resilience import Resilience
from .stores.base import Store
from .stores.local import LocalMooncake, check_memory
from .stores.mooncake import MooncakeStore
from .stores.wrapping import WrappedStore

WhenDown: TypeAlias = Literal["raise", "miss"]
#: Seconds.
DEFAULT_TIMEOUT = 30.0
#: Of a call's time, how much one question may take that is not taken for hung: some had to wait before it was asked.
_HANG_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class StoreOpener:
    """How to open a store when a client is entered; what it opens closes with the stack."""

    open: Callable[[AsyncExitStack], Awaitable[Store]]


class ClientSettings(TypedDict, total=False):
    """What every way to make a client takes besides the store, the layout and the model's name."""

    dtype: str
    revision: str
    profile: Profile
    keys: KeySchema | None
    hasher: BlockHasher | None
    value_format: ValueFormatName | None
    retention_interval: int | FromEnv | None
    limits: Limits
    timeout: float
    when_down: WhenDown
    resilience: Resilience


class ConnectSettings(ClientSettings, MooncakeSettings, total=False):
    """What ``connect`` takes: the client's settings and the store's."""


def split_settings(settings: ConnectSettings) -> tuple[ClientSettings, MooncakeSettings]:
    """The client's own, and the store's. Raises ``ConfigError`` for one that is neither."""
    ours, theirs = ClientSettings.__annotations__, MooncakeSettings.__annotations__
    for name in settings:
        if name not in ours and name not in theirs:
            raise ConfigError(f"unknown setting {name!r}; there are {', '.join(sorted({*ours, *theirs}))}")
    client = ClientSettings(**{name: value for name, value in settings.items() if name in ours})  # type: ignore[typeddict-item]
    store = MooncakeSettings(**{name: value for name, value in settings.items() if name in theirs})  # type: ignore[typeddict-item]
    return client, store


def checked_timeout(timeout: float) -> float:
    """Seconds. Raises ``ConfigError``."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise ConfigError(f"timeout must be a positive number of seconds, not {timeout!r}")
    return float(timeout)


def checked_when_down(when_down: WhenDown) -> WhenDown:
    if when_down not in get_args(WhenDown):
        raise ConfigError(f"when_down is {when_down!r}; it is 'raise' or 'miss'")
    return when_down


def checked_resilience(resilience: Resilience) -> Resilience:
    if not isinstance(resilience, Resilience):
        raise ConfigError(f"resilience must be a Resilience, not {resilience!r}")
    return resilience


def within_timeout(resilience: Resilience, timeout: float) -> Resilience:
    """For calls that take at most ``timeout`` seconds: one that hangs is noticed before it is given up."""
    return replace(resilience, hang_seconds=min(resilience.hang_seconds, _HANG_SHARE * timeout))


def check_room(largest: int, store: Store, limits: Limits) -> None:
    """Whether chunks of up to ``largest`` fit into the store, and on their way to it. Raises ``ConfigError``."""
    if store.max_value_bytes is not None and largest > store.max_value_bytes:
        raise ConfigError(
            f"the layout's largest chunk takes {largest} bytes, but the store holds values of at most "
            f"{store.max_value_bytes}; give the store a larger segment, or the layout smaller blocks"
        )
    if largest > limits.staging_bytes:
        raise ConfigError(
            f"the layout's largest chunk takes {largest} bytes, but Limits.staging_bytes is "
            f"{limits.staging_bytes}; give it room for a few chunks"
        )


def lends_memory(store: Store) -> bool:
    """Whether values lie in a segment of this process."""
    while isinstance(store, WrappedStore):
        store = store.inner
    return isinstance(store, MooncakeStore) and store.config.global_segment_size > 0


async def open_connected(stack: AsyncExitStack, config: MooncakeConfig, timeout: float) -> Store:
    """A store at ``config``'s master, closed when ``stack`` unwinds."""
    if config.global_segment_size:
        await asyncio.to_thread(check_memory, config.global_segment_size, "global_segment_size")
    return await stack.enter_async_context(await MooncakeStore.connect(config, timeout=timeout))


async def open_local(stack: AsyncExitStack, segment_size: int | str, pool_size: int | str, timeout: float) -> Store:
    """A master of our own and a segment in this process; both go when ``stack`` unwinds."""
    master = await stack.enter_async_context(await LocalMooncake.start(startup_timeout=timeout))
    return await open_connected(stack, local_config(segment_size, pool_size, master.master_address), timeout)


def local_config(segment_size: int | str, pool_size: int | str, address: str = "127.0.0.1:1") -> MooncakeConfig:
    """Settings for a loopback master with an embedded segment; checks the sizes."""
    segment_size = checked_segment("embedded", segment_size, "segment_size")
    return load_config(
        "embedded",
        master_server_address=address,
        global_segment_size=segment_size,
        pool_size=pool_size,
        local_hostname="127.0.0.1",
        environ={},
    )
