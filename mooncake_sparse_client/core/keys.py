"""How a chunk is named, how a name becomes a store key, and what sets caches apart.

A key is byte for byte the one of vLLM's ``MooncakeStoreConnector``, with a namespace that vLLM leaves empty::

    [<cache_prefix>@]<model_name><namespace>@tp_rank:<t>@pcp<p>@dcp<d>@pp_rank:<q>@group:<g>@<chunk name>

Every key of this package, asked for or written, is built here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from ..checks import items_of, plain_text, whole_number
from ..errors import InvalidKeyError
from .hashing import BlockHasher
from .layout import KVCacheLayout

#: ``(tp, pcp, dcp, pp)``: tensor, prefill-context, decode-context and pipeline parallel rank.
Rank: TypeAlias = tuple[int, int, int, int]


def chunk_hash_position(layout: KVCacheLayout, group: int, chunk: int) -> tuple[int, int]:
    """Which block hash names a chunk, and how many chunks before that hash's end the chunk ends.

    The distance is 0 wherever the hash block divides the group's block size.
    """
    size, hash_block = layout.groups[group].block_size, layout.hash_block_size
    end = (chunk + 1) * size
    index = -(-end // hash_block) - 1
    return index, ((index + 1) * hash_block - end) // size


def chunk_name(layout: KVCacheLayout, block_hashes: Sequence[bytes], group: int, chunk: int) -> str | None:
    """The chunk's name: its block hash in lower hex, and ``.<distance>`` where there is one.

    None for a chunk whose hash block is not complete: it has no name yet, and nothing asks for it.
    """
    index, distance = chunk_hash_position(layout, group, chunk)
    return _name(block_hashes[index], distance) if index < len(block_hashes) else None


def _name(block_hash: bytes, distance: int) -> str:
    return f"{block_hash.hex()}.{distance}" if distance else block_hash.hex()


@dataclass(frozen=True, slots=True)
class KeySchema:
    """What a client's keys say besides the chunk.

    ``key_ranks``: the ranks whose keys must all be there for a chunk to count as present in a lookup; empty: the
    schema's own rank alone. ``namespace`` left empty is filled by the client with a fingerprint
    of everything that makes two caches incompatible; ``KeySchema.vllm(...)`` keeps it empty.

    Raises ``InvalidKeyError``, which names the part.
    """

    model_name: str
    tp_rank: int = field(default=0, kw_only=True)
    pcp_rank: int = field(default=0, kw_only=True)
    dcp_rank: int = field(default=0, kw_only=True)
    pp_rank: int = field(default=0, kw_only=True)
    cache_prefix: str = field(default="", kw_only=True)
    namespace: str = field(default="", kw_only=True)
    key_ranks: tuple[Rank, ...] = field(default=(), kw_only=True)
    #: The keys are vLLM's own: a client leaves the namespace as it is.
    plain: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("model_name", "cache_prefix", "namespace"):
            text = plain_text(getattr(self, name), name, InvalidKeyError, may_be_empty=name != "model_name")
            object.__setattr__(self, name, text)
        for name in ("tp_rank", "pcp_rank", "dcp_rank", "pp_rank"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name, InvalidKeyError))
        object.__setattr__(self, "key_ranks", _checked_ranks(self.key_ranks))

    @classmethod
    def vllm(
        cls,
        model_name: str,
        *,
        tp_rank: int = 0,
        pcp_rank: int = 0,
        dcp_rank: int = 0,
        pp_rank: int = 0,
        cache_prefix: str = "",
        key_ranks: Sequence[Rank] = (),
    ) -> KeySchema:
        """The keys that a fleet running vLLM writes: no namespace, now or later."""
        return cls(
            model_name,
            tp_rank=tp_rank,
            pcp_rank=pcp_rank,
            dcp_rank=dcp_rank,
            pp_rank=pp_rank,
            cache_prefix=cache_prefix,
            key_ranks=tuple(items_of(key_ranks, "key_ranks", InvalidKeyError)),
            plain=True,
        )

    @property
    def rank(self) -> Rank:
        """The own rank: what ``put``, ``get`` and ``remove`` use."""
        return (self.tp_rank, self.pcp_rank, self.dcp_rank, self.pp_rank)

    @property
    def cache_id(self) -> str:
        """The part of a key that all ranks of one cache share."""
        prefix = f"{self.cache_prefix}@" if self.cache_prefix else ""
        return f"{prefix}{self.model_name}{self.namespace}"

    @property
    def cache_stem(self) -> str:
        """What every key of the cache starts with, whichever rank and group, and no key of another cache."""
        return f"{self.cache_id}@tp_rank:"

    @property
    def lookup_ranks(self) -> tuple[Rank, ...]:
        """The ranks whose keys a lookup asks for."""
        return self.key_ranks or (self.rank,)

    def with_namespace(self, namespace: str) -> KeySchema:
        return replace(self, namespace=namespace)

    def key(self, group_id: int, chunk_name: str) -> str:
        """The own rank's key of one chunk."""
        return self.stem(group_id, self.rank) + chunk_name

    def stem(self, group_id: int, rank: Rank) -> str:
        """A key up to the chunk's name."""
        tp, pcp, dcp, pp = rank
        return f"{self.cache_stem}{tp}@pcp{pcp}@dcp{dcp}@pp_rank:{pp}@group:{group_id}@"


#: Chunk indices of one group.
Chunks: TypeAlias = "Sequence[int] | NDArray[np.intp]"


@dataclass(frozen=True, slots=True)
class KeyBuilder:
    """Keys for many chunks of one sequence at once. All of its chunks' hash blocks must be complete."""

    layout: KVCacheLayout
    schema: KeySchema

    def names(self, block_hashes: Sequence[bytes], group: int, chunks: Chunks) -> list[str]:
        """The chunks' names; ``IndexError`` for one that has none yet."""
        return self._stemmed("", block_hashes, group, chunks)

    def own_keys(self, block_hashes: Sequence[bytes], group: int, chunks: Chunks) -> list[str]:
        """One key a chunk: the own rank's."""
        return self._stemmed(self.schema.stem(group, self.schema.rank), block_hashes, group, chunks)

    def ranked_keys(self, block_hashes: Sequence[bytes], group: int, chunks: Chunks) -> list[str]:
        """``len(lookup_ranks)`` keys a chunk, a chunk's keys side by side."""
        stems = [self.schema.stem(group, rank) for rank in self.schema.lookup_ranks]
        if len(stems) == 1:
            return self._stemmed(stems[0], block_hashes, group, chunks)
        return [stem + name for name in self.names(block_hashes, group, chunks) for stem in stems]

    def _stemmed(self, stem: str, block_hashes: Sequence[bytes], group: int, chunks: Chunks) -> list[str]:
        size, hash_block = self.layout.groups[group].block_size, self.layout.hash_block_size
        if size == hash_block:
            return [stem + block_hashes[chunk].hex() for chunk in _plain(chunks)]
        # chunk_hash_position, of all at once
        ends = (np.asarray(chunks, dtype=np.int64) + 1) * size
        indices = -(-ends // hash_block) - 1
        distances = ((indices + 1) * hash_block - ends) // size
        if not distances.any():
            return [stem + block_hashes[index].hex() for index in indices.tolist()]
        pairs = zip(indices.tolist(), distances.tolist(), strict=True)
        return [stem + _name(block_hashes[index], distance) for index, distance in pairs]


def _plain(chunks: Chunks) -> Sequence[int]:
    """Plain ints, which are quicker to go through than NumPy's."""
    return chunks.tolist() if isinstance(chunks, np.ndarray) else chunks


def fingerprint(layout: KVCacheLayout, hasher: BlockHasher, *, format_version: int, dtype: str, revision: str) -> str:
    """16 hex digits over everything that makes two caches incompatible, and nothing else.

    What enters: the value format's version; each group's kind, block size, window (or attention chunk) and
    page size, in order; the hash block; the hash algorithm and its seed; the dtype; the model revision.
    What does not: group names, draft flags, ranks, retention. One field more would split a fleet.
    """
    dtype = plain_text(dtype, "dtype", InvalidKeyError)
    revision = plain_text(revision, "revision", InvalidKeyError, may_be_empty=True)
    groups = [[spec.kind, spec.block_size, spec.window, spec.page_size_bytes] for spec in layout.groups]
    parts: list[Any] = [
        format_version,
        groups,
        layout.hash_block_size,
        hasher.algorithm,
        hasher.seed,
        dtype,
        revision,
    ]
    return xxhash.xxh3_64_hexdigest(msgpack.packb(parts))


def _checked_ranks(ranks: Sequence[Rank]) -> tuple[Rank, ...]:
    checked: dict[Rank, None] = {}
    for number, rank in enumerate(items_of(ranks, "key_ranks", InvalidKeyError)):
        if not isinstance(rank, Sequence) or isinstance(rank, str) or len(rank) != 4:
            raise InvalidKeyError(f"key_ranks[{number}] must be (tp, pcp, dcp, pp), not {rank!r}")
        tp, pcp, dcp, pp = (
            whole_number(value, f"{name} in key_ranks[{number}]", InvalidKeyError)
            for name, value in zip(("tp", "pcp", "dcp", "pp"), rank, strict=True)
        )
        checked[tp, pcp, dcp, pp] = None
    return tuple(checked)
