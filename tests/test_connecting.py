"""Connecting: each step that can fail is told by its name, in time, and never by way of a frozen event loop."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooncake_sparse_client.config import MooncakeConfig, load_config
from mooncake_sparse_client.errors import ConfigError, ConnectError
from mooncake_sparse_client.stores import connecting, trial
from mooncake_sparse_client.stores.local import LocalMooncake
from mooncake_sparse_client.stores.mooncake import MooncakeStore
from mooncake_sparse_client.stores.reaching import check_devices, reach, waiting

pytestmark = pytest.mark.usefixtures("native_library", "nothing_tried")
MIB = 1 << 20


@pytest.fixture
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not connected before."""
    monkeypatch.setattr(trial, "_answered_at", {})


def remote(address: str, **settings: Any) -> MooncakeConfig:
    return load_config("remote", master_server_address=address, environ={}, pool_size=2 * MIB, **settings)


def shared(address: str | None) -> MooncakeConfig:
    return load_config("shared", owner_address=address, environ={}, pool_size=2 * MIB)


def embedded(address: str) -> MooncakeConfig:
    return load_config(
        "embedded", master_server_address=address, environ={}, global_segment_size=16 * MIB, local_hostname="127.0.0.1"
    )


@asynccontextmanager
async def listening(answer: bytes) -> AsyncIterator[str]:
    """A port where something else listens; no ``answer``: it takes what comes and is silent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(100):
            if answer:
                writer.write(answer)
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def unused() -> str:
    async with listening(b"") as address:
        return address


def trials_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [child for child in children if any("_trial.py" in word for word in child.cmdline())]


async def trials(pid: int | None = None) -> list[psutil.Process]:
    """The processes of trials that this process, or another, has under way."""
    return await asyncio.to_thread(trials_of, pid or os.getpid())


async def refused(config: MooncakeConfig, timeout: float = 20) -> ConnectError:
    with pytest.raises(ConnectError) as caught:
        await MooncakeStore.connect(config, timeout=timeout)
    assert not await trials()
    return caught.value


# Each step


async def test_a_name_that_nobody_knows() -> None:
    error = await refused(remote("nobody.invalid:50051"))
    assert error.step == "resolve"
    assert "nobody.invalid" in str(error)


async def test_a_port_where_nobody_listens() -> None:
    address = await unused()
    error = await refused(remote(address))
    assert error.step == "refused"
    assert error.retriable
    assert address in str(error)


async def test_a_port_that_is_silent_costs_the_deadline_and_no_more() -> None:
    async with listening(b"") as address:
        error = await refused(remote(address), timeout=1.0)
    assert error.step == "handshake"
    assert "within" in str(error)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"\0" * 64])
async def test_a_port_where_something_else_listens(answer: bytes) -> None:
    async with listening(answer) as address:
        error = await refused(remote(address), timeout=3.0)
    assert error.step == "handshake"
    assert "no Mooncake master" in str(error)


async def test_a_master_that_is_stopped() -> None:
    async with await LocalMooncake.start() as local:
        os.kill(local.master_pid, signal.SIGSTOP)
        try:
            error = await refused(remote(local.master_address), timeout=1.0)
        finally:
            os.kill(local.master_pid, signal.SIGCONT)
        assert error.step == "handshake"
        async with await MooncakeStore.connect(remote(local.master_address)) as store:
            assert (await store.health()).ok


async def test_a_metadata_server_that_is_not_there(master: LocalMooncake) -> None:
    where = await unused()
    error = await refused(remote(master.master_address, metadata_server=f"etcd://{where}"))
    assert error.step == "metadata"
    assert where in str(error)


async def test_a_segment_that_nobody_has_room_for(master: LocalMooncake) -> None:
    error = await refused(replace(embedded(master.master_address), global_segment_size=10 << 40))
    assert error.step == "sizes"
    assert str(10 << 40) in str(error)
    async with await MooncakeStore.connect(embedded(master.master_address)) as store:  # nothing was left half alive
        assert (await store.health()).ok


async def test_an_owner_that_is_none() -> None:
    async with listening(b"") as address:
        error = await refused(shared(address), timeout=2.0)
    assert error.step == "handshake"


OLD_MASTER = os.environ.get("MOONCAKE_SPARSE_OTHER_MASTER", "")


@pytest.mark.skipif(not OLD_MASTER, reason="MOONCAKE_SPARSE_OTHER_MASTER names no mooncake_master of another version")
async def test_a_master_of_another_version() -> None:
    address = await unused()
    port = address.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(
        OLD_MASTER,
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_port=0",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        error = await refused(remote(address, wait_for_master=10))
        assert error.step == "version"
        assert "same version" in str(error)
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("said", "log", "step"),
    [
        ('{"set_up": -600, "answer": null}', "E 1] Version mismatch: server=1.0, client=2.0", "version"),
        ('{"set_up": 0, "answer": -900}', "E 1] RPC call failed: invalid rpc arg", "version"),
        ('{"set_up": 0, "answer": -900}', "E 1] RPC call failed: failed to deserialize rpc return value", "version"),
        ('{"set_up": -600, "answer": null}', "", "handshake"),
        ('{"set_up": 0, "answer": -901}', "", "handshake"),
        ("", "Segmentation fault", "setup"),
        ('{"set_up": "x"}', "", "setup"),
        ("[]", "", "setup"),
    ],
)
def test_what_a_trial_says(said: str, log: str, step: str) -> None:
    with pytest.raises(ConnectError) as caught:
        trial._judge(remote("127.0.0.1:1"), -11, said, log)
    assert caught.value.step == step


def test_a_trial_that_lacks_a_library_says_which() -> None:
    words = "Traceback\nImportError: libnuma.so.1: cannot open shared object file"
    with pytest.raises(ImportError, match=r"libnuma\.so\.1"):
        trial._judge(remote("127.0.0.1:1"), 1, "", words)


# Waiting


async def test_a_master_that_comes_up_later_is_waited_for() -> None:
    port = int((await unused()).rpartition(":")[2])
    connecting = asyncio.create_task(MooncakeStore.connect(remote(f"127.0.0.1:{port}", wait_for_master=60)))
    await asyncio.sleep(0.7)
    assert not connecting.done()
    async with await LocalMooncake.start(rpc_port=port), await connecting as store:
        assert (await store.health()).ok


async def test_what_cannot_come_is_not_waited_for() -> None:
    looks: list[str] = []

    async def look() -> None:
        looks.append("x")
        raise ConnectError("another version", step="version")

    with pytest.raises(ConnectError):
        await waiting(60, look)
    assert looks == ["x"]


async def test_waiting_ends_with_the_last_trouble() -> None:
    error = await refused(remote(await unused(), wait_for_master=0.3))
    assert error.step == "refused"


@pytest.mark.parametrize("value", [-1, "soon", True, float("inf"), float("nan")])
def test_how_long_to_wait_is_a_number_of_seconds(value: Any) -> None:
    with pytest.raises(ConfigError, match="wait_for_master"):
        remote("127.0.0.1:1", wait_for_master=value)
    assert (
        load_config("remote", environ={"MOONCAKE_MASTER": "a:1", "MOONCAKE_SPARSE_WAIT_SECONDS": "2.5"}).wait_for_master
        == 2.5
    )


# What would fall back without a word


def test_rdma_without_a_device_is_refused(tmp_path: Path) -> None:
    config = remote("127.0.0.1:1", protocol="RDMA")
    with pytest.raises(ConfigError, match=r"silently run over TCP.*no RDMA device"):
        check_devices(config, tmp_path)
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    check_devices(config, tmp_path)
    check_devices(replace(config, device_name="mlx5_0"), tmp_path)
    with pytest.raises(ConfigError, match=r"no device mlx5_7.*mlx5_0"):
        check_devices(replace(config, device_name="mlx5_0, mlx5_7"), tmp_path)
    check_devices(remote("127.0.0.1:1"), tmp_path / "nothing")


async def test_a_master_that_keeps_no_tenants_apart_is_refused(master: LocalMooncake) -> None:
    with pytest.raises(ConfigError, match=r"'blue'.*no tenants apart.*--enable_multi_tenants"):
        await MooncakeStore.connect(remote(master.master_address, tenant_id="blue"))
    assert not await trials()


POLICY = {"version": 1, "tenants": [{"name": "blue", "quota": 1 << 20}]}


async def test_a_master_that_keeps_tenants_apart_knows_them(tmp_path: Path) -> None:
    policy = tmp_path / "tenants.json"
    await asyncio.to_thread(policy.write_text, json.dumps(POLICY))
    port = int((await unused()).rpartition(":")[2])
    where = await asyncio.to_thread(importlib.util.find_spec, "mooncake")
    assert where is not None
    assert where.origin is not None
    process = await asyncio.create_subprocess_exec(
        *(str(Path(where.origin).parent / "mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={port}"),
        *("--metrics_port=0", "--enable_multi_tenants=true", f"--tenant_quota_connector_uri={policy}"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        config = remote(f"127.0.0.1:{port}", wait_for_master=10, tenant_id="blue")
        async with await MooncakeStore.connect(config) as store:
            assert (await store.health()).ok
        with pytest.raises(ConfigError, match="does not know tenant_id 'green'"):
            await MooncakeStore.connect(replace(config, tenant_id="green"))
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("code", [-900, -600, None])
def test_where_it_cannot_be_told_whether_there_are_tenants_a_warning_says_so(
    code: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    found = {"set_up": 0, "answer": -704, "own": -200, **({} if code is None else {"nobody": code})}
    with caplog.at_level(logging.WARNING):
        trial._judge(remote("127.0.0.1:1", tenant_id="blue"), 0, json.dumps(found), "")
    assert ("cannot be told" in caplog.text) == (code is not None)


async def test_what_is_no_metadata_server_is_told_from_no_master(master: LocalMooncake) -> None:
    async with listening(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as where:
        error = await refused(remote(master.master_address, metadata_server=f"http://{where}/metadata"))
    assert error.step == "metadata"


# Trials


async def test_a_place_is_tried_once_and_again_when_it_failed(
    master: LocalMooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tried = remote(master.master_address), []
    settings = connecting._settings(config, "127.0.0.1", segment=0, local_buffer=MIB)
    real = trial._try

    async def counted(*what: Any) -> None:
        tried.append(what)
        await real(*what)

    monkeypatch.setattr(trial, "_try", counted)
    for _ in range(2):
        await trial.try_set_up(config, settings, seconds=20)
    assert len(tried) == 1
    monkeypatch.setattr(trial, "_FRESH", 0.0)
    with pytest.raises(ConnectError):
        await trial.try_set_up(config, {}, seconds=0.001)
    monkeypatch.undo()
    assert (config.where, "remote", "tcp", "default", "P2PHANDSHAKE") not in trial._answered_at


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.05, 0.1, 0.3])
async def test_cancelled_at_any_time_it_leaves_nothing(delay: float, serving_master: LocalMooncake) -> None:
    threads = threading.active_count()
    for config in (remote(serving_master.master_address), shared(serving_master.owner_address)):
        call = asyncio.create_task(MooncakeStore.connect(config))
        await asyncio.sleep(delay)
        call.cancel()
        try:
            store = await call
        except asyncio.CancelledError:
            pass
        else:
            await store.aclose()
        assert not await trials()
    assert threading.active_count() < threads + 60  # the threads of a default executor, and of stores that end


async def test_cancelled_in_a_trial_its_process_is_gone() -> None:
    async with listening(b"") as address:
        call = asyncio.create_task(MooncakeStore.connect(remote(address), timeout=30))
        while not await trials():
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not await trials()


async def test_a_trial_does_not_outlive_this_process(tmp_path: Path) -> None:
    script = """
import asyncio, sys
from mooncake_sparse_client.config import load_config
from mooncake_sparse_client.stores.mooncake import MooncakeStore
asyncio.run(MooncakeStore.connect(load_config("remote", master_server_address=sys.argv[1], environ={}), timeout=60))
"""
    async with listening(b"") as address:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, address, env=environment)

        while not (found := await trials(parent.pid)):
            await asyncio.sleep(0.02)
        parent.kill()
        await parent.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, found, 10)
        pids = [child.pid for child in alive]
        assert not pids


# The event loop


async def longest_delay(call: Callable[[], Awaitable[object]]) -> float:
    """Seconds that the event loop was late at most while ``call`` ran."""
    worst = 0.0

    async def tick() -> None:
        nonlocal worst
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.002)
            now = time.perf_counter()
            worst, last = max(worst, now - last - 0.002), now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    try:
        await call()
    finally:
        ticking.cancel()
    return worst


@pytest.mark.parametrize("what", ["remote", "embedded", "shared", "absent", "silent", "other", "stopped"])
async def test_the_event_loop_goes_on(
    what: str, serving_master: LocalMooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen interpreter shows each time, a busy machine does not: the best of a few tries counts."""

    async def connect(config: MooncakeConfig) -> None:
        try:
            store = await MooncakeStore.connect(config, timeout=1.0 if what in ("silent", "stopped") else 20.0)
        except ConnectError:
            assert what in ("absent", "silent", "other", "stopped")
        else:
            opened.append(store)

    opened: list[MooncakeStore] = []
    delays = []
    for _ in range(8):
        monkeypatch.setattr(trial, "_answered_at", {})
        if what == "absent":
            where = await unused()
            delays.append(await longest_delay(lambda where=where: connect(remote(where))))  # type: ignore[misc]
        elif what in ("silent", "other"):
            async with listening(b"" if what == "silent" else b"HTTP/1.1 400 Bad Request\r\n\r\n") as where:
                delays.append(await longest_delay(lambda where=where: connect(remote(where))))  # type: ignore[misc]
        elif what == "stopped":
            os.kill(serving_master.master_pid, signal.SIGSTOP)
            try:
                delays.append(await longest_delay(lambda: connect(remote(serving_master.master_address))))
            finally:
                os.kill(serving_master.master_pid, signal.SIGCONT)
        else:
            kinds = {"remote": remote, "embedded": embedded, "shared": shared}
            address = serving_master.owner_address if what == "shared" else serving_master.master_address
            config = kinds[what](address)
            delays.append(await longest_delay(lambda config=config: connect(config)))  # type: ignore[misc]
        if delays[-1] < 0.05:
            break
    for store in opened:
        await store.aclose()
    assert min(delays) < 0.05, delays


async def test_reaching_says_by_which_address_others_find_this_process(master: LocalMooncake) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    assert await reach(remote(master.master_address), deadline) == "127.0.0.1"
