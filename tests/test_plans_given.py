"""Carrying out a plan that was made before: ``put``, ``exists`` and ``verify`` with ``plan=``."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_sparse_client import (
    ChunkFailure,
    FullAttentionSpec,
    KeySchema,
    KVCacheLayout,
    LocalMooncake,
    MemoryStore,
    PutPlan,
    SlidingWindowSpec,
    SparseStoreClient,
    Tally,
    VerifyResult,
)
from mooncake_sparse_client.core.plans import plan_stretch
from mooncake_sparse_client.errors import InvalidRequestError, StoreUnavailableError
from mooncake_sparse_client.stores.base import Failure as StoreFailure
from mooncake_sparse_client.stores.base import GetItem
from mooncake_sparse_client.stores.wrapping import WrappedStore

LAYOUT = KVCacheLayout([FullAttentionSpec(32, page_size_bytes=64), SlidingWindowSpec(8, 8, page_size_bytes=32)])


def page(group: int, chunk: int) -> bytes:
    return bytes([16 * group + chunk % 16]) * LAYOUT.page_sizes[group]


def client_of(store: MemoryStore | WrappedStore, **settings: object) -> SparseStoreClient:
    return SparseStoreClient(store, LAYOUT, model_name="demo", **{"retention_interval": 0, **settings})  # type: ignore[arg-type]


def key_of(client: SparseStoreClient, tokens: int, group: int, chunk: int) -> str:
    from mooncake_sparse_client.core.keys import KeyBuilder

    hashes = client.sequence(range(tokens)).block_hashes
    return KeyBuilder(client.layout, client.keys).own_keys(hashes, group, [chunk])[0]


async def test_a_put_carries_its_plan_out() -> None:
    async with client_of(MemoryStore()) as client:
        sequence = client.sequence(range(100))
        planned = client.plan_put(sequence, boundaries=[40], num_tokens=70)
        put = await client.put(sequence, page, plan=planned)
        assert put.end_token == 64
        assert put.written == Tally(3, 2 * 64 + 32)
        assert put.unreachable == Tally(7, 7 * 32)
        assert [np.flatnonzero(mask).tolist() for mask in await client.exists(sequence, plan=planned)] == [[0, 1], [3]]


async def test_a_plan_is_for_the_part_that_it_names() -> None:
    """As for a stretch that several prompts share, whatever this client's own retention would keep."""
    async with client_of(MemoryStore(), retention_interval=None) as client:
        sequence = client.sequence(range(128))
        plan = plan_stretch(client.layout, 32, 96, replay_boundaries=[64], junctions=[128], retention_interval=0)
        put = await client.put(sequence, page, plan=plan)
        assert (put.end_token, put.written) == (96, Tally(3, 2 * 64 + 32))
        present = await client.exists(sequence, all_chunks=True)
        assert [np.flatnonzero(mask).tolist() for mask in present] == [[1, 2], [7]]
        # Arrays like the plan's masks.
        assert [len(mask) for mask in await client.exists(sequence, plan=plan)] == [3, 12]


async def test_a_plan_brings_its_hit_along() -> None:
    class Counting(WrappedStore):
        asked = 0

        async def exists(self, keys: object) -> list[bool]:
            self.asked += len(keys)  # type: ignore[arg-type]
            return await super().exists(keys)  # type: ignore[arg-type]

    store = Counting(MemoryStore())
    async with client_of(store) as client:
        await client.put(client.sequence(range(70)), page)
        sequence = client.sequence(range(130))
        hit = await client.lookup(sequence)
        plan = client.plan_put(sequence, hit=hit)
        assert plan.hit is hit
        store.asked = 0
        put = await client.put(sequence, page, plan=plan)
        assert (put.existing.chunks, put.written.chunks, store.asked) == (2, 3, 3)


async def test_a_plan_that_is_not_the_sequences_own_is_refused() -> None:
    async with client_of(MemoryStore()) as client, client_of(MemoryStore(), revision="2") as stranger:
        sequence = client.sequence(range(100))
        plan = client.plan_put(sequence)
        other = client.sequence([7] * 100)
        foreign = stranger.plan_put(
            stranger.sequence(range(100)), hit=await stranger.lookup(stranger.sequence(range(100)))
        )
        wider = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=64)])
        wrong: list[tuple[object, object, str]] = [
            (client.sequence(range(60)), plan, "plan is of 96 tokens, and this sequence has 60"),
            (sequence, plan_stretch(wider, 0, 32), "another layout"),
            (sequence, foreign, "another layout, dtype, revision|hit is of the cache"),
            (other, client.plan_put(sequence, hit=await client.lookup(sequence)), "not of this sequence"),
            (sequence, plan.store_masks, "must be the PutPlan"),
        ]
        for given, bad, message in wrong:
            for call in (
                lambda given=given, bad=bad: client.put(given, page, plan=bad),
                lambda given=given, bad=bad: client.exists(given, plan=bad),
                lambda given=given, bad=bad: client.verify(given, plan=bad),
            ):
                with pytest.raises(InvalidRequestError, match=message):
                    await call()


async def test_a_plan_that_trusts_a_lookup_of_other_ranks_is_refused() -> None:
    """What is stored under their keys is not under this client's."""
    store = MemoryStore()

    def of_rank(number: int) -> SparseStoreClient:
        return client_of(store, keys=KeySchema("demo", tp_rank=number))

    async with of_rank(0) as first, of_rank(1) as second:
        sequence = first.sequence(range(100))
        nothing = first.plan_put(sequence, hit=await first.lookup(sequence))
        await first.put(sequence, page)
        hit = await first.lookup(sequence)
        trusting = first.plan_put(sequence, hit=hit)
        for call in (
            lambda: second.put(sequence, page, plan=trusting),
            lambda: second.exists(sequence, plan=trusting),
            lambda: second.verify(sequence, plan=trusting),
        ):
            with pytest.raises(InvalidRequestError, match="trusts a lookup of the ranks"):
                await call()
        assert (await first.put(sequence, page, plan=trusting)).written == Tally()
        # One that believes nothing to be stored may be carried out by any rank.
        assert (await second.exists(sequence, plan=nothing))[0].tolist() == [False] * 3
        own = second.plan_put(sequence, hit=hit)
        assert (await second.put(sequence, page, plan=own)).written == Tally(4, 3 * 64 + 32)


async def test_a_question_is_for_a_plan_or_for_all_chunks() -> None:
    async with client_of(MemoryStore()) as client:
        sequence = client.sequence(range(100))
        with pytest.raises(InvalidRequestError, match="all_chunks and plan say different things"):
            await client.exists(sequence, all_chunks=True, plan=client.plan_put(sequence))


@pytest.mark.parametrize(
    "more", [{"num_tokens": 64}, {"num_prompt_tokens": 70}, {"start_token": 32}, {"boundaries": [40]}, {"hit": True}]
)
async def test_a_plan_leaves_nothing_else_to_be_said(more: dict[str, object]) -> None:
    async with client_of(MemoryStore()) as client:
        sequence = client.sequence(range(100))
        if "hit" in more:
            more = {"hit": await client.lookup(sequence)}
        with pytest.raises(InvalidRequestError, match="leave out"):
            await client.put(sequence, page, plan=client.plan_put(sequence), **more)  # type: ignore[arg-type]
        assert (await client.exists(sequence))[0].tolist() == [False] * 3


async def test_verify_reads_what_a_put_keeps_and_nothing_else() -> None:
    store = MemoryStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(100))
        assert await client.verify(sequence) == VerifyResult(
            missing=Tally(4, 3 * 64 + 32),
            failures=tuple(ChunkFailure(*where, "missing") for where in [(0, 0), (0, 1), (0, 2), (1, 11)]),
        )
        await client.put(sequence, page)
        assert await client.verify(sequence) == VerifyResult(intact=Tally(4, 3 * 64 + 32))
        part = client.plan_put(sequence, start_token=64)
        assert await client.verify(sequence, plan=part) == VerifyResult(intact=Tally(2, 64 + 32))


async def test_what_verify_finds_damaged_is_replaced_by_the_next_put() -> None:
    store = MemoryStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, page)
        key = key_of(client, 100, 0, 1)
        value = bytearray(store._values[key])
        value[-1] ^= 1
        store._values[key] = bytes(value)
        await store.remove([key_of(client, 100, 0, 0)])
        # Nobody has noticed: it exists.
        assert (await client.exists(sequence))[0].tolist() == [False, True, True]
        found = await client.verify(sequence)
        assert found.failures == (ChunkFailure(0, 0, "missing"), ChunkFailure(0, 1, "checksum"))
        assert (found.missing, found.damaged, found.intact) == (Tally(1, 64), Tally(1, 64), Tally(2, 96))
        assert (await client.exists(sequence))[0].tolist() == [False, False, True]
        assert (await client.put(sequence, page)).written == Tally(2, 128)
        assert (await client.verify(sequence)).failures == ()


async def test_what_is_late_is_read_once_more() -> None:
    class Late(WrappedStore):
        often = 1

        async def get(self, items: object) -> list[StoreFailure | None]:
            answers = await super().get(items)  # type: ignore[arg-type]
            if self.often:
                self.often -= 1
                answers[0] = StoreFailure("transfer", True, "late")
            return answers

    store = Late(MemoryStore())
    async with client_of(store) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, page)
        assert (await client.verify(sequence)).failures == ()
        store.often = 2
        found = await client.verify(sequence)
        assert (found.unread, found.failures) == (Tally(1, 64), (ChunkFailure(0, 0, "transfer"),))


async def test_verify_needs_a_store_whatever_counts_as_a_miss() -> None:
    class Gone(WrappedStore):
        async def get(self, items: list[GetItem]) -> list[StoreFailure | None]:  # type: ignore[override]
            raise StoreUnavailableError("gone")

    async with client_of(Gone(MemoryStore()), when_down="miss") as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, page)
        with pytest.raises(StoreUnavailableError):
            await client.verify(sequence)


async def test_a_real_store_is_verified(serving_master: LocalMooncake, fresh: str) -> None:
    connect = SparseStoreClient.connect(
        LAYOUT, model_name=fresh, master_server_address=serving_master.master_address, retention_interval=0
    )
    async with connect as client:
        assert not client.lends_memory
        sequence = client.sequence(range(3200))
        plan: PutPlan = client.plan_put(sequence, boundaries=range(0, 3200, 320))
        await client.put(sequence, page, plan=plan)
        everything = await client.verify(sequence, plan=plan)
        assert everything == VerifyResult(intact=sum(plan.reachable, Tally()))
        await client.remove(client.sequence(range(640)), force=True)
        found = await client.verify(sequence, plan=plan)
        assert found.missing.chunks == 20 + 2
        assert found.intact.chunks + found.missing.chunks == everything.intact.chunks


async def test_whether_memory_is_lent(master: LocalMooncake, fresh: str) -> None:
    client = SparseStoreClient.connect(
        LAYOUT,
        model_name=fresh,
        mode="embedded",
        master_server_address=master.master_address,
        global_segment_size="64MB",
        local_hostname="127.0.0.1",
    )
    assert not client.lends_memory
    async with client:
        assert client.lends_memory
    async with client_of(MemoryStore(), when_down="miss") as plain:
        assert not plain.lends_memory
        assert plain.when_down == "miss"
