"""The owner of a local Mooncake: started again when it ends by itself, given up when that does not help."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from blockbuster import BlockBuster
from local_processes import (
    blocks_termination,
    descendants,
    listeners,
    needs_mooncake,
    own_files,
    pretend_mooncake_is_in,
    processes_of,
    running,
    segments,
    until,
)

from mooncake_sparse_client.errors import LocalProcessError
from mooncake_sparse_client.stores import owner as module
from mooncake_sparse_client.stores.local import LocalMooncake

MIB = 1 << 20


@pytest.fixture(autouse=True)
async def no_blocking_calls() -> AsyncIterator[None]:
    """Our modules may not block the event loop: such a call raises."""
    guard = BlockBuster("mooncake_sparse_client")
    guard.activate()
    yield
    guard.deactivate()


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    """Every test ends with as many children, open files and tasks as it started with."""
    before, files, tasks = descendants(), own_files(), asyncio.all_tasks()
    yield
    assert descendants() <= before
    assert own_files() <= files
    assert len(asyncio.all_tasks()) <= len(tasks)


@pytest.fixture(autouse=True)
def warnings_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mooncake_sparse_client")


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill what has not ended after half a second: an owner takes three to end in good order."""
    monkeypatch.setattr("mooncake_sparse_client.stores.processes.PATIENCE", 0.5)


@pytest.fixture
def little_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.1)


@pytest.fixture
def endless_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 1000.0)


async def kill_owner(local: LocalMooncake) -> int:
    """End the owner by force, and return once that is known; its process id."""
    pid = local.owner_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: local.owner_pid != pid)
    return pid


CLIENT = """
import asyncio, sys
from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout, SparseStoreClient

layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=4096)])
settings = dict(item.split("=") for item in sys.argv[1:])

async def main():
    async with SparseStoreClient.connect(layout, model_name=settings["mode"], **settings) as client:
        sequence = client.sequence(range(100))
        put = await client.put(sequence, lambda group, chunk: bytes([chunk]) * 4096)
        got = await client.get(sequence)
        assert put.written.chunks == 6, put
        assert [bytes(got.chunks[0, chunk]) for chunk in range(6)] == [bytes([chunk]) * 4096 for chunk in range(6)]

asyncio.run(main())
"""


async def use_from_another_process(**settings: str | None) -> None:
    arguments = [f"{name}={value}" for name, value in settings.items()]
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, *arguments), stderr=subprocess.PIPE, env=dict(os.environ)
    )
    _, errors = await asyncio.wait_for(client.communicate(), 30)
    assert client.returncode == 0, errors.decode()


@needs_mooncake
@pytest.mark.usefixtures("native_library")
async def test_an_owner_that_was_killed_serves_again_after_the_pause(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    local = await LocalMooncake.start(memory=64 * MIB)
    async with local:
        address, former = local.owner_address, await segments(local)
        killed_at = loop.time()
        pid = await kill_owner(local)
        assert not local.owner_serves
        assert local.owner_pid is None
        assert local.alive
        await until(lambda: local.owner_serves, 20)
        # Applications in shared mode take an owner that is back within 4.5 s for the old one, and are lost.
        assert loop.time() - killed_at >= 6
        owner = local.owner_pid
        assert owner is not None
        assert owner != pid
        assert local.owner_address == address
        assert local.owner_restarts == 1
        assert local.alive
        assert ("127.0.0.1", int(str(address).split(":")[1])) in listeners(owner)
        assert blocks_termination(owner)
        ended, serves = (record.getMessage() for record in caplog.records)
        assert re.search(r"gone, it is started again in 6 s: mooncake_client \(pid \d+, .* signal 9 .*output", ended)
        assert re.search(rf"serves again at port \d+, pid {owner}; it is empty", serves)
        # Ten seconds after its end the master forgets the former one, and puts no values there any more.
        while (mounted := await segments(local)) == former or len(mounted) != 1:
            await asyncio.sleep(0.1)
        await asyncio.gather(
            use_from_another_process(mode="remote", master_server_address=local.master_address),
            use_from_another_process(mode="shared", owner_address=local.owner_address, pool_size="96MB"),
        )
        closing = asyncio.create_task(local.aclose())
        await until(lambda: not running(owner))
        assert running(local.master_pid)
        assert await segments(local) == []  # it was asked, not killed
        await closing


@needs_mooncake
@pytest.mark.usefixtures("impatience", "endless_pause")
async def test_closing_in_the_pause_ends_it() -> None:
    local = await LocalMooncake.start(memory=16 * MIB)
    waiting = asyncio.create_task(local.wait())
    await kill_owner(local)
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await asyncio.wait_for(local.aclose(), 10)
    assert await waiting is None
    assert not running(local.master_pid)
    assert not local.alive


@needs_mooncake
@pytest.mark.usefixtures("impatience", "little_pause")
@pytest.mark.parametrize("moment", ["guardian", "process", "serving"])
async def test_closing_in_a_restart_leaves_nothing(moment: str) -> None:
    local = await LocalMooncake.start(memory=16 * MIB)
    me = psutil.Process()
    await kill_owner(local)
    await until(lambda: len(me.children()) == 1)  # the master's guardian
    await {
        "guardian": lambda: until(lambda: len(me.children()) == 2),
        "process": lambda: until(lambda: "mooncake_client" in processes_of(os.getpid())),
        "serving": lambda: until(lambda: local.owner_serves),
    }[moment]()
    await local.aclose()
    assert processes_of(os.getpid()) == {}


@needs_mooncake
@pytest.mark.usefixtures("impatience", "endless_pause")
async def test_an_object_dropped_in_the_pause_warns_and_lets_go() -> None:
    me, files, tasks = psutil.Process(), own_files(), len(asyncio.all_tasks())
    kept = [await LocalMooncake.start(memory=16 * MIB)]
    await kill_owner(kept[0])
    assert me.children()
    with pytest.warns(ResourceWarning, match="unclosed LocalMooncake"):
        kept.clear()
    await until(lambda: not me.children() and own_files() <= files and len(asyncio.all_tasks()) == tasks)


@needs_mooncake
@pytest.mark.usefixtures("impatience", "little_pause")
async def test_an_owner_lost_with_its_guardian_serves_again() -> None:
    async with await LocalMooncake.start(memory=16 * MIB) as local:
        pid = local.owner_pid
        assert pid is not None
        psutil.Process(pid).parent().kill()  # type: ignore[union-attr]
        await until(lambda: local.owner_restarts == 1)
        assert not running(pid)
        assert local.owner_serves


@needs_mooncake
@pytest.mark.usefixtures("impatience", "endless_pause")
async def test_the_end_of_the_master_is_final_also_in_the_pause() -> None:
    async with await LocalMooncake.start(memory=16 * MIB) as local:
        await kill_owner(local)
        os.kill(local.master_pid, signal.SIGKILL)
        with pytest.raises(LocalProcessError, match=r"mooncake_master .* signal 9 "):
            await asyncio.wait_for(local.wait(), 15)
        assert not local.alive


@needs_mooncake
@pytest.mark.usefixtures("impatience", "little_pause")
async def test_a_port_taken_meanwhile_is_named_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async with await LocalMooncake.start(memory=16 * MIB) as local:
        port = int(str(local.owner_address).split(":")[1])
        await kill_owner(local)
        with socket.create_server(("127.0.0.1", port)):
            await until(lambda: f"cannot listen on owner_port={port} at 127.0.0.1" in caplog.text)
            assert not local.owner_serves
        await until(lambda: local.owner_serves)
        assert local.owner_restarts == 1


FAKE = """#!{python}
import re, signal, socket, sys, time

servers = [socket.create_server(("127.0.0.1", int(port))) for port in re.findall(r"port=([0-9]+)", " ".join(sys.argv))]
if "client" in sys.argv[0]:
    print("out of sorts", file=sys.stderr, flush=True)
    time.sleep(0.3)
    sys.exit(3)
time.sleep(60)
"""


@pytest.fixture
def frail_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of Mooncake a master that serves, and an owner that serves for a moment."""
    for name in ("mooncake_master", "mooncake_client"):
        (tmp_path / name).write_text(FAKE.format(python=sys.executable))
    pretend_mooncake_is_in(tmp_path, monkeypatch)


@pytest.mark.usefixtures("frail_owner", "little_pause")
async def test_an_owner_that_ends_again_and_again_is_given_up() -> None:
    async with await LocalMooncake.start(memory=16 * MIB) as local:
        with pytest.raises(LocalProcessError, match=r"given up: 5 times in a row[\s\S]* exit status 3[\s\S]*of sorts"):
            await asyncio.wait_for(local.wait(), 30)
        assert not local.alive
        assert not local.owner_serves
        assert local.owner_pid is None
        assert local.owner_restarts == 4
        assert running(local.master_pid)


@pytest.mark.usefixtures("frail_owner", "little_pause")
async def test_an_owner_that_was_well_in_between_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEADY", 0.0)
    async with await LocalMooncake.start(memory=16 * MIB) as local:
        await until(lambda: local.owner_restarts > module.MOST_QUICK_ENDS, 30)
        assert local.alive


PARENT = """
import asyncio, os, signal, sys
from mooncake_sparse_client.stores import local, owner

owner.PAUSE = float(sys.argv[1])

async def main():
    async with await local.LocalMooncake.start(memory=16 << 20) as mooncake:
        os.kill(mooncake.owner_pid, signal.SIGKILL)
        while not mooncake.owner_restarts if owner.PAUSE < 1 else mooncake.owner_serves:
            await asyncio.sleep(0.01)
        print(mooncake.master_pid, mooncake.owner_pid or 0, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@needs_mooncake
@pytest.mark.parametrize("pause", ["0.1", "1000"], ids=["after a restart", "in the pause"])
async def test_a_parent_killed_leaves_nothing(pause: str) -> None:
    """Of a restarted owner too: it ends first, then the master."""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, pause, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert parent.stdout is not None
    try:
        master, owner = map(int, (await asyncio.wait_for(parent.stdout.readline(), 30)).split())
        assert running(master)
        assert (owner != 0) is (pause == "0.1")
        parent.kill()
        async with asyncio.timeout(25):
            while running(master):
                await asyncio.sleep(0.01)
        assert not owner or not running(owner)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        await parent.communicate()
