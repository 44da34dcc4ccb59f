"""The walk over a corpus's stretches: what is stored is passed by, the rest is computed and handed on to be put."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np

from ..client import SparseStoreClient
from ..core.masks import BoolArray
from ..core.plans import PrefixHit, PutPlan
from ..core.results import GetResult
from ..core.sequence import TokenSequence
from ..core.tally import NOTHING, Tally
from ..errors import ProducerError
from ..waiting import held
from .options import JobOptions
from .producers import Producer
from .putting import Putter, Stored
from .states import WarmStates
from .steady import Patience, Stop, StoppedError
from .tallies import RunTally
from .tree import Stretch
from .visiting import Visit, Visitor

T = TypeVar("T")
State = TypeVar("State")
#: Seconds before it is looked again whether another part has stored the trunk.
_TRUNK_PAUSE: Final = 0.2


@dataclass(slots=True)
class Awaited:
    """Stretches that another part computes, and whether it is still believed to."""

    stretches: frozenset[Stretch]
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class Crew(Generic[State]):
    """What the walks of one run share."""

    client: SparseStoreClient
    producer: Producer[State]
    options: JobOptions
    visitor: Visitor
    patience: Patience
    putter: Putter
    tally: RunTally
    #: One thread, on which the producer works.
    computing: ThreadPoolExecutor
    #: Marks of stretches that have been stored, in this run or an earlier one.
    done: set[bytes]
    #: Stretches of which some will never be stored: they are not computed once more.
    hopeless: set[Stretch]
    awaited: Awaited
    stop: Stop
    #: Called behind each stretch, and each part of one.
    progress: Callable[[], None]
    tell: Callable[[str], None]


class Walk(Generic[State]):
    """One walk over stretches, in their order: a depth-first walk's, so that what comes next goes on from what was
    computed last. With ``mend`` what is missing is computed, else only counted."""

    def __init__(self, crew: Crew[State], stretches: Sequence[Stretch], *, mend: bool = True) -> None:
        self._crew = crew
        self._stretches = stretches
        self._mend = mend
        self._states: WarmStates[State] = WarmStates(crew.options.warm_states, stretches)
        self._alignment = crew.visitor.layout.alignment
        self._page_sizes = crew.visitor.layout.page_sizes

    async def run(self) -> Tally:
        """Walk; how much was missing when it was come to. What was computed is stored when this returns.

        Raises ``StoppedError``, and what store or producer raise.
        """
        missing = NOTHING
        async with aclosing(self._crew.visitor.visits(self._stretches)) as visits:
            async for visit in visits:
                self._check_stop()
                self._crew.putter.check()
                missing += self._tally(visit.missing)
                if not visit.lacks_some:
                    self._crew.tally.note_skipped(visit.stretch)
                    self._note_stored(visit)
                elif self._mend and visit.stretch not in self._crew.hopeless:
                    await self._compute(visit)
                self._states.passed(visit.stretch)
                self._crew.progress()
        await self._crew.putter.settle()
        return missing

    def _check_stop(self) -> None:
        if self._crew.stop.is_set:
            raise StoppedError("it was asked to stop")

    def _note_stored(self, visit: Visit) -> None:
        if visit.mark not in self._crew.done:
            self._crew.putter.seal(Stored(visit.stretch, visit.mark))

    async def _compute(self, visit: Visit) -> None:
        """Compute what is missing of a stretch, a part after the other, and have each put."""
        crew, stretch, last = self._crew, visit.stretch, visit.end_of_missing
        state, first = await self._state_before(visit)
        stored = Stored(stretch, visit.mark)
        for part in stretch.path():  # those before the stretch itself are mostly stored
            start, end = max(first, part.start * self._alignment), min(last, part.end * self._alignment)
            for plan in crew.visitor.parts(part, start, end):
                state = await self._compute_part(visit, part, plan, state, stored)
            if part is stretch.parent and start < end:
                await self._keep_for_others(part, state)
        crew.tally.note_computed(stretch, first, last)
        stored.tokens_computed = last - first
        crew.putter.seal(stored)
        if last == stretch.end * self._alignment:
            self._states.keep(stretch, state)

    async def _keep_for_others(self, stretch: Stretch, state: State) -> None:
        """A copy of the state at a stretch's end, for what else goes on from there."""
        if self._states.wants(stretch):
            self._states.keep(stretch, await self._forked(state))

    async def _compute_part(self, visit: Visit, part: Stretch, plan: PutPlan, state: State, stored: Stored) -> State:
        self._check_stop()
        crew = self._crew
        if part is visit.stretch:
            wanted = [
                missing[: len(mask)] & mask for missing, mask in zip(visit.missing, plan.store_masks, strict=True)
            ]
        else:
            wanted = list(await crew.visitor.missing(visit.sequence, plan))
        nbytes = self._tally(wanted).bytes
        ids = visit.token_ids[plan.start_token : plan.end_token]
        await crew.putter.room(nbytes)
        try:
            state, source = await self._produced(lambda: crew.producer.prefill(state, ids, wanted))
        except BaseException:
            crew.putter.give_back(nbytes)
            raise
        crew.tally.note_prefill(len(ids))
        if nbytes:
            mark = visit.mark if part is visit.stretch else crew.visitor.mark(part)
            crew.putter.put(stored, visit.sequence, plan, source, wanted, nbytes, again=mark in crew.done)
        else:
            crew.putter.give_back(nbytes)
        crew.progress()
        return state

    async def _state_before(self, visit: Visit) -> tuple[State, int]:
        """A state to go on from, and how many tokens it has seen: no more than lie before what is missing."""
        parent, first = visit.stretch.parent, visit.first_missing
        start = visit.stretch.start * self._alignment
        warm = parent is not None and self._states.has(parent)
        if first and (first > start or not warm):
            hit = await self._hit(visit, first)
            if not warm or hit.hit_length > start:
                return await self._restored(visit.stretch, hit)
        if warm and parent is not None:
            state, shared = self._states.take(parent)
            return (await self._forked(state) if shared else state), start
        return await self._produced(lambda: self._crew.producer.restore(GetResult(0))), 0

    async def _hit(self, visit: Visit, first: int) -> PrefixHit:
        """What the store has of the first ``first`` tokens, to go on from; waits for what another part computes."""
        crew = self._crew
        await crew.putter.settle()  # it may be on its way there
        # One token more: the last one of a lookup is never hit.
        sequence = visit.beginning(first + 1)
        hit = await crew.patience.keep_on(lambda: crew.client.lookup(sequence))
        if visit.stretch.parent in crew.awaited.stretches and not crew.awaited.given_up:
            margin = self._alignment if crew.visitor.layout.use_eagle else 0
            hit = await self._awaited_hit(sequence, hit, visit.stretch.start * self._alignment - margin)
        return hit

    async def _awaited_hit(self, sequence: TokenSequence, hit: PrefixHit, expected: int) -> PrefixHit:
        """Look up again until the hit is as long as expected, or nothing more is expected of the other part."""
        crew, pause = self._crew, _TRUNK_PAUSE
        deadline = time.monotonic() + crew.options.trunk_seconds
        if hit.hit_length < expected:
            crew.tell("waiting for part 1 to store what the parts share")
        while hit.hit_length < expected and not crew.awaited.given_up:
            pause = await crew.stop.pause(pause)
            self._check_stop()
            hit = await crew.patience.keep_on(lambda: crew.client.lookup(sequence))
            crew.awaited.given_up = hit.hit_length < expected and time.monotonic() >= deadline
        if crew.awaited.given_up:
            crew.tell("part 1 did not store it in time: from now on this part computes what it lacks by itself")
        return hit

    async def _restored(self, stretch: Stretch, hit: PrefixHit) -> tuple[State, int]:
        crew, got = self._crew, GetResult(0)
        if hit.hit_length:
            got = await crew.patience.keep_on(lambda: crew.client.get(hit))
        crew.tally.tokens_restored += got.hit_length
        state = await self._produced(lambda: crew.producer.restore(got))
        if stretch.parent is not None and got.hit_length == stretch.start * self._alignment:
            await self._keep_for_others(stretch.parent, state)
        return state, got.hit_length

    async def _forked(self, state: State) -> State:
        return await self._produced(lambda: self._crew.producer.fork(state))

    async def _produced(self, call: Callable[[], T]) -> T:
        """A call of the producer's, on its thread. Raises ``ProducerError``."""
        try:
            return await held(self._crew.computing.submit(call))
        except Exception as error:  # whatever somebody else's code raises
            raise ProducerError(f"the producer raised {type(error).__name__}: {error}") from error

    def _tally(self, masks: Sequence[BoolArray]) -> Tally:
        counts = [int(np.count_nonzero(mask)) for mask in masks]
        nbytes = sum(count * size for count, size in zip(counts, self._page_sizes, strict=True))
        return Tally(sum(counts), nbytes)
