"""The block hash chain: seeds, bad tokens and bad extra keys."""

from __future__ import annotations

import hashlib
from array import array
from enum import Enum
from typing import Any

import msgpack
import numpy as np
import pytest

from mooncake_sparse_client import BlockHasher
from mooncake_sparse_client.core.hashing import HashAlgorithm
from mooncake_sparse_client.errors import InvalidHasherError, InvalidTokensError

VLLM: tuple[HashAlgorithm, ...] = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


class Salt(str, Enum):  # noqa: UP042 - StrEnum's members pickle alike, but (str, Enum) is the older habit
    """Text of a class of its own."""

    TENANT = "tenant-a"


@pytest.fixture(autouse=True)
def no_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names no seed."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0,), ["block_size", "at least 1", "0"]),
        ((-1,), ["block_size", "-1"]),
        ((True,), ["block_size", "True"]),
        ((2.0,), ["block_size", "2.0"]),
        (("2",), ["block_size", "'2'"]),
        ((2, "md5"), ["algorithm", "sha256_packed", "xxhash_cbor", "'md5'"]),
        ((2, None), ["algorithm", "None"]),
        ((2, "SHA256"), ["algorithm", "'SHA256'"]),
        ((2, "sha256", 42), ["seed", "text", "type int"]),
        ((2, "sha256_packed", b"x"), ["seed", "text"]),
        ((2, "sha256_packed", "\ud800"), ["seed"]),
        ((2, "sha256_cbor", "\ud800"), ["seed"]),
    ],
)
def test_impossible_hashers(arguments: tuple[Any, ...], words: list[str]) -> None:
    with pytest.raises(InvalidHasherError) as caught:
        BlockHasher(*arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_xxhash_without_a_seed_is_refused_and_says_why(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def expect_refusal(*seed: str) -> None:
        with pytest.raises(InvalidHasherError) as caught:
            BlockHasher(16, algorithm, *seed)
        for word in (algorithm, "another process", "collid", "seed=", "PYTHONHASHSEED"):
            assert word in str(caught.value)

    expect_refusal()
    expect_refusal("")
    monkeypatch.setenv("PYTHONHASHSEED", "")
    expect_refusal()
    monkeypatch.setenv("PYTHONHASHSEED", "secret")
    assert BlockHasher(16, algorithm).seed == "secret"
    assert BlockHasher(16, algorithm, "given").seed == "given"


def test_seeds_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BlockHasher(16, "sha256").seed == "vllm-none-hash"
    assert BlockHasher(16, "sha256_cbor").seed == "vllm-none-hash"
    assert BlockHasher(16).seed == ""
    monkeypatch.setenv("PYTHONHASHSEED", "77")
    assert BlockHasher(16, "sha256").seed == "77"
    assert BlockHasher(16, "sha256", "given").seed == "given"
    # The default kind needs no configuration to agree between processes.
    assert BlockHasher(16).seed == ""


def test_every_setting_makes_other_hashes() -> None:
    hashers = [BlockHasher(2), BlockHasher(2, seed="a"), BlockHasher(2, seed="b")]
    hashers += [BlockHasher(2, algorithm, seed) for algorithm in VLLM for seed in ("a", "b")]
    digests = [hasher.hash_blocks([1, 2])[0] for hasher in hashers]
    assert len(set(digests)) == len(set(hashers)) == len(hashers)
    # The packed kind's start names the block size as well.
    assert BlockHasher(1).none_hash != BlockHasher(2).none_hash


def test_hashers_are_equal_when_their_hashes_are() -> None:
    assert BlockHasher(2) == BlockHasher(2, "sha256_packed", "")
    assert BlockHasher(2) != BlockHasher(4)
    assert BlockHasher(2, "sha256") == BlockHasher(2, "sha256", "vllm-none-hash")
    assert BlockHasher(2) != "BlockHasher(2)"
    assert hash(BlockHasher(2)) == hash(BlockHasher(2, seed=""))


BAD_TOKENS: list[tuple[Any, list[str]]] = [
    ([1, 2.0], ["token_ids[1]", "2.0"]),
    ([1.5], ["token_ids[0]", "1.5"]),
    (np.array([1.0, 2.0]), ["token_ids[0]", "ints"]),
    (array("d", [1.0]), ["token_ids[0]"]),
    ([3, -1], ["token_ids[1]", "-1"]),
    (np.array([0, -7], dtype=np.int8), ["token_ids[1]", "-7"]),
    ([True, False], ["token_ids[0]", "True"]),
    (np.array([True]), ["token_ids[0]", "True"]),
    ([[1, 2], [3, 4]], ["token_ids", "one dimension", "2"]),
    (np.zeros((2, 2), dtype=np.int64), ["token_ids", "one dimension"]),
    (np.int64(3), ["token_ids", "one dimension"]),
    (3, ["token_ids", "one dimension"]),
    ([[1], [1, 2]], ["token_ids", "flat"]),
    (None, ["token_ids"]),
    ([None, 1], ["token_ids[0]", "None"]),
    ([1, None], ["token_ids[1]", "None"]),
    ("text", ["token_ids"]),
    (b"bytes", ["token_ids"]),
    (["1", "2"], ["token_ids[0]", "of type str"]),
    ({1, 2}, ["token_ids"]),
    ({"ids": [1]}, ["token_ids"]),
    ((token for token in (1, 2)), ["token_ids"]),
    ([1 + 2j], ["token_ids[0]"]),
    ([object()], ["token_ids[0]"]),
]


@pytest.mark.parametrize(("tokens", "words"), BAD_TOKENS)
def test_bad_tokens_name_the_place(tokens: Any, words: list[str]) -> None:
    with pytest.raises(InvalidTokensError) as caught:
        BlockHasher(2).hash_blocks(tokens)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("tokens", [[0, 2**32], np.array([0, 2**32]), np.array([0, 2**32], dtype=np.uint64)])
def test_packed_tokens_are_below_32_bits(tokens: Any) -> None:
    with pytest.raises(InvalidTokensError, match=r"token_ids\[1\] is 4294967296.*4294967295"):
        BlockHasher(2).hash_blocks(tokens)
    assert BlockHasher(2, "sha256").hash_blocks(tokens)
    assert BlockHasher(2).hash_blocks([0, 2**32 - 1])


@pytest.mark.parametrize("algorithm", VLLM)
@pytest.mark.parametrize("tokens", [[0, 2**63], np.array([0, 2**63], dtype=np.uint64), [0, 2**64], [0, 2**200]])
def test_other_tokens_are_below_63_bits(algorithm: Any, tokens: Any) -> None:
    with pytest.raises(InvalidTokensError, match=r"token_ids\[1\].*9223372036854775807"):
        BlockHasher(2, algorithm, "seed").hash_blocks(tokens)
    assert BlockHasher(2, algorithm, "seed").hash_blocks([0, 2**63 - 1])


def test_only_full_blocks_are_hashed() -> None:
    hasher = BlockHasher(4)
    assert [len(hasher.hash_blocks(range(count))) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert hasher.hash_blocks([]) == hasher.hash_blocks(np.array([], dtype=np.int32)) == ()
    assert all(isinstance(digest, bytes) and len(digest) == 32 for digest in hasher.hash_blocks(range(8)))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([None, None], ["extra_keys", "one entry a full block", "1", "2"]),
        ([], ["extra_keys", "1", "0"]),
        (["a"], ["extra key", "type str"]),
        ([[b"a"]], ["extra key", "tuple"]),
        ([[("lora", 1.5)]], ["a float"]),
        ([[("lora", True)]], ["a bool"]),
        ([[("lora", None)]], ["a NoneType"]),
        ([[("lora", ("a",))]], ["a tuple"]),
        ([[3]], ["extra key", "type int"]),
        ([5], ["extra key", "type int"]),
    ],
)
def test_bad_extra_keys(keys: Any, words: list[str]) -> None:
    for hasher in (BlockHasher(2), BlockHasher(2, "sha256")):
        with pytest.raises(InvalidTokensError) as caught:
            hasher.hash_blocks([1, 2, 3], extra_keys=keys)
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize("parent", [b"", b"short", "x" * 32, 7, bytearray(32)])
def test_bad_parents(parent: Any) -> None:
    with pytest.raises(InvalidTokensError, match="parent must be a digest of 32 bytes"):
        BlockHasher(2).hash_blocks([1, 2], parent=parent)


def test_xxhash_digests_are_16_bytes_and_so_are_their_parents() -> None:
    hasher = BlockHasher(2, "xxhash", "seed")
    (digest,) = hasher.hash_blocks([1, 2])
    assert len(digest) == 16
    assert hasher.hash_blocks([3, 4], parent=digest) == hasher.hash_blocks([1, 2, 3, 4])[1:]
    with pytest.raises(InvalidTokensError, match="16 bytes"):
        hasher.hash_blocks([1, 2], parent=bytes(32))


def test_packed_extra_keys_follow_the_definition() -> None:
    hasher = BlockHasher(1, seed="s")
    extra = (("lora", "name", "path"), ("mm", "id", -3), ("prompt_embeds", b"\1" * 32))
    start = hashlib.sha256(b"mooncake-sparse-client:1:1:s").digest()
    expected = hashlib.sha256(start + (7).to_bytes(4, "little") + msgpack.packb(extra)).digest()
    assert hasher.hash_blocks([7], extra_keys=[extra]) == (expected,)
    assert hasher.hash_blocks([7], extra_keys=[None]) == hasher.hash_blocks([7], extra_keys=[()])
    assert hasher.hash_blocks([7], extra_keys=[None]) == hasher.hash_blocks([7])


@pytest.mark.parametrize("algorithm", ["sha256_packed", *VLLM])
def test_each_extra_key_counts(algorithm: Any) -> None:
    hasher = BlockHasher(1, algorithm, "seed")
    keys = [
        None,
        (("a", "b"),),
        (("b", "a"),),
        (("a",), ("b",)),
        (("a", b"b"),),
        (("a", 1),),
        (("a", "1"),),
        (("ab",),),
    ]
    digests = [hasher.hash_blocks([1], extra_keys=[key])[0] for key in keys]
    assert len(set(digests)) == len(keys)


@pytest.mark.parametrize("algorithm", ["sha256_packed", *VLLM])
@pytest.mark.parametrize("text", [Salt.TENANT, np.str_("tenant-a")], ids=["enum", "numpy"])
def test_text_of_another_class_hashes_as_text(algorithm: Any, text: str) -> None:
    hasher = BlockHasher(1, algorithm, "seed")
    plain = hasher.hash_blocks([1], extra_keys=[(("cache_salt", "tenant-a"),)])
    assert hasher.hash_blocks([1], extra_keys=[(("cache_salt", text),)]) == plain


@pytest.mark.parametrize("algorithm", ["sha256_packed", *VLLM])
@pytest.mark.parametrize("form", [list, tuple])
@pytest.mark.parametrize("bad", [-1, 2.0, 1.5, None, "7", 2**63, 2**200, np.float32(3), np.int64(-5), b"7"])
def test_the_place_of_one_bad_id_among_thousands(algorithm: Any, form: Any, bad: Any) -> None:
    tokens: list[Any] = list(range(5000))
    tokens[3210] = bad
    with pytest.raises(InvalidTokensError, match=r"token_ids\[3210\] is"):
        BlockHasher(4, algorithm, "seed").hash_blocks(form(tokens))


@pytest.mark.parametrize("algorithm", ["sha256_packed", *VLLM])
def test_text_nested_lists_and_generators_are_no_ids(algorithm: Any) -> None:
    hasher = BlockHasher(4, algorithm, "seed")
    for tokens in ([[1]] * 1000, [b"a"] * 1000, "1" * 1000, b"1" * 1000, (token for token in range(1000))):
        with pytest.raises(InvalidTokensError, match="token_ids"):
            hasher.hash_blocks(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["sha256_packed", *VLLM])
def test_extra_keys_that_several_blocks_share_count_on_each(algorithm: Any) -> None:
    hasher = BlockHasher(2, algorithm, "seed")
    shared, tokens = (("lora", "name", "name"),), list(range(8))
    apart: list[Any] = [[["lora", "name", "name"]] for _ in range(3)]
    keys: list[Any] = [shared, shared, None, shared]
    assert hasher.hash_blocks(tokens, extra_keys=keys) == hasher.hash_blocks(
        tokens, extra_keys=[*apart[:2], None, apart[2]]
    )
    assert hasher.hash_blocks(tokens, extra_keys=keys) != hasher.hash_blocks(tokens, extra_keys=[shared] * 4)
    with pytest.raises(InvalidTokensError, match="a bool"):
        hasher.hash_blocks(tokens, extra_keys=[(("a", 1),), (("a", True),), None, None])
