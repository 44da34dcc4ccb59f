"""Blocks of token ids as the bytes that vLLM's block hashes digest.

Such a hash is taken over ``(parent digest, tuple of ids, extra keys)``, pickled or as canonical CBOR. Only the
parents have to wait for each other: the ids of many blocks are written at once with NumPy, and what stands around
them is taken from the encoding of a sample.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO

import cbor2
import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.uint32] | NDArray[np.int64]


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _canonical_cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


@dataclass(frozen=True, slots=True)
class ObjectEncoding:
    """An encoding of objects, and how it writes a non-negative int: a head byte, then as many of the value's four
    bytes as its form has."""

    encode: Callable[[object], bytes]
    #: The greatest value of each form but the last.
    most: tuple[int, ...]
    #: Bytes of each form, head included, and its head.
    widths: bytes
    heads: bytes
    big_endian: bool
    #: Ids below this have one of the forms.
    limit: int
    #: Where the number of bytes behind it stands, in 8 bytes; None if an encoding does not tell its length.
    length_at: int | None

    def writes_at_once(self, ids: TokenArray, block_size: int) -> bool:
        """Whether ``around_parents`` can write these ids, and sooner than ``encode`` block by block."""
        return len(ids) >= _WORTHWHILE and block_size <= _LONGEST_BLOCK and int(ids.max()) < self.limit

    def around_parents(self, ids: TokenArray, block_size: int, digest_size: int) -> tuple[list[bytes], list[bytes]]:
        """What ``encode((parent, block, None))`` has before and behind the parent's ``digest_size`` bytes.

        One item a block in both lists. ``ids``: whole blocks for which ``writes_at_once`` holds.
        """
        before, middle, tail = _around(self, block_size, digest_size)
        written, edges = self.written(ids.astype(np.uint32, copy=False))
        sizes = np.diff(edges[::block_size]).tolist()
        # The start depends on the size alone, and of sizes there are few.
        others = len(before) + digest_size + len(middle) + len(tail)
        starts = {size: self._with_length(before, others + size) for size in set(sizes)}
        read = BytesIO(written).read
        return [starts[size] for size in sizes], [middle + read(size) + tail for size in sizes]

    def written(self, ids: NDArray[np.uint32]) -> tuple[bytes, NDArray[np.intp]]:
        """The ids one after another, and where each begins and the last ends."""
        form = np.zeros(len(ids), dtype=np.uint8)
        for most in self.most:
            form += ids > most
        edges = np.zeros(len(ids) + 1, dtype=np.intp)
        np.cumsum(np.frombuffer(self.widths, dtype=np.uint8).take(form), out=edges[1:])
        starts, ends = edges[:-1], edges[1:]
        room = np.zeros(_SPARE + int(edges[-1]) + _SPARE, dtype=np.uint8)
        # Of every id as many bytes are written as the greatest has. Those that its form does not have fall on its
        # neighbours'; as the high bytes, which lie farthest from the edge, go first, what belongs there comes later.
        places, step = (ends, -1) if self.big_endian else (starts, 1)
        for number in range((int(ids.max()).bit_length() - 1) // 8, 0, -1):
            room[_SPARE + step * (number + 1) :][places] = (ids >> (8 * number)).astype(np.uint8)
        room[_SPARE:][starts] = np.frombuffer(self.heads, dtype=np.uint8).take(form)
        room[_SPARE + step :][places] = ids.astype(np.uint8)
        return room[_SPARE:-_SPARE].tobytes(), edges

    def _with_length(self, before: bytes, size: int) -> bytes:
        """``before`` as the start of an encoding of ``size`` bytes."""
        if self.length_at is None:
            return before
        end = self.length_at + 8
        return before[: self.length_at] + (size - end).to_bytes(8, "little") + before[end:]


@lru_cache(maxsize=64)
def _around(encoding: ObjectEncoding, block_size: int, digest_size: int) -> tuple[bytes, bytes, bytes]:
    """What an encoded ``(parent, block, None)`` has before the parent, between it and the ids, and behind them."""
    parent, zeros = b"\xff" * digest_size, encoding.written(np.zeros(block_size, dtype=np.uint32))[0]
    before, _, behind = encoding.encode((parent, (0,) * block_size, None)).partition(parent)
    # The last match: the length that CBOR writes before the ids may end in a zero itself.
    middle, _, tail = behind.rpartition(zeros)
    return before, middle, tail


#: Bytes on both sides of the written ids, for those that the forms of the first and last do not have.
_SPARE = 4
#: Fewer ids than this are encoded as quickly block by block.
_WORTHWHILE = 512
#: A pickle of so many tokens is far from 64 KiB, where it would go on in a second frame.
_LONGEST_BLOCK = 4096

#: Protocol 5: BININT1, BININT2 and BININT, in a frame that tells its length.
PICKLE = ObjectEncoding(
    encode=_pickled,
    most=(0xFF, 0xFFFF),
    widths=b"\x02\x03\x05",
    heads=b"KMJ",
    big_endian=False,
    limit=1 << 31,
    length_at=3,
)
#: Canonical: major type 0, where a value below 24 is its own head.
CBOR = ObjectEncoding(
    encode=_canonical_cbor,
    most=(23, 0xFF, 0xFFFF),
    widths=b"\x01\x02\x03\x05",
    heads=b"\x00\x18\x19\x1a",
    big_endian=True,
    limit=1 << 32,
    length_at=None,
)
