"""What a job keeps of each stretch of its corpus, in which order it computes them, and what all of it will take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..core.plans import PutPlan, plan_stretch
from ..core.reasons import Reason
from ..core.tally import NOTHING, Tally
from .tree import PrefixTree, Stretch

#: The reasons for which a job keeps chunks.
KEPT = (Reason.DENSE, Reason.SEGMENT, Reason.REPLAY, Reason.JUNCTION)


class JobPlanner:
    """Plans of the stretches of one tree, under one retention interval (in tokens, checked)."""

    def __init__(self, tree: PrefixTree, retention_interval: int | None, retention_origin: str = "") -> None:
        self.tree = tree
        self.layout = tree.layout
        self._interval, self._origin = retention_interval, retention_origin

    def plan(self, stretch: Stretch, start_token: int | None = None, end_token: int | None = None) -> PutPlan:
        """What to keep of a stretch, or of a part of it, both ends aligned: the chunks that any prompt of the corpus
        could resume with, if each were put with the tree's junctions on its path as boundaries."""
        size, tree = self.layout.alignment, self.tree
        near = [stretch]
        if self.layout.use_eagle:
            # A junction's margin is the first chunk of the stretches behind it. And where one prompt ends and a single
            # one goes on, resuming steps back from the end, so that windows of boundaries behind it reach further.
            near += [stretch.parent] if stretch.parent is not None else []
            near += [] if stretch.is_junction else list(stretch.children.values())
        return plan_stretch(
            self.layout,
            stretch.start * size if start_token is None else start_token,
            stretch.end * size if end_token is None else end_token,
            replay_boundaries=sorted({boundary for some in near for boundary in tree.replay_boundaries(some)}),
            junctions=sorted({boundary for some in near for boundary in tree.junctions(some)}),
            retention_interval=self._interval,
            retention_origin=self._origin,
        )

    def estimate(self, stretches: Iterable[Stretch]) -> tuple[GroupEstimate, ...]:
        """What writing them would take, a value a group; nothing is asked of any store."""
        kept = [dict.fromkeys(KEPT, 0) for _ in self.layout.groups]
        dense = [0] * len(self.layout.groups)
        everything = [0] * len(self.layout.groups)
        for stretch in stretches:
            plan = self.plan(stretch)
            every = plan_stretch(self.layout, plan.start_token, plan.end_token)
            for group, (spec, reasons) in enumerate(zip(self.layout.groups, plan.reasons, strict=True)):
                counts = np.bincount(reasons, minlength=len(Reason))
                for reason in KEPT:
                    kept[group][reason] += int(counts[reason])
                dense[group] += every.reachable[group].chunks
                everything[group] += (plan.end_token - plan.start_token) // spec.block_size
        return tuple(
            GroupEstimate(
                spec.label,
                spec.page_size_bytes or 0,
                {
                    reason.name.lower(): Tally.of(count, spec.page_size_bytes)
                    for reason, count in kept[group].items()
                    if count
                },
                Tally.of(dense[group], spec.page_size_bytes),
                Tally.of(everything[group], spec.page_size_bytes),
            )
            for group, spec in enumerate(self.layout.groups)
        )


@dataclass(frozen=True, slots=True)
class CorpusTotals:
    """What stands in a corpus, or in a part of it: the parts' totals add up to those of the whole."""

    prompts: int = 0
    #: ``distinct + reused + unstored``.
    tokens: int = 0
    #: In whole blocks, each prefix once.
    distinct: int = 0
    #: In whole blocks that another prompt has, too.
    reused: int = 0
    #: Behind the prompts' last whole blocks.
    unstored: int = 0

    @classmethod
    def of(cls, tree: PrefixTree, stretches: Iterable[Stretch], *, with_root: bool) -> CorpusTotals:
        """``with_root``: with the prompts that are shorter than a block."""
        size = tree.layout.alignment
        # How many prompts have each stretch's first block (the root's: all).
        through = tree.subtree_sums(lambda stretch: sum(ends.prompts for ends in stretch.ends.values()))
        prompts = distinct = reused = unstored = 0
        for stretch in [*([tree.root] if with_root else []), *stretches]:
            prompts += sum(ends.prompts for ends in stretch.ends.values())
            unstored += sum(ends.tokens - ends.prompts * blocks * size for blocks, ends in stretch.ends.items())
            distinct += stretch.blocks * size
            passing = through[stretch]
            for blocks in range(stretch.start, stretch.end):
                passing -= stretch.ends[blocks].prompts if blocks in stretch.ends else 0
                reused += (passing - 1) * size
        return cls(prompts, distinct + reused + unstored, distinct, reused, unstored)


@dataclass(frozen=True, slots=True)
class GroupEstimate:
    """What a job would write of one layer group."""

    label: str
    page_size_bytes: int
    #: By the word for why a chunk is kept.
    kept: dict[str, Tally]
    #: With every boundary's windows kept (retention None), and with every chunk, as a store without masks would.
    dense: Tally
    unmasked: Tally

    @property
    def total(self) -> Tally:
        return sum(self.kept.values(), NOTHING)


@dataclass(frozen=True, slots=True)
class JobEstimate:
    """What a job would do, if the store had nothing."""

    totals: CorpusTotals
    groups: tuple[GroupEstimate, ...]
    wrong_lines: int = 0
    #: As in the keys that the job would write.
    cache_id: str = ""

    def figures(self) -> dict[str, object]:
        """Plain values, ready for JSON."""
        totals = self.totals
        kept = sum((group.total for group in self.groups), NOTHING)
        return {
            "prompts": totals.prompts,
            "wrong_lines": self.wrong_lines,
            "cache_id": self.cache_id,
            "tokens_total": totals.tokens,
            "tokens_distinct": totals.distinct,
            "tokens_reused": totals.reused,
            "tokens_unstored": totals.unstored,
            "chunks": kept.chunks,
            "bytes": kept.bytes,
            "groups": [
                {
                    "group": group.label,
                    "page_size_bytes": group.page_size_bytes,
                    "kept": {reason: tally.figures() for reason, tally in group.kept.items()},
                    "dense": group.dense.figures(),
                    "unmasked": group.unmasked.figures(),
                }
                for group in self.groups
            ],
        }
