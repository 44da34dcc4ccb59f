"""What looking up is measured against: the straightforward ways, as serving engines go them.

Generic encoders and one digest a block; every key of every group in one question; a set of what exists; loops over
boundaries and chunks. Plain and decent code of its own: nothing here is shared with what it is compared with.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Final, Protocol, TypeAlias

import cbor2
import xxhash

from ...core.layout import FullAttentionSpec, GroupSpec, KVCacheLayout, SlidingWindowSpec
from ...errors import InvalidLayoutError, StoreAnswerError

Encode: TypeAlias = Callable[[object], bytes]


class Existence(Protocol):
    """The native call of a lookup. Each answer is 1, 0 or a negative code."""

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _canonical_cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


#: vLLM's kinds of block hashes: how a value becomes bytes, and bytes a digest.
KINDS: Final[Mapping[str, tuple[Encode, Callable[[bytes], bytes]]]] = {
    "sha256": (_pickled, _sha256),
    "sha256_cbor": (_canonical_cbor, _sha256),
    "xxhash": (_pickled, xxhash.xxh3_128_digest),
    "xxhash_cbor": (_canonical_cbor, xxhash.xxh3_128_digest),
}


def hash_blocks(kind: str, token_ids: Sequence[int], block_size: int, seed: str) -> list[bytes]:
    """The digests of the full blocks, each chained on the one before, by encoding a tuple a block."""
    encode, digest = KINDS[kind]
    parent = digest(encode(seed))
    hashes = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = digest(encode((parent, tuple(token_ids[end - block_size : end]), None)))
        hashes.append(parent)
    return hashes


def digest_blocks(count: int, block_size: int) -> list[bytes]:
    """``count`` bare SHA-256 calls over as many bytes as a packed block of tokens and its parent's digest have."""
    text = bytes(32 + 4 * block_size)
    return [hashlib.sha256(text).digest() for _ in range(count)]


class PlainLookup:
    """Lookups of one model with full attention and sliding windows, under keys as vLLM spells them.

    Blocks are hashed every ``block_size`` tokens. Raises ``InvalidLayoutError`` for other groups and for draft layers.
    """

    def __init__(self, native: Existence, layout: KVCacheLayout, model_name: str) -> None:
        if layout.use_eagle or not all(isinstance(s, FullAttentionSpec | SlidingWindowSpec) for s in layout.groups):
            raise InvalidLayoutError("the plain lookup knows full attention and sliding windows without draft layers")
        self._native = native
        self._model_name = model_name
        self._groups = layout.groups
        self._alignment = layout.alignment
        self.block_size = layout.common_block_size
        self._tp_rank = self._pcp_rank = self._dcp_rank = self._pp_rank = 0

    def keys(self, hashes: Sequence[bytes]) -> list[list[str]]:
        """The keys of all chunks, a list a group."""
        return [self._keys_of(group, hashes) for group in range(len(self._groups))]

    def _keys_of(self, group: int, hashes: Sequence[bytes]) -> list[str]:
        step = self._groups[group].block_size // self.block_size
        return [
            f"{self._model_name}@tp_rank:{self._tp_rank}@pcp{self._pcp_rank}@dcp{self._dcp_rank}"
            f"@pp_rank:{self._pp_rank}@group:{group}@{hashes[last].hex()}"
            for last in range(step - 1, len(hashes), step)
        ]

    def find(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """The hit length for a request of ``num_tokens``, which blocks until the store has answered.

        Raises ``StoreAnswerError``.
        """
        keys = self.keys(hashes)
        asked = [key for some in keys for key in some]
        answers = self._native.batch_is_exist(asked)
        if min(answers, default=0) < 0:
            raise StoreAnswerError(f"a native question of {len(asked)} keys answered {min(answers)}")
        there = {key for key, answer in zip(asked, answers, strict=True) if answer}
        return self._longest(keys, there, num_tokens)

    def _longest(self, keys: Sequence[Sequence[str]], there: set[str], num_tokens: int) -> int:
        """The first boundary, from the longest down, that all groups can resume from."""
        cap = (num_tokens - 1) // self._alignment * self._alignment
        windows: list[tuple[SlidingWindowSpec, Sequence[str]]] = []
        for spec, some in zip(self._groups, keys, strict=True):
            if isinstance(spec, SlidingWindowSpec):
                windows.append((spec, some))
            else:
                whole = sum(1 for _ in takewhile(there.__contains__, some))
                cap = min(cap, whole * spec.block_size // self._alignment * self._alignment)
        for boundary in range(cap, 0, -self._alignment):
            if all(_whole_window(spec, some, there, boundary) for spec, some in windows):
                return boundary
        return 0


def _whole_window(spec: SlidingWindowSpec, keys: Sequence[str], there: set[str], boundary: int) -> bool:
    end = boundary // spec.block_size
    return all(keys[chunk] in there for chunk in range(max(end - _window_chunks(spec), 0), end))


def _window_chunks(spec: SlidingWindowSpec) -> int:
    return -(-(spec.sliding_window - 1) // spec.block_size)


def plain_store_mask(layout: KVCacheLayout, num_tokens: int, interval: int | None) -> list[list[bool]]:
    """For every chunk of a prompt of ``num_tokens``, whether a retained boundary needs it; a list a group.

    ``interval`` in tokens: None retains every boundary, 0 those alone that the same prompt, or a longer one, resumes
    from. Full attention and sliding windows only.
    """
    step = layout.alignment
    period = step if interval is None else interval
    furthest = num_tokens + max(spec.window for spec in layout.groups) + step
    boundaries = {(num_tokens - 1) // step * step, num_tokens // step * step}
    if period:
        boundaries.update(range(period, furthest + period, period))
    ascending = sorted(boundary for boundary in boundaries if boundary > 0)
    return [_kept(spec, num_tokens, ascending) for spec in layout.groups]


def _kept(spec: GroupSpec, num_tokens: int, boundaries: Sequence[int]) -> list[bool]:
    count, size = num_tokens // spec.block_size, spec.block_size
    if not isinstance(spec, SlidingWindowSpec):
        return [True] * count
    reach = _window_chunks(spec) * size
    kept, left = [], iter(boundaries)
    boundary = next(left, None)
    for start in range(0, count * size, size):
        while boundary is not None and boundary < start + size:
            boundary = next(left, None)
        kept.append(boundary is not None and boundary <= start + reach)
    return kept


def plain_load_mask(layout: KVCacheLayout, hit_length: int) -> list[list[bool]]:
    """For every chunk below a hit, whether it needs it; a list a group. Full attention and sliding windows only."""
    masks = []
    for spec in layout.groups:
        end = hit_length // spec.block_size
        first = max(end - _window_chunks(spec), 0) if isinstance(spec, SlidingWindowSpec) else 0
        masks.append([first <= chunk < end for chunk in range(end)])
    return masks
