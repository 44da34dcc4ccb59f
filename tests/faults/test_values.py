"""Values that are not what was written, and writers that meet or die: no wrong byte is ever returned."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from ground import Ground
from workload import LAYOUT, LONG, Workload, key_of, new_seed, whole, workload

from mooncake_sparse_client import GetItem, MooncakeStore, PutItem, RemoveOutcome, load_config
from mooncake_sparse_client.core.framing import HEADER_SIZE
from mooncake_sparse_client.stores.local import LocalMooncake

pytestmark = [pytest.mark.usefixtures("native_library"), pytest.mark.timeout(120)]
GROUP, CHUNK = 0, 7
SIZE = HEADER_SIZE + LAYOUT.page_sizes[GROUP]


def flipped(value: bytes, other: bytes) -> bytes:
    return value[:-100] + bytes([value[-100] ^ 1]) + value[-99:]


def header_flipped(value: bytes, other: bytes) -> bytes:
    return bytes([value[0] ^ 1]) + value[1:]


def cut(value: bytes, other: bytes) -> bytes:
    return value[:-1]


def cut_to_its_header(value: bytes, other: bytes) -> bytes:
    return value[:HEADER_SIZE]


def grown(value: bytes, other: bytes) -> bytes:
    return value + b"\0"


def replaced(value: bytes, other: bytes) -> bytes:
    return other


DAMAGE: list[tuple[Callable[[bytes, bytes], bytes], set[str]]] = [
    (flipped, {"checksum"}),
    (header_flipped, {"header"}),
    (cut, {"length"}),
    (cut_to_its_header, {"length"}),
    (grown, {"length"}),
    (replaced, {"name"}),
]


async def test_a_damaged_value_is_no_hit(serving_master: LocalMooncake, fresh: str) -> None:
    """Written under the client's own key by somebody else. The hit ends where it begins; written anew, all is well."""
    config = load_config("remote", master_server_address=serving_master.master_address, environ={}, pool_size="16MB")
    async with await MooncakeStore.connect(config) as raw, workload(serving_master, "remote", fresh) as load:
        for damage, reasons in DAMAGE:
            for seed in (new_seed(), new_seed()):  # one is read into memory of ours
                assert not (await load.put(seed)).failures
                sequence = load.sequence(seed, 320)
                key, neighbour = (key_of(load.client, sequence, GROUP, chunk) for chunk in (CHUNK, CHUNK + 1))
                value, other = await read(raw, key), await read(raw, neighbour)
                worse = damage(value, other)
                assert await raw.remove([key], force=True) == [RemoveOutcome.REMOVED]
                assert await raw.put([PutItem(key, (memoryview(worse),))]) == [None]
                got = await load.get(seed)
                assert got.hit_length < (CHUNK + 1) * 16, damage
                assert {f.reason for f in got.failures if (f.group, f.chunk) == (GROUP, CHUNK)} == reasons, damage
                await load.client.remove(sequence, force=True)
                assert not (await load.put(seed)).failures
                assert (await load.get(seed)).hit_length == whole(320)


async def read(raw: MooncakeStore, key: str) -> bytes:
    room = bytearray(SIZE)
    assert await raw.get([GetItem(key, (memoryview(room),))]) == [None]
    return bytes(room)


async def test_two_clients_write_the_same_prompts(serving_master: LocalMooncake, fresh: str) -> None:
    async with workload(serving_master, "remote", fresh) as one, workload(serving_master, "remote", fresh) as other:
        seeds = [new_seed() for _ in range(12)]

        async def write(load: Workload, order: list[int]) -> None:
            for seed in order:
                assert not (await load.put(seed, confirm=True)).failures
                assert (await load.get(seed)).hit_length == whole(320)

        await asyncio.gather(write(one, seeds), write(other, seeds), write(one, seeds[::-1]))
        for load in (one, other):
            for seed in seeds:
                assert (await load.get(seed)).hit_length == whole(320)


WRITER = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
from workload import Workload, workload, LONG
from types import SimpleNamespace

async def main():
    ground = SimpleNamespace(master_address=sys.argv[2], owner_address=sys.argv[3])
    async with workload(ground, sys.argv[4], sys.argv[5]) as load:
        await load.put(int(sys.argv[6]), LONG, at=lambda n: print(n, flush=True))
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["remote", "shared"])
async def test_a_writer_is_killed_in_a_put(mode: str, fresh: str) -> None:
    """The others go on: what it had begun is a miss for a while, at most."""
    ground = Ground()
    ground.master._arguments += ["--put_start_discard_timeout_sec=3", "--put_start_release_timeout_sec=6"]
    async with ground, workload(ground, mode, fresh) as load:
        for chunks in (1, 70, 150):
            seed = new_seed()
            await killed_after(chunks, ground, mode, fresh, seed)
            got = await load.bounded(load.get(seed, LONG), calls=2)
            assert got.hit_length < whole(LONG)
            await load.bounded(load.put(seed, LONG, confirm=True), calls=2)
            await load.bounded(load.get(seed, LONG), calls=2)
            assert await load.round_trip()
        await asyncio.sleep(7)
        assert not (await load.bounded(load.put(seed, LONG, confirm=True))).failures
        assert (await load.bounded(load.get(seed, LONG), calls=2)).hit_length == whole(LONG)


async def killed_after(chunks: int, ground: Any, mode: str, model: str, seed: int) -> None:
    from pathlib import Path

    arguments = [str(Path(__file__).parent), ground.master_address, ground.owner_address, mode, model, str(seed)]
    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout is not None
    try:
        for _ in range(chunks):
            line = await asyncio.wait_for(writer.stdout.readline(), 30)
            assert line, (await writer.communicate())[1].decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            writer.kill()
        await writer.communicate()
