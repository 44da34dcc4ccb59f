"""One run of the benchmark: which measurements are wanted, how often each repeats, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from ...errors import ConfigError
from .measure import Amount, Comparison, Side, side_by_side


@dataclass(frozen=True, slots=True)
class Effort:
    """How thorough a run is. ``scale``: factor on the bytes of every measurement."""

    repeats: int
    scale: float = 1.0

    def scaled(self, number: int, *, least: int = 1) -> int:
        return max(least, int(number * self.scale))


FULL: Final = Effort(repeats=5)
QUICK: Final = Effort(repeats=2, scale=0.25)


def matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that fit one of the patterns, which are those of a shell."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


class Session:
    """Runs the wanted comparisons and keeps what came out, in the order in which it did.

    ``only``: a measurement whose name fits none of these patterns is passed over. ``done`` is called with the
    name of each that is over.
    """

    def __init__(
        self, effort: Effort, *, only: Sequence[str] = ("*",), done: Callable[[str], object] = lambda _: None
    ) -> None:
        self.effort = effort
        self.comparisons: list[Comparison] = []
        self.figures: dict[str, float] = {}
        self._only = only
        self._done = done

    def wants(self, *names: str) -> bool:
        """Whether any of them is wanted."""
        return bool(matching(names, self._only))

    async def compare(self, name: str, ours: Side, theirs: Side, amount: Amount) -> Comparison | None:
        """Measure ``name``, if it is wanted."""
        if not self.wants(name):
            return None
        found = await side_by_side(name, ours, theirs, amount, repeats=self.effort.repeats)
        self.comparisons.append(found)
        self._done(name)
        return found

    def note(self, name: str, figures: dict[str, float]) -> None:
        """Keep what a measurement that is no comparison has found."""
        self.figures |= figures
        self._done(name)


@dataclass(frozen=True, slots=True)
class Plane:
    """A part of the client that is measured by itself: the names of what there is to measure, and how."""

    names: Sequence[str]
    measure: Callable[[Session], Coroutine[None, None, None]]

    def check(self, only: Sequence[str]) -> None:
        """Raises ``ConfigError`` for a pattern that no name fits."""
        for pattern in only:
            if not matching(self.names, [pattern]):
                raise ConfigError(f"--only {pattern!r} fits no measurement; there are {', '.join(self.names)}")
