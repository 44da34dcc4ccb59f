"""Explanations: the reasons for each chunk of a put, and what held a lookup back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from definitions import alignment, chunks_to_store, down, needed, retained
from hypothesis import given
from hypothesis import strategies as st
from lookups import Exists, hit_of, look_up
from strategies import Put, Request, puts, quick, requests

from mooncake_sparse_client import (
    FullAttentionSpec,
    KVCacheLayout,
    LookupExplanation,
    PutExplanation,
    Reason,
    SlidingWindowSpec,
    Tally,
    layout_for,
    store_mask,
)
from mooncake_sparse_client.core.plans import PutPlan, plan_put
from mooncake_sparse_client.core.search import PrefixSearch


def in_mask(masks: Sequence[Any]) -> Exists:
    return lambda group, chunk: chunk < len(masks[group]) and bool(masks[group][chunk])


# Puts


@st.composite
def planned(draw: st.DrawFn) -> tuple[Put, PutPlan, int, list[int]]:
    """A put, its plan, its prompt length and the positions that its lookup showed to be junctions."""
    put = draw(puts())
    layout, step = put.layout, put.layout.alignment
    length = put.num_tokens + draw(st.integers(0, step - 1))
    prompt = length if put.prompt is None else put.prompt
    shared, gap = step * draw(st.integers(0, 12)), draw(st.integers(1, 5))
    # The dense groups have a whole prefix, the others some of it: that is what a junction looks like.
    hit = look_up(
        layout,
        length,
        lambda group, chunk: (
            (chunk + 1) * layout.groups[group].block_size <= shared and (layout.groups[group].dense or chunk % gap > 0)
        ),
    )
    plan = plan_put(
        layout,
        length,
        hit=hit,
        num_prompt_tokens=prompt,
        start_token=draw(st.one_of(st.just(0), st.integers(0, length))),
        boundaries=put.positions,
        retention_interval=put.interval,
        retention_origin="a test",
    )
    shows = any(isinstance(spec, FullAttentionSpec) for spec in layout.groups)
    return put, plan, prompt, [hit.shared_length] if shows and hit.shared_length > hit.hit_length else []


@quick
@given(planned())
def test_the_reasons_are_those_of_the_definitions(case: tuple[Put, PutPlan, int, list[int]]) -> None:
    put, plan, prompt, learned = case
    layout = put.layout

    def kept(prompt: int | None, positions: Iterable[int]) -> list[set[int]]:
        return chunks_to_store(
            layout,
            plan.end_token,
            start_token=plan.start_token,
            interval=put.interval,
            prompt=prompt,
            positions=positions,
        )

    steps = [kept(None, []), kept(prompt, []), kept(prompt, put.positions), kept(prompt, [*put.positions, *learned])]
    for number, (spec, codes) in enumerate(zip(layout.groups, plan.reasons, strict=True)):
        found = {reason: set(np.flatnonzero(codes == reason).tolist()) for reason in Reason}
        always, replay, boundary, every = (step[number] for step in steps)
        first = plan.start_token // spec.block_size
        assert found == {
            Reason.OUTSIDE: set(range(first)),
            Reason.SKIPPED: set(range(first, plan.end_token // spec.block_size)) - every,
            Reason.DENSE: always if spec.dense else set(),
            Reason.SEGMENT: set() if spec.dense else always,
            Reason.REPLAY: replay - always,
            Reason.BOUNDARY: boundary - replay,
            Reason.JUNCTION: every - boundary,
        }
        assert every == set(np.flatnonzero(plan.store_masks[number]).tolist())


@quick
@given(planned())
def test_each_chunk_of_a_put_is_counted_once(case: tuple[Put, PutPlan, int, list[int]]) -> None:
    put, plan, prompt, learned = case
    told = plan.explain()
    for number, (spec, group) in enumerate(zip(put.layout.groups, told.groups, strict=True)):
        assert (group.group, group.name, group.kind) == (number, spec.name, spec.kind)
        assert (group.block_size, group.page_size_bytes) == (spec.block_size, spec.page_size_bytes)
        parts = [group.dense, group.segment, group.replay, group.boundary, group.junction]
        assert sum(parts, Tally()) == group.kept == plan.reachable[number]
        assert group.skipped == plan.unreachable[number]
        known = int(plan.known[number].sum())
        assert group.known == Tally(known, known * (spec.page_size_bytes or 0))
    assert told.kept == sum(plan.reachable, Tally())
    assert told.skipped == sum(plan.unreachable, Tally())
    assert (told.start_token, told.end_token, told.num_prompt_tokens) == (plan.start_token, plan.end_token, prompt)
    assert (told.retention_interval, told.retention_origin) == (put.interval, "a test")
    assert set(told.replay_boundaries) == retained(put.layout, 0, 0, prompt, [])
    assert set(told.caller_boundaries) == retained(put.layout, 0, 0, None, put.positions)
    assert set(told.junctions) == retained(put.layout, 0, 0, None, learned)
    assert plan.boundaries == tuple(sorted({*told.replay_boundaries, *told.caller_boundaries, *told.junctions}))
    check_json(told)


def check_json(told: PutExplanation | LookupExplanation) -> None:
    """The JSON has the value's own names and numbers, and only what JSON knows."""
    plain = told.as_json()
    assert json.loads(json.dumps(plain)) == plain
    assert set(plain) == set(told.__dataclass_fields__)
    groups: Any = plain["groups"]
    for shown, group in zip(groups, told.groups, strict=True):
        assert set(shown) == set(group.__dataclass_fields__)
        for name, value in shown.items():
            own = getattr(group, name)
            assert value == ({"chunks": own.chunks, "bytes": own.bytes} if isinstance(own, Tally) else own)


def test_what_a_plan_holds_is_closed_to_writing() -> None:
    plan = plan_put(layout_for("gpt-oss"), 64)
    for mask in (*plan.store_masks, *plan.known):
        with pytest.raises(ValueError, match="read-only"):
            mask[0] = True


LAYOUT = KVCacheLayout(
    [FullAttentionSpec(8, page_size_bytes=1000), SlidingWindowSpec(4, 5, name="window", page_size_bytes=10)]
)


def test_a_put_in_words() -> None:
    """Windows of one chunk: at 32 and 64 for the interval, at 40 for the caller, at 72 for a resend, 48 as learned."""
    stored = store_mask(LAYOUT, 48, retention_interval=32)
    hit = look_up(LAYOUT, 76, in_mask(stored))
    assert (hit.hit_length, hit.shared_length) == (32, 48)
    plan = plan_put(LAYOUT, 76, hit=hit, boundaries=[43], retention_interval=32, retention_origin="argument")
    assert str(plan.explain()).splitlines() == [
        "keeps 14 of 27 chunks of tokens 0 to 72",
        "retention interval: 32 tokens, every multiple is retained (origin: argument)",
        "replay boundaries: 72 (a prompt of 76 tokens)",
        "caller's boundaries: 40",
        "learned junctions: 48",
        "",
        "group                      block  dense  segment  replay  boundary  junction  skipped  known  "
        "bytes kept  bytes skipped",
        "-------------------------  -----  -----  -------  ------  --------  --------  -------  -----  "
        "----------  -------------",
        "0 full                         8      9        0       0         0         0        0      6  "
        "     9,000              0",
        "1 window (sliding_window)      4      0        2       1         1         1       13      1  "
        "        50            130",
    ]


@pytest.mark.parametrize(
    ("interval", "origin", "line"),
    [
        (None, "default", "retention interval: none, every boundary is retained (origin: default)"),
        (0, "argument", "retention interval: 0, no boundary is retained but those below (origin: argument)"),
        (16, "", "retention interval: 16 tokens, every multiple is retained"),
    ],
)
def test_a_retention_interval_in_words(interval: int | None, origin: str, line: str) -> None:
    layout = KVCacheLayout([SlidingWindowSpec(4, 5)])
    told = plan_put(layout, 3, retention_interval=interval, retention_origin=origin).explain()
    lines = str(told).splitlines()
    assert lines[:3] == [
        "keeps 0 of 0 chunks of tokens 0 to 0",
        line,
        "replay boundaries: none (a prompt of 3 tokens)",
    ]
    assert lines[-1].endswith("  -              -")  # nobody said how many bytes a chunk has


def test_an_interval_of_numpy_is_plain_in_json() -> None:
    told = plan_put(LAYOUT, 64, retention_interval=np.int64(16), boundaries=[np.int64(9)]).explain()  # type: ignore[arg-type]
    check_json(told)


# Lookups


@quick
@given(requests())
def test_what_is_missing_is_asked_for_absent_and_needed(request: Request) -> None:
    layout, step = request.layout, alignment(request.layout)
    hit = look_up(layout, request.num_tokens, request.exists, request.local_tokens)
    told = hit.explain()
    limit = down(layout, request.num_tokens)
    for spec, group, present, asked in zip(layout.groups, told.groups, request.present, hit.asked, strict=True):
        questions = set(np.flatnonzero(asked).tolist())
        assert group.chunks_asked == len(questions)
        following = (hit.hit_length if group.limits else group.length) + step
        if following > group.asked_length:
            assert group.length == group.asked_length
            assert group.first_missing is None
            assert not group.limits
            continue
        lacking = (needed(spec, following) & questions) - present
        assert group.first_missing == min(lacking, default=None)
        if group.first_missing is None:  # then it is the draft margin that the request does not fill
            assert any((chunk + 1) * spec.block_size > limit for chunk in needed(spec, following))
    check_json(told)


@quick
@given(requests())
def test_a_lookup_is_told_as_it_was(request: Request) -> None:
    hit = look_up(request.layout, request.num_tokens, request.exists, request.local_tokens)
    told, report = hit.explain(), hit.report
    assert (told.hit_length, told.shared_length, told.cap) == (hit.hit_length, hit.shared_length, report.cap)
    assert (told.num_tokens, told.local_tokens) == (hit.num_tokens, hit.local_tokens)
    assert (told.keys_asked, told.requests) == (hit.keys_asked, hit.requests)
    assert told.limited_by == report.limited_by == tuple(group.group for group in told.groups if group.limits)
    assert [(group.length, group.asked_length) for group in told.groups] == list(
        zip(report.group_lengths, report.asked_lengths, strict=True)
    )
    first = str(told).splitlines()[0]
    assert first.startswith(f"hit {hit.hit_length} of at most {report.cap} tokens; ")
    assert first.count(" limits: ") == len(told.limited_by)
    assert ("may not hit more" in first) == (hit.hit_length == report.cap)


def test_a_lookup_in_words() -> None:
    hit = look_up(LAYOUT, 80, in_mask(store_mask(LAYOUT, 64, retention_interval=32)), local_tokens=9)
    assert str(hit.explain()).splitlines() == [
        "hit 64 of at most 72 tokens; group 0 (full) limits: chunk 8 is missing",
        f"tokens: 80; held by the engine: 8; keys asked: {hit.keys_asked}; requests: {hit.requests}",
        "",
        "group                      block  could serve  asked up to  chunks asked  first missing  limits",
        "-------------------------  -----  -----------  -----------  ------------  -------------  ------",
        "0 full                         8           64           72             8              8     yes",
        f"1 window (sliding_window)      4           64           64  {hit.keys_asked - 8:12}              -",
    ]


def test_a_lookup_that_a_window_limits() -> None:
    hit = look_up(LAYOUT, 80, in_mask(store_mask(LAYOUT, 72, retention_interval=32)))
    lines = str(hit.explain()).splitlines()
    assert lines[0] == "hit 64 of at most 72 tokens; group 1 (window) limits: chunk 17 is missing"
    assert lines[2] == "the dense groups (full, chunked local) alone could serve: 72"


def test_groups_that_rule_boundaries_out_together() -> None:
    """Each alone could serve more than the hit: what limits is what the next boundary lacks."""
    layout = KVCacheLayout([SlidingWindowSpec(8, 8), SlidingWindowSpec(8, 10)])
    present = [{1, 3, 5}, {0, 1, 2, 4}]
    told = look_up(layout, 57, lambda group, chunk: chunk in present[group]).explain()
    assert (told.hit_length, [group.length for group in told.groups]) == (16, [56, 24])
    assert told.limited_by == (0,)
    assert (
        str(told).splitlines()[0] == "hit 16 of at most 56 tokens; group 0 (sliding_window) limits: chunk 2 is missing"
    )


def test_a_lookup_that_nothing_limits() -> None:
    first = str(look_up(LAYOUT, 72, lambda group, chunk: True).explain()).splitlines()[0]
    assert first == "hit 64 of at most 64 tokens; the request may not hit more"


def test_a_lookup_that_asked_nothing() -> None:
    told = hit_of(PrefixSearch(LAYOUT, 72), LAYOUT, 72).explain()
    assert str(told).splitlines()[0] == "hit 0 of at most 64 tokens; no group was asked for more"
    assert told.limited_by == ()


def test_a_draft_margin_that_the_request_does_not_fill() -> None:
    layout = KVCacheLayout([FullAttentionSpec(8, eagle=True)])
    told = look_up(layout, 47, lambda group, chunk: True).explain()
    assert (told.hit_length, told.cap, told.groups[0].first_missing) == (32, 40, None)
    assert str(told).splitlines()[0] == (
        "hit 32 of at most 40 tokens; group 0 (full) limits: the request ends before its next draft margin"
    )
