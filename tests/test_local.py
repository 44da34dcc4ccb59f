"""Real Mooncake processes on this machine: they start, serve, and are gone afterwards in every case."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from blockbuster import BlockBuster
from local_processes import (
    blocks_termination,
    descendants,
    http_get,
    listeners,
    needs_mooncake,
    own_files,
    pretend_mooncake_is_in,
    processes_of,
    running,
    segments,
    until,
)

from mooncake_sparse_client.errors import ConfigError, LocalProcessError, MissingLibraryError
from mooncake_sparse_client.stores import _guardian
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
def nothing_left() -> Iterator[None]:
    """Every test ends with as many children and open files as it started with."""
    before = descendants()
    files = own_files()
    yield
    assert descendants() <= before
    assert own_files() <= files


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill what has not ended after half a second: an owner takes three to end in good order."""
    monkeypatch.setattr("mooncake_sparse_client.stores.processes.PATIENCE", 0.5)


@needs_mooncake
async def test_a_master_alone_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_LOG_LEVEL", raising=False)
    async with await LocalMooncake.start(lease_ttl_seconds=1.5) as local:
        host, port = local.master_address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
        await writer.wait_closed()
        status, body = await http_get(local.metrics_port, "/health")
        assert status == 200
        assert '"service_ready":true' in body
        assert local.owner_address is None
        assert local.owner_pid is None
        assert local.alive
        assert psutil.Process(local.master_pid).name() == "mooncake_master"
        assert "--default_kv_lease_ttl=1500" in psutil.Process(local.master_pid).cmdline()
        assert "--minloglevel=2" in psutil.Process(local.master_pid).cmdline()
        assert listeners(local.master_pid) == {("127.0.0.1", int(port)), ("127.0.0.1", local.metrics_port)}


@needs_mooncake
async def test_an_owner_mounts_its_memory_and_stops_before_the_master() -> None:
    local = await LocalMooncake.start(memory=16 * MIB)
    owner = local.owner_pid
    assert owner is not None
    assert local.owner_serves
    assert local.owner_restarts == 0
    assert len(await segments(local)) == 1
    assert psutil.Process(owner).name() == "mooncake_client"
    assert os.getsid(owner) != os.getsid(0)  # Ctrl-C in a terminal is for us, who stop it in order
    assert blocks_termination(owner)
    assert not blocks_termination(local.master_pid)  # or it would never react
    closing = asyncio.create_task(local.aclose())
    await until(lambda: not running(owner))
    assert running(local.master_pid)
    assert await segments(local) == []  # it had the time to unmount: it was asked, not killed
    assert not local.alive
    await closing
    assert not running(local.master_pid)
    assert local.owner_pid is None
    assert not local.owner_serves


@needs_mooncake
@pytest.mark.usefixtures("impatience")
async def test_an_owner_listens_on_all_addresses_only_where_no_flag_can_help() -> None:
    async with await LocalMooncake.start(memory=16 * MIB) as local:
        host, port = str(local.owner_address).split(":")
        assert local.owner_pid is not None
        here = listeners(local.owner_pid)
        assert (host, int(port)) in here
        # The handshake, and the data: chosen and opened by Mooncake itself, see the documentation.
        others = here - {(host, int(port))}
        assert {address for address, _ in others} == {"0.0.0.0", "::"}  # noqa: S104
        assert len(others) == 2
        assert all(15000 <= port <= 17000 for _, port in others)


@needs_mooncake
async def test_closing_is_idempotent_and_ends_waiting() -> None:
    local = await LocalMooncake.start()
    waiting = asyncio.create_task(local.wait())
    await asyncio.gather(local.aclose(), local.aclose())
    await local.aclose()
    assert not psutil.pid_exists(local.master_pid)
    assert await waiting is None
    assert not local.alive


@needs_mooncake
async def test_closing_finishes_although_cancelled() -> None:
    local = await LocalMooncake.start()
    closing = asyncio.create_task(local.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not psutil.pid_exists(local.master_pid)


@needs_mooncake
async def test_a_close_within_a_timeout_still_leaves_nothing() -> None:
    local = await LocalMooncake.start()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await local.aclose()
    assert not psutil.pid_exists(local.master_pid)


@needs_mooncake
@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize("moment", ["at once", "guardian", "master", "owner"])
async def test_a_cancelled_start_leaves_nothing(moment: str) -> None:
    starting = asyncio.create_task(LocalMooncake.start(memory=16 * MIB))
    me = psutil.Process()
    await {
        "at once": lambda: asyncio.sleep(0),
        "guardian": lambda: until(lambda: bool(me.children())),
        "master": lambda: until(lambda: "mooncake_master" in processes_of(os.getpid())),
        "owner": lambda: until(lambda: "mooncake_client" in processes_of(os.getpid())),
    }[moment]()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert processes_of(os.getpid()) == {}


@needs_mooncake
async def test_a_start_out_of_time_says_so_and_leaves_nothing() -> None:
    with pytest.raises(LocalProcessError, match=r"mooncake_master .* did not serve within startup_timeout"):
        await LocalMooncake.start(startup_timeout=0.001)
    assert processes_of(os.getpid()) == {}


@needs_mooncake
@pytest.mark.parametrize("argument", ["rpc_port", "metrics_port", "owner_port"])
async def test_a_given_port_that_is_taken_is_named(argument: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LocalProcessError, match=rf"{argument}={port}\b.*pass another port"):
            await LocalMooncake.start(memory=16 * MIB, **{argument: port})


@needs_mooncake
async def test_two_equal_ports_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(LocalProcessError, match=f"={port} "):
        await LocalMooncake.start(rpc_port=port, metrics_port=port)


@needs_mooncake
@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize("lost", ["rpc_port", "owner_port"])
async def test_a_port_lost_to_another_program_is_replaced(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between choosing a port and its use another program may take it, and even accept connections."""
    from mooncake_sparse_client.stores import local as module

    choose, thieves = module.choose_ports, contextlib.ExitStack()
    stolen: list[int] = []

    def choose_and_lose(wanted: dict[str, int | None]) -> dict[str, int]:
        chosen = choose(wanted)
        if not stolen:
            thieves.enter_context(socket.create_server(("127.0.0.1", chosen[lost])))
            stolen.append(chosen[lost])
        return chosen

    monkeypatch.setattr(module, "choose_ports", choose_and_lose)
    with thieves:
        async with await LocalMooncake.start(memory=16 * MIB) as local:
            assert stolen
            assert not {str(stolen[0])} & {a.split(":")[1] for a in (local.master_address, str(local.owner_address))}
            assert len(await segments(local)) == 1


@needs_mooncake
@pytest.mark.usefixtures("impatience")
async def test_a_master_can_start_again_on_its_port() -> None:
    first = await LocalMooncake.start(memory=16 * MIB)
    ports = {"rpc_port": int(first.master_address.split(":")[1]), "metrics_port": first.metrics_port}
    _, writer = await asyncio.open_connection("127.0.0.1", ports["rpc_port"])
    await first.aclose()  # with a connection open, which then lingers on the server's side
    writer.close()
    async with await LocalMooncake.start(
        memory=16 * MIB, owner_port=int(str(first.owner_address).split(":")[1]), **ports
    ) as second:
        assert second.master_address == first.master_address
        assert second.owner_address == first.owner_address
        assert len(await segments(second)) == 1


@needs_mooncake
@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize("victim", ["mooncake_master", "mooncake_client"])
async def test_a_process_that_dies_is_reported(victim: str) -> None:
    async with await LocalMooncake.start(memory=16 * MIB, restart_owner=False) as local:
        processes_of(os.getpid())[victim].kill()
        with pytest.raises(LocalProcessError, match=rf"{victim} .* signal 9 "):
            await asyncio.wait_for(local.wait(), 15)
        assert not local.alive


@needs_mooncake
@pytest.mark.usefixtures("impatience")
async def test_a_process_never_outlives_its_guardian() -> None:
    async with await LocalMooncake.start() as local:
        psutil.Process(local.master_pid).parent().kill()  # type: ignore[union-attr]
        with pytest.raises(LocalProcessError, match=r"mooncake_master .* lost with its guardian"):
            await asyncio.wait_for(local.wait(), 15)
    assert not running(local.master_pid)


@needs_mooncake
@pytest.mark.usefixtures("impatience")
async def test_a_process_that_does_not_react_is_killed() -> None:
    local = await LocalMooncake.start()
    os.kill(local.master_pid, signal.SIGSTOP)
    await local.aclose()
    assert not psutil.pid_exists(local.master_pid)


@needs_mooncake
@pytest.mark.usefixtures("impatience")
async def test_the_user_chooses_the_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    async with await LocalMooncake.start() as local:
        os.kill(local.master_pid, signal.SIGKILL)
        with pytest.raises(LocalProcessError, match=r"last output:\n[\s\S]*Master service started on port"):
            await asyncio.wait_for(local.wait(), 15)


@needs_mooncake
async def test_an_object_dropped_unclosed_warns_and_lets_go() -> None:
    me = psutil.Process()
    files = own_files()
    kept = [await LocalMooncake.start()]
    assert me.children()
    with pytest.warns(ResourceWarning, match="unclosed LocalMooncake"):
        kept.clear()
    await until(lambda: not me.children() and own_files() == files)


PARENT = """
import asyncio, os, sys, threading, time
from mooncake_sparse_client.stores import local as module, processes

processes.PATIENCE = float(os.environ["PATIENCE"])

async def main():
    global local  # keeps it from being collected with the thread
    local = await module.LocalMooncake.start(memory=16 << 20)
    if os.environ["FORK"] == "1" and os.fork() == 0:
        time.sleep(60)  # a sibling that holds all the pipes
        os._exit(0)
    print(local.master_pid, local.owner_pid, flush=True)
    if os.environ["KEEP_RUNNING"] == "1":
        await asyncio.sleep(60)
    else:
        asyncio.get_running_loop().stop()

def run():
    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    loop.run_forever()

thread = threading.Thread(target=run, daemon=True)
thread.start()
if os.environ["KEEP_RUNNING"] == "0":
    thread.join()
    print("thread ended", flush=True)
time.sleep(60)
"""


@needs_mooncake
@pytest.mark.parametrize("variant", ["thread runs", "thread ended", "forked sibling"])
async def test_a_parent_killed_leaves_nothing(variant: str) -> None:
    """The processes live with the process that started them, not with its thread; then go, owner first."""
    environment = {
        **os.environ,
        "KEEP_RUNNING": "0" if variant == "thread ended" else "1",
        "FORK": "1" if variant == "forked sibling" else "0",
        "PATIENCE": "1" if variant == "forked sibling" else "5",
    }
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=subprocess.PIPE, start_new_session=True, env=environment
    )
    assert parent.stdout is not None
    try:
        master, owner = map(int, (await asyncio.wait_for(parent.stdout.readline(), 30)).split())
        if variant == "thread ended":
            assert await asyncio.wait_for(parent.stdout.readline(), 30) == b"thread ended\n"
        else:
            await asyncio.sleep(0.7)
        assert running(master)
        assert running(owner)
        parent.kill()
        deadline = time.monotonic() + 25
        while running(master) or running(owner):
            assert time.monotonic() < deadline
            if variant != "forked sibling" and not running(master):
                assert not running(owner)
            await asyncio.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        await parent.wait()
        await parent.stdout.read()


@needs_mooncake
async def test_signals_to_the_process_group_are_for_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with await LocalMooncake.start() as local:
        guardian = psutil.Process(local.master_pid).parent()
        assert guardian is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            guardian.send_signal(number)
        await asyncio.sleep(0.7)  # longer than the guardian's own pace
        assert guardian.is_running()
        assert local.alive
        assert (await http_get(local.metrics_port, "/health"))[0] == 200


async def test_memory_must_fit() -> None:
    with pytest.raises(ConfigError, match=rf"memory={16 * MIB - 1} .* {16 * MIB} "):
        await LocalMooncake.start(memory=16 * MIB - 1)
    total = psutil.virtual_memory().total
    with pytest.raises(ConfigError, match=rf"memory={total + 1} bytes exceeds the \d+ available"):
        await LocalMooncake.start(memory=total + 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"rpc_port": 0},
        {"metrics_port": 65536},
        {"owner_port": 50000},
        {"lease_ttl_seconds": 0.0},
        {"lease_ttl_seconds": float("inf")},
        {"lease_ttl_seconds": float("nan")},
    ],
)
async def test_settings_out_of_range_are_named(settings: dict[str, float]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        await LocalMooncake.start(**settings)  # type: ignore[arg-type]


async def test_a_missing_package_comes_with_the_lines_that_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_mooncake_is_in(None, monkeypatch)
    with pytest.raises(MissingLibraryError, match="mooncake_master") as caught:
        await LocalMooncake.start()
    for build in ("-non-cuda", "", "-cuda13"):
        assert f"pip install mooncake-transfer-engine{build} " in str(caught.value)


async def test_a_missing_system_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mooncake_master"
    program.write_text(
        "#!/bin/sh\necho 'mooncake_master: error while loading shared libraries: libnuma.so.1: cannot open "
        "shared object file: No such file or directory' >&2\nexit 127\n"
    )
    program.chmod(0o644)  # as some installers leave it: start must make it executable
    pretend_mooncake_is_in(tmp_path, monkeypatch)
    with pytest.raises(MissingLibraryError, match=r"libnuma\.so\.1") as caught:
        await LocalMooncake.start()
    assert "apt-get install -y libibverbs1 libnuma1 libcurl4" in str(caught.value)


async def test_a_process_that_ends_at_once_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mooncake_master"
    program.write_text("#!/bin/sh\nyes 'far too much' | head -n 100000\necho bad configuration >&2\nexit 3\n")
    pretend_mooncake_is_in(tmp_path, monkeypatch)
    with pytest.raises(LocalProcessError, match=r"mooncake_master .* exit status 3[\s\S]*bad configuration$"):
        await LocalMooncake.start()


async def test_a_program_that_cannot_be_executed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake_master").write_bytes(b"\x7fELF of another machine")
    pretend_mooncake_is_in(tmp_path, monkeypatch)
    with pytest.raises(LocalProcessError, match=rf"cannot execute {tmp_path}/mooncake_master: .*Exec format error"):
        await LocalMooncake.start()


def test_the_log_takes_little_memory_and_loses_no_last_word() -> None:
    script = "head -c 3000000 /dev/zero; echo before; sleep 1.2; echo the end; exit 7"
    log = os.memfd_create("log")
    options = [f"--parent={os.getpid()}", "--patience=1"]
    done = subprocess.run(
        [sys.executable, "-I", _guardian.__file__, *options, "--", "/bin/sh", "-c", script],
        stdin=(lifeline := os.pipe())[0],
        stdout=subprocess.PIPE,
        stderr=log,
        timeout=30,
    )
    assert done.returncode == 7
    size = os.fstat(log).st_size
    assert size == 3_000_000 + len("before\nthe end\n")
    assert os.pread(log, 100, size - 16).endswith(b"\0before\nthe end\n")
    # It is cut whenever it takes more than the limit, also while the command is still writing.
    assert os.fstat(log).st_blocks * 512 <= _guardian.LOG_LIMIT_BYTES
    for descriptor in (*lifeline, log):
        os.close(descriptor)
