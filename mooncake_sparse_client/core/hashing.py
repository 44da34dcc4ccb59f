"""The block hash chain: each full block of tokens gets a digest that names the whole prefix up to its end.

Five algorithms. ``sha256_packed``, the default, hashes packed integers and is made for speed. The others are
vLLM's (``--prefix-caching-hash-algo``), bit for bit, so that keys can be shared with a fleet running vLLM:
``sha256`` and ``xxhash`` digest a pickle (protocol 5), ``sha256_cbor`` and ``xxhash_cbor`` canonical CBOR.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, TypeAlias, get_args

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from ..checks import items_of, plain_text, whole_number
from ..errors import InvalidHasherError, InvalidTokensError
from .encoding import CBOR, PICKLE, ObjectEncoding, TokenArray

HashAlgorithm: TypeAlias = Literal["sha256_packed", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
ALGORITHMS: tuple[HashAlgorithm, ...] = get_args(HashAlgorithm)

# array is no generic at run time before Python 3.12, hence the quotes.
TokenIds: TypeAlias = "Sequence[int] | NDArray[np.integer] | array[int]"
ExtraKey: TypeAlias = tuple[str | int | bytes, ...]
#: What else names a block besides its tokens; None if nothing does.
BlockExtra: TypeAlias = tuple[ExtraKey, ...] | None

VLLM_DEFAULT_SEED = "vllm-none-hash"
_PACKED_LIMIT = 1 << 32
_VLLM_LIMIT = 1 << 63
#: Tokens encoded at once: few enough to stay in the processor's cache.
_RUN_TOKENS = 1 << 14


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


#: vLLM's algorithms: how an object becomes bytes, and bytes a digest.
_VLLM: Mapping[str, tuple[ObjectEncoding, Callable[[bytes], bytes]]] = {
    "sha256": (PICKLE, _sha256),
    "sha256_cbor": (CBOR, _sha256),
    "xxhash": (PICKLE, xxhash.xxh3_128_digest),
    "xxhash_cbor": (CBOR, xxhash.xxh3_128_digest),
}


class BlockHasher:
    """Hashes token ids block by block, each digest chained on the one before.

    ``block_size``: tokens a hash block. ``seed``: text that separates one fleet's hashes from another's. Two
    processes agree when they use the same three values. For vLLM's algorithms the default seed is the
    environment's ``PYTHONHASHSEED``, else vLLM's own default; the xxhash kinds have no default, since a
    guessable seed lets a stranger build prompts that collide.

    Raises ``InvalidHasherError``.
    """

    __slots__ = ("algorithm", "block_size", "none_hash", "seed")

    def __init__(self, block_size: int, algorithm: HashAlgorithm = "sha256_packed", seed: str | None = None) -> None:
        if algorithm not in ALGORITHMS:
            raise InvalidHasherError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
        self.block_size = whole_number(block_size, "block_size", InvalidHasherError, least=1)
        self.algorithm: HashAlgorithm = algorithm
        #: The seed text in force, the default resolved.
        self.seed = _resolve_seed(algorithm, seed)
        #: The digest that stands before the first block's.
        self.none_hash = self._first_hash()

    def __repr__(self) -> str:
        # A seed may be a secret.
        seed = repr(self.seed) if self.seed in ("", VLLM_DEFAULT_SEED) else "<not shown>"
        return f"BlockHasher({self.block_size}, {self.algorithm!r}, seed={seed})"

    def __eq__(self, other: object) -> bool:
        """Whether the two compute the same hashes."""
        if not isinstance(other, BlockHasher):
            return NotImplemented
        return (self.block_size, self.algorithm, self.seed) == (other.block_size, other.algorithm, other.seed)

    def __hash__(self) -> int:
        return hash((self.block_size, self.algorithm, self.seed))

    @property
    def token_limit(self) -> int:
        """Token ids must be below this."""
        return _PACKED_LIMIT if self.algorithm == "sha256_packed" else _VLLM_LIMIT

    def hash_blocks(
        self,
        token_ids: TokenIds,
        *,
        extra_keys: Sequence[Sequence[Sequence[str | int | bytes]] | None] | None = None,
        parent: bytes | None = None,
    ) -> tuple[bytes, ...]:
        """The digests of the full blocks of ``token_ids``; a partial last block has none.

        ``extra_keys``: one entry a full block, a tuple of tuples or None. ``parent``: the digest of the block
        before the first, to go on with a chain; default the chain's start.

        Raises ``InvalidTokensError`` for ids that are no non-negative ints below ``token_limit`` and for
        extra keys of another length.
        """
        ids = token_array(token_ids, limit=self.token_limit)
        count = len(ids) // self.block_size
        if extra_keys is not None and len(extra_keys) != count:
            raise InvalidTokensError(f"extra_keys must have one entry a full block: {count}, not {len(extra_keys)}")
        if parent is not None and (not isinstance(parent, bytes) or len(parent) != len(self.none_hash)):
            raise InvalidTokensError(
                f"parent must be a digest of {len(self.none_hash)} bytes, not {type(parent).__name__}"
            )
        extras = [] if extra_keys is None else _literal_extras(extra_keys)
        parent = self.none_hash if parent is None else parent
        hash_run = self._hash_packed if self.algorithm == "sha256_packed" else self._hash_objects
        blocks_a_run = max(_RUN_TOKENS // self.block_size, 1)
        hashes: list[bytes] = []
        for first in range(0, count, blocks_a_run):
            run = slice(first, min(first + blocks_a_run, count))
            tokens = ids[run.start * self.block_size : run.stop * self.block_size]
            hashes += hash_run(tokens, extras[run], parent)
            parent = hashes[-1]
        return tuple(hashes)

    def _first_hash(self) -> bytes:
        if self.algorithm == "sha256_packed":
            return _sha256(f"mooncake-sparse-client:1:{self.block_size}:{self.seed}".encode())
        encoding, digest = _VLLM[self.algorithm]
        return digest(encoding.encode(self.seed))

    def _hash_packed(self, ids: TokenArray, extras: Sequence[BlockExtra], parent: bytes) -> list[bytes]:
        packed = ids.astype("<u4", copy=False).tobytes()
        # NumPy cuts a string into equal parts several times as fast as slices do.
        blocks: list[bytes] = np.frombuffer(packed, dtype=np.dtype((np.void, 4 * self.block_size))).tolist()
        for number, extra in enumerate(extras):
            if extra is not None:
                blocks[number] += msgpack.packb(extra)
        # A copy of a state costs less than a new one.
        fresh, hashes = hashlib.sha256().copy, []
        for block in blocks:
            state = fresh()
            state.update(parent)
            state.update(block)
            parent = state.digest()
            hashes.append(parent)
        return hashes

    def _hash_objects(self, ids: TokenArray, extras: Sequence[BlockExtra], parent: bytes) -> list[bytes]:
        encoding, digest = _VLLM[self.algorithm]
        size, hashes = self.block_size, []
        if not any(extras) and encoding.writes_at_once(ids, size):
            for before, behind in zip(*encoding.around_parents(ids, size, len(parent)), strict=True):
                parent = digest(before + parent + behind)
                hashes.append(parent)
        else:
            tokens = tuple(ids.tolist())
            for number, extra in enumerate(extras or [None] * (len(ids) // size)):
                block = tokens[number * size : (number + 1) * size]
                parent = digest(encoding.encode((parent, block, extra)))
                hashes.append(parent)
        return hashes


def token_array(token_ids: TokenIds, *, limit: int = _VLLM_LIMIT) -> TokenArray:
    """``token_ids`` (a list, array or NumPy array of non-negative ints below ``limit``) as uint32 or int64.

    In a list, whatever Python takes as an index is an int.

    Raises ``InvalidTokensError`` and says which id is at fault.
    """
    listed = isinstance(token_ids, list | tuple) and len(token_ids) > 0 and limit >= _PACKED_LIMIT
    if listed and not isinstance(token_ids[0], bool | np.bool_):
        # Several times as fast as NumPy, and refuses what is no int from 0 to 2^32 - 1. What it cannot take is
        # looked at below; so is a list that starts with a bool, since one of bools alone is no list of ids.
        with suppress(TypeError, ValueError, OverflowError):
            return np.frombuffer(array("I", token_ids), dtype=np.uint32)
    try:
        ids = np.asarray(token_ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidTokensError(f"token_ids must be a flat sequence of ints: {error}") from error
    if ids.ndim != 1:
        raise InvalidTokensError(
            f"token_ids must be a list or array of ints in one dimension, not a {type(token_ids).__name__} of "
            f"{ids.ndim} dimensions"
        )
    if ids.size == 0:
        return np.empty(0, dtype=np.int64)
    # Below the limit every id fits; compare before the cast, which would wrap a huge unsigned id.
    fits = ids.dtype.kind in "iu" and int(ids.max()) < limit and (ids.dtype.kind == "u" or int(ids.min()) >= 0)
    if not fits:
        return _one_by_one(token_ids, limit)
    return ids.astype(np.uint32, copy=False) if limit <= _PACKED_LIMIT else ids.astype(np.int64, copy=False)


def _one_by_one(token_ids: TokenIds, limit: int) -> NDArray[np.int64]:
    """For what NumPy made floats or objects of: take each id as the caller gave it, and name the one at fault."""
    whole: list[int] = []
    for position, value in enumerate(token_ids):
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or not 0 <= value < limit:
            shown = value.item() if isinstance(value, np.generic) else value
            # What is no number may be a prompt's text.
            what = repr(shown) if isinstance(shown, int | float) else f"of type {type(shown).__name__}"
            raise InvalidTokensError(f"token_ids[{position}] is {what}; token ids are ints from 0 to {limit - 1}")
        whole.append(int(value))
    return np.array(whole, dtype=np.int64)


def _resolve_seed(algorithm: HashAlgorithm, seed: str | None) -> str:
    if seed is not None:
        seed = plain_text(seed, "seed", InvalidHasherError, may_be_empty=True, secret=True)
    if algorithm == "sha256_packed":
        return seed or ""
    if seed is None:
        seed = os.environ.get("PYTHONHASHSEED")
    if algorithm in ("xxhash", "xxhash_cbor") and not seed:
        raise InvalidHasherError(
            f"{algorithm} needs a seed: without one another process could not find these hashes again, and a "
            "guessable seed lets a stranger build colliding prompts. Pass seed=, or set PYTHONHASHSEED to the "
            "same secret text in every process"
        )
    return VLLM_DEFAULT_SEED if seed is None else seed


def _literal_extras(extra_keys: Sequence[Sequence[Sequence[str | int | bytes]] | None]) -> list[BlockExtra]:
    """``_literal_extra`` of each; what many blocks share is checked once."""
    entries = list(extra_keys)  # keeps them alive, so that each has an identity of its own
    marks = list(map(id, entries))
    literal = {mark: _literal_extra(extra) for mark, extra in dict(zip(marks, entries, strict=True)).items()}
    return [literal[mark] for mark in marks]


def _literal_extra(extra: Sequence[Sequence[str | int | bytes]] | None) -> BlockExtra:
    """``extra`` as a literal in source code would be: tuples, in which equal parts are one object.

    A pickle writes an object that it met before as a reference, so the digest depends on which parts are
    the same object; a literal's equal constants always are.
    """
    if not extra:
        return None
    parts: dict[tuple[type, object], str | int | bytes] = {}
    keys: dict[ExtraKey, ExtraKey] = {}
    literal = [
        _literal_key(key, parts)
        for key in items_of(extra, "the extra keys of a block", InvalidTokensError, secret=True)
    ]
    return tuple(keys.setdefault(key, key) for key in literal)


def _literal_key(key: Sequence[str | int | bytes], seen: dict[tuple[type, object], str | int | bytes]) -> ExtraKey:
    parts = [_plain_part(part) for part in items_of(key, "an extra key", InvalidTokensError, secret=True)]
    return tuple(seen.setdefault((type(part), part), part) for part in parts)


def _plain_part(part: object) -> str | int | bytes:
    if isinstance(part, str):
        return plain_text(part, "an extra key's text", InvalidTokensError, may_be_empty=True, secret=True)
    if isinstance(part, bytes):
        return bytes(part)
    if isinstance(part, bool) or not isinstance(part, int) or not -_VLLM_LIMIT <= part < _VLLM_LIMIT:
        raise InvalidTokensError(f"an extra key holds text, 64-bit ints and bytes, not a {type(part).__name__}")
    return int(part)
