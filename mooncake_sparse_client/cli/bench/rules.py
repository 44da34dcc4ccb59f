"""What a lookup and a put decide without a store: block hashes and masks, beside the straightforward loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...core.hashing import BlockHasher, HashAlgorithm
from ...core.layout import KVCacheLayout
from ...core.masks import BoolArray, load_mask, store_mask
from ...core.presets import layout_for
from .measure import Amount, Side
from .plain_lookup import digest_blocks, hash_blocks, plain_load_mask, plain_store_mask
from .repeating import repeated_on_thread
from .session import Session

Masks: TypeAlias = Sequence[Sequence[bool]] | Sequence[BoolArray]

_SEED: Final = "bench"
_VOCABULARY: Final = 128_000
_BLOCKS: Final = (4, 16, 256)
_VLLM_KINDS: Final[tuple[HashAlgorithm, ...]] = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
_HASHED_TOKENS: Final = 128 << 10
_MASKED_TOKENS: Final = 1 << 20
_MASKED_LAYOUT: Final = "deepseek-v4"
#: The retention interval of each, in tokens.
_STORE_MASKS: Final = {"store_mask.1M": None, "store_mask.1M.0": 0, "store_mask.1M.16384": 16384}
_LOAD_MASK: Final = "load_mask.1M"

_HASH_NAMES: Final = [
    f"hash.{kind}.{block}" for block in _BLOCKS for kind in ("sha256_packed", "sha256_packed_array", *_VLLM_KINDS)
]
RULE_NAMES: Final = (*_HASH_NAMES, *_STORE_MASKS, _LOAD_MASK)


def some_tokens(count: int, seed: int = 0) -> NDArray[np.int64]:
    """Token ids of a prompt like no other seed's."""
    return np.random.default_rng(seed).integers(0, _VOCABULARY, count)


async def measure_rules(session: Session) -> None:
    ids = some_tokens(session.effort.scaled(_HASHED_TOKENS))
    for block in _BLOCKS:
        await _measure_packed(session, ids, block)
        for kind in _VLLM_KINDS:
            if session.wants(f"hash.{kind}.{block}"):
                await _measure_kind(session, kind, ids.tolist(), block)
    layout = layout_for(_MASKED_LAYOUT)
    await _measure_masks(session, layout, layout.align(session.effort.scaled(_MASKED_TOKENS)))


async def _measure_packed(session: Session, ids: NDArray[np.int64], block: int) -> None:
    """Of a list, beside a generic encoder; of an array, beside the digests alone."""
    hasher, listed, count = BlockHasher(block, seed=_SEED), ids.tolist(), len(ids) // block
    amount = Amount(len(ids), "tokens/s")

    def side(what: str, work: Callable[[], Sequence[bytes]]) -> Side:
        return repeated_on_thread(session.effort, what, work, lambda hashes: len(hashes) == count)

    ours = side("packed hashing of a list", lambda: hasher.hash_blocks(listed))
    theirs = side("hashing by CBOR", lambda: hash_blocks("sha256_cbor", listed, block, _SEED))
    await session.compare(f"hash.sha256_packed.{block}", ours, theirs, amount)
    ours = side("packed hashing of an array", lambda: hasher.hash_blocks(ids))
    theirs = side("bare hashing", lambda: digest_blocks(count, block))
    await session.compare(f"hash.sha256_packed_array.{block}", ours, theirs, amount)


async def _measure_kind(session: Session, kind: HashAlgorithm, ids: list[int], block: int) -> None:
    """One of vLLM's kinds, whose hashes must be the same on both sides."""
    hasher, wanted = BlockHasher(block, kind, _SEED), hash_blocks(kind, ids, block, _SEED)

    def side(what: str, work: Callable[[], Sequence[bytes]]) -> Side:
        return repeated_on_thread(session.effort, f"{what} by {kind}", work, lambda hashes: list(hashes) == wanted)

    ours = side("our hashing", lambda: hasher.hash_blocks(ids))
    theirs = side("plain hashing", lambda: hash_blocks(kind, ids, block, _SEED))
    await session.compare(f"hash.{kind}.{block}", ours, theirs, Amount(len(ids), "tokens/s"))


async def _measure_masks(session: Session, layout: KVCacheLayout, tokens: int) -> None:
    for name, interval in _STORE_MASKS.items():
        ours = partial(store_mask, layout, tokens, retention_interval=interval, num_prompt_tokens=tokens)
        await _compare_masks(session, name, ours, partial(plain_store_mask, layout, tokens, interval))
    await _compare_masks(
        session, _LOAD_MASK, partial(load_mask, layout, tokens), partial(plain_load_mask, layout, tokens)
    )


async def _compare_masks(session: Session, name: str, ours: Callable[[], Masks], theirs: Callable[[], Masks]) -> None:
    if not session.wants(name):
        return
    wanted = [list(mask) for mask in theirs()]

    def side(what: str, work: Callable[[], Masks]) -> Side:
        return repeated_on_thread(
            session.effort, f"{what} {name}", work, lambda masks: list(map(list, masks)) == wanted
        )

    chunks = sum(len(mask) for mask in wanted)
    await session.compare(name, side("our", ours), side("the plain", theirs), Amount(chunks, "chunks/s"))
