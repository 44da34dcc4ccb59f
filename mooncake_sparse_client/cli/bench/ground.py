"""Where a measurement takes place: a Mooncake of its own, a store of one mode on it, and memory to move from and to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from ...client import SparseStoreClient
from ...config import Limits, MooncakeSettings, load_config
from ...config_values import Mode
from ...core.framing import ValueFormatName
from ...core.layout import FullAttentionSpec, KVCacheLayout
from ...errors import StoreAnswerError
from ...settings import open_connected
from ...stores.base import Store
from ...stores.local import LocalMooncake
from .rivals import PlainCalls

BLOCK_TOKENS: Final = 16
#: Bytes and values of one batch, on both sides.
BATCH_BYTES: Final = 32 << 20
BATCH_CHUNKS: Final = 512
#: Keys of one existence question, on both sides.
BATCH_KEYS: Final = 8192
#: Room for the headers of framed values: without it, batches of ours would hold one value less.
_HEADER_ROOM: Final = 1 << 20
SAME_BATCHES: Final = Limits(
    max_batch_bytes=BATCH_BYTES + _HEADER_ROOM,
    max_batch_chunks=BATCH_CHUNKS,
    max_batch_keys=BATCH_KEYS,
    staging_bytes=96 << 20,
    max_bytes_in_flight=128 << 20,
)
_TIMEOUT: Final = 120.0


@dataclass(frozen=True, slots=True)
class Memory:
    """What values are written from, and what they are read into: as many bytes each."""

    source: NDArray[np.uint8]
    sink: NDArray[np.uint8]

    def touch(self) -> Memory:
        """Fill both, so that no page is touched for the first time while somebody is measured."""
        self.source[:] = np.random.default_rng(0).integers(0, 256, self.source.nbytes, dtype=np.uint8)
        self.sink.fill(0)
        return self

    def part(self, nbytes: int) -> Memory:
        """The first ``nbytes`` of both."""
        return Memory(self.source[:nbytes], self.sink[:nbytes])

    def check(self) -> None:
        """Whether the sink holds what the source does; empties it, so that the next reader is checked too.

        Raises ``StoreAnswerError``.
        """
        if not np.array_equal(self.source, self.sink):
            raise StoreAnswerError("what was read is not what was written")
        self.sink.fill(0)


def heap_memory(nbytes: int) -> Memory:
    return Memory(np.empty(nbytes, dtype=np.uint8), np.empty(nbytes, dtype=np.uint8))


@dataclass(frozen=True, slots=True)
class Ground:
    """A store, and the native store inside of it."""

    mode: Mode
    store: Store
    #: The rival's calls go through the very native client that ours go through: the same connection, segment and
    #: registered memory. A second one would have a segment of its own, and the values of both sides would be
    #: spread over the two.
    native: PlainCalls

    def client(
        self, value_format: ValueFormatName, chunk_bytes: int, limits: Limits = SAME_BATCHES
    ) -> SparseStoreClient:
        """A client of one group of full attention, whose chunks no other client here shares."""
        return SparseStoreClient(
            self.store,
            KVCacheLayout([FullAttentionSpec(BLOCK_TOKENS, page_size_bytes=chunk_bytes)]),
            model_name=f"bench-{value_format}-{chunk_bytes}",
            value_format=value_format,
            retention_interval=None,
            limits=limits,
            timeout=_TIMEOUT,
        )

    def memory(self, nbytes: int) -> Memory:
        """Memory that values move to and from without a copy, which in shared mode is the store's to give."""
        if self.mode != "shared":
            return heap_memory(nbytes).touch()
        allocate = self.store.memory.allocate  # what a client's own ``allocate`` calls
        return Memory(allocate(nbytes).array, allocate(nbytes).array).touch()


@asynccontextmanager
async def open_ground(mode: Mode, local: LocalMooncake, *, segment: int = 0, pool: int) -> AsyncIterator[Ground]:
    """A store on ``local``.

    ``segment``: bytes that this process lends, when it is embedded. ``pool``: bytes for the clients' staging and, in
    shared mode, for ``memory``.
    """
    settings = MooncakeSettings(pool_size=pool)
    if mode == "shared":
        settings["owner_address"] = local.owner_address or ""
    else:
        settings |= {"master_server_address": local.master_address, "local_hostname": "127.0.0.1"}
    if mode == "embedded":
        settings["global_segment_size"] = segment
    async with AsyncExitStack() as stack:
        store = await open_connected(stack, load_config(mode, environ={}, **settings), _TIMEOUT)
        yield Ground(mode, store, cast("PlainCalls", store._native))  # type: ignore[attr-defined]
