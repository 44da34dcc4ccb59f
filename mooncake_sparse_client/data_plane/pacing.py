"""Work on threads that holds the interpreter's lock: in turns, so that the event loop is not kept waiting."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

#: Seconds of work after which a thread lets others have the interpreter.
_TURN = 0.0003
#: Seconds that they get then: with none, this thread would have the lock back before they woke up.
_PAUSE = 0.00001


def paced(items: Iterable[T]) -> Iterator[T]:
    """The items; after each turn, other threads get the interpreter. For use on threads alone."""
    turn = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - turn > _TURN:
            time.sleep(_PAUSE)
            turn = time.perf_counter()
