"""Whether there is anything where a store should be: names, ports, devices. Asked from asyncio, within a bound."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

from ..config import MooncakeConfig
from ..config_values import address_parts
from ..errors import ConfigError, ConnectError
from .free_memory import ROOT

T = TypeVar("T")

#: Seconds between two looks for what is not there yet: the first, and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
#: What passes once the other side is up.
_MAY_COME: Final = frozenset({"resolve", "refused", "unreachable", "handshake", "metadata"})
_METADATA_PORTS: Final = {"etcd": 2379, "http": 80, "https": 443}


async def waiting(seconds: float, look: Callable[[], Awaitable[T]]) -> T:
    """What ``look`` answers, once it does; tried again for so many seconds while what it misses may still come."""
    loop = asyncio.get_running_loop()
    end, pause = loop.time() + seconds, _FIRST_PAUSE
    while True:
        try:
            return await look()
        except ConnectError as error:
            left = end - loop.time()
            if error.step not in _MAY_COME or left <= 0:
                raise
        await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.0)))  # noqa: S311 - spreads many who wait
        pause = min(2 * pause, _LONGEST_PAUSE)


async def reach(config: MooncakeConfig, deadline: float) -> str:
    """Connect to the ports that the native set-up will need, once; returns the local address that leads there.

    ``deadline`` in the event loop's time. Raises ``ConnectError`` with its step.
    """
    if config.mode == "shared":
        who, program, setting, variable = "owner process", "mooncake_client", "owner_address", "MOONCAKE_CLIENT"
    else:
        who, program, setting, variable = "master", "mooncake_master", "master_server_address", "MOONCAKE_MASTER"
        await _reach_metadata(config.metadata_server, deadline)
    try:
        return await _connect(*address_parts(config.where), deadline)
    except TimeoutError as error:
        raise ConnectError(
            f"no answer from {config.where} in time; is it the {who}'s address, and does a firewall let it through?",
            step="unreachable",
        ) from error
    except socket.gaierror as error:
        raise ConnectError(
            f"the host name in {setting} {config.where!r} is not known: {error}", step="resolve"
        ) from error
    except OSError as error:
        raise ConnectError(
            f"no Mooncake {who} listens on {config.where} ({error.strerror or error}); start one ({program}, or "
            f"`python -m mooncake_sparse_client serve`), or correct {setting} / {variable}",
            step="refused",
        ) from error


async def _reach_metadata(server: str, deadline: float) -> None:
    found = re.match(r"(\w+)://(\[[^\]]+\]|[^/:,;]+)(?::(\d+))?", server)
    if found is None:
        return  # P2PHANDSHAKE, or what only the library understands
    port = int(found[3] or _METADATA_PORTS.get(found[1].lower(), 0))
    if not port:
        return
    try:
        await _connect(found[2].strip("[]"), port, deadline)
    except OSError as error:  # a time-out is one too
        raise ConnectError(
            f"the metadata server {server} cannot be reached: {str(error) or 'no answer in time'}; start it, or "
            "correct metadata_server / MOONCAKE_TE_META_DATA_SERVER (P2PHANDSHAKE does without)",
            step="metadata",
        ) from error


async def _connect(host: str, port: int, deadline: float) -> str:
    async with asyncio.timeout_at(deadline):
        _, writer = await asyncio.open_connection(host, port)
    local_host: str = writer.get_extra_info("sockname")[0]
    writer.close()
    return local_host


def check_devices(config: MooncakeConfig, root: Path = ROOT) -> None:
    """Whether "rdma" has a device to run over: without one the library uses TCP, and does not say so.

    Raises ``ConfigError``. Reads a folder: call it on a thread.
    """
    if config.mode == "shared" or config.protocol != "rdma":
        return
    folder = root / "sys/class/infiniband"
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    wanted = [name.strip() for name in config.device_name.split(",") if name.strip()]
    missing = sorted({*wanted} - {*there})
    if not there or missing:
        lacks = f"there is no device {', '.join(missing)}" if missing and there else "this host has no RDMA device"
        raise ConfigError(
            f"protocol 'rdma' would silently run over TCP here: {lacks} (in {folder}: {', '.join(there) or 'none'}); "
            "set protocol (MOONCAKE_PROTOCOL) to tcp, or correct device_name (MOONCAKE_DEVICE)"
        )
