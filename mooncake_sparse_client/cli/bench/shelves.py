"""What the store holds while lookups are measured: small values under the keys of both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...client import SparseStoreClient
from ...core.keys import KeyBuilder
from ...core.layout import KVCacheLayout
from ...core.masks import BoolArray
from ...core.presets import layout_for
from ...errors import StoreAnswerError
from ...stores.base import Store
from .rivals import PlainCalls, register

#: Values that one native call writes or removes.
_BATCH: Final = 4096
_TIMEOUT: Final = 120.0
#: So small that every chunk has the least size that there is, which is this.
_SCALE: Final = 1e-9
_VALUE_BYTES: Final = 16


def small_layout(name: str) -> KVCacheLayout:
    """The layout of a preset, with chunks of a few bytes: a lookup moves none."""
    return layout_for(name, scale=_SCALE)


def lookup_client(store: Store, name: str) -> SparseStoreClient:
    """A client of ours for the preset ``name``, as it comes: nobody reads a value here, so they have no header."""
    return SparseStoreClient(
        store,
        small_layout(name),
        model_name=f"bench-lookup-{name}",
        profile="native",
        value_format="raw",
        retention_interval=None,
        timeout=_TIMEOUT,
    )


def client_keys(client: SparseStoreClient, hashes: Sequence[bytes], num_tokens: int) -> list[list[str]]:
    """The client's keys of all chunks of a prompt, a list a group."""
    builder = KeyBuilder(client.layout, client.keys)
    return [
        builder.own_keys(hashes, group, range(num_tokens // spec.block_size))
        for group, spec in enumerate(client.layout.groups)
    ]


def stored_upto(layout: KVCacheLayout, num_tokens: int, upto: int) -> list[BoolArray]:
    """Of the chunks of a prompt of ``num_tokens``, those that end at or before ``upto`` tokens: an array a group."""
    return [np.arange(num_tokens // spec.block_size) < upto // spec.block_size for spec in layout.groups]


class Values:
    """Writes and removes values that are all alike, past any client. The calls block.

    Each raises ``StoreAnswerError`` where the store does not do what it should.
    """

    def __init__(self, native: PlainCalls, value: NDArray[np.uint8]) -> None:
        self._native = native
        self._value = value

    def put(self, keys: Sequence[str]) -> None:
        address, size = self._value.ctypes.data, self._value.nbytes
        for some in _batches(keys):
            _expect_done(self._native.batch_put_from(some, [address] * len(some), [size] * len(some)), "put")

    def remove(self, keys: Sequence[str]) -> None:
        """Leased or not."""
        for some in _batches(keys):
            _expect_done(self._native.batch_remove(some, True), "removal")


@contextmanager
def small_values(native: PlainCalls) -> Iterator[Values]:
    """Values of the size of all chunks here. Raises ``ConnectError``."""
    value = np.ones(_VALUE_BYTES, dtype=np.uint8)
    register(native, value)
    try:
        yield Values(native, value)
    finally:
        native.unregister_buffer(value.ctypes.data)


class Shelf:
    """One side's chunks of one prompt, of which the store holds some.

    ``keys``: of all chunks, a list a group. ``kept``: one boolean array a group, the chunks that this side writes at
    all.
    """

    def __init__(self, values: Values, keys: Sequence[Sequence[str]], kept: Sequence[BoolArray]) -> None:
        self._values = values
        self._keys = keys
        self._kept = kept
        self._held = [np.zeros_like(mask) for mask in kept]

    def hold(self, present: Sequence[BoolArray]) -> None:
        """Write and remove what it takes, so that the store holds the chunks of ``present`` that are ever written."""
        for group, keys in enumerate(self._keys):
            held, wanted = self._held[group], present[group] & self._kept[group]
            self._values.put(list(compress(keys, wanted & ~held)))
            self._values.remove(list(compress(keys, held & ~wanted)))
            self._held[group] = wanted


def _batches(keys: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(keys), _BATCH):
        yield list(keys[start : start + _BATCH])


def _expect_done(answers: Sequence[int], what: str) -> None:
    if any(answers):
        wrong = next(answer for answer in answers if answer)
        raise StoreAnswerError(
            f"a native {what} of {len(answers)} keys answered {wrong} where 0 is right; "
            "is the memory for the store too small, or another program at work on it?"
        )
