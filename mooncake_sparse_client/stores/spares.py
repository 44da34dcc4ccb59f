"""Native clients that are set up and wait for the next connection alike.

Closing a native client holds the interpreter's lock, and so stops every thread and the event loop, for a second. A
client that lends no memory has nothing to bring in order: once it knows of no memory of ours any more, it is kept for
a connection with the same settings, or for the end of the process.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Hashable
from typing import Final

from ..config import MooncakeConfig
from ..replication import DEFAULT_REPLICATION
from . import leaving
from .native import NativeStore

#: How many are kept. Each has some two dozen threads that sleep, and its local buffer.
_MOST: Final = 2
#: Seconds that a spare one may take to answer before another client is set up in its place.
_PATIENCE: Final = 1.0

_turn = threading.Lock()
_spares: list[tuple[Hashable, NativeStore]] = []


def keep(config: MooncakeConfig, timeout: float, native: NativeStore) -> bool:
    """Keep ``native``, which knows of no memory; False where it is to be closed: it lends some, or there are enough."""
    with _turn:
        if config.mode == "embedded" or len(_spares) >= _MOST:
            return False
        _spares.append((_alike(config, timeout), native))
        return True


def take(config: MooncakeConfig, timeout: float) -> NativeStore | None:
    """A native client that is set up for ``config`` with these time-outs, and answers. Runs on a thread."""
    wanted = _alike(config, timeout)
    with _turn:
        number = next((number for number, (alike, _) in enumerate(_spares) if alike == wanted), None)
        if number is None:
            return None
        _, native = _spares.pop(number)
    if not leaving.answers(native, _PATIENCE):
        leaving.leave(native, None)
        return None
    return native


def _alike(config: MooncakeConfig, timeout: float) -> Hashable:
    """What connections that may share a native client, one after the other, have in common."""
    ours = {"pool_size": 0, "lease_seconds": 1.0, "wait_for_master": 0.0, "replication": DEFAULT_REPLICATION}
    return os.getpid(), timeout, dataclasses.replace(config, **ours)  # type: ignore[arg-type]
