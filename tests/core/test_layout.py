"""Layouts: what they settle, and what they refuse."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from typing import Any

import numpy as np
import pytest

from mooncake_sparse_client import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    KVCacheLayout,
    MambaSpec,
    SlidingWindowSpec,
    load_mask,
    longest_usable_prefix,
    store_mask,
)
from mooncake_sparse_client.core.plans import plan_put
from mooncake_sparse_client.errors import (
    InvalidInputError,
    InvalidLayoutError,
    InvalidRequestError,
    InvalidRetentionError,
)

FULL_AND_WINDOW = KVCacheLayout([FullAttentionSpec(32), SlidingWindowSpec(8, 8)], hash_block_size=8)
FULL_16 = KVCacheLayout([FullAttentionSpec(16)])


def refused(error: type[InvalidInputError], words: list[str], call: Any) -> None:
    """``call`` raises ``error`` with all ``words`` in its message, and is a ValueError too."""
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FullAttentionSpec(0), ["FullAttentionSpec.block_size", "at least 1", "0"]),
        (lambda: FullAttentionSpec(-4), ["block_size", "-4"]),
        (lambda: FullAttentionSpec(True), ["block_size", "int", "True"]),
        (lambda: FullAttentionSpec(16.0), ["block_size", "int", "16.0"]),  # type: ignore[arg-type]
        (lambda: FullAttentionSpec("16"), ["block_size", "int", "'16'"]),  # type: ignore[arg-type]
        (lambda: FullAttentionSpec(None), ["block_size", "None"]),  # type: ignore[arg-type]
        (lambda: FullAttentionSpec(16, page_size_bytes=0), ["page_size_bytes", "at least 1"]),
        (lambda: FullAttentionSpec(16, page_size_bytes=1.5), ["page_size_bytes", "1.5"]),  # type: ignore[arg-type]
        (lambda: FullAttentionSpec(16, eagle=1), ["FullAttentionSpec.eagle", "True or False"]),  # type: ignore[arg-type]
        (lambda: FullAttentionSpec(16, name=3), ["FullAttentionSpec.name", "text"]),  # type: ignore[arg-type]
        (lambda: SlidingWindowSpec(8, 0), ["SlidingWindowSpec.sliding_window", "at least 1"]),
        (lambda: SlidingWindowSpec(0, 8), ["SlidingWindowSpec.block_size"]),
        (lambda: SlidingWindowSpec(8, 2.5), ["sliding_window", "2.5"]),  # type: ignore[arg-type]
        (lambda: ChunkedLocalAttentionSpec(8, 12), ["attention_chunk_size", "multiple of block_size 8", "12"]),
        (lambda: ChunkedLocalAttentionSpec(8, 4), ["attention_chunk_size", "multiple"]),
        (lambda: ChunkedLocalAttentionSpec(8, 0), ["attention_chunk_size", "at least 1"]),
        (lambda: ChunkedLocalAttentionSpec(8, 8, eagle=True), ["ChunkedLocalAttentionSpec.eagle", "draft margin"]),
        (lambda: MambaSpec(-1), ["MambaSpec.block_size"]),
        (lambda: MambaSpec(8, eagle=True), ["MambaSpec.eagle", "leave the flag off"]),
    ],
)
def test_impossible_specs_name_the_field(make: Any, words: list[str]) -> None:
    refused(InvalidLayoutError, words, make)


@pytest.mark.parametrize(
    ("groups", "options", "words"),
    [
        ([], {}, ["groups is empty"]),
        (None, {}, ["groups", "list of specs", "None"]),
        (FullAttentionSpec(16), {}, ["groups", "list of specs"]),
        ({FullAttentionSpec(16)}, {}, ["groups", "list of specs"]),
        ("full", {}, ["groups[0]", "spec"]),
        ([FullAttentionSpec(16), 16], {}, ["groups[1]", "16"]),
        ([FullAttentionSpec], {}, ["groups[0]", "spec"]),
        ([FullAttentionSpec(16)], {"hash_block_size": 0}, ["hash_block_size", "at least 1"]),
        ([FullAttentionSpec(16)], {"hash_block_size": 32}, ["hash_block_size 32", "divide the alignment 16"]),
        ([FullAttentionSpec(16)], {"hash_block_size": 3}, ["hash_block_size 3", "divide"]),
        ([FullAttentionSpec(16)], {"hash_block_size": "8"}, ["hash_block_size", "int"]),
        ([FullAttentionSpec(4), FullAttentionSpec(6)], {"hash_block_size": 3}, ["hash_block_size 3", "block size 4"]),
        ([FullAttentionSpec(4), FullAttentionSpec(6)], {"hash_block_size": 4}, ["hash_block_size 4", "block size 6"]),
        ([FullAttentionSpec(16)], {"use_eagle": 1}, ["use_eagle", "True or False"]),
        ([FullAttentionSpec(16)], {"use_eagle": None}, ["use_eagle", "True or False"]),
        ([MambaSpec(16)], {"use_eagle": True}, ["use_eagle", "no full or sliding-window group"]),
        (
            [FullAttentionSpec(16, eagle=True), ChunkedLocalAttentionSpec(16, 32)],
            {},
            ["eagle", "beside a chunked local group"],
        ),
        ([FullAttentionSpec(16), ChunkedLocalAttentionSpec(16, 32)], {"use_eagle": True}, ["eagle", "chunked local"]),
    ],
)
def test_impossible_layouts_name_the_field(groups: Any, options: dict[str, Any], words: list[str]) -> None:
    refused(InvalidLayoutError, words, lambda: KVCacheLayout(groups, **options))


def test_sizes_may_be_numpy_ints_and_become_plain_ones() -> None:
    spec = SlidingWindowSpec(np.int64(8), np.int32(9), page_size_bytes=np.uint16(5))  # type: ignore[arg-type]
    assert spec == SlidingWindowSpec(8, 9, page_size_bytes=5)
    assert {type(spec.block_size), type(spec.sliding_window), type(spec.page_size_bytes)} == {int}


def test_alignment_and_hash_blocks_by_default() -> None:
    mixed: list[GroupSpec] = [FullAttentionSpec(32), SlidingWindowSpec(8, 8), MambaSpec(12)]
    layout = KVCacheLayout(mixed)
    assert (layout.alignment, layout.common_block_size, layout.hash_block_size) == (96, 4, 96)
    assert not layout.hash_block_size_given
    assert KVCacheLayout(mixed, use_eagle=True).hash_block_size == 4
    explicit = layout.with_hash_block_size(4)
    assert (explicit.hash_block_size, explicit.hash_block_size_given) == (4, True)
    assert KVCacheLayout(mixed, hash_block_size=96, use_eagle=True).hash_block_size == 96


def test_another_hash_block_keeps_the_draft_flags() -> None:
    layout = KVCacheLayout([FullAttentionSpec(16), SlidingWindowSpec(4, 8), MambaSpec(8)], use_eagle=True)
    assert [spec.eagle for spec in layout.with_hash_block_size(16).groups] == [True, True, False]
    flagged = KVCacheLayout([FullAttentionSpec(16, eagle=True), SlidingWindowSpec(4, 8)])
    assert [spec.eagle for spec in flagged.with_hash_block_size(16).groups] == [True, False]


def test_groups_with_equal_specs_share_the_draft_flag() -> None:
    layout = KVCacheLayout(
        [
            FullAttentionSpec(16, name="target"),
            FullAttentionSpec(16, name="draft", eagle=True),
            FullAttentionSpec(16, page_size_bytes=5),
            SlidingWindowSpec(16, 16),
        ]
    )
    assert [spec.eagle for spec in layout.groups] == [True, True, False, False]
    assert layout.use_eagle
    # A flagged group wins: use_eagle then flags no other.
    again = KVCacheLayout([FullAttentionSpec(16, eagle=True), SlidingWindowSpec(16, 16)], use_eagle=True)
    assert [spec.eagle for spec in again.groups] == [True, False]
    assert not KVCacheLayout([FullAttentionSpec(16)]).use_eagle


def test_positions_round_down_and_the_last_token_is_recomputed() -> None:
    layout = FULL_AND_WINDOW
    assert [layout.align(tokens) for tokens in (0, 31, 32, 95)] == [0, 0, 32, 64]
    assert [layout.hit_cap(tokens) for tokens in (0, 1, 32, 33, 64, 65)] == [0, 0, 0, 32, 32, 64]


def test_page_sizes_name_the_spec_that_has_none() -> None:
    complete = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=3), MambaSpec(16, page_size_bytes=9)])
    assert complete.page_sizes == (3, 9)
    lacking = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=3), MambaSpec(16, name="states")])
    refused(
        InvalidLayoutError,
        ["page_size_bytes", "group 1", "states", "MambaSpec", "every spec"],
        lambda: lacking.page_sizes,
    )


def test_layouts_and_specs_are_values() -> None:
    first = KVCacheLayout([FullAttentionSpec(16), MambaSpec(16)])
    second = KVCacheLayout((FullAttentionSpec(16), MambaSpec(16)))
    assert first == second
    assert len({first, second}) == 1
    assert pickle.loads(pickle.dumps(first)) == first  # noqa: S301
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.alignment = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.groups[0].block_size = 1  # type: ignore[misc]


# Counts and intervals given to the functions beside the layout.


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        (-32, ["-32"]),
        (16, ["16", "32"]),
        (33, ["33", "multiple of the alignment 32"]),
        (True, ["True"]),
        (32.0, ["32.0"]),
        ("32", ["'32'"]),
    ],
)
def test_bad_retention_intervals(interval: Any, words: list[str]) -> None:
    refused(
        InvalidRetentionError,
        ["retention_interval", *words],
        lambda: store_mask(FULL_AND_WINDOW, 64, retention_interval=interval),
    )
    refused(
        InvalidRetentionError,
        ["retention_interval", *words],
        lambda: plan_put(FULL_AND_WINDOW, 64, retention_interval=interval),
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_tokens", 63, ["multiple of the alignment 32", "63"]),
        ("num_tokens", -32, ["negative", "-32"]),
        ("num_tokens", 64.0, ["64.0"]),
        ("num_tokens", None, ["None"]),
        ("num_tokens", True, ["True"]),
        ("start_token", -1, ["negative"]),
        ("start_token", "0", ["'0'"]),
        ("num_prompt_tokens", -1, ["negative"]),
        ("num_prompt_tokens", 1.5, ["1.5"]),
        ("boundaries", [32, -1], ["negative"]),
        ("boundaries", [None], ["None"]),
        ("boundaries", "32", ["boundaries", "'32'"]),
        ("boundaries", 32, []),
    ],
)
def test_bad_counts_for_a_store_mask(name: str, value: Any, words: list[str]) -> None:
    arguments = {"num_tokens": 64, name: value}
    refused(InvalidRequestError, [name, *words], lambda: store_mask(FULL_AND_WINDOW, **arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hit_length": 40}, ["hit_length", "multiple of the alignment 32", "40"]),
        ({"hit_length": -32}, ["hit_length", "negative"]),
        ({"hit_length": 32.0}, ["hit_length", "32.0"]),
        ({"hit_length": 32, "local_tokens": -1}, ["local_tokens", "negative"]),
        ({"hit_length": 32, "local_tokens": 1.0}, ["local_tokens", "1.0"]),
    ],
)
def test_bad_counts_for_a_load_mask(arguments: dict[str, Any], words: list[str]) -> None:
    refused(InvalidRequestError, words, lambda: load_mask(FULL_AND_WINDOW, **arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_tokens": 101}, ["num_tokens is 101", "100 tokens", "extend()"]),
        ({"num_tokens": -1}, ["num_tokens", "negative"]),
        ({"num_prompt_tokens": -1}, ["num_prompt_tokens", "negative"]),
        ({"start_token": 128}, ["start_token 128", "100"]),
        ({"num_tokens": 31, "start_token": 32}, ["start_token 32", "31"]),
        ({"start_token": 1.0}, ["start_token", "1.0"]),
    ],
)
def test_bad_counts_for_a_put(arguments: dict[str, Any], words: list[str]) -> None:
    refused(InvalidRequestError, words, lambda: plan_put(FULL_AND_WINDOW, 100, **arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"local_tokens": -1}, ["local_tokens", "negative"]),
        ({"local_tokens": -16}, ["local_tokens", "negative"]),
        ({"local_tokens": 32.5}, ["local_tokens", "32.5"]),
        ({"num_tokens": -5}, ["num_tokens", "negative"]),
        ({"num_tokens": 100.0}, ["num_tokens", "100.0"]),
        ({"present": []}, ["present", "1", "0"]),
        ({"present": [np.zeros(6, bool)] * 2}, ["present", "array a group", "2"]),
    ],
)
def test_bad_input_for_a_prefix(arguments: dict[str, Any], words: list[str]) -> None:
    given: dict[str, Any] = {"num_tokens": 100, "present": [np.zeros(6, bool)], **arguments}
    refused(InvalidRequestError, words, lambda: longest_usable_prefix(FULL_16, **given))


def test_present_arrays_may_be_short_or_long_or_lists() -> None:
    assert longest_usable_prefix(FULL_16, 100, [np.ones(2, bool)]) == 32
    assert longest_usable_prefix(FULL_16, 100, [np.ones(50, bool)]) == 96
    assert longest_usable_prefix(FULL_16, 100, [[True, True, False, True]]) == 32  # type: ignore[list-item]


def test_a_window_as_wide_as_can_be_needs_everything() -> None:
    layout = KVCacheLayout([SlidingWindowSpec(1, sys.maxsize)])
    assert [mask.all() for mask in store_mask(layout, 8)] == [True]
    assert longest_usable_prefix(layout, 9, [np.ones(8, bool)]) == 8
    assert longest_usable_prefix(layout, 9, [np.arange(8) > 0]) == 0


def test_a_window_of_one_needs_nothing_margin_or_not() -> None:
    layout = KVCacheLayout([FullAttentionSpec(16), SlidingWindowSpec(16, 1)], use_eagle=True)
    assert [mask.tolist() for mask in store_mask(layout, 48)] == [[True] * 3, [False] * 3]
    assert longest_usable_prefix(layout, 48, [np.ones(3, bool), np.zeros(3, bool)]) == 32
