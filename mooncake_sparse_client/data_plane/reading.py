"""Carrying out a get: read, check, and shorten the prefix until what is left has wholly arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..core.masks import BoolArray, load_mask
from ..core.plans import PrefixHit, Tally, longest_arrived_prefix, plan_get
from ..core.results import ChunkFailure, GetResult
from ..stores.base import Failure
from .movers import GetMover
from .transfer import Numbers, Transport, chosen, listed, runs_of

_ROUNDS = 3


@dataclass(slots=True)
class _Progress:
    """What one get knows so far."""

    present: tuple[BoolArray, ...]
    arrived: tuple[BoolArray, ...] = ()
    failures: list[ChunkFailure] = field(default_factory=list)


class Reader:
    """Reads the chunks of hits through one client's transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._identity = transport.identity

    async def get(self, hit: PrefixHit, present: Sequence[BoolArray], mover: GetMover) -> GetResult:
        """Read what ``hit`` needs; ``present`` is what is believed to be in the store by now.

        A chunk that does not arrive counts as absent, the longest prefix below is found anew, and what that
        one lacks is read, for a few rounds.
        """
        layout = self._identity.layout
        progress = _Progress(tuple(present))
        # While nothing has changed since the lookup, its own plan holds.
        length, masks, missing = hit.hit_length, hit.load_masks, hit.load_masks
        for number in range(_ROUNDS):
            if number or present is not hit.present:
                arrived = progress.arrived or _blank(progress.present)
                state = (layout, hit.num_tokens, progress.present, arrived)
                plan = plan_get(*state, local_tokens=hit.local_tokens)
                if plan.hit_length < hit.hit_length:
                    # A sink that was made for the hit may lack the windows of a shorter one: no fault of the caller's.
                    plan = plan_get(*state, local_tokens=hit.local_tokens, room=mover.room())
                length, masks, missing = plan.hit_length, plan.load_masks, plan.missing
            mover.aim(masks)
            if not await self._read(hit, missing, mover, progress):
                return self._result(length, masks, progress, mover)
        length = longest_arrived_prefix(
            layout, hit.num_tokens, progress.present, progress.arrived, local_tokens=hit.local_tokens
        )
        return self._result(length, load_mask(layout, length, local_tokens=hit.local_tokens), progress, mover)

    def nothing(self, hit: PrefixHit, reason: str) -> GetResult:
        """The answer of a store that cannot be reached, for those who count it as a miss."""
        failures = tuple(ChunkFailure(group, chunk, reason) for group, chunk in listed(hit.load_masks))
        return GetResult(min(hit.local_tokens, hit.report.cap), failures)

    async def _read(self, hit: PrefixHit, missing: Sequence[BoolArray], mover: GetMover, progress: _Progress) -> bool:
        """Read the chunks; whether some did not arrive. What may come later is tried once more."""
        groups, chunks = chosen(missing)
        late = await self._read_batches(hit, groups, chunks, mover)
        again = np.array(sorted(number for number, _, failure in late if failure.retriable), dtype=np.intp)
        lost = [loss for loss in late if not loss.failure.retriable]
        if len(again):
            still_late = await self._read_batches(hit, groups[again], chunks[again], mover)
            lost += [_Loss(int(again[number]), key, failure) for number, key, failure in still_late]
        if lost:
            self._give_up(groups, chunks, lost, progress)
        return bool(lost)

    async def _read_batches(self, hit: PrefixHit, groups: Numbers, chunks: Numbers, mover: GetMover) -> list[_Loss]:
        losses: list[_Loss] = []

        async def move(batch: slice) -> None:
            # Named a batch at a time, so that a long hit costs no more memory than a short one.
            jobs = self._transport.jobs(hit.block_hashes, groups[batch], chunks[batch])
            answers = await mover.get(jobs)
            if any(answers):
                for number, failure in enumerate(answers):
                    if failure is not None:
                        losses.append(_Loss(batch.start + number, jobs.keys[number], failure))

        await self._transport.each_batch(groups, mover.pieces, move)
        return losses

    def _give_up(self, groups: Numbers, chunks: Numbers, lost: Sequence[_Loss], progress: _Progress) -> None:
        """Note which of the chunks have arrived, and which count as absent from now on."""
        came = np.ones(len(groups), dtype=np.bool_)
        came[[loss.number for loss in lost]] = False
        progress.present = tuple(mask.copy() for mask in progress.present)
        progress.arrived = progress.arrived or _blank(progress.present)
        for group, run in runs_of(groups):
            progress.arrived[group][chunks[run][came[run]]] = True
            progress.present[group][chunks[run][~came[run]]] = False
        for number, key, failure in lost:
            progress.failures.append(ChunkFailure(int(groups[number]), int(chunks[number]), failure.kind))
            # Under keys that others write too, they may mend it.
            if failure.kind in _DAMAGE and self._identity.owns_namespace:
                self._transport.ledger.mark_damaged(key)
            else:
                self._transport.ledger.mark_lost(key)

    def _result(self, hit_length: int, masks: Sequence[BoolArray], progress: _Progress, mover: GetMover) -> GetResult:
        counts = list(map(np.count_nonzero, masks))
        nbytes = sum(count * size for count, size in zip(counts, self._identity.page_sizes, strict=True))
        loaded = Tally(int(sum(counts)), int(nbytes))
        chunks = {where: mover.chunks[where] for where in listed(masks)} if mover.chunks else {}
        return GetResult(hit_length, tuple(progress.failures), chunks, loaded)


def _blank(masks: Sequence[BoolArray]) -> tuple[BoolArray, ...]:
    return tuple(np.zeros_like(mask) for mask in masks)


class _Loss(NamedTuple):
    """A chunk that did not arrive: which of those that were to be read, and why."""

    number: int
    key: str
    failure: Failure


#: What a reader finds wrong with bytes that did arrive, or with their number.
_DAMAGE = frozenset({"header", "version", "fingerprint", "group", "length", "name", "checksum"})
