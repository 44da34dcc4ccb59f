"""A store that outlives its clients: one process writes, ends its client, and another process finds the data.

The memory belongs to a third process, the owner, which ``LocalMooncake`` starts beside the master. The second
process is this same script with the master's address as its argument:

    python examples/local_master.py
"""

import asyncio
import sys
from hashlib import sha256

from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout, LocalMooncake, SparseStoreClient

LAYOUT = KVCacheLayout([FullAttentionSpec(64, page_size_bytes=64 * 1024)])
PROMPT = list(range(1000))


def computed(group: int, chunk: int) -> bytes:
    """What a model would compute for one chunk of the prompt."""
    return sha256(repr((group, PROMPT[: (chunk + 1) * 64])).encode()).digest() * 2048


def connected(address: str) -> SparseStoreClient:
    """Both processes must give the same layout, model name, dtype and revision, or they have two caches."""
    return SparseStoreClient.connect(LAYOUT, model_name="shared", mode="remote", master_server_address=address)


async def write() -> None:
    async with await LocalMooncake.start(memory=256 << 20) as local:
        print(f"a master serves at {local.master_address}, an owner process holds 256 MiB")
        async with connected(local.master_address) as client:
            put = await client.put(client.sequence(PROMPT), computed, confirm=True)
        print(f"the first process wrote {put.written.chunks} chunks and has closed its client", flush=True)

        second = await asyncio.create_subprocess_exec(sys.executable, __file__, local.master_address)
        if await second.wait() != 0:
            raise SystemExit("the second process did not find what the first one wrote")
    print("master and owner are stopped, and the data is gone with them")


async def read(address: str) -> None:
    async with connected(address) as client:
        got = await client.get(client.sequence(PROMPT))
    chunks = got.chunks
    wrong = [where for where, found in chunks.items() if found != computed(*where)]
    print(f"the second process found {got.hit_length} of {len(PROMPT)} tokens, {len(wrong)} chunks wrong", flush=True)
    if wrong or got.hit_length != LAYOUT.hit_cap(len(PROMPT)):
        raise SystemExit(1)


async def main() -> None:
    if len(sys.argv) > 1:
        await read(sys.argv[1])
    else:
        await write()


asyncio.run(main())
