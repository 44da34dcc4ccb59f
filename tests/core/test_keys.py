"""Chunk names, store keys, the fingerprint that sets caches apart, and the identity made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mooncake_sparse_client import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    KeySchema,
    KVCacheLayout,
    MambaSpec,
    SlidingWindowSpec,
    chunk_name,
)
from mooncake_sparse_client.core.framing import FRAMED_VERSION, HEADER_SIZE, RAW_VERSION
from mooncake_sparse_client.core.keys import KeyBuilder, chunk_hash_position, fingerprint
from mooncake_sparse_client.errors import (
    ConfigError,
    InvalidHasherError,
    InvalidKeyError,
    InvalidLayoutError,
    SparseStoreError,
)
from mooncake_sparse_client.identity import Identity, resolve_identity

GROUPS: list[GroupSpec] = [
    FullAttentionSpec(32, page_size_bytes=320),
    SlidingWindowSpec(8, 8, page_size_bytes=80),
    ChunkedLocalAttentionSpec(16, 64, page_size_bytes=160),
    MambaSpec(32, page_size_bytes=99),
]


@pytest.fixture(autouse=True)
def no_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names no seed."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


# Names


def test_a_chunk_is_named_by_the_hash_that_ends_with_it_or_by_its_distance() -> None:
    hashes = [bytes([0xA0 + number]) * 2 for number in range(4)]
    layout = KVCacheLayout([FullAttentionSpec(32), SlidingWindowSpec(8, 8)])
    assert [chunk_name(layout, hashes, 0, chunk) for chunk in range(2)] == ["a0a0", "a1a1"]
    assert [chunk_name(layout, hashes, 1, chunk) for chunk in range(5)] == [
        "a0a0.3",
        "a0a0.2",
        "a0a0.1",
        "a0a0",
        "a1a1.3",
    ]
    finer = layout.with_hash_block_size(8)
    assert [chunk_name(finer, hashes, 1, chunk) for chunk in range(2)] == ["a0a0", "a1a1"]
    assert chunk_name(finer, hashes, 0, 0) == "a3a3"
    assert chunk_hash_position(finer, 0, 1) == (7, 0)


def test_a_chunk_whose_hash_block_is_not_complete_has_no_name() -> None:
    layout = KVCacheLayout([FullAttentionSpec(32), SlidingWindowSpec(8, 8)])
    assert chunk_name(layout, [b"x"], 1, 4) is None
    assert chunk_name(layout, [], 0, 0) is None
    with pytest.raises(IndexError):
        KeyBuilder(layout, KeySchema("m")).names([b"x"], 1, [4])


# Keys


def test_the_key_of_every_part() -> None:
    schema = KeySchema(
        "org/model", tp_rank=1, pcp_rank=2, dcp_rank=3, pp_rank=4, cache_prefix="fleet", namespace="@fp:00ff"
    )
    assert schema.key(5, "abcd.1") == "fleet@org/model@fp:00ff@tp_rank:1@pcp2@dcp3@pp_rank:4@group:5@abcd.1"
    assert schema.rank == (1, 2, 3, 4)
    assert schema.key_ranks == ()
    assert schema.lookup_ranks == ((1, 2, 3, 4),)
    assert KeySchema("m").key(0, "ab") == "m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@ab"
    assert KeySchema.vllm("m", tp_rank=1, cache_prefix="p").key(0, "ab") == (
        "p@m@tp_rank:1@pcp0@dcp0@pp_rank:0@group:0@ab"
    )


def test_the_keys_of_every_rank_stand_side_by_side() -> None:
    layout = KVCacheLayout([FullAttentionSpec(16)])
    ranks = [(0, 0, 0, 0), (1, 0, 0, 0)]
    builder = KeyBuilder(layout, KeySchema("m", tp_rank=7, key_ranks=ranks))  # type: ignore[arg-type]
    hashes = [b"\x01", b"\x02"]
    assert builder.ranked_keys(hashes, 0, [1, 0]) == [
        f"m@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0@{name}" for name in ("02", "01") for rank in (0, 1)
    ]
    assert builder.own_keys(hashes, 0, [1]) == ["m@tp_rank:7@pcp0@dcp0@pp_rank:0@group:0@02"]


def test_ranks_are_listed_once_in_their_order() -> None:
    schema = KeySchema("m", key_ranks=[[1, 0, 0, 0], (0, 0, 0, 0), (1, 0, 0, 0)])  # type: ignore[arg-type]
    assert schema.key_ranks == ((1, 0, 0, 0), (0, 0, 0, 0))
    assert KeySchema.vllm("m", key_ranks=[(3, 2, 1, 0)]).key_ranks == ((3, 2, 1, 0),)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model_name": ""}, ["model_name", "empty"]),
        ({"model_name": None}, ["model_name", "None"]),
        ({"model_name": b"m"}, ["model_name", "text"]),
        ({"model_name": "\ud800"}, ["model_name", "UTF-8"]),
        ({"cache_prefix": 1}, ["cache_prefix", "1"]),
        ({"cache_prefix": "\udfff"}, ["cache_prefix", "UTF-8"]),
        ({"namespace": None}, ["namespace", "text"]),
        ({"tp_rank": -1}, ["tp_rank", "negative", "-1"]),
        ({"pcp_rank": "0"}, ["pcp_rank", "'0'"]),
        ({"dcp_rank": True}, ["dcp_rank", "True"]),
        ({"pp_rank": 1.0}, ["pp_rank", "1.0"]),
        ({"key_ranks": [(0, 0, 0)]}, ["key_ranks[0]", "(tp, pcp, dcp, pp)"]),
        ({"key_ranks": [(0, 0, 0, 0), (0, 0, 0, -1)]}, ["pp in key_ranks[1]", "-1"]),
        ({"key_ranks": [("0", 0, 0, 0)]}, ["tp in key_ranks[0]", "'0'"]),
        ({"key_ranks": (0, 0, 0, 0)}, ["key_ranks[0]", "(tp, pcp, dcp, pp)"]),
        ({"key_ranks": ["0000"]}, ["key_ranks[0]", "'0000'"]),
        ({"key_ranks": 5}, ["key_ranks", "5"]),
    ],
)
def test_bad_parts_are_named(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidKeyError) as caught:
        KeySchema(**{"model_name": "m", **arguments})
    for word in words:
        assert word in str(caught.value)


def test_the_cache_id_is_what_ranks_share() -> None:
    schema = KeySchema("m", tp_rank=1, cache_prefix="p").with_namespace("@fp:1")
    assert schema.cache_id == dataclasses.replace(schema, tp_rank=0, key_ranks=()).cache_id
    for other in (KeySchema("n"), KeySchema("m"), KeySchema("m", cache_prefix="p")):
        assert other.cache_id != schema.cache_id


# The fingerprint


def digits(
    groups: list[GroupSpec] = GROUPS,
    *,
    hash_block: int | None = 8,
    hasher: BlockHasher | None = None,
    version: int = 1,
    dtype: str = "bfloat16",
    revision: str = "r1",
) -> str:
    """The fingerprint of the test's layout with some of its parts changed."""
    layout = KVCacheLayout(groups, hash_block_size=hash_block)
    hasher = hasher or BlockHasher(layout.hash_block_size)
    return fingerprint(layout, hasher, format_version=version, dtype=dtype, revision=revision)


def swapped(number: int, **changes: Any) -> list[GroupSpec]:
    """The test's groups with one of them changed."""
    groups = list(GROUPS)
    groups[number] = dataclasses.replace(groups[number], **changes)
    return groups


def test_the_fingerprint_is_16_stable_digits() -> None:
    assert digits() == digits()
    assert len(digits()) == 16
    assert set(digits()) <= set("0123456789abcdef")
    # Written down once: a change would part a fleet in two.
    plain = fingerprint(
        KVCacheLayout([FullAttentionSpec(16, page_size_bytes=64)]),
        BlockHasher(16),
        format_version=1,
        dtype="bfloat16",
        revision="",
    )
    assert plain == PINNED_FINGERPRINT


PINNED_FINGERPRINT = "693a4f2b44df41c6"

CHANGES: dict[str, Callable[[], str]] = {
    "value format": lambda: digits(version=2),
    "block size": lambda: digits(swapped(0, block_size=16)),
    "window": lambda: digits(swapped(1, sliding_window=9)),
    "attention chunk": lambda: digits(swapped(2, attention_chunk_size=128)),
    "page size": lambda: digits(swapped(3, page_size_bytes=100)),
    "no page size": lambda: digits(swapped(3, page_size_bytes=None)),
    "kind": lambda: digits([FullAttentionSpec(32, page_size_bytes=320), *GROUPS[1:3], GROUPS[0]]),
    "another kind with the same numbers": lambda: digits([*GROUPS[:3], FullAttentionSpec(32, page_size_bytes=99)]),
    "chunked instead of sliding": lambda: digits(
        [GROUPS[0], ChunkedLocalAttentionSpec(8, 8, page_size_bytes=80), *GROUPS[2:]]
    ),
    "order": lambda: digits([GROUPS[1], GROUPS[0], *GROUPS[2:]]),
    "one group more": lambda: digits([*GROUPS, GROUPS[0]]),
    "hash block": lambda: digits(hash_block=4),
    "hash kind": lambda: digits(hasher=BlockHasher(8, "sha256")),
    "hash encoding": lambda: digits(hasher=BlockHasher(8, "sha256_cbor")),
    "seed": lambda: digits(hasher=BlockHasher(8, seed="s")),
    "vllm seed": lambda: digits(hasher=BlockHasher(8, "sha256", "s")),
    "dtype": lambda: digits(dtype="float8_e4m3fn"),
    "revision": lambda: digits(revision="r2"),
    "no revision": lambda: digits(revision=""),
    "dtype and revision the other way round": lambda: digits(dtype="r1", revision="bfloat16"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_makes_caches_incompatible_enters_the_fingerprint(change: str) -> None:
    assert CHANGES[change]() != digits()


def test_no_two_changes_have_one_fingerprint() -> None:
    found = [make() for make in CHANGES.values()]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    "groups",
    [swapped(0, name="target"), [dataclasses.replace(spec, name=f"{n}") for n, spec in enumerate(GROUPS)]],
    ids=["name", "names"],
)
def test_names_do_not_enter_the_fingerprint(groups: list[GroupSpec]) -> None:
    assert digits(groups) == digits()


def test_draft_flags_do_not_enter_the_fingerprint() -> None:
    plain = [GROUPS[0], GROUPS[1], GROUPS[3]]
    flagged: list[GroupSpec] = [dataclasses.replace(GROUPS[0], eagle=True), GROUPS[1], GROUPS[3]]
    assert digits(flagged) == digits(plain)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": ""}, ["dtype", "empty"]),
        ({"dtype": np.float16}, ["dtype", "text"]),
        ({"revision": None}, ["revision", "None"]),
        ({"revision": "\ud800"}, ["revision"]),
    ],
)
def test_bad_parts_of_a_fingerprint_are_named(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidKeyError) as caught:
        digits(**arguments)
    for word in words:
        assert word in str(caught.value)


# Identities


def identity(groups: list[GroupSpec] = GROUPS, **options: Any) -> Identity:
    """The identity of a client of the test's layout."""
    return resolve_identity(KVCacheLayout(groups), **{"model_name": "m", **options})


def test_the_native_profile() -> None:
    found = identity()
    assert found.hasher == BlockHasher(32, "sha256_packed")
    assert found.layout.hash_block_size == 32
    assert found.keys.schema.namespace == f"@fp:{found.value_format.fingerprint}"
    assert found.value_format.name == "framed"
    assert found.owns_namespace
    assert found.value_bytes(1) == 80 + HEADER_SIZE


def test_the_vllm_profile() -> None:
    found = identity(profile="vllm")
    assert found.hasher == BlockHasher(8, "sha256", "vllm-none-hash")
    assert found.layout.hash_block_size == 8
    assert found.keys.schema.namespace == ""
    assert found.value_format.name == "raw"
    assert not found.owns_namespace
    assert found.value_bytes(1) == 80
    assert identity(profile="vllm", keys=KeySchema("m", tp_rank=2)).keys.schema.key(0, "a").startswith("m@tp_rank:2@")


def test_each_part_of_a_profile_can_be_given() -> None:
    explicit = KVCacheLayout(GROUPS, hash_block_size=16)
    assert resolve_identity(explicit, model_name="m", profile="vllm").layout.hash_block_size == 16
    assert identity(value_format="raw").value_format.name == "raw"
    assert identity(profile="vllm", value_format="framed").value_format.name == "framed"
    assert identity(hasher=BlockHasher(32, "sha256")).hasher.algorithm == "sha256"
    assert identity(keys=KeySchema.vllm("m")).keys.schema.namespace == ""
    assert identity(keys=KeySchema("m", namespace="@mine")).keys.schema.namespace == "@mine"
    assert identity(keys=KeySchema("m", tp_rank=1)).keys.schema.namespace.startswith("@fp:")


def test_ranks_and_prefixes_do_not_part_a_fleet() -> None:
    namespace = identity().keys.schema.namespace
    for schema in (
        KeySchema("m", tp_rank=3),
        KeySchema("m", cache_prefix="p"),
        KeySchema("m", key_ranks=((1, 0, 0, 0),)),
    ):
        assert identity(keys=schema).keys.schema.namespace == namespace
    assert identity(model_name="other").keys.schema.namespace == namespace
    assert identity(dtype="float16").keys.schema.namespace != namespace
    assert identity(revision="abc").keys.schema.namespace != namespace


def test_framed_and_raw_values_never_meet() -> None:
    assert FRAMED_VERSION != RAW_VERSION
    assert identity().keys.schema.namespace != identity(value_format="raw").keys.schema.namespace


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"profile": "sglang"}, ConfigError, ["profile", "'sglang'", "'native'", "'vllm'"]),
        ({"value_format": "json"}, ConfigError, ["value_format", "'json'", "'framed'", "'raw'"]),
        ({"hasher": BlockHasher(16)}, InvalidHasherError, ["block_size", "16", "32", "hash_block_size="]),
        ({"keys": "m"}, InvalidKeyError, ["keys", "KeySchema", "'m'"]),
        ({"keys": KeySchema("other")}, InvalidKeyError, ["model_name", "'m'", "'other'"]),
        ({"model_name": ""}, InvalidKeyError, ["model_name"]),
        ({"dtype": ""}, InvalidKeyError, ["dtype"]),
        ({"groups": [FullAttentionSpec(16)]}, InvalidLayoutError, ["page_size_bytes", "group 0"]),
    ],
)
def test_parts_that_do_not_fit_are_named(
    options: dict[str, Any], error: type[SparseStoreError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        identity(**options)
    for word in words:
        assert word in str(caught.value)
