"""Blocks written many at once, against objects encoded one by one."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import cbor2
import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import slower

from mooncake_sparse_client import BlockHasher
from mooncake_sparse_client.core.encoding import CBOR, PICKLE, ObjectEncoding
from mooncake_sparse_client.core.hashing import HashAlgorithm

Encode = Callable[[Any], bytes]


def pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def canonical(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


KINDS: dict[HashAlgorithm, tuple[Encode, Callable[[bytes], bytes]]] = {
    "sha256": (pickled, sha256),
    "sha256_cbor": (canonical, sha256),
    "xxhash": (pickled, xxhash.xxh3_128_digest),
    "xxhash_cbor": (canonical, xxhash.xxh3_128_digest),
}
#: Where an encoding changes its form, and what it has no common form for.
EDGES = [0, 1, 23, 24, 255, 256, 65535, 65536, 2**24 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]
#: Literals, in which equal parts are one object: a pickle tells.
EXTRAS: list[Any] = [
    (("cache_salt", "tenant-a"),),
    (("lora", "same", "same"), ("mm", "same", -3)),
    (("mm", "image", 0), ("mm", "image", 0), ("prompt_embeds", b"\xff" * 32)),
    (("prompt_embeds", b"\xff" * 16), ("a", 0, 0, 0, 0)),
]


def plain_chain(kind: HashAlgorithm, tokens: Sequence[int], size: int, extras: Sequence[Any] = ()) -> list[bytes]:
    """The chain by its definition, block by block."""
    encode, digest = KINDS[kind]
    chain = [digest(encode("seed"))]
    for number in range(len(tokens) // size):
        block = tuple(tokens[number * size : (number + 1) * size])
        chain.append(digest(encode((chain[-1], block, extras[number] if extras else None))))
    return chain[1:]


def prompt(seed: int, length: int, below: int) -> list[int]:
    """``length`` ids, of which about every second lies at an edge."""
    dice = np.random.default_rng(seed)
    edges = [edge for edge in EDGES if edge < below]
    some = dice.integers(0, below, length).tolist()
    return [edges[pick] if pick < len(edges) else other for pick, other in zip(dice.integers(0, 30, length), some)]  # noqa: B905


@pytest.mark.parametrize("kind", KINDS)
@slower
@given(
    size=st.integers(1, 40),
    length=st.one_of(st.integers(500, 1500), st.integers(0, 600)),
    below=st.sampled_from([2**18, 24, 256, 2**16, 2**24, 2**31, 2**32, 2**63]),
    seed=st.integers(0, 2**32 - 1),
    marked=st.dictionaries(st.integers(0, 1500), st.sampled_from(EXTRAS), max_size=3),
)
@example(size=16, length=1024, below=2**31, seed=1, marked={})
@example(size=3, length=1200, below=2**18, seed=2, marked={0: EXTRAS[0]})
def test_every_kind_is_what_the_plain_loop_gives(
    kind: HashAlgorithm, size: int, length: int, below: int, seed: int, marked: dict[int, Any]
) -> None:
    tokens, hasher = prompt(seed, length, below), BlockHasher(size, kind, "seed")
    expected = plain_chain(kind, tokens, size)
    assert list(hasher.hash_blocks(tokens)) == expected
    assert list(hasher.hash_blocks(np.array(tokens, dtype=np.int64))) == expected
    extras = [marked.get(number) for number in range(length // size)]
    assert list(hasher.hash_blocks(tokens, extra_keys=extras)) == plain_chain(kind, tokens, size, extras)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 4, 7, 256])
def test_a_long_prompt_is_what_the_plain_loop_gives(kind: HashAlgorithm, size: int) -> None:
    # Longer than is written at once; one part has an id that must be encoded alone, another extra keys.
    tokens = prompt(7, 50_000, 2**18)
    tokens[20_000] = 2**40
    extras = [EXTRAS[0] if number == 40_000 // size else None for number in range(len(tokens) // size)]
    hasher = BlockHasher(size, kind, "seed")
    assert list(hasher.hash_blocks(tokens, extra_keys=extras)) == plain_chain(kind, tokens, size, extras)


@pytest.mark.parametrize("kind", ["xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("size", [4096, 4097, 13_100, 30_000])
def test_large_blocks_are_what_the_plain_loop_gives(kind: HashAlgorithm, size: int) -> None:
    # A pickle of about 13100 such ids reaches 64 KiB, where its first frame ends.
    tokens = prompt(3, 60_000, 2**31)
    assert list(BlockHasher(size, kind, "seed").hash_blocks(tokens)) == plain_chain(kind, tokens, size)


class Token(IntEnum):
    """An int that is pickled as a member of its class."""

    END = 300


@pytest.mark.parametrize("kind", ["sha256_packed", *KINDS])
@pytest.mark.parametrize(
    "odd",
    [
        lambda tokens: [np.int64(token) for token in tokens],
        lambda tokens: [*tokens[:-1], np.uint16(tokens[-1])],
        lambda tokens: [Token.END if token == 300 else token for token in tokens],
        lambda tokens: [bool(token) if token < 2 and place else token for place, token in enumerate(tokens)],
        lambda tokens: [bool(token) if token < 2 else token for token in tokens],
        tuple,
    ],
    ids=["numpy", "one numpy", "enum", "bools", "first a bool", "tuple"],
)
def test_odd_ints_hash_like_plain_ones(kind: HashAlgorithm, odd: Callable[[list[int]], Any]) -> None:
    tokens = [1, 300, 0, 1] * 200 + [300] * 200 + [70_000, 5] * 100
    hasher = BlockHasher(4, kind, "seed")
    assert hasher.hash_blocks(odd(tokens)) == hasher.hash_blocks(np.array(tokens))


@pytest.mark.parametrize(("encoding", "encode"), [(PICKLE, pickled), (CBOR, canonical)])
@pytest.mark.parametrize("digest_size", [16, 32])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 23, 24, 255, 256, 4096])
def test_what_stands_around_a_parent(encoding: ObjectEncoding, encode: Encode, digest_size: int, size: int) -> None:
    tokens = prompt(size, 2 * size, encoding.limit)
    # Zeros at both ends of a block look like the lengths before it, and like the sample.
    tokens[0] = tokens[size - 1] = tokens[size] = 0
    befores, behinds = encoding.around_parents(np.array(tokens), size, digest_size)
    for parent in (bytes(digest_size), b"\xff" * digest_size, bytes(range(digest_size))):
        blocks = (tuple(tokens[:size]), tuple(tokens[size:]))
        assert [encode((parent, block, None)) for block in blocks] == [
            before + parent + behind for before, behind in zip(befores, behinds, strict=True)
        ]


def test_what_is_written_at_once() -> None:
    ids = np.full(2048, 70_000)
    assert PICKLE.writes_at_once(ids, 4)
    assert CBOR.writes_at_once(ids, 1024)
    assert not PICKLE.writes_at_once(ids[:16], 4)  # sooner done block by block
    huge = np.full(1 << 15, 70_000)
    assert not PICKLE.writes_at_once(huge, 1 << 15)  # more than one frame
    ids[-1] = 2**31
    assert not PICKLE.writes_at_once(ids, 4)
    assert CBOR.writes_at_once(ids, 4)
    ids[-1] = 2**32
    assert not CBOR.writes_at_once(ids, 4)
