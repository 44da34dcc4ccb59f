"""RetryingStore: a wrapper that asks a store again what it failed to answer as a whole."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from ..errors import StoreDownError, StoreError
from ..resilience import DEFAULT_RESILIENCE, Resilience
from .base import Failure, GetItem, PutItem, RemoveOutcome, Store
from .wrapping import WrappedStore

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


class RetryingStore(WrappedStore):
    """Makes a call again that ``store`` has failed with a retriable ``StoreError``, with pauses in between.

    At most ``resilience.attempts`` in all; the last one's error is raised. ``StoreDownError`` is raised at once, since
    the store was not asked. What became of a single key is no matter of this wrapper, and neither are ``health`` and
    ``aclose``. A ``remove`` that is made again may find ``ABSENT`` what the first attempt has removed, and a
    ``remove_prefix`` counts only what was left.

    A failed call touches its buffers no more, and a put is idempotent, so both may be made again as they are. No call
    is under way during a pause, and a cancellation ends it at once.
    """

    def __init__(self, store: Store, resilience: Resilience = DEFAULT_RESILIENCE) -> None:
        super().__init__(store)
        self._resilience = resilience

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        return await self._repeated(self.inner.exists, keys)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        return await self._repeated(self.inner.put, items)

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        return await self._repeated(self.inner.get, items)

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        return await self._repeated(self.inner.remove, keys, force=force)

    async def remove_prefix(self, prefix: str, *, force: bool = False) -> int:
        return await self._repeated(self.inner.remove_prefix, prefix, force=force)

    async def _repeated(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        for pause in self._pauses():
            try:
                return await call(*args, **kwargs)
            except StoreError as error:
                if not error.retriable or isinstance(error, StoreDownError):
                    raise
                logger.debug("tried again in %.3f s: %s", pause, error)
            await asyncio.sleep(pause)
        return await call(*args, **kwargs)

    def _pauses(self) -> Iterator[float]:
        """Seconds between one attempt and the next."""
        pause, longest = self._resilience.first_pause, self._resilience.longest_pause
        for _ in range(self._resilience.attempts - 1):
            yield pause * random.uniform(0.5, 1.0)  # noqa: S311 - spreads the attempts of many clients
            pause = min(pause * 2, longest)
