"""The prefix tree of a corpus: which prompts share which blocks, each distinct block once.

Its unit is a block of ``alignment`` tokens, named by the hash of the prefix that it ends. A *stretch* is a run of
blocks that nothing parts, an edge of the tree; where several go on from its end, prompts part: a junction. What lies
behind a prompt's last whole block has no place in the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..core.layout import KVCacheLayout
from ..core.masks import retained_boundaries


@dataclass(slots=True)
class PromptEnds:
    """Prompts whose last whole block is the same."""

    prompts: int = 0
    #: Of them all.
    tokens: int = 0
    #: Whether some end with that block, and whether some have tokens behind it: they resume from other boundaries.
    whole: bool = False
    partial: bool = False

    def add(self, num_tokens: int, alignment: int) -> None:
        self.prompts += 1
        self.tokens += num_tokens
        if num_tokens % alignment:
            self.partial = True
        else:
            self.whole = True


@dataclass(slots=True, eq=False)
class Stretch:
    """Blocks ``[start, end)`` that follow on those of ``parent``. Numbers of blocks, from the prompt's beginning."""

    parent: Stretch | None
    start: int
    #: The hashes of its blocks, one behind the other.
    hashes: bytes
    digest_size: int
    #: Where its tokens begin in the spool, in tokens.
    place: int
    #: A salt names a prefix from its first block on, so that all of a path have the same.
    cache_salt: str | None = None
    children: dict[bytes, Stretch] = field(default_factory=dict)
    #: By the number of blocks at which prompts end.
    ends: dict[int, PromptEnds] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        return len(self.hashes) // self.digest_size

    @property
    def end(self) -> int:
        return self.start + self.blocks

    @property
    def name(self) -> bytes:
        """16 bytes that no other stretch has: of its last block's hash."""
        return self.hashes[-self.digest_size :][:16]

    @property
    def is_junction(self) -> bool:
        """Whether prompts part at its end."""
        return len(self.children) > 1

    def path(self) -> list[Stretch]:
        """From the first block to this stretch."""
        found: list[Stretch] = []
        at: Stretch | None = self
        while at is not None and at.blocks:
            found.append(at)
            at = at.parent
        return found[::-1]

    def shared(self, hashes: bytes, first: int) -> int:
        """How many of its blocks, from the first on, ``hashes`` has from the block of number ``first`` on."""
        size = self.digest_size
        most = min(self.blocks, len(hashes) // size - first)
        own, other = memoryview(self.hashes), memoryview(hashes)[first * size :]
        if own[: most * size] == other[: most * size]:
            return most
        # A digest names all of its prefix: once two differ, all behind them do.
        low, high = 0, most
        while low < high:
            middle = (low + high) // 2
            if own[middle * size : (middle + 1) * size] == other[middle * size : (middle + 1) * size]:
                low = middle + 1
            else:
                high = middle
        return low


class PrefixTree:
    """The distinct blocks of all prompts of a corpus. Each is added with ``add``; then the tree is read."""

    def __init__(self, layout: KVCacheLayout, digest_size: int) -> None:
        self.layout = layout
        self._digest_size = digest_size
        #: Has no blocks; prompts that are shorter than one end in it.
        self.root = Stretch(None, 0, b"", digest_size, 0)
        self._every = layout.alignment // layout.hash_block_size
        self._distinct = 0

    @property
    def distinct_blocks(self) -> int:
        return self._distinct

    def add(self, block_hashes: Sequence[bytes], num_tokens: int, place: int, cache_salt: str | None = None) -> int:
        """Add a prompt by its chain of block hashes, and answer its number of blocks that are new: its last ones.

        ``place``: where the tokens of those will lie in the spool.
        """
        hashes = b"".join(block_hashes[self._every - 1 :: self._every])
        blocks = len(hashes) // self._digest_size
        at, depth = self.root, 0
        while depth < blocks:
            child = at.children.get(self._digest(hashes, depth))
            if child is None:
                new = Stretch(at, depth, hashes[depth * self._digest_size :], self._digest_size, place, cache_salt)
                at.children[self._digest(hashes, depth)] = new
                at = new
                break
            shared = child.shared(hashes, depth)
            depth += shared
            at = child if shared == child.blocks or depth == blocks else self._part(child, shared)
        new_blocks = blocks - depth
        self._distinct += new_blocks
        at.ends.setdefault(blocks, PromptEnds()).add(num_tokens, self.layout.alignment)
        return new_blocks

    def _digest(self, hashes: bytes, block: int) -> bytes:
        return hashes[block * self._digest_size : (block + 1) * self._digest_size]

    def _part(self, stretch: Stretch, blocks: int) -> Stretch:
        """Cut a stretch behind so many of its blocks; the upper part is answered, and takes its place."""
        parent, size, cut = stretch.parent, self._digest_size, stretch.start + blocks
        assert parent is not None  # noqa: S101 - the root has no blocks
        upper = Stretch(parent, stretch.start, stretch.hashes[: blocks * size], size, stretch.place, stretch.cache_salt)
        parent.children[upper.hashes[:size]] = upper
        stretch.parent, stretch.start = upper, cut
        stretch.hashes = stretch.hashes[blocks * size :]
        stretch.place += blocks * self.layout.alignment
        upper.children[stretch.hashes[:size]] = stretch
        upper.ends = {end: ends for end, ends in stretch.ends.items() if end <= cut}
        stretch.ends = {end: ends for end, ends in stretch.ends.items() if end > cut}
        return upper

    def stretches(self) -> Iterator[Stretch]:
        """All of them, each behind its parent and before what does not go on from it: as a depth-first walk goes."""
        todo = list(self.root.children.values())[::-1]
        while todo:
            stretch = todo.pop()
            yield stretch
            todo += list(stretch.children.values())[::-1]

    def subtree_sums(self, value: Callable[[Stretch], int]) -> dict[Stretch, int]:
        """For each stretch, the root too, the values of it and of all that goes on from it."""
        sums = {stretch: value(stretch) for stretch in (self.root, *self.stretches())}
        for stretch in reversed(list(sums)):  # children first
            if stretch.parent is not None:
                sums[stretch.parent] += sums[stretch]
        return sums

    def replay_boundaries(self, stretch: Stretch) -> list[int]:
        """Tokens from which a resend, or an extension, of a prompt that ends in the stretch resumes."""
        found = {
            boundary
            for blocks, ends in stretch.ends.items()
            for there, behind in ((ends.whole, 0), (ends.partial, 1))
            if there
            for boundary in retained_boundaries(self.layout, blocks * self.layout.alignment + behind, ())
        }
        return sorted(found)

    def junctions(self, stretch: Stretch) -> list[int]:
        """Tokens at which prompts that part at its end may resume."""
        end = stretch.end * self.layout.alignment
        return list(retained_boundaries(self.layout, None, [end])) if stretch.is_junction else []
