"""Move KV between a store and NumPy arrays of your own, through a callable that hands out views of them.

The arrays are a paged cache, as engines have: K and V of one block of tokens lie apart, and a table says
which block holds which chunk. A chunk is then two buffers, and a get fills memory that exists already. Any memory
will do, and nothing is registered: the client copies the bytes once on their way. paged_memory.py does without:

    python examples/own_arrays.py
"""

import asyncio

import numpy as np
from numpy.typing import NDArray

from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout, SparseStoreClient

BLOCK, HEADS, HEAD_DIM, NUM_BLOCKS = 32, 4, 64, 64
Cache = NDArray[np.float16]


class PagedCache:
    """K and V, one row a block, and the blocks that one sequence occupies."""

    def __init__(self, block_table: list[int]) -> None:
        self.k: Cache = np.zeros((NUM_BLOCKS, BLOCK, HEADS, HEAD_DIM), dtype=np.float16)
        self.v: Cache = np.zeros_like(self.k)
        self.block_table = block_table

    def buffers(self, group: int, chunk: int) -> list[Cache]:
        """Views of one chunk, K first. Serves as a source and as a sink; there is one group, 0."""
        block = self.block_table[chunk]
        return [self.k[block], self.v[block]]


LAYOUT = KVCacheLayout([FullAttentionSpec(BLOCK, page_size_bytes=2 * BLOCK * HEADS * HEAD_DIM * 2)])


async def main() -> None:
    tokens = np.arange(10 * BLOCK + 7, dtype=np.int64)  # ten whole blocks, and a part of one
    draw = np.random.default_rng(0)

    writer = PagedCache(block_table=[5, 40, 2, 63, 17, 8, 30, 31, 12, 50])
    writer.k[:] = draw.random(writer.k.shape, dtype=np.float32)
    writer.v[:] = draw.random(writer.v.shape, dtype=np.float32)
    reader = PagedCache(block_table=list(range(20, 30)))  # another process would have its blocks elsewhere

    async with SparseStoreClient.local(LAYOUT, model_name="own-arrays", dtype="float16", segment_size="64MB") as client:
        sequence = client.sequence(tokens)
        put = await client.put(sequence, writer.buffers)
        print(f"put {put.written.chunks} chunks, {put.written.bytes} bytes, from blocks {writer.block_table}")

        got = await client.get(sequence, into=reader.buffers)
        print(f"got {got.hit_length} tokens, {got.loaded.bytes} bytes, into blocks {reader.block_table}")

    restored = got.hit_length // BLOCK
    same = all(
        np.array_equal(mine, theirs)
        for chunk in range(restored)
        for mine, theirs in zip(reader.buffers(0, chunk), writer.buffers(0, chunk), strict=True)
    )
    untouched = np.setdiff1d(np.arange(NUM_BLOCKS), reader.block_table)
    if restored != 10 or not same or reader.k[untouched].any() or reader.v[untouched].any():
        raise SystemExit(f"the arrays are not what they should be: {got}")
    print("every value is right, and no other block was touched")


asyncio.run(main())
