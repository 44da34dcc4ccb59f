"""What tests of ``precompute`` and ``verify`` share: corpora, commands as processes, and what a store then holds."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mooncake_sparse_client import (
    FullAttentionSpec,
    GetItem,
    KVCacheLayout,
    MemoryStore,
    MooncakeStore,
    SlidingWindowSpec,
    SparseStoreClient,
    load_config,
)
from mooncake_sparse_client.cli.main import main
from mooncake_sparse_client.core.framing import HEADER_SIZE
from mooncake_sparse_client.core.sequence import TokenSequence
from mooncake_sparse_client.jobs.job import PrecomputeJob
from mooncake_sparse_client.jobs.numpy_producer import NumpyProducer

ROOT = Path(__file__).parents[2]
Ids = list[int]
Figures = dict[str, Any]
#: Stored values, headers and all, by their keys without the cache they are of.
Contents = dict[str, bytes]
#: A preset with small pages, and what computes it.
LAYOUT = ("--layout", "gpt-oss", "--scale", "0.001")
NUMPY = (*LAYOUT, "--producer", "numpy")
#: What the modules below compute: a full group and a window, blocks of 16.
OWN_LAYOUT = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=256), SlidingWindowSpec(16, 64, page_size_bytes=32)])
#: A producer module that takes its time, and notes what it computes: "number of tokens seen, of tokens computed".
SLOW_MODULE = """
import os, time
from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout, SlidingWindowSpec
from mooncake_sparse_client.jobs.numpy_producer import NumpyProducer

LAYOUT = KVCacheLayout(
    [FullAttentionSpec(16, page_size_bytes=256), SlidingWindowSpec(16, 64, page_size_bytes=32)]
)
PAUSE = float(os.environ.get("PAUSE", "0"))
LOG = os.open(os.environ.get("COMPUTED", "computed.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


class Slow(NumpyProducer):
    def prefill(self, state, token_ids, wanted):
        os.write(LOG, f"{state.num_tokens} {len(token_ids)}\\n".encode())
        time.sleep(PAUSE)
        return super().prefill(state, token_ids, wanted)


def make(layout):
    return Slow(LAYOUT)


def words(text):
    return [len(word) for word in text.split()]


def fails(layout):
    raise RuntimeError("no such weights")
"""
SLOW = ("--producer", "slow:make")


# Corpora.


def write_corpus(folder: Path, prompts: Iterable[Ids], name: str = "corpus.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in prompts))
    return path


def families(seed: int, *, families: int = 3, branches: int = 4, shared: int = 192, own: int = 96) -> list[Ids]:
    """Prompts that begin alike, all and by families, and end each on its own, mostly within a block."""
    dice = random.Random(seed)

    def ids(tokens: int) -> Ids:
        return [dice.randrange(1, 50_000) for _ in range(tokens)]

    system = ids(shared)
    found = [
        system + begun + ids(own + dice.randrange(24))
        for begun in (ids(shared) for _ in range(families))
        for _ in range(branches)
    ]
    dice.shuffle(found)
    return found


def distinct_tokens(prompts: Iterable[Sequence[int]], block: int = 16) -> int:
    """In whole blocks, each prefix once; by definition."""
    return block * len({tuple(ids[:end]) for ids in prompts for end in range(block, len(ids) + 1, block)})


# Commands.


def command(
    *arguments: str | Path, cwd: Path, environ: dict[str, str] | None = None, timeout: float = 90
) -> subprocess.CompletedProcess[str]:
    """Run one as a scheduler does."""
    process = start(*arguments, cwd=cwd, environ=environ)
    return ended(process, timeout)


def start(*arguments: str | Path, cwd: Path, environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mooncake_sparse_client", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(
    process: subprocess.Popen[str], timeout: float = 90, *, stack: bool = False
) -> subprocess.CompletedProcess[str]:
    """What it said, once it is over. No program's stack is for its user to read, but that of his own producer."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    assert ("Traceback" in output + errors) == stack, output + errors
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a command says that refuses to begin, run in this process: an error that it does not expect is raised."""
    try:
        status = main([*map(str, arguments)])
    except SystemExit as error:  # of argparse
        status = error.code  # type: ignore[assignment]
    said = capsys.readouterr()
    assert status == 2, said
    assert said.out == ""
    return said.err


def until(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60) -> None:
    """Wait for something that a process brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, ended(process)
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def figures_of(path: Path) -> Figures:
    found: Figures = json.loads(path.read_text())
    return found


def computed(log: Path) -> list[tuple[int, int]]:
    """What the slow producer has noted."""
    if not log.exists():
        return []
    return [(int(seen), int(tokens)) for seen, tokens in map(str.split, log.read_text().splitlines())]


# What a store holds.


def expected(prompts: Iterable[Ids], model: str, layout: KVCacheLayout = OWN_LAYOUT) -> Contents:
    """What one undisturbed run puts into an empty store."""

    async def run() -> Contents:
        store = MemoryStore()
        client = SparseStoreClient(store, layout, model_name=model, dtype="bfloat16", retention_interval=0)
        async with client:
            report = await PrecomputeJob(client, NumpyProducer(layout), prompts).run()
            assert report.status == "done"
            sizes = layout.page_sizes
            found: Contents = {}
            for key in list(store.keys()):
                room = bytearray(HEADER_SIZE + sizes[_group(key)])
                assert await store.get([GetItem(key, (memoryview(room),))]) == [None]
                found[key] = bytes(room)
            return found

    return asyncio.run(run())


def stored(address: str, metrics_port: int, model: str, layout: KVCacheLayout = OWN_LAYOUT) -> Contents:
    """All that a Mooncake holds of a cache."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/get_all_keys", timeout=30) as answer:
        keys = [key for key in answer.read().decode().split() if key.startswith(model)]

    async def read(store: MooncakeStore) -> Contents:
        rooms = [bytearray(HEADER_SIZE + layout.page_sizes[_group(key)]) for key in keys]
        got = await store.get([GetItem(key, (memoryview(room),)) for key, room in zip(keys, rooms, strict=True)])
        assert got == [None] * len(keys)
        return {key: bytes(room) for key, room in zip(keys, rooms, strict=True)}

    return asyncio.run(with_raw_store(address, read))


async def with_raw_store(address: str, call: Callable[[MooncakeStore], Any]) -> Any:
    """What ``call`` does to a Mooncake behind the client's back."""
    config = load_config("remote", master_server_address=address, environ={}, pool_size="64MB")
    async with await MooncakeStore.connect(config) as store:
        return await call(store)


def keys_of(client: SparseStoreClient, sequence: TokenSequence, group: int, chunks: Iterable[int]) -> list[str]:
    from mooncake_sparse_client import chunk_name

    names = [chunk_name(client.layout, sequence.block_hashes, group, chunk) for chunk in chunks]
    return [client.keys.key(group, name) for name in names if name is not None]


def _group(key: str) -> int:
    found = re.search(r"@group:([0-9]+)@", key)
    assert found, key
    return int(found[1])
