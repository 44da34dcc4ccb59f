"""What the commands share about their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError, InvalidInputError


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Let an error about a value say which option it came from."""
    try:
        yield
    except (ConfigError, InvalidInputError) as error:
        raise ConfigError(f"{option}: {error}") from error
