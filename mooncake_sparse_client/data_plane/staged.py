"""One batch of values in a staging slot."""

from __future__ import annotations

import numpy as np

from ..core.framing import payload_checksum
from ..stores.base import PlacedPuts
from ..views import copy_bytes, scatter
from .checking import Bytes, Views, checked, framed
from .ends import Pieces
from .lane import Answers, Batch, Ride
from .pacing import paced
from .transfer import Jobs, Transport


class StagedBatch:
    """The values of ``jobs``, one after another in a slot that is taken for as long as the block runs.

    A native call that nobody waits for any more goes on with the slot, which comes back when it ends.
    """

    def __init__(self, transport: Transport, jobs: Jobs) -> None:
        self._transport = transport
        self._jobs = jobs
        self._head = transport.identity.value_format.header_size
        sizes = transport.value_sizes[jobs.groups]
        ends = np.cumsum(sizes)
        self._sizes: list[int] = sizes.tolist()
        self._starts: list[int] = (ends - sizes).tolist()
        self._nbytes = int(ends[-1])
        self._ride: Ride | None = None

    async def __aenter__(self) -> StagedBatch:
        self._staging = self._transport.staging
        self._slot = await self._staging.take(self._nbytes)
        return self

    async def __aexit__(self, *_: object) -> None:
        staging, slot = self._staging, self._slot
        task = None if self._ride is None else self._ride.under_way
        if task is None:
            staging.give_back(slot)
        else:
            task.add_done_callback(lambda _: staging.give_back(slot))
            if self._ride is not None and isinstance(self._ride.batch, PlacedPuts):
                self._transport.leave_writing(self._jobs.keys, task)

    async def carry(self, batch: Batch) -> Answers:
        """Send ``batch``, which lies in the slot. A cancelled call does not wait for the store."""
        self._ride = self._transport.lane.enter(batch)
        try:
            return await self._ride.answer
        finally:
            if self._ride.answer.cancelled():
                self._transport.lane.leave(self._ride)

    def columns(self) -> tuple[list[str], list[int], list[int], int]:
        """What ``Places`` is made of: each value is in one piece."""
        return self._jobs.keys, [self._slot.address + start for start in self._starts], self._sizes, self._nbytes

    def fill(self, pieces: Pieces) -> None:
        """Copy the payloads in, and write their headers. The checksum is of the copy: of what is stored."""
        sums: list[int] = []
        for number in paced(range(len(self._starts))):
            payload = self._payload(number)
            _gather(payload[0], pieces(number))
            if self._head:
                sums.append(payload_checksum(payload))
        if self._head:
            framed(self._transport.identity, self._jobs, sums, self._heads)

    def deliver(self, pieces: Pieces, answers: Answers) -> Answers:
        """Check what has arrived, and copy what is intact to where it belongs."""

        def copy(number: int) -> None:
            scatter(self._payload(number)[0], pieces(number))

        if self._head:
            return checked(self._transport.identity, self._jobs, self._heads, self._payload, answers, copy)
        for number in paced([number for number, answer in enumerate(answers) if answer is None]):
            copy(number)
        return answers

    def _payload(self, number: int) -> Views:
        start = self._starts[number]
        return (self._slot.view[start + self._head : start + self._sizes[number]],)

    def _heads(self, run: slice) -> Bytes:
        """The headers of a run, whose values are of one size, one a row."""
        start, size = self._starts[run.start], self._sizes[run.start]
        rows = self._slot.array[start : start + size * (run.stop - run.start)].reshape(-1, size)
        return rows[:, : self._head]


def _gather(target: memoryview, pieces: Views) -> None:
    start = 0
    for piece in pieces:
        copy_bytes(target[start : start + piece.nbytes], piece)
        start += piece.nbytes
