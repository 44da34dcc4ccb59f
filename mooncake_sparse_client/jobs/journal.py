"""A job's progress in a file, which survives a kill at any byte.

Records are only ever appended, each with a write of its own. So a killed process leaves at most one torn record, the
last, which the next run cuts off. Nothing behind a damaged record is believed. ``journal_records.py`` has the format.

All of this is blocking I/O, for a thread, one call at a time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

from ..errors import ClientClosedError, ConfigError, InvalidRequestError
from .journal_records import (
    FORMAT,
    LONGEST_TORN,
    STRETCH_ID,
    VERSION,
    JournalIdentity,
    Record,
    RunBegan,
    RunEnded,
    StretchDone,
    decode,
    encode,
    header_of,
    intact_bodies,
    is_torn,
    unpacked,
)
from .report import RunTotals, Status

__all__ = ["Journal", "JournalIdentity"]

logger = logging.getLogger(__name__)

_REMEDY: Final = "give another path for the journal, or delete that file"


class Journal:
    """The journal of one job, open and locked by this process. Made by ``open``."""

    def __init__(self, path: Path, descriptor: int, size: int, past: _Past) -> None:
        self._path = path
        #: -1 once closed.
        self._descriptor = descriptor
        #: Of the whole records.
        self._size = size
        #: Ids of the stretches that are stored, by this run or an earlier one.
        self.done: set[bytes] = past.done
        #: What earlier runs did. Seconds are of those that ended by themselves.
        self.earlier: RunTotals = past.totals

    @classmethod
    def open(cls, path: Path, identity: JournalIdentity, *, resume: bool) -> Journal:
        """Open the journal at ``path`` for a run, which begins now.

        Without a file there one is made, and a finished job's is started over unless this is to ``resume`` it.

        Raises ``ConfigError`` if the file is no journal, or one of another version, of another job, of an unfinished
        job without ``resume``, or in use; or cannot be read or written.
        """
        # What a link points at is to be replaced, not the link.
        path = Path(os.path.realpath(path))
        try:
            descriptor = _open_locked(path)
            try:
                journal = _resumed(path, descriptor, identity) if resume else _started_over(path, descriptor, identity)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise ConfigError(f"the journal {path} cannot be opened: {error.strerror}") from error
        try:
            journal._append(RunBegan(time.time()))
        except BaseException:
            journal.close()
            raise
        return journal

    def append_done(self, stretch: bytes, *, tokens_computed: int, chunks_written: int, bytes_written: int) -> None:
        """A stretch is stored. A kill of this process does not undo it; a loss of power may, until ``sync``.

        Raises ``ConfigError`` if it cannot be written; the journal is then as before.
        """
        if len(stretch) != STRETCH_ID:
            raise InvalidRequestError(f"the id of a stretch must have {STRETCH_ID} bytes, not {len(stretch)}")
        self._append(StretchDone(stretch, int(tokens_computed), int(chunks_written), int(bytes_written)))
        self.done.add(stretch)

    def append_end(self, status: Status, *, seconds: float) -> None:
        """This run ended by itself. Raises ``ConfigError`` if it cannot be written."""
        self._append(RunEnded(status, float(seconds)))
        self.sync()

    def sync(self) -> None:
        """Bring what was appended to the disk. Raises ``ConfigError``."""
        try:
            os.fsync(self._descriptor_in_use())
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        """Let go of the file and its lock; may be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _append(self, record: Record) -> None:
        self._write(encode(record))

    def _write(self, data: bytes) -> None:
        descriptor = self._descriptor_in_use()
        try:
            # One write, unless the file system takes less: then the next one says why.
            written = 0
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError as error:
            self._cut_back()
            raise self._cannot_write(error) from error
        self._size += len(data)

    def _cut_back(self) -> None:
        """To the last whole record, since whatever stands behind a torn one is lost."""
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            self.close()

    def _descriptor_in_use(self) -> int:
        if self._descriptor < 0:
            raise ClientClosedError(f"the journal {self._path} is closed")
        return self._descriptor

    def _cannot_write(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the journal {self._path} cannot be written: {error.strerror}; make room, or mend what is wrong there, "
            "and resume the job"
        )


@dataclass(slots=True)
class _Past:
    """What a journal tells of the runs so far."""

    #: What identifies the job.
    job: list[object] = field(default_factory=list)
    #: Of the records that can be believed, in bytes; 0 without a header.
    size: int = 0
    #: What is behind them, in bytes.
    rest: int = 0
    #: Whether that is the beginning of a record.
    torn: bool = False
    #: Whether the last record says so.
    finished: bool = False
    runs: int = 0
    tokens: int = 0
    chunks: int = 0
    written: int = 0
    seconds: float = 0.0
    done: set[bytes] = field(default_factory=set)

    @property
    def totals(self) -> RunTotals:
        return RunTotals(self.runs, self.tokens, self.chunks, self.written, self.seconds)

    def add(self, record: Record) -> None:
        self.finished = False
        match record:
            case StretchDone():
                self.done.add(record.stretch)
                self.tokens += record.tokens_computed
                self.chunks += record.chunks_written
                self.written += record.bytes_written
            case RunBegan():
                self.runs += 1
            case RunEnded():
                self.seconds += record.seconds
                self.finished = record.status == "done"


def _resumed(path: Path, descriptor: int, identity: JournalIdentity) -> Journal:
    past = _read(path, descriptor, identity)
    if not past.size or (past.finished and past.job != _job_of(identity)):  # that one needs it no more
        return _begun(path, descriptor, identity)
    _check_job(path, past, identity)
    if past.rest:
        if past.torn:
            logger.info("journal %s: cut off its last record, which a kill tore after %d bytes", path, past.rest)
        else:
            logger.warning(
                "journal %s: damaged behind byte %d; cut off %d bytes, whose stretches are looked at again",
                *(path, past.size, past.rest),
            )
        os.ftruncate(descriptor, past.size)
    return Journal(path, descriptor, past.size, past)


def _started_over(path: Path, descriptor: int, identity: JournalIdentity) -> Journal:
    past = _read(path, descriptor, identity)
    # One in which nothing was done has nothing to be resumed.
    if past.size and (past.done or past.rest) and not (past.finished and not past.rest):
        _check_job(path, past, identity)
        raise ConfigError(f"there is a journal of an unfinished job at {path}: resume it (--resume) or delete it")
    return _begun(path, descriptor, identity)


def _begun(path: Path, old: int, identity: JournalIdentity) -> Journal:
    """A new journal in the place of the old file, which is there, whole, until the new one is. Closes ``old``."""
    descriptor, temporary = tempfile.mkstemp(prefix=".journal-", dir=path.parent)
    journal = Journal(path, descriptor, 0, _Past())
    try:
        # Before the others can see it.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        os.fchmod(descriptor, stat.S_IMODE(os.fstat(old).st_mode))
        journal._write(header_of(identity))
        journal.sync()
        Path(temporary).replace(path)
    except BaseException:
        journal.close()
        with suppress(OSError):
            Path(temporary).unlink()
        raise
    os.close(old)
    return journal


def _open_locked(path: Path) -> int:
    """A descriptor of the file at ``path``, made if need be, with its lock. Raises ``ConfigError``, ``OSError``."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{path} is no file, and so no journal: give another path")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"another process is using the journal {path}") from error
            # Its owner may have put another file in its place before it let go of this one.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _read(path: Path, descriptor: int, identity: JournalIdentity) -> _Past:
    """All that can be believed, of whatever job. Raises ``ConfigError`` if this is no journal."""
    past = _Past(job=_job_of(identity))
    length, header = os.fstat(descriptor).st_size, header_of(identity)
    if length < len(header) and header.startswith(os.pread(descriptor, length, 0)):
        return past  # a new file, or killed before anything was done
    bodies = intact_bodies(descriptor)
    first, past.size = next(bodies, (b"", 0))
    past.job = _checked_header(path, first)
    for body, end in bodies:
        record = decode(body)
        if record is None:
            break
        past.add(record)
        past.size = end
    past.rest = length - past.size
    past.torn = is_torn(os.pread(descriptor, LONGEST_TORN, past.size))
    return past


def _job_of(identity: JournalIdentity) -> list[object]:
    return [getattr(identity, part.name) for part in fields(identity)]


def _checked_header(path: Path, body: bytes) -> list[object]:
    """What it says of its job."""
    parts = unpacked(body)
    if len(parts) < 2 or parts[0] != FORMAT:
        raise ConfigError(f"{path} is no journal of a job, or its beginning is damaged; {_REMEDY}")
    if parts[1] != VERSION:
        raise ConfigError(f"the journal {path} has version {parts[1]}, and this release reads {VERSION}; {_REMEDY}")
    return parts[2:]


def _check_job(path: Path, past: _Past, identity: JournalIdentity) -> None:
    """Whether the journal is of the job with this identity."""
    found, wanted = past.job, _job_of(identity)
    if found != wanted:
        names = [part.name for part in fields(identity)]
        differ = [
            f"{name} {was!r}, not {now!r}" for name, was, now in zip(names, found, wanted, strict=False) if was != now
        ]
        raise ConfigError(f"the journal {path} is of another job, with {', '.join(differ)}; {_REMEDY}")
