"""The ledger: what one client has found wrong with keys, so that it believes no older answer about them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress
from typing import Final

import numpy as np

from ..core.masks import BoolArray

#: Keys of each kind that are remembered, the latest ones.
_SIZE: Final = 65536
#: Seconds for which a key whose value was not delivered is left alone. A master goes on naming an owner of memory that
#: has died until it has not heard of it for so long (its client time-to-live); then the key is gone, and may be written
#: anew.
OUT_OF_REACH_SECONDS: Final = 10.0


class Ledger:
    """Keys that a read or write found wrong, the latest ``65536`` of each kind.

    A *damaged* key counts as absent until it is written again. A *lost* key was gone when it was read: an
    older answer that it exists is not to be believed. One *out of reach* exists, but the owner of its memory did not
    deliver it: it counts as absent for ``OUT_OF_REACH_SECONDS``, or until it is really gone. ``now``: a clock in
    seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._damaged: OrderedDict[str, float] = OrderedDict()
        self._lost: OrderedDict[str, float] = OrderedDict()
        #: By key, when it is asked for again; the next one first.
        self._out_of_reach: OrderedDict[str, float] = OrderedDict()

    def mark_damaged(self, key: str) -> None:
        _remember(self._damaged, key)

    def mark_lost(self, key: str) -> None:
        _remember(self._lost, key)

    def mark_out_of_reach(self, key: str) -> None:
        """From now on. It is lost, too: that it exists is to be asked again even later."""
        _remember(self._out_of_reach, key, self._now() + OUT_OF_REACH_SECONDS)
        self.mark_lost(key)

    def clear(self, keys: Iterable[str]) -> None:
        """Whatever is there by now is another value."""
        keys = list(keys)
        for known in (self._damaged, self._lost, self._out_of_reach):
            _forget(known, keys)

    def forget(self) -> None:
        """Whatever is there by now, of any key, is another value."""
        for known in (self._damaged, self._lost, self._out_of_reach):
            known.clear()

    def found(self, keys: Iterable[str]) -> None:
        """They exist after all; whether they are damaged, or out of reach, is another matter."""
        _forget(self._lost, keys)

    def answered(self, keys: Sequence[str], found: BoolArray) -> None:
        """Whether each key exists, as the store says now. What does not is on no dead owner any more."""
        if self._out_of_reach:
            _forget(self._out_of_reach, compress(keys, ~found))

    def damaged(self, keys: Sequence[str]) -> BoolArray:
        """Which of the keys are known to be damaged."""
        return members(keys, self._damaged)

    def out_of_reach(self, keys: Sequence[str]) -> BoolArray:
        """Which of the keys are out of reach now."""
        known = self._out_of_reach
        while known and next(iter(known.values())) <= self._now():
            known.popitem(last=False)
        return members(keys, known)

    def unusable(self, keys: Sequence[str]) -> BoolArray:
        """Which of the keys count as absent, whatever the store says."""
        return self.damaged(keys) | self.out_of_reach(keys)

    def suspect(self, keys: Sequence[str]) -> BoolArray:
        """Of which keys no older answer is to be believed: those that are damaged, lost, or out of reach."""
        return self.unusable(keys) | members(keys, self._lost)


def members(keys: Sequence[str], known: Collection[str]) -> BoolArray:
    """Which of the keys are known."""
    if not known:  # as good as always
        return np.zeros(len(keys), dtype=np.bool_)
    return np.fromiter((key in known for key in keys), dtype=np.bool_, count=len(keys))


def _forget(known: OrderedDict[str, float], keys: Iterable[str]) -> None:
    for key in keys if known else ():
        known.pop(key, None)


def _remember(known: OrderedDict[str, float], key: str, until: float = 0.0) -> None:
    known[key] = until
    known.move_to_end(key)
    while len(known) > _SIZE:
        known.popitem(last=False)
