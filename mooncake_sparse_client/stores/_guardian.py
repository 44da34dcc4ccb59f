"""Runs one command that must not outlive the process that asked for it.

Started by its path as ``python -I -S _guardian.py [options] -- command...``, with the standard library only,
so that it starts fast and whatever the command holds is no concern of the asking process. It

* starts the command in a session of its own, with a request to the kernel to kill it when this guardian dies,
* writes the command's process id as a line to standard output, and another line once the command itself
  listens on its ports,
* stops the command (SIGTERM, some patience, SIGKILL) as soon as standard input has a byte or ends, or the
  asking process is gone,
* exits with the command's exit status, or 128 plus the number of the signal that ended it, as shells do.

Standard error takes the output of both and must be a file: all but its end is given back, and then reads as zeros,
whenever it takes more room than a limit.
Signals to the process group (Ctrl-C, hang-up, termination) are for the asking process, which stops the
commands in the right order; the guardian does not listen to them. The asking process itself imports this
module only for what it needs to know of an end: ``describe`` and ``is_gone``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from typing import NoReturn

STDIN, STDOUT, STDERR = 0, 1, 2
POLL_SECONDS = 0.5
LOG_LIMIT_BYTES = 1 << 20
LOG_TAIL_BYTES = 1 << 13
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
CANNOT_EXECUTE = 126
SERVING = b"serving\n"
PR_SET_PDEATHSIG = 1
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1})


class Command:
    """A started command, watched through ``wakeup``, which is readable after a child of ours has ended."""

    def __init__(self, command: list[str], mask_signals: bool) -> None:
        self._wakeup = _wake_on_child_exit()
        guardian = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, guardian, mask_signals)

    def wait(self, seconds: float, stop: int | None = None) -> tuple[int | None, bool]:
        """Wait at most so long; the wait status if it has ended, and whether ``stop`` is readable."""
        watched = [self._wakeup] if stop is None else [self._wakeup, stop]
        readable, _, _ = select.select(watched, [], [], max(seconds, 0))
        if self._wakeup in readable:
            os.read(self._wakeup, 1024)
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return (status if pid else None), stop in readable

    def stop(self, patience: float) -> int:
        """End it for sure and return its wait status."""
        os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + patience
        while (left := deadline - time.monotonic()) > 0:
            status, _ = self.wait(left)
            if status is not None:
                return status
        os.kill(self.pid, signal.SIGKILL)
        return os.waitpid(self.pid, 0)[1]


def _wake_on_child_exit() -> int:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def _become(command: list[str], guardian: int, mask_signals: bool) -> NoReturn:
    """Turn this forked child into the command."""
    try:
        os.setsid()
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != guardian:
            raise ProcessLookupError("the guardian is gone already")
        os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
        os.dup2(STDERR, STDOUT)
        # Python, nohup and the like leave signals ignored, which would survive the exec.
        for number in STOP_SIGNALS | {signal.SIGPIPE, signal.SIGXFSZ}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, STOP_SIGNALS if mask_signals else ())
        os.execv(command[0], command)  # noqa: S606
    except BaseException as error:
        os.write(STDERR, f"cannot execute {command[0]}: {error}\n".encode())
        os._exit(CANNOT_EXECUTE)


def watch(command: Command, ports: list[int], parent: int, patience: float) -> int | None:
    """Wait until the command ends (its wait status), or somebody wants it stopped (None).

    Reports when the command serves its ports.
    """
    serving, pause = False, 0.005
    orphaned_at: float | None = None
    while True:
        status, asked = command.wait(pause, stop=STDIN)
        if status is not None or asked:
            return status
        _bound_log()
        if not serving and all(listens(command.pid, port) for port in ports):
            os.write(STDOUT, SERVING)
            serving = True
        pause = POLL_SECONDS if serving else min(1.5 * pause, 0.2)
        # Standard input ends with the parent, after those who must stop before us. Only where a forked
        # sibling of the parent keeps it open is the parent's death seen here, and then not waited on for ever.
        if os.getppid() != parent:
            orphaned_at = orphaned_at or time.monotonic()
            if time.monotonic() - orphaned_at > patience:
                return None


def listens(pid: int, port: int) -> bool:
    """Whether this very process has a listening IPv4 socket on this port: another program may hold the port,
    and Mooncake's take seconds to give up on it."""
    try:
        with open(f"/proc/{pid}/net/tcp") as table:  # noqa: PTH123
            rows = [line.split() for line in table]
        handles = {os.readlink(handle.path) for handle in os.scandir(f"/proc/{pid}/fd")}  # noqa: PTH115
    except (FileNotFoundError, ProcessLookupError):  # it has ended, or closed a file meanwhile
        return False
    return any(row[3] == "0A" and row[1].endswith(f":{port:04X}") and f"socket:[{row[9]}]" in handles for row in rows)


def is_gone(pid: int) -> bool:
    """Whether the process has ended: nothing is left of it but, perhaps, an entry its new parent is to clear."""
    with contextlib.suppress(ChildProcessError):  # where we are init, as in a container, the orphan is ours
        os.waitpid(pid, os.WNOHANG)
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return True


def _bound_log() -> None:
    """Give back what the log takes, but for its last words: they may be why the command is about to end.

    A hole, as the command may write at any moment: cutting the file would lose those words.
    """
    log = os.fstat(STDERR)
    if log.st_blocks * 512 > LOG_LIMIT_BYTES:
        hole = ctypes.c_long(log.st_size - LOG_TAIL_BYTES)
        ctypes.CDLL(None).fallocate(STDERR, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, ctypes.c_long(0), hole)


def describe(exit_status: int) -> str:
    """What the exit status of a guardian says, in words that continue a sentence."""
    if exit_status < 0:
        return f"was lost with its guardian, which signal {-exit_status} ended ({signal.strsignal(-exit_status)})"
    if exit_status > 128:
        return f"was ended by signal {exit_status - 128} ({signal.strsignal(exit_status - 128)})"
    return f"ended with exit status {exit_status}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of the asking process")
    parser.add_argument("--patience", type=float, required=True, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("--port", type=int, action="append", default=[], help="port the command is to serve")
    parser.add_argument("--mask-signals", action="store_true", help="block the stop signals in the command")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    # Blocked rather than ignored: whatever arrives before the command has its own handlers stays pending.
    signal.pthread_sigmask(signal.SIG_SETMASK, STOP_SIGNALS)
    command = Command(options.command, options.mask_signals)
    os.write(STDOUT, f"{command.pid}\n".encode())
    status = watch(command, options.port, options.parent, options.patience)
    if status is None:
        status = command.stop(options.patience)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
