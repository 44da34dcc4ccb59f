"""What the commands share about their arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigError, InvalidInputError


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Let an error about a value say which option it came from."""
    try:
        yield
    except (ConfigError, InvalidInputError) as error:
        raise ConfigError(f"{option}: {error}") from error


def interval_of(text: str) -> int | None:
    """A retention interval in tokens; None for 'none', which keeps every boundary. Raises ``ConfigError``."""
    if text.lower() == "none":
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ConfigError(f"{text!r} is neither a number of tokens nor 'none', which keeps every boundary")
    return int(text)


def check_figures(path: Path) -> None:
    """Whether ``write_figures`` will be able to; a file that is there stays as it is. Raises ``ConfigError``."""
    try:
        was_there = path.exists()
        path.open("a").close()
        if not was_there:
            path.unlink()  # an empty one would look like figures
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error


def write_figures(path: Path, text: str) -> None:
    """Write what ``--json`` asked for. Raises ``ConfigError``."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error
