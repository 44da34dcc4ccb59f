"""States of a producer that are kept warm while branches are computed that go on from them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

from .tree import Stretch

State = TypeVar("State")


class WarmStates(Generic[State]):
    """At most ``most`` states, each at the end of a stretch, the deepest ones of a depth-first walk."""

    def __init__(self, most: int, walk: Iterable[Stretch]) -> None:
        self._most = most
        self._states: OrderedDict[Stretch, State] = OrderedDict()
        #: Stretches of the walk that are still to come, by what they go on from.
        self._to_come = Counter(stretch.parent for stretch in walk)

    def keep(self, stretch: Stretch, state: State) -> None:
        """If anything is to go on from it."""
        if self._to_come[stretch] and self._most:
            self._states[stretch] = state
            self._states.move_to_end(stretch)
            while len(self._states) > self._most:
                self._states.popitem(last=False)

    def wants(self, stretch: Stretch) -> bool:
        """Whether others than the stretch that is at work now will go on from it, and there is room."""
        return self._most > 0 and self._to_come[stretch] > 1

    def has(self, stretch: Stretch | None) -> bool:
        return stretch in self._states

    def take(self, stretch: Stretch) -> tuple[State, bool]:
        """The state at the end of a stretch, for one that goes on from it, and whether others will want it too: then
        it stays, and must stay as it is."""
        shared = self._to_come[stretch] > 1
        return (self._states[stretch] if shared else self._states.pop(stretch)), shared

    def passed(self, stretch: Stretch) -> None:
        """The walk is through with a stretch."""
        self._to_come[stretch.parent] -= 1
        if not self._to_come[stretch.parent] and stretch.parent is not None:
            self._states.pop(stretch.parent, None)
