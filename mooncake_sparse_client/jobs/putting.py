"""Putting what was computed while more is being computed, a bounded number of bytes at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ..chunks import ChunkBuffers
from ..client import SparseStoreClient
from ..core.masks import BoolArray
from ..core.plans import PutPlan
from ..core.results import ChunkFailure, PutResult
from ..core.sequence import TokenSequence
from ..core.tally import NOTHING, Tally
from ..data_plane.staging import Budget
from ..errors import InvalidBufferError, ProducerError, StoreError, StoreFullError, StoreUnavailableError
from ..waiting import settled
from .producers import ChunkSource
from .steady import Patience
from .tallies import RunTally
from .tree import Stretch

#: Reasons for which a chunk was not stored that no time cures.
_FOR_GOOD: Final = frozenset({"rejected", "unknown"})
#: Puts that may be under way or wait for their turn, for each that may be under way.
_WAITING: Final = 8


@dataclass(slots=True, eq=False)
class Stored:
    """How far the storing of one stretch is."""

    stretch: Stretch
    #: See ``Visit.mark``.
    mark: bytes
    tokens_computed: int = 0
    written: Tally = NOTHING
    #: Whether all that was wanted is stored, as far as is known.
    whole: bool = True
    #: Whether some of it never will be: the store refuses it, or the producer has not got it.
    hopeless: bool = False
    #: Puts under way, and whether more are to come.
    _open: int = 0
    _more: bool = True

    @property
    def over(self) -> bool:
        return not self._open and not self._more

    def begin(self) -> None:
        self._open += 1

    def end(self) -> None:
        self._open -= 1

    def seal(self) -> None:
        self._more = False


@dataclass(slots=True)
class _Offered:
    """A source, and which of its chunks the store has asked for, to write them."""

    source: ChunkSource
    #: What the producer was asked for, one boolean array a group.
    wanted: Sequence[BoolArray]
    chunks: set[tuple[int, int]] = field(default_factory=set)
    #: Those of them that it has not got. (What it was not asked for was lost since the job asked the store.)
    lacking: set[tuple[int, int]] = field(default_factory=set)

    def __call__(self, group: int, chunk: int) -> ChunkBuffers | None:
        where = (group, chunk)
        found = self.source.get(where) if isinstance(self.source, Mapping) else self.source(group, chunk)
        if found is not None:
            self.chunks.add(where)
        elif self.wanted[group][chunk]:
            self.lacking.add(where)
        return found

    def left_of_wanted(self, failed: set[tuple[int, int]]) -> list[int]:
        """How many chunks of each group were neither asked for nor did they fail: the store had got them."""
        left = [int(np.count_nonzero(mask)) for mask in self.wanted]
        for group, chunk in self.chunks | self.lacking | failed:
            left[group] -= bool(self.wanted[group][chunk])
        return left


class Putter:
    """Puts under way. ``on_stored``: called with each stretch all of whose puts are over."""

    def __init__(
        self,
        client: SparseStoreClient,
        patience: Patience,
        tally: RunTally,
        *,
        max_bytes: int,
        at_once: int,
        on_stored: Callable[[Stored], None],
    ) -> None:
        self._client = client
        self._patience = patience
        self._tally = tally
        self._budget = Budget(max_bytes)
        # With small chunks very many puts would be few bytes.
        self._waiting = Budget(_WAITING * at_once)
        self._places = asyncio.Semaphore(at_once)
        self._on_stored = on_stored
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    async def room(self, nbytes: int) -> None:
        """Wait until one more put, of so many bytes, may wait for its turn. Raises what a put has raised meanwhile."""
        self.check()
        await self._waiting.take(1)
        try:
            await self._budget.take(nbytes)
        except BaseException:
            self._waiting.give_back(1)
            raise
        self.check()

    def give_back(self, nbytes: int) -> None:
        """For room that was not used, or is not any more."""
        self._waiting.give_back(1)
        self._budget.give_back(nbytes)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def put(
        self,
        stored: Stored,
        sequence: TokenSequence,
        plan: PutPlan,
        source: ChunkSource,
        wanted: Sequence[BoolArray],
        nbytes: int,
        *,
        again: bool,
    ) -> None:
        """Begin a put of the chunks that were ``wanted`` of the source, for which there is ``room``."""
        stored.begin()
        task = asyncio.create_task(self._put(stored, sequence, plan, _Offered(source, wanted), nbytes, again=again))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def seal(self, stored: Stored) -> None:
        """No more puts of this stretch are to come."""
        stored.seal()
        self._note(stored)

    async def settle(self) -> None:
        """Wait for all puts under way. Raises what the first of those that failed has raised."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        self.check()

    async def cancel(self) -> None:
        """Give up all puts under way; they are over when this returns."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await settled(asyncio.gather(*tasks, return_exceptions=True))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # noted already

    def _note_error(self, error: BaseException) -> None:
        """The first error ends the run. If it is the store's, the other puts would only meet with it one by one."""
        if self._error is None and not isinstance(error, asyncio.CancelledError):
            self._error = error
            if isinstance(error, StoreError):
                for task in self._tasks - {asyncio.current_task()}:
                    task.cancel()

    async def _put(
        self, stored: Stored, sequence: TokenSequence, plan: PutPlan, offered: _Offered, nbytes: int, *, again: bool
    ) -> None:
        try:
            async with self._places:
                result = await self._patience.keep_on(lambda: self._attempt(sequence, plan, offered))
            failed = {(failure.group, failure.chunk) for failure in result.failures}
            # An attempt before the last may have written them, which the last has found there.
            added = self._tally.note_put(plan, offered.chunks - failed, again=again)
            self._tally.note_existing(offered.left_of_wanted(failed))
            stored.written += added
            if failed or result.unavailable.chunks:
                stored.whole = False
                stored.hopeless |= bool(failed or offered.lacking)
        except BaseException as error:
            stored.whole = False
            self._note_error(error)
            raise
        finally:
            self.give_back(nbytes)
            stored.end()
        self._note(stored)

    async def _attempt(self, sequence: TokenSequence, plan: PutPlan, offered: _Offered) -> PutResult:
        """One put. What may be stored later is raised, to be tried again."""
        # Nobody looks at the results before morning: a chunk counts as written once it has been asked for.
        try:
            result = await self._client.put(sequence, offered, plan=plan, confirm=True)
        except InvalidBufferError as error:
            raise ProducerError(f"the producer handed out a chunk that cannot be stored: {error}") from error
        later = [failure for failure in result.failures if failure.reason not in _FOR_GOOD]
        if later:
            raise _trouble(later)
        return result

    def _note(self, stored: Stored) -> None:
        if stored.over:
            self._on_stored(stored)


def _trouble(failures: list[ChunkFailure]) -> StoreFullError | StoreUnavailableError:
    reasons = Counter(failure.reason for failure in failures)
    counted = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
    message = f"the store did not take {len(failures)} chunks ({counted})"
    if reasons["full"]:
        return StoreFullError(f"{message}: it has no room; give it more memory, or let it evict")
    return StoreUnavailableError(message)
