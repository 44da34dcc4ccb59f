"""A Mooncake store on this machine: starts real ``mooncake_master`` and ``mooncake_client`` processes.

Each process runs under a small guardian process, which ends it when it is asked to or when the process that
started it is gone, however that came about. Everything that is ours to choose listens on the loopback
interface; the owner's data ports are chosen, and opened on all interfaces, by Mooncake itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import socket
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from ..config_values import MIN_SEGMENT_BYTES, parse_size
from ..errors import ConfigError, LocalProcessError, MissingLibraryError
from ..waiting import settled
from . import _guardian
from .free_memory import available_memory
from .native import APT_LINE, INSTALL_LINES

_HOST = "127.0.0.1"
_OWNER_THREADS = 4  # with Mooncake's default of one, small calls wait behind every large one
_PORT_ATTEMPTS = 3
_PATIENCE = 5.0  # seconds for a process to end, then for what is killed; an owner's clean-up takes three


class LocalMooncake:
    """A master, and on request an owner of memory, run by this process and gone when it closes or dies.

    ``async with await LocalMooncake.start(memory=1 << 30) as local: ...``, all in one event loop.
    """

    def __init__(self, ports: Mapping[str, int]) -> None:
        self._ports = ports
        self._processes: list[_Process] = []
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
    ) -> LocalMooncake:
        """Start the processes and return when they serve.

        ``memory`` is what an owner process holds, in bytes or as text like "4GB" (None: a master only). A port that
        is None is chosen among the free ones. ``lease_ttl_seconds`` is how long the master protects a key
        that was looked up or read (None: Mooncake's default). ``startup_timeout`` is in seconds, for all.

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
            local = cls(_choose_ports(wanted))
            attempts_left -= 1
            try:
                await local._launch(size, lease_ttl_seconds, deadline)
                return local
            except BaseException as error:
                await local.aclose()
                # A process that ended at once may have lost its port to another program: try other ports.
                if not isinstance(error, LocalProcessError) or attempts_left == 0 or loop.time() > deadline:
                    raise

    async def _launch(self, memory: int | None, lease_ttl_seconds: float | None, deadline: float) -> None:
        rpc, metrics, owner = (self._ports[name] for name in ("rpc_port", "metrics_port", "owner_port"))
        arguments = f"--rpc_address={_HOST} --rpc_port={rpc} --metrics_host={_HOST} --metrics_port={metrics}".split()
        arguments += [f"--default_kv_lease_ttl={round(lease_ttl_seconds * 1000)}"] if lease_ttl_seconds else []
        master = _Process("mooncake_master", arguments, [rpc, metrics])
        await self._run(master, deadline)
        if memory is not None:
            arguments = f"--host={_HOST} --port={owner} --threads={_OWNER_THREADS} --protocol=tcp".split()
            arguments += f"--master_server_address={_HOST}:{rpc} --metadata_server=P2PHANDSHAKE".split()
            arguments += [f"--global_segment_size={memory}"]
            await self._run(_Process("mooncake_client", arguments, [owner], before=master), deadline)

    async def _run(self, process: _Process, deadline: float) -> None:
        self._stops.callback(process.files.close)
        self._stops.push_async_callback(process.stop)
        self._processes.append(process)
        program = await asyncio.to_thread(_find_program, process.name)
        await settled(asyncio.create_task(process.spawn(program)))
        try:
            async with asyncio.timeout_at(deadline):
                await process.serving()
        except TimeoutError:
            raise process.failure("did not serve within startup_timeout, allow more") from None

    @property
    def master_address(self) -> str:
        """Where clients find the master, ``"127.0.0.1:PORT"``."""
        return f"{_HOST}:{self._ports['rpc_port']}"

    @property
    def owner_address(self) -> str | None:
        """Where applications find the owner process, ``"127.0.0.1:PORT"``; None without one."""
        return f"{_HOST}:{self._ports['owner_port']}" if len(self._processes) > 1 else None

    @property
    def metrics_port(self) -> int:
        """The port of the master's HTTP server for health and metrics, on 127.0.0.1."""
        return self._ports["metrics_port"]

    @property
    def master_pid(self) -> int:
        """Process id of ``mooncake_master``."""
        return self._processes[0].pid

    @property
    def owner_pid(self) -> int | None:
        """Process id of ``mooncake_client``; None without an owner."""
        return self._processes[1].pid if len(self._processes) > 1 else None

    @property
    def alive(self) -> bool:
        """Whether all processes it started still run; False from the moment closing begins."""
        return self._closing is None and not any(process.ended.done() for process in self._processes)

    async def wait(self) -> None:
        """Wait until a process ends by itself and raise LocalProcessError about it; return once closed."""
        await asyncio.wait([each.ended for each in self._processes], return_when=asyncio.FIRST_COMPLETED)
        if self._closing is None:
            raise next(each for each in self._processes if each.ended.done()).failure()

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
        if self._processes and self._closing is None:
            warnings.warn(f"unclosed {type(self).__name__} {self.master_address}", ResourceWarning, stacklevel=2)
            for process in self._processes:
                process.files.close()


class _Process:
    """One Mooncake process under its guardian, to end ``before`` another one in any event."""

    ended: asyncio.Task[int]  # gives the guardian's exit status
    lifeline: int  # a file descriptor; the guardian stops the process when it is closed or written to

    def __init__(self, name: str, arguments: list[str], ports: list[int], before: _Process | None = None) -> None:
        self.name = name
        self.pid = 0
        self._arguments = arguments + ([] if "MC_LOG_LEVEL" in os.environ else ["--minloglevel=2"])
        self._ports = ports
        self._before = before
        self.files = contextlib.ExitStack()  # when these close, a guardian that still runs stops the process
        self._guardian: asyncio.subprocess.Process | None = None

    async def spawn(self, program: str) -> None:
        """Start the guardian. Must not be cut short, as it might just have started."""
        options = [f"--parent={os.getpid()}", f"--patience={_PATIENCE}", *(f"--port={port}" for port in self._ports)]
        if self._before is not None:
            # An owner cleans up on SIGTERM only with the signals blocked, a master only without.
            options += ["--mask-signals"]
        self._log = os.memfd_create(self.name)  # in memory, bounded by the guardian, never a leftover
        self.files.callback(os.close, self._log)
        guardians_end, self.lifeline = os.pipe()
        self.files.callback(os.close, self.lifeline)
        os.set_blocking(self.lifeline, False)
        try:
            self._guardian = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", _guardian.__file__, *options, "--", program, *self._arguments),
                stdin=guardians_end,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._log,
                # Held by this process too, the other's lifeline does not end before it, whoever else is gone.
                pass_fds=[self._before.lifeline] if self._before else [],
                env={"MC_LOG_LEVEL": "ERROR", **os.environ},
            )
        except OSError as error:
            raise LocalProcessError(f"cannot start {self.name} with {sys.executable}: {error}") from error
        finally:
            os.close(guardians_end)
        self.ended = asyncio.create_task(self._guardian.wait())

    async def serving(self) -> None:
        """Return when the process listens on all its ports; raise if it ends before."""
        assert self._guardian is not None and self._guardian.stdout is not None  # noqa: S101, PT018
        self.pid = int(await self._guardian.stdout.readline() or 0)
        if not await self._guardian.stdout.readline():
            await asyncio.wait([self.ended])
            raise self.failure()

    async def stop(self) -> None:
        """End the process and its guardian. They are gone when this returns."""
        if self._guardian is None:
            return
        with contextlib.suppress(BrokenPipeError):  # the guardian has ended already
            os.write(self.lifeline, b".")
        await asyncio.wait([self.ended], timeout=2 * _PATIENCE)
        if not self.ended.done():
            self._guardian.kill()  # and with it, by the kernel, the process
        deadline = asyncio.get_running_loop().time() + _PATIENCE
        while self.pid and not await asyncio.to_thread(_guardian.is_gone, self.pid):
            if asyncio.get_running_loop().time() > deadline:
                raise LocalProcessError(f"{self.name} (pid {self.pid}) was killed but does not go away")
            await asyncio.sleep(0.02)
        await asyncio.wait([self.ended], timeout=_PATIENCE)

    def failure(self, what: str = "") -> Exception:
        """What went wrong, with the process's last words; only while ``files`` are open."""
        start = max(0, os.fstat(self._log).st_size - 8192)
        lines = os.pread(self._log, 8192, start).decode(errors="replace").splitlines()[-12:]
        library = re.search(r"error while loading shared libraries: ([^\s:]+)", "\n".join(lines))
        if library:
            return MissingLibraryError(
                f"{self.name} needs {library[1]}, which this machine lacks; {_remedy(library[1])}"
            )
        what = what or f"{_guardian.describe(self.ended.result())}, set MC_LOG_LEVEL=INFO for more of its log"
        said = "".join(f"\n    {line}" for line in lines) or " none"
        return LocalProcessError(f"{self.name} (pid {self.pid}, ports {self._ports}) {what}; its last output:{said}")


def _remedy(library: str) -> str:
    if library.startswith("libcu"):
        return "it comes with CUDA; the build mooncake-transfer-engine-non-cuda does without"
    return f"install the system's libraries: {APT_LINE}"


def _find_program(name: str) -> str:
    # Not by importing mooncake: that may load the native library into this process.
    spec = importlib.util.find_spec("mooncake")
    for directory in (spec and spec.submodule_search_locations) or ():
        program = Path(directory, name)
        if program.is_file():
            if not os.access(program, os.X_OK):
                program.chmod(program.stat().st_mode | 0o111)
            return str(program)
    raise MissingLibraryError(
        f"no program {name}: Mooncake is not installed for {sys.executable}; install one of its builds: {INSTALL_LINES}"
    )


def check_memory(memory: int, name: str) -> None:
    """Whether a segment of so many bytes can be had here: it is not taken until it is used, and then too late
    to say no. Raises ``ConfigError`` with both numbers. Reads a file: call it on a thread."""
    if memory < MIN_SEGMENT_BYTES:
        raise ConfigError(f"{name}={memory} bytes is below Mooncake's minimum of {MIN_SEGMENT_BYTES} (16 MiB)")
    available = available_memory()
    if available is not None and memory > available:
        raise ConfigError(f"{name}={memory} bytes exceeds the {available} available (/proc/meminfo): ask for less")


def _choose_ports(wanted: Mapping[str, int | None]) -> dict[str, int]:
    """The wanted ports, which must be free and differ, and free ones in place of None."""
    chosen: dict[str, int] = {}
    with contextlib.ExitStack() as probes:
        for name, port in sorted(wanted.items(), key=lambda item: item[1] is None):
            if port is not None and not (isinstance(port, int) and 0 < port < 65536):
                raise ConfigError(f"{name}={port} is not a port: use 1 to 65535, or None for a free one")
            try:
                probe = probes.enter_context(socket.create_server((_HOST, port or 0)))
            except OSError as error:
                raise LocalProcessError(
                    f"cannot listen on {name}={port} at {_HOST}: {error.strerror}; end the program that holds "
                    f"it (ss -ltnp 'sport = :{port}' shows it), pass another port, or None for a free one"
                ) from error
            chosen[name] = probe.getsockname()[1]
    return chosen
