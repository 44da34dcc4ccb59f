"""PrecomputeJob: the KV cache of a corpus, computed and put in a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Generic, TypeVar

from ..client import SparseStoreClient
from ..errors import ConfigError, InvalidRequestError
from ..waiting import held, one_thread, settled
from .corpus import Corpus, Prompts
from .journal import Journal, JournalIdentity
from .options import DEFAULT_OPTIONS, JobOptions
from .planning import JobPlanner
from .producers import Producer
from .reading import read_for
from .report import JobReport
from .running import JobRun, Nobody, Watcher, Workers
from .steady import Stop, StoppedError

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
        self._begun = False

    def stop(self) -> None:
        """Let ``run`` end soon: what is computed already is still stored, as far as the store takes it at once."""
        self._stop.set()

    async def run(self) -> JobReport:
        """Do the job, once. A store that is out of reach for too long, or a ``stop``, is a report with that status;
        with a journal the job can be resumed then, as after a kill.

        Raises ``ConfigError`` for what cannot work, ``InvalidTokensError`` for a wrong line that is to stop the job,
        and ``ProducerError`` for what the producer raises.
        """
        self._check()
        self._begun = True
        # One thread reads the corpus and writes the journal, another one computes.
        with one_thread("precompute-files") as files, one_thread("precompute-model") as computing:
            opened = ExitStack()
            opening = asyncio.wrap_future(files.submit(self._open, opened))
            try:
                # Whoever cancels it need not wait for the end of the corpus.
                journal, corpus = await settled(opening, self._stop.set)
                return await self._run(Workers(self._client, self._producer, files, computing), journal, corpus)
            except StoppedError as error:
                return JobReport("stopped", str(error), self._client.keys.cache_id, self._options.shard.part)
            finally:
                await settled(asyncio.wrap_future(files.submit(opened.close)))

    def _open(self, opened: ExitStack) -> tuple[Journal | None, Corpus]:
        """Open the journal and read the corpus; both are closed with ``opened``."""
        options, client = self._options, self._client
        journal: Journal | None = None
        if options.journal is not None:
            shard = str(options.shard) if options.shard.part else ""
            identity = JournalIdentity(client.keys.cache_id, client.fingerprint, shard)
            journal = opened.enter_context(Journal.open(options.journal, identity, resume=options.resume))
        return journal, opened.enter_context(read_for(client, self._prompts, options, self._stop))

    async def _run(self, workers: Workers[State], journal: Journal | None, corpus: Corpus) -> JobReport:
        client = self._client
        planner = JobPlanner(corpus.tree, client.retention_interval, client.retention_origin)
        making = workers.files.submit(lambda: JobRun(workers, corpus, planner, self._options, journal, self._stop))
        run = await held(making)
        watcher = self._watch(run.totals.distinct)
        for line in corpus.wrong[:_TOLD]:
            watcher.message(f"line {line.line}: {line.reason}")
        return await run.run(watcher)

    def _check(self) -> None:
        client, layout = self._client, self._producer.layout
        if self._begun:
            raise InvalidRequestError("a job runs once: make another one")
        if client.keys.lookup_ranks != (client.keys.rank,):
            raise ConfigError(
                f"the client asks for the keys of the ranks {client.keys.lookup_ranks}, and a job writes those of rank "
                f"{client.keys.rank} alone, so that it would never be done: make the client without key_ranks"
            )
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
