"""Masks of long sequences, against what each boundary needs, and against each chunk's own place in its period."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from definitions import chunks_to_store, needed, retained
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import quick

from mooncake_sparse_client import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    KVCacheLayout,
    MambaSpec,
    SlidingWindowSpec,
    load_mask,
    store_mask,
)
from mooncake_sparse_client.core.masks import periodic_mask
from mooncake_sparse_client.core.presets import layout_for

MILLION = 1 << 20


def spec_of(dice: random.Random, size: int, widest: int, *, draft: bool) -> GroupSpec:
    """Any kind of group, its window up to ``widest`` tokens; no chunked local one beside draft layers."""
    match dice.choice(["sliding", "sliding", "recurrent", "full" if draft else "chunked"]):
        case "sliding":
            window = dice.choice([1, 2, size, size + 1, dice.randint(1, widest)])
            return SlidingWindowSpec(size, window, eagle=draft and dice.random() < 0.7)
        case "recurrent":
            return MambaSpec(size)
        case "chunked":
            return ChunkedLocalAttentionSpec(size, size * dice.randint(1, 1 + widest // size))
        case _:
            return FullAttentionSpec(size, eagle=draft)


@st.composite
def long_layouts(draw: st.DrawFn) -> KVCacheLayout:
    """Two or three groups whose alignment is several of their blocks."""
    dice = random.Random(draw(st.integers(0, 2**32 - 1)))
    draft = dice.random() < 0.5
    sizes = dice.choice([(2, 8), (1, 6), (4, 6), (2, 16), (3, 3)])
    widest = draw(st.sampled_from([40, 8, 200]))
    return KVCacheLayout(
        [spec_of(dice, dice.choice(sizes), widest, draft=draft) for _ in range(draw(st.integers(2, 3)))]
    )


def by_boundaries(layout: KVCacheLayout, spec: GroupSpec, count: int, interval: int | None) -> set[int]:
    """The first ``count`` chunks of a group that the boundaries need, one boundary after another."""
    step = layout.alignment if interval is None or isinstance(spec, ChunkedLocalAttentionSpec) else interval
    if isinstance(spec, FullAttentionSpec):
        return set(range(count))
    end = count * spec.block_size + spec.window + 2 * max(step, layout.alignment)
    found = set().union(*(needed(spec, boundary) for boundary in range(step, end + 1, step))) if step else set()
    return {chunk for chunk in found if chunk < count}


@quick
@given(long_layouts(), st.one_of(st.none(), st.integers(0, 5)), st.integers(0, 400))
@example(KVCacheLayout([SlidingWindowSpec(2, 9, eagle=True), MambaSpec(16)]), 3, 200)
@example(KVCacheLayout([SlidingWindowSpec(2, 100, eagle=True), MambaSpec(16)]), 2, 200)
@example(KVCacheLayout([ChunkedLocalAttentionSpec(2, 10), MambaSpec(16)]), 3, 200)
@example(KVCacheLayout([ChunkedLocalAttentionSpec(2, 26), MambaSpec(16)]), None, 300)
def test_the_periodic_mask_is_what_the_boundaries_need(layout: KVCacheLayout, times: int | None, count: int) -> None:
    interval = None if times is None else times * layout.alignment
    for spec in layout.groups:
        mask = periodic_mask(layout, spec, count, interval)
        assert (mask.dtype, len(mask)) == (np.bool_, count)
        assert set(np.flatnonzero(mask).tolist()) == by_boundaries(layout, spec, count, interval)


@quick
@given(long_layouts(), st.one_of(st.none(), st.integers(0, 5)), st.integers(0, 25), st.data())
def test_long_store_masks_are_the_union_of_what_is_needed(
    layout: KVCacheLayout, times: int | None, steps: int, data: st.DataObject
) -> None:
    length, interval = steps * layout.alignment, None if times is None else times * layout.alignment
    start, prompt = data.draw(st.integers(0, length)), data.draw(st.one_of(st.none(), st.integers(0, length + 9)))
    positions = data.draw(st.lists(st.integers(0, length + 9), max_size=2))
    masks = store_mask(
        layout,
        length,
        start_token=start,
        retention_interval=interval,
        num_prompt_tokens=prompt,
        boundaries=positions,
    )
    assert [set(np.flatnonzero(mask).tolist()) for mask in masks] == chunks_to_store(
        layout, length, start_token=start, interval=interval, prompt=prompt, positions=positions
    )


def by_place(spec: SlidingWindowSpec, count: int, step: int) -> NDArray[np.bool_]:
    """The chunks of a window group that the multiples of ``step`` tokens need, each from its own place."""
    chunks, period = np.arange(count), step // spec.block_size
    behind = -(-(chunks + 1) // period) * period  # chunks below the next boundary
    mask = behind - chunks <= spec.window_chunks
    if spec.eagle and spec.window_chunks:
        mask |= (chunks % period == 0) & (chunks > 0)
    return np.asarray(mask, dtype=np.bool_)


DEEPSEEK = layout_for("deepseek-v4")
DRAFTED = KVCacheLayout(DEEPSEEK.groups, use_eagle=True)


@pytest.mark.parametrize("layout", [DEEPSEEK, DRAFTED], ids=["plain", "draft"])
@pytest.mark.parametrize("interval", [None, 0, 16384, 256 * 77])
@pytest.mark.parametrize("what", [{}, {"num_prompt_tokens": MILLION - 5, "boundaries": [1000, 500_000]}])
def test_a_million_tokens(layout: KVCacheLayout, interval: int | None, what: dict[str, Any]) -> None:
    masks = store_mask(layout, MILLION, retention_interval=interval, **what)
    single = retained(layout, 0, 0, what.get("num_prompt_tokens"), what.get("boundaries", ()))
    assert len(single) == (0 if not what else 5 if layout.use_eagle else 3)
    for spec, mask in zip(layout.groups, masks, strict=True):
        count = MILLION // spec.block_size
        if isinstance(spec, FullAttentionSpec):
            assert mask.all()
            assert len(mask) == count
            continue
        assert isinstance(spec, SlidingWindowSpec)
        step = layout.alignment if interval is None else interval
        expected = by_place(spec, count, step) if step else np.zeros(count, dtype=np.bool_)
        for boundary in single:
            expected[sorted(chunk for chunk in needed(spec, boundary) if chunk < count)] = True
        assert np.array_equal(mask, expected)


def test_loads_of_a_million_tokens() -> None:
    for layout in (DEEPSEEK, DRAFTED):
        for local in (0, 1000, MILLION - 256):
            for spec, mask in zip(layout.groups, load_mask(layout, MILLION, local_tokens=local), strict=True):
                kept = np.zeros(MILLION // spec.block_size, dtype=np.bool_)
                kept[sorted(needed(spec, MILLION, margin=False))] = True
                kept[: local // 256 * 256 // spec.block_size] = False
                assert np.array_equal(mask, kept)


def test_an_interval_longer_than_any_sequence_keeps_nothing_and_takes_no_room() -> None:
    interval = DEEPSEEK.alignment << 45
    masks = store_mask(DEEPSEEK, 1024, retention_interval=interval)
    assert [int(mask.sum()) for mask in masks] == [4, 0, 0, 0]
    assert [int(mask.sum()) for mask in store_mask(DEEPSEEK, 0, retention_interval=interval)] == [0, 0, 0, 0]


def test_masks_share_no_memory() -> None:
    layout = KVCacheLayout([ChunkedLocalAttentionSpec(4, 12), SlidingWindowSpec(8, 16), FullAttentionSpec(4)])
    for spec in layout.groups:
        first = periodic_mask(layout, spec, 30, None)
        kept = first.copy()
        periodic_mask(layout, spec, 30, None)[:] ^= True
        assert np.array_equal(first, kept)
