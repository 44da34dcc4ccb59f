"""PrecomputeJob: the KV cache of a corpus, computed and put in a store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from ..client import SparseStoreClient
from ..errors import ConfigError
from ..waiting import held, one_thread
from .corpus import Corpus, Prompts, read_corpus
from .journal import Journal, JournalIdentity
from .options import DEFAULT_OPTIONS, JobOptions
from .planning import JobPlanner
from .producers import Producer
from .report import JobReport
from .running import JobRun, Nobody, Watcher, Workers
from .sharding import Shard
from .steady import Stop
from .walking import StoppedError

State = TypeVar("State")
#: Wrong lines that a watcher is told of.
_TOLD = 10


class PrecomputeJob(Generic[State]):
    """Computes what a store lacks of the KV cache of ``prompts``, and puts it there.

    Each stretch of tokens that prompts share is computed once; of sliding windows and recurrent states is written what
    a request can resume from that repeats or extends a prompt, or parts from one where others do. What is stored
    already is not computed.

    ``client``: open, of the layout that the producer computes. ``prompts``: any iterable of token ids or ``Prompt``;
    it is gone through once, on a thread (``read_prompts`` makes one of a file). ``watch``: called with the number of
    tokens to come once the corpus has been read.
    """

    def __init__(
        self,
        client: SparseStoreClient,
        producer: Producer[State],
        prompts: Prompts,
        options: JobOptions = DEFAULT_OPTIONS,
        *,
        watch: Callable[[int], Watcher] = lambda tokens: Nobody(),
    ) -> None:
        self._client = client
        self._producer = producer
        self._prompts = prompts
        self._options = options
        self._watch = watch
        self._stop = Stop()

    def stop(self) -> None:
        """Let ``run`` end soon: what is computed already is still stored, as far as the store takes it at once."""
        self._stop.set()

    async def run(self) -> JobReport:
        """Do the job, once. A store that is out of reach for too long, or a ``stop``, is a report with that status;
        with a journal the job can be resumed then, as after a kill.

        Raises ``ConfigError`` for what cannot work, ``InvalidTokensError`` for a wrong line that is to stop the job,
        and what the producer raises.
        """
        self._check()
        # One thread reads the corpus and writes the journal, another one computes.
        with one_thread("precompute-files") as files, one_thread("precompute-model") as computing:
            try:
                corpus = await held(files.submit(self._read))
            except StoppedError:
                return JobReport("stopped", "it was stopped while it read the corpus")
            try:
                return await self._run(corpus, files, computing)
            finally:
                await held(files.submit(corpus.close))

    async def _run(self, corpus: Corpus, files: ThreadPoolExecutor, computing: ThreadPoolExecutor) -> JobReport:
        options, client = self._options, self._client
        journal: Journal | None = None
        if options.journal is not None:
            shard = "" if options.shard == Shard() else str(options.shard)
            identity = JournalIdentity(client.keys.cache_id, client.fingerprint, shard)
            path = options.journal
            journal = await held(files.submit(lambda: Journal.open(path, identity, resume=options.resume)))
        try:
            planner = JobPlanner(corpus.tree, client.retention_interval, client.retention_origin)
            workers = Workers(client, self._producer, files, computing)
            run = await held(files.submit(lambda: JobRun(workers, corpus, planner, options, journal, self._stop)))
            watcher = self._watch(run.totals.distinct)
            for line in corpus.wrong[:_TOLD]:
                watcher.message(f"line {line.line}: {line.reason}")
            return await run.run(watcher)
        finally:
            if journal is not None:
                await held(files.submit(journal.close))

    def _check(self) -> None:
        client, layout = self._client, self._producer.layout
        if layout.groups != client.layout.groups:
            raise ConfigError(
                f"the producer computes the layout {layout.groups}, and the client keeps {client.layout.groups}: make "
                "the client with the producer's layout"
            )
        if client.when_down != "raise":
            raise ConfigError(
                "the client takes a store that is out of reach for an empty one (when_down='miss'), and a job would "
                "compute everything again: make it with when_down='raise'"
            )
        if client.lends_memory and not self._options.keep_in_process:
            raise ConfigError(
                "the client holds the store's memory in this process (mode 'embedded' or local()), and all results "
                "would go with it: use a Mooncake of other processes (mode 'remote' or 'shared'; `serve` runs one), or "
                "say that you want this (keep_in_process, --keep-in-process)"
            )

    def _read(self) -> Corpus:
        def check(corpus: Corpus) -> None:
            if self._stop.is_set:
                raise StoppedError

        options, client = self._options, self._client
        return read_corpus(
            self._prompts,
            client.layout,
            client.hasher,
            on_wrong=options.on_wrong,
            spool_folder=options.spool,
            note=check,
        )
