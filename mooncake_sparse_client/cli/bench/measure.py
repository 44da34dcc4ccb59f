"""Measuring: two ways to do the same work side by side, how late an event loop runs, how far memory grows."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import statistics
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final, Literal, Self, TypeAlias, TypeVar

from ...waiting import settled

T = TypeVar("T")

#: What a rate counts: 10^9 bytes a second, or so many of something.
Unit: TypeAlias = Literal["GB/s", "keys/s", "lookups/s", "tokens/s", "chunks/s"]
#: Seconds between two looks at the event loop, or at this process's memory.
_LOOK_EVERY: Final = 0.001
_LOOK_AT_MEMORY_EVERY: Final = 0.02


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Side:
    """One of two ways to do a piece of work.

    ``run`` does it once and answers how many seconds that took. ``prepare`` comes before each run and is not
    timed. ``check`` comes after the first run and raises if the work was not done right.
    """

    run: Callable[[], Awaitable[float]]
    prepare: Callable[[], Awaitable[None]] = _nothing
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Our rate over theirs: above 1 we are faster."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out of one comparison: the rates of both sides, one a repeat."""

    name: str
    unit: Unit
    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratio(self) -> Ratio:
        """Taken repeat by repeat, so that what slows a whole repeat down does not count."""
        return Ratio.of([ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)])

    @property
    def typical(self) -> tuple[float, float]:
        """Our median rate, and theirs."""
        return statistics.median(self.ours), statistics.median(self.theirs)


@dataclass(frozen=True, slots=True)
class Amount:
    """How much work one run of a side is."""

    number: int
    unit: Unit

    def rate(self, seconds: float) -> float:
        return self.number / seconds / (1e9 if self.unit == "GB/s" else 1)


async def side_by_side(name: str, ours: Side, theirs: Side, amount: Amount, *, repeats: int) -> Comparison:
    """Warm both sides up, then time them ``repeats`` times.

    A repeat runs ours, theirs, theirs, ours: what drifts evenly during it weighs on both alike.
    """
    for side in (ours, theirs):
        await side.prepare()
        await side.run()
        side.check()
    rates: list[tuple[float, float]] = []
    for _ in range(repeats):
        seconds = {id(ours): 0.0, id(theirs): 0.0}
        for side in (ours, theirs, theirs, ours):
            await side.prepare()
            seconds[id(side)] += await side.run()
        rates.append((amount.rate(seconds[id(ours)] / 2), amount.rate(seconds[id(theirs)] / 2)))
    return Comparison(name, amount.unit, tuple(our for our, _ in rates), tuple(their for _, their in rates))


async def timed(work: Awaitable[object]) -> float:
    """Seconds that ``work`` takes."""
    started = perf_counter()
    await work
    return perf_counter() - started


async def timed_on_thread(work: Callable[[], object]) -> float:
    """Seconds that blocking ``work`` takes, the way to its thread and back left out."""

    def run() -> float:
        started = perf_counter()
        work()
        return perf_counter() - started

    return await on_thread(run)


async def on_thread(work: Callable[[], T]) -> T:
    """Blocking ``work``, waited for even when cancelled: native calls that outlive their store end the process."""
    return await settled(asyncio.ensure_future(asyncio.to_thread(work)))


async def in_tasks(count: int, items: Sequence[T], work: Callable[[T], Awaitable[object]]) -> None:
    """``work`` on each item, by ``count`` tasks at the same time, each with its share of the items in turn.

    All have ended when this returns or raises, cancelled or not.
    """

    async def task(share: Sequence[T]) -> None:
        for item in share:
            await work(item)

    tasks = (task(items[number::count]) for number in range(count))
    for answer in await settled(asyncio.gather(*tasks, return_exceptions=True)):
        if answer is not None:
            raise answer


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` per cent of all are not above."""
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[max(rank, 1) - 1]


class LoopDelay:
    """How late the running event loop gets to a task that is due, in milliseconds.

    ``async with LoopDelay() as delay:`` runs a task that sleeps a millisecond at a time and notes by how much
    each sleep overran. A loop that is held for long gives one large value, not many.
    """

    def __init__(self) -> None:
        self._late: list[float] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(2 * _LOOK_EVERY)  # so that a delay that goes on is seen to its end
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _look(self) -> None:
        while True:
            due = perf_counter() + _LOOK_EVERY
            await asyncio.sleep(_LOOK_EVERY)
            self._late.append(1000 * max(0.0, perf_counter() - due))

    def figures(self) -> dict[str, float]:
        """``p50``, ``p99`` and ``max``, in milliseconds."""
        late = self._late or [math.nan]
        return {"p50": percentile(late, 50), "p99": percentile(late, 99), "max": max(late)}


class MemoryGrowth:
    """By how many bytes this process's resident memory has grown at most since ``with MemoryGrowth() as growth:``.

    A thread looks a few times a second, so as not to delay what others measure; a shorter peak may be missed.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory-growth")
        self._before = self._most = resident_bytes()

    def __enter__(self) -> Self:
        self._before = self._most = resident_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_AT_MEMORY_EVERY):
            self._most = max(self._most, resident_bytes())

    @property
    def peak(self) -> int:
        return max(self._most, resident_bytes()) - self._before


def resident_bytes() -> int:
    """Bytes of this process that are in memory now, of whatever kind."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()


def machine() -> dict[str, object]:
    """What the figures depend on, of the machine they were measured on."""
    found = [line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "model name" in line]
    processor = found[0].partition(":")[2].strip() if found else "unknown"
    return {"processor": processor, "cores": os.cpu_count(), "kernel": os.uname().release}
