"""Shared mode: applications on one host use an owner process's memory, and their data outlives them.

``LocalMooncake`` starts the owner and a master; on a serving host both run already. Two applications then come one
after the other, each a process of its own: this same script with the owner's address as its argument. Values move
between their memory and the owner's through shared memory, straight from and to what ``client.allocate`` gave:

    python examples/shared_memory.py
"""

import asyncio
import sys
from hashlib import shake_128

import numpy as np
from numpy.typing import NDArray

from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout, LocalMooncake, PagedKVCache, SparseStoreClient

BLOCK, PAGE, NUM_BLOCKS = 64, 256 * 1024, 32
LAYOUT = KVCacheLayout([FullAttentionSpec(BLOCK, page_size_bytes=PAGE)])
PROMPT = range(1000)  # fifteen whole blocks
Blocks = NDArray[np.uint8]


def computed(chunk: int) -> Blocks:
    """What a model would compute for one chunk of the prompt."""
    return np.frombuffer(shake_128(repr(PROMPT[: (chunk + 1) * BLOCK]).encode()).digest(PAGE), dtype=np.uint8)


def connected(owner: str) -> SparseStoreClient:
    # The pool is what the client stages values in and what it allocates; all of it is taken at once.
    return SparseStoreClient.connect(
        LAYOUT, model_name="one-host", mode="shared", owner_address=owner, pool_size="96MB"
    )


async def paged(client: SparseStoreClient) -> tuple[PagedKVCache, Blocks]:
    """Memory of the client's pool, as the blocks of a cache."""
    blocks = client.allocate(NUM_BLOCKS * PAGE).array.reshape(NUM_BLOCKS, PAGE)
    cache = PagedKVCache([[blocks]])
    if not await client.register(cache):
        raise SystemExit("values would be copied on their way")
    return cache, blocks


async def write(owner: str) -> None:
    async with connected(owner) as client:
        cache, blocks = await paged(client)
        table = list(range(15))
        for chunk, block in enumerate(table):
            blocks[block] = computed(chunk)
        put = await client.put(client.sequence(PROMPT), cache.at([table]), confirm=True)
    print(f"the first application wrote {put.written.chunks} chunks, {put.written.bytes} bytes", flush=True)


async def read(owner: str) -> None:
    async with connected(owner) as client:
        cache, blocks = await paged(client)
        table = list(range(31, 16, -1))
        got = await client.get(client.sequence(PROMPT), into=cache.at([table]))
    # The memory is still there: it goes when nothing refers to it any more.
    wrong = sum(not np.array_equal(blocks[block], computed(chunk)) for chunk, block in enumerate(table))
    print(f"the second application found {got.hit_length} of {len(PROMPT)} tokens, {wrong} chunks wrong", flush=True)
    if wrong or got.hit_length != LAYOUT.hit_cap(len(PROMPT)):
        raise SystemExit(1)


async def serve() -> None:
    async with await LocalMooncake.start(memory="64MB") as local:
        print(f"an owner process serves at {local.owner_address}, with 64 MiB of memory", flush=True)
        for part in ("write", "read"):
            application = await asyncio.create_subprocess_exec(sys.executable, __file__, part, str(local.owner_address))
            if await application.wait() != 0:
                raise SystemExit(f"the application that was to {part} has failed")
            print("  its process has ended", flush=True)
    print("the owner has stopped, and the data is gone with it")


async def main() -> None:
    if len(sys.argv) > 1:
        await {"write": write, "read": read}[sys.argv[1]](sys.argv[2])
    else:
        await serve()


asyncio.run(main())
