"""Move KV between an engine's paged memory and a store, without a copy.

The memory is laid out as inference engines keep it: an array a layer with K and V of all blocks, and for each
request a block table a group, which says where its chunks are. It is registered once; a request then needs nothing
but its tables:

    python examples/paged_memory.py
"""

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout, PagedKVCache, SlidingWindowSpec, SparseStoreClient

BLOCK, HEADS, HEAD_DIM, LAYERS, NUM_BLOCKS = 16, 4, 64, 2, 64  # two layers in each group
PAGE = LAYERS * 2 * BLOCK * HEADS * HEAD_DIM * 2  # bytes of one chunk: K and V of the group's layers, in float16
LAYOUT = KVCacheLayout(
    [
        FullAttentionSpec(BLOCK, page_size_bytes=PAGE, name="full"),
        SlidingWindowSpec(BLOCK, 2 * BLOCK, page_size_bytes=PAGE, name="window"),
    ]
)
KV = NDArray[np.float16]
Table = list[int]


class Engine:
    """What an engine has of its cache: memory, free blocks, and values that it can compute."""

    def __init__(self) -> None:
        shape = (2, NUM_BLOCKS, BLOCK, HEADS, HEAD_DIM)
        self.layers: list[list[KV]] = [[np.zeros(shape, np.float16) for _ in range(LAYERS)] for _ in LAYOUT.groups]
        # A chunk's bytes in their order: K and V of the first layer, K and V of the second.
        self.memories = [[part for kv in group for part in (kv[0], kv[1])] for group in self.layers]
        self.cache = PagedKVCache(self.memories)
        self.free = [np.random.default_rng(group).permutation(NUM_BLOCKS).tolist() for group in range(2)]

    def take(self, group: int, count: int) -> Table:
        return [self.free[group].pop() for _ in range(count)]

    def places(self, tables: Sequence[Table]) -> Iterator[tuple[KV, KV]]:
        """Each piece of memory that the tables lead to, and what belongs there."""
        for group, table in enumerate(tables):
            for chunk, block in enumerate(table):
                for number, memory in enumerate(self.memories[group] if block >= 0 else ()):
                    dice = np.random.default_rng([group, chunk, number])
                    yield memory[block], dice.uniform(1, 2, memory[block].shape).astype(np.float16)

    def compute(self, tables: Sequence[Table]) -> None:
        for piece, values in self.places(tables):
            piece[:] = values

    def forget(self) -> None:
        """Other requests need the memory."""
        for memory in self.layers[0] + self.layers[1]:
            memory[:] = 0

    def has_just(self, tables: Sequence[Table]) -> bool:
        """Whether every value is right, and no other block was touched."""
        right = all(np.array_equal(piece, values) for piece, values in self.places(tables))
        touched = sum(np.count_nonzero(memory) for memory in self.layers[0] + self.layers[1])
        return right and touched == sum(piece.size for piece, _ in self.places(tables))


async def main() -> None:
    engine, prompt = Engine(), range(200)  # twelve whole blocks, and a part of one
    async with SparseStoreClient.local(
        LAYOUT, model_name="paged-memory", dtype="float16", segment_size="64MB", retention_interval=0
    ) as client:
        direct = await client.register(engine.cache)
        print(f"registered {len(engine.cache.spans())} ranges of memory; bytes move without a copy: {direct}")

        # A prefill. The engine has freed the window's blocks behind it, and keeps the last two.
        sequence = client.sequence(prompt)
        computed = [engine.take(0, 12), [-1] * 10 + engine.take(1, 2)]
        engine.compute(computed)
        put = await client.put(sequence, engine.cache.at(computed))
        print(f"put {put.written.chunks} chunks, {put.written.bytes} bytes, from blocks {computed}")

        # The same prompt again, when its blocks are long used for others. The window's chunks take two blocks in turns:
        # a hit needs two of them, but which ones changes if a chunk is lost and the hit gets shorter.
        engine.forget()
        hit = await client.lookup(sequence)
        restored = [engine.take(0, 12), engine.take(1, 2) * 6]
        got = await client.get(hit, into=engine.cache.at(restored))
        print(f"got {got.hit_length} tokens, {got.loaded.bytes} bytes, into blocks {restored}")

    loaded = [np.where(mask, table, -1).tolist() for mask, table in zip(hit.load_masks, restored, strict=True)]
    if not direct or got.hit_length != 192 or not engine.has_just(loaded):
        raise SystemExit(f"the memory is not what it should be: {put}, {got}")
    print("every value is right, and no other block was touched")


asyncio.run(main())
