"""From settings to a native store that is set up: probe first, since the native call cannot be interrupted."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from contextlib import closing

from ..config import MooncakeConfig
from ..errors import ConnectError
from . import native_codes as codes
from .native import NativeStore, new_native_store


async def open_native_store(config: MooncakeConfig, *, timeout: float) -> NativeStore:
    """A native client of the master at ``config.master_server_address``, set up.

    Native ``setup`` holds the interpreter's lock while it waits for a master, for minutes where there is none:
    the master's port is probed from asyncio first. ``timeout`` in seconds.

    Raises ``ConnectError``, ``MissingLibraryError``.
    """
    local_host = await _probe_master(config, timeout)
    native = await asyncio.to_thread(new_native_store)
    _bound_native_calls(timeout)
    hostname = config.local_hostname or local_host
    await asyncio.to_thread(_set_up, native, config, hostname)
    return native


async def _probe_master(config: MooncakeConfig, timeout: float) -> str:
    """Connect to the master's port once; returns the local address that leads there."""
    address = config.master_server_address
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(config.master_host, config.master_port)
    except TimeoutError as error:
        raise ConnectError(f"no answer from {address} within {timeout:g} s; is it the master's address?") from error
    except socket.gaierror as error:
        raise ConnectError(f"the host name in master_server_address {address!r} is not known: {error}") from error
    except OSError as error:
        raise ConnectError(
            f"no Mooncake master listens on {address} ({error.strerror or error}); start one (mooncake_master, or "
            "`python -m mooncake_sparse_client serve`), or correct master_server_address / MOONCAKE_MASTER"
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
