"""Carrying out a get: read, check, and shorten the prefix until what is left has wholly arrived."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .chunks import Sink, SinkPlaces, open_sink
from .core.masks import BoolArray, load_mask
from .core.plans import GetPlan, PrefixHit, Tally, longest_arrived_prefix, plan_get
from .core.results import ChunkFailure, GetResult
from .stores.base import Failure, GetItem
from .transfer import ChunkJob, Transport

_ROUNDS = 3
Views = tuple[memoryview, ...]


@dataclass(slots=True)
class _Progress:
    """What one get knows so far."""

    present: tuple[BoolArray, ...]
    arrived: tuple[BoolArray, ...]
    failures: list[ChunkFailure] = field(default_factory=list)
    chunks: dict[tuple[int, int], memoryview] = field(default_factory=dict)
    places: SinkPlaces = field(default_factory=SinkPlaces)


class Reader:
    """Reads the chunks of hits through one client's transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._identity = transport.identity

    async def get(self, hit: PrefixHit, present: Sequence[BoolArray], sink: Sink | None) -> GetResult:
        """Read what ``hit`` needs; ``present`` is what is believed to be in the store by now.

        A chunk that does not arrive counts as absent, the longest prefix below is found anew, and what that
        one lacks is read, for a few rounds.
        """
        layout = self._identity.layout
        progress = _Progress(
            present=tuple(mask.copy() for mask in present), arrived=tuple(np.zeros_like(mask) for mask in present)
        )
        for _ in range(_ROUNDS):
            plan = plan_get(layout, hit.num_tokens, progress.present, progress.arrived, local_tokens=hit.local_tokens)
            if plan.complete:
                return self._result(plan.hit_length, hit, progress, sink)
            progress.places.keep(functools.partial(_has, plan.load_masks))
            await self._read(self._jobs(hit, plan), sink, progress)
        length = longest_arrived_prefix(
            layout, hit.num_tokens, progress.present, progress.arrived, local_tokens=hit.local_tokens
        )
        return self._result(length, hit, progress, sink)

    def nothing(self, hit: PrefixHit, reason: str) -> GetResult:
        """The answer of a store that cannot be reached, for those who count it as a miss."""
        failures = tuple(
            ChunkFailure(group, chunk, reason)
            for group, mask in enumerate(hit.load_masks)
            for chunk in np.flatnonzero(mask).tolist()
        )
        return GetResult(min(hit.local_tokens, hit.report.cap), failures)

    def _jobs(self, hit: PrefixHit, plan: GetPlan) -> list[ChunkJob]:
        return [
            job
            for group, mask in enumerate(plan.missing)
            for job in self._transport.jobs(hit.block_hashes, group, np.flatnonzero(mask).tolist())
        ]

    async def _read(self, jobs: Sequence[ChunkJob], sink: Sink | None, progress: _Progress) -> None:
        again: list[ChunkJob] = []

        async def move(batch: Sequence[ChunkJob], *, last: bool = False) -> None:
            for job, view, failure in await self._read_batch(batch, sink, progress):
                if failure is None:
                    progress.arrived[job.group][job.chunk] = True
                    if view is not None:
                        progress.chunks[job.group, job.chunk] = view
                elif failure.retriable and not last:
                    again.append(job)
                else:
                    self._give_up(job, failure, progress)

        async def move_again(batch: Sequence[ChunkJob]) -> None:
            await move(batch, last=True)

        ours = sink is None
        await self._transport.each_batch(jobs, move, abandonable=ours)
        await self._transport.each_batch(again, move_again, abandonable=ours)

    def _give_up(self, job: ChunkJob, failure: Failure, progress: _Progress) -> None:
        progress.present[job.group][job.chunk] = False
        progress.failures.append(ChunkFailure(job.group, job.chunk, failure.kind))
        # Under keys that others write too, they may mend it.
        if failure.kind in _DAMAGE and self._identity.owns_namespace:
            self._transport.ledger.mark_damaged(job.key)
        else:
            self._transport.ledger.mark_lost(job.key)

    async def _read_batch(
        self, batch: Sequence[ChunkJob], sink: Sink | None, progress: _Progress
    ) -> list[tuple[ChunkJob, memoryview | None, Failure | None]]:
        payloads = [self._payload(job, sink) for job in batch]
        if sink is not None:
            for job, views in zip(batch, payloads, strict=True):
                progress.places.take((job.group, job.chunk), views)
        size = self._identity.value_format.header_size
        headers = memoryview(bytearray(size * len(batch)))
        heads = [headers[number * size : (number + 1) * size] for number in range(len(batch))]
        items = [
            GetItem(job.key, (head, *payload) if size else payload)
            for job, head, payload in zip(batch, heads, payloads, strict=True)
        ]
        answers = await self._transport.store.get(items)

        def check() -> list[Failure | None]:
            return [
                answer or self._fault(job, head, payload)
                for job, head, payload, answer in zip(batch, heads, payloads, answers, strict=True)
            ]

        failures = await self._transport.compute(check)
        return [
            (job, payload[0] if sink is None else None, failure)
            for job, payload, failure in zip(batch, payloads, failures, strict=True)
        ]

    def _payload(self, job: ChunkJob, sink: Sink | None) -> Views:
        nbytes = self._identity.page_sizes[job.group]
        if sink is None:
            return (np.empty(nbytes, dtype=np.uint8).data,)
        return open_sink(sink, job.group, job.chunk, nbytes)

    def _fault(self, job: ChunkJob, head: memoryview, payload: Views) -> Failure | None:
        reason = self._identity.value_format.fault(head, job.group, job.name, payload)
        return None if reason is None else Failure(reason, False, f"{job.key!r} is damaged: {reason}")

    def _result(self, hit_length: int, hit: PrefixHit, progress: _Progress, sink: Sink | None) -> GetResult:
        layout = self._identity.layout
        loaded = Tally()
        chunks: dict[tuple[int, int], memoryview] = {}
        for group, mask in enumerate(load_mask(layout, hit_length, local_tokens=hit.local_tokens)):
            count = int(mask.sum())
            loaded += Tally(count, count * self._identity.page_sizes[group])
            if sink is None:
                chunks |= {(group, chunk): progress.chunks[group, chunk] for chunk in np.flatnonzero(mask).tolist()}
        return GetResult(hit_length, tuple(progress.failures), chunks, loaded)


def _has(masks: tuple[BoolArray, ...], where: tuple[int, int]) -> bool:
    group, chunk = where
    return chunk < len(masks[group]) and bool(masks[group][chunk])


#: What a reader finds wrong with bytes that did arrive, or with their number.
_DAMAGE = frozenset({"header", "version", "fingerprint", "group", "length", "name", "checksum"})
