"""The owner process of a local Mooncake: started, watched, and started again when it ends by itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ..errors import LocalProcessError, SetupError
from .ports import choose_ports
from .processes import Process

logger = logging.getLogger(__name__)

#: Seconds without an owner. An application in shared mode whose calls meet a new owner within some 4.5 s of the old
#: one's end takes it for the old one, does not tell it of its memory, and has every transfer refused from then on.
PAUSE = 6.0
#: An owner that serves so many seconds was well; one that ends sooner, or does not serve at all, may do so for ever.
STEADY = 10.0
#: Ends in a row, each too soon, after which it is given up.
MOST_QUICK_ENDS = 5


class Owner:
    """The owner process that serves at ``port``: a ``new`` one each time the former has ended, if ``restart``.

    One that hangs is left alone: what it holds is there again when it goes on.
    """

    def __init__(self, new: Callable[[], Process], port: int, *, restart: bool, startup_timeout: float) -> None:
        self._new, self._port = new, port
        self._restart = restart
        self._startup_timeout = startup_timeout  # seconds, for each start but the first
        self._process: Process | None = None
        self._serves = False
        self._quick_ends = 0
        self.restarts = 0
        #: Done when it has ended for good, or is stopped; gives or raises the reason.
        self.lost: asyncio.Task[Exception] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the one that runs; None while none does."""
        return self._process.pid if self._process is not None and self._process.runs else None

    @property
    def serves(self) -> bool:
        """Whether one is known to serve."""
        return self._serves and self.pid is not None

    async def start(self, deadline: float) -> None:
        """Return when it serves, and watch it from then on. Raises as ``Process.start``; ``stop`` it in any event."""
        await self._begin(deadline)
        self.lost = asyncio.create_task(self._tend())

    async def stop(self) -> None:
        """Start no more, and end the one that runs. It is gone when this returns."""
        if self.lost is not None:
            self.lost.cancel()
            await asyncio.wait([self.lost])
        if self._process is not None:
            await self._process.end()

    def let_go(self) -> None:
        """Start no more, and let the one that runs end, unwatched. From any thread."""
        if self.lost is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it nothing is started any more
                self.lost.get_loop().call_soon_threadsafe(self.lost.cancel)
        if self._process is not None:
            self._process.let_go()

    async def _begin(self, deadline: float) -> None:
        self._process = self._new()
        await self._process.start(deadline)
        self._serves = True

    async def _tend(self) -> Exception:
        """Start it again whenever it has ended, as long as that may help; why it does not."""
        while True:
            trouble = await self._life()
            if not self._restart:
                return trouble
            if self._quick_ends == MOST_QUICK_ENDS:
                logger.error("the owner process at port %d is given up: %s", self._port, trouble)
                return LocalProcessError(
                    f"the owner process is given up: {MOST_QUICK_ENDS} times in a row it did not serve for "
                    f"{STEADY:g} s; the last time: {trouble}"
                )
            logger.warning("what the owner process held is gone, it is started again in %g s: %s", PAUSE, trouble)
            await asyncio.sleep(PAUSE)

    async def _life(self) -> Exception:
        """Have it serve until it ends, and nothing is left of it; how it ended, or why it did not serve."""
        loop = asyncio.get_running_loop()
        steady = False
        try:
            if not self._serves:
                choose_ports({"owner_port": self._port})  # says best when another program has taken it meanwhile
                await self._begin(loop.time() + self._startup_timeout)
                self.restarts += 1
                logger.warning("an owner process serves again at port %d, pid %s; it is empty", self._port, self.pid)
            assert self._process is not None  # noqa: S101
            steady_at = loop.time() + STEADY
            await asyncio.wait([self._process.ended])
            steady = loop.time() >= steady_at
            return self._process.failure()
        except SetupError as error:
            return error
        finally:
            self._serves = False
            self._quick_ends = 0 if steady else self._quick_ends + 1
            if self._process is not None:
                await self._process.end()
