"""The guard of a native client: the only way to call it, and only while that is safe.

The native library ends the process when it is called before it is set up or after it is closed, and when it is
closed under a running call. So a client has one state, every transition stands here, and every call is counted
while it runs, on one of two pools of threads (few for bytes, since each waits by spinning; more for questions)::

    NEW -> CONNECTING -> OPEN -> CLOSING -> CLOSED
                |                   |
                +-> CLOSED          +-> BROKEN

What is BROKEN could not be closed, since a call never came back or the other side does not answer; its memory and its
native client stay until the process ends (see ``leaving.py``).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import Final, TypeVar

from ..errors import ClientClosedError, ForkedProcessError
from ..waiting import held

T = TypeVar("T")


class State(Enum):
    """Of a connection; the value continues the sentence "the connection is ..."."""

    NEW = "not open yet"
    CONNECTING = "being opened"
    OPEN = "open"
    CLOSING = "being closed"
    CLOSED = "closed; connect again"
    BROKEN = "broken: it could not be closed in order; connect again"


_NEXT: Final[Mapping[State, frozenset[State]]] = {
    State.NEW: frozenset({State.CONNECTING}),
    State.CONNECTING: frozenset({State.OPEN, State.CLOSED}),
    State.OPEN: frozenset({State.CLOSING}),
    State.CLOSING: frozenset({State.CLOSED, State.BROKEN}),
    State.CLOSED: frozenset(),
    State.BROKEN: frozenset(),
}


class Guard:
    """The state of one connection, and its threads. Any thread may use it."""

    def __init__(self, where: str, *, data_threads: int, question_threads: int) -> None:
        """``where``: the other side, for messages."""
        self._where = where
        self._pid = os.getpid()
        self._state = State.NEW
        self._turn = threading.Lock()
        self._in_flight: set[Future[object]] = set()
        self._data = ThreadPoolExecutor(data_threads, thread_name_prefix="mooncake-data")
        self._questions = ThreadPoolExecutor(question_threads, thread_name_prefix="mooncake-ask")

    @property
    def state(self) -> State:
        return self._state

    @property
    def of_this_process(self) -> bool:
        """Whether this is the process that made it, and no fork of that."""
        return self._pid == os.getpid()

    def become(self, state: State) -> None:
        """Change the state. Calls that are under way go on."""
        with self._turn:
            if state not in _NEXT[self._state]:
                raise ClientClosedError(f"the connection to {self._where} is {self._state.value}")
            self._state = state

    def check(self) -> None:
        """Raises ``ClientClosedError`` outside the open state, and ``ForkedProcessError`` in a fork."""
        if self._state is not State.OPEN:
            raise ClientClosedError(f"the connection to {self._where} is {self._state.value}")
        self.check_process()

    def check_process(self) -> None:
        # Not even closing is safe there: it would end the child.
        if not self.of_this_process:
            raise ForkedProcessError(
                f"the connection to {self._where} was opened in process {self._pid} and cannot be used in its fork "
                f"{os.getpid()}; connect in the child (start it by spawn, or connect after the fork)"
            )

    async def ask(self, call: Callable[[], T], *, hold: bool = False) -> T:
        """Run a question on a thread. A cancelled wait leaves the call to itself; with ``hold`` it goes on until the
        call is back."""
        running = self._submit(self._questions, call)
        return await (held(running) if hold else asyncio.wrap_future(running))

    async def move(self, call: Callable[[], T]) -> T:
        """Run a call that works on the caller's memory on a thread: a cancelled wait goes on until it is back."""
        return await held(self._submit(self._data, call))

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Run a question that nobody waits for."""
        return self._submit(self._questions, call)

    def _submit(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
        with self._turn:
            self.check()
            running = pool.submit(call)
            self._in_flight.add(running)  # type: ignore[arg-type]  # a future of T is one of object here
        running.add_done_callback(self._in_flight.discard)
        return running

    async def drained(self, seconds: float) -> int:
        """Wait for the calls in flight, at most so long; how many are not back."""
        calls = [asyncio.wrap_future(call) for call in list(self._in_flight)]
        if not calls:
            return 0
        _, late = await asyncio.wait(calls, timeout=seconds)
        return len(late)

    def let_threads_go(self) -> None:
        """They end once they have nothing to do."""
        self._data.shutdown(wait=False)
        self._questions.shutdown(wait=False)
