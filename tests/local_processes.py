"""What tests ask about the processes that a local Mooncake consists of."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.machinery
import importlib.util
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mooncake_sparse_client.stores.local import LocalMooncake

needs_mooncake = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None, reason="no build of Mooncake is installed"
)


def processes_of(parent: int) -> dict[str, psutil.Process]:
    return {p.name(): p for p in psutil.Process(parent).children(recursive=True) if "mooncake" in p.name()}


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def blocks_termination(pid: int) -> bool:
    mask = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return mask is not None and bool(int(mask[1], 16) & 1 << (signal.SIGTERM - 1))


def listeners(pid: int) -> set[tuple[str, int]]:
    """Address and port of every TCP socket that the process listens on."""
    return {(c.laddr.ip, c.laddr.port) for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"}


async def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def http_get(port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length:")[1].split("\r\n")[0])
    body = (await reader.readexactly(length)).decode()
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), body


async def segments(local: LocalMooncake) -> list[str]:
    """What the master takes for mounted."""
    return (await http_get(local.metrics_port, "/get_all_segments"))[1].split()


def pretend_mooncake_is_in(directory: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != "mooncake":
            return real(name, package)
        if directory is None:
            return None
        spec = importlib.machinery.ModuleSpec("mooncake", None, is_package=True)
        spec.submodule_search_locations = [str(directory)]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def own_files() -> int:
    """The open files that starting a process takes. Native clients of other tests open and close sockets meanwhile."""
    ours = ("pipe:", "/memfd:mooncake_master", "/memfd:mooncake_client", "anon_inode:[pidfd]")
    links = []
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            links.append(str(file.readlink()))
    return sum(link.startswith(ours) for link in links)


def descendants() -> set[psutil.Process]:
    return set(psutil.Process(os.getpid()).children(recursive=True))
