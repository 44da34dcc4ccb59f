"""What a client does about a store that fails as a whole: how often it asks again, and when it stops asking."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from .checks import whole_number
from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Resilience:
    """When a request that the store as a whole failed is made again, and when the store counts as down.

    ``attempts``: of one request; 1 for none but the first. Pauses between them grow from ``first_pause`` to
    ``longest_pause``, twofold and with jitter. ``breaker``: whether a store that is down is left alone: calls are
    refused at once then. It counts as down after ``trip_after`` failures in a row, or once a request has hung for
    ``hang_seconds`` while nothing else succeeded, and is asked whether it is back every ``probe_seconds``. All times
    in seconds.

    Raises ``ConfigError``.
    """

    attempts: int = 3
    first_pause: float = 0.05
    longest_pause: float = 1.0
    breaker: bool = True
    trip_after: int = 3
    hang_seconds: float = 5.0
    probe_seconds: float = 1.0

    def __post_init__(self) -> None:
        for name in ("attempts", "trip_after"):
            whole_number(getattr(self, name), f"Resilience.{name}", ConfigError, least=1)
        for name in ("first_pause", "longest_pause", "hang_seconds", "probe_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"Resilience.{name} must be a positive number of seconds, not {value!r}")
        if self.longest_pause < self.first_pause:
            raise ConfigError(
                f"Resilience.longest_pause is {self.longest_pause}, less than first_pause={self.first_pause}"
            )
        if not isinstance(self.breaker, bool):
            raise ConfigError(f"Resilience.breaker must be True or False, not {self.breaker!r}")


DEFAULT_RESILIENCE: Final = Resilience()
