"""What a job's journal is made of: its records, their bytes, and how damaged ones are told.

The file is a row of msgpack arrays ``[checksum, body]``: the body is msgpack too, and the checksum is its xxh3-64, 8
bytes, big-endian. The bodies::

    ["mooncake-sparse-client job journal", version, cache id, fingerprint, shard]    the first, and only there
    ["run", seconds since 1970]                                 a run began
    ["done", stretch, tokens computed, chunks, bytes]           a stretch is stored, and what that took
    ["end", status, seconds]                                    the run ended by itself
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgpack
import xxhash

from .report import Status

FORMAT: Final = "mooncake-sparse-client job journal"
VERSION: Final = 1
#: Bytes of the id of a stretch.
STRETCH_ID: Final = 16
#: Bytes of a record at most. Only the first comes near.
_LONGEST: Final = 1 << 16
#: A record behind the first is shorter; more bytes without an intact one are no torn one.
LONGEST_TORN: Final = 128
_READ_AT_ONCE: Final = 1 << 16
#: Nothing but arrays of two and bytes: no size that is only claimed makes the reader allocate.
_LIMITS: Final = {
    "max_array_len": 2,
    "max_bin_len": _LONGEST,
    "max_str_len": 0,
    "max_map_len": 0,
    "max_ext_len": 0,
    "max_buffer_size": 4 * _READ_AT_ONCE,
}


@dataclass(frozen=True, slots=True)
class JournalIdentity:
    """What a journal's stretches are of: nothing else may go on with it."""

    cache_id: str
    fingerprint: str
    #: Such as ``1/3``; empty for the whole corpus.
    shard: str = ""


@dataclass(frozen=True, slots=True)
class RunBegan:
    """A run began, so many seconds after 1970."""

    started: float


@dataclass(frozen=True, slots=True)
class StretchDone:
    """A stretch is stored, and what that took in this run."""

    stretch: bytes
    tokens_computed: int
    chunks_written: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run ended by itself, after so many seconds."""

    status: Status
    seconds: float


Record: TypeAlias = RunBegan | StretchDone | RunEnded


def header_of(identity: JournalIdentity) -> bytes:
    """The first record of a journal, as it stands in the file."""
    return _framed(msgpack.packb([FORMAT, VERSION, identity.cache_id, identity.fingerprint, identity.shard]))


def _framed(body: bytes) -> bytes:
    frame: bytes = msgpack.packb([xxhash.xxh3_64_digest(body), body])
    return frame


def encode(record: Record) -> bytes:
    """A record as it stands in the file."""
    parts: list[object]
    match record:
        case RunBegan(started):
            parts = ["run", started]
        case StretchDone(stretch, tokens, chunks, size):
            parts = ["done", stretch, tokens, chunks, size]
        case RunEnded(status, seconds):
            parts = ["end", status, seconds]
    return _framed(msgpack.packb(parts))


def decode(body: bytes) -> Record | None:
    """The record with this body; None if it is none of this version."""
    match unpacked(body):
        case ["done", bytes(stretch), int(tokens), int(chunks), int(size)] if len(stretch) == STRETCH_ID:
            return StretchDone(stretch, tokens, chunks, size)
        case ["run", float(started)]:
            return RunBegan(started)
        case ["end", ("done" | "incomplete" | "stopped") as status, float(seconds)]:
            return RunEnded(status, seconds)
    return None


def unpacked(body: bytes) -> list[object]:
    """The parts of a body; none if it is no array."""
    try:
        parts = msgpack.unpackb(body, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException):
        return []
    return parts if isinstance(parts, list) else []


def intact_bodies(descriptor: int) -> Iterator[tuple[bytes, int]]:
    """The records' bodies up to the first damage, and where each record ends. Never raises for what it finds."""
    unpacker = msgpack.Unpacker(**_LIMITS)
    offset = end = 0
    # What was read and is no whole record yet is part of one, and so is shorter.
    while offset - end < _LONGEST and (piece := os.pread(descriptor, _READ_AT_ONCE, offset)):
        offset += len(piece)
        try:
            unpacker.feed(piece)
            while True:
                match unpacker.unpack():
                    case [bytes(checksum), bytes(body)] if checksum == xxhash.xxh3_64_digest(body):
                        end = unpacker.tell()
                        yield body, end
                    case _:
                        return
        except msgpack.OutOfData:
            continue
        except (ValueError, msgpack.UnpackException):
            return


def is_torn(rest: bytes) -> bool:
    """Whether this is the beginning of a record, and no more."""
    unpacker = msgpack.Unpacker(**_LIMITS)
    unpacker.feed(rest)
    try:
        unpacker.unpack()
    except msgpack.OutOfData:
        return len(rest) < LONGEST_TORN
    except (ValueError, msgpack.UnpackException):
        pass
    return False
