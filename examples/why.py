"""Why a hit is as long as it is, and why a put keeps what it keeps.

Two requests share a system prompt. The first one's put keeps the windows of its own end alone, so the second one finds
less than full attention could serve. It says so, and its own put keeps the windows where the two part: the third one
hits there. Runs without a Mooncake:

    python examples/why.py
"""

import asyncio
import json

from mooncake_sparse_client import MemoryStore, SparseStoreClient, layout_for

LAYOUT = layout_for("gpt-oss", scale=1e-3)
SYSTEM = list(range(1000, 1512))


def computed(group: int, chunk: int) -> bytes:
    """Where an engine would have the chunk's bytes."""
    return bytes([group + chunk % 200]) * LAYOUT.page_sizes[group]


async def main() -> None:
    async with SparseStoreClient(MemoryStore(), LAYOUT, model_name="why", retention_interval=0) as client:
        first, second, third = (client.sequence([*SYSTEM, *range(start, start + 300)]) for start in (0, 300, 600))

        plan = client.plan_put(first)  # decided without the store
        print(f"the first put:\n{plan.explain()}\n")
        await client.put(first, computed)

        hit = await client.lookup(second)
        print(f"the second lookup:\n{hit.explain()}\n")
        learned = client.plan_put(second, hit=hit).explain()
        kept, [junction] = learned.groups[1].junction.chunks, learned.junctions
        print(f"so the second put keeps {kept} window chunks in front of {junction}")
        await client.put(second, computed, hit=hit)

        found = (await client.lookup(third)).explain()
        print("the third lookup, for programs:", json.dumps(found.as_json())[:88] + " ...")
        print(f"the third lookup, in a line: {str(found).splitlines()[0]}")


asyncio.run(main())
