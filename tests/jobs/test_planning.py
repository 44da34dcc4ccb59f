"""The tree of a corpus, and what a job keeps of it, against slow and obvious definitions."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts, quick, slower

from mooncake_sparse_client import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheLayout,
    SlidingWindowSpec,
    chunk_name,
    layout_for,
    store_mask,
)
from mooncake_sparse_client.jobs.corpus import Corpus, read_corpus
from mooncake_sparse_client.jobs.planning import JobPlanner
from mooncake_sparse_client.jobs.prompts import Prompt
from mooncake_sparse_client.jobs.sharding import share_out

Ids = list[int]


def random_corpus(dice: random.Random, layout: KVCacheLayout) -> list[Ids]:
    """A few prompts that share beginnings of each other, cut in the middle of a block or at its end."""
    size, prompts = layout.alignment, []
    for _ in range(dice.randint(1, 9)):
        ids: Ids = []
        if prompts and dice.random() < 0.8:
            other = dice.choice(prompts)
            ids = other[: dice.choice([len(other), dice.randint(0, len(other)), len(other) // size * size])]
        more = dice.choice([0, 1, size - 1, size, size * dice.randint(0, 6), dice.randint(0, 5 * size)])
        ids = ids + [dice.randint(0, 2) for _ in range(more)]
        prompts.append(ids or [7])
    return prompts


def shared_blocks(one: Ids, other: Ids, size: int) -> int:
    """Whole blocks from the start on that both have."""
    count = 0
    while (count + 1) * size <= min(len(one), len(other)) and one[: (count + 1) * size] == other[: (count + 1) * size]:
        count += 1
    return count


def junctions_of(ids: Ids, prompts: Sequence[Ids], size: int) -> list[int]:
    """Where others part from ``ids`` with whole blocks of their own behind: in tokens."""
    found = set()
    for one, other in itertools.combinations([*prompts, ids], 2):
        shared = shared_blocks(one, other, size)
        parts = shared < len(one) // size and shared < len(other) // size
        if parts and shared <= shared_blocks(ids, one, size) and shared <= len(ids) // size:
            found.add(shared * size)
    return sorted(found - {0})


def names(layout: KVCacheLayout, hasher: BlockHasher, ids: Sequence[int], masks: Sequence[np.ndarray]) -> set:
    hashes = hasher.hash_blocks(list(ids))
    return {
        (group, chunk_name(layout, hashes, group, int(chunk)))
        for group, mask in enumerate(masks)
        for chunk in np.flatnonzero(mask)
    }


def read(layout: KVCacheLayout, prompts: Sequence[Ids]) -> Corpus:
    return read_corpus(prompts, layout, BlockHasher(layout.hash_block_size))


@st.composite
def far_layouts(draw: st.DrawFn) -> KVCacheLayout:
    """Windows that reach back over several blocks, and over several short stretches."""
    window = SlidingWindowSpec(2, draw(st.integers(2, 40)))
    return KVCacheLayout([FullAttentionSpec(4), window], use_eagle=draw(st.booleans()))


@given(st.one_of(far_layouts(), layouts()), st.integers(0, 2**32), st.sampled_from([0, 0, 1, 2, 5, None]))
@quick
def test_a_job_keeps_what_a_put_of_each_prompt_with_its_junctions_would(
    layout: KVCacheLayout, seed: int, times: int | None
) -> None:
    prompts = random_corpus(random.Random(seed), layout)
    interval = None if times is None else times * layout.alignment
    with read(layout, prompts) as corpus:
        planner = JobPlanner(corpus.tree, interval)
        kept = set()
        for stretch in corpus.tree.stretches():
            kept |= names(layout, corpus.hasher, corpus.token_ids(stretch), planner.plan(stretch).store_masks)
        wanted = set()
        for ids in prompts:
            masks = store_mask(
                layout,
                layout.align(len(ids)),
                retention_interval=interval,
                num_prompt_tokens=len(ids),
                boundaries=junctions_of(ids, prompts, layout.alignment),
            )
            wanted |= names(layout, corpus.hasher, ids, masks)
        assert kept == wanted


@given(layouts(), st.integers(0, 2**32))
@slower
def test_the_tree_has_each_block_once_and_every_token_of_it(layout: KVCacheLayout, seed: int) -> None:
    prompts = random_corpus(random.Random(seed), layout)
    size = layout.alignment
    distinct = {tuple(ids[: (block + 1) * size]) for ids in prompts for block in range(len(ids) // size)}
    with read(layout, prompts) as corpus:
        stretches = list(corpus.tree.stretches())
        assert corpus.tokens_distinct == len(distinct) * size == corpus.spool.tokens
        assert sum(stretch.blocks for stretch in stretches) == len(distinct)
        for stretch in stretches:
            ids = tuple(corpus.token_ids(stretch).tolist())
            assert len(ids) == stretch.end * size
            for block in range(stretch.start, stretch.end):
                distinct.remove(ids[: (block + 1) * size])
            hashes = corpus.hasher.hash_blocks(list(ids))
            every = size // layout.hash_block_size
            assert stretch.hashes == b"".join(hashes[every - 1 :: every][stretch.start :])
        assert distinct == set()
        assert corpus.prompts == len(prompts)
        assert corpus.tokens == sum(map(len, prompts))
        ended = [ends for stretch in [corpus.tree.root, *stretches] for ends in stretch.ends.values()]
        assert sum(ends.prompts for ends in ended) == len(prompts)
        assert sum(ends.tokens for ends in ended) == corpus.tokens
        assert len({stretch.name for stretch in stretches}) == len(stretches)


@given(layouts(), st.integers(0, 2**32))
@slower
def test_stretches_come_behind_their_parents_and_depth_first(layout: KVCacheLayout, seed: int) -> None:
    with read(layout, random_corpus(random.Random(seed), layout)) as corpus:
        path = [corpus.tree.root]
        for stretch in corpus.tree.stretches():
            while path[-1] is not stretch.parent:
                path.pop()
            path.append(stretch)


@given(layouts(), st.integers(0, 2**32))
@slower
def test_parts_of_a_stretch_are_planned_as_the_whole(layout: KVCacheLayout, seed: int) -> None:
    with read(layout, random_corpus(random.Random(seed), layout)) as corpus:
        planner, size = JobPlanner(corpus.tree, 0), layout.alignment
        for stretch in corpus.tree.stretches():
            whole = planner.plan(stretch).store_masks
            joined = [np.zeros_like(mask) for mask in whole]
            for block in range(stretch.start, stretch.end):
                for mask, part in zip(
                    joined, planner.plan(stretch, block * size, (block + 1) * size).store_masks, strict=True
                ):
                    mask[: len(part)] |= part
            assert all(np.array_equal(one, other) for one, other in zip(whole, joined, strict=True))


def test_salts_part_at_the_first_block() -> None:
    layout = KVCacheLayout([FullAttentionSpec(4, page_size_bytes=8)])
    prompts = [Prompt([1] * 8), Prompt([1] * 8, cache_salt="a"), Prompt([1] * 8, cache_salt="b"), Prompt([1] * 8)]
    with read_corpus(prompts, layout, BlockHasher(4)) as corpus:
        stretches = list(corpus.tree.stretches())
        assert [stretch.cache_salt for stretch in stretches] == [None, "a", "b"]
        assert [stretch.ends[2].prompts for stretch in stretches] == [2, 1, 1]
        for stretch in stretches:
            assert corpus.sequence(stretch).block_hashes[-1] == stretch.hashes[-32:]


def test_what_is_no_prompt_is_counted_or_ends_the_reading() -> None:
    layout = KVCacheLayout([FullAttentionSpec(4), SlidingWindowSpec(4, 4)])
    prompts = [[1, 2, 3, 4], [1, -2], Prompt([], line=17), Prompt([1, 2], line=18)]
    with read_corpus(prompts, layout, BlockHasher(4)) as corpus:
        assert corpus.prompts == 2
        assert corpus.wrong_lines == 2
        assert [line.line for line in corpus.wrong] == [2, 17]
        assert "token_ids[1] is -2" in corpus.wrong[0].reason
    with pytest.raises(ValueError, match="line 2: token_ids"):
        read_corpus(prompts, layout, BlockHasher(4), on_wrong="stop")


def test_the_estimate_counts_by_reason() -> None:
    layout = KVCacheLayout([FullAttentionSpec(4, page_size_bytes=10), SlidingWindowSpec(4, 5, page_size_bytes=1)])
    shared = list(range(100, 116))
    with read(layout, [shared + [1] * 9, shared + [2] * 8]) as corpus:
        full, window = JobPlanner(corpus.tree, 0).estimate(corpus.tree.stretches())
        assert (full.total.chunks, full.total.bytes) == (8, 80)
        assert full.kept["dense"].chunks == 8
        # The tail of the junction at 16; the first prompt resumes at 24, the second at 20 and 24.
        assert {reason: tally.chunks for reason, tally in window.kept.items()} == {"replay": 3, "junction": 1}
        assert (window.dense.chunks, window.unmasked.chunks) == (8, 8)


def test_a_large_corpus_takes_little_memory() -> None:
    """100,000 prompts of 4,096 tokens must stay far below 2 GiB; here are fewer, of the same kind."""
    layout, count = layout_for("deepseek-v4"), 400
    dice = np.random.default_rng(0)
    shared = dice.integers(0, 1 << 17, (4, 1024))
    tracemalloc.start()
    try:
        prompts = (np.concatenate([shared[number % 4], dice.integers(0, 1 << 17, 3072)]) for number in range(count))
        with read_corpus(prompts, layout, BlockHasher(layout.hash_block_size)) as corpus:
            held, _ = tracemalloc.get_traced_memory()
            assert corpus.tree.distinct_blocks == 4 * 4 + count * 12
            assert share_out(corpus.tree, 3).parts
            assert JobPlanner(corpus.tree, 0).estimate(corpus.tree.stretches())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < count * 2048
    assert peak < count * 8192
