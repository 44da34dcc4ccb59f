"""The native calls that move values. They run on threads, and whoever made a batch keeps its memory alive."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from ..errors import InvalidRequestError
from ..replication import Replication
from ..views import scatter, view_at
from . import native_codes as codes
from .base import Failure, GetItem, PlacedGets, PlacedPuts, Places, PutItem
from .native import NativeStore, native_replication
from .regions import StoreMemory

Batch = TypeVar("Batch", PlacedPuts, PlacedGets)

#: A question of more bytes than fit into one segment of loopback TCP now and then waits 40 ms for the rest of itself.
_QUESTION_BYTES = 60_000
_PREFIX_BYTES: Final = 8192
#: What a pattern of C++'s ECMAScript kind does not take as it is: its own signs, and what is no printing letter.
_ESCAPED: Final = {letter: f"\\{letter}" for letter in r"^$\.*+?()[]{}|"} | {
    chr(code): f"\\x{code:02x}" for code in (*range(32), 127)
}


def ask_in_parts(native: NativeStore, keys: Sequence[str]) -> list[int]:
    """Whether each key has a value: 1, 0 or a code. In calls that are quick, one after another; one that fails is the
    last, since each of the others would take as long to do so."""
    size = max(1, _QUESTION_BYTES // len(keys[0].encode())) if keys else 1
    answers: list[int] = []
    for first in range(0, len(keys), size):
        part = native.batch_is_exist(list(keys[first : first + size]))
        answers += part
        failed = [code for code in part if codes.is_no_answer(code)] if min(part, default=0) < 0 else []
        if failed:
            return answers + failed[:1] * (len(keys) - len(answers))
    return answers


def starting_with(prefix: str) -> str:
    """A pattern for ``remove_by_regex`` that finds the keys that start with ``prefix``, whatever is in it.

    The master looks for it with recursion, a step a byte: a huge one could end it. Raises ``InvalidRequestError``.
    """
    if len(prefix.encode()) > _PREFIX_BYTES:
        raise InvalidRequestError(f"a prefix may have {_PREFIX_BYTES} bytes, not {len(prefix.encode())}")
    return "^" + "".join(_ESCAPED.get(letter, letter) for letter in prefix)


def put_placed(native: NativeStore, batch: PlacedPuts, memory: StoreMemory, replication: Replication) -> list[int]:
    """Write the batch: 0 or a code for each value."""
    if not batch.replace:
        return _put_new(native, batch, replication)
    return _put_and_replace(native, batch, memory, replication)


def _put_and_replace(
    native: NativeStore, batch: PlacedPuts, memory: StoreMemory, replication: Replication
) -> list[int]:
    addresses, sizes = batch.by_value(batch.addresses), batch.by_value(batch.sizes)
    new = [number for number, key in enumerate(batch.keys) if key not in batch.replace]
    some = _picked(batch, new, addresses, sizes)
    written = _put_new(native, some, replication) if new else []
    if len(written) != len(new):
        return written  # of a wrong length, which the caller reports
    answer = dict(zip(some.keys, written, strict=True))
    for key, places, lengths in zip(batch.keys, addresses, sizes, strict=True):
        if key in batch.replace:
            answer[key] = _upsert(native, key, places, lengths, memory, replication)
    return [answer[key] for key in batch.keys]


def _picked(
    batch: PlacedPuts, numbers: Sequence[int], addresses: Sequence[list[int]], sizes: Sequence[list[int]]
) -> PlacedPuts:
    return PlacedPuts(
        [batch.keys[number] for number in numbers],
        [address for number in numbers for address in addresses[number]],
        [size for number in numbers for size in sizes[number]],
        sum(sum(sizes[number]) for number in numbers),
        None if batch.counts is None else [batch.counts[number] for number in numbers],
    )


def in_parts(batch: Batch, most_pieces: int | None) -> Iterator[Batch]:
    """``batch`` cut into consecutive ones of at most so many pieces, or of one value that has more."""
    if most_pieces is None or len(batch.sizes) <= most_pieces:
        yield batch
        return
    counts = batch.counts or [1] * len(batch)
    first = piece = 0
    while first < len(counts):
        last, end = first, piece
        while last < len(counts) and (last == first or end - piece + counts[last] <= most_pieces):
            end += counts[last]
            last += 1
        yield dataclasses.replace(
            batch,
            keys=batch.keys[first:last],
            addresses=batch.addresses[piece:end],
            sizes=batch.sizes[piece:end],
            nbytes=sum(batch.sizes[piece:end]),
            counts=None if batch.counts is None else batch.counts[first:last],
        )
        first, piece = last, end


def _put_new(native: NativeStore, batch: PlacedPuts, replication: Replication) -> list[int]:
    config = native_replication(replication, len(batch))
    more = () if config is None else (config,)
    if batch.counts is None:
        return native.batch_put_from(batch.keys, batch.addresses, batch.sizes, *more)
    pieces = batch.by_value(batch.addresses), batch.by_value(batch.sizes)
    return native.batch_put_from_multi_buffers(batch.keys, *pieces, *more)


def _upsert(
    native: NativeStore,
    key: str,
    addresses: list[int],
    sizes: list[int],
    memory: StoreMemory,
    replication: Replication,
) -> int:
    """Rare (it heals damage), so one copy where a value is in pieces: the native upsert takes a single one."""
    config = native_replication(replication, 1)
    more = () if config is None else (config,)
    if len(addresses) == 1:
        return native.upsert_from(key, addresses[0], sizes[0], *more)
    if not any(sizes):
        return codes.INVALID_PARAMS  # as for any value without bytes
    try:
        joined = memory.allocate(sum(sizes))
    except InvalidRequestError:
        return codes.NO_AVAILABLE_HANDLE  # no room to join it in, for now
    joined.view[:] = b"".join(map(view_at, addresses, sizes))
    return native.upsert_from(key, joined.address, joined.nbytes, *more)


def get_placed(native: NativeStore, batch: PlacedGets) -> list[Failure | int | None]:
    """Read the batch: None for a value that arrived, a code or a reason for one that did not."""
    if batch.counts is None:
        wanted = batch.sizes
        lengths = native.batch_get_into(batch.keys, batch.addresses, wanted)
    else:
        sizes = batch.by_value(batch.sizes)
        wanted = list(map(sum, sizes))
        lengths = native.batch_get_into_multi_buffers(batch.keys, batch.by_value(batch.addresses), sizes)
    if lengths == wanted:
        return [None] * len(wanted)
    if len(lengths) != len(wanted):
        return list(lengths)
    return list(map(functools.partial(_arrival, native), batch.keys, lengths, wanted))


def _arrival(native: NativeStore, key: str, length: int, wanted: int) -> Failure | int | None:
    if length == wanted:
        return None
    if length in (codes.INVALID_PARAMS, codes.TRANSFER_FAIL):
        # A value of another size is answered like a failed transfer; its size tells them apart.
        size = native.get_size(key)
        length = size if size != wanted else length
    if length >= 0:
        return Failure("length", False, f"{key!r} has {length} bytes, not {wanted}")
    return length


def copied_in(items: Sequence[PutItem], memory: StoreMemory) -> tuple[PlacedPuts, list[memoryview]]:
    """Values of any memory as a batch in memory that the store reaches, which the views keep alive."""
    places, pieces = _by_way_of(items, memory)
    for item, piece in zip(items, pieces, strict=True):
        piece[:] = b"".join(item.buffers)
    replace = frozenset(item.key for item in items if item.replace)
    return PlacedPuts(places.keys, places.addresses, places.sizes, places.nbytes, replace=replace), pieces


def room_for(items: Sequence[GetItem], memory: StoreMemory) -> tuple[PlacedGets, list[memoryview]]:
    """A batch to read such values into memory that the store reaches, and a view of each."""
    places, pieces = _by_way_of(items, memory)
    return PlacedGets(places.keys, places.addresses, places.sizes, places.nbytes), pieces


def copy_out(items: Sequence[GetItem], pieces: Sequence[memoryview], answer: Sequence[object]) -> None:
    """Copy the values that have arrived to where they belong."""
    if len(answer) == len(items):  # else the caller reports it
        for item, piece, missing in zip(items, pieces, answer, strict=True):
            if missing is None:
                scatter(piece, item.buffers)


def _by_way_of(items: Sequence[PutItem] | Sequence[GetItem], memory: StoreMemory) -> tuple[Places, list[memoryview]]:
    """A place for each value in memory that the store reaches, and the same places as views, which keep it."""
    sizes = [sum(buffer.nbytes for buffer in item.buffers) for item in items]
    region = memory.allocate(max(sum(sizes), 1))
    starts = [end - size for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    places = Places(
        [item.key for item in items],
        [region.address + start for start in starts],
        sizes,
        sum(sizes),
    )
    return places, [region.view[start : start + size] for start, size in zip(starts, sizes, strict=True)]
