"""Searching for the longest usable prefix: what is asked, in which order, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from definitions import down, longest_hit, longest_loadable, needed
from hypothesis import given
from hypothesis import strategies as st
from lookups import Where, answered
from strategies import Request, quick, requests

from mooncake_sparse_client import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    MambaSpec,
    SlidingWindowSpec,
    layout_for,
)
from mooncake_sparse_client.core.known import ABSENT, HELD, PRESENT, UNKNOWN
from mooncake_sparse_client.core.layout import GroupSpec
from mooncake_sparse_client.core.search import PrefixSearch


def run(search: PrefixSearch, present: Sequence[Any]) -> list[list[Where]]:
    """Answer all questions from ``present`` (sets, or masks, a group); what was asked, request by request."""
    return answered(search, lambda group, chunk: _there(present[group], chunk))


def _there(chunks: Any, chunk: int) -> bool:
    return bool(chunks[chunk]) if isinstance(chunks, np.ndarray) else chunk in chunks


def search_of(request: Request, **more: Any) -> PrefixSearch:
    return PrefixSearch(request.layout, request.num_tokens, local_tokens=request.local_tokens, **more)


def everything(layout: KVCacheLayout, num_tokens: int) -> list[Any]:
    return [np.ones(num_tokens // spec.block_size, dtype=np.bool_) for spec in layout.groups]


@quick
@given(requests(), st.data())
def test_what_is_lost_is_done_without_and_nothing_is_asked_twice(request: Request, data: st.DataObject) -> None:
    search = search_of(request)
    asked = {where for asked in run(search, request.present) for where in asked}
    lost = data.draw(st.sets(st.sampled_from(sorted(asked)))) if asked else set()
    for group, chunk in lost:
        search.lose(group, chunk)
        request.present[group].discard(chunk)
    again = [where for asked in run(search, request.present) for where in asked]
    assert asked.isdisjoint(again)
    assert len(set(again)) == len(again)
    assert search.hit_length == longest_hit(request.layout, request.num_tokens, request.present, request.local_tokens)


@quick
@given(requests(), st.data())
def test_a_doubtful_hit_is_asked_for_again_in_one_request(request: Request, data: st.DataObject) -> None:
    layout, tokens = request.layout, request.num_tokens
    first = search_of(request)
    run(first, request.present)
    local = min(down(layout, request.local_tokens), down(layout, tokens - 1))
    search = search_of(request, known=first.known)
    search.doubt(first.hit_length)
    for chunks in request.present:
        chunks -= data.draw(st.sets(st.integers(0, 40), max_size=2))
    # What was seen to be missing is still believed.
    believed = [
        {chunk for chunk, state in enumerate(states) if state == PRESENT or (state == UNKNOWN and chunk in chunks)}
        for states, chunks in zip(search.known, request.present, strict=True)
    ]
    rounds = run(search, request.present)
    needs = {
        (group, chunk)
        for group, spec in enumerate(layout.groups)
        for chunk in (needed(spec, first.hit_length) if first.hit_length > local else ())
        if (chunk + 1) * spec.block_size > local
    }
    assert set(rounds[0] if rounds else ()) >= needs if needs else True
    assert search.hit_length == longest_hit(layout, tokens, believed, request.local_tokens)
    if needs and search.hit_length == first.hit_length:
        assert len(rounds) == 1
        assert set(rounds[0]) == needs


@quick
@given(requests(), st.data())
def test_boundaries_that_there_is_no_room_for_are_passed_over(request: Request, data: st.DataObject) -> None:
    layout, tokens = request.layout, request.num_tokens
    local = min(down(layout, request.local_tokens), down(layout, tokens - 1))
    room = []
    for spec in layout.groups:
        count = tokens // spec.block_size
        holes = data.draw(st.sets(st.integers(0, max(count - 1, 0)), max_size=2))
        cut = data.draw(st.sampled_from([count, count, count // 2]))  # beyond an array's end there is none
        room.append(~np.isin(np.arange(cut), sorted(holes)))
    search = search_of(request)
    search.only_into(room)
    run(search, request.present)
    places = [set(np.flatnonzero(mask).tolist()) for mask in room]
    assert search.hit_length == longest_loadable(layout, tokens, request.present, places, local)


@quick
@given(requests())
def test_what_the_engine_holds_is_marked_and_what_was_answered_is_noted(request: Request) -> None:
    search = search_of(request)
    run(search, request.present)
    local = min(down(request.layout, request.local_tokens), down(request.layout, request.num_tokens - 1))
    for spec, states, chunks in zip(request.layout.groups, search.known, request.present, strict=True):
        assert len(states) == down(request.layout, request.num_tokens) // spec.block_size
        for chunk, state in enumerate(states):
            assert (state == HELD) == ((chunk + 1) * spec.block_size <= local)
            assert state in (UNKNOWN, HELD) or (state == PRESENT) == (chunk in chunks)
            assert state in (UNKNOWN, HELD, PRESENT, ABSENT)


PRESETS = ["llama", "gemma-3", "gpt-oss", "llama-4", "deepseek-v4", "jamba", "mistral"]
TOKENS = 131_072


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", PRESETS)
def test_a_miss_takes_one_small_request(name: str, ranks: int) -> None:
    search = PrefixSearch(layout_for(name), TOKENS, ranks=ranks)
    rounds = run(search, [set() for _ in search.known])
    assert search.hit_length == 0
    assert len(rounds) == 1
    assert len(rounds[0]) * ranks <= 64


@pytest.mark.parametrize("name", PRESETS)
def test_a_whole_hit_takes_few_requests_and_little_beside_the_dense_groups(name: str) -> None:
    layout = layout_for(name)
    search = PrefixSearch(layout, TOKENS)
    rounds = run(search, everything(layout, TOKENS))
    assert search.hit_length == search.shared_length == layout.hit_cap(TOKENS)
    assert len(rounds) <= 5
    dense = sum(
        layout.hit_cap(TOKENS) // spec.block_size for spec in layout.groups if isinstance(spec, FullAttentionSpec)
    )
    assert sum(map(len, rounds)) - dense <= 512


@pytest.mark.parametrize("name", ["gemma-3", "gpt-oss", "deepseek-v4", "jamba"])
def test_windows_that_nobody_kept_are_probed(name: str) -> None:
    """Full attention has all, and the sparse groups nothing: that costs no whole window for each boundary."""
    layout = layout_for(name)
    search = PrefixSearch(layout, TOKENS)
    present = [
        mask if spec.dense else set() for spec, mask in zip(layout.groups, everything(layout, TOKENS), strict=True)
    ]
    rounds = run(search, present)
    assert (search.hit_length, search.shared_length) == (0, layout.hit_cap(TOKENS))
    sparse = [(group, chunk) for asked in rounds for group, chunk in asked if not layout.groups[group].dense]
    assert len(sparse) <= 2 * TOKENS // layout.alignment // max(1, _overlap(layout)) + 128
    assert len(rounds) <= 7


def _overlap(layout: KVCacheLayout) -> int:
    """Boundaries that share the first chunk of a window."""
    widest = (
        max(spec.window_chunks * spec.block_size for spec in layout.groups if isinstance(spec, SlidingWindowSpec))
        if (any(isinstance(spec, SlidingWindowSpec) for spec in layout.groups))
        else 1
    )
    return widest // layout.alignment


def test_a_long_look_for_the_next_question_has_pauses() -> None:
    layout = layout_for("deepseek-v4")
    search = PrefixSearch(layout, 2**20)
    present = [
        mask if spec.dense else set() for spec, mask in zip(layout.groups, everything(layout, 2**20), strict=True)
    ]
    pauses, boundaries = 0, 2**20 // 256
    for questions in search.questions():
        pauses += not questions
        asked = [_there(present[group], chunk) for group, chunks in questions for chunk in chunks]
        search.note(questions, np.array(asked, dtype=np.bool_))
    assert search.hit_length == 0
    assert pauses >= boundaries // 256


@pytest.mark.parametrize(
    ("groups", "absent"),
    [
        ([FullAttentionSpec(16), SlidingWindowSpec(16, 4096), SlidingWindowSpec(16, 128)], 2),
        ([FullAttentionSpec(16), SlidingWindowSpec(16, 1024), MambaSpec(256)], 2),
        ([FullAttentionSpec(16), ChunkedLocalAttentionSpec(16, 8192), SlidingWindowSpec(16, 1024)], 2),
        ([FullAttentionSpec(16), SlidingWindowSpec(16, 128), SlidingWindowSpec(16, 4096)], 1),
    ],
    ids=["narrow window", "states", "beside chunked local", "narrow window first"],
)
def test_groups_that_have_all_are_not_asked_for_it_where_another_has_nothing(groups: Any, absent: int) -> None:
    layout = KVCacheLayout(groups)
    present = everything(layout, TOKENS)
    present[absent][:] = False
    rounds = run(PrefixSearch(layout, TOKENS), present)
    others = [(group, chunk) for asked in rounds for group, chunk in asked if group not in (0, absent)]
    assert len(others) <= 1024 + 512
    assert len(rounds) <= 9


def test_round_trips_grow_with_the_logarithm_of_the_prompt() -> None:
    """A hole in each window, at a place of its own: the worst that can be met."""
    layout = KVCacheLayout([FullAttentionSpec(16, eagle=True), SlidingWindowSpec(16, 1024, eagle=True)])
    counts = []
    for tokens in (2**15, 2**18, 2**21):
        full, window = everything(layout, tokens)
        window[np.arange(30, len(window), 63)] = False
        counts.append(len(run(PrefixSearch(layout, tokens), [full, window])))
    assert counts[0] < counts[1] <= counts[2] <= counts[0] + 8


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_miss_is_small_where_the_first_groups_need_nothing(ranks: int) -> None:
    layout = KVCacheLayout([ChunkedLocalAttentionSpec(16, 8192), SlidingWindowSpec(16, 4096)])
    search = PrefixSearch(layout, 2 * 8192 + 1, ranks=ranks)  # at the start of a run no chunk of it is needed
    rounds = run(search, [set(), set()])
    assert search.hit_length == 0
    assert len(rounds[0]) * ranks <= 64


def test_an_old_hit_of_the_engines_own_needs_no_question() -> None:
    """With a draft margin the chunk behind it has no name yet."""
    layout = KVCacheLayout([FullAttentionSpec(16, eagle=True)])
    first = PrefixSearch(layout, 58, local_tokens=48)
    assert run(first, [set()]) == []
    again = PrefixSearch(layout, 58, local_tokens=48, known=first.known)
    again.doubt(first.hit_length)
    assert run(again, [set()]) == []
    assert again.hit_length == 48


def test_a_hole_in_full_attention_ends_the_search_there() -> None:
    layout = layout_for("llama")
    present = everything(layout, TOKENS)[0]
    present[[70, 4000]] = False
    search = PrefixSearch(layout, TOKENS)
    rounds = run(search, [present])
    assert search.hit_length == 70 * 16
    assert [len(asked) for asked in rounds] == [64, 512]


def test_only_a_window_that_was_kept_far_below_is_found() -> None:
    """What a resend under retention 0 meets: one boundary's windows among all of full attention."""
    layout = layout_for("deepseek-v4")
    for boundary in (256, 65_536, 100_096):
        present = [
            mask if spec.dense else set(needed(spec, boundary))
            for spec, mask in zip(layout.groups, everything(layout, TOKENS), strict=True)
        ]
        search = PrefixSearch(layout, TOKENS)
        rounds = run(search, present)
        assert search.hit_length == boundary
        assert sum(map(len, rounds)) <= 512 + 2 * 20 + (4 * 20 + 512) + 20
        assert len(rounds) <= 5


def test_windows_of_several_full_groups_keep_together() -> None:
    groups: list[GroupSpec] = [
        FullAttentionSpec(16),
        FullAttentionSpec(64),
        FullAttentionSpec(32),
        SlidingWindowSpec(16, 32),
    ]
    layout = KVCacheLayout(groups)
    search = PrefixSearch(layout, TOKENS)
    rounds = run(search, [set(), *everything(layout, TOKENS)[1:]])
    assert search.hit_length == 0
    assert [len(asked) for asked in rounds] == [63]  # 576 tokens of each, in whole chunks


def test_groups_that_no_boundary_asks_anything_of() -> None:
    layout = KVCacheLayout([SlidingWindowSpec(16, 1), ChunkedLocalAttentionSpec(16, 16), MambaSpec(16)])
    search = PrefixSearch(layout, 161)
    assert [len(asked) for asked in run(search, [set(), set(), {3}])] == [10]
    assert (search.hit_length, search.shared_length) == (64, 160)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16])
def test_a_request_too_short_for_a_hit_asks_nothing(tokens: int) -> None:
    search = PrefixSearch(KVCacheLayout([FullAttentionSpec(16), SlidingWindowSpec(8, 8)]), tokens)
    assert run(search, [set(), set()]) == []
    assert search.hit_length == search.shared_length == 0
