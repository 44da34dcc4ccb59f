"""Where the calls go in a serving loop: look up and get before the prefill, put in the background after it.

Two workers serve a queue of chat requests that share system prompts. The "model" is a stand-in that goes on from
the last restored chunk, and every chunk, restored or computed, is compared with a computation from scratch. Then
each chat asks its second question:

    python examples/serving_loop.py
"""

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake_sparse_client import (
    FullAttentionSpec,
    KVCacheLayout,
    PrefixHit,
    SlidingWindowSpec,
    SparseStoreClient,
    SparseStoreError,
    TokenSequence,
)

BLOCK, WORDS = 32, 256
LAYOUT = KVCacheLayout(
    [
        FullAttentionSpec(BLOCK, page_size_bytes=8 * WORDS, name="full"),
        SlidingWindowSpec(BLOCK, 128, page_size_bytes=8 * WORDS, name="window"),
    ]
)
MIX = np.uint64(0x9E3779B97F4A7C15)
RAMP = np.arange(WORDS, dtype=np.uint64) * MIX
Chunks = dict[tuple[int, int], NDArray[np.uint64]]


def prefill(tokens: list[int], start: int, restored: Chunks) -> Chunks:
    """The chunks from token ``start`` on. Each depends on the one before it, as real KV does."""
    computed: Chunks = {}
    first = start // BLOCK
    state = restored[0, first - 1][-1] if first else MIX
    for chunk in range(first, len(tokens) // BLOCK):
        words = np.resize(np.array(tokens[chunk * BLOCK : (chunk + 1) * BLOCK], dtype=np.uint64), WORDS)
        words = ((words ^ RAMP) ^ state) * MIX
        computed[0, chunk] = words ^ (words >> np.uint64(31))
        computed[1, chunk] = ~computed[0, chunk]
        state = computed[0, chunk][-1]
    return computed


@dataclass
class Chat:
    """One user's talk: a system prompt that others have too, then questions and answers."""

    name: str
    tokens: list[int]


class Server:
    """Serves chats through one client, and owns the puts that go on after an answer was given."""

    def __init__(self, client: SparseStoreClient) -> None:
        self.client = client
        self.queue: asyncio.Queue[Chat] = asyncio.Queue()
        self.tokens = self.hit_tokens = self.restored_bytes = self.wrong_bytes = self.troubles = 0
        self._puts: set[asyncio.Task[None]] = set()

    async def worker(self) -> None:
        while True:
            chat = await self.queue.get()
            await self._serve(chat)
            self.queue.task_done()

    async def drain(self) -> None:
        """Wait for the puts that are still under way."""
        while self._puts:
            await asyncio.wait(self._puts)

    async def _serve(self, chat: Chat) -> None:
        sequence = self.client.sequence(chat.tokens)
        hit = await self.client.lookup(sequence)
        got = await self.client.get(hit)
        restored = {where: np.frombuffer(found, dtype=np.uint64) for where, found in got.chunks.items()}
        cache = restored | await asyncio.to_thread(prefill, chat.tokens, got.hit_length, restored)

        task = asyncio.create_task(self._keep(sequence, cache, hit))
        self._puts.add(task)  # a task that nobody holds may be collected before it is done
        task.add_done_callback(self._puts.discard)
        await asyncio.sleep(0.05)  # the answer is generated meanwhile

        scratch = prefill(chat.tokens, 0, {})
        self.wrong_bytes += sum(words.nbytes for at, words in cache.items() if not np.array_equal(words, scratch[at]))
        self.tokens += len(sequence)
        self.hit_tokens += got.hit_length
        self.restored_bytes += got.loaded.bytes
        self.troubles += len(got.failures)
        print(f"  {chat.name}: {got.hit_length} of {len(sequence)} tokens were in the store")

    async def _keep(self, sequence: TokenSequence, cache: Chunks, hit: PrefixHit) -> None:
        """Put what is new. With the request's own hit, the place where prompts part is learned and kept."""
        try:
            put = await self.client.put(sequence, cache, hit=hit)
            self.troubles += len(put.failures)
        except SparseStoreError as error:  # a cache that cannot be written is no reason to stop serving
            self.troubles += 1
            print(f"  a put failed: {error.kind}: {error}")


async def main() -> None:
    draw = np.random.default_rng(7)

    def new_tokens(count: int) -> list[int]:
        return [int(token) for token in draw.integers(0, 100_000, count)]

    system_prompts = [new_tokens(330), new_tokens(500)]
    chats = [Chat(f"chat {number}", system_prompts[number % 2] + new_tokens(90)) for number in range(6)]

    async with SparseStoreClient.local(
        LAYOUT, model_name="serving-loop", segment_size="64MB", retention_interval=0
    ) as client:
        server = Server(client)
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(server.worker()) for _ in range(2)]
            for turn in (1, 2):
                before = server.hit_tokens
                print(f"turn {turn}:")
                for chat in chats:
                    server.queue.put_nowait(chat)
                await server.queue.join()
                await server.drain()  # while the users read and type, in a real service
                turn_hits = server.hit_tokens - before
                for chat in chats:
                    chat.tokens += new_tokens(150)  # the answer, and the next question
            for worker in workers:
                worker.cancel()

    share = server.hit_tokens / server.tokens
    print(f"hits: {server.hit_tokens} of {server.tokens} tokens ({share:.0%}), {turn_hits} of them in turn 2")
    print(f"{server.restored_bytes} bytes restored, {server.wrong_bytes} wrong, {server.troubles} failures")
    if server.wrong_bytes or server.troubles or turn_hits == 0:
        raise SystemExit("the cache did not do what it should")


asyncio.run(main())
