"""What moving bytes does to the process around it: how late its event loop runs, and how far its memory grows."""

from __future__ import annotations

import asyncio
from typing import Final

from ...config import Limits
from ...config_values import Mode
from ...stores.local import LocalMooncake
from ...stores.native import new_native_store
from .ground import heap_memory, open_ground
from .measure import LoopDelay, MemoryGrowth, in_tasks, on_thread
from .session import Session
from .sides import Prefix, ours

_MIB: Final = 1 << 20
#: The remote mode first: memory that another measurement has used before would count as not grown.
_MODES: Final[tuple[Mode, ...]] = ("remote", "embedded", "shared")
_GROWTH: Final = "extra_memory_mib"
_IDLE: Final = "loop_delay_ms.idle"
FLOW_NAMES: Final = (_GROWTH, _IDLE, *(f"loop_delay_ms.{mode}" for mode in _MODES))
#: What moves in all, and what is in the store at a time.
_MOVED: Final = 2048 * _MIB
_STORED: Final = 256 * _MIB
_CHUNK_BYTES: Final = 64 << 10
#: What a client does that was given no limits.
_LIMITS: Final = Limits()


async def measure_flows(session: Session) -> None:
    """A long prompt that is put, looked up and got over and over, framed, once in each mode; and a loop with
    nothing to do, for comparison."""
    if session.wants(_IDLE):
        async with LoopDelay() as idle:
            await asyncio.sleep(1)
        session.note(_IDLE, _named(_IDLE, idle.figures()))
    for mode in _MODES:
        name = f"loop_delay_ms.{mode}"
        names = [name, _GROWTH] if mode == "remote" else [name]
        if not session.wants(*names):
            continue
        delay, growth = await _flow(mode, rounds=max(1, session.effort.scaled(_MOVED) // (2 * _STORED)))
        if session.wants(name):
            session.note(name, _named(name, delay))
            if mode == "embedded":  # which is meant wherever no mode is named
                session.figures |= _named("loop_delay_ms", delay)
        if mode == "remote" and session.wants(_GROWTH):
            bound = _LIMITS.staging_bytes + _LIMITS.max_bytes_in_flight
            session.note(_GROWTH, {_GROWTH: growth / _MIB, "extra_memory_bound_mib": bound / _MIB})


async def _flow(mode: Mode, *, rounds: int) -> tuple[dict[str, float], int]:
    """The event loop's delay, and the bytes that memory grew by, from before the client was there."""
    await on_thread(new_native_store)  # the library's own code and data are no part of the growth
    memory = None if mode == "shared" else heap_memory(_STORED).touch()
    owner = None if mode == "embedded" else 2 * _STORED
    async with await LocalMooncake.start(memory=owner) as local:
        with MemoryGrowth() as growth:
            async with open_ground(mode, local, segment=2 * _STORED, pool=3 * _STORED) as ground:
                memory = memory or ground.memory(_STORED)
                async with (
                    ours(ground, "framed", _CHUNK_BYTES, memory, limits=_LIMITS) as mine,
                    LoopDelay() as delay,
                ):
                    for _ in range(rounds):
                        await in_tasks(1, mine.prefixes, _there_and_back)
                        await mine.remove()
    return delay.figures(), growth.peak


def _named(name: str, figures: dict[str, float]) -> dict[str, float]:
    return {f"{name}.{part}": value for part, value in figures.items()}


async def _there_and_back(prefix: Prefix) -> None:
    await prefix.put()
    await prefix.find()
    await prefix.get()
