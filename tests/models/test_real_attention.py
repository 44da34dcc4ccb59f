"""A prompt prefilled, put to a real master, restored by another process and continued: as if there were no cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import LoopThread
from restoring_process import Job, RestoringProcess
from tiny_models import BLOCK, KINDS, Continued, assert_as_without_cache, build, go_on, tokens_of

from mooncake_sparse_client import (
    KVCacheLayout,
    LocalMooncake,
    MemoryStore,
    MooncakeStore,
    SparseStoreClient,
    chunk_name,
    load_config,
)
from mooncake_sparse_client.integrations.transformers import ChunkCapture, ModelKV, cache_argument

pytestmark = pytest.mark.models
TOKENS = tokens_of(1, 300)
NEW_TOKENS = 32
INTERVALS = (None, 0, 64)


@pytest.fixture(scope="module")
def restoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestoringProcess]:
    with RestoringProcess(tmp_path_factory.mktemp("restoring")) as process:
        yield process


@pytest.fixture(scope="module")
def store(serving_master: LocalMooncake, fixtures_loop: LoopThread) -> Iterator[MooncakeStore]:
    """The writer's way to the master, which another process's memory stands behind."""
    config = load_config("remote", master_server_address=serving_master.master_address, environ={})
    opened = fixtures_loop.run(MooncakeStore.connect(config))
    yield opened
    fixtures_loop.run(opened.aclose())


class Writer:
    """One model's prompts on their way into a store."""

    def __init__(self, kind: str, store: MooncakeStore | MemoryStore, model_name: str, interval: int | None) -> None:
        self.model = build(kind)
        self.kv = ModelKV(self.model.config, BLOCK)
        self.client = SparseStoreClient(
            store, self.kv.layout, model_name=model_name, dtype=self.kv.dtype, retention_interval=interval
        )

        #: What it has written: the sequence, and the chunks of each group.
        self.sequence = self.client.sequence(TOKENS)
        self.stored = [set(np.flatnonzero(mask).tolist()) for mask in self.client.plan_put(self.sequence).store_masks]

    def prefill(self) -> ChunkCapture:
        capture = self.kv.capture(self.client.plan_put(self.sequence))
        self.kv.prefill(self.model, TOKENS, self.kv.new_cache(), capture, step_tokens=100)
        assert not any(mask.any() for mask in capture.missing)
        return capture

    async def put(self, capture: ChunkCapture) -> None:
        put = await self.client.put(self.sequence, capture)
        assert put.written.chunks == sum(map(len, self.stored))
        assert not put.failures

    def key(self, group: int, chunk: int) -> str:
        name = chunk_name(self.kv.layout, self.sequence.block_hashes, group, chunk)
        assert name is not None
        return self.client.keys.key(group, name)


def needed(layout: KVCacheLayout, boundary: int) -> list[set[int]]:
    """By definition: the chunks of each group that hold a token which one behind the boundary attends to."""
    found = []
    for spec in layout.groups:
        first = {"full": 0, "chunked_local": boundary // max(spec.window, 1) * spec.window}.get(
            spec.kind, max(0, boundary - spec.window + 1)
        )
        found.append({token // BLOCK for token in range(first, boundary)})
    return found


def usable(layout: KVCacheLayout, stored: Sequence[set[int]]) -> list[int]:
    """The boundaries whose chunks are all stored."""
    return [
        boundary
        for boundary in range(BLOCK, len(TOKENS), BLOCK)
        if all(wanted <= there for wanted, there in zip(needed(layout, boundary), stored, strict=True))
    ]


class Stage:
    """A writer in this process, a reader in another, and a real master between them."""

    def __init__(
        self, store: MooncakeStore, master: LocalMooncake, restoring: RestoringProcess, loop: LoopThread, name: str
    ) -> None:
        self.store, self.loop = store, loop
        self._master, self._restoring, self._name = master, restoring, name

    def writer(self, kind: str, interval: int | None) -> Writer:
        """One that has prefilled the prompt and put it."""
        self._kind = kind
        writer = Writer(kind, self.store, self._name, interval)
        self.loop.run(writer.put(writer.prefill()))
        return writer

    def restored(self, prompts: Sequence[Sequence[int]]) -> list[Continued]:
        """What the other process says to each prompt."""
        job = Job(self._kind, self._master.master_address, self._name, prompts, NEW_TOKENS)
        return self._restoring.carry_out(job)


@pytest.fixture
def stage(
    store: MooncakeStore,
    serving_master: LocalMooncake,
    restoring: RestoringProcess,
    fixtures_loop: LoopThread,
    fresh: str,
) -> Stage:
    return Stage(store, serving_master, restoring, fixtures_loop, fresh)


@pytest.mark.parametrize("interval", INTERVALS, ids=lambda interval: f"retention {interval}")
@pytest.mark.parametrize("kind", KINDS)
def test_another_process_goes_on_at_every_kept_boundary(kind: str, interval: int | None, stage: Stage) -> None:
    writer = stage.writer(kind, interval)
    boundaries = usable(writer.kv.layout, writer.stored)
    sparse = any(spec.kind == "sliding_window" for spec in writer.kv.layout.groups)
    kept = {None: range(BLOCK, 300, BLOCK), 0: [288], 64: [64, 128, 192, 256, 288]}[interval if sparse else None]
    assert set(kept) <= set(boundaries)
    prompts = [[*TOKENS[:boundary], *tokens_of(boundary, 7)] for boundary in boundaries]
    for boundary, prompt, said in zip(boundaries, prompts, stage.restored(prompts), strict=True):
        assert said.hit_length == boundary
        assert len(said.greedy) == NEW_TOKENS
        assert_as_without_cache(writer.model, prompt, said)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_with_chunks_gone_the_prefix_shrinks_and_the_logits_stay_right(kind: str, seed: int, stage: Stage) -> None:
    writer = stage.writer(kind, (None, 64, 32)[seed])
    stored = writer.stored
    dice = np.random.default_rng([seed, len(kind)])
    hits = [max(usable(writer.kv.layout, stored))]
    while len(hits) < 4 and hits[-1]:
        # One of the chunks that the hit needs, rather late, so that something is left for the next round.
        needs = needed(writer.kv.layout, hits[-1])
        places = sorted((chunk, group) for group, chunks in enumerate(needs) for chunk in chunks)
        chunk, group = places[int(dice.integers(len(places) * 2 // 3, len(places)))]
        stage.loop.run(stage.store.remove([writer.key(group, chunk)], force=True))
        stored[group].discard(chunk)
        hits.append(max([0, *usable(writer.kv.layout, stored)]))
        [said] = stage.restored([TOKENS])
        assert said.hit_length == hits[-1] < hits[-2]
        assert_as_without_cache(writer.model, TOKENS, said)
    assert len(hits) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_turn_hits_the_last_boundary_of_the_first(kind: str, stage: Stage) -> None:
    """Retention 0: what the second turn finds was kept for it, by the put after the answer."""
    writer = stage.writer(kind, 0)
    cache = writer.kv.new_cache()
    writer.kv.prefill(writer.model, TOKENS[:-1], cache)
    ids = torch.tensor([TOKENS])
    text = writer.model.generate(ids, **{cache_argument(writer.model): cache}, max_new_tokens=53, do_sample=False)
    text = text[0].tolist()
    computed = cache.get_seq_length()
    assert computed == len(text) - 1  # the last token was sampled, and never fed

    sequence = writer.sequence
    sequence.extend(text[len(TOKENS) :])
    after = writer.kv.capture(writer.client.plan_put(sequence, num_tokens=computed))
    after.take(cache)
    put = stage.loop.run(writer.client.put(sequence, after, num_tokens=computed))
    assert not put.failures
    assert put.existing.chunks + put.written.chunks > 0
    assert put.unavailable.chunks == 0

    second = [*text, *tokens_of(5, 60)]
    [said] = stage.restored([second])
    assert said.hit_length == 352 == (len(text) - 1) // BLOCK * BLOCK
    assert_as_without_cache(writer.model, second, said)


class Hit:
    """What one process restored at 208 tokens, in the middle of a run of chunked attention, and goes on from."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.prompt = [*TOKENS[:208], *tokens_of(2, 20)]

    async def of(self, store: MemoryStore) -> None:
        writer = Writer(self.kind, store, "here", None)
        await writer.put(writer.prefill())
        self.model, self.kv = writer.model, writer.kv
        self.got = await writer.client.get(writer.client.sequence(self.prompt))
        assert self.got.hit_length == 208

    def check(self, *, positions_off_by: int = 0) -> None:
        said = go_on(self.model, self.kv.restore(self.got), self.prompt, 4, positions_off_by=positions_off_by)
        assert_as_without_cache(self.model, self.prompt, said)


@pytest.fixture(scope="module", params=KINDS)
def hit(request: pytest.FixtureRequest, fixtures_loop: LoopThread) -> Hit:
    found = Hit(request.param)
    fixtures_loop.run(found.of(MemoryStore()))
    found.check()
    return found


def test_one_wrong_bit_anywhere_in_a_hit_is_noticed(hit: Hit) -> None:
    """In the last token of each chunk, which every boundary that needs the chunk sees."""
    chunks = dict(hit.got.chunks)
    for (group, chunk), page in chunks.items():
        wrong = bytearray(page)
        wrong[BLOCK * 16 * 4 - 1] ^= 0x40  # the highest bit of an exponent: first layer, first head, keys
        damaged = {**chunks, (group, chunk): memoryview(wrong)}
        with pytest.raises(AssertionError):
            replaced(hit, damaged).check()


def test_a_chunk_in_the_place_of_another_is_noticed(hit: Hit) -> None:
    chunks = dict(hit.got.chunks)
    for group, chunk in chunks:
        other = (group, chunk - 1) if (group, chunk - 1) in chunks else (group, chunk + 1)
        if other in chunks:
            with pytest.raises(AssertionError):
                replaced(hit, {**chunks, (group, chunk): chunks[other]}).check()


@pytest.mark.parametrize("off_by", [-1, 1, 16])
def test_wrong_positions_are_noticed(hit: Hit, off_by: int) -> None:
    with pytest.raises(AssertionError):
        hit.check(positions_off_by=off_by)


def replaced(hit: Hit, chunks: dict[tuple[int, int], memoryview]) -> Hit:
    other = Hit(hit.kind)
    other.model, other.kv, other.got = hit.model, hit.kv, replace(hit.got, chunks=chunks)
    return other


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_comes_back_bit_for_bit(kind: str, fixtures_loop: LoopThread) -> None:
    """The same shapes are computed either way here, so that even rounded numbers must be equal."""
    model = build(kind, torch.bfloat16)
    kv = ModelKV(model.config, BLOCK, dtype=torch.bfloat16)
    assert kv.dtype == "bfloat16"
    assert kv.layout.page_sizes == tuple(
        size // 2 for size in ModelKV(model.config, BLOCK, dtype="float32").layout.page_sizes
    )
    client = SparseStoreClient(MemoryStore(), kv.layout, model_name="m", dtype=kv.dtype, retention_interval=0)
    cache = kv.new_cache()
    sequence = client.sequence(TOKENS[:288])
    capture = kv.capture(client.plan_put(sequence))
    kv.prefill(model, TOKENS[:288], cache, capture)
    fixtures_loop.run(client.put(sequence, capture))
    got = fixtures_loop.run(client.get(client.sequence(TOKENS)))
    assert got.hit_length == 288
    restored = go_on(model, kv.restore(got), TOKENS, NEW_TOKENS)
    undisturbed = go_on(model, cache, TOKENS, NEW_TOKENS)
    assert restored.greedy == undisturbed.greedy
    np.testing.assert_array_equal(restored.logits, undisturbed.logits)
