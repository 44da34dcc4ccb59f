"""Existence questions of concurrent callers, on their way to the store together.

While some are on the wire the next gather, and then travel at once, each key asked for once however many want to
know. A question never joins one that was sent before it: who has written a value would otherwise be told that it is
not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np

from ..config import Limits
from ..core.masks import BoolArray
from ..errors import ClientClosedError, StoreAnswerError
from ..stores.base import DistinctKeys, Store
from ..waiting import copied, run_all

#: What has more keys than this travels in requests side by side: a master works on several at a time.
_WHOLE: Final = 1024
_ABREAST: Final = 4


@dataclass(slots=True, eq=False)
class _Question:
    keys: Sequence[str]
    answer: asyncio.Future[BoolArray]
    #: Where the answers to its keys stand among those of all on the wire; None: they are the only ones.
    places: list[int] | None = None


class Questions:
    """The way of one client's existence questions to ``store``. Belongs to one event loop."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._most = limits.max_batch_keys
        # Where requests are counted, there are as few as may be.
        self._whole = self._most if limits.requests_per_second is not None else min(_WHOLE, self._most)
        self._waiting: list[_Question] = []
        #: What is on the wire, and the task that ends with it.
        self._sent: list[_Question] = []
        self._task: asyncio.Task[list[bool]] | None = None
        self._due: asyncio.Handle | None = None
        self._closed = False

    async def ask(self, keys: Sequence[str]) -> BoolArray:
        """Which of the keys, all different, have a value.

        A cancelled question is dropped; what nobody waits for any more is given up. Raises what the store raises, and
        ``ClientClosedError``.
        """
        if self._closed:
            raise ClientClosedError("the client was closed during this call")
        if not keys:
            return np.zeros(0, dtype=np.bool_)
        question = _Question(keys, asyncio.get_running_loop().create_future())
        self._waiting.append(question)
        self._soon()
        try:
            return await question.answer
        finally:
            if question.answer.cancelled():
                self._give_up_unwanted()

    async def settle(self, timeout: float) -> None:
        """Refuse what waits and whatever comes, and wait at most ``timeout`` seconds for what is on the wire."""
        self._closed = True
        for question in self._waiting:
            _fail(question, ClientClosedError("the client was closed during this call"))
        self._waiting = []
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout)

    def _soon(self) -> None:
        """Send once all that is ready to run has run: what is asked at the same moment travels together."""
        if self._task is None and self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._due = None
        self._sent, self._waiting = [question for question in self._waiting if not question.answer.done()], []
        if self._sent:
            self._task = asyncio.get_running_loop().create_task(self._ask_store(_joined(self._sent)))
            self._task.add_done_callback(self._arrived)

    async def _ask_store(self, keys: Sequence[str]) -> list[bool]:
        if len(keys) <= self._whole:
            return await self._checked(keys)
        size = max(self._whole, min(self._most, -(-len(keys) // _ABREAST)))
        parts = [keys[start : start + size] for start in range(0, len(keys), size)]
        answers: list[list[bool]] = [[]] * len(parts)
        left = iter(range(len(parts)))

        async def work() -> None:
            for number in left:
                answers[number] = await self._checked(parts[number])

        await run_all(work() for _ in range(min(_ABREAST, len(parts))))
        return list(chain.from_iterable(answers))

    async def _checked(self, keys: Sequence[str]) -> list[bool]:
        answers = await self._store.exists(DistinctKeys(keys))
        if len(answers) != len(keys):
            raise StoreAnswerError(f"{len(answers)} answers came back for {len(keys)} keys")
        return answers

    def _arrived(self, task: asyncio.Task[list[bool]]) -> None:
        questions, self._sent, self._task = self._sent, [], None
        if self._waiting:
            self._soon()
        error = ClientClosedError("the question was given up") if task.cancelled() else task.exception()
        if error is not None:
            for question in questions:
                _fail(question, copied(error))
            return
        answers = np.array(task.result(), dtype=np.bool_)
        for question in questions:
            if not question.answer.done():
                question.answer.set_result(answers if question.places is None else answers[question.places])

    def _give_up_unwanted(self) -> None:
        """A throttled request that has not begun must not keep others waiting for an answer that nobody wants."""
        if self._task is not None and all(question.answer.cancelled() for question in self._sent):
            self._task.cancel()


def _joined(questions: Sequence[_Question]) -> Sequence[str]:
    """The keys of all, each once; each question learns where its own are."""
    if len(questions) == 1:
        return questions[0].keys
    places: dict[str, int] = {}
    for question in questions:
        question.places = [places.setdefault(key, len(places)) for key in question.keys]
    return list(places)


def _fail(question: _Question, error: BaseException) -> None:
    if not question.answer.done():
        question.answer.set_exception(error)
