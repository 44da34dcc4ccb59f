"""BreakerStore: a wrapper that leaves a store alone while it is down, and looks whether it is back."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, ParamSpec, TypeAlias, TypeVar

from ..errors import OUT_OF_REACH, StoreDownError, StoreError
from ..resilience import DEFAULT_RESILIENCE, Resilience
from ..waiting import settled
from .base import Failure, GetItem, PutItem, RemoveOutcome, Store
from .circuit import Call, Circuit, Line, State
from .throttle import nbytes_of
from .wrapping import WrappedStore

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item", PutItem, GetItem)
Moved: TypeAlias = list[Failure | None]

logger = logging.getLogger(__name__)

#: What a key of a store that is out of reach fails with.
_TROUBLE: Final = frozenset({"transfer", "timeout", "unavailable"})
#: Seconds from which on a transfer of which nothing arrived counts as a failure. An owner that is gone refuses at
#: once: that costs nobody time, and those of other values may be well.
_SLOW: Final = 1.0
#: Bytes a second at which values may move without being taken for hung.
_SLOWEST: Final = 2 << 20


class BreakerStore(WrappedStore):
    """Refuses every call to ``store`` at once, with ``StoreDownError``, while the store is down.

    It is down after ``resilience.trip_after`` questions, or transfers, in a row that it failed as a whole; or once one
    has hung for ``hang_seconds`` (a transfer for a second more each 2 MiB under way) while no other of its kind worked.
    A transfer counts as failed, too, when every key of it failed after a second or more. ``full``, ``missing`` or a
    refusal is an answer, and a cancelled call is neither.

    While down, a refused call asks the store for its ``health``, once every ``probe_seconds``; no timer does, so that
    an idle client asks nothing. After a good answer calls pass again. If it was transfers that failed, one passes at a
    time until one has worked, and the others are refused.

    Belongs to one event loop. ``on_hang`` is called with the trouble when a call is found to hang: whoever waits for
    others under way need not wait any longer. ``health`` asks the store itself, and changes nothing.
    """

    def __init__(
        self,
        store: Store,
        resilience: Resilience = DEFAULT_RESILIENCE,
        *,
        on_hang: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(store)
        self._resilience = resilience
        self._on_hang = on_hang
        self._circuit = Circuit(resilience.trip_after)
        self._bytes_moving = 0
        self._trial: _Trial | None = None
        self._look: asyncio.Task[bool] | None = None
        self._looked_at = -math.inf
        self._settled = False

    @property
    def is_down(self) -> bool:
        """Whether every call is refused."""
        return self._circuit.state is State.OPEN

    @property
    def on_trial(self) -> bool:
        """Whether transfers are let through one at a time."""
        return self._circuit.state is State.TRIAL

    def refusal(self) -> StoreDownError | None:
        """What ``check`` would raise; None if a call would be let through."""
        if not self.is_down:
            return None
        self._look_again()
        return self.down_error()

    def check(self) -> None:
        """Raises ``StoreDownError`` if every call is refused. Like a refused call, it has the store looked at."""
        if self.is_down:
            self._look_again()
            raise self.down_error()

    def down_error(self) -> StoreDownError:
        """Says what is wrong, and since when."""
        seconds = asyncio.get_running_loop().time() - self._circuit.opened_at
        looked = (
            f"while it is asked, it is looked every {self._resilience.probe_seconds:g} s whether it is back"
            if self.is_down
            else "it answers again, and one transfer at a time shows whether values move, too"
        )
        return StoreDownError(
            f"the store was not asked, since it went down {seconds:.1f} s ago ({self._circuit.trouble}); {looked}"
        )

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        return await self._ask(self.inner.exists, keys)

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        return await self._ask(self.inner.remove, keys, force=force)

    async def remove_prefix(self, prefix: str, *, force: bool = False) -> int:
        async def remove() -> list[int]:
            return [await self.inner.remove_prefix(prefix, force=force)]

        (count,) = await self._ask(remove)
        return count

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        return await self._move(self.inner.put, items)

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        return await self._move(self.inner.get, items)

    async def settle(self, timeout: float) -> None:
        """Look no more. Ends the look that is under way, and waits for that at most ``timeout`` seconds."""
        self._settled = True
        if self._look is not None:
            self._look.cancel()
            await asyncio.wait([self._look], timeout=timeout)

    async def aclose(self) -> None:
        await self.settle(self._resilience.hang_seconds)
        self._circuit = Circuit(self._resilience.trip_after)  # who calls a closed store is to be told so
        await super().aclose()

    async def _ask(self, ask: Callable[P, Awaitable[list[T]]], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        self.check()
        call = self._begin(self._circuit.questions)
        return await self._watched(call, self._resilience.hang_seconds, ask, *args, **kwargs)

    async def _move(self, move: Callable[[Sequence[Item]], Awaitable[Moved]], items: Sequence[Item]) -> Moved:
        self.check()
        call = self._begin(self._circuit.moves)
        if not self.on_trial:
            return await self._carry(call, move, items)
        if self._trial is not None:
            raise self.down_error()
        trial = self._trial = _Trial(call, asyncio.create_task(self._carry(call, move, items)))
        trial.task.add_done_callback(self._tried)
        try:
            return await settled(trial.task, trial.leave)
        finally:
            del trial  # it knows the error: see ``settled``

    async def _carry(
        self, call: Call, move: Callable[[Sequence[Item]], Awaitable[Moved]], items: Sequence[Item]
    ) -> Moved:
        nbytes = nbytes_of(items)
        self._bytes_moving += nbytes
        try:
            patience = self._resilience.hang_seconds + self._bytes_moving / _SLOWEST
            return await self._watched(call, patience, move, items)
        finally:
            self._bytes_moving -= nbytes

    async def _watched(
        self, call: Call, patience: float, ask: Callable[P, Awaitable[list[T]]], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Make the call, and note what came of it."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(patience, self._hangs, call)
        try:
            answers = await ask(*args, **kwargs)
        except OUT_OF_REACH as error:
            self._circuit.failed(call, str(error), loop.time())
            raise
        except StoreError:
            self._circuit.worked(call, loop.time())
            raise
        finally:
            timer.cancel()
        if answers:
            self._judge(call, answers, loop.time())
        return answers

    def _judge(self, call: Call, answers: Sequence[object], now: float) -> None:
        trouble, seconds = _trouble(answers), now - call.begun
        if not trouble:
            self._circuit.worked(call, now)
        elif seconds >= _SLOW:
            self._circuit.failed(call, f"not one of {len(answers)} values moved in {seconds:.1f} s ({trouble})", now)

    def _begin(self, line: Line) -> Call:
        return self._circuit.begin(line, asyncio.get_running_loop().time())

    def _hangs(self, call: Call) -> None:
        if not self._circuit.hung(call, asyncio.get_running_loop().time()):
            return
        if self._trial is not None and self._trial.call is call:
            self._trial.hang()
            self._trial = None
        if self.is_down and self._on_hang is not None:
            self._on_hang(self._circuit.trouble)

    def _tried(self, task: asyncio.Task[Moved]) -> None:
        if self._trial is not None and self._trial.task is task:
            self._trial = None

    def _look_again(self) -> None:
        """Look whether the store is back, unless that is done just now, or was a moment ago."""
        now, pause = asyncio.get_running_loop().time(), self._resilience.probe_seconds
        if self._look is None and not self._settled and now >= max(self._looked_at, self._circuit.opened_at) + pause:
            self._looked_at = now
            self._look = asyncio.create_task(self._ask_health())
            self._look.add_done_callback(self._looked)

    async def _ask_health(self) -> bool:
        """Whether the store is back. One that does not let go of a cancelled question is not asked another one
        meanwhile."""
        try:
            async with asyncio.timeout(self._resilience.hang_seconds):
                return (await self.inner.health()).ok
        except (StoreError, TimeoutError):
            return False
        except Exception:
            logger.debug("asking a store that is down for its health failed", exc_info=True)
            return True  # closed, or used in a fork: whoever calls it is to be told so

    def _looked(self, look: asyncio.Task[bool]) -> None:
        self._look = None
        if not look.cancelled() and look.result():
            self._circuit.answers(asyncio.get_running_loop().time())


class _Trial:
    """A transfer that shows whether values move: what comes of it is wanted, also when its answer is not any more."""

    def __init__(self, call: Call, task: asyncio.Task[Moved]) -> None:
        self.call, self.task = call, task
        self._left = self._hung = False

    def leave(self) -> None:
        """Nobody waits for it any more."""
        self._left = True
        self._end()

    def hang(self) -> None:
        """It has shown what it could."""
        self._hung = True
        self._end()

    def _end(self) -> None:
        if self._left and self._hung:
            self.task.cancel()


def _trouble(answers: Sequence[object]) -> str:
    """Why not one value moved; empty where one did, or the answer is of another kind."""
    kinds = set()
    for answer in answers:
        if not isinstance(answer, Failure) or answer.kind not in _TROUBLE:
            return ""
        kinds.add(answer.kind)
    return ", ".join(sorted(kinds))
