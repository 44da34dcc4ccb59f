"""TokenSequence: the token ids of one request and what else names its prefixes."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..checks import items_of, plain_text, whole_number
from ..errors import InvalidTokensError
from .hashing import BlockExtra, BlockHasher, ExtraKey, TokenIds, token_array


@dataclass(frozen=True, slots=True, repr=False)
class SequenceTraits:
    """What names a prefix besides its tokens, checked and in the order that the block hash wants. Never printed."""

    lora: tuple[str, str] | None
    cache_salt: str | None
    #: ``(identifier, offset, length)`` in tokens, by offset.
    multimodal: tuple[tuple[str, int, int], ...]
    #: SHA-256 of each hash block's embeddings, as far as there are any; None without embeddings.
    embed_digests: tuple[bytes, ...] | None

    def extra_keys(self, block: int, block_size: int) -> BlockExtra:
        """The extra keys of one hash block, None if there are none."""
        start, end = block * block_size, (block + 1) * block_size
        keys: list[ExtraKey] = []
        if self.lora is not None:
            keys.append(("lora", *self.lora))
        keys += [
            ("mm", identifier, offset - start)
            for identifier, offset, length in self.multimodal
            if offset < end and offset + length > start
        ]
        if self.cache_salt is not None and block == 0:
            keys.append(("cache_salt", self.cache_salt))
        if self.embed_digests is not None:
            digest = self.embed_digests[block] if block < len(self.embed_digests) else _NO_EMBEDS
            keys.append(("prompt_embeds", digest))
        return tuple(keys) or None

    def extra_keys_of(self, blocks: range, block_size: int) -> list[BlockExtra]:
        """The extra keys of hash blocks in a row; blocks that only a LoRA names share one object."""
        if self.embed_digests is not None:
            return [self.extra_keys(block, block_size) for block in blocks]
        others: BlockExtra = None if self.lora is None else (("lora", *self.lora),)
        keys = [others] * len(blocks)
        touched = {0} if self.cache_salt is not None and 0 in blocks else set()
        for _, offset, length in self.multimodal:
            first, end = offset // block_size, -(-(offset + length) // block_size)
            touched.update(range(max(first, blocks.start), min(end, blocks.stop)))
        for block in touched:
            keys[block - blocks.start] = self.extra_keys(block, block_size)
        return keys


class TokenSequence:
    """Token ids that are hashed once and may grow.

    Made by ``client.sequence(...)``, which knows the hasher. ``lora`` is ``(name, path)``; a multimodal item
    is ``(identifier, offset, length)`` in tokens; ``prompt_embeds`` has one row a token, and is hashed at once, so
    that its memory may be used again. Two sequences that differ in any of them share no chunk from the first block
    that it touches on.

    Raises ``InvalidTokensError``.
    """

    def __init__(
        self,
        hasher: BlockHasher,
        token_ids: TokenIds,
        *,
        cache_salt: str | None = None,
        lora: tuple[str, str] | None = None,
        multimodal: Sequence[tuple[str, int, int]] = (),
        prompt_embeds: ArrayLike | None = None,
    ) -> None:
        self._hasher = hasher
        self._traits = SequenceTraits(
            lora=_checked_lora(lora),
            cache_salt=_text(cache_salt, "cache_salt") if cache_salt is not None else None,
            multimodal=_checked_multimodal(multimodal),
            embed_digests=_digest_embeds(prompt_embeds, hasher.block_size),
        )
        # What the ids need; the packed kind's are hashed as they lie.
        self._ids = array("I" if hasher.token_limit <= 1 << 32 else "q")
        self._hashes: tuple[bytes, ...] = ()
        # A long prompt may be hashed on a worker thread while its owner extends it, and is hashed once.
        self._lock = threading.Lock()
        self._hashing = threading.Lock()
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"<TokenSequence of {len(self)} tokens, {self._hasher.algorithm} blocks of {self._hasher.block_size}>"

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    @property
    def hasher(self) -> BlockHasher:
        return self._hasher

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """A copy of the ids."""
        with self._lock:  # an array that is looked at cannot grow
            return np.array(self._ids, dtype=np.int64)

    @property
    def unhashed_tokens(self) -> int:
        """Tokens that the next look at ``block_hashes`` has to hash."""
        return len(self._ids) - len(self._hashes) * self._hasher.block_size

    @property
    def block_hashes(self) -> tuple[bytes, ...]:
        """The digests of the full hash blocks; those of new blocks are computed on first look."""
        size = self._hasher.block_size
        with self._hashing:
            done = len(self._hashes)
            with self._lock:
                new_ids = self._ids[done * size : len(self._ids) // size * size]
            self._hashes += self._hash(new_ids, done, self._hashes[-1] if done else None)
            return self._hashes

    def extend(self, token_ids: TokenIds) -> None:
        """Append ids (generated tokens, the next turn). What was hashed is not hashed again."""
        ids = token_array(token_ids, limit=self._hasher.token_limit)
        with self._lock:
            self._ids.frombytes(ids.astype(self._ids.typecode, copy=False).tobytes())

    def _hash(self, ids: array[int], first_block: int, parent: bytes | None) -> tuple[bytes, ...]:
        """The digests of ``ids``, whole blocks of which the first is ``first_block``."""
        if not ids:
            return ()
        size, extras = self._hasher.block_size, None
        if self._traits != _NOTHING_ELSE:
            blocks = range(first_block, first_block + len(ids) // size)
            extras = self._traits.extra_keys_of(blocks, size)
        return self._hasher.hash_blocks(ids, extra_keys=extras, parent=parent)


def _text(value: object, name: str) -> str:
    return plain_text(value, name, InvalidTokensError, secret=True)


def _tokens(value: object, name: str, *, least: int = 0) -> int:
    """A number of tokens; text that stands in its place may be a secret, and is not shown."""
    if isinstance(value, str | bytes):
        raise InvalidTokensError(f"{name} must be an int, not of type {type(value).__name__}")
    return whole_number(value, name, InvalidTokensError, least=least)


def _checked_lora(lora: tuple[str, str] | None) -> tuple[str, str] | None:
    if lora is None:
        return None
    if isinstance(lora, str) or not isinstance(lora, Sequence) or len(lora) != 2:
        raise InvalidTokensError(f"lora must be (name, path), not of type {type(lora).__name__}")
    return _text(lora[0], "the name in lora"), _text(lora[1], "the path in lora")


def _checked_multimodal(items: Sequence[tuple[str, int, int]]) -> tuple[tuple[str, int, int], ...]:
    checked = []
    for number, item in enumerate(items_of(items, "multimodal", InvalidTokensError, secret=True)):
        if isinstance(item, str) or not isinstance(item, Sequence) or len(item) != 3:
            raise InvalidTokensError(
                f"multimodal[{number}] must be (identifier, offset, length), not of type {type(item).__name__}"
            )
        identifier = _text(item[0], f"the identifier in multimodal[{number}]")
        offset = _tokens(item[1], f"the offset in multimodal[{number}]")
        length = _tokens(item[2], f"the length in multimodal[{number}]", least=1)
        checked.append((identifier, offset, length))
    return tuple(sorted(checked, key=lambda item: item[1]))


def _digest_embeds(prompt_embeds: ArrayLike | None, block_size: int) -> tuple[bytes, ...] | None:
    if prompt_embeds is None:
        return None
    try:
        rows = np.asarray(prompt_embeds)
    except (TypeError, ValueError) as error:
        raise InvalidTokensError(f"prompt_embeds must be an array with one row a token: {error}") from error
    if rows.ndim < 2 or rows.dtype.kind in "OSU":
        raise InvalidTokensError(
            f"prompt_embeds must be an array with one row a token, not {rows.ndim} dimension(s) of {rows.dtype}"
        )
    return tuple(
        hashlib.sha256(np.ascontiguousarray(rows[start : start + block_size]).tobytes()).digest()
        for start in range(0, len(rows), block_size)
    )


#: What stands for the embeddings of a block that lies behind them all.
_NO_EMBEDS = hashlib.sha256(b"").digest()
_NOTHING_ELSE = SequenceTraits(lora=None, cache_salt=None, multimodal=(), embed_digests=None)
