"""Cutting a tree into parts: each stretch once, the trunk above them all, about equal work."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import slower
from test_planning import random_corpus, read

from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout
from mooncake_sparse_client.errors import ConfigError
from mooncake_sparse_client.jobs.sharding import Shard, share_out

LAYOUT = KVCacheLayout([FullAttentionSpec(4, page_size_bytes=8)])


@given(st.integers(0, 2**32), st.integers(1, 5))
@slower
def test_each_stretch_is_in_the_trunk_or_in_one_part(seed: int, count: int) -> None:
    with read(LAYOUT, random_corpus(random.Random(seed), LAYOUT)) as corpus:
        order = list(corpus.tree.stretches())
        shares = share_out(corpus.tree, count)
        assert len(shares.parts) == count
        assert sorted(map(order.index, [*shares.trunk, *(item for part in shares.parts for item in part)])) == list(
            range(len(order))
        )
        for part in (shares.trunk, *shares.parts):
            assert [order.index(stretch) for stretch in part] == sorted(map(order.index, part))
        for part in shares.parts:
            for stretch in part:
                assert all(child in part for child in stretch.children.values())
        for stretch in shares.trunk:
            assert stretch.parent is corpus.tree.root or stretch.parent in shares.trunk
            below, todo = set(), list(stretch.children.values())
            while todo:
                child = todo.pop()
                below |= {number for number, part in enumerate(shares.parts) if child in part}
                todo += child.children.values()
            assert len(below) > 1


def test_parts_are_about_equal_and_the_trunk_is_counted() -> None:
    dice = random.Random(5)
    system = [1] * 40
    prompts = [system + [dice.randint(2, 4)] * 8 + [100 + number] * dice.randint(4, 60) for number in range(60)]
    with read(LAYOUT, prompts) as corpus:
        shares = share_out(corpus.tree, 3)
        assert shares.trunk[0].blocks == 10
        trunk = sum(stretch.blocks for stretch in shares.trunk)
        loads = [sum(stretch.blocks for stretch in part) for part in shares.parts]
        loads[0] += trunk
        assert max(loads) - min(loads) <= max(loads) // 10
        assert shares.of(Shard(1, 3)) == (shares.trunk, shares.parts[0])
        assert shares.of(Shard(3, 3)) == ((), shares.parts[2])
        assert shares.of(Shard(0, 3)) == (shares.trunk, ())


def test_one_prompt_cannot_be_cut() -> None:
    with read(LAYOUT, [[1] * 400]) as corpus:
        shares = share_out(corpus.tree, 3)
        assert shares.trunk == ()
        assert [len(part) for part in shares.parts] == [1, 0, 0]


def test_with_the_trunk_apart_it_is_counted_as_nobodys() -> None:
    with read(LAYOUT, [[1] * 64 + [number] * 32 for number in range(2, 10)]) as corpus:
        for apart, sizes in ((False, [3, 5]), (True, [4, 4])):
            shares = share_out(corpus.tree, 2, trunk_apart=apart)
            assert [len(part) for part in shares.parts] == sizes
            assert [stretch.blocks for stretch in shares.trunk] == [16]


def test_what_is_nearly_all_shared_stays_with_one_part() -> None:
    """Its branches are less work than the smallest piece of a part, and the others would wait for its trunk."""
    shared = [[1] * 80 + [number] * 4 for number in (2, 3, 4)]
    with read(LAYOUT, [*shared, [5] * 60]) as corpus:
        shares = share_out(corpus.tree, 2)
        assert shares.trunk == ()
        assert sorted(len(part) for part in shares.parts) == [1, 4]
    with read(LAYOUT, [[1] * 80 + [number] * 48 for number in (2, 3, 4)]) as corpus:
        assert [stretch.blocks for stretch in share_out(corpus.tree, 2).trunk] == [20]


def test_which_part_has_the_trunk() -> None:
    shards = [Shard(0, 2), Shard(1, 2), Shard(2, 2)]
    assert [shard.has_trunk for shard in shards] == [True, True, False]
    shards = [Shard(number, 2, trunk_apart=True) for number in (0, 1, 2)]
    assert [shard.has_trunk for shard in shards] == [True, False, False]


def test_shards_are_written_as_people_write_them() -> None:
    assert Shard.parse("2/3") == Shard(2, 3)
    assert Shard.parse("trunk/3") == Shard(0, 3)
    assert [str(Shard(1, 3)), str(Shard(0, 3))] == ["1/3", "trunk/3"]
    for text in ("3", "4/3", "1/0", "a/b", "-1/3", "1/3/3", "trunk/0"):
        with pytest.raises(ConfigError, match="part"):
            Shard.parse(text)
