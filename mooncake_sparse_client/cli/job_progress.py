"""How a job goes, on a terminal or in a log."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TextIO

from tqdm import tqdm

from .table import human_bytes

#: Seconds between two looks of the bar.
_BAR_EVERY: Final = 0.1
#: The rate in a log is that of so many lines, so that the remaining time follows what the job does now.
_RATE_LINES: Final = 6
_LONGEST_LINE: Final = 400


def human_time(seconds: float) -> str:
    """Such as ``0.4 s``, ``12 s``, ``3 min 20 s`` or ``26 h 5 min``."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def one_line(text: str) -> str:
    """``text`` from anywhere, fit for a line of a terminal: cut, and without anything that steers the terminal."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text[: _LONGEST_LINE + 1])
    return plain if len(plain) <= _LONGEST_LINE else f"{plain[:_LONGEST_LINE]}..."


def _is_sized_terminal(stream: TextIO) -> bool:
    """Some terminals, such as a container's, know no size: a bar would be empty."""
    if not stream.isatty():
        return False
    try:
        size = os.get_terminal_size(stream.fileno())
    except OSError:
        return False
    return size.columns > 0 and size.lines > 0


class _Bar(tqdm):  # type: ignore[type-arg]  # generic for mypy alone
    #: tqdm would start a thread that redraws bars that are seldom updated.
    monitor_interval = 0


class JobProgress:
    """Shows on ``stream``, by default stderr, how far a job is: a bar on a terminal, else at most a line
    every ``every`` seconds.

    A stream that is closed or whose reader has gone never ends a job: nothing more is shown. ``clock`` gives seconds.
    """

    def __init__(
        self,
        total_tokens: int,
        *,
        name: str = "precompute",
        writes: bool = True,
        stream: TextIO | None = None,
        every: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_tokens
        self._name, self._writes = name, writes
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._started = self._shown_at = clock()
        self._tokens = self._bytes = 0
        self._note = ""
        self._points = deque([(self._started, 0)], maxlen=_RATE_LINES + 1)
        self._open = self._stream is not None  # as it is in a process without one
        self._bar: _Bar | None = None
        self._every = every
        if self._open:
            self._safely(self._start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, tokens: int, bytes_written: int, note: str = "") -> None:
        """The job has done ``tokens`` and written ``bytes_written`` so far. Cheap: call it as often as you like.

        More tokens than the total, or fewer than before since a new pass begins, are fine.
        """
        if tokens < self._tokens:
            self._points.clear()
            self._points.append((self._clock(), tokens))
        self._tokens, self._bytes, self._note = tokens, bytes_written, note
        if self._open and self._clock() - self._shown_at >= self._every:
            self._safely(self._show)

    def message(self, text: str) -> None:
        """Show ``text`` at once, on a line of its own above the bar."""
        if self._open:
            self._safely(lambda: self._write(self._printable(text)))

    def close(self) -> None:
        """Show the last numbers. Nothing is shown after it."""
        if self._open:
            self._safely(self._finish)
            self._open = False

    def _safely(self, show: Callable[[], None]) -> None:
        """``show`` what there is, for as long as somebody reads it."""
        try:
            show()
        except (OSError, ValueError):  # nobody reads it any more; it is closed
            self._open = False
            if self._bar is not None:
                self._bar.disable = True  # else it would write once more when it is collected

    def _start(self) -> None:
        if _is_sized_terminal(self._stream):
            self._every = _BAR_EVERY
            self._bar = _Bar(
                desc=self._name,
                total=self._total or None,
                file=self._stream,
                unit=" tokens",
                unit_scale=True,
                dynamic_ncols=True,
                mininterval=0,
                miniters=0,
            )

    def _show(self) -> None:
        self._shown_at = self._clock()
        if self._bar is not None:
            self._show_bar(self._bar)
        else:
            self._write(", ".join(self._parts_so_far()))

    def _show_bar(self, bar: _Bar) -> None:
        if bar.total is not None:
            bar.total = max(bar.total, self._tokens)  # beyond it tqdm would show no bar at all
        bar.set_postfix_str(self._postfix(), refresh=False)
        bar.update(self._tokens - bar.n)

    def _finish(self) -> None:
        if self._bar is not None:
            self._show_bar(self._bar)
            self._bar.close()
            return
        seconds = self._clock() - self._started
        rate = f", {self._tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
        self._write(", ".join(filter(None, (f"{self._amount()} in {human_time(seconds)}{rate}", self._postfix()))))

    def _parts_so_far(self) -> list[str]:
        parts = [self._amount()]
        now = self._clock()
        began, tokens = self._points[0]
        self._points.append((now, self._tokens))
        if now > began:
            rate = (self._tokens - tokens) / (now - began)
            parts.append(f"{rate:,.0f} tokens/s")
            if rate > 0 and self._tokens < self._total:
                parts.append(f"{human_time((self._total - self._tokens) / rate)} left")
        return [*parts, *filter(None, [self._postfix()])]

    def _amount(self) -> str:
        if self._total <= 0:
            return f"{self._tokens:,} tokens"
        total = max(self._total, self._tokens)
        return f"{self._tokens:,} of {total:,} tokens ({100 * self._tokens // total} %)"  # rounded down: 100 is all

    def _postfix(self) -> str:
        written = f"{human_bytes(self._bytes)} written" if self._writes else ""
        return ", ".join(part for part in (written, self._printable(self._note)) if part)

    def _write(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._stream.write(f"{self._name}: {text}\n")
            self._stream.flush()

    def _printable(self, text: str) -> str:
        encoding = self._stream.encoding or "utf-8"
        return one_line(text).encode(encoding, "replace").decode(encoding)
