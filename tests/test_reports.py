"""What users of caches like this one ran into, each as the behaviour that is right here, with its numbers."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from store_contract import value

from mooncake_sparse_client import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    KVCacheLayout,
    MambaSpec,
    MemoryStore,
    PutItem,
    SlidingWindowSpec,
    SparseStoreClient,
    Tally,
    explain_prefix,
    layout_for,
    load_mask,
    longest_usable_prefix,
    store_mask,
)
from mooncake_sparse_client.core.framing import HEADER_SIZE
from mooncake_sparse_client.core.masks import retained_boundaries
from mooncake_sparse_client.errors import ConfigError, ConnectError, InvalidHasherError, InvalidRequestError
from mooncake_sparse_client.stores.base import Failure
from mooncake_sparse_client.stores.wrapping import WrappedStore

#: Full attention in blocks of 32 and a window of 8 in blocks of 8: A = 32, h = 8.
FS_GROUPS: list[GroupSpec] = [FullAttentionSpec(32, page_size_bytes=64), SlidingWindowSpec(8, 8, page_size_bytes=32)]
FS = KVCacheLayout(FS_GROUPS, hash_block_size=8)
F16 = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=48)])
F16_EAGLE = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=48, eagle=True)])
#: The same with a third group that resumes from fewer places.
THREE = KVCacheLayout([*FS_GROUPS, SlidingWindowSpec(16, 32, page_size_bytes=16)], hash_block_size=8)


def page(group: int, chunk: int, nbytes: int) -> bytes:
    return random.Random(f"{group}/{chunk}").randbytes(nbytes)


def source_for(layout: KVCacheLayout) -> Any:
    return lambda group, chunk: page(group, chunk, layout.page_sizes[group])


class CountingStore(WrappedStore):
    def __init__(self) -> None:
        self.kept = MemoryStore()
        super().__init__(self.kept)
        self.questions: list[list[str]] = []
        self.written: list[str] = []

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self.questions.append(list(keys))
        return await super().exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        self.written += [item.key for item in items]
        return await super().put(items)


def client_of(store: Any, layout: KVCacheLayout = FS, **settings: Any) -> SparseStoreClient:
    return SparseStoreClient(store, layout, **{"model_name": "m", "retention_interval": None, **settings})


def presence(layout: KVCacheLayout, num_tokens: int, chunks: Sequence[Sequence[int]]) -> list[np.ndarray]:
    arrays = []
    for spec, some in zip(layout.groups, chunks, strict=True):
        array = np.zeros(num_tokens // spec.block_size, dtype=bool)
        array[list(some)] = True
        arrays.append(array)
    return arrays


def indices(masks: Sequence[np.ndarray]) -> list[list[int]]:
    return [np.flatnonzero(mask).tolist() for mask in masks]


def intact(got: Any, layout: KVCacheLayout) -> bool:
    return all(
        bytes(view) == page(where[0], where[1], layout.page_sizes[where[0]]) for where, view in got.chunks.items()
    )


# Boundaries and masks


def test_the_draft_margin_is_taken_off_once() -> None:
    present = presence(F16_EAGLE, 64, [[0, 1, 2, 3]])
    assert longest_usable_prefix(F16_EAGLE, 64, present) == 48
    assert indices(load_mask(F16_EAGLE, 48)) == [[0, 1, 2]]


@pytest.mark.parametrize("count", range(7))
def test_what_is_loaded_covers_the_hit(count: int) -> None:
    for tokens in range(1, 130):
        hit = longest_usable_prefix(F16_EAGLE, tokens, [np.arange(8) < count])
        assert indices(load_mask(F16_EAGLE, hit)) == [list(range(hit // 16))]
        # The margin behind the hit exists, and lies within the request.
        assert hit == max(0, min((tokens - 1) // 16, tokens // 16 - 1, count - 1)) * 16


@pytest.mark.parametrize(("prompt", "kept"), [(128, (64, 96)), (127, (64,)), (129, (96,)), (32, ()), (64, (32,))])
def test_an_aligned_prompt_under_a_draft_margin_keeps_both_replay_boundaries(
    prompt: int, kept: tuple[int, ...]
) -> None:
    assert retained_boundaries(KVCacheLayout(FS_GROUPS, use_eagle=True), prompt, []) == kept


@pytest.mark.parametrize("prompt", [64, 96, 127, 128, 129, 200])
async def test_a_resend_hits_under_a_draft_margin(prompt: int) -> None:
    layout = KVCacheLayout(FS_GROUPS, use_eagle=True)
    async with client_of(MemoryStore(), layout, retention_interval=0) as client:
        await client.put(client.sequence(range(prompt)), source_for(layout))
        resend = await client.lookup(client.sequence(range(prompt)))
        assert resend.hit_length == prompt // 32 * 32 - 32
        extension = await client.lookup(client.sequence(range(prompt + 100)))
        assert extension.hit_length == prompt // 32 * 32 - 32


async def test_a_prefix_that_retention_left_out_is_explained() -> None:
    async with client_of(MemoryStore(), retention_interval=0) as client:
        await client.put(client.sequence(range(100)), source_for(FS))
        hit = await client.lookup(client.sequence(range(80)))
        assert hit.hit_length == 0
        assert hit.report.limited_by == (1,)
        assert isinstance(client.layout.groups[1], SlidingWindowSpec)
        assert hit.report.group_lengths[0] == hit.shared_length == 64
        assert hit.report.group_lengths[1] == 0


@pytest.mark.parametrize(("by_first", "by_second", "expected"), [(0, 0, 0), (64, 0, 64), (0, 64, 64)])
async def test_a_shared_prefix_hits_where_either_put_kept_it(by_first: int, by_second: int, expected: int) -> None:
    shared = list(range(64))
    async with client_of(MemoryStore(), retention_interval=0) as client:
        for number, (tokens, boundary) in enumerate([(100, by_first), (200, by_second)]):
            sequence = client.sequence([*shared, *range(1000 * number + 1000, 1000 * number + 936 + tokens)])
            assert len(sequence) == tokens
            await client.put(sequence, source_for(FS), boundaries=[boundary] if boundary else [])
        third = client.sequence([*shared, *range(9000, 9050)])
        assert (await client.lookup(third)).hit_length == expected


def test_windows_and_alignment_are_both_in_tokens() -> None:
    layout = KVCacheLayout([FullAttentionSpec(256), SlidingWindowSpec(64, 128)])
    assert indices(store_mask(layout, 512)) == [[0, 1], [2, 3, 6, 7]]


def needed_by_the_definition(spec: Any, boundary: int) -> list[int]:
    """Token by token: the chunks below the boundary that hold a token which the next one attends to."""
    first = 0 if isinstance(spec, FullAttentionSpec) else boundary - (spec.sliding_window - 1)
    return sorted({token // spec.block_size for token in range(max(first, 0), boundary)})


@pytest.mark.parametrize("seed", range(60))
def test_the_hit_is_the_longest_that_all_groups_can_resume_from(seed: int) -> None:
    dice = random.Random(seed)
    tokens = dice.randint(33, 300)
    share = dice.choice([0.7, 0.9, 0.97])
    chunks = [[i for i in range(tokens // spec.block_size) if dice.random() < share] for spec in THREE.groups]

    def longest(groups: Sequence[int]) -> int:
        for boundary in range((tokens - 1) // 32 * 32, 0, -32):
            if all(set(needed_by_the_definition(THREE.groups[g], boundary)) <= set(chunks[g]) for g in groups):
                return boundary
        return 0

    report = explain_prefix(THREE, tokens, presence(THREE, tokens, chunks))
    assert report.hit_length == longest([0, 1, 2])
    assert report.group_lengths == (longest([0]), longest([1]), longest([2]))


async def test_a_group_without_anything_does_not_hide_what_a_shorter_prefix_has() -> None:
    """The third group can resume from 32 and 64 alone, the second from 64 and 128, the first from all."""
    store = MemoryStore()
    async with client_of(store, THREE) as client:
        sequence = client.sequence(range(129))
        kept = {0: {0, 1, 2, 3}, 1: {7, 15}, 2: {0, 1, 2, 3}}
        await client.put(
            sequence, lambda group, chunk: page(group, chunk, THREE.page_sizes[group]) if chunk in kept[group] else None
        )
        hit = await client.lookup(sequence)
        assert hit.hit_length == 64
        assert (await client.get(hit)).hit_length == 64


# Questions


async def test_a_miss_in_the_first_group_asks_no_other() -> None:
    store = CountingStore()
    layout = layout_for("deepseek-v4", scale=1e-9)
    async with client_of(store, layout) as client:
        hit = await client.lookup(client.sequence(range(131_073)))
        assert (hit.keys_asked, hit.requests) == (64, 1)
        assert [len(keys) for keys in store.questions] == [64]
        assert all("@group:0@" in key for keys in store.questions for key in keys)


async def test_a_long_lookup_asks_for_what_some_boundary_needs_alone() -> None:
    store = CountingStore()
    layout = layout_for("deepseek-v4", scale=1e-9)
    async with client_of(store, layout) as client:
        sequence = client.sequence(range(131_073))
        await client.put(sequence, lambda group, _chunk: bytes(layout.page_sizes[group]))
        store.questions.clear()
        hit = await client.lookup(sequence)
        assert hit.hit_length == 131_072
        assert hit.keys_asked == sum(map(len, store.questions)) == 512 + 2 * 20  # and two boundaries' windows
        # However it is thinned out, no chunk is asked for that no boundary needs.
        everything = sorted(store.kept.keys())
        for seed in range(3):
            gone = random.Random(seed).sample(everything, 2000)
            await store.kept.remove(gone)
            assert (await client.lookup(sequence)).keys_asked <= 10_752


@pytest.mark.parametrize("tokens", [100, 1000, 10_000])
async def test_round_trips_do_not_grow_with_the_prompt(tokens: int) -> None:
    layout = KVCacheLayout(
        [
            FullAttentionSpec(16, page_size_bytes=16),
            ChunkedLocalAttentionSpec(16, 64, page_size_bytes=16),
            SlidingWindowSpec(16, 32, page_size_bytes=16),
            SlidingWindowSpec(16, 64, page_size_bytes=16),
            MambaSpec(16, page_size_bytes=16),
        ]
    )
    store = CountingStore()
    async with client_of(store, layout) as client:
        sequence = client.sequence(range(tokens))
        await client.put(sequence, lambda _group, _chunk: bytes(16))
        store.questions.clear()
        assert (await client.lookup(sequence)).hit_length == (tokens - 1) // 16 * 16
        windows = 1 + sum(tokens // 16 > seen for seen in (64, 64 + 512))
        assert len(store.questions) <= windows + 2  # full in windows, chunked local, the sparse groups together


async def test_the_keys_that_are_written_are_those_that_are_asked_for() -> None:
    store = CountingStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(129), cache_salt="s", lora=("name", "/path"))
        await client.put(sequence, source_for(FS))
        store.questions.clear()
        await client.lookup(sequence)
        assert sorted(store.written) == sorted(key for keys in store.questions for key in keys)
        store.questions.clear()
        await client.exists(sequence)
        assert sorted(store.written) == sorted(key for keys in store.questions for key in keys)


# Hashes


KEYS_OF = """
import sys
from mooncake_sparse_client import BlockHasher, TokenSequence
for algorithm in sys.argv[1:]:
    hasher = BlockHasher(16, algorithm)
    sequence = TokenSequence(hasher, range(1000), cache_salt="s", lora=("n", "/p"), multimodal=[("i", 3, 40)])
    print(algorithm, *(digest.hex() for digest in sequence.block_hashes))
"""


def hashes_of_a_process(python_hash_seed: str | None, *algorithms: str) -> str:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
    if python_hash_seed is not None:
        environment["PYTHONHASHSEED"] = python_hash_seed
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", KEYS_OF, *algorithms]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_two_processes_agree_without_being_configured() -> None:
    algorithms = ["sha256_packed", "sha256", "sha256_cbor"]
    first = hashes_of_a_process(None, *algorithms)
    assert len(first.split()) == 3 * 63
    assert hashes_of_a_process(None, *algorithms) == first
    # Ours does not follow a variable that others set for purposes of their own.
    assert hashes_of_a_process("7", "sha256_packed") == first.split("\n")[0] + "\n"


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_fast_hash_without_a_seed_is_refused(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(InvalidHasherError, match=r"seed[\s\S]*another process[\s\S]*PYTHONHASHSEED"):
        BlockHasher(16, algorithm)
    assert BlockHasher(16, algorithm, seed="s").seed == "s"


# Writing


async def test_more_tokens_than_there_are_hashes_for_is_an_error_before_any_write() -> None:
    store = CountingStore()
    asked = []

    def source(group: int, chunk: int) -> bytes:
        asked.append((group, chunk))
        return page(group, chunk, FS.page_sizes[group])

    async with client_of(store) as client:
        sequence = client.sequence(range(100))  # drafts of 5 more were thrown away
        with pytest.raises(InvalidRequestError, match=r"105.*100"):
            await client.put(sequence, source, num_tokens=105)
        assert (store.questions, store.written, asked) == ([], [], [])
        assert (await client.put(sequence, source, num_tokens=95)).end_token == 64
        assert (await client.put(sequence, source, num_tokens=100)).end_token == 96


async def test_of_two_writers_one_has_written_and_one_has_found_it_there() -> None:
    store = CountingStore()
    async with client_of(store) as client:
        first, second = await asyncio.gather(
            *(client.put(client.sequence(range(100)), source_for(FS)) for _ in range(2))
        )
        assert {first.written, second.written} == {Tally(6, 288), Tally()}
        assert {first.existing, second.existing} == {Tally(6, 288), Tally()}
    async with client_of(store) as other:
        third = await other.put(other.sequence(range(100)), source_for(FS))
        assert (third.written, third.existing) == (Tally(), Tally(6, 288))
    assert len(store.written) == 6


# Reading


async def test_one_chunk_gone_shortens_the_hit_to_what_is_intact() -> None:
    store = MemoryStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(129))
        await client.put(sequence, source_for(FS))
        hit = await client.lookup(sequence)
        assert hit.hit_length == 128
        name = sequence.block_hashes[128 // 8 - 1].hex()
        await store.remove([client.keys.key(0, name)])  # full-attention chunk 3
        got = await client.get(hit)
        assert got.hit_length == 96
        assert sorted(got.chunks) == [(0, 0), (0, 1), (0, 2), (1, 11)]
        assert intact(got, FS)


@pytest.mark.parametrize("damaged", [b"", b"short", bytes(64 + HEADER_SIZE - 1), bytes(64 + HEADER_SIZE + 1)])
async def test_a_value_of_another_length_is_a_miss(damaged: bytes) -> None:
    store = MemoryStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(129))
        await client.put(sequence, source_for(FS))
        key = client.keys.key(0, sequence.block_hashes[128 // 8 - 1].hex())
        if damaged:
            await store.put([value(key, damaged, replace=True)])
        else:
            store._values[key] = b""
        got = await client.get(sequence)
        assert got.hit_length == 96
        assert [failure.reason for failure in got.failures] == ["length"]
        assert intact(got, FS)


@pytest.mark.parametrize("value_format", ["framed", "raw"])
async def test_a_miss_is_no_bytes(value_format: str) -> None:
    async with client_of(MemoryStore(), value_format=value_format) as client:
        got = await client.get(client.sequence(range(129)))
        assert (got.hit_length, got.chunks, got.failures) == (0, {}, ())


async def test_one_flipped_byte_is_a_miss_with_a_reason() -> None:
    store = MemoryStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(129))
        await client.put(sequence, source_for(FS))
        key = client.keys.key(0, sequence.block_hashes[64 // 8 - 1].hex())  # full-attention chunk 1
        damaged = bytearray(store._values[key])
        damaged[HEADER_SIZE + 17] ^= 0xFF
        await store.put([value(key, bytes(damaged), replace=True)])
        got = await client.get(sequence)
        assert got.hit_length == 32
        assert [tuple(failure) for failure in got.failures] == [(0, 1, "checksum")]
        assert (0, 1) not in got.chunks
        assert intact(got, FS)


# Setting up


async def test_where_nothing_listens_the_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(ConnectError, match=address):
        async with SparseStoreClient.connect(FS, model_name="m", master_server_address=address, timeout=10):
            pass


def test_a_chunk_that_can_never_fit_is_told_with_both_numbers() -> None:
    layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=5000)])
    with pytest.raises(ConfigError, match=rf"{5000 + HEADER_SIZE} bytes.*\b4096\b"):
        client_of(MemoryStore(4096), layout)
