"""Which ranges of memory the native library knows, and what it must be told when callers add and remove some.

Native code refuses a range that overlaps a registered one, and lets go of one only by its exact beginning. Callers
register what they like: the same range twice, or ranges that overlap. So what they add and what the library knows,
*ranges* and *pieces*, are kept apart.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from typing import TypeAlias

from ..checks import whole_number
from ..errors import InvalidRequestError

#: ``(address, nbytes)``.
Range: TypeAlias = tuple[int, int]


class Registrations:
    """Says what to register; does nothing itself.

    Whoever uses it lets one ``add`` or ``remove`` and the native calls that follow from it end before the next one.
    """

    def __init__(self) -> None:
        #: How often each range was added.
        self._ranges: Counter[Range] = Counter()
        # The pieces, ascending; none overlap, all of each range is covered, and each piece is touched by a range.
        self._begins: list[int] = []
        self._ends: list[int] = []

    def pieces(self) -> list[Range]:
        """All that is registered natively, ascending."""
        return [(begin, end - begin) for begin, end in zip(self._begins, self._ends, strict=True)]

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether all of the range is registered, in one piece or in several that adjoin."""
        reached, end = address, address + nbytes
        at = bisect_right(self._ends, address)
        while reached < end:
            if at == len(self._begins) or reached < self._begins[at]:
                return False
            reached = self._ends[at]
            at += 1
        return True

    def add(self, address: int, nbytes: int) -> list[Range]:
        """Add a range, and answer what must be registered natively for it, ascending; nothing if it is covered.

        If that fails half way, ``remove`` the range: its answer is the same list.
        """
        begin, end = _checked(address, nbytes)
        gaps: list[Range] = []
        for at in self._touching(begin, end):
            if begin < self._begins[at]:
                gaps.append((begin, self._begins[at] - begin))
            begin = self._ends[at]
        if begin < end:
            gaps.append((begin, end - begin))
        for gap in gaps:
            at = bisect_left(self._begins, gap[0])
            self._begins.insert(at, gap[0])
            self._ends.insert(at, sum(gap))
        self._ranges[address, nbytes] += 1
        return gaps

    def remove(self, address: int, nbytes: int) -> list[Range]:
        """Take back one ``add`` of exactly this range, and answer what must be unregistered natively, ascending.

        A piece that another range touches stays. Raises ``InvalidRequestError`` for a range that was not added.
        """
        begin, end = _checked(address, nbytes)
        count = self._ranges[address, nbytes]
        if not count:
            raise InvalidRequestError(
                f"the {nbytes} bytes at {address:#x} are not registered; unregister exactly what was registered, once"
            )
        if count > 1:
            self._ranges[address, nbytes] = count - 1
            return []
        del self._ranges[address, nbytes]
        gone = [at for at in self._touching(begin, end) if not self._is_needed(at)]
        pieces = [(self._begins[at], self._ends[at] - self._begins[at]) for at in gone]
        for at in reversed(gone):
            del self._begins[at], self._ends[at]
        return pieces

    def _touching(self, begin: int, end: int) -> range:
        """The pieces that share a byte with ``[begin, end)``."""
        return range(bisect_right(self._ends, begin), bisect_left(self._begins, end))

    def _is_needed(self, at: int) -> bool:
        begin, end = self._begins[at], self._ends[at]
        return any(address < end and begin < address + nbytes for address, nbytes in self._ranges)


def _checked(address: int, nbytes: int) -> tuple[int, int]:
    """Where the range begins and ends."""
    begin = whole_number(address, "address", InvalidRequestError, least=1)
    return begin, begin + whole_number(nbytes, "nbytes", InvalidRequestError, least=1)
