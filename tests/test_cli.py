"""The command line: what ``demo`` counts and checks, what ``serve`` serves, and how both fail."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooncake_sparse_client import (
    FullAttentionSpec,
    GetItem,
    KVCacheLayout,
    MemoryStore,
    SlidingWindowSpec,
    SparseStoreClient,
    layout_for,
)
from mooncake_sparse_client.cli import demo
from mooncake_sparse_client.cli.main import main
from mooncake_sparse_client.cli.replay import replay
from mooncake_sparse_client.cli.report import MODEL_LABELS
from mooncake_sparse_client.cli.simulate import Policy, simulate
from mooncake_sparse_client.cli.table import human_bytes
from mooncake_sparse_client.cli.trace import TRACE_BLOCK, ChunkContent, Request, make_workload, read_trace
from mooncake_sparse_client.errors import ConfigError
from mooncake_sparse_client.stores.base import Failure
from mooncake_sparse_client.stores.local import LocalMooncake

ROOT = Path(__file__).parent.parent
Figures = dict[str, Any]


@pytest.fixture(autouse=True)
def this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that a test starts import this package, installed or not."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(autouse=True)
def no_blocking_calls() -> None:
    """No guard here: a command's loop serves nobody else, and its progress bar takes locks in it."""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mooncake_sparse_client", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def demo_figures(tmp_path: Path, *arguments: str) -> Figures:
    """Runs ``demo`` in this process."""
    path = tmp_path / "figures.json"
    assert main(["demo", "--json", str(path), *arguments]) == 0
    figures: Figures = json.loads(path.read_text())
    return figures


def check_figures(figures: Figures, *, requests: int) -> None:
    """What holds for every replay on a store that is large enough."""
    assert figures["requests"] == requests
    assert figures["wrong_bytes"] == 0
    assert figures["verified_bytes"] == figures["read"]["bytes"] > 0
    assert figures["failed"] == {"chunks": 0, "bytes": 0}
    same = figures["models"]["same"]
    assert figures["hit_tokens"] == same["hit_tokens"] > 0
    assert figures["written"] == same["written"]
    assert [group["written"] for group in figures["groups"]] == same["groups"]


def keys_at(master: LocalMooncake) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{master.metrics_port}/metrics", timeout=10) as answer:
        found = re.search(r"^master_key_count (\d+)", answer.read().decode(), re.MULTILINE)
    assert found
    return int(found[1])


# demo


@pytest.mark.parametrize("store", ["memory", "local", "HOST:PORT"])
def test_demo(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    arguments = ["demo", "--store", store, "--json", str(tmp_path / "figures.json")]
    master: LocalMooncake | None = None
    if store == "HOST:PORT":
        master = request.getfixturevalue("serving_master")
        arguments[2] = master.master_address
        before = keys_at(master)
    elif store == "local":
        request.getfixturevalue("native_library")
    done = command(*arguments)
    assert done.stderr == ""
    assert done.returncode == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    check_figures(figures, requests=48)
    assert figures["store"] == arguments[2]
    # The tables say the same.
    lines = done.stdout.splitlines()
    assert lines[0].startswith("48 requests, 262,144 tokens; layout: deepseek-v4; retention: interval 0")
    assert lines[-1] == f"{figures['verified_bytes']:,} bytes verified, 0 wrong"
    for label, hits in [
        ("this run", figures["hit_tokens"]),
        *((label, figures["models"][name]["hit_tokens"]) for name, label in MODEL_LABELS.items()),
    ]:
        row = next(line for line in lines if line.startswith(label))
        assert row[len(label) :].split()[0] == f"{hits:,}"
    if master is not None:
        assert keys_at(master) == before  # it leaves a shared store as it found it


def test_two_demos_on_one_store_do_not_see_each_other(serving_master: LocalMooncake, tmp_path: Path) -> None:
    runs = [
        demo_figures(tmp_path, "--store", serving_master.master_address, "--requests", "16", "--layout", "jamba")
        for _ in range(2)
    ]
    for figures in runs:
        check_figures(figures, requests=16)
    assert runs[0]["existing"] == runs[1]["existing"]


@pytest.mark.parametrize("layout", ["deepseek-v4", "gemma-3", "jamba"])
def test_retention_thins_sparse_groups_alone(layout: str, tmp_path: Path) -> None:
    arguments = ["--store", "memory", "--layout", layout, "--requests", "24"]
    sparse = demo_figures(tmp_path, *arguments, "--retention", "0")
    dense = demo_figures(tmp_path, *arguments, "--retention", "none")
    for figures in (sparse, dense):
        check_figures(figures, requests=24)
    for group, (few, many) in enumerate(zip(sparse["groups"], dense["groups"], strict=True)):
        assert few["group"] == many["group"]
        if layout_for(layout).groups[group].dense:
            assert few["written"] == many["written"]
        else:
            assert 0 < few["written"]["bytes"] < many["written"]["bytes"]
    assert dense["models"]["dense"]["groups"] == [group["written"] for group in dense["groups"]]
    assert sparse["models"]["dense"] == dense["models"]["dense"]


def test_the_comparison_keeps_its_order(tmp_path: Path) -> None:
    models = demo_figures(tmp_path, "--store", "memory")["models"]
    assert models["not_learned"]["hit_tokens"] < models["same"]["hit_tokens"] < models["dense"]["hit_tokens"]
    assert models["dense"]["hit_tokens"] == models["unmasked"]["hit_tokens"]
    bytes_written = [models[name]["written"]["bytes"] for name in ("not_learned", "same", "dense", "unmasked")]
    assert bytes_written == sorted(bytes_written)


def test_an_interval_is_counted_as_it_runs(tmp_path: Path) -> None:
    figures = demo_figures(tmp_path, "--store", "memory", "--retention", "2048", "--requests", "30")
    check_figures(figures, requests=30)
    assert figures["retention_interval"] == 2048


def test_the_scale_is_the_pages(tmp_path: Path) -> None:
    figures = demo_figures(tmp_path, "--store", "memory", "--scale", "0.001", "--requests", "3", "--layout", "jamba")
    assert [group["page_size_bytes"] for group in figures["groups"]] == [4194, 8716]


class FlippingStore(MemoryStore):
    """Answers the first read with one wrong byte, the last of its value."""

    flipped = False

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        answers = await super().get(items)
        if items and not self.flipped:
            self.flipped = True
            items[0].buffers[-1][-1] ^= 0xFF
        return answers


async def test_a_wrong_byte_is_counted() -> None:
    layout = layout_for("jamba", scale=1e-4)
    async with SparseStoreClient(
        FlippingStore(), layout, model_name="demo", value_format="raw", retention_interval=0
    ) as client:
        counts = await replay(client, make_workload(12))
    assert counts.wrong_bytes == 1
    assert counts.verified_bytes == counts.read.bytes


async def test_a_value_of_another_chunk_is_counted() -> None:
    """What a client with wrong keys would read: the right size, the wrong bytes."""
    layout = layout_for("llama", scale=1e-4)

    class Swapping(MemoryStore):
        async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
            answers = await super().get(items)
            if len(items) > 1:
                first, second = items[0].buffers[0], items[1].buffers[0]
                first[:], second[:] = bytes(second), bytes(first)
            return answers

    client = SparseStoreClient(Swapping(), layout, model_name="demo", value_format="raw", retention_interval=0)
    async with client:
        counts = await replay(client, make_workload(12))
    assert counts.wrong_bytes > layout.page_sizes[0]


def test_a_wrong_byte_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "MemoryStore", FlippingStore)
    monkeypatch.setattr(demo, "SparseStoreClient", functools.partial(SparseStoreClient, value_format="raw"))
    assert main(["demo", "--store", "memory", "--requests", "12"]) == 1
    assert capsys.readouterr().out.endswith("bytes verified, 1 wrong\n")


def test_a_framed_value_never_shows_its_wrong_byte(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "MemoryStore", FlippingStore)
    assert main(["demo", "--store", "memory", "--requests", "12"]) == 0
    assert capsys.readouterr().out.endswith("bytes verified, 0 wrong\n")


# The model store


EAGLE = KVCacheLayout(
    [FullAttentionSpec(64, page_size_bytes=16), SlidingWindowSpec(32, 128, page_size_bytes=16)], use_eagle=True
)
LAYOUTS = {"eagle": EAGLE, **{name: layout_for(name, scale=1e-9) for name in ("deepseek-v4", "jamba", "llama-4")}}


@pytest.mark.parametrize("interval", [None, 0, 2048])
@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
async def test_the_model_store_is_the_client(name: str, learn: bool, interval: int | None) -> None:
    """Request by request the same hits, and in the end the same chunks, as a client on a perfect store."""
    layout, requests = LAYOUTS[name], make_workload(24)
    policy = Policy(interval, learn_junctions=learn)
    store = MemoryStore()
    total = 0
    async with SparseStoreClient(
        store, layout, model_name="model", value_format="raw", retention_interval=interval
    ) as client:
        for number, request in enumerate(requests, 1):
            sequence = client.sequence(request.token_ids())
            hit = await client.lookup(sequence)
            total += hit.hit_length
            assert total == simulate(client.layout, requests[:number], policy).hit_tokens, f"request {number}"
            await client.put(sequence, lambda group, _: bytes(layout.page_sizes[group]), hit=hit if learn else None)
    counted = simulate(client.layout, requests, policy)
    assert counted.tokens == sum(request.num_tokens for request in requests)
    keys = store.keys()
    for group, tally in enumerate(counted.written):
        assert tally.chunks == sum(f"@group:{group}@" in key for key in keys)
        assert tally.bytes == tally.chunks * layout.page_sizes[group]


def test_the_policies_differ_on_the_workload() -> None:
    """Else the comparison above could not tell a policy from another."""
    results = {
        (interval, learn): simulate(LAYOUTS["deepseek-v4"], make_workload(24), Policy(interval, learn_junctions=learn))
        for interval in (None, 0, 2048)
        for learn in (True, False)
    }
    assert len({(result.hit_tokens, result.total_written.chunks) for result in results.values()}) == 5
    assert results[None, True] == results[None, False]  # nothing is left to learn


# Traces


def test_the_workload_is_the_same_every_time_and_shares_prefixes() -> None:
    requests = make_workload(48)
    assert requests == make_workload()
    assert requests != make_workload(48, seed=1)
    blocks = sum(len(request.prefix_ids) for request in requests)
    assert len({prefix for request in requests for prefix in request.prefix_ids}) < blocks / 2


def entry(blocks: int, ids: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": TRACE_BLOCK * blocks, "output_length": 1, "hash_ids": ids})


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    part = json.dumps({"input_length": 2 * TRACE_BLOCK + 100, "hash_ids": [7, 8, 9]})
    path.write_text("\n".join([entry(2, [7, 8]), entry(2, [6, 8]), part, entry(0, [])]) + "\n")
    first, other, longer, empty = read_trace(path)
    assert longer == first == Request((0, 1), (0, 1))  # numbered anew, the partial block left out
    assert not set(other.prefix_ids) & set(first.prefix_ids)  # the same block behind another one
    assert empty.num_tokens == 0
    assert first.num_tokens == 1024
    assert first.token_ids()[TRACE_BLOCK:].tolist() == other.token_ids()[TRACE_BLOCK:].tolist()
    assert len(set(first.token_ids().tolist())) == 1024
    assert read_trace(path, 1) == [first]


def test_any_ids_tell_blocks_apart(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(entry(2, ids) for ids in ([1, 2], [1 + (1 << 23), 2], [-1, 1 << 70])) + "\n")
    tokens = [request.token_ids() for request in read_trace(path)]
    assert len({first.tobytes() for first in tokens}) == 3
    assert all(0 <= ids.min() <= ids.max() < 1 << 32 for ids in tokens)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no request of at least 512 tokens"),
        (b'{"input_length": 5, "hash_ids": [1]}', "no request"),
        (b"\xff", "UTF-8"),
    ],
)
def test_a_trace_with_nothing_to_replay_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    command = f"{sys.executable} -m mooncake_sparse_client demo --store memory --requests 3 | head -1"
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert answer.stdout.startswith("3 requests")
    assert answer.stderr == ""


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "",
        "null",
        "[1]",
        "{}",
        '{"input_length": 512}',
        '{"hash_ids": [1]}',
        '{"input_length": "many", "hash_ids": [1]}',
        '{"input_length": NaN, "hash_ids": [1]}',
        '{"input_length": 1e999, "hash_ids": [1]}',
        entry(1, 5),
        entry(1, None),
        entry(1, ["a"]),
        entry(2, [1]),
        entry(-1, [1]),
    ],
)
def test_a_trace_line_that_is_none_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{entry(1, [1])}\n{entry(1, [2])}\n{line}\n{entry(1, [3])}\n")
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}:3: "):
        read_trace(path)
    assert len(read_trace(path, 2)) == 2


def test_a_bad_trace_is_exit_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{entry(1, [1])}\n{entry(3, [1, 2])}\n")
    assert main(["demo", "--store", "memory", "--trace", str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"demo: {path}:2: 2 hash_ids do not cover 3 whole blocks\n"


def test_a_trace_and_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(entry(3, [1, 2, number]) for number in range(10, 20)))
    figures = demo_figures(tmp_path, "--store", "memory", "--trace", str(path), "--requests", "4")
    check_figures(figures, requests=4)
    assert figures["tokens"] == 4 * 3 * TRACE_BLOCK


def test_chunk_contents_differ() -> None:
    layout = layout_for("deepseek-v4", scale=1e-4)
    content, (request, *_) = ChunkContent(layout), make_workload(1)
    seen = {
        bytes(content.of(request, group, chunk))[:16]
        for group, spec in enumerate(layout.groups)
        for chunk in range(request.num_tokens // spec.block_size)
    }
    assert len(seen) == sum(request.num_tokens // spec.block_size for spec in layout.groups)
    assert [content.of(request, group, 0).nbytes for group in range(4)] == list(layout.page_sizes)


def test_a_layout_whose_blocks_do_not_fit_the_trace() -> None:
    with pytest.raises(ConfigError, match=r"blocks of 512 tokens; the layout's 24 does not divide them"):
        ChunkContent(KVCacheLayout([FullAttentionSpec(24, page_size_bytes=8)]))


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 30, "1.0 GiB"), (5 << 50, "5120.0 TiB")]
)
def test_human_bytes(number: int, text: str) -> None:
    assert human_bytes(number) == text


# What cannot run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("demo --retention x", r"--retention: 'x'"),
        ("demo --retention=-1", r"--retention: '-1'"),
        ("demo --retention 100", r"retention_interval must be .* multiple of the alignment 256, not 100"),
        ("demo --requests 0", r"--requests must be positive, not 0"),
        ("demo --requests x", r"argument --requests: invalid int value"),
        ("demo --layout gpt-2", r"argument --layout: invalid choice: 'gpt-2'"),
        ("demo --scale 0", r"scale must be positive, not 0"),
        ("demo --scale nan", r"scale must be positive, not nan"),
        ("demo --scale x", r"argument --scale: invalid number value: 'x'"),
        ("demo --store nowhere", r"--store is 'nowhere'; it is 'local', 'memory' or HOST:PORT"),
        ("demo --store :1", r"master_server_address is ':1'"),
        ("demo --store 127.0.0.1:1", r"no Mooncake master listens on 127\.0\.0\.1:1"),
        ("demo --segment parrots", r"--segment is 'parrots'; a size is"),
        ("demo --segment 1MB", r"--segment: segment_size is 1048576 bytes; the native store wants at least 16777216"),
        ("demo --trace /nowhere/trace.jsonl", r"cannot read the trace /nowhere/trace\.jsonl: No such file"),
        ("serve --memory x", r"--memory is 'x'; a size is"),
        ("serve --memory 1MB", r"memory=1048576 bytes is below Mooncake's minimum of 16777216"),
        ("serve --memory 9000TB", r"memory=\d+ bytes exceeds the \d+ available"),
        ("serve --port 99999", r"port=99999 is not a port"),
        ("serve --port x", r"argument --port: invalid int value"),
        ("", r"required: COMMAND"),
        ("dance", r"argument COMMAND: invalid choice: 'dance'"),
        ("demo --store memory --requests 2 --json /nowhere/x.json", r"--json.*/nowhere/x\.json"),
    ],
)
def test_an_argument_that_cannot_be_is_named(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments.split())
    except SystemExit as error:  # how argparse ends a program
        status = error.code if isinstance(error.code, int) else -1
    output = capsys.readouterr()
    assert status == 2
    assert output.out == ""
    assert re.search(message, output.err), output.err
    assert "Traceback" not in output.err


def test_a_failing_command_as_a_program() -> None:
    done = command("demo", "--store", "nowhere")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "demo: --store is 'nowhere'; it is 'local', 'memory' or HOST:PORT of a master\n"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["serve", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m mooncake_sparse_client")


# serve


@contextmanager
def serving(
    *arguments: str, program: tuple[str, str] = ("-m", "mooncake_sparse_client")
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A ``serve`` that serves, and what it has printed by then."""
    server = subprocess.Popen(
        [sys.executable, *program, "serve", "--memory", "64MB", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        lines: list[str] = []
        for line in server.stdout:
            lines.append(line.rstrip("\n"))
            if "Ctrl-C" in line:
                break
        yield server, lines
    finally:
        server.kill()
        server.communicate(timeout=30)


def descendants(server: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(server.pid).children(recursive=True)


CLIENT = """
import asyncio, sys
from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout, SparseStoreClient

layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=4096)])

async def main():
    async with SparseStoreClient.connect(layout, model_name="served") as client:
        sequence = client.sequence(range(100))
        if sys.argv[1] == "put":
            put = await client.put(sequence, lambda group, chunk: bytes([chunk]) * 4096, confirm=True)
            print(put.written.chunks)
        else:
            got = await client.get(sequence)
            print(got.hit_length, [bytes(got.chunks[0, chunk]) == bytes([chunk]) * 4096 for chunk in range(6)])

asyncio.run(main())
"""


def client_process(act: str, exports: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, act], env={**os.environ, **exports}, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_a_signal(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with serving(*(["--port", str(port)] if number is signal.SIGTERM else [])) as (server, lines):
        address = re.fullmatch(r"Mooncake serves at (127\.0\.0\.1:(\d+))\. .*", lines[0])
        assert address
        assert (int(address[2]) == port) is (number is signal.SIGTERM)
        exports = dict(line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export "))
        assert exports == {
            "MOONCAKE_MASTER": address[1],
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        }
        if number is signal.SIGINT:
            assert client_process("put", exports) == "6"
            assert client_process("get", exports) == f"96 {[True] * 6}"
        started = descendants(server)
        assert {"mooncake_master", "mooncake_client"} <= {process.name() for process in started}
        server.send_signal(number)
        output, errors = server.communicate(timeout=30)
        assert output.endswith("Stopped.\n")
        assert errors == ""
        assert server.returncode == 0
        assert not [process for process in started if process.is_running()]


@pytest.mark.usefixtures("native_library")
def test_serve_says_when_a_process_of_its_own_ends() -> None:
    with serving() as (server, _):
        started = descendants(server)
        next(process for process in started if process.name() == "mooncake_master").kill()
        _, errors = server.communicate(timeout=30)
        assert server.returncode == 2
        assert re.match(r"serve: mooncake_master .* signal 9", errors), errors
        assert "Traceback" not in errors
        assert not [process for process in started if process.is_running()]


IMPATIENT = """
import sys
from mooncake_sparse_client.cli.main import main
from mooncake_sparse_client.stores import owner

owner.PAUSE = 0.5
sys.exit(main())
"""


@pytest.mark.usefixtures("native_library")
def test_serve_goes_on_with_another_owner_when_its_own_ends() -> None:
    with serving(program=("-c", IMPATIENT)) as (server, lines):
        (owner,) = [process for process in descendants(server) if process.name() == "mooncake_client"]
        owner.kill()
        assert server.stderr is not None
        said = ""
        while "serves again" not in said:
            line = server.stderr.readline()
            assert line, said
            said += line
        assert re.match(r".*what the owner process held is gone, it is started again in 0\.5 s: .* signal 9 ", said)
        (second,) = [process for process in descendants(server) if process.name() == "mooncake_client"]
        assert second.pid != owner.pid
        address = next(line for line in lines if "MOONCAKE_CLIENT=" in line).split("MOONCAKE_CLIENT=")[1]
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=5):
            pass
        started = descendants(server)
        server.send_signal(signal.SIGTERM)
        output, errors = server.communicate(timeout=30)
        assert output.endswith("Stopped.\n")
        assert errors == ""
        assert server.returncode == 0
        assert not [process for process in started if process.is_running()]


@pytest.mark.usefixtures("native_library")
def test_serve_on_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert re.search(rf"port={port}\b.*pass another port", capsys.readouterr().err)


def test_an_interrupted_command_says_so_by_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    arguments, _, summary = main.__globals__["_COMMANDS"]["demo"]
    run: Callable[[object], int] = interrupted
    monkeypatch.setitem(main.__globals__["_COMMANDS"], "demo", (arguments, run, summary))
    assert main(["demo"]) == 130
