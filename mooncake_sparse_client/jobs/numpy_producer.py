"""A producer without a model: chunks whose bytes tell the tokens they were made of, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..core.layout import GroupSpec, KVCacheLayout
from ..core.masks import BoolArray, IntArray, needed_chunks
from ..core.results import GetResult
from ..errors import InvalidBufferError, InvalidLayoutError, InvalidRequestError

Words: TypeAlias = NDArray[np.uint64]
Bytes: TypeAlias = NDArray[np.uint8]

#: On any machine: what one has stored, another restores.
_WORD: Final = np.dtype("<u8")
_HEAD_BYTES: Final = 8
# Odd, and their bits as if thrown: none of the places that they number is near another.
_TOKEN: Final = np.uint64(0x9E3779B97F4A7C15)
_POSITION: Final = np.uint64(0xD1B54A32D192ED03)
_END: Final = np.uint64(0x8CB92BA72F3D8DD7)


@dataclass(frozen=True, slots=True)
class SeenPrefix:
    """What stands for a cache: how many tokens it has seen, and a 64-bit hash of them and their positions."""

    num_tokens: int = 0
    prefix_hash: int = 0


class NumpyProducer:
    """Makes chunks that depend on every token up to their end, and on nothing else.

    The first 8 bytes of a chunk hold the hash of the prefix that ends with it, and what follows is made of that hash,
    the group and the place. So ``restore`` gets its state out of the chunks, and notices those that are damaged, of
    another group, place or prefix. (No chunk of 8 bytes shows that by itself. One of 16 or more does, whatever byte of
    it is wrong.)

    Its methods may be called from several threads at once.
    """

    def __init__(self, layout: KVCacheLayout) -> None:
        """Raises ``InvalidLayoutError`` for a layout without page sizes, and for pages of less than 8 bytes."""
        if not isinstance(layout, KVCacheLayout):
            raise InvalidLayoutError(f"NumpyProducer has no layout of its own: give it a KVCacheLayout, not {layout!r}")
        for number, nbytes in enumerate(layout.page_sizes):
            if nbytes < _HEAD_BYTES:
                name = layout.groups[number].name
                raise InvalidLayoutError(
                    f"page_size_bytes is {nbytes} on group {number}{f' ({name})' if name else ''}: NumpyProducer wants "
                    f"{_HEAD_BYTES} at least, for a hash; choose a larger scale"
                )
        self._layout = layout
        self._pages = tuple(_Pages.of(number, nbytes) for number, nbytes in enumerate(layout.page_sizes))

    @property
    def layout(self) -> KVCacheLayout:
        return self._layout

    def restore(self, got: GetResult) -> SeenPrefix:
        """The state at ``got.hit_length``, after a look at every byte of the chunks that the hit needs.

        Raises ``InvalidBufferError``, naming group and chunk, for one that is missing, of another size, damaged, or of
        another prefix than the others; and where no group needs a chunk that ends at the hit (windows of 1, or
        chunked attention at the end of a run, and nothing else), since no chunk then tells what was seen.
        """
        length = got.hit_length
        if length % self._layout.alignment:
            raise InvalidRequestError(
                f"a hit of {length} tokens is none of this layout, whose hits are multiples of {self._layout.alignment}"
            )
        if not length:
            return SeenPrefix()
        known: dict[int, tuple[int, int]] = {}
        for group, spec in enumerate(self._layout.groups):
            chunks = needed_chunks(spec, length, margin=False)
            if not chunks:
                continue
            for chunk, found in zip(chunks, self._hashes_in(got, group, chunks), strict=True):
                said, other = known.setdefault((chunk + 1) * spec.block_size, (found, group))
                if said != found:
                    raise InvalidBufferError(
                        f"chunk {chunk} of group {group} is of another prefix than the chunk of group {other} that "
                        f"ends at the same token, {(chunk + 1) * spec.block_size}"
                    )
        if length not in known:
            raise InvalidBufferError(
                f"no group of this layout keeps a chunk for a hit of {length} tokens, so NumpyProducer cannot tell "
                "what was seen: use a layout with full attention, a recurrent state or a window of more than 1 token"
            )
        return SeenPrefix(length, known[length][0])

    def _hashes_in(self, got: GetResult, group: int, chunks: range) -> list[int]:
        """The prefix hash in each of a group's chunks."""
        nbytes = self._pages[group].nbytes
        views = [got.chunks.get((group, chunk)) for chunk in chunks]
        for chunk, view in zip(chunks, views, strict=True):
            if view is None or view.nbytes != nbytes:
                what = "is missing" if view is None else f"has {view.nbytes} bytes, not {nbytes}"
                raise InvalidBufferError(
                    f"chunk {chunk} of group {group} {what}: restore() wants the result of a get without `into`, of "
                    "a hit that was looked up without local_tokens"
                )
        rows = np.frombuffer(b"".join(view for view in views if view is not None), dtype=np.uint8)
        ends = np.arange(chunks.start + 1, chunks.stop + 1, dtype=np.int64) * self._layout.groups[group].block_size
        hashes, intact = self._pages[group].read(rows.reshape(-1, nbytes), ends)
        if not intact.all():
            raise InvalidBufferError(
                f"chunk {chunks[int(intact.argmin())]} of group {group} is not what was made for its place: it is "
                "damaged, or another chunk's"
            )
        found: list[int] = hashes.tolist()
        return found

    def fork(self, state: SeenPrefix) -> SeenPrefix:
        """The same one, which never changes."""
        return state

    def prefill(
        self, state: SeenPrefix, token_ids: NDArray[np.int64], wanted: Sequence[BoolArray]
    ) -> tuple[SeenPrefix, Mapping[tuple[int, int], Bytes]]:
        """See ``Producer.prefill``. Raises ``InvalidRequestError`` for what breaks its rules."""
        ids = np.asarray(token_ids, dtype=np.int64)
        seen, end = state.num_tokens, state.num_tokens + ids.size
        if ids.ndim != 1 or not ids.size or ids.size % self._layout.alignment:
            raise InvalidRequestError(
                f"prefill was given token ids of shape {ids.shape}: their number must be a positive multiple of the "
                f"alignment {self._layout.alignment}"
            )
        if len(wanted) != len(self._pages):
            raise InvalidRequestError(f"wanted has {len(wanted)} masks, and the layout {len(self._pages)} groups")
        hashes = _prefix_hashes(state, ids)
        made: dict[tuple[int, int], Bytes] = {}
        for group, mask in enumerate(wanted):
            chunks = np.flatnonzero(mask)
            if chunks.size:
                ends = _ends(self._layout.groups[group], group, chunks, seen, end)
                rows = self._pages[group].made(hashes[ends - (seen + 1)], ends)
                made |= {(group, chunk): row for chunk, row in zip(chunks.tolist(), rows, strict=True)}
        return SeenPrefix(end, int(hashes[-1])), made


@dataclass(frozen=True, slots=True)
class _Pages:
    """The bytes of one group's chunks."""

    nbytes: int
    #: Of the group: the same prefix gives other bytes in another one.
    label: np.uint64
    #: Whole words, so that the last may hang over the page.
    pattern: Words

    @classmethod
    def of(cls, group: int, nbytes: int) -> _Pages:
        numbers = np.arange(1, -(-nbytes // _WORD.itemsize) + 1, dtype=np.uint64)
        return cls(nbytes, _mix(np.array([group + 1], dtype=np.uint64))[0], _mix(numbers))

    def made(self, hashes: Words, ends: IntArray) -> Bytes:
        """The chunks of prefixes that have these hashes and numbers of tokens, one a row."""
        keys = _mix(hashes + ends.view(np.uint64) * _END + self.label)
        words = np.empty((keys.size, self.pattern.size), dtype=_WORD)
        np.bitwise_xor(keys[:, None], self.pattern, out=words)
        words[:, 0] = hashes ^ self.label
        return words.view(np.uint8)[:, : self.nbytes]

    def read(self, rows: Bytes, ends: IntArray) -> tuple[Words, BoolArray]:
        """The hashes in chunks that end there, and which of the chunks are intact."""
        heads = np.ascontiguousarray(rows[:, :_HEAD_BYTES]).view(_WORD)[:, 0].astype(np.uint64)
        hashes = heads ^ self.label
        return hashes, (rows == self.made(hashes, ends)).all(axis=1)


def _ends(spec: GroupSpec, group: int, chunks: NDArray[np.intp], seen: int, end: int) -> IntArray:
    """Where the chunks end, in tokens. Raises ``InvalidRequestError`` unless all are among ``[seen, end)``."""
    ends = (chunks.astype(np.int64) + 1) * spec.block_size
    if ends[0] - spec.block_size < seen or ends[-1] > end:
        raise InvalidRequestError(
            f"chunks {chunks[0]} to {chunks[-1]} of group {group} are wanted, tokens {ends[0] - spec.block_size} to "
            f"{ends[-1]}, and the tokens computed are those from {seen} to {end}"
        )
    return ends


def _prefix_hashes(state: SeenPrefix, token_ids: IntArray) -> Words:
    """The hash of the prefix that ends with each token: a sum, modulo 2^64, over all of its tokens."""
    places = np.arange(state.num_tokens, state.num_tokens + token_ids.size, dtype=np.uint64)
    places *= _POSITION
    places += token_ids.view(np.uint64) * _TOKEN
    hashes = _mix(places)
    hashes[:1] += np.uint64(state.prefix_hash)
    return np.cumsum(hashes, out=hashes)


def _mix(words: Words) -> Words:
    """Each word, in place, so that every bit hangs on every other (the finalizer of SplitMix64; it can be undone)."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
