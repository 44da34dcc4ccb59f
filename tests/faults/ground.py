"""The ground that faults are tried on: a real master and an owner process, each on ports of its own that stay.

Unlike a ``LocalMooncake``, nothing here is started again by itself: what happens to a process, and when, is the
caller's to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Self

import psutil

from mooncake_sparse_client.errors import LocalProcessError
from mooncake_sparse_client.stores.ports import HOST, choose_ports
from mooncake_sparse_client.stores.processes import Process

MIB = 1 << 20
#: Seconds for a process to serve, and the starts that are tried: a port may not be free at once.
_PATIENCE, _ATTEMPTS = 30.0, 5


class Subject:
    """One Mooncake process that is killed, started again, stopped and continued."""

    def __init__(
        self, name: str, arguments: Sequence[str], ports: Sequence[int], before: Subject | None = None
    ) -> None:
        """An owner ends in order, on SIGTERM, if it was started ``before`` the end of a master that runs."""
        self.name = name
        self._before = before
        self.ports = tuple(ports)
        self._arguments = list(arguments)
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        """Process id of the one that runs."""
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.runs

    async def start(self) -> None:
        """Return when it serves."""
        for attempt in range(_ATTEMPTS):
            before = self._before._process if self._before is not None and self._before.runs else None
            self._process = Process(self.name, self._arguments, list(self.ports), before)
            try:
                await self._process.start(asyncio.get_running_loop().time() + _PATIENCE)
                return
            except BaseException as error:
                await self.end()
                if not isinstance(error, LocalProcessError) or attempt == _ATTEMPTS - 1:
                    raise
            await asyncio.sleep(0.2)

    async def kill(self) -> None:
        """SIGKILL. It is gone when this returns, and nobody was told."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        await self._process.ended
        await self.end()

    async def restart(self, gap: float) -> None:
        """Kill it, and start another on the same ports ``gap`` seconds later."""
        await self.kill()
        await asyncio.sleep(gap)
        await self.start()

    def stop(self) -> None:
        """SIGSTOP: it holds its ports and answers nothing."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT, if it runs."""
        with contextlib.suppress(ProcessLookupError, AssertionError):
            self.signal(signal.SIGCONT)

    async def pause(self, seconds: float) -> None:
        """Stop it for so long."""
        self.stop()
        try:
            await asyncio.sleep(seconds)
        finally:
            self.go_on()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def end(self) -> None:
        """It is gone when this returns, whatever state it was in."""
        if self._process is not None:
            process, self._process = self._process, None
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if process.runs:
                    os.kill(process.pid, signal.SIGCONT)  # what is stopped does not end in order
            await process.end()


class Ground:
    """A master and an owner of ``memory`` bytes, at ``master_address`` and ``owner_address``."""

    def __init__(self, *, memory: int = 128 * MIB, client_ttl: int = 10, lease_ttl: float | None = None) -> None:
        """``client_ttl``: seconds until the master forgets an owner that is gone; ``lease_ttl``: those for which a key
        that was asked for stays (None: Mooncake's default)."""
        self._ports = choose_ports({"rpc": None, "metrics": None, "owner": None})
        rpc, metrics, owner = self._ports["rpc"], self._ports["metrics"], self._ports["owner"]
        master = f"--rpc_address={HOST} --rpc_port={rpc} --metrics_host={HOST} --metrics_port={metrics}".split()
        master += [f"--client_ttl={client_ttl}"]
        master += [] if lease_ttl is None else [f"--default_kv_lease_ttl={round(lease_ttl * 1000)}"]
        self.master = Subject("mooncake_master", master, [rpc, metrics])
        serving = f"--host={HOST} --port={owner} --threads=4 --protocol=tcp --metadata_server=P2PHANDSHAKE".split()
        serving += [f"--master_server_address={self.master_address}", f"--global_segment_size={memory}"]
        self.owner = Subject("mooncake_client", serving, [owner], before=self.master)

    @property
    def master_address(self) -> str:
        return f"{HOST}:{self._ports['rpc']}"

    @property
    def owner_address(self) -> str:
        return f"{HOST}:{self._ports['owner']}"

    @property
    def metrics_port(self) -> int:
        """The port of the master's HTTP server."""
        return self._ports["metrics"]

    async def __aenter__(self) -> Self:
        try:
            await self.master.start()
            await self.owner.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Nothing of it is left when this returns."""
        try:
            await self.owner.end()
        finally:
            await self.master.end()
