"""What ``explain`` draws: masks as rows of cells over token positions, for a terminal or an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.layout import GroupSpec, KVCacheLayout
from ..core.masks import BoolArray, IntArray, load_mask
from ..core.plans import PutPlan
from ..core.reasons import Reason

SKIPPED, OUTSIDE = "skipped", "outside"


@dataclass(frozen=True, slots=True)
class Row:
    """The chunks of one group, in parts: each chunk is in one of them."""

    label: str
    block_size: int
    #: One boolean array a part, all of one length: what is ``SKIPPED``, what is ``OUTSIDE`` of what the row speaks of,
    #: and all else by the reason, or as ``loaded``.
    parts: Mapping[str, BoolArray]

    @property
    def chosen(self) -> BoolArray:
        """All that is kept or loaded."""
        return ~(self.parts[SKIPPED] | self.parts[OUTSIDE])


@dataclass(frozen=True, slots=True)
class Section:
    """Rows under one title."""

    title: str
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Picture:
    """Sections over the same tokens ``[0, end_token)``."""

    title: str
    alignment: int
    end_token: int
    sections: Sequence[Section]
    #: Retained boundaries, in tokens, by the reason: those that lie in the picture.
    boundaries: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Grid:
    """Equal cells over tokens ``[0, end_token)``; the last may be cut short."""

    end_token: int
    #: Tokens.
    cell: int

    @property
    def count(self) -> int:
        return -(-self.end_token // self.cell)

    @property
    def edges(self) -> IntArray:
        """Where cells begin, and where the last one ends, in tokens."""
        return np.minimum(np.arange(self.count + 1, dtype=np.int64) * self.cell, self.end_token)


def grid_of(end_token: int, alignment: int, most: int) -> Grid:
    """As many cells as fit into ``most``, so that every boundary is at the edge of one, or each holds some whole
    alignments. ``end_token``: a positive multiple of the alignment."""
    blocks = end_token // alignment
    if blocks > most:
        return Grid(end_token, alignment * -(-blocks // most))
    split = max(number for number in range(1, min(alignment, most // blocks) + 1) if alignment % number == 0)
    return Grid(end_token, alignment // split)


def shares(chunks: BoolArray, block_size: int, grid: Grid) -> NDArray[np.float64]:
    """For each cell, the share of its tokens that lie in ``chunks``: exactly 0 for none, and 1 for all."""
    before = np.concatenate([[0], np.cumsum(chunks, dtype=np.int64)]) * block_size
    edges = grid.edges
    number, rest = edges // block_size, edges % block_size
    padded = np.concatenate([chunks, [False]])  # behind the last chunk, for the last edge
    return np.diff(before[number] + padded[number] * rest) / np.diff(edges)


def tick_step(grid: Grid, alignment: int, least_cells: int) -> int:
    """Tokens between marks on a ruler: the alignment times a power of two, ``least_cells`` cells or more."""
    step = alignment
    while step < least_cells * grid.cell:
        step *= 2
    return step


def put_section(plan: PutPlan) -> Section:
    """What the put keeps, by reason."""
    rows = [
        Row(label_of(number, spec), spec.block_size, {reason.name.lower(): codes == reason for reason in Reason})
        for number, (spec, codes) in enumerate(zip(plan.layout.groups, plan.reasons, strict=True))
    ]
    interval = "every boundary" if plan.retention_interval is None else f"interval {plan.retention_interval}"
    return Section(f"kept of tokens {plan.start_token} to {plan.end_token}; retention: {interval}", rows)


def load_section(layout: KVCacheLayout, end_token: int, hit_length: int, local_tokens: int) -> Section:
    """What a get of a hit reads. Raises ``InvalidRequestError`` for a hit that cannot be."""
    rows = []
    for number, (spec, mask) in enumerate(
        zip(layout.groups, load_mask(layout, hit_length, local_tokens=local_tokens), strict=True)
    ):
        beyond = np.zeros(end_token // spec.block_size - len(mask), dtype=np.bool_)
        parts = {
            "loaded": np.concatenate([mask, beyond]),
            SKIPPED: np.concatenate([~mask, beyond]),
            OUTSIDE: np.concatenate([np.zeros_like(mask), ~beyond]),
        }
        rows.append(Row(label_of(number, spec), spec.block_size, parts))
    held = f", of which the engine holds {layout.align(local_tokens)}" if layout.align(local_tokens) else ""
    return Section(f"loaded for a hit of {hit_length} tokens{held}", rows)


def boundaries_of(plan: PutPlan) -> dict[str, Sequence[int]]:
    """The retained boundaries up to the end of the put, by the reason."""
    step = plan.layout.alignment if plan.retention_interval is None else plan.retention_interval
    found: dict[Reason, Sequence[int]] = {
        Reason.SEGMENT: range(step, plan.end_token + 1, step) if step else (),
        Reason.REPLAY: plan.replay_boundaries,
        Reason.BOUNDARY: plan.caller_boundaries,
        Reason.JUNCTION: plan.junctions,
    }
    inside = {reason.name.lower(): [at for at in many if at <= plan.end_token] for reason, many in found.items()}
    return {name: many for name, many in inside.items() if many}


def label_of(number: int, spec: GroupSpec) -> str:
    """A group in a few words."""
    return f"{number} {spec.name or spec.kind}, {spec.block_size}"
