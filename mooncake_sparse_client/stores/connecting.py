"""From settings to a native store that is set up: probe first, since the native calls cannot be interrupted."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from contextlib import closing
from typing import NamedTuple

from ..config import MooncakeConfig
from ..config_values import address_parts
from ..errors import ConnectError
from ..waiting import settled
from . import native_codes as codes
from .native import NativeStore, native_replication, new_native_store
from .native_memory import NativeMemory
from .shared_setup import check_owner, set_up_shared


class Opened(NamedTuple):
    """A native client that is set up, and its memory, whose ``close`` closes both."""

    native: NativeStore
    memory: NativeMemory


async def open_native_store(config: MooncakeConfig, *, timeout: float) -> Opened:
    """A native client of the master at ``config.master_server_address``, or of the owner process at
    ``config.owner_address``, set up and with its memory.

    Native set-up holds the interpreter's lock while it waits for an answer, for minutes where there is none: the
    port is probed from asyncio first. ``timeout`` in seconds. A cancelled call returns once nothing is left open.

    Raises ``ConfigError``, ``ConnectError``, ``MissingLibraryError``.
    """
    local_host = await _probe(config, timeout)
    if config.mode == "shared":
        await asyncio.to_thread(check_owner, config.owner_address)
    else:
        _bound_native_calls(timeout)
    native = await asyncio.to_thread(new_native_store)
    opening = asyncio.create_task(asyncio.to_thread(_open, native, config, config.local_hostname or local_host))
    try:
        return Opened(native, await settled(opening))
    except asyncio.CancelledError:
        if not opening.cancelled() and opening.exception() is None:
            await settled(asyncio.create_task(asyncio.to_thread(opening.result().close)))
        raise


async def _probe(config: MooncakeConfig, timeout: float) -> str:
    """Connect to the port once; returns the local address that leads there."""
    if config.mode == "shared":
        who, program, setting, variable = "owner process", "mooncake_client", "owner_address", "MOONCAKE_CLIENT"
    else:
        who, program, setting, variable = "master", "mooncake_master", "master_server_address", "MOONCAKE_MASTER"
    address = config.where
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(*address_parts(address))
    except TimeoutError as error:
        raise ConnectError(f"no answer from {address} within {timeout:g} s; is it the {who}'s address?") from error
    except socket.gaierror as error:
        raise ConnectError(f"the host name in {setting} {address!r} is not known: {error}") from error
    except OSError as error:
        raise ConnectError(
            f"no Mooncake {who} listens on {address} ({error.strerror or error}); start one ({program}, or "
            f"`python -m mooncake_sparse_client serve`), or correct {setting} / {variable}"
        ) from error
    local_host: str = writer.get_extra_info("sockname")[0]
    writer.close()
    return local_host


#: The variables that we set, and to what: a later connection may set those anew; what the user sets stays.
_ours: dict[str, str] = {}


def _bound_native_calls(timeout: float) -> None:
    """Set the time-outs that the native library reads when it is set up; what the user has set stays."""
    values = {
        "MC_RPC_TIMEOUT_MS": max(1, round(timeout * 1000)),
        "MC_TCP_STATUS_TIMEOUT_SEC": max(1, math.ceil(timeout)),
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
    settings: dict[str, object] = {
        # With a port of its own a failing set-up gives up after seconds; without one, after minutes.
        "local_hostname": _with_port(hostname),
        "metadata_server": config.metadata_server,
        "global_segment_size": config.global_segment_size,
        "local_buffer_size": config.local_buffer_size,
        "protocol": config.protocol,
        "rdma_devices": config.device_name,
        "master_server_addr": config.master_server_address,
        "tenant_id": config.tenant_id,
    }
    code = native.setup({name: str(value) for name, value in settings.items()})
    if code != codes.OK:
        raise ConnectError(
            f"the native client could not be set up: {codes.meaning_of(code).text} ({code}). Port "
            f"{config.master_server_address} is open; check that a Mooncake master of this client's version listens "
            f"there, and metadata_server {config.metadata_server!r}, local_hostname {hostname!r}, "
            f"global_segment_size {config.global_segment_size}, local_buffer_size {config.local_buffer_size}"
        )


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
