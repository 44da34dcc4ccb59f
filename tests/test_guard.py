"""The states of a connection, what a native client is spared, and how the process ends while one is open."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mooncake_sparse_client.config import MooncakeConfig, load_config
from mooncake_sparse_client.errors import ClientClosedError, StoreTimeoutError
from mooncake_sparse_client.stores import leaving, spares
from mooncake_sparse_client.stores.base import GetItem, PutItem
from mooncake_sparse_client.stores.connecting import Opened
from mooncake_sparse_client.stores.guard import Guard, State
from mooncake_sparse_client.stores.local import LocalMooncake
from mooncake_sparse_client.stores.mooncake import MooncakeStore

MIB = 1 << 20
WHERE = "the store at nowhere:1"
REMOTE = MooncakeConfig("127.0.0.1:1")


@pytest.fixture
def guard() -> Iterator[Guard]:
    guard = Guard(WHERE, data_threads=1, question_threads=2)
    yield guard
    guard.let_threads_go()


def open_it(guard: Guard) -> None:
    guard.become(State.CONNECTING)
    guard.become(State.OPEN)


# The states


WAYS = {
    State.NEW: [],
    State.CONNECTING: [State.CONNECTING],
    State.OPEN: [State.CONNECTING, State.OPEN],
    State.CLOSING: [State.CONNECTING, State.OPEN, State.CLOSING],
    State.CLOSED: [State.CONNECTING, State.CLOSED],
    State.BROKEN: [State.CONNECTING, State.OPEN, State.CLOSING, State.BROKEN],
}


@pytest.mark.parametrize("state", State)
async def test_a_call_begins_in_the_open_state_alone(guard: Guard, state: State) -> None:
    for step in WAYS[state]:
        guard.become(step)
    called: list[str] = []
    for run in (guard.ask, guard.move):
        if state is State.OPEN:
            await run(lambda: called.append("x"))
        else:
            with pytest.raises(ClientClosedError, match=f"nowhere:1 is {state.value}"):
                await run(lambda: called.append("x"))
    assert called == (["x", "x"] if state is State.OPEN else [])


@pytest.mark.parametrize("state", State)
def test_only_the_drawn_transitions_exist(state: State) -> None:
    drawn = {
        *((State.NEW, State.CONNECTING), (State.CONNECTING, State.OPEN), (State.CONNECTING, State.CLOSED)),
        *((State.OPEN, State.CLOSING), (State.CLOSING, State.CLOSED), (State.CLOSING, State.BROKEN)),
    }
    for following in State:
        guard = Guard(WHERE, data_threads=1, question_threads=1)
        for step in WAYS[state]:
            guard.become(step)
        if (state, following) in drawn:
            guard.become(following)
            assert guard.state is following
        else:
            with pytest.raises(ClientClosedError):
                guard.become(following)
            assert guard.state is state


async def test_what_is_in_flight_is_waited_for_within_a_bound(guard: Guard) -> None:
    open_it(guard)
    may_end = threading.Event()
    call = asyncio.create_task(guard.ask(may_end.wait))
    await asyncio.sleep(0)
    guard.become(State.CLOSING)
    assert await guard.drained(0.01) == 1
    may_end.set()
    assert await guard.drained(30) == 0
    assert await call


async def test_a_cancelled_transfer_is_waited_for_and_a_question_is_not(guard: Guard) -> None:
    open_it(guard)
    may_end = threading.Event()
    question, transfer = (asyncio.create_task(run(may_end.wait)) for run in (guard.ask, guard.move))
    await asyncio.sleep(0.01)
    question.cancel()
    transfer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await question
    await asyncio.sleep(0.01)
    assert not transfer.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await transfer


async def test_a_store_that_was_never_opened_answers_nothing_and_closes() -> None:
    store = MooncakeStore(REMOTE)
    for call in (lambda: store.exists(["a"]), lambda: store.get([]), lambda: store.put([]), store.health):
        with pytest.raises(ClientClosedError, match="not open yet"):
            await call()
    with pytest.raises(ClientClosedError, match="not open yet"):
        _ = store.memory
    await store.aclose()


# Spare native clients


class Answering:
    """A native client that is asked whether it is still there."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)

    def is_exist(self, key: str) -> int:
        return self.answers.pop(0) if self.answers else 0


@pytest.fixture
def no_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_spares", [])
    monkeypatch.setattr(leaving, "_open", [])
    monkeypatch.setattr(leaving, "_stuck", False)


@pytest.mark.usefixtures("no_spares")
def test_a_spare_client_serves_the_next_connection_alike() -> None:
    native: Any = Answering()
    assert spares.keep(REMOTE, 5.0, native)
    other = MooncakeConfig("127.0.0.1:2")
    assert spares.take(other, 5.0) is None
    assert spares.take(REMOTE, 6.0) is None
    assert spares.take(MooncakeConfig("127.0.0.1:1", pool_size=1 << 20, lease_seconds=2), 5.0) is native
    assert spares.take(REMOTE, 5.0) is None


@pytest.mark.usefixtures("no_spares")
def test_few_are_kept_and_none_that_lends_memory() -> None:
    lending = MooncakeConfig("127.0.0.1:1", mode="embedded", global_segment_size=1 << 30)
    native: Any = Answering()
    assert not spares.keep(lending, 5.0, native)
    kept = [spares.keep(REMOTE, 5.0, native) for _ in range(5)]
    assert kept == [True, True, False, False, False]


@pytest.mark.usefixtures("no_spares")
def test_a_spare_client_whose_first_answer_is_an_old_connections_is_asked_again() -> None:
    native: Any = Answering(-900, 0)
    spares.keep(REMOTE, 5.0, native)
    assert spares.take(REMOTE, 5.0) is native


@pytest.mark.usefixtures("no_spares")
def test_a_spare_client_that_does_not_answer_is_left_to_the_end_of_the_process() -> None:
    native: Any = Answering(-900, -900)
    spares.keep(REMOTE, 5.0, native)
    assert spares.take(REMOTE, 5.0) is None
    assert leaving._stuck


def test_an_answer_that_does_not_come_is_not_waited_for() -> None:
    may_end = threading.Event()
    try:
        assert leaving.answer_within(0.01, may_end.wait) is None
    finally:
        may_end.set()
    assert leaving.answer_within(30, lambda: 7) == 7


@pytest.mark.parametrize("mode", ["remote", "shared"])
async def test_closing_keeps_the_native_client_for_the_next_connection(
    mode: Any, serving_master: LocalMooncake, no_spares: None, fresh: str
) -> None:
    where = {"master_server_address": serving_master.master_address, "owner_address": serving_master.owner_address}
    config = load_config(mode, environ={}, pool_size=4 * MIB, **where)
    natives = []
    for number in range(3):
        async with await MooncakeStore.connect(config) as store:
            natives.append(store._own_memory.plain_native)
            assert await store.put([PutItem(f"{fresh}{number}", (memoryview(b"first"),))]) == [None]
            room = bytearray(5)
            assert await store.get([GetItem(f"{fresh}0", (memoryview(room),))]) == [None]
            assert room == b"first"
        assert store._guard.state is State.CLOSED
    assert natives[0] is natives[1] is natives[2]
    (spare,) = spares._spares
    spares._spares.clear()
    await asyncio.to_thread(spare[1].close)
    leaving.closed(spare[1])


# The end of the process


SCRIPT = """
import asyncio, os, signal, sys, time
from mooncake_sparse_client.config import load_config
from mooncake_sparse_client.stores.base import GetItem, PutItem
from mooncake_sparse_client.stores.mooncake import MooncakeStore

mode, what, master, owner = sys.argv[1:5]
pids = list(map(int, sys.argv[5:7]))
settings = {"global_segment_size": 64 << 20, "local_hostname": "127.0.0.1"} if mode == "embedded" else {}
config = load_config(
    mode, master_server_address=master, owner_address=owner, environ={}, pool_size=4 << 20, **settings
)
key = f"of {os.getpid()}"

async def main():
    global store, calls
    store = await MooncakeStore.connect(config, timeout=5)
    while await store.put([PutItem(key, (memoryview(b"first"),))]) != [None]:
        await asyncio.sleep(0.1)  # it was to go to a process that ended badly in a test before
    if what == "in flight":
        calls = [asyncio.create_task(store.exists([f"{n} {m}" for m in range(50000)])) for n in range(4)]
        await asyncio.sleep(0.01)
    if what == "raising":
        raise LookupError("of the application")
    if what == "raised in a task":
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0.05)
    if what == "terminated":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(5)
    if what == "hung":
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        calls = [asyncio.create_task(store.exists(["a"]))]
        await asyncio.sleep(0.2)
    if what == "closed while hung":
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        closing = asyncio.create_task(store.aclose())
        try:
            await asyncio.wait_for(closing, 20)
        except Exception as error:
            print(type(error).__name__)

if what == "forked":  # an event loop cannot be shared with a fork, whatever it does
    loop = asyncio.new_event_loop()
    loop.run_until_complete(MooncakeStore.connect(config))
    child = os.fork()
    if child == 0:
        sys.exit(6)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 6, status
    sys.exit(5)
asyncio.run(main())
sys.exit(5)
"""
#: Seconds in which the process must be gone: a native call to what hangs takes 5 (in shared mode always 30).
BOUND = 60.0


@pytest.mark.parametrize("mode", ["embedded", "remote", "shared"])
@pytest.mark.parametrize(
    ("what", "status"),
    [
        *(("idle", 5), ("in flight", 5), ("raising", 1), ("raised in a task", 5), ("terminated", 5), ("forked", 5)),
        ("closed while hung", 5),
    ],
)
def test_the_process_ends_in_order(serving: Callable[[], LocalMooncake], mode: str, what: str, status: int) -> None:
    local = serving()
    done = run(local, mode, what)
    assert done.returncode == status, done
    if what == "raising":
        assert "LookupError: of the application" in done.stderr
    if what == "closed while hung":
        assert "is left to the end of the process" in done.stderr or "StoreTimeoutError" in done.stdout, done


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["embedded", "remote"])
def test_the_process_ends_in_order_under_a_call_that_hangs(serving: Callable[[], LocalMooncake], mode: str) -> None:
    done = run(serving(), mode, "hung")
    assert done.returncode == 5, done


def run(local: LocalMooncake, mode: str, what: str) -> subprocess.CompletedProcess[str]:
    pids = [local.master_pid, local.owner_pid]
    try:
        return subprocess.run(
            [
                *(sys.executable, "-W", "ignore", "-c", SCRIPT, mode, what),
                *(local.master_address, str(local.owner_address), *map(str, pids)),
            ],
            capture_output=True,
            text=True,
            timeout=BOUND,
            env={
                **{name: text for name, text in os.environ.items() if not name.startswith("MC_")},
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            check=False,
        )
    finally:
        for pid in pids:
            assert pid is not None
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def serving(serving_master: LocalMooncake) -> Callable[[], LocalMooncake]:
    return lambda: serving_master


def test_what_is_collected_unclosed_is_warned_about_and_kept_for_the_end(
    serving_master: LocalMooncake, fixtures_loop: Any, recwarn: pytest.WarningsRecorder
) -> None:
    config = load_config("remote", master_server_address=serving_master.master_address, environ={}, pool_size=MIB)
    store = fixtures_loop.run(MooncakeStore.connect(config))
    memory = store._own_memory
    began = time.perf_counter()
    del store
    gc.collect()
    assert time.perf_counter() - began < 30
    assert any("never closed" in str(warning.message) for warning in recwarn)
    assert memory.plain_native in leaving._open
    fixtures_loop.run(asyncio.to_thread(memory.close))


async def test_closing_under_a_call_that_never_ends_says_so(monkeypatch: pytest.MonkeyPatch, no_spares: None) -> None:
    store = MooncakeStore(REMOTE, close_timeout=0.05)
    may_end = threading.Event()

    class Memory:
        sharing = None
        native = Answering()
        left = False

        def run_on(self, run: object) -> None:
            pass

        def leave(self) -> None:
            self.left = True

    memory: Any = Memory()
    store._guard.become(State.CONNECTING)
    store._attach(Opened(memory.native, memory))
    call = asyncio.create_task(store._guard.ask(may_end.wait))
    await asyncio.sleep(0)
    with pytest.raises(StoreTimeoutError, match="left to the end of the process"):
        await store.aclose()
    assert memory.left
    assert store._guard.state is State.BROKEN
    with pytest.raises(ClientClosedError, match="connect again"):
        await store.exists(["a"])
    may_end.set()
    await call
