"""How a store keeps the values that a client writes: how many copies, what may be evicted, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .checks import items_of, plain_text, whole_number
from .config_values import checked_seconds
from .errors import ConfigError

#: The native store refuses a longer soft pin.
MAX_SOFT_PIN_SECONDS: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Replication:
    """What the store is asked for, for each value that is written.

    ``replica_num``: copies, each on another segment; where there are fewer segments, there are fewer copies.
    ``soft_pin``: True evicts the value only when nothing else is left, for ``soft_pin_ttl_seconds`` (at most 24
    hours; None: for as long as the store says); False takes a pin away when a value is replaced; None leaves it.
    ``hard_pin``: never evict it: such values can fill the store for good.
    ``preferred_segments``: ``host:port`` names of segments to try first. ``group_id``: values that are put with
    the same one are evicted together; empty for none.

    Raises ``ConfigError``.
    """

    replica_num: int = 1
    soft_pin: bool | None = None
    soft_pin_ttl_seconds: float | None = None
    hard_pin: bool = False
    preferred_segments: tuple[str, ...] = ()
    group_id: str = ""

    def __post_init__(self) -> None:
        segments = items_of(self.preferred_segments, "Replication.preferred_segments", ConfigError)
        checked: dict[str, object] = {
            "replica_num": whole_number(self.replica_num, "Replication.replica_num", ConfigError, least=1),
            "preferred_segments": tuple(
                plain_text(name, f"Replication.preferred_segments[{number}]", ConfigError)
                for number, name in enumerate(segments)
            ),
            "group_id": plain_text(self.group_id, "Replication.group_id", ConfigError, may_be_empty=True),
            "soft_pin_ttl_seconds": self._checked_ttl(),
        }
        if self.soft_pin is not None and not isinstance(self.soft_pin, bool):
            raise ConfigError(f"Replication.soft_pin must be True, False or None, not {self.soft_pin!r}")
        if not isinstance(self.hard_pin, bool):
            raise ConfigError(f"Replication.hard_pin must be True or False, not {self.hard_pin!r}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _checked_ttl(self) -> float | None:
        if self.soft_pin_ttl_seconds is None:
            return None
        seconds = checked_seconds(self.soft_pin_ttl_seconds, "Replication.soft_pin_ttl_seconds")
        if self.soft_pin is not True:
            raise ConfigError(
                f"Replication.soft_pin_ttl_seconds is {seconds:g}, but soft_pin is {self.soft_pin}: only a pin that "
                "is set can end; add soft_pin=True"
            )
        if seconds > MAX_SOFT_PIN_SECONDS:
            raise ConfigError(
                f"Replication.soft_pin_ttl_seconds is {seconds:g}; the store allows at most {MAX_SOFT_PIN_SECONDS:g}"
            )
        return seconds


#: Leaves everything to the store.
DEFAULT_REPLICATION: Final = Replication()


def checked_replication(value: object, origin: str) -> Replication:
    if not isinstance(value, Replication):
        raise ConfigError(f"{origin} must be a Replication, not {value!r}")
    return value
