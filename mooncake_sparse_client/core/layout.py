"""Which layers cache what: one spec a layer group, and the layout that holds them.

A *group* is a set of layers that share one attention kind and one block size. A *chunk* is the cached
bytes of one group for one run of ``block_size`` tokens; chunk ``i`` covers tokens ``[i*b, (i+1)*b)``.
All sizes are in tokens unless a name says bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

from ..checks import whole_number
from ..errors import InvalidLayoutError


def _size(value: object, name: str) -> int:
    return whole_number(value, name, InvalidLayoutError, least=1)


@dataclass(frozen=True, slots=True)
class _Spec:
    """What every group has.

    ``block_size``: tokens a chunk. ``page_size_bytes``: bytes of one chunk, all the group's layers together;
    optional for masks and prefixes, wanted by the client. ``name``: for people, never part of an identity.
    ``eagle``: the group holds draft layers, which must recompute the last block of a hit.
    """

    kind: ClassVar[str]
    #: Whether the group keeps every chunk it may need whatever the retention.
    dense: ClassVar[bool]

    block_size: int
    eagle: bool = field(default=False, kw_only=True)
    page_size_bytes: int | None = field(default=None, kw_only=True)
    name: str = field(default="", kw_only=True)

    @property
    def label(self) -> str:
        """For people, such as ``sliding_window 64, 128``: kind, block size and window in tokens."""
        window = f", {self.window}" if self.window else ""
        return f"{self.kind} {self.block_size}{window}"

    def __post_init__(self) -> None:
        self._set("block_size", _size(self.block_size, f"{type(self).__name__}.block_size"))
        if self.page_size_bytes is not None:
            self._set("page_size_bytes", _size(self.page_size_bytes, f"{type(self).__name__}.page_size_bytes"))
        if not isinstance(self.eagle, bool):
            raise InvalidLayoutError(f"{type(self).__name__}.eagle must be True or False, not {self.eagle!r}")
        if not isinstance(self.name, str):
            raise InvalidLayoutError(f"{type(self).__name__}.name must be text, not {self.name!r}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def window(self) -> int:
        """The width that shapes the group's needs: its window or attention chunk, 0 where it has none."""
        return 0

    def _forbid_eagle(self) -> None:
        if self.eagle:
            raise InvalidLayoutError(
                f"{type(self).__name__}.eagle: a {self.kind} group has no draft margin; leave the flag off"
            )


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(_Spec):
    """Full attention (MLA too, with its own page size): a hit needs every chunk below it."""

    kind: ClassVar[str] = "full"
    dense: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(_Spec):
    """Attention over the last ``sliding_window`` tokens, the current one included.

    A hit needs the last ``ceil((sliding_window - 1) / block_size)`` chunks below it.
    """

    kind: ClassVar[str] = "sliding_window"
    dense: ClassVar[bool] = False

    sliding_window: int

    def __post_init__(self) -> None:
        _Spec.__post_init__(self)
        self._set("sliding_window", _size(self.sliding_window, "SlidingWindowSpec.sliding_window"))

    @property
    def window(self) -> int:
        return self.sliding_window

    @property
    def window_chunks(self) -> int:
        """Chunks below a boundary that a resume needs: the next token sees ``sliding_window - 1`` before it."""
        return -(-(self.sliding_window - 1) // self.block_size)


@dataclass(frozen=True, slots=True)
class ChunkedLocalAttentionSpec(_Spec):
    """Attention within runs of ``attention_chunk_size`` tokens: a hit needs its own run's chunks below it."""

    kind: ClassVar[str] = "chunked_local"
    dense: ClassVar[bool] = True

    attention_chunk_size: int

    def __post_init__(self) -> None:
        _Spec.__post_init__(self)
        name = "ChunkedLocalAttentionSpec.attention_chunk_size"
        size = _size(self.attention_chunk_size, name)
        if size % self.block_size:
            raise InvalidLayoutError(f"{name} must be a multiple of block_size {self.block_size}, not {size}")
        self._set("attention_chunk_size", size)
        self._forbid_eagle()

    @property
    def window(self) -> int:
        return self.attention_chunk_size


@dataclass(frozen=True, slots=True)
class MambaSpec(_Spec):
    """Any recurrent state (Mamba, linear attention): a hit needs the one state at its end."""

    kind: ClassVar[str] = "recurrent"
    dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _Spec.__post_init__(self)
        self._forbid_eagle()


GroupSpec: TypeAlias = FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec | MambaSpec


@dataclass(frozen=True, slots=True, init=False)
class KVCacheLayout:
    """A model's layer groups and the hash block that names their chunks.

    ``groups`` come back with their ``eagle`` flags settled: groups with equal specs (name and flag aside)
    share the flag, and ``use_eagle`` with no flagged group flags every full and sliding-window group.

    ``hash_block_size`` must divide ``alignment``, and of it and each block size one must divide the other.
    Without draft layers the default is ``alignment`` (a hit is a multiple of it, so no finer name is ever
    asked for); with them it is ``common_block_size``, so that a margin chunk's name does not depend on
    tokens behind the margin.

    Raises ``InvalidLayoutError``, which names the field at fault.
    """

    groups: tuple[GroupSpec, ...]
    hash_block_size: int
    #: Whether the caller named the hash block; a profile may choose it otherwise.
    hash_block_size_given: bool
    #: Whether any group has draft layers: boundaries then step back by one ``alignment``.
    use_eagle: bool
    #: Least common multiple of the block sizes: every hit length is a multiple of it.
    alignment: int
    #: Greatest common divisor of the block sizes.
    common_block_size: int

    def __init__(
        self, groups: Sequence[GroupSpec], *, hash_block_size: int | None = None, use_eagle: bool = False
    ) -> None:
        settled = _settle_eagle(_checked_groups(groups), use_eagle)
        sizes = [spec.block_size for spec in settled]
        alignment, common = math.lcm(*sizes), math.gcd(*sizes)
        any_eagle = any(spec.eagle for spec in settled)
        given = hash_block_size is not None
        if hash_block_size is None:
            hash_block_size = common if any_eagle else alignment
        values = {
            "groups": settled,
            "hash_block_size": _checked_hash_block(hash_block_size, alignment, sizes),
            "hash_block_size_given": given,
            "use_eagle": any_eagle,
            "alignment": alignment,
            "common_block_size": common,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def with_hash_block_size(self, hash_block_size: int) -> KVCacheLayout:
        """The same groups, named by another hash block."""
        return KVCacheLayout(self.groups, hash_block_size=hash_block_size)

    def align(self, num_tokens: int) -> int:
        """``num_tokens`` rounded down to a multiple of ``alignment``."""
        return num_tokens // self.alignment * self.alignment

    def hit_cap(self, num_tokens: int) -> int:
        """The longest hit a request of ``num_tokens`` may have: its last token is always recomputed."""
        return max(self.align(num_tokens - 1), 0)

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Bytes of one chunk, a number a group. Raises ``InvalidLayoutError`` naming the spec that has none."""
        for number, spec in enumerate(self.groups):
            if spec.page_size_bytes is None:
                label = f" ({spec.name})" if spec.name else ""
                raise InvalidLayoutError(
                    f"page_size_bytes is missing on group {number}{label}, a {type(spec).__name__}: "
                    "a client must know the bytes of one chunk; give it to every spec"
                )
        return tuple(spec.page_size_bytes or 0 for spec in self.groups)


def _checked_groups(groups: Sequence[GroupSpec]) -> tuple[GroupSpec, ...]:
    if isinstance(groups, _Spec) or not isinstance(groups, Sequence):
        raise InvalidLayoutError(f"groups must be a list of specs, one a layer group, not {groups!r}")
    if not groups:
        raise InvalidLayoutError("groups is empty: a layout needs at least one spec")
    for number, spec in enumerate(groups):
        if not isinstance(spec, GroupSpec):
            raise InvalidLayoutError(f"groups[{number}] must be a spec such as FullAttentionSpec, not {spec!r}")
    return tuple(groups)


def _settle_eagle(groups: tuple[GroupSpec, ...], use_eagle: bool) -> tuple[GroupSpec, ...]:
    if not isinstance(use_eagle, bool):
        raise InvalidLayoutError(f"use_eagle must be True or False, not {use_eagle!r}")

    def bare(spec: GroupSpec) -> GroupSpec:
        return replace(spec, eagle=False, name="")

    flagged = {bare(spec) for spec in groups if spec.eagle}
    if use_eagle and not flagged:
        flagged = {bare(spec) for spec in groups if isinstance(spec, FullAttentionSpec | SlidingWindowSpec)}
        if not flagged:
            raise InvalidLayoutError("use_eagle: no full or sliding-window group could hold draft layers")
    if flagged and any(isinstance(spec, ChunkedLocalAttentionSpec) for spec in groups):
        raise InvalidLayoutError("eagle: draft layers cannot stand beside a chunked local group")
    return tuple(replace(spec, eagle=bare(spec) in flagged) for spec in groups)


def _checked_hash_block(value: int, alignment: int, sizes: list[int]) -> int:
    hash_block = _size(value, "hash_block_size")
    if alignment % hash_block:
        raise InvalidLayoutError(f"hash_block_size {hash_block} must divide the alignment {alignment}")
    for size in sizes:
        if size % hash_block and hash_block % size:
            raise InvalidLayoutError(
                f"hash_block_size {hash_block} fits no block size {size}: one must divide the other"
            )
    return hash_block
