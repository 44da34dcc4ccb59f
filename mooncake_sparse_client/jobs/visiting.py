"""Coming to stretches one after another, each with what the store lacks of it; the next are asked for meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..client import SparseStoreClient
from ..core.layout import KVCacheLayout
from ..core.masks import BoolArray
from ..core.plans import PutPlan
from ..core.results import VerifyResult
from ..core.sequence import TokenSequence
from ..core.tally import NOTHING
from ..waiting import held, run_abreast, settled
from .corpus import Corpus
from .options import JobOptions
from .planning import JobPlanner
from .steady import Patience
from .tree import Stretch

T = TypeVar("T")
#: Stretches that are asked for together, and the tokens of all their paths at most.
_TOGETHER: Final = 64
_TOKENS_TOGETHER: Final = 1 << 20
#: Stretches that are read back at a time.
_READ_ABREAST: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """One stretch, come to."""

    stretch: Stretch
    layout: KVCacheLayout
    #: Of its whole path, hashed.
    sequence: TokenSequence
    token_ids: NDArray[np.int64]
    #: Chunks of the stretch that are worth storing and that the store lacks: one boolean array a group.
    missing: tuple[BoolArray, ...]
    #: 16 bytes that name the stretch, and what of it is kept.
    mark: bytes

    @property
    def lacks_some(self) -> bool:
        return any(mask.any() for mask in self.missing)

    @property
    def first_missing(self) -> int:
        """Where the missing begins, in tokens, aligned."""
        starts = [
            int(np.argmax(mask)) * spec.block_size
            for spec, mask in zip(self.layout.groups, self.missing, strict=True)
            if mask.any()
        ]
        return self.layout.align(min(starts))

    @property
    def end_of_missing(self) -> int:
        """Where it ends, in tokens, aligned."""
        ends = [
            (int(np.flatnonzero(mask)[-1]) + 1) * spec.block_size
            for spec, mask in zip(self.layout.groups, self.missing, strict=True)
            if mask.any()
        ]
        return -(-max(ends) // self.layout.alignment) * self.layout.alignment

    def beginning(self, num_tokens: int) -> TokenSequence:
        """The first tokens of the path, as a sequence of their own."""
        ids = self.token_ids[:num_tokens]
        return TokenSequence(self.sequence.hasher, ids, cache_salt=self.stretch.cache_salt)


class Visitor:
    """Finds out what the store lacks of a corpus's stretches. ``files``: the one thread that reads the corpus."""

    def __init__(
        self,
        client: SparseStoreClient,
        corpus: Corpus,
        planner: JobPlanner,
        patience: Patience,
        files: ThreadPoolExecutor,
        options: JobOptions,
    ) -> None:
        self.layout = corpus.layout
        self._client = client
        self._corpus = corpus
        self._planner = planner
        self._patience = patience
        self._files = files
        self._part_tokens = max(corpus.layout.align(options.step_tokens), corpus.layout.alignment)
        # So that one part can be computed while another is being put.
        self._part_bytes = options.max_bytes_pending // 2
        self._read_back = options.read_back

    def parts(self, stretch: Stretch, start: int, end: int) -> Iterator[PutPlan]:
        """What to keep of tokens ``[start, end)`` of a stretch: so many tokens, and bytes, at a time."""
        while start < end:
            stop = min(start + self._part_tokens, end)
            plan = self._planner.plan(stretch, start, stop)
            while sum(plan.reachable, NOTHING).bytes > self._part_bytes and stop - start > self.layout.alignment:
                stop = start + max(self.layout.align((stop - start) // 2), self.layout.alignment)
                plan = self._planner.plan(stretch, start, stop)
            yield plan
            start = stop

    async def visits(self, stretches: Sequence[Stretch]) -> AsyncGenerator[Visit, None]:
        """All of them, in their order. To be closed."""
        batches = _batches(stretches, self.layout.alignment)
        ahead: asyncio.Task[list[Visit]] | None = None
        try:
            for batch in batches:
                following = asyncio.create_task(self._look(batch))
                ready, ahead = ahead, following
                for visit in await ready if ready is not None else ():
                    yield visit
            for visit in await ahead if ahead is not None else ():
                yield visit
        finally:
            if ahead is not None:
                ahead.cancel()
                await settled(asyncio.gather(ahead, return_exceptions=True))

    async def _look(self, batch: Sequence[Stretch]) -> list[Visit]:
        """The visits of a batch; what they ask the store travels together."""

        def read() -> list[tuple[TokenSequence, NDArray[np.int64], PutPlan]]:
            found = []
            for stretch in batch:
                sequence = self._corpus.sequence(stretch)
                found.append((sequence, sequence.token_ids, self._planner.plan(stretch)))
            return found

        ready = await self._on_thread(read)
        visits: list[Visit | None] = [None] * len(batch)

        async def look(number: int) -> None:
            stretch, (sequence, ids, plan) = batch[number], ready[number]
            missing = await self._missing_of(stretch, sequence, plan)
            visits[number] = Visit(stretch, self.layout, sequence, ids, missing, mark_of(stretch, plan))

        # Values are read a few at a time, so that each read has its time; questions travel together.
        await run_abreast(_READ_ABREAST if self._read_back else len(batch), range(len(batch)), look)
        return [visit for visit in visits if visit is not None]

    async def read_all(self, stretches: Sequence[Stretch], note: Callable[[Stretch, list[VerifyResult]], None]) -> None:
        """Read all of them back, some at a time, and ``note`` what each shows."""

        async def read(stretch: Stretch) -> None:
            note(stretch, await self.read_back(stretch))

        await run_abreast(_READ_ABREAST, stretches, read)

    def mark(self, stretch: Stretch) -> bytes:
        """``Visit.mark`` of a stretch that was not come to."""
        return mark_of(stretch, self._planner.plan(stretch))

    async def _missing_of(self, stretch: Stretch, sequence: TokenSequence, plan: PutPlan) -> tuple[BoolArray, ...]:
        if not self._read_back:
            return await self.missing(sequence, plan)
        missing = tuple(map(np.zeros_like, plan.store_masks))
        for verified in await self.read_back(stretch, sequence):
            for failure in verified.failures:
                missing[failure.group][failure.chunk] = True
        return missing

    async def read_back(self, stretch: Stretch, sequence: TokenSequence | None = None) -> list[VerifyResult]:
        """What reading all of its chunks shows, part by part, since a call has but so much time."""
        known = await self._on_thread(lambda: self._corpus.sequence(stretch)) if sequence is None else sequence
        size = self.layout.alignment

        async def verify(part: PutPlan) -> VerifyResult:
            return await self._patience.keep_on(lambda: self._client.verify(known, plan=part))

        return [await verify(part) for part in self.parts(stretch, stretch.start * size, stretch.end * size)]

    async def missing(self, sequence: TokenSequence, plan: PutPlan) -> tuple[BoolArray, ...]:
        """What the store lacks of what a plan keeps."""
        present = await self._patience.keep_on(lambda: self._client.exists(sequence, plan=plan))
        return tuple(mask & ~there for mask, there in zip(plan.store_masks, present, strict=True))

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await held(self._files.submit(call))


def mark_of(stretch: Stretch, plan: PutPlan) -> bytes:
    """16 bytes that name a stretch, and what of it is kept: another retention makes it other work."""
    return xxhash.xxh3_128_digest(stretch.name + b"".join(mask.tobytes() for mask in plan.store_masks))


def _batches(stretches: Sequence[Stretch], alignment: int) -> Iterator[list[Stretch]]:
    batch: list[Stretch] = []
    tokens = 0
    for stretch in stretches:
        if batch and (len(batch) == _TOGETHER or tokens >= _TOKENS_TOGETHER):
            yield batch
            batch, tokens = [], 0
        batch.append(stretch)
        tokens += stretch.end * alignment
    if batch:
        yield batch
