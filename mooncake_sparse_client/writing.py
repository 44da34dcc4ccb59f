"""Carrying out a put: ask what is there, write what is missing, each key once whoever else puts it now."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence

from .chunks import Source, read_source
from .core.plans import NOTHING, PutPlan, Tally
from .core.results import ChunkFailure, PutResult
from .stores.base import PutItem
from .transfer import ChunkJob, Transport, all_keys

_FULL = "full"
#: Seconds between attempts at what a full store refused; the last one goes on.
_PAUSES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0)


class PutStep:
    """One put under way, from when it is made. ``result`` says at any time what it has done.

    ``patience``: seconds in which a full store is asked again.
    """

    def __init__(
        self,
        transport: Transport,
        plan: PutPlan,
        block_hashes: Sequence[bytes],
        source: Source,
        *,
        confirm: bool,
        patience: float,
    ) -> None:
        self._transport = transport
        self._plan = plan
        self._block_hashes = block_hashes
        self._source = source
        self._confirm = confirm
        self._deadline = time.monotonic() + patience
        self._page_sizes = transport.identity.page_sizes
        self._written = self._existing = self._unavailable = NOTHING
        self._failures: list[ChunkFailure] = []
        self._open: dict[str, ChunkJob] = {}
        self._own_claims: dict[str, asyncio.Future[bool]] = {}

    async def run(self) -> None:
        """Settle every chunk that the plan keeps. Raises what the store or the source raises."""
        await self._transport.compute(self._take_jobs)
        while jobs := list(self._open.values()):
            await self._put_claimable(jobs)

    def fail_the_rest(self, reason: str) -> None:
        """Count what is not settled as failed."""
        for job in list(self._open.values()):
            self._failed(job, reason)

    def so_far(self) -> str:
        return f"; {self._written.chunks} chunks were written, {len(self._open)} were left"

    def result(self) -> PutResult:
        return PutResult(
            end_token=self._plan.end_token,
            written=self._written,
            existing=self._existing,
            unreachable=sum(self._plan.unreachable, NOTHING),
            unavailable=self._unavailable,
            failed=Tally(len(self._failures), sum(self._page_sizes[failure.group] for failure in self._failures)),
            failures=tuple(self._failures),
        )

    def _take_jobs(self) -> None:
        """Name the chunks to keep. Runs on a thread, since there may be very many."""
        for group, kept in enumerate(self._plan.kept()):
            jobs = self._transport.jobs(self._block_hashes, group, [chunk for chunk, _ in kept])
            for job, (_, known) in zip(jobs, kept, strict=True):
                if known and not self._transport.ledger.is_suspect(job.key):
                    self._existing += Tally(1, self._page_sizes[group])
                else:
                    self._open[job.key] = job

    async def _put_claimable(self, jobs: Sequence[ChunkJob]) -> None:
        """Put the jobs whose keys nobody else puts now, then wait for the others."""
        theirs = [(job, self._transport.claims[job.key]) for job in jobs if job.key in self._transport.claims]
        mine = [job for job in jobs if job.key not in self._transport.claims]
        loop = asyncio.get_running_loop()
        self._own_claims = {job.key: loop.create_future() for job in mine}
        self._transport.claims |= self._own_claims
        try:
            await self._put_missing(mine)
        finally:
            for job in mine:
                self._answer(job, stored=False)
        for job, claim in theirs:
            await asyncio.wait([claim])  # which, other than awaiting it, never cancels another's claim
            if claim.result() and not self._replaces(job):
                self._exists(job)

    async def _put_missing(self, jobs: Sequence[ChunkJob]) -> None:
        unsure = [job for job in jobs if not self._replaces(job)]
        for job, exists in zip(unsure, await self._transport.exists_at_all(all_keys(unsure)), strict=True):
            if exists and not self._replaces(job):
                self._transport.ledger.found(job.key)
                self._exists(job)
        await self._write(jobs)

    def _replaces(self, job: ChunkJob) -> bool:
        """Whether what is stored is damaged by now, and ours to replace."""
        return self._transport.identity.owns_namespace and self._transport.ledger.is_damaged(job.key)

    async def _write(self, jobs: Sequence[ChunkJob]) -> None:
        """Write the jobs that are open; what a full store refuses is tried again until patience ends."""
        # Eviction makes room within milliseconds, an expiring lease within seconds.
        pauses = itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1]))
        while missing := [job for job in jobs if job.key in self._open]:
            await self._transport.each_batch(missing, self._write_batch)
            refused = [job for job in missing if job.key in self._open]
            left = self._deadline - time.monotonic()
            if left <= 0:
                for job in refused:
                    self._failed(job, _FULL)
            elif refused:
                pause = next(pauses) * random.uniform(0.5, 1.0)  # noqa: S311 - spreads the attempts of many clients
                await asyncio.sleep(min(pause, left))

    async def _write_batch(self, batch: Sequence[ChunkJob]) -> None:
        pairs = []
        for job in batch:
            payload = read_source(self._source, job.group, job.chunk, self._page_sizes[job.group])
            if payload is None:
                self._has_no_bytes(job)
            else:
                pairs.append((job, payload))
        if not pairs:
            return
        value_format = self._transport.identity.value_format

        def framed() -> list[PutItem]:
            return [
                PutItem(job.key, (memoryview(header), *payload) if header else payload, self._replaces(job))
                for job, payload in pairs
                for header in (value_format.header(job.group, job.name, payload),)
            ]

        failures = await self._transport.store.put(await self._transport.compute(framed))
        stored = [job for (job, _), failure in zip(pairs, failures, strict=True) if failure is None]
        confirmed = await self._confirmed(stored)
        for (job, _), failure in zip(pairs, failures, strict=True):
            if failure is not None and failure.kind == _FULL and failure.retriable:
                continue  # stays open: the store may have room soon
            if failure is not None:
                self._failed(job, failure.kind)
            elif job.key in confirmed:
                self._wrote(job)
            else:
                self._failed(job, "unconfirmed")

    async def _confirmed(self, jobs: Sequence[ChunkJob]) -> set[str]:
        """The keys that count as written. A put can be swallowed by another writer's unfinished one, which
        only asking again would show."""
        keys = all_keys(jobs)
        if not self._confirm:
            return set(keys)
        found = await self._transport.exists_at_all(keys)
        return {key for key, exists in zip(keys, found, strict=True) if exists}

    def _exists(self, job: ChunkJob) -> None:
        self._existing += self._settle(job, stored=True)

    def _wrote(self, job: ChunkJob) -> None:
        self._transport.ledger.clear(job.key)
        self._written += self._settle(job, stored=True)

    def _has_no_bytes(self, job: ChunkJob) -> None:
        self._unavailable += self._settle(job, stored=False)

    def _failed(self, job: ChunkJob, reason: str) -> None:
        self._settle(job, stored=False)
        self._failures.append(ChunkFailure(job.group, job.chunk, reason))

    def _settle(self, job: ChunkJob, *, stored: bool) -> Tally:
        del self._open[job.key]
        self._answer(job, stored=stored)
        return Tally(1, self._page_sizes[job.group])

    def _answer(self, job: ChunkJob, *, stored: bool) -> None:
        """Tell those who wait for this put's claim on the key, if it has one."""
        claim = self._own_claims.pop(job.key, None)
        if claim is not None:
            del self._transport.claims[job.key]
            claim.set_result(stored)
