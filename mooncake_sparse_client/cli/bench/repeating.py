"""Sides whose work is over within milliseconds: done again and again, and timed as a whole."""

from __future__ import annotations

import reprlib
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Final, Generic, TypeVar

from ...errors import StoreAnswerError
from .measure import Side, on_thread
from .session import Effort

T = TypeVar("T")

#: For how long one run of a side goes on at least: long requests are stalled now and then by tens of milliseconds,
#: which every run should see about as much of.
_RUN_SECONDS: Final = 0.08


class _Calls(Generic[T]):
    """The calls of one run, counted and timed, and the answer of the last."""

    def __init__(self, effort: Effort, what: str, right: Callable[[T], bool]) -> None:
        self._least = _RUN_SECONDS * effort.scale
        self._what, self._right = what, right
        self._latest: list[T] = []
        self.begin()

    def begin(self) -> None:
        self._count, self._started = 0, perf_counter()

    def end(self, answer: T) -> float | None:
        """One call is over. The mean seconds of all, once they took long enough together."""
        self._latest[:] = [answer]
        self._count += 1
        seconds = perf_counter() - self._started
        return seconds / self._count if seconds >= self._least else None

    def check(self) -> None:
        if not self._right(self._latest[0]):
            raise StoreAnswerError(f"{self._what} has a wrong answer: {reprlib.repr(self._latest[0])}")


def repeated(effort: Effort, what: str, work: Callable[[], Awaitable[T]], right: Callable[[T], bool]) -> Side:
    """A side that awaits ``work``. A run answers the mean seconds of one call. ``right``: whether an answer is."""
    calls = _Calls(effort, what, right)

    async def run() -> float:
        calls.begin()
        while (seconds := calls.end(await work())) is None:
            pass
        return seconds

    return Side(run, check=calls.check)


def repeated_on_thread(effort: Effort, what: str, work: Callable[[], T], right: Callable[[T], bool]) -> Side:
    """The same of blocking ``work``; the way to its thread and back is left out."""
    calls = _Calls(effort, what, right)

    def call() -> float:
        calls.begin()
        while (seconds := calls.end(work())) is None:
            pass
        return seconds

    async def run() -> float:
        return await on_thread(call)

    return Side(run, check=calls.check)
