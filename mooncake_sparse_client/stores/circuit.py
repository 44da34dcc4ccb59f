"""The circuit: whether a store counts as down, from what its calls came to. It asks nothing and keeps no time.

Every transition stands here::

    CLOSED --tripped--> OPEN --answers--> CLOSED
                         |  ^
         answers in part |  | tripped
                         v  |
                        TRIAL --moved--> CLOSED

A store whose questions failed is back once it answers one. Of one whose values did not move this says nothing: it is
on trial until a value has moved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

logger = logging.getLogger(__name__)


class State(Enum):
    """CLOSED: calls pass. OPEN: none does. TRIAL: questions do, and one call that moves values at a time."""

    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


class Event(Enum):
    TRIPPED = "tripped"
    ANSWERS = "answers"
    ANSWERS_IN_PART = "answers in part"
    MOVED = "moved"


_NEXT: Final[Mapping[tuple[State, Event], State]] = {
    (State.CLOSED, Event.TRIPPED): State.OPEN,
    (State.OPEN, Event.ANSWERS): State.CLOSED,
    (State.OPEN, Event.ANSWERS_IN_PART): State.TRIAL,
    (State.TRIAL, Event.TRIPPED): State.OPEN,
    (State.TRIAL, Event.MOVED): State.CLOSED,
}


@dataclass(slots=True, eq=False)
class Line:
    """What is counted of one kind of calls, questions or those that move values."""

    name: str
    #: Failures since the last success.
    failed: int = 0
    worked: int = 0


@dataclass(slots=True, eq=False)
class Call:
    """One call under way."""

    line: Line
    #: On the clock of whoever began it, in seconds.
    begun: float
    #: How often the circuit had opened by then. What began before it opened says nothing of the time since.
    era: int
    #: How many calls of its kind had worked by then.
    worked_before: int


class Circuit:
    """The state of one store, and why. ``now`` is any clock, in seconds."""

    def __init__(self, trip_after: int) -> None:
        """``trip_after``: failures in a row, of one kind, that open it."""
        self._trip_after = trip_after
        self.questions = Line("questions")
        self.moves = Line("transfers")
        self.state = State.CLOSED
        #: Why it opened last, and when.
        self.trouble = ""
        self.opened_at = 0.0
        self._era = 0
        self._down_since = 0.0
        self._moves_in_doubt = False

    def begin(self, line: Line, now: float) -> Call:
        return Call(line, now, self._era, line.worked)

    def worked(self, call: Call, now: float) -> None:
        """It was answered."""
        call.line.worked += 1
        if call.era != self._era:
            return
        call.line.failed = 0
        if call.line is self.moves and self.state is State.TRIAL:
            self._moves_in_doubt = False
            self._become(Event.MOVED, now)

    def failed(self, call: Call, why: str, now: float) -> None:
        """The store was out of reach of it."""
        if call.era != self._era:
            return
        line = call.line
        line.failed += 1
        on_trial = self.state is State.TRIAL and line is self.moves
        if on_trial or line.failed >= self._trip_after:
            self._trip(line, f"{line.failed} of the {line.name} failed in a row, the last so: {why}", now)

    def hung(self, call: Call, now: float) -> bool:
        """It is not back after so long that it should be. False where others of its kind have worked meanwhile: then
        it is slow."""
        line = call.line
        if line.worked != call.worked_before:
            return False
        if call.era == self._era:
            self._trip(line, f"one of the {line.name} hung for {now - call.begun:.1f} s, and no other one worked", now)
        return True

    def answers(self, now: float) -> None:
        """The store has answered that it is there."""
        self._become(Event.ANSWERS_IN_PART if self._moves_in_doubt else Event.ANSWERS, now)

    def _trip(self, line: Line, trouble: str, now: float) -> None:
        if self.state is State.CLOSED:
            self._down_since = now
        self._moves_in_doubt |= line is self.moves
        self.trouble, self.opened_at = trouble, now
        self._become(Event.TRIPPED, now)

    def _become(self, event: Event, now: float) -> None:
        before, self.state = self.state, _NEXT.get((self.state, event), self.state)
        if self.state is State.OPEN is not before:
            self._era += 1
            self.questions.failed = self.moves.failed = 0
            level = logging.WARNING if before is State.CLOSED else logging.INFO
            logger.log(level, "the store counts as down: %s", self.trouble)
        elif self.state is State.TRIAL is not before:
            logger.info("the store answers again; whether values move is tried with one call at a time")
        elif self.state is State.CLOSED is not before:
            logger.warning("the store is back, after %.1f s", now - self._down_since)
