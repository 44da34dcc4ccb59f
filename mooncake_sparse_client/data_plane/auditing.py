"""Carrying out a verification: read every chunk of a plan back, check it, and keep no bytes."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Sequence

import numpy as np

from ..core.plans import PutPlan
from ..core.results import ChunkFailure, VerifyResult
from ..core.tally import NOTHING, Tally
from ..stores.base import Failure
from .checking import DAMAGE, MISSING
from .ends import BufferEnd
from .movers import StagedMover
from .pressure import jittered
from .transfer import Numbers, Transport, chosen

#: Seconds before what may still come is asked for once more.
_PAUSE = 0.05


class Audit:
    """One verification under way."""

    def __init__(self, transport: Transport, plan: PutPlan, block_hashes: Sequence[bytes]) -> None:
        self._transport = transport
        self._block_hashes = block_hashes
        self._groups, self._chunks = chosen(plan.store_masks)
        #: By number, what did not arrive intact.
        self._failed: dict[int, Failure] = {}

    async def run(self) -> VerifyResult:
        """Read each chunk; what may still come is read once more."""
        await self._read(np.arange(len(self._groups)))
        late = [number for number, failure in self._failed.items() if failure.retriable]
        if late:
            await asyncio.sleep(jittered(_PAUSE))
            await self._read(np.array(late))
        return self._result()

    async def _read(self, numbers: Numbers) -> None:
        async def read(batch: slice) -> None:
            await self._read_batch(numbers[batch])

        await self._transport.each_batch(self._groups[numbers], StagedMover.pieces, read)

    async def _read_batch(self, numbers: Numbers) -> None:
        transport = self._transport
        jobs = transport.jobs(self._block_hashes, self._groups[numbers], self._chunks[numbers])
        # An end of its own, so that a batch's bytes go with it.
        mover = StagedMover(transport, BufferEnd(None, transport.identity.page_sizes))
        answers = await mover.get(jobs)
        for number, key, failure in zip(numbers.tolist(), jobs.keys, answers, strict=True):
            if failure is None:
                self._failed.pop(number, None)
                continue
            self._failed[number] = failure
            if failure.kind in DAMAGE and transport.identity.owns_namespace:
                transport.ledger.mark_damaged(key)
            elif failure.kind == MISSING:
                transport.ledger.mark_lost(key)

    def _result(self) -> VerifyResult:
        page_sizes = self._transport.identity.page_sizes
        counts = np.bincount(self._groups, minlength=len(page_sizes)).tolist()
        everything = Tally(len(self._groups), sum(map(operator.mul, counts, page_sizes)))
        wrong = {"missing": NOTHING, "damaged": NOTHING, "unread": NOTHING}
        failures = []
        for number, failure in sorted(self._failed.items()):
            group = int(self._groups[number])
            failures.append(ChunkFailure(group, int(self._chunks[number]), failure.kind))
            wrong[_outcome(failure.kind)] += Tally(1, page_sizes[group])
        return VerifyResult(everything - sum(wrong.values(), NOTHING), **wrong, failures=tuple(failures))


def _outcome(kind: str) -> str:
    if kind in DAMAGE:
        return "damaged"
    return "missing" if kind == MISSING else "unread"
