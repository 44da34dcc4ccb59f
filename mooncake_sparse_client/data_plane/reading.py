"""Carrying out a get: read, check, and shorten the prefix until what is left has wholly arrived.

A chunk that fails rules out every boundary that needs it, and what only those need is not read any more. So an owner
of memory that died costs a get a few requests, however long the hit was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from ..core.masks import BoolArray, load_mask
from ..core.plans import PrefixHit, no_presence
from ..core.prefix import longest_arrived_prefix, longest_without
from ..core.results import ChunkFailure, GetResult
from ..core.tally import Tally
from ..stores.base import Failure
from .checking import DAMAGE
from .movers import GetMover
from .pressure import jittered
from .transfer import Numbers, Transport, chosen, listed, runs_of

_ROUNDS = 3
#: Seconds before what may still come is asked for once more.
_PAUSE = 0.05
#: The chunks that a sink has room for, one boolean array a group; None for all.
Room: TypeAlias = "Callable[[], tuple[BoolArray, ...] | None]"


class Search(Protocol):
    """What is believed to be in the store of one hit; goes on looking where chunks turn out to be gone."""

    @property
    def present(self) -> tuple[BoolArray, ...]: ...

    async def hit_length(self, room: Room) -> int: ...

    async def without(self, lost: Iterable[tuple[int, int]], room: Room) -> int: ...

    def lose(self, lost: Iterable[tuple[int, int]]) -> None: ...


@dataclass(slots=True)
class _Progress:
    """What one get knows so far."""

    #: One boolean array a group.
    arrived: tuple[BoolArray, ...]
    failures: list[ChunkFailure] = field(default_factory=list)
    #: Kinds of failures that a second attempt did not mend: what fails so is not asked for again.
    lasting: set[str] = field(default_factory=set)


class Reader:
    """Reads the chunks of hits through one client's transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._identity = transport.identity

    async def get(self, hit: PrefixHit, search: Search, mover: GetMover) -> GetResult:
        """Read what ``hit`` needs. A chunk that does not arrive counts as absent, the longest prefix below is
        searched for, and what that one lacks is read, for a few rounds."""
        progress = _Progress(no_presence(hit.layout, hit.num_tokens))
        length = await search.hit_length(mover.room)
        for _ in range(_ROUNDS - 1):
            lost = await self._read(hit, length, mover, progress)
            if not lost:
                return self._result(hit, length, progress, mover)
            length = await search.without(lost, mover.room)
        search.lose(await self._read(hit, length, mover, progress))
        length = longest_arrived_prefix(
            hit.layout, hit.num_tokens, search.present, progress.arrived, local_tokens=hit.local_tokens
        )
        return self._result(hit, length, progress, mover)

    def nothing(self, hit: PrefixHit, reason: str) -> GetResult:
        """The answer of a store that cannot be reached, for those who count it as a miss."""
        failures = tuple(ChunkFailure(group, chunk, reason) for group, chunk in listed(hit.load_masks))
        return GetResult(hit.local_tokens, failures)

    async def _read(self, hit: PrefixHit, length: int, mover: GetMover, progress: _Progress) -> list[tuple[int, int]]:
        """Read what a prefix of ``length`` tokens needs and has not arrived; which ``(group, chunk)`` failed. If any
        did, what no boundary needs that does without them need not have been read."""
        masks = _load_masks(hit, length)
        mover.aim(masks)
        missing = [mask & ~arrived[: len(mask)] for mask, arrived in zip(masks, progress.arrived, strict=True)]
        reading = _Reading(self._transport, hit, length, *chosen(missing), mover, progress)
        await reading.run()
        reading.note_arrived()
        losses = reading.losses()
        for loss in losses:
            self._note_loss(loss, progress)
        return [(loss.group, loss.chunk) for loss in losses]

    def _note_loss(self, loss: _Loss, progress: _Progress) -> None:
        kind, ledger = loss.failure.kind, self._transport.ledger
        progress.failures.append(ChunkFailure(loss.group, loss.chunk, kind))
        if loss.failure is _OUT_OF_REACH:
            return  # it was not asked for: nothing new is known
        # Under keys that others write too, they may mend it.
        if kind in DAMAGE and self._identity.owns_namespace:
            ledger.mark_damaged(loss.key)
        elif kind == _OUT_OF_REACH.kind:
            ledger.mark_out_of_reach(loss.key)
        else:
            ledger.mark_lost(loss.key)

    def _result(self, hit: PrefixHit, length: int, progress: _Progress, mover: GetMover) -> GetResult:
        masks = _load_masks(hit, length)
        counts = list(map(np.count_nonzero, masks))
        nbytes = sum(count * size for count, size in zip(counts, self._identity.page_sizes, strict=True))
        loaded = Tally(int(sum(counts)), int(nbytes))
        chunks = {where: mover.chunks[where] for where in listed(masks)} if mover.chunks else {}
        return GetResult(length, tuple(progress.failures), chunks, loaded)


class _Reading:
    """Reading some chunks of a prefix of ``length`` tokens, in ascending order, as far as they can be of use.

    What fails and may come later is *late*: it holds up what lies behind it, is asked for once more, and then counts
    as lost for good.
    """

    def __init__(
        self,
        transport: Transport,
        hit: PrefixHit,
        length: int,
        groups: Numbers,
        chunks: Numbers,
        mover: GetMover,
        progress: _Progress,
    ) -> None:
        self._transport = transport
        self._hit = hit
        self._length = length
        self._groups, self._chunks = groups, chunks
        self._mover = mover
        self._progress = progress
        block_sizes = np.array([spec.block_size for spec in hit.layout.groups])
        #: The shortest prefix that has all of the chunk, in tokens.
        self._ends = (chunks + 1) * block_sizes[groups]
        self._arrived = np.zeros(len(groups), dtype=np.bool_)
        #: By their number: what failed for good, and what may come.
        self._lost: dict[int, _Loss] = {}
        self._late: dict[int, _Loss] = {}
        #: The longest boundary that all of these leave possible: what ends behind it is of no use for now.
        self._limit = length

    async def run(self) -> None:
        """Read until each chunk has arrived, failed for good, or is of no use."""
        await self._move(np.arange(len(self._groups)))
        if self._limit == self._length:
            return  # nothing failed
        while True:
            useful = self._useful()
            late = [number for number in sorted(self._late) if useful[number]]
            if late:
                await asyncio.sleep(jittered(_PAUSE))
                # One batch at a time: if it fails, the next ones are hardly of use.
                await self._move(np.array(late), one_by_one=True)
            elif useful.any():
                await self._move(np.flatnonzero(useful))
            else:
                return

    def _useful(self) -> BoolArray:
        """What has neither arrived nor failed for good, and is needed by a boundary that is still possible."""
        lasting = self._progress.lasting
        self._lost |= {number: loss for number, loss in self._late.items() if loss.failure.kind in lasting}
        self._late = {number: loss for number, loss in self._late.items() if number not in self._lost}
        self._limit = longest_without(self._hit.layout, self._length, _where(self._lost))
        useful: BoolArray = (self._ends <= self._limit) & ~self._arrived
        useful[list(self._lost)] = False
        return useful

    def losses(self) -> list[_Loss]:
        """What failed, in order. What was late, and then of no use any more, failed too."""
        failed = self._late | self._lost
        return [failed[number] for number in sorted(failed)]

    def note_arrived(self) -> None:
        for group, run in runs_of(self._groups):
            self._progress.arrived[group][self._chunks[run][self._arrived[run]]] = True

    async def _move(self, numbers: Numbers, *, one_by_one: bool = False) -> None:
        async def move(batch: slice) -> None:
            await self._move_batch(numbers[batch])

        pieces = self._mover.pieces
        await self._transport.each_batch(self._groups[numbers], pieces, move, one_by_one=one_by_one)

    async def _move_batch(self, numbers: Numbers) -> None:
        # Named a batch at a time, so that a long hit costs no more memory than a short one.
        numbers = numbers[self._ends[numbers] <= self._limit]
        if not len(numbers):
            return
        jobs = self._transport.jobs(self._hit.block_hashes, self._groups[numbers], self._chunks[numbers])
        away = self._transport.ledger.out_of_reach(jobs.keys)
        if away.any():
            self._fail(numbers, jobs.keys, [_OUT_OF_REACH if gone else None for gone in away.tolist()])
            left = np.flatnonzero(~away & (self._ends[numbers] <= self._limit))
            if not len(left):
                return
            numbers, jobs = numbers[left], jobs.pick(left)
        answers = await self._mover.get(jobs)
        if any(answers):
            self._arrived[numbers] = [answer is None for answer in answers]
            self._fail(numbers, jobs.keys, answers)
        else:
            self._arrived[numbers] = True
        if self._late:
            for number in numbers[self._arrived[numbers]].tolist():
                self._late.pop(number, None)

    def _fail(self, numbers: Numbers, keys: Sequence[str], answers: Sequence[Failure | None]) -> None:
        """Note what failed, and what that leaves possible."""
        failed: dict[int, _Loss] = {}
        for number, key, failure in zip(numbers.tolist(), keys, answers, strict=True):
            if failure is not None:
                failed[number] = _Loss(int(self._groups[number]), int(self._chunks[number]), key, failure)
        lasting = self._progress.lasting
        lasting |= {loss.failure.kind for number, loss in failed.items() if number in self._late}
        for number, loss in failed.items():
            if loss.failure.retriable and loss.failure.kind not in lasting:
                self._late[number] = loss
            else:
                self._late.pop(number, None)
                self._lost[number] = loss
        self._limit = min(self._limit, longest_without(self._hit.layout, self._length, _where(failed)))


def _load_masks(hit: PrefixHit, length: int) -> tuple[BoolArray, ...]:
    if length == hit.hit_length:
        return hit.load_masks
    return load_mask(hit.layout, length, local_tokens=hit.local_tokens)


class _Loss(NamedTuple):
    """A chunk that did not arrive, and why."""

    group: int
    chunk: int
    key: str
    failure: Failure


def _where(losses: dict[int, _Loss]) -> list[tuple[int, int]]:
    return [(loss.group, loss.chunk) for loss in losses.values()]


#: For a chunk whose owner did not deliver a moment ago.
_OUT_OF_REACH = Failure("transfer", False, "the owner of its memory did not deliver it a moment ago")
