"""Waiting in asyncio without leaving anything behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import TypeVar

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
        raise cancelled
    return answer.result()


async def held(running: Future[T]) -> T:
    """Wait for work on a thread until it is over, or is cancelled before a thread has begun it.

    For work on memory that the caller owns: a cancellation is raised once the memory is no longer touched.
    """
    return await settled(asyncio.wrap_future(running), running.cancel)


async def run_all(calls: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Run the calls side by side and answer in their order. The first error cancels the others, is waited
    out, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]
