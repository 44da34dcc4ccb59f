"""``bench``: how it measures, what it compares, and what it writes."""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_sparse_client import MemoryStore
from mooncake_sparse_client.cli.bench import data, flow
from mooncake_sparse_client.cli.bench.ground import Ground, Memory, heap_memory
from mooncake_sparse_client.cli.bench.measure import (
    Amount,
    Comparison,
    LoopDelay,
    MemoryGrowth,
    Ratio,
    Side,
    in_tasks,
    percentile,
    side_by_side,
    timed,
    timed_on_thread,
)
from mooncake_sparse_client.cli.bench.report import BenchReport
from mooncake_sparse_client.cli.bench.rivals import AsyncRival, Batch, PlainLoop, batches, write_once
from mooncake_sparse_client.cli.bench.session import Effort, Plane, Session
from mooncake_sparse_client.cli.bench.sides import ours, plain
from mooncake_sparse_client.cli.main import main
from mooncake_sparse_client.errors import ConfigError, StoreAnswerError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_blocking_calls() -> None:
    """No guard here: a command's loop serves nobody else, and a test blocks it to see that this is noticed."""


# Measuring


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.integers(1, 100))
def test_a_percentile_is_the_smallest_that_so_many_are_not_above(values: list[float], percent: int) -> None:
    enough = [value for value in values if 100 * sum(other <= value for other in values) >= percent * len(values)]
    assert percentile(values, percent) == min(enough)


def test_a_ratio_is_taken_repeat_by_repeat() -> None:
    found = Comparison("x", "GB/s", ours=(2.0, 30.0, 1.0), theirs=(1.0, 10.0, 2.0))
    assert found.ratio == Ratio(median=2.0, min=0.5, max=3.0)
    assert found.typical == (2.0, 2.0)


def scripted(log: list[str], name: str, seconds: list[float]) -> Side:
    """A side that says how long each run took, and notes all that is asked of it."""
    left = iter(seconds)

    async def prepare() -> None:
        log.append(f"prepare {name}")

    async def run() -> float:
        log.append(f"run {name}")
        return next(left)

    return Side(run, prepare, lambda: log.append(f"check {name}"))


async def test_sides_take_turns_after_a_warm_up() -> None:
    log: list[str] = []
    a = scripted(log, "a", [100.0, 1.0, 3.0, 1.0, 1.0])
    b = scripted(log, "b", [200.0, 8.0, 8.0, 1.0, 3.0])
    found = await side_by_side("x", a, b, Amount(16, "keys/s"), repeats=2)
    assert [line for line in log if not line.startswith("prepare")] == [
        *("run a", "check a", "run b", "check b"),
        *("run a", "run b", "run b", "run a") * 2,
    ]
    for number, line in enumerate(log):
        if line.startswith("run"):
            assert log[number - 1] == line.replace("run", "prepare")
    # 32 keys in 4 and in 2 seconds, against 32 in 16 and in 4: the warm-up counts for nothing.
    assert found == Comparison("x", "keys/s", ours=(8.0, 16.0), theirs=(2.0, 8.0))
    assert found.ratio == Ratio(median=3.0, min=2.0, max=4.0)


def test_bytes_are_counted_by_the_billion() -> None:
    assert Amount(3_000_000_000, "GB/s").rate(2.0) == 1.5


async def test_a_side_that_did_not_do_the_work_ends_the_comparison() -> None:
    def wrong() -> None:
        raise StoreAnswerError("wrong")

    async def run() -> float:
        return 1.0

    with pytest.raises(StoreAnswerError):
        await side_by_side("x", Side(run), Side(run, check=wrong), Amount(1, "GB/s"), repeats=1)


async def test_tasks_share_the_items() -> None:
    at_once, most, seen = 0, 0, []

    async def work(item: int) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        seen.append(item)
        at_once -= 1

    await in_tasks(3, range(10), work)
    assert sorted(seen) == list(range(10))
    assert most == 3


async def test_tasks_are_over_when_one_has_failed() -> None:
    done = []

    async def work(item: int) -> None:
        if item == 0:
            raise StoreAnswerError("wrong")
        await asyncio.sleep(0.01)
        done.append(item)

    with pytest.raises(StoreAnswerError):
        await in_tasks(4, range(4), work)
    assert sorted(done) == [1, 2, 3]


async def test_blocking_work_is_over_before_a_cancelled_wait_is() -> None:
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(10)
        ended.set()

    waiting = asyncio.create_task(timed_on_thread(work))
    await asyncio.to_thread(begun.wait, 10)
    waiting.cancel()
    asyncio.get_running_loop().call_later(0.02, go.set)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


async def test_work_is_timed() -> None:
    assert await timed(asyncio.sleep(0.02)) >= 0.019
    assert await timed_on_thread(partial(time.sleep, 0.02)) >= 0.019


async def test_a_loop_that_is_held_is_late() -> None:
    async with LoopDelay() as delay:
        await asyncio.sleep(0.01)
        time.sleep(0.1)
    figures = delay.figures()
    assert figures["max"] >= 90
    assert figures["p50"] <= figures["p99"] <= figures["max"]


def test_the_peak_of_memory_is_seen_when_it_is_gone_again() -> None:
    with MemoryGrowth() as growth:
        memory = np.ones(64 * MIB, dtype=np.uint8)
        time.sleep(0.1)
        del memory
    assert 60 * MIB < growth.peak < 128 * MIB


# What is wanted


async def test_what_is_not_wanted_does_not_run() -> None:
    done: list[str] = []
    session = Session(Effort(repeats=1), only=["get.*", "put.raw.4KiB"], done=done.append)
    log: list[str] = []
    for name in ("get.raw.4KiB", "put.raw.4KiB", "put.raw.64KiB"):
        sides = (scripted(log, f"{name} {who}", [1.0] * 3) for who in ("ours", "theirs"))
        await session.compare(name, *sides, Amount(1, "GB/s"))
    assert done == [found.name for found in session.comparisons] == ["get.raw.4KiB", "put.raw.4KiB"]
    assert not any("put.raw.64KiB" in line for line in log)


def test_a_pattern_that_fits_nothing_is_told() -> None:
    async def measure(session: Session) -> None:
        raise AssertionError

    plane = Plane(["get.raw", "put.raw"], measure)
    plane.check(["get.*", "*"])
    with pytest.raises(ConfigError, match=r"--only 'gte\.\*' fits no measurement; there are get\.raw, put\.raw"):
        plane.check(["get.*", "gte.*"])


# The report


REPORT = BenchReport(
    plane="data",
    repeats=2,
    comparisons=[
        Comparison("get.raw.4KiB", "GB/s", ours=(2.0, 4.0), theirs=(4.0, 4.0)),
        Comparison("exists.raw.4KiB", "keys/s", ours=(1e6, 3e6), theirs=(1e6, 1e6)),
    ],
    figures={"extra_memory_mib": 41.5},
    seconds=12.34,
)


def test_the_report_as_json() -> None:
    found = json.loads(json.dumps(REPORT.as_json()))
    assert found["ratios"] == {
        "get.raw.4KiB": {"median": 0.75, "min": 0.5, "max": 1.0},
        "exists.raw.4KiB": {"median": 2.0, "min": 1.0, "max": 3.0},
    }
    assert found["figures"] == {
        "extra_memory_mib": 41.5,
        "throughput_gbps.get.raw.4KiB.ours": 3.0,
        "throughput_gbps.get.raw.4KiB.theirs": 4.0,
        "keys_per_second.exists.raw.4KiB.ours": 2e6,
        "keys_per_second.exists.raw.4KiB.theirs": 1e6,
    }
    assert found["plane"] == "data"
    assert found["machine"]["cores"] >= 1


def test_the_report_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    REPORT.show()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["get.raw.4KiB", "3.00", "4.00", "GB/s", "0.75", "0.50", "1.00"] in rows
    assert ["exists.raw.4KiB", "2,000,000", "1,000,000", "keys/s", "2.00", "1.00", "3.00"] in rows
    assert ["extra_memory_mib", "41.50"] in rows


# The sides


class FakeNative:
    """The native calls over a dictionary, by addresses as the real ones."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: list[tuple[str, int]] = []

    def register_buffer(self, pointer: int, size: int) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.calls.append(("exist", len(keys)))
        return [int(key in self.values) for key in keys]

    def batch_put_from(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        self.calls.append(("put", len(keys)))
        for key, pointer, size in zip(keys, pointers, sizes, strict=True):
            self.values.setdefault(key, ctypes.string_at(pointer, size))
        return [0] * len(keys)

    def batch_get_into(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        self.calls.append(("get", len(keys)))
        return list(map(self.get_into, keys, pointers, sizes))

    def get_into(self, key: str, pointer: int, size: int) -> int:
        value = self.values.get(key)
        if value is None:
            return -704
        ctypes.memmove(pointer, value, len(value))
        return len(value)

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        self.calls.append(("remove", len(keys)))
        return [0 if self.values.pop(key, None) is not None else -704 for key in keys]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self, name.removeprefix("async_")) if name.startswith("async_") else None
        if call is None:
            raise AttributeError(name)

        async def answer(*arguments: Any) -> Any:
            return call(*arguments)

        return answer


def calls_over(memory: Memory, nbytes: int, per_batch: int) -> list[Batch]:
    source, sink = memory.source.ctypes.data, memory.sink.ctypes.data
    count = memory.source.nbytes // nbytes
    return batches("k", source, sink, count=count, nbytes=nbytes, per_batch=per_batch)


def test_a_plain_loop_moves_what_lies_in_memory_batch_by_batch() -> None:
    native, memory = FakeNative(), heap_memory(1000).touch()
    loop = PlainLoop(native, calls_over(memory, 100, per_batch=4), keys_per_question=6)  # type: ignore[arg-type]
    loop.put()
    assert b"".join(native.values[f"k{number}"] for number in range(10)) == memory.source.tobytes()
    loop.get()
    memory.check()
    loop.exists()
    loop.remove()
    assert not native.values
    loop.put_asking()
    assert native.calls == [
        *[("put", 4), ("put", 4), ("put", 2)],
        *[("get", 4), ("get", 4), ("get", 2)],
        *[("exist", 6), ("exist", 4)],
        *[("remove", 6), ("remove", 4)],
        *[("exist", 4), ("put", 4)] * 2,
        *[("exist", 2), ("put", 2)],
    ]


def test_a_plain_loop_that_fails_is_not_fast() -> None:
    native, memory = FakeNative(), heap_memory(1000).touch()
    loop = PlainLoop(native, calls_over(memory, 100, per_batch=10), keys_per_question=10)  # type: ignore[arg-type]
    with pytest.raises(StoreAnswerError, match="a native get of 10 keys answered -704 where 100 is right"):
        loop.get()
    with pytest.raises(StoreAnswerError, match="existence"):
        loop.exists()
    loop.put()
    del native.values["k7"]
    with pytest.raises(StoreAnswerError, match="answered -704"):
        loop.get()
    with pytest.raises(StoreAnswerError, match="existence"):
        loop.put_asking()


async def test_the_asyncio_rival_moves_what_lies_in_memory() -> None:
    native, memory = FakeNative(), heap_memory(1200).touch()
    rival = AsyncRival(native, calls_over(memory, 100, per_batch=4))  # type: ignore[arg-type]
    await rival.put(2)
    assert len(native.values) == 12
    await rival.get(2)
    memory.check()
    await rival.get_chunkwise(3)
    memory.check()
    await rival.remove()
    assert not native.values
    await rival.fill()
    await rival.get(1)
    memory.check()


def test_writing_once_leaves_nothing() -> None:
    native, memory = FakeNative(), np.ones(MIB, dtype=np.uint8)
    write_once(native, memory.ctypes.data, 40 * MIB)  # type: ignore[arg-type]
    assert native.calls == [("put", 32), ("put", 8), ("remove", 40)]
    assert not native.values


def test_what_was_not_read_is_told() -> None:
    memory = heap_memory(100).touch()
    memory.sink[:] = memory.source
    memory.check()
    with pytest.raises(StoreAnswerError, match="not what was written"):
        memory.check()  # the sink was emptied


@pytest.mark.parametrize("value_format", ["raw", "framed"])
async def test_both_sides_move_all_of_memory(value_format: Any) -> None:
    store = MemoryStore()
    ground = Ground("embedded", store, FakeNative())  # type: ignore[arg-type]
    memory = ground.memory(64 * 1024)
    async with ours(ground, value_format, 1024, memory, prefixes=4) as mine:
        native = plain(ground, 1024, memory)
        for side in (mine.put(2), mine.get(2), mine.exists(3), native.put(), native.get(), native.exists(3)):
            await side.prepare()
            assert await side.run() > 0
            side.check()
        assert len(store.keys()) == 64
        with pytest.raises(StoreAnswerError, match="a put of 16 chunks found or moved 0"):
            await mine.put().run()  # not prepared: all is there
        await mine.remove()
        assert not store.keys()
        with pytest.raises(StoreAnswerError, match="a get of 16 chunks found or moved 0"):
            await mine.get().run()
        with pytest.raises(StoreAnswerError, match="a question of 16 chunks found or moved 0"):
            await mine.exists(1).run()


# The whole


@pytest.fixture
def no_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything on stores of this process, and with little data."""

    class NoProcesses:
        master_address = ""

        @classmethod
        async def start(cls, **_: object) -> NoProcesses:
            return cls()

        async def __aenter__(self) -> NoProcesses:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    @asynccontextmanager
    async def open_ground(mode: Any, *_: object, **__: object) -> AsyncIterator[Ground]:
        yield Ground(mode, MemoryStore(), FakeNative())  # type: ignore[arg-type]

    @asynccontextmanager
    async def async_store(*_: object) -> AsyncIterator[FakeNative]:
        yield FakeNative()

    for module in (data, flow):
        monkeypatch.setattr(module, "LocalMooncake", NoProcesses)
        monkeypatch.setattr(module, "open_ground", open_ground)
    monkeypatch.setattr(data, "async_store", async_store)
    monkeypatch.setattr(data, "_TASK_CHUNKS", 2)
    monkeypatch.setattr(flow, "_STORED", MIB)
    monkeypatch.setattr(flow, "new_native_store", lambda: None)


@pytest.mark.usefixtures("no_mooncake")
async def test_everything_that_is_named_is_measured() -> None:
    done: list[str] = []
    session = Session(Effort(repeats=1, scale=0.001), done=done.append)
    await data.DATA.measure(session)
    assert sorted(done) == sorted(data.DATA.names)
    assert len(set(done)) == len(done)
    for found in session.comparisons:
        assert found.ratio.median > 0
    for name in ("loop_delay_ms.p99", "loop_delay_ms.remote.p99", "extra_memory_mib", "extra_memory_bound_mib"):
        assert math.isfinite(session.figures[name])
    assert session.figures["loop_delay_ms.p99"] == session.figures["loop_delay_ms.embedded.p99"]
    assert session.figures["extra_memory_bound_mib"] == 128


def test_the_names_that_others_rely_on() -> None:
    names = set(data.DATA.names)
    for start in ("", "remote.", "shared."):
        for size in ("4KiB", "64KiB", "1MiB"):
            for value_format in ("raw", "framed"):
                assert {f"{start}{op}.{value_format}.{size}" for op in ("put", "get", "exists")} <= names
            assert f"{start}put_unasked.raw.{size}" in names
        assert {f"{start}framed_over_raw.{op}.64KiB" for op in ("put", "get")} <= names
    for tasks in (1, 16, 256):
        assert {f"get.{tasks}tasks.batch", f"get.{tasks}tasks.chunkwise", f"put.{tasks}tasks.batch"} <= names
    assert {"shared_over_remote.get.64KiB", "extra_memory_mib"} <= names


@pytest.mark.usefixtures("native_library")
def test_bench_on_a_real_master(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert main(["bench", "--quick", "--repeats", "1", "--only", "get.raw.4KiB", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert list(found["ratios"]) == ["get.raw.4KiB"]
    ratio = found["ratios"]["get.raw.4KiB"]
    assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
    rates = {name: found["figures"][f"throughput_gbps.get.raw.4KiB.{name}"] for name in ("ours", "theirs")}
    assert rates["ours"] / rates["theirs"] == pytest.approx(ratio["median"])
    assert found["repeats"] == 1
    assert any(line.startswith("get.raw.4KiB ") for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing.*"], "bench: --only 'nothing.*' fits no measurement; there are extra_memory_mib, "),
        (["--repeats", "0"], "bench: --repeats must be positive, not 0"),
        (["--json", "/nowhere/x.json"], "bench: --json /nowhere/x.json cannot be written"),
    ],
)
def test_what_cannot_run_is_said_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(message)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--help"])
    assert ended.value.code == 0
    assert "--plane" in capsys.readouterr().out
