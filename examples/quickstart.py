"""Put a prompt's KV cache into a store, and find the part of it that another prompt shares.

Starts a Mooncake of its own, which is gone afterwards, and says what was written, skipped and found:

    python examples/quickstart.py
"""

import asyncio
from hashlib import sha256

from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout, SlidingWindowSpec, SparseStoreClient

# Two groups of layers: some attend to everything, the others to the last 64 tokens.
LAYOUT = KVCacheLayout(
    [
        FullAttentionSpec(16, page_size_bytes=2048, name="full"),
        SlidingWindowSpec(16, 64, page_size_bytes=8192, name="window"),
    ]
)
SYSTEM_PROMPT = list(range(256))
ALICE = SYSTEM_PROMPT + list(range(1000, 1200))
BOB = SYSTEM_PROMPT + list(range(2000, 2150))


def computed(prompt: list[int], group: int, chunk: int) -> bytes:
    """What a model would compute for one chunk. It depends on every token up to the chunk's end."""
    spec = LAYOUT.groups[group]
    prefix = prompt[: (chunk + 1) * spec.block_size]
    return sha256(repr((group, prefix)).encode()).digest() * (LAYOUT.page_sizes[group] // 32)


async def main() -> None:
    # Retention 0: windows are kept only at the positions that a later prompt is known to resume from.
    async with SparseStoreClient.local(
        LAYOUT, model_name="quickstart", segment_size="64MB", retention_interval=0
    ) as client:
        alice = client.sequence(ALICE)
        put = await client.put(
            alice,
            lambda group, chunk: computed(ALICE, group, chunk),
            boundaries=[len(SYSTEM_PROMPT)],  # other prompts will leave this one here
        )
        print(f"Alice's prompt has {len(alice)} tokens.")
        print(f"  written: {put.written.chunks} chunks, {put.written.bytes} bytes")
        print(f"  skipped: {put.unreachable.chunks} chunks, {put.unreachable.bytes} bytes that no hit would ever need")

        bob = client.sequence(BOB)
        hit = await client.lookup(bob)
        print(f"Bob's prompt has {len(bob)} tokens; {hit.hit_length} of them were found, his system prompt.")
        for spec, mask in zip(LAYOUT.groups, hit.load_masks, strict=True):
            print(f"  {spec.name}: {mask.sum()} of {len(mask)} chunks to read")

        got = await client.get(hit)
        chunks = got.chunks
        wrong = [where for where, found in chunks.items() if found != computed(BOB, *where)]
        print(f"  read: {got.loaded.chunks} chunks, {got.loaded.bytes} bytes, {len(wrong)} of them wrong")
        if got.hit_length != len(SYSTEM_PROMPT) or wrong or put.failures or got.failures:
            raise SystemExit(f"not what it should be: {got.hit_length} tokens, wrong chunks {wrong}, {got.failures}")


asyncio.run(main())
