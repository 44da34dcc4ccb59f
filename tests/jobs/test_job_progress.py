"""How a job shows how far it is: on a terminal, in a log, and where nobody reads."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

import pytest

from mooncake_sparse_client.cli.job_progress import JobProgress, human_time, one_line

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal:
    """A terminal of its own: what is written to ``stream`` is kept."""

    def __init__(self, lines: int = 24, columns: int = 120) -> None:
        self._reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.stream = os.fdopen(writer, "w", encoding="utf-8")

    def text(self) -> str:
        """All that was written since the last call."""
        self.stream.flush()
        os.set_blocking(self._reader, False)
        parts = []
        while True:
            try:
                parts.append(os.read(self._reader, 1 << 16))
            except BlockingIOError:
                return b"".join(parts).decode()

    def hang_up(self) -> None:
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1

    def close(self) -> None:
        self.hang_up()
        with suppress(OSError):  # nobody reads what it still had
            self.stream.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


# In a log


def test_a_log_gets_a_line_now_and_then(clock: Clock) -> None:
    log = io.StringIO()
    progress = JobProgress(10_000_000, stream=log, clock=clock)
    for second in range(1, 31):
        clock.now = 1000.0 + second
        for part in range(10):
            progress.update(40_000 * second - 9 + part, second * 16 * MIB)
    assert log.getvalue().splitlines() == [
        "precompute: 399,991 of 10,000,000 tokens (3 %), 39,999 tokens/s, 4 min 0 s left, 160.0 MiB written",
        "precompute: 799,991 of 10,000,000 tokens (7 %), 40,000 tokens/s, 3 min 50 s left, 320.0 MiB written",
        "precompute: 1,199,991 of 10,000,000 tokens (11 %), 40,000 tokens/s, 3 min 40 s left, 480.0 MiB written",
    ]


def test_a_log_ends_with_what_was_done(clock: Clock) -> None:
    log = io.StringIO()
    with JobProgress(1000, stream=log, every=60, clock=clock) as progress:
        clock.now += 20
        progress.update(1000, 3 * MIB, "pass 2")
    progress.update(2000, 4 * MIB)
    progress.message("too late")
    progress.close()
    assert log.getvalue() == "precompute: 1,000 of 1,000 tokens (100 %) in 20 s, 50 tokens/s, 3.0 MiB written, pass 2\n"


def test_remaining_time_follows_what_the_job_does_now(clock: Clock) -> None:
    log = io.StringIO()
    progress = JobProgress(1_000_000, stream=log, clock=clock)
    tokens = 0
    for rate in (50_000, *[100] * 10):  # the first were in the store already
        clock.now += 10
        tokens += 10 * rate
        progress.update(tokens, 0)
    assert ", 100 tokens/s, " in log.getvalue().splitlines()[-1]


def test_messages_come_at_once_and_on_one_line(clock: Clock) -> None:
    log = io.StringIO()
    progress = JobProgress(1000, stream=log, clock=clock)
    progress.message("line 7: \x1b[31mno\nprompt")
    progress.message("x" * 5000)
    first, second = log.getvalue().splitlines()
    assert first == "precompute: line 7:  [31mno prompt"
    assert 300 < len(second) < 500


@pytest.mark.parametrize("total", [0, 100])
def test_more_than_the_total_and_nothing_at_all_are_fine(clock: Clock, total: int) -> None:
    log = io.StringIO()
    with JobProgress(total, stream=log, every=0, clock=clock) as progress:
        progress.update(0, 0)
        progress.update(0, 0)
        clock.now += 10
        progress.update(150, 0)
    amounts = [line.split(" tokens")[0].removeprefix("precompute: ") for line in log.getvalue().splitlines()]
    assert amounts == (["0", "0", "150", "150"] if not total else ["0 of 100", "0 of 100", "150 of 150", "150 of 150"])
    assert "left" not in log.getvalue().splitlines()[2]


def test_a_new_pass_begins_anew(clock: Clock) -> None:
    log = io.StringIO()
    progress = JobProgress(1000, stream=log, clock=clock)
    clock.now += 10
    progress.update(1000, MIB)
    clock.now += 10
    progress.update(0, MIB, "pass 2")
    clock.now += 10
    progress.update(500, MIB, "pass 2")
    assert log.getvalue().splitlines()[1:] == [
        "precompute: 0 of 1,000 tokens (0 %), 1.0 MiB written, pass 2",
        "precompute: 500 of 1,000 tokens (50 %), 50 tokens/s, 10 s left, 1.0 MiB written, pass 2",
    ]


def test_words_that_a_log_cannot_write_do_not_silence_it(clock: Clock) -> None:
    raw = io.BytesIO()
    log = io.TextIOWrapper(raw, encoding="ascii")
    progress = JobProgress(1000, stream=log, clock=clock)
    progress.message("né")
    progress.message("next")
    assert raw.getvalue().decode().splitlines() == ["precompute: n?", "precompute: next"]


# On a terminal


def test_a_terminal_gets_a_bar(clock: Clock, terminal: Terminal) -> None:
    threads = threading.active_count()
    with JobProgress(1_000_000, stream=terminal.stream, clock=clock) as progress:
        assert "  0%|" in terminal.text()
        progress.update(100_000, MIB)
        assert terminal.text() == ""  # it was shown just now
        clock.now += 1
        progress.update(250_000, 3 * MIB, "waiting")
        shown = terminal.text()
        assert " 25%|" in shown
        assert "250k/1.00M" in shown
        assert "tokens/s" in shown
        assert "3.0 MiB written, waiting" in shown
        progress.message("line 7 is wrong")
        shown = terminal.text()
        assert "line 7 is wrong\r\n" in shown
        assert " 25%|" in shown.partition("line 7 is wrong")[2]  # the bar is drawn again below it
        assert threading.active_count() == threads
        progress.update(1_000_000, 4 * MIB)
    shown = terminal.text()
    assert "100%|" in shown
    assert "4.0 MiB written" in shown
    assert shown.endswith("\r\n")
    progress.update(1, 1)
    progress.message("too late")
    progress.close()
    assert terminal.text() == ""


@pytest.mark.parametrize("total", [0, 100])
def test_a_bar_bears_any_numbers(clock: Clock, terminal: Terminal, total: int) -> None:
    with JobProgress(total, stream=terminal.stream, clock=clock) as progress:
        for tokens in (0, 50, 150, 20, 400):
            clock.now += 1
            progress.update(tokens, tokens)
            shown = terminal.text()
            assert (f"{tokens}.0" if tokens < 100 else f"{tokens}") in shown.replace("0.00", "0.0")
            assert ("%|" in shown) == bool(total)


def test_a_terminal_without_a_size_gets_lines(clock: Clock) -> None:
    terminal = Terminal(lines=0, columns=0)
    with JobProgress(1000, stream=terminal.stream, clock=clock) as progress:
        clock.now += 10
        progress.update(500, 0)
    assert terminal.text().splitlines()[0].startswith("precompute: 500 of 1,000 tokens (50 %)")
    terminal.close()


# Where nobody reads


def use_all(stream: TextIO | None, clock: Clock) -> None:
    with JobProgress(1000, stream=stream, every=0, clock=clock) as progress:
        for tokens in range(0, 1000, 100):
            clock.now += 1
            progress.update(tokens, tokens)
            progress.message(f"at {tokens}")


def test_a_reader_that_has_gone_ends_no_job(clock: Clock) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    use_all(stream, clock)
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_closed_stream_ends_no_job(clock: Clock) -> None:
    stream = io.StringIO()
    stream.close()
    use_all(stream, clock)


def test_no_stderr_at_all_ends_no_job(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    use_all(None, clock)


def test_stderr_is_where_it_shows(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    use_all(None, clock)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("precompute: 0 of 1,000 tokens (0 %)")


def test_a_terminal_that_hangs_up_ends_no_job(clock: Clock, terminal: Terminal) -> None:
    with JobProgress(1000, stream=terminal.stream, clock=clock) as progress:
        clock.now += 1
        progress.update(100, 0)
        terminal.hang_up()
        for tokens in range(200, 1000, 100):
            clock.now += 1
            progress.update(tokens, tokens)
            progress.message(f"at {tokens}")


# Words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0.0 s"),
        (0, "0.0 s"),
        (0.44, "0.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 0 min"),
        (7505, "2 h 5 min"),
        (93_900, "26 h 5 min"),
    ],
)
def test_time_in_words(seconds: float, words: str) -> None:
    assert human_time(seconds) == words


def test_lines_are_cut_and_plain() -> None:
    assert one_line("a\tb\r\nc\x1b[0m\u202e") == "a b  c [0m "
    assert one_line("y" * 400) == "y" * 400
    assert one_line("y" * 401) == "y" * 400 + "..."
