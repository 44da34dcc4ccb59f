"""How a job is to work."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, get_args

from ..checks import whole_number
from ..config_values import checked_wait
from ..errors import ConfigError
from .corpus import OnWrong
from .sharding import Shard

_WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a job is to work. Seconds and bytes are what their names say.

    ``journal``: a file of the job's progress, by which ``resume`` goes on after a kill; None for none. ``shard``:
    which part of the corpus this job is for. ``on_wrong``: what is done about a line that is no prompt.
    ``keep_in_process``: let the results lie in a segment that goes with this process. ``read_back``: find out what is
    stored by reading it, not by asking: what is damaged is then written anew. ``step_tokens``: tokens that are
    computed, and put, at a time, fewer where their chunks are large. ``max_bytes_pending`` and ``puts_at_once``: what
    may wait to be stored while more is computed. ``warm_states``: caches of prefixes that are kept for the prompts
    that share them. ``patience_seconds``: how long a store that is out of reach or full is tried again.
    ``trunk_seconds``: how long part 2 and on wait for part 1 to compute what they share, until they do it themselves.
    ``spool``: a folder for the corpus's tokens.

    Raises ``ConfigError``.
    """

    journal: Path | None = None
    resume: bool = False
    shard: Shard = _WHOLE
    on_wrong: OnWrong = "skip"
    keep_in_process: bool = False
    read_back: bool = False
    step_tokens: int = 4096
    max_bytes_pending: int = 256 << 20
    puts_at_once: int = 4
    warm_states: int = 4
    patience_seconds: float = 600.0
    trunk_seconds: float = 3600.0
    spool: Path | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value, name = getattr(self, field.name), f"JobOptions.{field.name}"
            if field.type == "int":
                least = 0 if field.name == "warm_states" else 1
                object.__setattr__(self, field.name, whole_number(value, name, ConfigError, least=least))
            elif field.type == "float":
                object.__setattr__(self, field.name, checked_wait(value, name))
        if self.on_wrong not in get_args(OnWrong):
            raise ConfigError(f"JobOptions.on_wrong is {self.on_wrong!r}; it is 'skip' or 'stop'")
        if self.resume and self.journal is None:
            raise ConfigError("JobOptions.resume goes on by a journal: name it with JobOptions.journal")


DEFAULT_OPTIONS: Final = JobOptions()
