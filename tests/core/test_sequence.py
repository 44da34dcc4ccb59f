"""TokenSequence: what else names a prefix, in which order, and bad forms of it."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Traits, quick, traits

from mooncake_sparse_client import BlockHasher, TokenSequence
from mooncake_sparse_client.core.sequence import SequenceTraits
from mooncake_sparse_client.errors import InvalidTokensError

HASHER = BlockHasher(4)


def hashes(tokens: Any = tuple(range(12)), **what: Any) -> tuple[bytes, ...]:
    """The block hashes of a sequence of three blocks."""
    return TokenSequence(HASHER, tokens, **what).block_hashes


def chain(keys: list[Any]) -> tuple[bytes, ...]:
    """The block hashes of the same tokens with explicit extra keys."""
    return HASHER.hash_blocks(range(12), extra_keys=keys)


def test_nothing_else_means_no_extra_keys() -> None:
    assert hashes() == HASHER.hash_blocks(range(12)) == chain([None, None, None])


def test_the_salt_is_on_the_first_block_alone_and_changes_all() -> None:
    salted = hashes(cache_salt="tenant-a")
    assert salted == chain([(("cache_salt", "tenant-a"),), None, None])
    assert not set(salted) & set(hashes())
    assert not set(salted) & set(hashes(cache_salt="tenant-b"))


def test_the_lora_is_on_every_block() -> None:
    key = (("lora", "name", "path"),)
    assert hashes(lora=("name", "path")) == chain([key, key, key])
    assert hashes(lora=["name", "path"]) == chain([key, key, key])
    assert hashes(lora=("name", "other"))[0] != hashes(lora=("name", "path"))[0]


def test_multimodal_items_are_on_the_blocks_that_they_overlap_by_offset() -> None:
    items = [("second", 7, 2), ("first", 2, 5), ("behind", 12, 3)]
    assert hashes(multimodal=items) == chain(
        [
            (("mm", "first", 2),),
            (("mm", "first", -2), ("mm", "second", 3)),
            (("mm", "second", -1),),
        ]
    )


def test_an_item_that_only_touches_a_block_is_not_on_it() -> None:
    assert hashes(multimodal=[("image", 4, 4)]) == chain([None, (("mm", "image", 0),), None])
    assert hashes(multimodal=[("image", 3, 2)]) == chain([(("mm", "image", 3),), (("mm", "image", -1),), None])
    assert hashes(multimodal=[("image", 0, 12)]) == chain([(("mm", "image", -start),) for start in (0, 4, 8)])


def test_embeddings_are_hashed_block_by_block() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(12, 2)
    expected = [(("prompt_embeds", hashlib.sha256(rows[start : start + 4].tobytes()).digest()),) for start in (0, 4, 8)]
    assert hashes(prompt_embeds=rows) == chain(expected)
    assert hashes(prompt_embeds=np.asfortranarray(rows)) == chain(expected)
    changed = rows.copy()
    changed[5, 1] += 1
    same = [a == b for a, b in zip(hashes(prompt_embeds=rows), hashes(prompt_embeds=changed), strict=True)]
    assert same == [True, False, False]
    assert hashes(prompt_embeds=rows.tolist()) == hashes(prompt_embeds=rows.astype(np.float64))


def test_embeddings_are_those_of_the_time_the_sequence_was_made() -> None:
    rows = np.zeros((12, 2), dtype=np.float32)
    expected = hashes(prompt_embeds=rows.copy())
    sequence = TokenSequence(HASHER, range(12), prompt_embeds=rows)
    rows[:] = 9  # an engine reuses its staging buffer
    assert sequence.block_hashes == expected


def test_the_order_of_the_extra_keys() -> None:
    rows = np.ones((8, 1), dtype=np.float32)
    sequence = TokenSequence(
        HASHER,
        range(8),
        prompt_embeds=rows,
        cache_salt="salt",
        multimodal=[("image", 1, 6)],
        lora=("name", "path"),
    )
    digest = hashlib.sha256(rows[:4].tobytes()).digest()
    first = (("lora", "name", "path"), ("mm", "image", 1), ("cache_salt", "salt"), ("prompt_embeds", digest))
    second = (("lora", "name", "path"), ("mm", "image", -3), ("prompt_embeds", digest))
    assert sequence.block_hashes == HASHER.hash_blocks(range(8), extra_keys=[first, second])


def test_extra_keys_of_a_block() -> None:
    traits = SequenceTraits(lora=None, cache_salt="s", multimodal=(("image", 6, 3),), embed_digests=None)
    assert traits.extra_keys(0, 4) == (("cache_salt", "s"),)
    assert [traits.extra_keys(block, 4) for block in (1, 2, 3)] == [(("mm", "image", 2),), (("mm", "image", -2),), None]


@quick
@given(traits(80), st.integers(1, 9), st.integers(0, 12), st.integers(0, 12))
def test_extra_keys_of_many_blocks_are_those_of_each(what: Traits, size: int, first: int, count: int) -> None:
    made = SequenceTraits(
        lora=what.lora,
        cache_salt=what.cache_salt,
        multimodal=tuple(what.multimodal),
        embed_digests=None if what.prompt_embeds is None else (b"one", b"two"),
    )
    blocks = range(first, first + count)
    assert made.extra_keys_of(blocks, size) == [made.extra_keys(block, size) for block in blocks]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"lora": "name"}, ["lora", "(name, path)", "type str"]),
        ({"lora": ("name",)}, ["lora", "(name, path)"]),
        ({"lora": ("name", "path", 1)}, ["lora", "(name, path)"]),
        ({"lora": 7}, ["lora", "type int"]),
        ({"lora": {"name": "path"}}, ["lora", "(name, path)"]),
        ({"lora": ("", "path")}, ["the name in lora", "empty"]),
        ({"lora": ("name", "")}, ["the path in lora", "empty"]),
        ({"lora": ("name", None)}, ["the path in lora", "None"]),
        ({"lora": (1, "path")}, ["the name in lora", "type int"]),
        ({"cache_salt": ""}, ["cache_salt", "empty"]),
        ({"cache_salt": b"salt"}, ["cache_salt", "text"]),
        ({"cache_salt": 5}, ["cache_salt", "type int"]),
        ({"cache_salt": "\ud800"}, ["cache_salt"]),
        ({"lora": ("\udcff", "path")}, ["lora"]),
        ({"multimodal": [("\ud800", 0, 1)]}, ["multimodal[0]"]),
        ({"multimodal": ("image", 0, 4)}, ["multimodal[0]", "(identifier, offset, length)", "type str"]),
        ({"multimodal": [("image", 0)]}, ["multimodal[0]", "(identifier, offset, length)"]),
        ({"multimodal": [("image", 0, 1), 5]}, ["multimodal[1]", "type int"]),
        ({"multimodal": 5}, ["multimodal"]),
        ({"multimodal": [(None, 0, 1)]}, ["identifier", "multimodal[0]"]),
        ({"multimodal": [("", 0, 1)]}, ["identifier", "multimodal[0]"]),
        ({"multimodal": [("image", -1, 1)]}, ["offset", "multimodal[0]", "negative", "-1"]),
        ({"multimodal": [("image", 0, 0)]}, ["length", "multimodal[0]", "at least 1", "0"]),
        ({"multimodal": [("image", 0.5, 1)]}, ["offset", "0.5"]),
        ({"multimodal": [("image", True, 1)]}, ["offset", "True"]),
        ({"multimodal": [("image", 0, "1")]}, ["length", "type str"]),
        ({"prompt_embeds": 3.0}, ["prompt_embeds", "one row a token", "0 dimension"]),
        ({"prompt_embeds": [1.0, 2.0]}, ["prompt_embeds", "one row a token", "1 dimension"]),
        ({"prompt_embeds": [[None]]}, ["prompt_embeds", "object"]),
        ({"prompt_embeds": [[1.0], [1.0, 2.0]]}, ["prompt_embeds"]),
        ({"prompt_embeds": "rows"}, ["prompt_embeds"]),
    ],
)
def test_bad_forms_are_refused_at_once(what: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidTokensError) as caught:
        TokenSequence(HASHER, range(12), **what)
    for word in words:
        assert word in str(caught.value)


def test_an_array_that_numpy_cannot_read_is_a_typed_error() -> None:
    class Tensor:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise TypeError("Got unsupported ScalarType BFloat16")

    with pytest.raises(InvalidTokensError, match=r"prompt_embeds.*BFloat16"):
        TokenSequence(HASHER, range(12), prompt_embeds=Tensor())


@pytest.mark.parametrize("bad", [[1.5], [-1], [[1]], "text", None, [2**32]])
def test_a_bad_extension_leaves_the_sequence_as_it_was(bad: Any) -> None:
    sequence = TokenSequence(HASHER, range(6))
    with pytest.raises(InvalidTokensError, match="token_ids"):
        sequence.extend(bad)
    assert len(sequence) == 6
    sequence.extend([6, 7])
    assert sequence.block_hashes == HASHER.hash_blocks(range(8))


def test_tokens_are_copied_in_and_out() -> None:
    tokens = np.arange(8)
    sequence = TokenSequence(HASHER, tokens)
    tokens[:] = 0
    sequence.token_ids[:] = 0
    assert sequence.token_ids.tolist() == list(range(8))
    assert sequence.block_hashes == HASHER.hash_blocks(range(8))


def test_growing_hashes_only_the_new_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    original = BlockHasher.hash_blocks

    def counting(self: BlockHasher, token_ids: Any, **options: Any) -> tuple[bytes, ...]:
        hashed.append(len(token_ids))
        return original(self, token_ids, **options)

    monkeypatch.setattr(BlockHasher, "hash_blocks", counting)
    sequence = TokenSequence(HASHER, range(9))
    assert sequence.unhashed_tokens == 9
    assert len(sequence.block_hashes) == len(sequence.block_hashes) == 2
    sequence.extend([9])
    assert len(sequence.block_hashes) == 2
    sequence.extend(range(10, 17))
    assert sequence.block_hashes == original(HASHER, range(17))
    assert hashed == [8, 8]
    assert sequence.unhashed_tokens == 1


@pytest.mark.parametrize("algorithm", ["sha256_packed", "sha256", "xxhash_cbor"])
def test_hashes_that_are_known_are_handed_out_again(algorithm: Any) -> None:
    hasher = BlockHasher(4, algorithm, "seed")
    sequence = TokenSequence(hasher, list(range(5000)))
    first = sequence.block_hashes
    assert sequence.block_hashes is first
    sequence.extend([5000])
    assert sequence.block_hashes is first
    sequence.extend([5001, 5002, 5003])
    assert first == hasher.hash_blocks(range(5000))
    assert sequence.block_hashes == hasher.hash_blocks(range(5004))


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_vllm_ids_may_need_63_bits(algorithm: Any) -> None:
    hasher, tokens = BlockHasher(4, algorithm, "seed"), [2**63 - 1, 2**32, 2**31, 7]
    sequence = TokenSequence(hasher, [1, 2, 3, 4])
    sequence.extend(tokens)
    sequence.extend(np.array(tokens, dtype=np.uint64))
    assert sequence.token_ids.dtype == np.int64
    assert sequence.token_ids.tolist() == [1, 2, 3, 4, *tokens, *tokens]
    assert sequence.block_hashes == hasher.hash_blocks([1, 2, 3, 4, *tokens, *tokens])


def test_packed_ids_may_need_32_bits() -> None:
    tokens = [2**32 - 1, 2**31, 0, 7]
    for form in (tokens, np.array(tokens, dtype=np.uint32), np.array(tokens, dtype=np.uint32)[::-1]):
        sequence = TokenSequence(HASHER, form)
        assert sequence.token_ids.dtype == np.int64
        assert sequence.token_ids.tolist() == list(form)
        assert sequence.block_hashes == HASHER.hash_blocks(form)


def test_threads_that_look_while_it_grows_agree() -> None:
    sequence, seen = TokenSequence(HASHER, []), []

    def look() -> None:
        while len(sequence) < 4000:
            seen.append(sequence.block_hashes)
            ids = sequence.token_ids  # which cannot keep it from growing
            assert ids.tolist() == list(range(len(ids)))

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for start in range(0, 4000, 10):
        sequence.extend(list(range(start, start + 10)))
    for thread in threads:
        thread.join()
    whole = HASHER.hash_blocks(range(4000))
    assert sequence.block_hashes == whole
    assert all(hashes == whole[: len(hashes)] for hashes in seen)


def test_a_sequence_shows_its_size_and_not_its_tokens() -> None:
    sequence = TokenSequence(HASHER, range(9), cache_salt="secret")
    assert (len(sequence), sequence.num_tokens, sequence.hasher) == (9, 9, HASHER)
    assert "9 tokens" in repr(sequence)
    assert "secret" not in repr(sequence)
