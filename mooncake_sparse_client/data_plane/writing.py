"""Carrying out a put: ask what is there, write what is missing, each key once whoever else puts it now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.masks import BoolArray
from ..core.plans import PutPlan
from ..core.results import ChunkFailure, PutResult
from ..core.tally import NOTHING, Tally
from .checking import MISSING
from .claims import Claim
from .lane import Answers
from .ledger import members
from .movers import ABSENT, PutMover
from .pressure import FIRST_PAUSE, LONGEST_PAUSE, Turn, jittered
from .transfer import Jobs, Numbers, Transport, chosen

_FULL, _TRANSFER, _UNCONFIRMED = "full", "transfer", "unconfirmed"
#: There is a value, but the ledger knows that its owner does not deliver it; told as ``transfer``.
_OUT_OF_REACH = "out of reach"
#: Chunks that are named, claimed and asked for at a time, so that a put of any length costs the same memory.
_WINDOW = 16384


class PutStep:
    """One put under way, from when it is made. ``result`` says at any time what it has done.

    ``patience``: seconds in which what may be stored later is tried again.
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
        #: Why the last attempt at an open chunk failed, by its number.
        self._why: dict[int, str] = {}

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
        """Ask what is there and write the rest, and do so again with what may be stored later, until patience ends."""
        pause = FIRST_PAUSE
        while True:
            await self._settle_found(part, claim)
            await self._write(part.pick(self._open[part.numbers] & ~self._failed_by(_OUT_OF_REACH, part)), claim)
            part = part.pick(self._open[part.numbers])
            left = self._deadline - time.monotonic()
            if not len(part.jobs) or left <= 0:
                break
            await asyncio.sleep(min(jittered(pause), left))
            pause = min(2 * pause, LONGEST_PAUSE)
        self._fail_late(part.numbers)

    async def _settle_found(self, part: _Part, claim: Claim) -> None:
        """Ask what is there by now. What a dead owner of memory holds stays open: no put would replace it, and once the
        master has forgotten the owner it is gone."""
        ledger = self._transport.ledger
        certain = self._replaced(part) & ~ledger.out_of_reach(part.jobs.keys)
        unsure = part.pick(~certain & ~self._failed_by(_FULL, part))
        found = await self._transport.exists_at_all(unsure.jobs.keys)
        beyond = found & ledger.out_of_reach(unsure.jobs.keys)
        # Whether they are damaged is looked up again: that may have been found meanwhile.
        there = unsure.pick(found & ~beyond & ~self._replaced(unsure))
        ledger.found(there.jobs.keys)
        claim.settle(there.jobs.keys, stored=True)
        self._settle_existing(there.numbers)
        for number in unsure.numbers.tolist() if self._why else ():
            self._why.pop(number, None)
        self._note_late(unsure.numbers[beyond], _OUT_OF_REACH)

    def _note_late(self, numbers: Numbers, reason: str) -> None:
        self._why |= dict.fromkeys(numbers.tolist(), reason)

    def _failed_by(self, reason: str, part: _Part) -> BoolArray:
        """Which of the chunks could not be stored for this reason when they were tried last."""
        if not self._why:
            return np.zeros(len(part.jobs), dtype=np.bool_)
        why = self._why
        return np.fromiter((why.get(number) == reason for number in part.numbers.tolist()), np.bool_, len(part.jobs))

    def _fail_late(self, numbers: Numbers) -> None:
        """Patience has ended: count chunks as failed, each for its own reason."""
        reasons: dict[str, list[int]] = {}
        for number in numbers.tolist():
            reasons.setdefault(self._why.get(number, _FULL), []).append(number)  # what was held back had no other
        for reason, some in reasons.items():
            self._fail(np.array(some), _TRANSFER if reason == _OUT_OF_REACH else reason)

    def _replaced(self, part: _Part) -> BoolArray:
        """Which of the stored values are damaged by now, and ours to replace."""
        if not self._transport.identity.owns_namespace:
            return np.zeros(len(part.jobs), dtype=np.bool_)
        return self._transport.ledger.damaged(part.jobs.keys)

    async def _write(self, part: _Part, claim: Claim) -> None:
        """Write once what is open, as far as it is this put's turn."""
        turn = await self._transport.pressure.turn(self._deadline) if len(part.jobs) else None
        if turn is None:
            return

        async def move(batch: slice) -> None:
            if turn.may_send():
                await self._write_batch(part.cut(batch), claim, turn)
            else:
                self._note_late(part.numbers[batch], _TRANSFER if turn.stopped else _FULL)

        await self._transport.each_batch(part.jobs.groups, self._mover.pieces, move)

    async def _write_batch(self, part: _Part, claim: Claim, turn: Turn) -> None:
        damaged = self._replaced(part)
        replace = frozenset(part.pick(damaged).jobs.keys) if damaged.any() else frozenset[str]()
        answers = await self._mover.put(part.jobs, replace)
        written = part
        if any(answers):
            written = part.pick(np.fromiter((answer is None for answer in answers), np.bool_, len(answers)))
            self._settle_refused(part, answers, replace, claim)
            self._pace(answers, turn)
        else:
            self._transport.pressure.accepted(turn)
        if self._confirm:
            confirmed = await self._transport.exists_at_all(written.jobs.keys)
            self._note_late(written.numbers[~confirmed], _UNCONFIRMED)
            written = written.pick(confirmed)
        self._settle_written(written, replace, claim)
        await asyncio.sleep(0)  # a source that has nothing is quickly done with, and others want their turn

    def _settle_refused(self, part: _Part, answers: Answers, replace: frozenset[str], claim: Claim) -> None:
        """What may be stored later stays open; the rest has failed, or the source has not got it."""
        kinds: dict[str, list[int]] = {}
        for number, failure in enumerate(answers):
            if failure is None:
                continue
            # What is missing went while it was written (removed, or its owner of memory was given up), and can be
            # written anew.
            if not failure.retriable and failure.kind != MISSING:
                kinds.setdefault(failure.kind, []).append(number)
                continue
            self._why[int(part.numbers[number])] = failure.kind
            # A new value finds another owner of memory; one that is replaced stays where it is.
            if failure.kind == _TRANSFER and part.jobs.keys[number] in replace:
                self._transport.ledger.mark_out_of_reach(part.jobs.keys[number])
        for kind, numbers in kinds.items():
            some = _Part(part.jobs.pick(np.array(numbers)), part.numbers[numbers])
            claim.settle(some.jobs.keys, stored=False)
            if kind == ABSENT.kind:
                self._unavailable += self._settle(some.numbers)
            else:
                self._fail(some.numbers, kind)

    def _pace(self, answers: Answers, turn: Turn) -> None:
        """Slow down where the store is full; send no more this time where an owner of memory takes nothing."""
        kinds = {None if answer is None else answer.kind for answer in answers}
        if any(answer is not None and answer.kind == _FULL and answer.retriable for answer in answers):
            self._transport.pressure.refused(turn, wholly=None not in kinds)
        elif None in kinds:
            self._transport.pressure.accepted(turn)
        elif _TRANSFER in kinds:
            turn.stopped = True

    def _settle_existing(self, numbers: Numbers) -> None:
        self._existing += self._settle(numbers)

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
