"""Looks every second whether an owner process still knows the memory that is shared with it, and shares it anew."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Future
from typing import Final

from ..errors import ClientClosedError, ForkedProcessError, StoreUnavailableError
from .guard import Guard, State
from .sharing import Sharing

logger = logging.getLogger(__name__)

#: Seconds between two looks; what is lost is noticed within this, or by the first transfer that is refused.
_PERIOD: Final = 1.0


class Keeper:
    """Keeps one connection's ``sharing`` mended. It looks from the event loop that last used the connection."""

    def __init__(self, guard: Guard, sharing: Sharing) -> None:
        self._guard = guard
        self._sharing = sharing
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: asyncio.TimerHandle | None = None
        self._trouble = ""

    def watch(self) -> None:
        """Look from now on, from this event loop. Costs nothing where that is so already."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self.stop()
            self._loop = loop
            self._next = loop.call_later(_PERIOD, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._next is not None and self._loop is not None and not self._loop.is_closed():
            self._next.cancel()
        self._loop = self._next = None

    async def mend(self) -> bool:
        """Whether the memory was lost, and is shared anew: what was refused may be tried again.

        Raises ``StoreUnavailableError`` where it is lost and cannot be shared anew for now.
        """
        return await self._guard.ask(self._sharing.mend, hold=True)

    def _look(self) -> None:
        """One look at a time: where the owner hangs, the next one waits for it."""
        try:
            look = self._guard.start(self._sharing.mend)
        except (ClientClosedError, ForkedProcessError):
            self.stop()
            return
        look.add_done_callback(self._looked)

    def _looked(self, look: Future[bool]) -> None:
        """Runs on the thread of the look."""
        trouble = look.exception() if not look.cancelled() else None
        if trouble is not None and str(trouble) != self._trouble:
            level = logging.WARNING if isinstance(trouble, StoreUnavailableError) else logging.ERROR
            logger.log(level, "%s", trouble)
        self._trouble = "" if trouble is None else str(trouble)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed; the next call brings another
                self._loop.call_soon_threadsafe(self._again)

    def _again(self) -> None:
        if self._loop is not None and self._guard.state is State.OPEN:
            self._next = self._loop.call_later(_PERIOD, self._look)
