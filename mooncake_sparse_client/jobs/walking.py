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
from ..core.tally import NOTHING, Tally
from ..waiting import held
from .options import JobOptions
from .producers import Producer
from .putting import Putter, Stored
from .states import WarmStates
from .steady import Patience, Stop
from .tallies import RunTally
from .tree import Stretch
from .visiting import Visit, Visitor

T = TypeVar("T")
State = TypeVar("State")
#: Seconds before it is looked again whether another part has stored the trunk.
_TRUNK_PAUSE: Final = 0.2


class StoppedError(Exception):
    """Somebody asked the job to stop."""


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
    #: Names of stretches that have been stored, in this run or an earlier one.
    done: set[bytes]
    #: Stretches that another part computes.
    awaited: frozenset[Stretch]
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
                    self._note_stored(visit.stretch)
                elif self._mend:
                    await self._compute(visit)
                self._states.passed(visit.stretch)
                self._crew.progress()
        await self._crew.putter.settle()
        return missing

    def _check_stop(self) -> None:
        if self._crew.stop.is_set:
            raise StoppedError

    def _note_stored(self, stretch: Stretch) -> None:
        if stretch.name not in self._crew.done:
            self._crew.putter.seal(Stored(stretch))

    async def _compute(self, visit: Visit) -> None:
        """Compute a stretch from where it is missing on, a part after the other, and have each put."""
        crew, stretch = self._crew, visit.stretch
        state, first = await self._state_before(visit)
        stored = Stored(stretch)
        for part in stretch.path():  # those before the stretch itself are mostly stored
            start, end = max(first, part.start * self._alignment), part.end * self._alignment
            for plan in crew.visitor.parts(part, start, end):
                state = await self._compute_part(visit, part, plan, state, stored)
        crew.tally.note_computed(stretch, first)
        stored.tokens_computed = stretch.end * self._alignment - first
        crew.putter.seal(stored)
        self._states.keep(stretch, state)

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
            state, source = await self._on_thread(lambda: crew.producer.prefill(state, ids, wanted))
        except BaseException:
            crew.putter.give_back(nbytes)
            raise
        crew.tally.note_prefill(len(ids))
        if nbytes:
            again = part.name in crew.done
            crew.putter.put(stored, visit.sequence, plan, source, nbytes, again=again)
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
        return await self._on_thread(lambda: self._crew.producer.restore(GetResult(0))), 0

    async def _hit(self, visit: Visit, first: int) -> PrefixHit:
        """What the store has of the first ``first`` tokens, to go on from; waits for what another part computes."""
        crew = self._crew
        await crew.putter.settle()  # it may be on its way there
        # One token more: the last one of a lookup is never hit.
        sequence = visit.beginning(first + 1)
        hit = await crew.patience.keep_on(lambda: crew.client.lookup(sequence))
        if visit.stretch.parent not in crew.awaited:
            return hit
        margin = self._alignment if crew.visitor.layout.use_eagle else 0
        expected = visit.stretch.start * self._alignment - margin
        deadline, pause = time.monotonic() + crew.options.trunk_seconds, _TRUNK_PAUSE
        if hit.hit_length < expected:
            crew.tell("waiting for part 1 to store what the parts share")
        while hit.hit_length < expected and time.monotonic() < deadline:
            pause = await crew.stop.pause(pause)
            self._check_stop()
            hit = await crew.patience.keep_on(lambda: crew.client.lookup(sequence))
        return hit

    async def _restored(self, stretch: Stretch, hit: PrefixHit) -> tuple[State, int]:
        crew, got = self._crew, GetResult(0)
        if hit.hit_length:
            got = await crew.patience.keep_on(lambda: crew.client.get(hit))
        crew.tally.tokens_restored += got.hit_length
        state = await self._on_thread(lambda: crew.producer.restore(got))
        parent = stretch.parent
        if parent is not None and got.hit_length == stretch.start * self._alignment and self._states.wants(parent):
            self._states.keep(parent, await self._forked(state))
        return state, got.hit_length

    async def _forked(self, state: State) -> State:
        return await self._on_thread(lambda: self._crew.producer.fork(state))

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await held(self._crew.computing.submit(call))

    def _tally(self, masks: Sequence[BoolArray]) -> Tally:
        counts = [int(np.count_nonzero(mask)) for mask in masks]
        nbytes = sum(count * size for count, size in zip(counts, self._page_sizes, strict=True))
        return Tally(sum(counts), nbytes)
