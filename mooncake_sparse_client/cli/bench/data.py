"""The data plane: bytes that move through the client, side by side with those that native calls move."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from ...config import Limits
from ...config_values import Mode
from ...core.framing import ValueFormatName
from ...stores.local import LocalMooncake
from .flow import FLOW_NAMES, measure_flows
from .ground import Ground, Memory, heap_memory, open_ground
from .measure import Amount, on_thread
from .rivals import AsyncCalls, AsyncRival, PlainCalls, async_store, batches, register, write_once
from .session import Plane, Session
from .sides import Async, Ours, ours, plain

_MIB: Final = 1 << 20
_SIZES: Final = {"4KiB": 4 << 10, "64KiB": 64 << 10, "1MiB": 1 << 20}
_FORMATS: Final[tuple[ValueFormatName, ...]] = ("raw", "framed")
#: MiB that one run of a side moves: enough for tens of milliseconds.
_MOVED: Final[dict[Mode, dict[str, int]]] = {
    "embedded": {"4KiB": 64, "64KiB": 256, "1MiB": 256},
    "remote": {"4KiB": 16, "64KiB": 128, "1MiB": 128},
    "shared": {"4KiB": 64, "64KiB": 128, "1MiB": 128},
}
_PREFIX: Final[dict[Mode, str]] = {"embedded": "", "remote": "remote.", "shared": "shared."}
#: At these sizes formats are compared with each other too, and at this one modes.
_LARGE: Final = ("64KiB", "1MiB")
_MIDDLE: Final = "64KiB"
_KEYS_ASKED: Final = 65536
_SEGMENT_MIB: Final = 1280
#: Staging of three clients, and in shared mode what values move from and to.
_POOL: Final = 640 * _MIB

_TASKS: Final = (1, 16, 256)
#: For many small requests at once, on one machine: they travel in few large ones, and more of those at a time.
_MANY_SMALL: Final = Limits(max_batch_chunks=2048, max_batch_pieces=2048, concurrency=4)
_TASK_CHUNKS: Final = 64
#: How often each prefix is read by batches: a few, so that the tasks' common start weighs less.
_READS: Final = 4
_TASK_CHUNK_BYTES: Final = 4 << 10
_LEAST_PREFIXES: Final = 64


def _names_of(mode: Mode, size: str) -> list[str]:
    """What is compared at one size, except modes with each other."""
    start = _PREFIX[mode]
    names = [f"{start}{op}.{value_format}.{size}" for op in ("put", "get", "exists") for value_format in _FORMATS]
    names += [f"{start}put_unasked.raw.{size}"]
    if size in _LARGE:
        names += [f"{start}framed_over_raw.{op}.{size}" for op in ("put", "get")]
    return names


def _names_in(mode: Mode) -> list[str]:
    return [name for size in _SIZES for name in _names_of(mode, size)]


_MODES_NAMES: Final = [f"shared_over_remote.{op}.{_MIDDLE}" for op in ("put", "get")]


def _names_of_tasks(tasks: int) -> list[str]:
    return [f"put.{tasks}tasks.batch", f"get.{tasks}tasks.batch", f"get.{tasks}tasks.chunkwise"]


async def _measure(session: Session) -> None:
    await measure_flows(session)
    await _measure_embedded(session)
    await _measure_tasks(session)
    await _measure_served(session)


async def _measure_embedded(session: Session) -> None:
    if session.wants(*_names_in("embedded")):
        async with (
            await LocalMooncake.start() as local,
            open_ground("embedded", local, segment=_segment(session), pool=_POOL) as ground,
        ):
            memory = ground.memory(max(_moved(session, "embedded", size) for size in _SIZES))
            await _write_once(ground.native, memory, _segment(session))
            await _measure_ground(session, ground, memory)


async def _measure_served(session: Session) -> None:
    """The modes in which another process holds the memory: the same process for both."""
    names: dict[Mode, list[str]] = {mode: [*_names_in(mode), *_MODES_NAMES] for mode in ("remote", "shared")}
    wanted = [mode for mode, some in names.items() if session.wants(*some)]
    if not wanted:
        return
    async with await LocalMooncake.start(memory=_segment(session)) as local, AsyncExitStack() as stack:
        grounds: dict[Mode, tuple[Ground, Memory]] = {}
        for mode in wanted:
            ground = await stack.enter_async_context(open_ground(mode, local, pool=_POOL))
            grounds[mode] = ground, ground.memory(max(_moved(session, mode, size) for size in _SIZES))
        ground, memory = grounds[wanted[0]]
        await _write_once(ground.native, memory, _segment(session))
        for ground, memory in grounds.values():
            await _measure_ground(session, ground, memory)
        if session.wants(*_MODES_NAMES):
            await _measure_modes(session, *grounds["shared"], *grounds["remote"])


async def _measure_ground(session: Session, ground: Ground, memory: Memory) -> None:
    for size in _SIZES:
        if session.wants(*_names_of(ground.mode, size)):
            await _measure_size(session, ground, size, memory.part(_moved(session, ground.mode, size)))


async def _measure_size(session: Session, ground: Ground, size: str, memory: Memory) -> None:
    start, chunk_bytes = _PREFIX[ground.mode], _SIZES[size]
    chunks = memory.source.nbytes // chunk_bytes
    times = max(1, session.effort.scaled(_KEYS_ASKED) // chunks)
    moved, asked = Amount(memory.source.nbytes, "GB/s"), Amount(times * chunks, "keys/s")
    async with (
        ours(ground, "raw", chunk_bytes, memory) as raw,
        ours(ground, "framed", chunk_bytes, memory) as framed,
    ):
        native = plain(ground, chunk_bytes, memory)
        clients: dict[ValueFormatName, Ours] = {"raw": raw, "framed": framed}
        for name, mine in clients.items():
            await session.compare(f"{start}put.{name}.{size}", mine.put(), native.put(), moved)
            await session.compare(f"{start}get.{name}.{size}", mine.get(), native.get(), moved)
            await session.compare(f"{start}exists.{name}.{size}", mine.exists(times), native.exists(times), asked)
        await session.compare(f"{start}put_unasked.raw.{size}", raw.put(), native.put_unasked(), moved)
        if size in _LARGE:
            await session.compare(f"{start}framed_over_raw.put.{size}", framed.put(), raw.put(), moved)
            await session.compare(f"{start}framed_over_raw.get.{size}", framed.get(), raw.get(), moved)
        for side in (raw, framed, native):
            await side.remove()


async def _measure_modes(
    session: Session, shared: Ground, shared_memory: Memory, remote: Ground, remote_memory: Memory
) -> None:
    chunk_bytes, nbytes = _SIZES[_MIDDLE], _moved(session, "remote", _MIDDLE)
    async with (
        ours(shared, "raw", chunk_bytes, shared_memory.part(nbytes)) as fast,
        ours(remote, "raw", chunk_bytes, remote_memory.part(nbytes)) as slow,
    ):
        moved = Amount(nbytes, "GB/s")
        await session.compare(f"shared_over_remote.put.{_MIDDLE}", fast.put(), slow.put(), moved)
        await session.compare(f"shared_over_remote.get.{_MIDDLE}", fast.get(), slow.get(), moved)
        await fast.remove()


async def _measure_tasks(session: Session) -> None:
    """Many tasks at once, each with a prefix of small chunks. The rival has a master and a segment of its own."""
    if not session.wants(*(name for tasks in _TASKS for name in _names_of_tasks(tasks))):
        return
    prefix_bytes = _TASK_CHUNKS * _TASK_CHUNK_BYTES
    most = max(_TASKS) * prefix_bytes
    async with (
        await LocalMooncake.start() as our_local,
        open_ground("embedded", our_local, segment=4 * most, pool=_POOL) as ground,
        await LocalMooncake.start() as their_local,
        async_store(their_local.master_address, 4 * most) as store,
    ):
        memory, their_memory = heap_memory(most).touch(), heap_memory(most).touch()
        for half in (their_memory.source, their_memory.sink):
            register(store, half)
        await _write_once(ground.native, memory, 4 * most)
        await _write_once(store, their_memory, 4 * most)
        for tasks in _TASKS:
            if session.wants(*_names_of_tasks(tasks)):
                nbytes = prefix_bytes * max(tasks, session.effort.scaled(_LEAST_PREFIXES))
                rival = _rival(store, their_memory.part(nbytes))
                await _measure_task_count(session, ground, tasks, memory.part(nbytes), rival)


async def _measure_task_count(session: Session, ground: Ground, tasks: int, memory: Memory, rival: Async) -> None:
    prefixes = memory.source.nbytes // (_TASK_CHUNKS * _TASK_CHUNK_BYTES)
    async with ours(ground, "raw", _TASK_CHUNK_BYTES, memory, prefixes=prefixes, limits=_MANY_SMALL) as mine:
        moved = Amount(memory.source.nbytes, "GB/s")
        await session.compare(f"put.{tasks}tasks.batch", mine.put(tasks), rival.put(tasks), moved)
        often = Amount(_READS * memory.source.nbytes, "GB/s")
        await session.compare(f"get.{tasks}tasks.batch", mine.get(tasks, _READS), rival.get(tasks, _READS), often)
        await session.compare(f"get.{tasks}tasks.chunkwise", mine.get(tasks), rival.get_chunkwise(tasks), moved)
        await mine.remove()
        await rival.remove()


def _rival(store: AsyncCalls, memory: Memory) -> Async:
    prefixes = batches(
        "bench-async-",
        memory.source.ctypes.data,
        memory.sink.ctypes.data,
        count=memory.source.nbytes // _TASK_CHUNK_BYTES,
        nbytes=_TASK_CHUNK_BYTES,
        per_batch=_TASK_CHUNKS,
    )
    return Async(AsyncRival(store, prefixes), memory)


async def _write_once(native: PlainCalls, memory: Memory, nbytes: int) -> None:
    await on_thread(partial(write_once, native, memory.source.ctypes.data, nbytes))


def _segment(session: Session) -> int:
    """Bytes that the store has: well above what three sides keep in it, since it evicts before it is full."""
    return session.effort.scaled(_SEGMENT_MIB) * _MIB


def _moved(session: Session, mode: Mode, size: str) -> int:
    """Bytes that one run of a side moves."""
    return session.effort.scaled(_MOVED[mode][size]) * _MIB


DATA: Final = Plane(
    [
        *FLOW_NAMES,
        *_names_in("embedded"),
        *(name for tasks in _TASKS for name in _names_of_tasks(tasks)),
        *_names_in("remote"),
        *_names_in("shared"),
        *_MODES_NAMES,
    ],
    _measure,
)
