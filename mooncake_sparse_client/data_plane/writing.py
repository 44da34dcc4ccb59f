"""Carrying out a put: ask what is there, write what is missing, each key once whoever else puts it now."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.masks import BoolArray
from ..core.plans import PutPlan
from ..core.results import ChunkFailure, PutResult
from ..core.tally import NOTHING, Tally
from .claims import Claim
from .movers import ABSENT, PutMover
from .transfer import Jobs, Numbers, Transport, chosen, members

_FULL = "full"
#: Seconds between attempts at what a full store refused; the last one goes on.
_PAUSES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0)
#: Chunks that are named, claimed and asked for at a time, so that a put of any length costs the same memory.
_WINDOW = 16384


class PutStep:
    """One put under way, from when it is made. ``result`` says at any time what it has done.

    ``patience``: seconds in which a full store is asked again.
    """

    def __init__(
        self,
        transport: Transport,
        plan: PutPlan,
        block_hashes: Sequence[bytes],
        mover: PutMover,
        *,
        confirm: bool,
        patience: float,
    ) -> None:
        self._transport = transport
        self._plan = plan
        self._block_hashes = block_hashes
        self._mover = mover
        self._confirm = confirm
        self._deadline = time.monotonic() + patience
        self._groups, self._chunks = chosen(plan.store_masks)
        known = zip(plan.known, plan.store_masks, strict=True)
        self._known = np.concatenate([seen[mask] for seen, mask in known])
        #: Which chunks are not settled yet.
        self._open: BoolArray = np.ones(len(self._groups), dtype=np.bool_)
        self._written = self._existing = self._unavailable = NOTHING
        self._failures: list[ChunkFailure] = []

    async def run(self) -> None:
        """Settle every chunk that the plan keeps. Raises what the store or the source raises."""
        for start in range(0, len(self._groups), _WINDOW):
            await self._run_window(slice(start, start + _WINDOW))

    def fail_the_rest(self, reason: str) -> None:
        """Count what is not settled as failed."""
        self._fail(np.flatnonzero(self._open), reason)

    def so_far(self) -> str:
        left = np.count_nonzero(self._open)
        return f"; {self._written.chunks} chunks were written, {left} were left or are not known to be"

    def result(self) -> PutResult:
        page_sizes = self._transport.identity.page_sizes
        return PutResult(
            end_token=self._plan.end_token,
            written=self._written,
            existing=self._existing,
            unreachable=sum(self._plan.unreachable, NOTHING),
            unavailable=self._unavailable,
            failed=Tally(len(self._failures), sum(page_sizes[failure.group] for failure in self._failures)),
            failures=tuple(self._failures),
        )

    async def _run_window(self, window: slice) -> None:
        groups, chunks = self._groups[window], self._chunks[window]
        jobs = await self._transport.many_jobs(self._block_hashes, groups, chunks)
        await asyncio.sleep(0)  # others have their turn: each step is some tenths of a millisecond for the loop
        known = self._known[window] & ~self._transport.ledger.suspect(jobs.keys)
        self._settle_existing(window.start + np.flatnonzero(known))
        while len(left := np.flatnonzero(self._open[window])):
            await self._put_claimable(_Part(jobs.pick(left), window.start + left))

    async def _put_claimable(self, part: _Part) -> None:
        """Put the chunks whose keys nobody else puts now, then wait for the others."""
        claims, left = self._transport.claims, self._transport.left_writing
        taken, being_left = members(part.jobs.keys, claims), members(part.jobs.keys, left)
        mine = part.pick(~(taken | being_left))
        theirs: dict[Claim, list[str]] = {}
        for key in part.pick(taken).jobs.keys:
            theirs.setdefault(claims[key], []).append(key)
        leaving = {left[key] for key in part.pick(being_left).jobs.keys}
        claim = Claim(claims, mine.jobs.keys)
        try:
            await self._put_missing(mine, claim)
        finally:
            claim.give_up()
        for other, keys in theirs.items():
            stored = await other.stored(keys)
            self._settle_existing(part.pick(members(part.jobs.keys, stored) & ~self._replaced(part)).numbers)
        if leaving:
            await asyncio.wait(leaving)  # what they have written is asked for then

    async def _put_missing(self, part: _Part, claim: Claim) -> None:
        unsure = part.pick(~self._replaced(part))
        found = await self._transport.exists_at_all(unsure.jobs.keys)
        there = unsure.pick(found & ~self._replaced(unsure))  # asked again: it may have been found damaged meanwhile
        self._transport.ledger.found(there.jobs.keys)
        claim.settle(there.jobs.keys, stored=True)
        self._settle_existing(there.numbers)
        await self._write(part.pick(self._open[part.numbers]), claim)

    def _replaced(self, part: _Part) -> BoolArray:
        """Which of the stored values are damaged by now, and ours to replace."""
        if not self._transport.identity.owns_namespace:
            return np.zeros(len(part.jobs), dtype=np.bool_)
        return self._transport.ledger.damaged(part.jobs.keys)

    async def _write(self, part: _Part, claim: Claim) -> None:
        """Write what is open; what a full store refuses is tried again until patience ends."""
        # Eviction makes room within milliseconds, an expiring lease within seconds.
        pauses = itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1]))
        while len(part.jobs):

            async def move(batch: slice, part: _Part = part) -> None:
                await self._write_batch(part.cut(batch), claim)

            await self._transport.each_batch(part.jobs.groups, self._mover.pieces, move)
            part = part.pick(self._open[part.numbers])
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._fail(part.numbers, _FULL)
                return
            if len(part.jobs):
                pause = next(pauses) * random.uniform(0.5, 1.0)  # noqa: S311 - spreads the attempts of many clients
                await asyncio.sleep(min(pause, left))

    async def _write_batch(self, part: _Part, claim: Claim) -> None:
        damaged = self._replaced(part)
        replace = frozenset(part.pick(damaged).jobs.keys) if damaged.any() else frozenset[str]()
        answers = await self._mover.put(part.jobs, replace)
        if not any(answers) and not self._confirm:
            self._settle_written(part, replace, claim)
            return
        kinds: dict[str, list[int]] = {}
        for number, failure in enumerate(answers):
            if failure is not None and not (failure.kind == _FULL and failure.retriable):  # which stays open
                kinds.setdefault(failure.kind, []).append(number)
        written = part.pick(np.fromiter((answer is None for answer in answers), np.bool_, len(answers)))
        confirmed = await self._confirmed(written)
        self._settle_written(written.pick(confirmed), replace, claim)
        self._settle_failed(written.pick(~confirmed), "unconfirmed", claim)
        for kind, numbers in kinds.items():
            some = _Part(part.jobs.pick(np.array(numbers)), part.numbers[numbers])
            if kind == ABSENT.kind:
                claim.settle(some.jobs.keys, stored=False)
                self._unavailable += self._settle(some.numbers)
            else:
                self._settle_failed(some, kind, claim)
        await asyncio.sleep(0)  # a source that has nothing is quickly done with, and others want their turn

    async def _confirmed(self, part: _Part) -> BoolArray:
        """What counts as written. A put can be swallowed by another writer's unfinished one, which only asking
        again would show."""
        if not self._confirm:
            return np.ones(len(part.jobs), dtype=np.bool_)
        return await self._transport.exists_at_all(part.jobs.keys)

    def _settle_existing(self, numbers: Numbers) -> None:
        self._existing += self._settle(numbers)

    def _settle_failed(self, part: _Part, reason: str, claim: Claim) -> None:
        claim.settle(part.jobs.keys, stored=False)
        self._fail(part.numbers, reason)

    def _settle_written(self, part: _Part, replace: frozenset[str], claim: Claim) -> None:
        self._transport.ledger.clear([key for key in part.jobs.keys if key in replace] if replace else ())
        self._transport.ledger.found(part.jobs.keys)  # what was not replaced may be there from before, and damaged
        claim.settle(part.jobs.keys, stored=True)
        self._written += self._settle(part.numbers)

    def _fail(self, numbers: Numbers, reason: str) -> None:
        self._settle(numbers)
        groups, chunks = self._groups[numbers].tolist(), self._chunks[numbers].tolist()
        self._failures += [ChunkFailure(group, chunk, reason) for group, chunk in zip(groups, chunks, strict=True)]

    def _settle(self, numbers: Numbers) -> Tally:
        self._open[numbers] = False
        page_sizes = self._transport.identity.page_sizes
        counts = np.bincount(self._groups[numbers], minlength=len(page_sizes)).tolist()
        return Tally(len(numbers), sum(count * size for count, size in zip(counts, page_sizes, strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Some of a put's chunks, and where they stand in the whole."""

    jobs: Jobs
    numbers: Numbers

    def pick(self, which: BoolArray) -> _Part:
        some = np.flatnonzero(which)
        return self if len(some) == len(self.numbers) else _Part(self.jobs.pick(some), self.numbers[some])

    def cut(self, batch: slice) -> _Part:
        return _Part(self.jobs.cut(batch), self.numbers[batch])
