"""Waiting in asyncio without leaving anything behind."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

from .errors import StoreDownError, StoreTimeoutError

T = TypeVar("T")


async def settled(answer: asyncio.Future[T], on_cancel: Callable[[], object] | None = None) -> T:
    """Wait until ``answer`` is there, also when cancelled meanwhile; a cancellation is raised afterwards.

    ``on_cancel`` is called at each cancellation, to hurry what can be hurried.
    """
    cancelled: asyncio.CancelledError | None = None
    while not answer.done():
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError as error:
            cancelled = error
            if on_cancel is not None:
                on_cancel()
    if cancelled is not None:
        if not answer.cancelled():
            answer.exception()  # seen; the cancellation is what the caller asked for
        try:
            raise cancelled
        finally:
            del cancelled  # a frame that knows its own error keeps all of the call's memory until a collection
    try:
        return answer.result()
    finally:
        del answer, on_cancel  # as above


async def held(running: Future[T]) -> T:
    """Wait for work on a thread until it is over, or is cancelled before a thread has begun it.

    For work on memory that the caller owns: a cancellation is raised once the memory is no longer touched.
    """
    try:
        return await settled(asyncio.wrap_future(running), running.cancel)
    finally:
        del running  # it knows its error: see ``settled``


@contextmanager
def one_thread(name: str) -> Iterator[ThreadPoolExecutor]:
    """An executor of one thread for a block on the event loop, which waits for all that it submits."""
    executor = ThreadPoolExecutor(1, name)
    try:
        yield executor
    finally:
        executor.shutdown(wait=False)  # it is idle by now; to wait for its end would block the event loop


class Bound:
    """A block that may take ``seconds``. ``what`` it does, and has done ``so_far``, stand in the error. It is one of
    ``blocks`` while it runs.

    Raises ``StoreTimeoutError``, and ``StoreDownError`` if it is cut; a time-out of the block's own passes through.
    """

    __slots__ = ("_blocks", "_down", "_seconds", "_so_far", "_timeout", "_what")

    def __init__(self, seconds: float, what: str, so_far: Callable[[], str], blocks: set[Bound]) -> None:
        self._seconds, self._what, self._so_far, self._blocks = seconds, what, so_far, blocks
        self._down = ""

    def cut(self, down: str) -> None:
        """End the block now, since the store is down in this way."""
        if not self._timeout.expired():
            self._down = down
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> None:
        self._timeout = asyncio.timeout(self._seconds)
        await self._timeout.__aenter__()
        self._blocks.add(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocks.discard(self)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as reason:
            if self._down:
                raise StoreDownError(f"{self._what}: {self._down}{self._so_far()}") from reason
            message = f"{self._what}: not done within {self._seconds:g} s{self._so_far()}"
            raise StoreTimeoutError(message) from reason


async def run_all(calls: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Run the calls side by side and answer in their order.

    The first error cancels the others, is waited out, and is raised as it is. So is a cancellation of the
    caller, which goes before any error: whoever cancels must see it. (A TaskGroup wraps errors, and cancels its
    parent for them, which on Python 3.11 breaks a time-out around the caller.)
    """
    tasks = [asyncio.ensure_future(call) for call in calls]

    def stop() -> None:
        for task in tasks:
            task.cancel()

    def stop_others(task: asyncio.Future[T]) -> None:
        if not task.cancelled() and task.exception() is not None:
            stop()

    for task in tasks:
        task.add_done_callback(stop_others)
    answers = await settled(asyncio.gather(*tasks, return_exceptions=True), stop)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if not errors:
        return [task.result() for task in tasks]
    try:
        # What was cancelled for an error says nothing: the error itself goes first.
        raise min(errors, key=lambda error: isinstance(error, asyncio.CancelledError))
    finally:
        tasks.clear()  # they know the error too: see ``settled``
        del answers, errors


async def run_abreast(most: int, items: Sequence[T], work: Callable[[T], Coroutine[None, None, None]]) -> None:
    """``work`` on each of the items, at most so many at a time and in their order. Errors are those of ``run_all``."""
    left = iter(items)

    async def take() -> None:
        for item in left:
            await work(item)

    await run_all(take() for _ in range(min(most, len(items))))


def copied(error: BaseException) -> BaseException:
    """An error for one of several who raise it: each adds to its traceback."""
    try:
        own = copy.copy(error)
    except Exception:
        return error
    own.__cause__, own.__context__ = error.__cause__, error.__context__
    own.__suppress_context__ = error.__suppress_context__
    return own.with_traceback(error.__traceback__)
