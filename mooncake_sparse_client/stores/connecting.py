"""From settings to a native store that is set up: with all care first, since the native calls cannot be interrupted."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Final, NamedTuple

from ..config import MooncakeConfig
from ..config_values import checked_master, checked_metadata, checked_owner
from ..errors import ConnectError
from ..waiting import settled
from . import native_codes as codes
from .native import NativeStore, native_replication, new_native_store
from .native_memory import NativeMemory
from .reaching import check_devices, reach, waiting
from .shared_setup import check_owner, set_up_shared
from .trial import try_set_up

#: Bytes of the native library's own staging buffer, for a client that only asks whether anybody answers.
MIN_LOCAL_BUFFER: Final = 1 << 20
#: Seconds in which an owner of memory must say that it has begun. A call to one that hangs takes about as long for each
#: three pieces of its values, one after another.
_STATUS_SECONDS: Final = 3.0


class Opened(NamedTuple):
    """A native client that is set up, and its memory, whose ``close`` closes both."""

    native: NativeStore
    memory: NativeMemory


async def open_native_store(config: MooncakeConfig, *, timeout: float) -> Opened:
    """A native client of the master at ``config.master_server_address``, or of the owner process at
    ``config.owner_address``, set up and with its memory.

    Native set-up holds the interpreter's lock while it waits for an answer, for half a minute and more where there is
    none. So names and ports are looked at from asyncio, then it is tried in a process of its own, and then here.
    ``timeout`` in seconds, for all of it, once what is waited for (``config.wait_for_master``) is there. A cancelled
    call returns once nothing is left open.

    Raises ``ConfigError``, ``ConnectError`` (its ``step`` says how far it came), ``MissingLibraryError``.
    """
    _check_address(config)
    await asyncio.to_thread(check_devices, config)
    if config.mode != "shared":
        _bound_native_calls(timeout)
    hostname = await waiting(config.wait_for_master, lambda: _found(config, timeout))
    native = await asyncio.to_thread(new_native_store)
    return await opened_by(lambda: _open(native, config, hostname))


async def opened_by(open_memory: Callable[[], NativeMemory]) -> Opened:
    """What ``open_memory`` gives, run on a thread. A cancelled call returns once nothing is left open."""
    opening = asyncio.create_task(asyncio.to_thread(open_memory))
    try:
        memory = await settled(opening)
    except asyncio.CancelledError:
        if not opening.cancelled() and opening.exception() is None:
            await settled(asyncio.create_task(asyncio.to_thread(opening.result().close)))
        raise
    return Opened(memory.plain_native, memory)


def _check_address(config: MooncakeConfig) -> None:
    """For settings that ``load_config`` has not checked: the native library ends the process over an empty address."""
    if config.mode == "shared":
        checked_owner(config.mode, config.owner_address, "config.owner_address")
    else:
        checked_master(config.mode, config.master_server_address, "config.master_server_address")
        checked_metadata(config.mode, config.metadata_server, "config.metadata_server")


async def _found(config: MooncakeConfig, timeout: float) -> str:
    """See that a Mooncake answers; the name that this process has for it."""
    deadline = asyncio.get_running_loop().time() + timeout
    local_host = await reach(config, deadline)
    hostname = config.local_hostname or local_host
    settings: dict[str, str] = {}
    if config.mode == "shared":
        await asyncio.to_thread(check_owner, config.owner_address)
    else:
        settings = _settings(config, hostname, segment=0, local_buffer=MIN_LOCAL_BUFFER)
    await try_set_up(config, settings, seconds=max(0.001, deadline - asyncio.get_running_loop().time()))
    return hostname


#: The variables that we set, and to what: a later connection may set those anew; what the user sets stays.
_ours: dict[str, str] = {}


def _bound_native_calls(timeout: float) -> None:
    """Set the time-outs that the native library reads when it is set up; what the user has set stays."""
    values = {
        "MC_RPC_TIMEOUT_MS": max(1, round(timeout * 1000)),
        "MC_TCP_STATUS_TIMEOUT_SEC": max(1, math.ceil(min(timeout, _STATUS_SECONDS))),
        "MC_STORE_CLIENT_SETUP_RETRIES": 1,
    }
    for name, value in values.items():
        if os.environ.get(name) == _ours.get(name):
            _ours[name] = os.environ[name] = str(value)


def _open(native: NativeStore, config: MooncakeConfig, hostname: str) -> NativeMemory:
    """Set ``native`` up and give it memory; if that fails, nothing is left open. Runs on a thread."""
    native_replication(config.replication, 1)  # what the installed version lacks is better said now
    if config.mode == "shared":
        set_up_shared(native, config)
    else:
        _set_up(native, config, hostname)
    try:
        return NativeMemory.open(native, config)
    except BaseException:
        native.close()
        raise


def _set_up(native: NativeStore, config: MooncakeConfig, hostname: str) -> None:
    """Runs on a thread, with the interpreter's lock held: tens of milliseconds where a master answers."""
    code = native.setup(
        _settings(config, hostname, segment=config.global_segment_size, local_buffer=config.local_buffer_size)
    )
    if code != codes.OK:
        native.close()  # it may be half alive
        raise ConnectError(
            f"the native client could not be set up: {codes.meaning_of(code).text} ({code}). A Mooncake master answers "
            f"at {config.master_server_address}; check local_hostname {hostname!r}, and the sizes "
            f"global_segment_size {config.global_segment_size} and local_buffer_size {config.local_buffer_size}",
            step="sizes",
        )


def _settings(config: MooncakeConfig, hostname: str, *, segment: int, local_buffer: int) -> dict[str, str]:
    """What the native ``setup`` takes."""
    settings: dict[str, object] = {
        # With a port of its own a failing set-up gives up after seconds; without one, after minutes.
        "local_hostname": _with_port(hostname),
        "metadata_server": config.metadata_server,
        "global_segment_size": segment,
        "local_buffer_size": local_buffer,
        "protocol": config.protocol,
        "rdma_devices": config.device_name,
        "master_server_addr": config.master_server_address,
        "tenant_id": config.tenant_id,
    }
    return {name: str(value) for name, value in settings.items()}


def _with_port(hostname: str) -> str:
    """``host:port``, the port a free one of this machine unless the setting names one."""
    host, separator, port = hostname.rpartition(":")
    if separator and port.isdigit() and (":" not in host or host.endswith("]")):
        return hostname
    bracketed = f"[{hostname}]" if ":" in hostname and not hostname.startswith("[") else hostname
    with closing(socket.socket()) as probe:
        # Any address of ours: the name may be one that only others know (behind NAT, in a container).
        probe.bind(("", 0))
        return f"{bracketed}:{probe.getsockname()[1]}"
