"""One run of a job over a corpus that has been read: its passes, its journal, its report."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..client import SparseStoreClient
from ..core.tally import NOTHING, Tally
from ..errors import StoreError
from ..waiting import held
from .corpus import Corpus
from .journal import Journal
from .options import JobOptions
from .planning import CorpusTotals, JobPlanner
from .producers import Producer
from .putting import Putter, Stored
from .report import JobReport, RunTotals, Status
from .sharding import Shard, share_out
from .steady import Patience, Stop
from .tallies import RunTally
from .visiting import Visitor
from .walking import Crew, StoppedError, Walk

State = TypeVar("State")

#: Times that the corpus is gone through: computed, then looked over until nothing is missing. What the store has lost
#: meanwhile is computed again, the last time only counted.
_PASSES = 4
#: Wrong lines that a report shows.
_SHOWN = 100


class Watcher(Protocol):
    """Whoever looks on. Called on the event loop, often; must not block."""

    def update(self, tokens: int, bytes_written: int) -> None:
        """How far the run is: distinct tokens done, of the total that the watcher was made with."""

    def message(self, text: str) -> None:
        """Something that its owner should know."""


class Nobody:
    """Looks on, and says nothing."""

    def update(self, tokens: int, bytes_written: int) -> None:
        pass

    def message(self, text: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Workers(Generic[State]):
    """Who does a job's work. Each executor has one thread."""

    client: SparseStoreClient
    producer: Producer[State]
    files: ThreadPoolExecutor
    computing: ThreadPoolExecutor


class JobRun(Generic[State]):
    """To be made on a thread: to share a large corpus out takes seconds."""

    def __init__(
        self,
        workers: Workers[State],
        corpus: Corpus,
        planner: JobPlanner,
        options: JobOptions,
        journal: Journal | None,
        stop: Stop,
    ) -> None:
        self._workers = workers
        self._corpus = corpus
        self._planner = planner
        self._options = options
        self._journal = journal
        self._stop = stop
        shares = share_out(corpus.tree, options.shard.count)
        self._trunk, self._own = shares.of(options.shard)
        self._awaited = frozenset(shares.trunk).difference(self._trunk)
        #: What this run is for.
        self.totals = CorpusTotals.of(corpus.tree, (*self._trunk, *self._own), with_root=options.shard.has_trunk)
        #: Names of stretches that have been stored, in this run or an earlier one.
        self._done: set[bytes] = set() if journal is None else set(journal.done)
        self._earlier = RunTotals() if journal is None else journal.earlier
        self._journal_error: BaseException | None = None
        self._passes = 0

    async def run(self, watcher: Watcher) -> JobReport:
        """See ``PrecomputeJob.run``."""
        workers, options = self._workers, self._options
        patience = Patience(options.patience_seconds, self._stop, watcher.message)
        tally = RunTally(self._corpus.layout)

        def progress() -> None:
            if self._journal_error is not None:
                raise self._journal_error
            watcher.update(tally.tokens_done, tally.written.bytes)

        crew = Crew(
            client=workers.client,
            producer=workers.producer,
            options=options,
            visitor=Visitor(workers.client, self._corpus, self._planner, patience, workers.files, options),
            patience=patience,
            putter=Putter(
                workers.client,
                patience,
                tally,
                max_bytes=options.max_bytes_pending,
                at_once=options.puts_at_once,
                on_stored=self._note_stored,
            ),
            tally=tally,
            computing=workers.computing,
            done=self._done,
            awaited=self._awaited,
            stop=self._stop,
            progress=progress,
            tell=watcher.message,
        )
        status, message, missing = await self._carried_out(crew)
        progress()
        report = self._report(status, message, missing, tally, patience)
        await self._end_journal(report)
        return report

    async def _carried_out(self, crew: Crew[State]) -> tuple[Status, str, Tally]:
        """Go through the corpus until nothing is missing: status, why, and what is missing."""
        try:
            try:
                missing = await self._go_through(crew)
            except StoppedError:
                await crew.putter.settle()
                return "stopped", "it was asked to stop", NOTHING
        except StoreError as error:
            return "stopped", str(error), NOTHING
        finally:
            await crew.putter.cancel()
        if missing.chunks:
            why = f"{missing.chunks} chunks are still missing after {self._passes} passes"
            return "incomplete", f"{why}: the store loses them, or the producer does not deliver them", missing
        return "done", "", NOTHING

    async def _go_through(self, crew: Crew[State]) -> Tally:
        missing = NOTHING
        for number in range(1, _PASSES + 1):
            self._passes, missing = number, NOTHING
            for stretches in (self._trunk, self._own):
                if stretches:
                    missing += await Walk(crew, stretches, mend=number < _PASSES).run()
            if not missing.chunks:
                break
        return missing

    def _note_stored(self, stored: Stored) -> None:
        """All puts of a stretch are over."""
        if not stored.whole:
            return
        self._done.add(stored.stretch.name)
        journal = self._journal
        if journal is not None:
            note = self._workers.files.submit(
                journal.append_done,
                stored.stretch.name,
                tokens_computed=stored.tokens_computed,
                chunks_written=stored.chunks_written,
                bytes_written=stored.bytes_written,
            )
            note.add_done_callback(self._noted)

    def _noted(self, note: Future[None]) -> None:
        if not note.cancelled():
            self._journal_error = self._journal_error or note.exception()

    async def _end_journal(self, report: JobReport) -> None:
        journal = self._journal
        if journal is not None:
            await held(self._workers.files.submit(journal.append_end, report.status, seconds=report.seconds))

    def _report(self, status: Status, message: str, missing: Tally, tally: RunTally, patience: Patience) -> JobReport:
        corpus, shard = self._corpus, self._options.shard
        return JobReport(
            status=status,
            message=message,
            cache_id=self._workers.client.keys.cache_id,
            shard=None if shard == Shard() else (shard.number, shard.count),
            prompts=self.totals.prompts,
            wrong_lines=corpus.wrong_lines,
            wrong=tuple(corpus.wrong[:_SHOWN]),
            tokens_total=self.totals.tokens,
            tokens_distinct=self.totals.distinct,
            tokens_computed=tally.tokens_computed,
            tokens_reused=self.totals.reused,
            tokens_skipped=tally.tokens_skipped,
            tokens_unstored=self.totals.unstored,
            tokens_restored=tally.tokens_restored,
            tokens_recomputed=tally.tokens_recomputed,
            chunks_written=tally.written.chunks,
            bytes_written=tally.written.bytes,
            existing=tally.existing,
            rewritten=tally.rewritten,
            missing=missing,
            groups=tally.groups(),
            samples=tally.samples(),
            seconds=round(tally.seconds, 3),
            seconds_reading=round(corpus.seconds, 3),
            passes=self._passes,
            seconds_waited=round(patience.seconds_waited, 3),
            earlier=self._earlier,
        )
