"""The Store protocol: batched, asynchronous, and the same whoever keeps the bytes.

A store knows keys and values, nothing of tokens. ``tests/store_contract.py`` says what each must do. Things
that cut across (a throttle, retries, metrics, latency in tests) are wrappers around a store.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, overload, runtime_checkable

from ..core.results import Health
from ..errors import InvalidBufferError, InvalidRequestError
from ..views import view_at
from .regions import StoreMemory


@dataclass(frozen=True, slots=True)
class PutItem:
    """A value to write: its ``buffers`` one after another. ``replace``: overwrite what is there."""

    key: str
    buffers: tuple[memoryview, ...]
    replace: bool = False


@dataclass(frozen=True, slots=True)
class GetItem:
    """A value to read into ``buffers`` (writable), one after another; their sizes must add up to its own."""

    key: str
    buffers: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The values of a batch by their addresses, in columns: a store that takes addresses needs no object a value.

    ``addresses`` and ``sizes`` (bytes) are of the pieces of all values, one after another. Whoever makes it keeps
    the memory alive until the call that it is handed to is over.
    """

    keys: list[str]
    addresses: list[int]
    sizes: list[int]
    #: Bytes of all values.
    nbytes: int
    #: How many pieces each value has; None for one each.
    counts: list[int] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def by_value(self, column: list[int]) -> list[list[int]]:
        """``addresses`` or ``sizes``, a list a value."""
        if self.counts is None:
            return [[entry] for entry in column]
        ends = itertools.accumulate(self.counts)
        return [column[end - count : end] for count, end in zip(self.counts, ends, strict=True)]

    def views(self) -> Iterator[tuple[memoryview, ...]]:
        """Each value's pieces as writable memory."""
        for addresses, sizes in zip(self.by_value(self.addresses), self.by_value(self.sizes), strict=True):
            yield tuple(map(view_at, addresses, sizes))


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPuts(Places, Sequence[PutItem]):
    """A batch of values to write, as columns and as items."""

    #: The keys whose values are overwritten.
    replace: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[PutItem]:
        for key, views in zip(self.keys, self.views(), strict=True):
            yield PutItem(key, views, key in self.replace)

    @overload
    def __getitem__(self, number: int) -> PutItem: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[PutItem]: ...
    def __getitem__(self, number: int | slice) -> PutItem | Sequence[PutItem]:
        return list(self)[number]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedGets(Places, Sequence[GetItem]):
    """A batch of values to read, as columns and as items."""

    def __iter__(self) -> Iterator[GetItem]:
        return map(GetItem, self.keys, self.views())

    @overload
    def __getitem__(self, number: int) -> GetItem: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[GetItem]: ...
    def __getitem__(self, number: int | slice) -> GetItem | Sequence[GetItem]:
        return list(self)[number]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one key of a batch failed: a stable word, whether to try again, and a sentence.

    Words: ``missing``, ``length``, ``checksum``, ``lease_expired``, ``transfer``, ``busy``, ``full``,
    ``rejected``, ``unavailable``, ``timeout``, ``unknown``.
    """

    kind: str
    retriable: bool
    detail: str


class RemoveOutcome(Enum):
    """What became of one key in a remove."""

    REMOVED = "removed"
    ABSENT = "absent"
    LEASED = "leased"


@runtime_checkable
class Store(Protocol):
    """Where values are kept.

    Each method takes a batch in which a key stands at most once (else ``InvalidRequestError``) and answers in the
    batch's order. The client's batches are ``PlacedPuts`` and ``PlacedGets``, sequences of items that know their
    addresses. Buffers are contiguous views of bytes (else ``InvalidBufferError``). A key's own trouble is a value
    in the answer; an exception (``StoreError``) means that the call as a whole failed. No buffer is touched after
    ``put`` or ``get`` has returned or raised, cancelled calls included. After ``aclose`` every method raises
    ``ClientClosedError``.
    """

    @property
    def max_value_bytes(self) -> int | None:
        """The largest value that can ever fit, in bytes; None if unknown."""

    @property
    def lease_seconds(self) -> float | None:
        """For how long a key that was seen to exist is safe from eviction; None for ever."""

    @property
    def memory(self) -> StoreMemory:
        """The memory that values move to and from without a copy; ``HeapMemory()`` where any will do."""

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key has a complete value. May lease the keys that have."""

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        """Write each value; None for a key that then has one. A value that is there stays, unless replaced."""

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        """Fill each item's buffers; None for a key whose whole value arrived. Else their bytes are undefined."""

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        """Delete each key; ``force`` takes those too that are leased to readers."""

    async def remove_prefix(self, prefix: str, *, force: bool = False) -> int:
        """Delete every key that starts with ``prefix``, as ``remove`` would; answers how many went.

        Raises ``InvalidRequestError`` for an empty prefix: that would be every key of everybody.
        """

    async def health(self) -> Health:
        """Whether the store answers now; never raises for a store that does not."""

    async def aclose(self) -> None:
        """Let go of everything, once calls in flight are over. Idempotent."""


def check_items(items: Sequence[PutItem] | Sequence[GetItem], *, writable: bool) -> None:
    """What a batch must be, ``writable`` to be read into. Raises before anything has happened.

    Native code takes addresses: it would write to read-only memory, and misread what is not plain bytes.
    """
    if isinstance(items, Places):
        check_distinct(items.keys)
        return  # whoever made the batch vouches for its memory
    check_distinct([item.key for item in items])
    for item in items:
        for buffer in item.buffers:
            if not isinstance(buffer, memoryview) or not buffer.c_contiguous or buffer.itemsize != 1:
                raise InvalidBufferError(
                    f"a buffer for {item.key!r} is no contiguous view of bytes; cast or copy it first"
                )
            if writable and buffer.readonly:
                raise InvalidBufferError(f"a buffer for {item.key!r} is read-only; read into writable memory")


def check_prefix(prefix: str) -> None:
    """What ``remove_prefix`` may be asked for."""
    if not isinstance(prefix, str) or not prefix:
        raise InvalidRequestError(f"a prefix must be text that is not empty, not {prefix!r}")


class DistinctKeys(list[str]):
    """Keys that a client has made itself: all different and not empty, so that nobody need look."""

    __slots__ = ()


def check_distinct(keys: Sequence[str]) -> None:
    """A key may stand in a batch once: real stores answer nonsense to duplicates, and silently."""
    if isinstance(keys, DistinctKeys):
        return
    try:
        "".join(keys)  # the quickest way to see that all are text
    except TypeError:
        wrong = next(key for key in keys if not isinstance(key, str))
        raise InvalidRequestError(f"a key must be text that is not empty, not {wrong!r}") from None
    if "" in keys:
        raise InvalidRequestError("a key must be text that is not empty, not ''")
    if len(set(keys)) < len(keys):
        twice = Counter(keys).most_common(1)[0][0]
        raise InvalidRequestError(f"the key {twice!r} stands twice in one batch; ask for each key once")
