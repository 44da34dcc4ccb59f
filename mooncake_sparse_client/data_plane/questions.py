"""Existence questions of concurrent callers, on their way to the store together.

While a request is on the wire the next gathers, and each key of it is asked for once, however many want to know. A
question never joins what was sent before it: who has written a value would otherwise be told that it is not there.
Small questions and large ones go different ways, and one that is slow does not hold up the others for long.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..config import Limits
from ..core.masks import BoolArray
from ..errors import ClientClosedError, StoreAnswerError
from ..stores.base import DistinctKeys, Store
from ..waiting import copied, run_abreast

#: What has more keys than this is large, and travels in parts side by side: a master works on several at a time.
_SMALL: Final = 1024
_ABREAST: Final = 4
#: What gathers for one request at most, in different keys, and in all: what is asked for beyond that travels next.
_MOST_KEYS: Final = 32768
_MOST_ASKED: Final = 4 * _MOST_KEYS
#: Keys that are joined, or told apart again, without a pause: some milliseconds' work.
_BREATH: Final = 16384
#: Seconds after which what gathers waits no longer for what is on the wire.
_PATIENCE: Final = 0.02
#: Requests that may be on the wire then. Large ones make ``_ABREAST`` calls each; the store's other threads are for
#: small ones.
_SMALL_ON_THE_WIRE: Final = 4
_LARGE_ON_THE_WIRE: Final = 2


@dataclass(slots=True, eq=False)
class _Question:
    keys: Sequence[str]
    answer: asyncio.Future[BoolArray]
    #: Where the answers to its keys stand among those to the request; None: they are the only ones.
    places: NDArray[np.intp] | None = None
    #: The request that it has joined.
    request: _Request | None = None


@dataclass(slots=True, eq=False)
class _Request:
    questions: list[_Question] = field(default_factory=list)
    #: How many of them somebody waits for.
    wanted: int = 0
    task: asyncio.Task[None] | None = None

    def join(self, question: _Question) -> None:
        self.questions.append(question)
        self.wanted += 1
        question.request = self

    def leave(self) -> None:
        """One who asked waits no longer. What nobody waits for is given up: where it has not begun, behind a
        throttle, it must not keep others waiting."""
        self.wanted -= 1
        if not self.wanted and self.task is not None:
            self.task.cancel()

    def end(self, error: BaseException | None) -> None:
        """Tell all who still wait of ``error``, and know of nobody any more: an error knows the frames it came
        through, which must not know it."""
        if error is not None:
            for question in self.questions:
                _fail(question, copied(error))
        self.questions.clear()
        self.task = None


class Questions:
    """The ways of one client's existence questions to ``store``. Belongs to one event loop."""

    def __init__(self, store: Store, limits: Limits) -> None:
        counted = limits.requests_per_second is not None
        self._small = _Way(store, limits, 1 if counted else _SMALL_ON_THE_WIRE)
        # Where requests are counted, there are as few as may be.
        self._large = self._small if counted else _Way(store, limits, _LARGE_ON_THE_WIRE)
        self._closed = False

    async def ask(self, keys: Sequence[str]) -> BoolArray:
        """Which of the keys, all different, have a value.

        A cancelled question is dropped; what nobody waits for any more is given up. Raises what the store raises, and
        ``ClientClosedError``.
        """
        if self._closed:
            raise ClientClosedError.during_a_call()
        if not keys:
            return np.zeros(0, dtype=np.bool_)
        return await (self._small if len(keys) <= _SMALL else self._large).ask(keys)

    async def settle(self, timeout: float) -> None:
        """Refuse what waits and whatever comes, and wait at most ``timeout`` seconds for what is on the wire."""
        self._closed = True
        tasks = [*self._small.close(), *self._large.close()]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)


class _Way:
    """Questions of a kind, joined request by request, first come first served."""

    def __init__(self, store: Store, limits: Limits, on_the_wire: int) -> None:
        """``on_the_wire``: requests at a time; more than one if those before have taken too long."""
        self._store = store
        self._most = limits.max_batch_keys
        self._whole = self._most if on_the_wire == 1 else min(_SMALL, self._most)
        self._on_the_wire = on_the_wire
        self._waiting: deque[_Question] = deque()
        self._wire: set[_Request] = set()
        #: The request that what gathers waits for.
        self._fresh: _Request | None = None
        self._due: asyncio.Handle | None = None

    async def ask(self, keys: Sequence[str]) -> BoolArray:
        question = _Question(keys, asyncio.get_running_loop().create_future())
        self._waiting.append(question)
        self._soon()
        try:
            return await question.answer
        finally:
            if question.answer.cancelled() and question.request is not None:
                question.request.leave()
            del question  # see ``_Request.end``

    def close(self) -> list[asyncio.Task[None]]:
        """Refuse what waits; what is on the wire is answered."""
        for question in self._waiting:
            _fail(question, ClientClosedError.during_a_call())
        self._waiting.clear()
        if self._due is not None:
            self._due.cancel()
            self._due = None
        return [request.task for request in self._wire if request.task is not None]

    def _soon(self) -> None:
        """Send once all that is ready to run has run: what is asked at the same moment travels together."""
        if self._waiting and self._due is None and self._fresh is None and len(self._wire) < self._on_the_wire:
            self._due = asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._due, request = None, _Request()
        request.task = asyncio.get_running_loop().create_task(self._carry(request))
        request.task.add_done_callback(functools.partial(self._arrived, request))
        self._wire.add(request)
        self._fresh = request

    def _pass_by(self, request: _Request) -> None:
        """Let the next request go, although this one is not back."""
        if self._fresh is request:
            self._fresh = None
            self._soon()

    def _arrived(self, request: _Request, task: asyncio.Task[None]) -> None:
        self._wire.discard(request)
        request.end(ClientClosedError.during_a_call() if task.cancelled() else task.exception())
        self._pass_by(request)
        self._soon()

    async def _carry(self, request: _Request) -> None:
        keys = await self._join(request)
        patience = asyncio.get_running_loop().call_later(_PATIENCE, self._pass_by, request)
        try:
            answers = await self._ask_store(keys)
        finally:
            patience.cancel()
        work = 0
        for question in request.questions:
            if not question.answer.done():
                question.answer.set_result(answers if question.places is None else answers[question.places])
            work += len(question.keys)
            if work >= _BREATH:
                work = 0
                await asyncio.sleep(0)

    async def _join(self, request: _Request) -> Sequence[str]:
        """The next questions' keys, each once. More may come while this goes on: nothing is sent yet."""
        places: dict[str, int] = {}
        asked = work = 0
        while self._waiting and len(places) < _MOST_KEYS and asked < _MOST_ASKED:
            question = self._waiting.popleft()
            if question.answer.done():
                continue  # cancelled
            request.join(question)
            asked += len(question.keys)
            if not places and not self._waiting:
                return question.keys
            question.places = np.empty(len(question.keys), dtype=np.intp)
            for first in range(0, len(question.keys), _BREATH):
                some = question.keys[first : first + _BREATH]
                numbers = [places.setdefault(key, len(places)) for key in some]
                question.places[first : first + len(some)] = numbers
                work += len(some)
                if work >= _BREATH:
                    work = 0
                    await asyncio.sleep(0)
        return list(places)

    async def _ask_store(self, keys: Sequence[str]) -> BoolArray:
        count = len(keys)
        if count <= self._whole:
            return np.array(await self._checked(keys) if keys else [], dtype=np.bool_)
        size = max(self._whole, min(self._most, -(-count // _ABREAST)))
        parts = [keys[start : start + size] for start in range(0, count, size)]
        answers: list[list[bool]] = [[]] * len(parts)

        async def ask(number: int) -> None:
            answers[number] = await self._checked(parts[number])

        await run_abreast(_ABREAST, range(len(parts)), ask)
        return np.fromiter(chain.from_iterable(answers), np.bool_, count)

    async def _checked(self, keys: Sequence[str]) -> list[bool]:
        answers = await self._store.exists(DistinctKeys(keys))
        if len(answers) != len(keys):
            raise StoreAnswerError(f"{len(answers)} answers came back for {len(keys)} keys")
        return answers


def _fail(question: _Question, error: BaseException) -> None:
    if not question.answer.done():
        question.answer.set_exception(error)
