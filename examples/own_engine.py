"""An inference engine of one's own, with a store behind its paged memory: small, but nothing in it is a stand-in.

A decoder in NumPy answers chat requests. Its layers have full attention and a sliding window by turns, and the K and V
of either kind lie in a pool of blocks. ``Engine`` is what an engine has anyway: block tables, prefill in steps, greedy
decoding, and window blocks that are freed when they fall behind. ``StoringEngine`` adds the store: it restores what it
finds, computes the rest, and holds a window block until the put that wants it is over.

Blocks that are free are filled with NaN, and each answer must have the tokens and the logits that the same engine gives
without a store:

    python examples/own_engine.py
"""

import asyncio
import contextlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mooncake_sparse_client import (
    FullAttentionSpec,
    KVCacheLayout,
    PagedKVCache,
    PrefixHit,
    SlidingWindowSpec,
    SparseStoreClient,
    TokenSequence,
    load_mask,
)

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, DIM = 512, 64, 4, 4, 2, 16
TOKEN_BYTES = LAYERS // 2 * 2 * KV_HEADS * DIM * 4  # one token in one group: K and V of two layers, in float32
FULL = FullAttentionSpec(32, page_size_bytes=32 * TOKEN_BYTES)  # layers 0 and 2
WINDOW = SlidingWindowSpec(8, sliding_window=20, page_size_bytes=8 * TOKEN_BYTES)  # layers 1 and 3
LAYOUT = KVCacheLayout([FULL, WINDOW])
NUM_BLOCKS = (32, 36)  # in each group's pool: of the window, fewer than a long request has chunks
STEP, ANSWER = 64, 40  # tokens: what a prefill computes at a time, and how long an answer is
Floats = NDArray[np.float32]


def norm(x: Floats) -> Floats:
    scaled: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return scaled


def rotate(x: Floats, positions: NDArray[np.int64]) -> Floats:
    """Rotary embedding: pairs of numbers of each head are turned by angles that grow with the position."""
    angles = np.outer(positions, 10_000.0 ** -np.linspace(0, 1, DIM // 2, endpoint=False))
    turned: Floats = (x.view(np.complex64) * np.exp(1j * angles).astype(np.complex64)[:, None]).view(np.float32)
    return turned


def attend(q: Floats, k: Floats, v: Floats, hidden: NDArray[np.bool_]) -> Floats:
    """Each KV head serves several query heads. ``hidden[t, s]``: query ``t`` does not see key ``s``."""
    scores = np.einsum("tgqd,sgd->gqts", q.reshape(len(q), KV_HEADS, -1, DIM), k) / np.float32(DIM**0.5)
    scores[..., hidden] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    seen: Floats = np.einsum("gqts,sgd->tgqd", weights, v)
    return seen.reshape(len(q), -1)


class Model:
    """A decoder with random weights from a fixed seed."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)

        def weights(rows: int, columns: int) -> Floats:
            return draw.standard_normal((rows, columns), np.float32) / np.float32(rows**0.5)

        self.embedding = draw.standard_normal((VOCABULARY, WIDTH), np.float32)
        self.qkv = [2 * weights(WIDTH, (HEADS + 2 * KV_HEADS) * DIM) for _ in range(LAYERS)]
        self.out = [weights(HEADS * DIM, WIDTH) for _ in range(LAYERS)]
        self.mlp = [(weights(WIDTH, 4 * WIDTH), weights(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
        self.head = weights(WIDTH, VOCABULARY)

    def forward(self, tokens: list[int], start: int, memories: list[Floats], tables: list[list[int]]) -> Floats:
        """Compute ``tokens`` from position ``start`` on: their K and V go to the blocks that the tables name, those
        of the tokens before are read there. Returns the logits behind the last token."""
        end = len(tokens)
        positions = np.arange(start, end)
        x = self.embedding[tokens[start:]]
        for layer in range(LAYERS):
            group, index = layer % 2, layer // 2
            spec, kv, table = LAYOUT.groups[group], memories[group][:, index], np.array(tables[group])
            heads = (norm(x) @ self.qkv[layer]).reshape(end - start, -1, DIM)
            q, k, v = np.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
            blocks, slots = table[positions // spec.block_size], positions % spec.block_size
            kv[blocks, 0, slots], kv[blocks, 1, slots] = rotate(k, positions), v
            reach = spec.window or end  # a query sees so many tokens, itself included
            first = max(0, start + 1 - reach) // spec.block_size
            seen = np.arange(first * spec.block_size, end)
            k, v = (kv[table[first:], part].reshape(-1, KV_HEADS, DIM)[: len(seen)] for part in (0, 1))
            hidden = (seen > positions[:, None]) | (seen <= positions[:, None] - reach)
            x = x + attend(rotate(q, positions), k, v, hidden) @ self.out[layer]
            up, down = self.mlp[layer]
            x = x + np.maximum(norm(x) @ up, 0) @ down
        logits: Floats = norm(x[-1]) @ self.head
        return logits


class Pool:
    """The blocks of one layer group. A block holds K and V of all the group's layers, so that a chunk is one piece."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.kv = np.full((num_blocks, LAYERS // 2, 2, block_size, KV_HEADS, DIM), np.nan, np.float32)
        self.free = list(range(num_blocks))

    def take(self, count: int) -> list[int]:
        if count > len(self.free):
            raise MemoryError(f"{count} blocks wanted, {len(self.free)} are free: let fewer requests run at a time")
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, blocks: set[int]) -> None:
        self.kv[list(blocks)] = np.nan  # nothing right comes out for whoever still uses them
        self.free += blocks


@dataclass(slots=True)
class Request:
    tokens: list[int]
    tables: list[list[int]] = field(default_factory=lambda: [[], []])  # for each group each chunk's block, -1 for none
    computed: int = 0  # leading tokens whose K and V exist
    reused: int = 0  # of them, what was restored
    logits: list[Floats] = field(default_factory=list)  # behind the prompt, and behind each token of the answer
    sequence: TokenSequence | None = None  # for the store, as is what follows
    hit: PrefixHit | None = None
    stored: int = 0  # leading tokens that no put has to look at any more

    def sample(self, logits: Floats) -> None:
        """Greedily. The token has no K and V until it is computed as well."""
        self.logits.append(logits)
        self.tokens.append(int(logits.argmax()))


class Engine:
    """Answers requests. A store comes in at ``restore``, ``store`` and ``awaiting_put``, which do nothing here."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.pools = [Pool(spec.block_size, count) for spec, count in zip(LAYOUT.groups, NUM_BLOCKS, strict=True)]

    async def restore(self, request: Request) -> None:
        """Fill blocks with what need not be computed."""

    async def store(self, request: Request, start: int) -> None:
        """Keep what is computed from token ``start`` on."""

    def awaiting_put(self, request: Request, group: int) -> set[int]:
        """The chunks whose blocks must not be freed yet."""
        return set()

    async def answer(self, prompt: list[int]) -> Request:
        request = Request(list(prompt))
        try:
            await self.restore(request)
            request.reused = request.computed
            while request.computed < len(prompt):
                async with asyncio.TaskGroup() as beside:  # what was computed is stored beside the next step
                    beside.create_task(self.store(request, request.stored))
                    step = beside.create_task(self._compute(request, min(request.computed + STEP, len(prompt))))
            await self.store(request, request.stored)
            request.sample(step.result())
            while len(request.logits) < ANSWER:
                request.sample(await self._compute(request, len(request.tokens)))
            await self.store(request, 0)  # a longer text, with boundaries of its own: from the start again
            return request
        finally:
            for pool, table in zip(self.pools, request.tables, strict=True):
                pool.give_back({block for block in table if block >= 0})

    async def _compute(self, request: Request, end: int) -> Floats:
        for spec, pool, table in zip(LAYOUT.groups, self.pools, request.tables, strict=True):
            table += pool.take(-(-end // spec.block_size) - len(table))
        tokens, memories = request.tokens[:end], [pool.kv for pool in self.pools]
        forward = asyncio.to_thread(self.model.forward, tokens, request.computed, memories, request.tables)
        step = asyncio.create_task(forward)
        try:
            logits = await asyncio.shield(step)
        finally:
            while not step.done():  # a thread cannot be cancelled: no block is freed while it is at work
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([step])
        request.computed = end
        self._free_behind(request)
        return logits

    def _free_behind(self, request: Request) -> None:
        """Free the window blocks that neither the next token nor a put needs any more."""
        for group, (spec, table) in enumerate(zip(LAYOUT.groups, request.tables, strict=True)):
            behind = max(0, request.computed + 1 - spec.window) // spec.block_size if spec.window else 0
            held = self.awaiting_put(request, group)
            done = [chunk for chunk in range(behind) if table[chunk] >= 0 and chunk not in held]
            self.pools[group].give_back({table[chunk] for chunk in done})
            for chunk in done:
                table[chunk] = -1


class StoringEngine(Engine):
    """The same, and all that a store takes."""

    def __init__(self, model: Model, client: SparseStoreClient) -> None:
        super().__init__(model)
        self.client = client
        self.cache = PagedKVCache([[pool.kv] for pool in self.pools])

    async def restore(self, request: Request) -> None:
        request.sequence = self.client.sequence(request.tokens)
        request.hit = await self.client.lookup(request.sequence)
        for pool, table, mask in zip(self.pools, request.tables, request.hit.load_masks, strict=True):
            # With full attention every chunk has a block of its own. The chunks of a window take a few in turns, so
            # that a hit which gets shorter, since a chunk is gone, has room for the window that it needs instead.
            blocks = pool.take(int(mask.sum()))
            table[:] = [blocks[chunk % len(blocks)] for chunk in range(len(mask))]
        got = await self.client.get(request.hit, into=self.cache.at(request.tables))
        request.computed = request.stored = got.hit_length  # what has really arrived
        for pool, table, mask in zip(self.pools, request.tables, load_mask(LAYOUT, got.hit_length), strict=True):
            kept = [block if needed else -1 for block, needed in zip(table, mask, strict=False)]
            pool.give_back(set(table) - set(kept))
            table[:] = kept
        if got.hit_length < request.hit.hit_length:
            request.hit = None  # what it saw is gone in part, and more may be: the puts ask for all of it

    async def store(self, request: Request, start: int) -> None:
        sequence, source = self._sequence(request), self.cache.at(request.tables)
        # What the hit saw is not asked again, and the junction that it showed is kept.
        put = await self.client.put(sequence, source, hit=request.hit, num_tokens=request.computed, start_token=start)
        request.stored = put.end_token  # not before the put is over

    def awaiting_put(self, request: Request, group: int) -> set[int]:
        plan = self.client.plan_put(self._sequence(request), hit=request.hit)
        wanted = np.flatnonzero(plan.store_masks[group])
        return set(wanted[wanted * LAYOUT.groups[group].block_size >= request.stored].tolist())

    def _sequence(self, request: Request) -> TokenSequence:
        assert request.sequence is not None  # noqa: S101 - restore has made it
        request.sequence.extend(request.tokens[len(request.sequence) :])
        return request.sequence


async def main() -> None:
    draw = np.random.default_rng(1)
    system, ann, ben, cem, more = ([int(n) for n in draw.integers(0, VOCABULARY, m)] for m in (200, 75, 50, 90, 30))
    model, wrong = Model(), list[str]()

    async with SparseStoreClient.local(
        LAYOUT, model_name="own-engine", dtype="float32", retention_interval=0, when_down="miss", segment_size="64MB"
    ) as client:
        engine = StoringEngine(model, client)
        await client.register(engine.cache)  # once, for all requests

        async def ask(name: str, prompt: list[int], expected: int) -> list[int]:
            done, scratch = await engine.answer(prompt), await Engine(model).answer(prompt)
            print(f"{name}: {done.reused} of {len(prompt)} tokens were in the store")
            if done.tokens != scratch.tokens or not np.allclose(done.logits, scratch.logits, rtol=0, atol=1e-4):
                wrong.append(f"{name}'s answer is not that of the engine without a store")
            if done.reused != expected:
                wrong.append(f"for {name} {expected} tokens should have been in the store")
            return done.tokens

        text = await ask("Ann", system + ann, 0)
        await ask("Ben", system + ben, 0)  # his lookup shows where prompts part, and his put keeps the window there
        await asyncio.gather(
            ask("Cem", system + cem, 192),  # the last boundary of the system prompt
            ask("Ann again", text + more, 288),  # the last boundary of her first turn, answer and all
        )
    if any(len(pool.free) < len(pool.kv) for pool in engine.pools):
        wrong.append("some blocks were not given back")
    if wrong:
        raise SystemExit("; ".join(wrong))
    print(f"every answer is that of the engine without a store, to the last of {ANSWER} tokens")


asyncio.run(main())
