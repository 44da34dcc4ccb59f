"""Backpressure: while the store is full, a client's puts go one batch at a time, with pauses that grow."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Final

#: Seconds between attempts at a full store: eviction makes room within milliseconds, an expiring lease within seconds.
FIRST_PAUSE: Final = 0.01
LONGEST_PAUSE: Final = 1.0


def jittered(pause: float) -> float:
    """Seconds, somewhat less than ``pause``: so spread the attempts of many clients."""
    return pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


class Backpressure:
    """Whether a client's puts may be sent. Belongs to one event loop; times are those of ``time.monotonic``.

    A batch of which a full store refuses something holds back all that comes after it: in the order in which they
    asked, one turn is given, then after a pause the next. The pauses grow while nothing is taken, and all goes on once
    a batch is.
    """

    def __init__(self) -> None:
        self._pause = self._until = 0.0
        self._era = 0
        self._turns = asyncio.Lock()
        self._eased = asyncio.Event()

    @property
    def holds(self) -> bool:
        """Whether the store counts as full."""
        return self._pause > 0

    async def turn(self, deadline: float) -> Turn | None:
        """Leave to send, once it is one's turn; None if it is not by ``deadline``."""
        if not self.holds:
            return Turn(self, self._era)
        try:
            async with asyncio.timeout(deadline - time.monotonic()), self._turns:
                while self.holds and (left := self._until - time.monotonic()) > 0:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(left):
                            await self._eased.wait()
                self._until = time.monotonic() + jittered(self._pause)
                return Turn(self, self._era)
        except TimeoutError:
            return None

    def refused(self, turn: Turn, *, wholly: bool) -> None:
        """There was no room for a batch, or not ``wholly``. Batches that are refused side by side are one refusal."""
        if turn.era != self._era:
            return
        self._era += 1
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if self.holds and wholly else FIRST_PAUSE
        self._until = time.monotonic() + jittered(self._pause)
        self._eased.clear()

    def accepted(self, turn: Turn) -> None:
        """A batch was taken."""
        if self.holds and turn.era == self._era:
            self._era += 1
            self._pause = self._until = 0.0
            self._eased.set()


class Turn:
    """Leave to send: one batch in any case, and others as long as nothing speaks against it."""

    __slots__ = ("_pressure", "_used", "era", "stopped")

    def __init__(self, pressure: Backpressure, era: int) -> None:
        self._pressure = pressure
        self._used = False
        #: What was known when it was given.
        self.era = era
        #: Whether nothing more is to be sent.
        self.stopped = False

    def may_send(self) -> bool:
        """Whether a batch may be sent now; it must be, then."""
        first, self._used = not self._used, True
        return not self.stopped and (first or not self._pressure.holds)
