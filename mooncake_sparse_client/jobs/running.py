"""One run of a job over a corpus that has been read: its passes, its journal, its report."""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..client import SparseStoreClient
from ..core.tally import NOTHING, Tally
from ..errors import ClientClosedError, ConfigError, ProducerError, StoreError
from ..waiting import held
from .corpus import Corpus
from .journal import Journal
from .options import JobOptions
from .planning import CorpusTotals, JobPlanner
from .producers import Producer
from .putting import Putter, Stored
from .report import JobReport, RunTotals, Status
from .sharding import share_out
from .steady import Patience, Stop, StoppedError
from .tallies import RunTally
from .tree import Stretch
from .visiting import Visitor
from .walking import Awaited, Crew, Walk

State = TypeVar("State")

#: Times that what is missing is computed; each is followed by a look at what is missing then.
_ATTEMPTS = 3
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
        shares = share_out(corpus.tree, options.shard.count, trunk_apart=options.shard.trunk_apart)
        self._trunk, self._own = shares.of(options.shard)
        self._awaited = Awaited(frozenset(shares.trunk).difference(self._trunk))
        #: What this run is for.
        self.totals = CorpusTotals.of(corpus.tree, (*self._trunk, *self._own), with_root=options.shard.has_trunk)
        #: Marks of stretches that have been stored, in this run or an earlier one.
        self._done: set[bytes] = set() if journal is None else set(journal.done)
        self._earlier = RunTotals() if journal is None else journal.earlier
        self._hopeless: set[Stretch] = set()
        self._journal_error: BaseException | None = None
        self._passes = 0

    async def run(self, watcher: Watcher) -> JobReport:
        """See ``PrecomputeJob.run``."""
        workers, options = self._workers, self._options
        patience = Patience(options.patience_seconds, self._stop, watcher.message)
        tally = RunTally(self._corpus.layout)

        def progress() -> None:
            watcher.update(tally.tokens_done, tally.written.bytes)
            if self._journal_error is not None:
                raise StoppedError(str(self._journal_error))

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
            hopeless=self._hopeless,
            awaited=self._awaited,
            stop=self._stop,
            progress=progress,
            tell=watcher.message,
        )
        status, message, missing = await self._carried_out(crew)
        watcher.update(tally.tokens_done, tally.written.bytes)
        report = self._report(status, message, missing, tally, patience)
        await self._end_journal(report, watcher)
        return report

    async def _carried_out(self, crew: Crew[State]) -> tuple[Status, str, Tally]:
        """Go through the corpus until nothing is missing: status, why, and what is missing."""
        try:
            missing = await self._settled(crew, self._go_through(crew))
        except (StoppedError, StoreError) as error:
            return "stopped", str(error), NOTHING
        finally:
            await crew.putter.cancel()
        if missing.chunks:
            why = f"{missing.chunks} chunks are still missing after {self._passes} passes"
            return (
                "incomplete",
                f"{why}: the store loses or refuses them, or the producer does not deliver them",
                missing,
            )
        return "done", "", NOTHING

    @staticmethod
    async def _settled(crew: Crew[State], work: Coroutine[None, None, Tally]) -> Tally:
        """Where the work ends early, what was computed is still put, unless the store has failed."""
        try:
            return await work
        except (StoppedError, ProducerError) as error:
            # Of a producer that fails is told whatever the store does meanwhile.
            with suppress(ProducerError, *([StoreError] if isinstance(error, ProducerError) else [])):
                await crew.putter.settle()
            raise

    async def _go_through(self, crew: Crew[State]) -> Tally:
        """Compute what is missing, and look at what is missing then: the store may have lost something meanwhile."""
        before = 0
        for _ in range(_ATTEMPTS):
            if not (await self._walk(crew, mend=True)).chunks:
                return NOTHING
            missing = await self._walk(crew, mend=False)
            if not missing.chunks or (before and 2 * missing.chunks > before):
                break  # done, or hardly ever to be
            before = missing.chunks
        return missing

    async def _walk(self, crew: Crew[State], *, mend: bool) -> Tally:
        self._passes += 1
        missing = NOTHING
        for stretches in (self._trunk, self._own):
            if stretches:
                missing += await Walk(crew, stretches, mend=mend).run()
        return missing

    def _note_stored(self, stored: Stored) -> None:
        """All puts of a stretch are over."""
        if stored.hopeless:
            self._hopeless.add(stored.stretch)
        if not stored.whole:
            return
        self._done.add(stored.mark)
        journal = self._journal
        if journal is not None:
            note = self._workers.files.submit(
                journal.append_done,
                stored.mark,
                tokens_computed=stored.tokens_computed,
                chunks_written=stored.written.chunks,
                bytes_written=stored.written.bytes,
            )
            note.add_done_callback(self._noted)

    def _noted(self, note: Future[None]) -> None:
        if not note.cancelled():
            self._journal_error = self._journal_error or note.exception()

    async def _end_journal(self, report: JobReport, watcher: Watcher) -> None:
        journal = self._journal
        if journal is not None:
            try:
                await held(self._workers.files.submit(journal.append_end, report.status, seconds=report.seconds))
            except (ConfigError, ClientClosedError) as error:
                watcher.message(str(error))  # the results do not hang on it

    def _report(self, status: Status, message: str, missing: Tally, tally: RunTally, patience: Patience) -> JobReport:
        corpus = self._corpus
        return JobReport(
            status=status,
            message=message,
            cache_id=self._workers.client.keys.cache_id,
            shard=self._options.shard.part,
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
