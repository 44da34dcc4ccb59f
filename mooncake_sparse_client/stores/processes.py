"""One Mooncake process of our own, under a guardian process that ends it with us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys

from ..errors import LocalProcessError, MissingLibraryError
from ..waiting import settled
from . import _guardian
from .native import APT_LINE, INSTALL_LINES, library_folders

PATIENCE = 5.0  # seconds for a process to end, then for what is killed; an owner's clean-up takes three
_CLOSED = -1


class Process:
    """One Mooncake process under its guardian, to end ``before`` another one in any event. Runs once."""

    ended: asyncio.Task[int]  # since it was spawned; gives the guardian's exit status
    lifeline: int  # a file descriptor; the guardian stops the process when it is closed or written to

    def __init__(self, name: str, arguments: list[str], ports: list[int], before: Process | None = None) -> None:
        self.name = name
        self.pid = 0
        self._arguments = arguments + ([] if "MC_LOG_LEVEL" in os.environ else ["--minloglevel=2"])
        self._ports = ports
        self._before = before
        self._files = contextlib.ExitStack()
        self._guardian: asyncio.subprocess.Process | None = None

    async def start(self, deadline: float) -> None:
        """Start it and return when it serves, at the latest at ``deadline``, in the event loop's time.

        Raises ``MissingLibraryError`` or ``LocalProcessError``, with the process's last words. Whatever comes of it,
        also when cancelled: call ``end`` afterwards.
        """
        program = await asyncio.to_thread(_find_program, self.name)
        await settled(asyncio.create_task(self._spawn(program)))
        try:
            async with asyncio.timeout_at(deadline):
                await self._serving()
        except TimeoutError:
            raise self.failure("did not serve within startup_timeout, allow more") from None

    async def _spawn(self, program: str) -> None:
        """Start the guardian. Must not be cut short, as it might just have started."""
        options = [f"--parent={os.getpid()}", f"--patience={PATIENCE}", *(f"--port={port}" for port in self._ports)]
        if self._before is not None:
            # An owner cleans up on SIGTERM only with the signals blocked, a master only without.
            options += ["--mask-signals"]
        guardians_end = _CLOSED
        try:
            self._log = os.memfd_create(self.name)  # in memory, bounded by the guardian, never a leftover
            self._files.callback(os.close, self._log)
            guardians_end, self.lifeline = os.pipe()
            self._files.callback(os.close, self.lifeline)
            os.set_blocking(self.lifeline, False)
            self._guardian = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", _guardian.__file__, *options, "--", program, *self._arguments),
                stdin=guardians_end,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._log,
                # Held by this process too, the other's lifeline does not end before it, whoever else is gone.
                pass_fds=[self._before.lifeline] if self._before else [],
                env={"MC_LOG_LEVEL": "ERROR", **os.environ},
            )
        except (OSError, ValueError) as error:  # ValueError: the other's lifeline is closed, it is to end
            raise LocalProcessError(f"cannot start {self.name} with {sys.executable}: {error}") from error
        finally:
            if guardians_end != _CLOSED:
                os.close(guardians_end)
        self.ended = asyncio.create_task(self._guardian.wait())

    async def _serving(self) -> None:
        """Return when the process listens on all its ports; raise if it ends before."""
        assert self._guardian is not None and self._guardian.stdout is not None  # noqa: S101, PT018
        self.pid = int(await self._guardian.stdout.readline() or 0)
        if not await self._guardian.stdout.readline():
            await asyncio.wait([self.ended])
            raise self.failure()

    @property
    def runs(self) -> bool:
        """Whether it is known to run, serving or not."""
        return bool(self.pid) and not self.ended.done()

    async def end(self) -> None:
        """End the process and its guardian. They are gone when this returns; further calls do no harm.

        Raises ``LocalProcessError`` if the process cannot be ended.
        """
        try:
            if self._guardian is not None:
                await self._stop(self._guardian)
        finally:
            self.let_go()

    async def _stop(self, guardian: asyncio.subprocess.Process) -> None:
        if self.lifeline != _CLOSED:
            with contextlib.suppress(BrokenPipeError):  # the guardian has ended already
                os.write(self.lifeline, b".")
        await asyncio.wait([self.ended], timeout=2 * PATIENCE)
        if not self.ended.done():
            guardian.kill()  # and with it, by the kernel, the process
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while self.pid and not await asyncio.to_thread(_guardian.is_gone, self.pid):
            if asyncio.get_running_loop().time() > deadline:
                raise LocalProcessError(f"{self.name} (pid {self.pid}) was killed but does not go away")
            await asyncio.sleep(0.02)
        await asyncio.wait([self.ended], timeout=PATIENCE)

    def let_go(self) -> None:
        """Close its files: a guardian that still runs then stops the process, unwatched."""
        self.lifeline = _CLOSED
        self._files.close()

    def failure(self, what: str = "") -> LocalProcessError | MissingLibraryError:
        """What went wrong, with the process's last words; only until it is let go."""
        start = max(0, os.fstat(self._log).st_size - _guardian.LOG_TAIL_BYTES)
        lines = os.pread(self._log, _guardian.LOG_TAIL_BYTES, start).decode(errors="replace").splitlines()[-12:]
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
    for folder in library_folders():
        program = folder / name
        if program.is_file():
            if not os.access(program, os.X_OK):
                program.chmod(program.stat().st_mode | 0o111)
            return str(program)
    raise MissingLibraryError(
        f"no program {name}: Mooncake is not installed for {sys.executable}; install one of its builds: {INSTALL_LINES}"
    )
