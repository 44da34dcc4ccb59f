"""What a stored value looks like, and how a damaged one is told.

``raw`` values are the chunk's buffers one after another, what vLLM writes: nothing can be checked but the
length, which the store does. ``framed`` values have a header of ``HEADER_SIZE`` bytes in front, a msgpack
array of fixed size::

    [version, fingerprint (8 bytes), group (4), payload length (8), checksum (8), name check (8), padding]

with big-endian numbers. The checksum is xxh3-64 of the payload; the name check is xxh3-64 of the chunk's
name, so that an intact value found under another chunk's key is told as well. The padding brings the payload
to a cache line's boundary. A header is only ever compared with the one that is expected: a hostile value
cannot make the reader allocate or loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

ValueFormatName: TypeAlias = Literal["framed", "raw"]
Bytes: TypeAlias = NDArray[np.uint8]

#: Raw values are version 0. A new version is a new fingerprint: old and new values never meet.
RAW_VERSION = 0
FRAMED_VERSION = 1
HEADER_SIZE = 64
_FIELD_SIZES = (8, 4, 8, 8, 8)
_PADDING = bytes(HEADER_SIZE - 2 - sum(size + 2 for size in _FIELD_SIZES) - 2)
#: Where the fields that differ between the headers of one batch lie.
_CHECKSUM: Final = slice(30, 38)
_NAME_CHECK: Final = slice(40, 48)


@dataclass(frozen=True, slots=True)
class FrameMeta:
    """A header's fields."""

    version: int
    fingerprint: bytes
    group: int
    length: int
    checksum: int
    name_check: int


def payload_checksum(buffers: Sequence[memoryview]) -> int:
    """xxh3-64 of the buffers one after another."""
    if len(buffers) == 1:
        return xxhash.xxh3_64_intdigest(buffers[0])
    state = xxhash.xxh3_64()
    for buffer in buffers:
        state.update(buffer)
    return state.intdigest()


def pack_header(meta: FrameMeta) -> bytes:
    """``HEADER_SIZE`` bytes."""
    header: bytes = msgpack.packb(
        [
            meta.version,
            meta.fingerprint,
            meta.group.to_bytes(4, "big"),
            meta.length.to_bytes(8, "big"),
            meta.checksum.to_bytes(8, "big"),
            meta.name_check.to_bytes(8, "big"),
            _PADDING,
        ]
    )
    return header


def unpack_header(header: bytes | bytearray | memoryview) -> FrameMeta | None:
    """The fields, None if these bytes are no header. Never raises, and allocates no more than a header."""
    if len(header) != HEADER_SIZE:
        return None
    try:
        parts = msgpack.unpackb(header, max_array_len=7, max_bin_len=32, max_str_len=0, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException):
        return None
    if not isinstance(parts, list) or len(parts) != 7 or type(parts[0]) is not int or parts[6] != _PADDING:
        return None
    fields = parts[1:6]
    sizes = tuple(len(value) if isinstance(value, bytes) else -1 for value in fields)
    if sizes != _FIELD_SIZES:
        return None
    numbers = [int.from_bytes(value, "big") for value in fields[1:]]
    return FrameMeta(parts[0], fields[0], *numbers)


@dataclass(frozen=True, slots=True)
class ValueFormat:
    """How this client's values look. ``fingerprint`` is the 16 hex digits that its keys may carry too."""

    name: ValueFormatName
    fingerprint: str

    @staticmethod
    def version_of(name: ValueFormatName) -> int:
        return FRAMED_VERSION if name == "framed" else RAW_VERSION

    @property
    def header_size(self) -> int:
        """Bytes in front of the payload."""
        return HEADER_SIZE if self.name == "framed" else 0

    def header(self, group: int, chunk_name: str, payload: tuple[memoryview, ...]) -> bytes:
        """The header for this payload; empty for raw values."""
        if self.name == "raw":
            return b""
        length = sum(buffer.nbytes for buffer in payload)
        return pack_header(self._meta(group, chunk_name, length, payload_checksum(payload)))

    def headers(self, group: int, chunk_names: Sequence[str], checksums: Sequence[int], length: int) -> Bytes:
        """The headers of many payloads of ``length`` bytes in one group: shape ``(chunks, HEADER_SIZE)``."""
        rows = np.empty((len(chunk_names), HEADER_SIZE), dtype=np.uint8)
        rows[:] = np.frombuffer(pack_header(self._meta(group, "", length, 0)), dtype=np.uint8)
        rows[:, _CHECKSUM] = _big_endian(checksums)
        rows[:, _NAME_CHECK] = _big_endian([_name_check(name) for name in chunk_names])
        return rows

    def promised(self, heads: Bytes, group: int, chunk_names: Sequence[str], length: int) -> list[int | None]:
        """The checksum that each header found, one a row, gives its payload; None where it is not this chunk's."""
        wanted = self.headers(group, chunk_names, [0] * len(chunk_names), length)
        wanted[:, _CHECKSUM] = heads[:, _CHECKSUM]
        good = (heads == wanted).all(axis=1).tolist()
        sums = np.ascontiguousarray(heads[:, _CHECKSUM]).view(">u8").ravel().tolist()
        return [checksum if fits else None for checksum, fits in zip(sums, good, strict=True)]

    def fault(
        self,
        header: bytes | bytearray | memoryview,
        group: int,
        chunk_name: str,
        payload: tuple[memoryview, ...],
    ) -> str | None:
        """Why these bytes are not this chunk's value, in a word; None if they are.

        ``header`` (no header at all), ``version``, ``fingerprint``, ``group``, ``length``, ``name`` (an intact
        value of another chunk) or ``checksum``. Raw values have no fault.
        """
        if self.name == "raw":
            return None
        found = unpack_header(header)
        if found is None:
            return "header"
        if found.version != FRAMED_VERSION:
            return "version"
        if found.fingerprint != bytes.fromhex(self.fingerprint):
            return "fingerprint"
        if found.group != group:
            return "group"
        if found.length != sum(buffer.nbytes for buffer in payload):
            return "length"
        if found.name_check != _name_check(chunk_name):
            return "name"
        if found.checksum != payload_checksum(payload):
            return "checksum"
        return None

    def _meta(self, group: int, chunk_name: str, length: int, checksum: int) -> FrameMeta:
        return FrameMeta(
            version=FRAMED_VERSION,
            fingerprint=bytes.fromhex(self.fingerprint),
            group=group,
            length=length,
            checksum=checksum,
            name_check=_name_check(chunk_name),
        )


def _name_check(chunk_name: str) -> int:
    return xxhash.xxh3_64_intdigest(chunk_name.encode())


def _big_endian(numbers: Sequence[int]) -> Bytes:
    """One row of eight bytes a number."""
    return np.array(numbers, dtype=np.uint64).astype(">u8").view(np.uint8).reshape(-1, 8)
