"""Keeping on at a store that is out of reach, or full, for a while."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Final, TypeVar

from ..data_plane.pressure import jittered
from ..errors import StoreError

T = TypeVar("T")

#: Seconds between attempts.
_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 10.0


class StoppedError(Exception):
    """The run is to end here; ``str()`` of it says why."""


class Stop:
    """A request to end a run, which whoever pauses notices at once. ``is_set`` may be looked at from other threads."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    async def pause(self, seconds: float) -> float:
        """Wait about so long, or until somebody wants an end; how long to wait the next time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(jittered(seconds)):
                await self._event.wait()
        return min(2 * seconds, _LONGEST_PAUSE)


class Patience:
    """Tries again what may succeed later, for ``seconds`` from its first failure on.

    A client's own retries end with its call, some seconds later; a job has the night. ``tell`` is called with a
    sentence when trouble begins, and when it is over.
    """

    def __init__(self, seconds: float, stop: Stop, tell: Callable[[str], object]) -> None:
        self._seconds = seconds
        self._stop = stop
        self._tell = tell
        #: Calls that are being tried again, and since when there are any.
        self._troubled = 0
        self._since = 0.0
        self._waited = 0.0

    @property
    def seconds_waited(self) -> float:
        """In which at least one call was being tried again."""
        return self._waited + (time.monotonic() - self._since if self._troubled else 0.0)

    async def keep_on(self, call: Callable[[], Coroutine[None, None, T]]) -> T:
        """``call`` until it succeeds. Raises what it raises when patience ends, or at once what no time cures."""
        try:
            return await call()
        except StoreError as error:
            if not error.retriable or self._stop.is_set:
                raise
            self._begin(str(error))
        went_well = False
        try:
            answer = await self._again(call)
            went_well = True
            return answer
        finally:
            self._end(went_well=went_well)

    async def _again(self, call: Callable[[], Coroutine[None, None, T]]) -> T:
        deadline, pause = time.monotonic() + self._seconds, _FIRST_PAUSE
        while True:
            pause = await self._stop.pause(pause)
            try:
                return await call()
            except StoreError as error:
                if not error.retriable or self._stop.is_set or time.monotonic() >= deadline:
                    raise

    def _begin(self, trouble: str) -> None:
        self._troubled += 1
        if self._troubled == 1:
            self._since = time.monotonic()
            self._tell(f"{trouble}; trying again for up to {self._seconds:.0f} s")

    def _end(self, *, went_well: bool) -> None:
        self._troubled -= 1
        if not self._troubled:
            self._waited += time.monotonic() - self._since
            if went_well:
                self._tell("going on")
