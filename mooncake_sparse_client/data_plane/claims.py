"""Claims: whoever puts a key now says so, and others wait for how it ends instead of putting it too."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import TypeAlias

#: By key, the claim of the put that writes it now.
Claims: TypeAlias = "dict[str, Claim]"


class Claim:
    """The keys that one put writes now. They leave it one by one, as they are settled."""

    def __init__(self, claims: Claims, keys: Collection[str]) -> None:
        self._claims = claims
        self._open = set(keys)
        self._stored: set[str] = set()
        self._waiters: list[asyncio.Future[None]] = []
        claims.update(dict.fromkeys(keys, self))

    def settle(self, keys: Iterable[str], *, stored: bool) -> None:
        """These keys are done with: they have a value now, or have not."""
        done = self._open.intersection(keys)
        if not done:
            return
        self._open -= done
        if stored:
            self._stored |= done
        for key in done:
            del self._claims[key]
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def give_up(self) -> None:
        """Whatever is still open was not stored."""
        self.settle(self._open, stored=False)

    async def stored(self, keys: Collection[str]) -> set[str]:
        """Wait until all of ``keys`` are settled; answers those that have a value."""
        while not self._open.isdisjoint(keys):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return self._stored.intersection(keys)
