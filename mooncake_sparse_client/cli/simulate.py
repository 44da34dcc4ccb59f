"""The model store: what a store would hold and serve, counted by tables of bits with the client's own plans.

Fast enough for whole traces. A chunk is a bit in the row of the trace block that it ends in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.layout import KVCacheLayout
from ..core.masks import BoolArray, store_mask
from ..core.plans import learned_junctions
from ..core.prefix import explain_prefix
from ..core.tally import Tally
from .trace import TRACE_BLOCK, Request


@dataclass(frozen=True, slots=True)
class Policy:
    """How a store is filled. ``masked``: whether masks are used at all; without, every chunk is written."""

    retention_interval: int | None = None
    learn_junctions: bool = True
    masked: bool = True


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """What a store did over a trace."""

    tokens: int
    hit_tokens: int
    #: Chunks written, each once, a tally a group.
    written: tuple[Tally, ...]

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def total_written(self) -> Tally:
        return sum(self.written, Tally())


def simulate(layout: KVCacheLayout, requests: Sequence[Request], policy: Policy) -> ModelCounts:
    """Replay ``requests`` on a perfect store that never evicts: look up, then put the whole request."""
    count = 1 + max((max(request.prefix_ids, default=-1) for request in requests), default=-1)
    tables = [np.zeros((count, TRACE_BLOCK // spec.block_size), dtype=np.bool_) for spec in layout.groups]
    hit_tokens = 0
    for request in requests:
        rows = np.array(request.prefix_ids, dtype=np.int64)
        present = tuple(table[rows].reshape(-1) for table in tables)
        report = explain_prefix(layout, request.num_tokens, present)
        hit_tokens += report.hit_length
        learned = learned_junctions(layout, report.hit_length, report.shared_length)
        masks = _masks(layout, request, policy, learned if policy.learn_junctions else [])
        _add(tables, rows, masks)
    sizes = [spec.page_size_bytes or 0 for spec in layout.groups]
    chunks = [int(table.sum()) for table in tables]
    return ModelCounts(
        tokens=sum(request.num_tokens for request in requests),
        hit_tokens=hit_tokens,
        written=tuple(Tally(number, number * size) for number, size in zip(chunks, sizes, strict=True)),
    )


def _masks(layout: KVCacheLayout, request: Request, policy: Policy, boundaries: Sequence[int]) -> tuple[BoolArray, ...]:
    masks = store_mask(
        layout,
        layout.align(request.num_tokens),
        retention_interval=policy.retention_interval,
        num_prompt_tokens=request.num_tokens,
        boundaries=boundaries,
    )
    return masks if policy.masked else tuple(np.ones_like(mask) for mask in masks)


def _add(tables: Sequence[NDArray[np.bool_]], rows: NDArray[np.int64], masks: Sequence[BoolArray]) -> None:
    for table, mask in zip(tables, masks, strict=True):
        table[rows] |= mask.reshape(table[rows].shape)
