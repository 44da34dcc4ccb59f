"""Sharing the stretches of a tree out among several jobs, so that none of them is computed twice."""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass

from ..errors import ConfigError
from .tree import PrefixTree, Stretch

#: A subtree is split into its branches while it is more than this part of a fair share.
_FINEST = 4


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``number`` of ``count``, from 1; 0 is the trunk alone: the stretches that several parts go on from.

    Part 1 computes the trunk too, before its own stretches, unless it is in the store. The others wait for it. With
    ``trunk_apart`` the trunk is another job's from the first, and counted there alone.
    """

    number: int = 1
    count: int = 1
    trunk_apart: bool = False

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.number <= self.count:
            raise ConfigError(f"there is no part {self.number} of {self.count}: parts go from 1, and 0 is the trunk")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """``i/n``, or ``trunk/n``. Raises ``ConfigError``."""
        found = re.fullmatch(r"([1-9][0-9]{0,5}|trunk)/([0-9]{1,6})", text)
        if not found:
            raise ConfigError(f"{text!r} is no part such as 1/3, nor trunk/3")
        return cls(0 if found[1] == "trunk" else int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number or 'trunk'}/{self.count}"

    @property
    def part(self) -> tuple[int, int] | None:
        """Number and count, None for a job that is whole."""
        return None if self == Shard() else (self.number, self.count)

    @property
    def has_trunk(self) -> bool:
        return self.number == 0 or (self.number == 1 and not self.trunk_apart)


@dataclass(frozen=True, slots=True)
class Shares:
    """All stretches of a tree, each in the trunk or in one part; in the order of a depth-first walk."""

    trunk: tuple[Stretch, ...]
    parts: tuple[tuple[Stretch, ...], ...]

    def of(self, shard: Shard) -> tuple[tuple[Stretch, ...], tuple[Stretch, ...]]:
        """What the shard computes: of the trunk, and of its own."""
        trunk = self.trunk if shard.has_trunk else ()
        return trunk, self.parts[shard.number - 1] if shard.number else ()


def share_out(tree: PrefixTree, count: int, *, trunk_apart: bool = False) -> Shares:
    """Cut the tree into ``count`` parts of about equal numbers of tokens, the trunk counted as the first part's unless
    it is ``trunk_apart``. The same tree is always cut alike.

    A part is made of whole subtrees. One that is too large is split where its prompts part; what leads there becomes
    the trunk, where its branches come to different parts.
    """
    order = list(tree.stretches())
    if count == 1:
        return Shares((), (tuple(order),))
    weights = tree.subtree_sums(lambda stretch: stretch.blocks)
    tops = _split(tree, weights, max(1, tree.distinct_blocks // (count * _FINEST)))
    trunk_blocks = 0 if trunk_apart else tree.distinct_blocks - sum(weights[top] for top in tops)
    part_of = _assigned(tops, weights, count, trunk=trunk_blocks)
    for stretch in order:
        if stretch.parent in part_of:
            part_of[stretch] = part_of[stretch.parent]
    #: Of what stands above the tops: the parts that go on from it.
    users: dict[Stretch | None, set[int]] = {}
    for stretch in reversed(order):
        if stretch.parent not in part_of:
            users.setdefault(stretch.parent, set()).update(_parts(stretch, part_of, users))
    shares: list[list[Stretch]] = [[] for _ in range(count)]
    trunk: list[Stretch] = []
    for stretch in order:
        parts = _parts(stretch, part_of, users)
        (shares[min(parts)] if len(parts) == 1 else trunk).append(stretch)
    return Shares(tuple(trunk), tuple(map(tuple, shares)))


def _parts(stretch: Stretch, part_of: dict[Stretch, int], users: dict[Stretch | None, set[int]]) -> set[int]:
    return {part_of[stretch]} if stretch in part_of else users[stretch]


def _assigned(tops: list[Stretch], weights: dict[Stretch, int], count: int, *, trunk: int) -> dict[Stretch, int]:
    """A part for each subtree, the heaviest first and each to the part that has least; part 0 has the trunk too."""
    loads = [(trunk if part == 0 else 0, part) for part in range(count)]
    heapq.heapify(loads)
    part_of: dict[Stretch, int] = {}
    for top in sorted(tops, key=lambda top: -weights[top]):  # stable: equal ones as they come
        load, part = loads[0]
        heapq.heapreplace(loads, (load + weights[top], part))
        part_of[top] = part
    return part_of


def _split(tree: PrefixTree, weights: dict[Stretch, int], most: int) -> list[Stretch]:
    """The tops of subtrees of at most ``most`` blocks, or that cannot be split."""
    tops: list[Stretch] = []
    todo = list(tree.root.children.values())
    while todo:
        top = todo.pop()
        junction = _junction_below(top) if weights[top] > most else None
        # Where what is shared is nearly all, one part had better do it all.
        if junction is None or sum(weights[child] for child in junction.children.values()) <= most:
            tops.append(top)
        else:
            todo += junction.children.values()
    return tops


def _junction_below(stretch: Stretch) -> Stretch | None:
    """The first stretch, from this one on, at whose end prompts part."""
    while len(stretch.children) == 1:
        (stretch,) = stretch.children.values()
    return stretch if stretch.children else None
