"""Properties of the pure core on random layouts, requests and bytes, against the definitions beside."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import cbor2
import numpy as np
import pytest
import xxhash
from definitions import (
    alignment,
    chunks_to_store,
    down,
    has_draft,
    horizon_of,
    is_sparse,
    is_usable,
    longest_hit,
    longest_loadable,
    needed,
    retained,
)
from hypothesis import example, given
from hypothesis import strategies as st
from lookups import Exists, look_up
from numpy.typing import NDArray
from strategies import Put, Request, extras, layouts, puts, quick, requests, slower, traits

from mooncake_sparse_client import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheLayout,
    SlidingWindowSpec,
    Tally,
    TokenSequence,
    chunk_name,
    explain_prefix,
    load_mask,
    longest_usable_prefix,
    store_mask,
)
from mooncake_sparse_client.core.framing import (
    HEADER_SIZE,
    FrameMeta,
    ValueFormat,
    pack_header,
    payload_checksum,
    unpack_header,
)
from mooncake_sparse_client.core.keys import KeyBuilder, KeySchema
from mooncake_sparse_client.core.masks import BoolArray
from mooncake_sparse_client.core.plans import plan_put
from mooncake_sparse_client.core.prefix import longest_arrived_prefix, longest_without
from mooncake_sparse_client.data_plane.batches import cut_batches
from mooncake_sparse_client.errors import InvalidRequestError


def sets(masks: Sequence[BoolArray]) -> list[set[int]]:
    """Masks as sets of chunk indices."""
    return [set(np.flatnonzero(mask).tolist()) for mask in masks]


def kept_by(put: Put, *, end: int, start: int = 0) -> tuple[BoolArray, ...]:
    """The package's store mask for a part of a put."""
    return store_mask(
        put.layout,
        end,
        start_token=start,
        retention_interval=put.interval,
        num_prompt_tokens=put.prompt,
        boundaries=put.positions,
    )


# Store masks


@quick
@given(puts(), st.data())
def test_store_mask_is_the_union_of_what_the_retained_boundaries_need(put: Put, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, put.num_tokens + 3))
    masks = kept_by(put, end=put.num_tokens, start=start)
    assert [len(mask) for mask in masks] == [put.num_tokens // spec.block_size for spec in put.layout.groups]
    assert sets(masks) == chunks_to_store(
        put.layout,
        put.num_tokens,
        start_token=start,
        interval=put.interval,
        prompt=put.prompt,
        positions=put.positions,
    )


@quick
@given(puts(), st.data())
def test_a_put_in_steps_keeps_what_one_put_keeps(put: Put, data: st.DataObject) -> None:
    step = put.layout.alignment
    cuts = data.draw(st.lists(st.integers(0, put.num_tokens // step).map(lambda times: times * step), max_size=4))
    joined: list[set[int]] = [set() for _ in put.layout.groups]
    start = 0
    for end in [*sorted(cuts), put.num_tokens]:
        for chunks, added in zip(joined, sets(kept_by(put, end=end, start=start)), strict=True):
            assert not chunks & added
            chunks |= added
        start = end
    assert joined == sets(kept_by(put, end=put.num_tokens))


@quick
@given(puts())
def test_no_sparse_chunk_is_kept_that_no_retained_boundary_needs(put: Put) -> None:
    kept = retained(
        put.layout, horizon_of(put.layout, put.num_tokens, put.interval), put.interval, put.prompt, put.positions
    )
    for spec, chunks in zip(put.layout.groups, sets(kept_by(put, end=put.num_tokens)), strict=True):
        if is_sparse(spec):
            for chunk in chunks:
                assert any(chunk in needed(spec, boundary) for boundary in kept)


@quick
@given(puts())
def test_every_retained_boundary_is_a_hit(put: Put) -> None:
    masks = kept_by(put, end=put.num_tokens)
    # A draft group's margin lies behind the boundary: it must have been put, and be whole in the request.
    behind = put.layout.alignment if has_draft(put.layout) else 0
    for boundary in retained(put.layout, put.num_tokens - behind, put.interval, put.prompt, put.positions):
        assert boundary % put.layout.alignment == 0
        if boundary + behind <= put.num_tokens:
            assert longest_usable_prefix(put.layout, boundary + max(behind, 1), masks) == boundary


@quick
@given(layouts(), st.integers(0, 300), st.integers(0, 40))
def test_a_resend_and_an_extension_of_a_put_prompt_hit(layout: KVCacheLayout, prompt: int, more: int) -> None:
    masks = store_mask(layout, down(layout, prompt), retention_interval=0, num_prompt_tokens=prompt)
    back = alignment(layout) if has_draft(layout) else 0
    resend = longest_usable_prefix(layout, prompt, masks)
    extension = longest_usable_prefix(layout, prompt + 1 + more, masks)
    assert resend >= max(down(layout, prompt - 1) - back, 0)
    assert extension >= max(down(layout, prompt) - back, 0)


# Prefixes


@quick
@given(requests())
def test_longest_usable_prefix_is_found_by_search(request: Request) -> None:
    found = longest_usable_prefix(
        request.layout, request.num_tokens, request.arrays(), local_tokens=request.local_tokens
    )
    assert found == longest_hit(request.layout, request.num_tokens, request.present, request.local_tokens)
    assert found <= down(request.layout, request.num_tokens - 1)
    assert found >= min(down(request.layout, request.local_tokens), down(request.layout, request.num_tokens - 1))


@quick
@given(requests())
def test_load_mask_is_what_the_hit_needs_without_margin_and_local_chunks(request: Request) -> None:
    layout, local = request.layout, down(request.layout, request.local_tokens)
    hit = longest_usable_prefix(layout, request.num_tokens, request.arrays(), local_tokens=request.local_tokens)
    masks = load_mask(layout, hit, local_tokens=request.local_tokens)
    assert [len(mask) for mask in masks] == [hit // spec.block_size for spec in layout.groups]
    for spec, loaded, present in zip(layout.groups, sets(masks), request.present, strict=True):
        size = spec.block_size
        assert loaded == {chunk for chunk in needed(spec, hit, margin=False) if (chunk + 1) * size > local}
        assert loaded <= present


@quick
@given(requests())
def test_the_explanation_names_what_held_the_hit_back(request: Request) -> None:
    layout, tokens, local = request.layout, request.num_tokens, request.local_tokens
    report = explain_prefix(layout, tokens, request.arrays(), local_tokens=local)
    cap = down(layout, tokens - 1)
    alone = [longest_hit(layout, tokens, request.present, local, [number]) for number in range(len(layout.groups))]
    dense = [number for number, spec in enumerate(layout.groups) if not is_sparse(spec)]
    assert report.cap == cap
    assert report.group_lengths == tuple(alone)
    assert report.hit_length == longest_hit(layout, tokens, request.present, local)
    assert report.shared_length == (
        longest_hit(layout, tokens, request.present, local, dense) if dense else report.hit_length
    )
    assert report.hit_length <= report.shared_length <= cap
    assert bool(report.limited_by) == (report.hit_length < cap)
    if report.hit_length < cap:
        # The culprits are those that cannot serve the next boundary.
        after = report.hit_length + alignment(layout)
        assert report.limited_by == tuple(
            number
            for number, spec in enumerate(layout.groups)
            if not is_usable(spec, layout, after, tokens, request.present[number], local)
        )


# Lookups


@quick
@given(layouts(), st.integers(0, 12), st.data())
def test_what_lost_chunks_leave_possible(layout: KVCacheLayout, blocks: int, data: st.DataObject) -> None:
    step = layout.alignment
    most = blocks * step
    wheres = [
        (group, chunk) for group, spec in enumerate(layout.groups) for chunk in range(most // spec.block_size + 2)
    ]
    lost = data.draw(st.lists(st.sampled_from(wheres), max_size=4))

    def possible(boundary: int) -> bool:
        return not any(chunk in needed(layout.groups[group], boundary) for group, chunk in lost)

    longest = longest_without(layout, most, lost)
    assert longest == max((boundary for boundary in range(0, most + 1, step) if possible(boundary)), default=0)
    # Of the load mask, just what ends at or below it is needed by any boundary at or below it.
    for spec, chunks in zip(layout.groups, sets(load_mask(layout, most)), strict=True):
        shorter = range(step, longest + 1, step)
        useful = {chunk for chunk in chunks if any(chunk in needed(spec, end, margin=False) for end in shorter)}
        assert useful == {chunk for chunk in chunks if (chunk + 1) * spec.block_size <= longest}


def test_what_was_asked_must_fit_the_layout() -> None:
    layout, present = KVCacheLayout([FullAttentionSpec(16)]), [np.ones(8, dtype=np.bool_)]
    assert explain_prefix(layout, 65, present, asked_lengths=[128]).group_lengths == (64,)  # the cap
    for wrong in ({"asked": []}, {"asked_lengths": [16, 16]}):
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            explain_prefix(layout, 65, present, **wrong)  # type: ignore[arg-type]


@quick
@given(requests())
def test_a_lookup_asks_only_for_what_boundaries_need(request: Request) -> None:
    layout, local, size = request.layout, down(request.layout, request.local_tokens), request.layout.alignment
    hit = look_up(layout, request.num_tokens, request.exists, request.local_tokens)
    boundaries = range(local + size, hit.report.cap + 1, size)
    limit = down(layout, request.num_tokens)
    for spec, asked, seen, there in zip(
        layout.groups, sets(hit.asked), sets(hit.present), request.present, strict=True
    ):
        assert asked <= set().union(*(needed(spec, boundary) for boundary in boundaries))
        # What the engine holds is not asked, and a margin behind the last whole alignment has no name.
        assert all(local < (chunk + 1) * spec.block_size <= limit for chunk in asked)
        assert seen == asked & there


@quick
@given(requests())
def test_a_staged_lookup_finds_what_a_full_look_finds(request: Request) -> None:
    layout = request.layout
    hit = look_up(layout, request.num_tokens, request.exists, request.local_tokens)
    full = explain_prefix(layout, request.num_tokens, request.arrays(), local_tokens=request.local_tokens)
    assert hit.hit_length == longest_hit(layout, request.num_tokens, request.present, request.local_tokens)
    assert hit.shared_length == full.shared_length
    assert hit.keys_asked == sum(map(len, sets(hit.asked)))
    report = hit.report
    assert (report.hit_length, report.shared_length, report.cap) == (hit.hit_length, hit.shared_length, full.cap)
    assert bool(report.limited_by) == (hit.hit_length < report.cap)
    # Whoever is said to limit does; of the others some may not have been asked.
    assert set(report.limited_by) <= set(full.limited_by)
    for alone, least, most in zip(report.group_lengths, full.group_lengths, report.asked_lengths, strict=True):
        assert alone <= most
        assert alone >= least or least > most  # what was not asked rules nothing out


# Puts and gets


@quick
@given(puts(), requests(), st.data())
def test_a_put_plan_accounts_for_every_chunk(put: Put, request: Request, data: st.DataObject) -> None:
    layout = put.layout
    length = put.num_tokens + data.draw(st.integers(0, layout.alignment - 1))
    start = data.draw(st.integers(0, length))
    plan = plan_put(
        layout,
        length + 5,
        num_tokens=length,
        num_prompt_tokens=put.prompt,
        start_token=start,
        boundaries=put.positions,
        retention_interval=put.interval,
    )
    assert (plan.start_token, plan.end_token) == (down(layout, start), put.num_tokens)
    prompt = length + 5 if put.prompt is None else put.prompt
    expected = chunks_to_store(
        layout,
        plan.end_token,
        start_token=plan.start_token,
        interval=put.interval,
        prompt=prompt,
        positions=put.positions,
    )
    assert sets(plan.store_masks) == expected
    assert set(plan.boundaries) == retained(layout, 0, 0, prompt, put.positions)
    for spec, chunks, kept, dropped in zip(layout.groups, expected, plan.reachable, plan.unreachable, strict=True):
        every = (plan.end_token - plan.start_token) // spec.block_size
        page = spec.page_size_bytes or 0
        assert kept == Tally(len(chunks), len(chunks) * page)
        assert kept + dropped == Tally(every, every * page)
    assert [np.flatnonzero(mask).tolist() for mask in plan.store_masks] == [sorted(chunks) for chunks in expected]
    assert [len(known) for known in plan.known] == [len(mask) for mask in plan.store_masks]
    assert not any(known.any() for known in plan.known)


@quick
@given(requests(), st.booleans(), st.integers(0, 5))
def test_a_put_plan_knows_what_the_lookup_saw(request: Request, trust: bool, more: int) -> None:
    layout, tokens = request.layout, request.num_tokens
    hit = look_up(layout, tokens, request.exists)
    plan = plan_put(layout, tokens + more, hit=hit, trust_hit=trust, retention_interval=0)
    for mask, known, seen in zip(sets(plan.store_masks), sets(plan.known), sets(hit.present), strict=True):
        assert known == (mask & seen if trust else set())
    shows = any(isinstance(spec, FullAttentionSpec) for spec in layout.groups)
    learned = [hit.shared_length] if shows and hit.shared_length > hit.hit_length else []
    assert set(plan.boundaries) == retained(layout, 0, 0, tokens + more, learned)


@quick
@given(requests(), st.data())
def test_a_get_falls_back_to_what_arrived(request: Request, data: st.DataObject) -> None:
    layout, tokens = request.layout, request.num_tokens
    local = min(down(layout, request.local_tokens), down(layout, tokens - 1))
    present = [
        mask[: layout.align(tokens) // s.block_size] for mask, s in zip(request.arrays(), layout.groups, strict=True)
    ]
    lost = [data.draw(st.sets(st.integers(0, max(len(mask) - 1, 0)), max_size=3)) for mask in present]
    arrived = [mask & ~np.isin(np.arange(len(mask)), sorted(gone)) for mask, gone in zip(present, lost, strict=True)]
    length = longest_arrived_prefix(layout, tokens, present, arrived, local_tokens=local)
    assert length == longest_loadable(layout, tokens, request.present, sets(arrived), local)


@quick
@given(st.lists(st.integers(0, 40)), st.integers(1, 60), st.integers(1, 5))
def test_batches_are_a_partition_within_the_limits(sizes: list[int], max_bytes: int, max_count: int) -> None:
    batches = cut_batches(sizes, max_bytes=max_bytes, max_count=max_count)
    assert [number for batch in batches for number in batch] == list(range(len(sizes)))
    for batch in batches:
        assert 1 <= len(batch) <= max_count
        assert len(batch) == 1 or sum(sizes[number] for number in batch) <= max_bytes
    for batch, following in pairwise(batches):
        total = sum(sizes[number] for number in batch) + sizes[following.start]
        assert len(batch) == max_count or total > max_bytes


# Names: what prompts share


def names_of(layout: KVCacheLayout, hashes: Sequence[bytes], masks: Sequence[BoolArray]) -> list[set[str]]:
    """The names under which chunks are stored, a set a group."""
    builder = KeyBuilder(layout, KeySchema("model"))
    return [set(builder.names(hashes, group, sorted(chunks))) for group, chunks in enumerate(sets(masks))]


def finder(layout: KVCacheLayout, hashes: Sequence[bytes], stored: Sequence[set[str]]) -> Exists:
    """Whether a chunk of these hashes is among the stored names."""
    return lambda group, chunk: chunk_name(layout, hashes, group, chunk) in stored[group]


@slower
@given(layouts(), st.data())
def test_prompts_that_part_at_a_given_boundary_hit_there(layout: KVCacheLayout, data: st.DataObject) -> None:
    step = alignment(layout)
    shared = step * data.draw(st.sampled_from([3, 0, 1, 2, 5])) + data.draw(st.integers(0, step - 1))
    first = [1] * shared + [2] * data.draw(st.integers(0, 3 * step))
    second = [1] * shared + [3] * data.draw(st.integers(1, 3 * step))
    hasher = BlockHasher(layout.hash_block_size)
    kept = store_mask(
        layout,
        down(layout, len(first)),
        retention_interval=0,
        num_prompt_tokens=len(first),
        boundaries=[shared],
    )
    stored = names_of(layout, hasher.hash_blocks(first), kept)
    hit = look_up(layout, len(second), finder(layout, hasher.hash_blocks(second), stored)).hit_length
    back = step if has_draft(layout) else 0
    assert hit >= max(down(layout, shared) - back, 0)
    if any(needed(spec, down(layout, shared) + step) for spec in layout.groups):
        assert hit <= down(layout, shared)


@slower
@given(layouts(), st.data())
def test_a_learned_junction_serves_the_third_prompt(layout: KVCacheLayout, data: st.DataObject) -> None:
    step = alignment(layout)
    tails = data.draw(st.lists(st.integers(1, 3 * step), min_size=3, max_size=3))
    shared = step * data.draw(st.sampled_from([3, 0, 1, 2, 5])) + data.draw(st.integers(0, step - 1))
    hasher = BlockHasher(layout.hash_block_size)
    stored: list[set[str]] = [set() for _ in layout.groups]
    hits = []
    for number, tail in enumerate(tails):
        prompt = [1] * shared + [2 + number] * tail
        hashes = hasher.hash_blocks(prompt)
        hit = look_up(layout, len(prompt), finder(layout, hashes, stored))
        plan = plan_put(layout, len(prompt), hit=hit, retention_interval=0)
        for names, added in zip(stored, names_of(layout, hashes, plan.store_masks), strict=True):
            names |= added
        hits.append(hit)
    back = step if has_draft(layout) else 0
    # Full attention alone tells how much is shared: a chunked group needs nothing at the start of a run.
    if any(isinstance(spec, FullAttentionSpec) for spec in layout.groups):
        assert hits[2].hit_length >= min(hits[1].shared_length - back, hits[2].report.cap)


@slower
@given(layouts(), st.data())
def test_chunk_names_are_unique_and_complete(layout: KVCacheLayout, data: st.DataObject) -> None:
    tokens = [1] * data.draw(st.integers(0, 5 * layout.alignment))
    hashes = BlockHasher(layout.hash_block_size).hash_blocks(tokens)
    builder = KeyBuilder(layout, KeySchema("model"))
    for group, spec in enumerate(layout.groups):
        size, block = spec.block_size, layout.hash_block_size
        count = len(tokens) // size
        names = [chunk_name(layout, hashes, group, chunk) for chunk in range(count)]
        # A name exists as soon as the hash block that holds the chunk's last token is complete.
        ends = [-(-(chunk + 1) * size // block) * block for chunk in range(count)]
        assert [name is not None for name in names] == [end <= len(tokens) for end in ends]
        known = [name for name in names if name is not None]
        assert len(set(known)) == len(known)
        assert builder.names(hashes, group, range(len(known))) == known


# Frames


@st.composite
def frames(draw: st.DrawFn) -> tuple[ValueFormat, int, str, list[bytes], bytes]:
    """A value format, a chunk's place and name, its payload and its header."""
    value_format = ValueFormat("framed", draw(st.binary(min_size=8, max_size=8)).hex())
    group, name = draw(st.integers(0, 300)), draw(st.text(max_size=20))
    payload = draw(st.lists(st.binary(max_size=40), min_size=1, max_size=3))
    return value_format, group, name, payload, value_format.header(group, name, views(payload))


def views(payload: Sequence[bytes | bytearray]) -> tuple[memoryview, ...]:
    """Buffers as the client hands them on."""
    return tuple(memoryview(buffer) for buffer in payload)


Frame = tuple[ValueFormat, int, str, list[bytes], bytes]


@quick
@given(frames())
def test_a_frame_round_trips(frame: Frame) -> None:
    value_format, group, name, payload, header = frame
    assert len(header) == value_format.header_size == HEADER_SIZE
    assert value_format.fault(header, group, name, views(payload)) is None
    assert value_format.fault(memoryview(bytearray(header)), group, name, views([b"".join(payload)])) is None
    meta = unpack_header(header)
    assert meta is not None
    assert meta.length == sum(map(len, payload))
    assert meta.checksum == payload_checksum(views(payload)) == xxhash.xxh3_64_intdigest(b"".join(payload))
    assert (meta.group, meta.fingerprint.hex()) == (group, value_format.fingerprint)
    assert pack_header(meta) == header


@quick
@given(frames(), st.integers(1, 255))
def test_any_changed_header_byte_is_a_fault(frame: Frame, change: int) -> None:
    value_format, group, name, payload, header = frame
    for position in range(HEADER_SIZE):
        damaged = bytearray(header)
        damaged[position] ^= change
        assert value_format.fault(damaged, group, name, views(payload)) is not None, position


@quick
@given(frames(), st.integers(1, 255), st.data())
def test_any_changed_payload_byte_is_a_checksum_fault(frame: Frame, change: int, data: st.DataObject) -> None:
    value_format, group, name, payload, header = frame
    whole = bytearray(b"".join(payload))
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= change
        assert value_format.fault(header, group, name, views([damaged])) == "checksum"


@quick
@given(frames(), st.data())
def test_truncated_or_misplaced_values_are_faults(frame: Frame, data: st.DataObject) -> None:
    value_format, group, name, payload, header = frame
    whole = b"".join(payload)
    for length in (*range(HEADER_SIZE), HEADER_SIZE + 1):
        assert value_format.fault((header + b"\0")[:length], group, name, views(payload)) == "header"
    for length in range(len(whole)):
        assert value_format.fault(header, group, name, views([whole[:length]])) == "length"
    assert value_format.fault(header, group, name, views([whole, b"x"])) == "length"
    assert value_format.fault(header, group + 1, name, views(payload)) == "group"
    assert value_format.fault(header, group, name + "x", views(payload)) == "name"
    other = ValueFormat("framed", ("0" if value_format.fingerprint[0] != "0" else "1") * 16)
    assert other.fault(header, group, name, views(payload)) == "fingerprint"


@quick
@given(frames(), st.lists(st.tuples(st.integers(0, HEADER_SIZE - 1), st.binary(max_size=12)), max_size=4))
def test_a_patched_header_never_raises(frame: Frame, patches: list[tuple[int, bytes]]) -> None:
    value_format, group, name, payload, header = frame
    hostile = bytearray(header)
    for position, patch in patches:
        hostile[position : position + len(patch)] = patch
    hostile = hostile[:HEADER_SIZE]
    found = unpack_header(hostile)
    assert found is None or isinstance(found, FrameMeta)
    fault = value_format.fault(bytes(hostile), group, name, views(payload))
    assert fault is None or fault in {"header", "version", "fingerprint", "group", "length", "name", "checksum"}


@quick
@given(st.one_of(st.binary(min_size=HEADER_SIZE, max_size=HEADER_SIZE), st.binary(max_size=HEADER_SIZE + 16)))
@example(bytes(HEADER_SIZE))
@example(b"\xdd\xff\xff\xff\xff".ljust(HEADER_SIZE, b"\x90"))
@example(b"\x91" * HEADER_SIZE)
@example(b"\x97\x01\xc6\xff\xff\xff\xff".ljust(HEADER_SIZE, b"\0"))
@example(b"\x97\x01\xdf\xff\xff\xff\xff".ljust(HEADER_SIZE, b"\0"))
@example(b"\x97" + b"\xc7\x0c\xff" + b"\xff" * 60)
def test_random_bytes_are_no_header_and_never_raise(noise: bytes) -> None:
    # No random run of 64 bytes has the six fixed length marks of a header.
    assert unpack_header(noise) is None


# Hash chains

ALGORITHMS = ("sha256_packed", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@slower
@given(data=st.data(), size=st.integers(1, 5))
def test_hashes_name_prefixes(algorithm: Any, data: st.DataObject, size: int) -> None:
    hasher = BlockHasher(size, algorithm, "seed")
    tokens = [token % 3 for token in range(data.draw(st.integers(0, 8 * size)))]
    hashes = hasher.hash_blocks(tokens)
    assert len(hashes) == len(tokens) // size
    assert len(set(hashes)) == len(hashes)
    cut = data.draw(st.integers(0, len(tokens)))
    assert hasher.hash_blocks(tokens[:cut]) == hashes[: cut // size]
    blocks = cut // size
    if blocks:
        assert hasher.hash_blocks(tokens[blocks * size :], parent=hashes[blocks - 1]) == hashes[blocks:]
    if hashes:
        changed = data.draw(st.integers(0, len(hashes) * size - 1))
        other = [*tokens[:changed], tokens[changed] + 1, *tokens[changed + 1 :]]
        rehashed = hasher.hash_blocks(other)
        same = [a == b for a, b in zip(hashes, rehashed, strict=True)]
        assert same == [block < changed // size for block in range(len(hashes))]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@slower
@given(tokens=st.lists(st.integers(0, 2**16 - 1), max_size=12))
def test_lists_and_arrays_hash_alike(algorithm: Any, tokens: list[int]) -> None:
    hasher = BlockHasher(2, algorithm, "seed")
    expected = hasher.hash_blocks(tokens)
    forms: list[Any] = [tuple(tokens), *(array(code, tokens) for code in "HiIlLqQ")]
    forms += [np.array(tokens, dtype=kind) for kind in ("u2", "i4", "u4", "i8", "u8", ">i4", ">u2", ">i8")]
    forms.append(np.array([[token, 7] for token in tokens], dtype=np.int64).reshape(-1, 2)[:, 0])
    read_only = np.array(tokens, dtype=np.int32)
    read_only.flags.writeable = False
    forms.append(read_only)
    for form in forms:
        assert hasher.hash_blocks(form) == expected


@slower
@given(data=st.data(), size=st.integers(1, 4))
def test_a_sequence_that_grows_hashes_like_one_made_whole(data: st.DataObject, size: int) -> None:
    tokens = list(range(data.draw(st.integers(0, 10 * size))))
    what = vars(data.draw(traits(len(tokens))))
    algorithm: Any = data.draw(st.sampled_from(["sha256_packed", "sha256", "sha256_cbor"]))
    hasher = BlockHasher(size, algorithm)
    whole = TokenSequence(hasher, tokens, **what).block_hashes
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), min_size=1, max_size=4)))
    grown = TokenSequence(hasher, [], **what)
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        grown.extend(np.array(tokens[start:end], dtype=np.int64))
        assert len(grown) == grown.num_tokens == end
        if data.draw(st.integers(0, 3)):
            assert grown.block_hashes == whole[: end // size]
            assert grown.unhashed_tokens == end % size
    assert grown.block_hashes == whole
    assert grown.token_ids.tolist() == tokens


def literal(value: object) -> object:
    """``value`` as the compiler makes it from a literal: equal constants are one object."""
    return compile(repr(value), "<literal>", "eval").co_consts[0]


def reference_chain(algorithm: str, seed: str, blocks: Sequence[list[int]], keys: Sequence[Any]) -> list[bytes]:
    """vLLM's kinds, written from their definition."""

    def digest(value: object) -> bytes:
        cbor = algorithm.endswith("_cbor")
        data = cbor2.dumps(value, canonical=True) if cbor else pickle.dumps(value, protocol=5)
        return hashlib.sha256(data).digest() if algorithm.startswith("sha256") else xxhash.xxh3_128(data).digest()

    chain = [digest(seed)]
    for block, extra in zip(blocks, keys, strict=True):
        chain.append(digest((chain[-1], tuple(block), None if extra is None else literal(extra))))
    return chain


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "sha256_packed"])
@slower
@given(data=st.data(), size=st.integers(1, 4))
def test_the_vllm_kinds_equal_their_definition(algorithm: Any, data: st.DataObject, size: int) -> None:
    blocks = data.draw(st.lists(st.lists(st.integers(0, 2**63 - 1), min_size=size, max_size=size), max_size=4))
    keys = [data.draw(extras) for _ in blocks]
    expected = reference_chain(algorithm, "a seed", blocks, keys)
    hasher = BlockHasher(size, algorithm, "a seed")
    tokens = [token for block in blocks for token in block]
    # Fresh objects: equal parts that are not one object, and lists where tuples were.
    fresh = [None if extra is None else [list(key) for key in pickle.loads(pickle.dumps(extra))] for extra in keys]  # noqa: S301
    parts = [None if e is None else [[renewed(part) for part in key] for key in e] for e in fresh]
    assert hasher.none_hash == expected[0]
    assert list(hasher.hash_blocks(tokens, extra_keys=keys)) == expected[1:]
    assert list(hasher.hash_blocks(tokens, extra_keys=parts)) == expected[1:]


def renewed(part: str | int | bytes) -> str | int | bytes:
    """An equal part that is another object wherever Python allows it."""
    if isinstance(part, str):
        return part.encode().decode()
    return bytes(bytearray(part)) if isinstance(part, bytes) else part


@slower
@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=12), seed=st.sampled_from(["", "a seed", "naïve"]))
def test_the_packed_kind_equals_its_definition(tokens: list[int], seed: str) -> None:
    hasher = BlockHasher(3, seed=seed)
    parent = hashlib.sha256(f"mooncake-sparse-client:1:3:{seed}".encode()).digest()
    assert hasher.none_hash == parent
    for number, found in enumerate(hasher.hash_blocks(tokens)):
        block = tokens[3 * number : 3 * number + 3]
        parent = hashlib.sha256(parent + b"".join(token.to_bytes(4, "little") for token in block)).digest()
        assert found == parent


SCRIPT = """
from mooncake_sparse_client import BlockHasher, TokenSequence
sequence = TokenSequence(BlockHasher(4), range(64), cache_salt="tenant-a", lora=("adapter", "/a"))
print(",".join(digest.hex() for digest in sequence.block_hashes))
"""


def test_two_processes_agree_whatever_their_hash_seed() -> None:
    answers = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    here = TokenSequence(BlockHasher(4), list(range(64)), cache_salt="tenant-a", lora=("adapter", "/a"))
    assert answers[0] == answers[1] == ",".join(digest.hex() for digest in here.block_hashes)
    assert len(answers[0]) == 16 * 65 - 1


def test_a_lookup_stops_where_full_attention_stops() -> None:
    layout = KVCacheLayout([SlidingWindowSpec(8, 8), FullAttentionSpec(32)])
    hit = look_up(layout, 129, lambda group, chunk: False)
    assert (hit.hit_length, hit.keys_asked, hit.report.limited_by) == (0, 4, (1,))


def arrays_of(layout: KVCacheLayout, tokens: int) -> list[NDArray[np.bool_]]:
    """Everything is there."""
    return [np.ones(tokens // spec.block_size, dtype=np.bool_) for spec in layout.groups]


@quick
@given(layouts(), st.integers(0, 200))
def test_a_store_that_has_everything_hits_the_cap(layout: KVCacheLayout, tokens: int) -> None:
    present = arrays_of(layout, tokens)
    hit = longest_usable_prefix(layout, tokens, present)
    cap = down(layout, tokens - 1)
    # A draft margin must end within the whole blocks, so the cap itself may be one step too far.
    lowest = cap if not has_draft(layout) or cap < down(layout, tokens) else max(cap - alignment(layout), 0)
    assert lowest <= hit <= cap
