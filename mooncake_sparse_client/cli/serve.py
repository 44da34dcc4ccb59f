"""``serve``: a local Mooncake to develop against, until Ctrl-C.

When its owner process ends by itself another one is started, and the log, which goes to stderr, says so. Only what is
not cured ends the command.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

from ..config_values import parse_size
from ..stores.local import LocalMooncake, check_memory
from .arguments import naming


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", default="1GB", help="what the owner process holds, such as 4GB; default: 1GB")
    parser.add_argument("--port", type=int, help="the master's port; default: a free one")


def run(arguments: argparse.Namespace) -> int:
    asyncio.run(_serve(parse_size(arguments.memory, "--memory"), arguments.port))
    return 0


async def _serve(memory: int, port: int | None) -> None:
    await asyncio.to_thread(check_memory, memory, "--memory")
    with naming("--port"):
        starting = await LocalMooncake.start(memory=memory, rpc_port=port)
    async with starting as local:
        # Before anybody can know that we serve, so that no early Ctrl-C is lost.
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        print(f"Mooncake serves at {local.master_address}. To use it from another terminal:\n", flush=True)
        print(f"export MOONCAKE_MASTER={local.master_address}")
        print("export MOONCAKE_PROTOCOL=tcp")
        print("export MOONCAKE_TE_META_DATA_SERVER=P2PHANDSHAKE\n")
        print("On this host it is faster through the memory of its owner process. For that set as well")
        print(f"MOONCAKE_MODE=shared and MOONCAKE_CLIENT={local.owner_address}\n")
        print("Its data goes when it ends; Ctrl-C ends it.", flush=True)
        await _until(stop, local)
    print("Stopped.", flush=True)


async def _until(stop: asyncio.Event, local: LocalMooncake) -> None:
    """Wait for a signal, or for a process to end for good by itself, which raises."""
    stopped, ended = asyncio.create_task(stop.wait()), asyncio.create_task(local.wait())
    try:
        await asyncio.wait([stopped, ended], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
    finally:
        for task in (stopped, ended):
            task.cancel()
        await asyncio.gather(stopped, ended, return_exceptions=True)
