"""A Mooncake store on this machine: starts real ``mooncake_master`` and ``mooncake_client`` processes.

Each process runs under a small guardian process, which ends it when it is asked to or when the process that
started it is gone, however that came about. An owner that ends by itself is started again. Everything that is ours to
choose listens on the loopback interface; the owner's data ports are chosen, and opened on all interfaces, by Mooncake
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Self

from ..config_values import MIN_SEGMENT_BYTES, parse_size
from ..errors import ConfigError, LocalProcessError
from ..waiting import settled
from .free_memory import available_memory
from .owner import Owner
from .ports import HOST, choose_ports
from .processes import Process

_OWNER_THREADS = 4  # with Mooncake's default of one, small calls wait behind every large one
_PORT_ATTEMPTS = 3


class LocalMooncake:
    """A master, and on request an owner of memory, run by this process and gone when it closes or dies.

    ``async with await LocalMooncake.start(memory=1 << 30) as local: ...``, all in one event loop.

    An owner that ends by itself is started again, empty and at the same address, after a pause of six seconds in which
    applications notice that the former is gone. One that keeps ending soon after its start is given up, and an end of
    the master is final. A process that hangs is left alone: it may go on, with all it holds.
    """

    def __init__(self, ports: Mapping[str, int], lease_ttl_seconds: float | None) -> None:
        self._ports = ports
        rpc, metrics = ports["rpc_port"], ports["metrics_port"]
        arguments = f"--rpc_address={HOST} --rpc_port={rpc} --metrics_host={HOST} --metrics_port={metrics}".split()
        arguments += [f"--default_kv_lease_ttl={round(lease_ttl_seconds * 1000)}"] if lease_ttl_seconds else []
        self._master = Process("mooncake_master", arguments, [rpc, metrics])
        self._owner: Owner | None = None
        self._stops = contextlib.AsyncExitStack()  # last started, first stopped
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        *,
        memory: int | str | None = None,
        rpc_port: int | None = None,
        metrics_port: int | None = None,
        owner_port: int | None = None,
        lease_ttl_seconds: float | None = None,
        startup_timeout: float = 30.0,
        restart_owner: bool = True,
    ) -> LocalMooncake:
        """Start the processes and return when they serve.

        ``memory`` is what an owner process holds, in bytes or as text like "4GB" (None: a master only). A port that
        is None is chosen among the free ones. ``lease_ttl_seconds`` is how long the master protects a key
        that was looked up or read (None: Mooncake's default). ``startup_timeout`` is in seconds, for all.
        ``restart_owner``: whether an owner that ends by itself is started again, while this event loop runs.

        Raises ConfigError for values that cannot work on this machine, MissingLibraryError if Mooncake or a
        library it needs is not installed, and LocalProcessError if a given port is taken or a process does
        not serve in time. No process is left behind then, nor if the call is cancelled.
        """
        wanted = {"rpc_port": rpc_port, "metrics_port": metrics_port, "owner_port": owner_port}
        size = None if memory is None else parse_size(memory, "memory")
        if size is not None:
            await asyncio.to_thread(check_memory, size, "memory")
        elif owner_port is not None:
            raise ConfigError(f"owner_port={owner_port} without memory: say how many bytes the owner holds")
        if lease_ttl_seconds is not None and not (
            isinstance(lease_ttl_seconds, int | float) and 0.001 <= lease_ttl_seconds <= 1e9
        ):
            raise ConfigError(f"lease_ttl_seconds={lease_ttl_seconds} is out of range: use 0.001 to 1e9")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + startup_timeout
        attempts_left = _PORT_ATTEMPTS
        while True:
            local = cls(choose_ports(wanted), lease_ttl_seconds)
            attempts_left -= 1
            try:
                await local._start_master(deadline)
                if size is not None:
                    await local._start_owner(size, deadline, restart=restart_owner, startup_timeout=startup_timeout)
                return local
            except BaseException as error:
                await local.aclose()
                # A process that ended at once may have lost its port to another program: try other ports.
                if not isinstance(error, LocalProcessError) or attempts_left == 0 or loop.time() > deadline:
                    raise

    async def _start_master(self, deadline: float) -> None:
        self._stops.push_async_callback(self._master.end)
        await self._master.start(deadline)

    async def _start_owner(self, memory: int, deadline: float, *, restart: bool, startup_timeout: float) -> None:
        port = self._ports["owner_port"]
        arguments = f"--host={HOST} --port={port} --threads={_OWNER_THREADS} --protocol=tcp".split()
        arguments += f"--master_server_address={self.master_address} --metadata_server=P2PHANDSHAKE".split()
        arguments += [f"--global_segment_size={memory}"]
        new = partial(Process, "mooncake_client", arguments, [port], before=self._master)
        self._owner = Owner(new, port, restart=restart, startup_timeout=startup_timeout)
        self._stops.push_async_callback(self._owner.stop)
        await self._owner.start(deadline)

    @property
    def master_address(self) -> str:
        """Where clients find the master, ``"127.0.0.1:PORT"``."""
        return f"{HOST}:{self._ports['rpc_port']}"

    @property
    def owner_address(self) -> str | None:
        """Where applications find the owner process, ``"127.0.0.1:PORT"``; None without one."""
        return f"{HOST}:{self._ports['owner_port']}" if self._owner is not None else None

    @property
    def metrics_port(self) -> int:
        """The port of the master's HTTP server for health and metrics, on 127.0.0.1."""
        return self._ports["metrics_port"]

    @property
    def master_pid(self) -> int:
        """Process id of ``mooncake_master``."""
        return self._master.pid

    @property
    def owner_pid(self) -> int | None:
        """Process id of the present ``mooncake_client``; None without an owner, and while none runs."""
        return self._owner.pid if self._owner is not None else None

    @property
    def owner_serves(self) -> bool:
        """Whether the owner serves; False without one, and from its end until it is started again."""
        return self._owner is not None and self._owner.serves

    @property
    def owner_restarts(self) -> int:
        """How often the owner has been started again, and served."""
        return self._owner.restarts if self._owner is not None else 0

    @property
    def alive(self) -> bool:
        """Whether all serves, or will again by itself: False once the master has ended, the owner has and is not
        started again, or closing has begun. See ``owner_serves`` for the owner's present state."""
        lost = self._owner_lost
        return self._closing is None and not self._master.ended.done() and (lost is None or not lost.done())

    async def wait(self) -> None:
        """Wait until something ends by itself for good, and raise ``LocalProcessError`` about it: the master, or an
        owner that is given up or not to be started again. Return once closed."""
        master, lost = self._master.ended, self._owner_lost
        await asyncio.wait([master] if lost is None else [master, lost], return_when=asyncio.FIRST_COMPLETED)
        if self._closing is None:
            raise self._master.failure() if lost is None or master.done() else lost.result()

    @property
    def _owner_lost(self) -> asyncio.Task[Exception] | None:
        return self._owner.lost if self._owner is not None else None

    async def aclose(self) -> None:
        """Stop the owner, then the master. They are gone when this returns, also if it is cancelled
        meanwhile: the cancellation is raised afterwards. Further calls wait for the same end."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._stops.aclose())
        await settled(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._closing is None:
            warnings.warn(f"unclosed {type(self).__name__} {self.master_address}", ResourceWarning, stacklevel=2)
            if self._owner is not None:
                self._owner.let_go()
            self._master.let_go()


def check_memory(memory: int, name: str) -> None:
    """Whether a segment of so many bytes can be had here: it is not taken until it is used, and then too late
    to say no. Raises ``ConfigError`` with both numbers. Reads a file: call it on a thread."""
    if memory < MIN_SEGMENT_BYTES:
        raise ConfigError(f"{name}={memory} bytes is below Mooncake's minimum of {MIN_SEGMENT_BYTES} (16 MiB)")
    available = available_memory()
    if available is not None and memory > available:
        raise ConfigError(f"{name}={memory} bytes exceeds the {available} available (/proc/meminfo): ask for less")
