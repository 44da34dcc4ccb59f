"""The examples run as their readers run them, and say what they promise to say."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from example_runs import ROOT, assert_says, run

from mooncake_sparse_client.stores.local import LocalMooncake

#: What each example prints, as patterns in the order of its lines.
EXAMPLES = {
    "quickstart.py": [
        r"Alice's prompt has 456 tokens",
        r"written: 36 chunks, 122880 bytes",
        r"skipped: 20 chunks, 163840 bytes",
        r"Bob's prompt has 406 tokens; 256 of them were found",
        r"full: 16 of 16 chunks to read",
        r"window: 4 of 16 chunks to read",
        r"read: 20 chunks, 65536 bytes, 0 of them wrong",
    ],
    "own_arrays.py": [
        r"put 10 chunks, 327680 bytes",
        r"got 320 tokens, 327680 bytes",
        r"every value is right, and no other block was touched",
    ],
    "paged_memory.py": [
        r"registered \d+ ranges of memory; bytes move without a copy: True",
        r"put 14 chunks, 458752 bytes, from blocks \[\[(\d+, ){11}\d+\], \[(-1, ){10}\d+, \d+\]\]",
        r"got 192 tokens, 458752 bytes, into blocks \[\[(\d+, ){11}\d+\], \[(\d+, ){11}\d+\]\]",
        r"every value is right, and no other block was touched",
    ],
    "own_engine.py": [
        r"Ann: 0 of 275 tokens were in the store",
        r"Ben: 0 of 250 tokens were in the store",
        # Side by side.
        r"(Cem: 192 of 290|Ann again: 288 of 345) tokens were in the store",
        r"(Cem: 192 of 290|Ann again: 288 of 345) tokens were in the store",
        r"every answer is that of the engine without a store, to the last of 40 tokens",
    ],
    "why.py": [
        r"keeps 58 of 100 chunks of tokens 0 to 800",
        r"1 sliding_window +16 +0 +8 +42 +3,144 +16,506",
        r"hit 0 of at most 800 tokens; group 1 \(sliding_window\) limits: chunk 0 is missing",
        r"the dense groups \(full, chunked local\) alone could serve: 512",
        r"so the second put keeps 8 window chunks in front of 512",
        r"the third lookup, for programs: \{\"hit_length\": 512, ",
        r"the third lookup, in a line: hit 512 of at most 800 tokens; group 0 \(full\) limits: chunk 32 is missing",
    ],
    "shared_memory.py": [
        r"an owner process serves at 127\.0\.0\.1:\d+, with 64 MiB of memory",
        r"the first application wrote 15 chunks, 3932160 bytes",
        r"its process has ended",
        r"the second application found 960 of 1000 tokens, 0 chunks wrong",
        r"its process has ended",
        r"the data is gone with it",
    ],
    "local_master.py": [
        r"a master serves at 127\.0\.0\.1:\d+",
        r"the first process wrote 15 chunks and has closed its client",
        r"the second process found 960 of 1000 tokens, 0 chunks wrong",
        r"the data is gone with them",
    ],
    "serving_loop.py": [
        r"turn 1:",
        r"chat \d: \d+ of \d+ tokens were in the store",
        r"turn 2:",
        # The first question's whole blocks, at the least.
        r"hits: \d+ of 6960 tokens \(\d+%\), 2976 of them in turn 2",
        r"[1-9]\d+ bytes restored, 0 wrong, 0 failures",
    ],
    "precompute_jsonl.py": [
        r"done: 12 prompts of 5520 tokens\n",
        # Three documents of 400 tokens, and on each four questions of three whole blocks.
        r"1776 of them are distinct, 3600 those of another prompt, 144 behind the last whole block",
        r"computed: 1776 tokens; in the store already: 0",
        r"written: 159 chunks, 20352 bytes; missing: 0",
        r"once more: 0 tokens computed, 0 chunks written",
    ],
}

#: Those that want PyTorch and transformers; `tests/models` runs them.
MODEL_EXAMPLES = {"precompute_model.py", "serving_client.py", "serving_stack.py", "two_processes.py"}


def test_every_example_is_listed() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys() | MODEL_EXAMPLES


@pytest.fixture(scope="module")
def runs(native_library: None) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """All examples side by side: each spends most of its time waiting for Mooncake to start and to close."""
    with ThreadPoolExecutor(len(EXAMPLES)) as pool:
        yield {name: pool.submit(run, name) for name in EXAMPLES}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, runs: dict[str, Future[subprocess.CompletedProcess[str]]]) -> None:
    done = runs[name].result()
    assert done.stderr == ""
    assert done.returncode == 0
    assert_says(done.stdout, EXAMPLES[name])


@pytest.mark.parametrize("name", [*EXAMPLES, *sorted(MODEL_EXAMPLES)])
def test_an_example_says_how_to_run_it(name: str) -> None:
    assert f"python examples/{name}" in (ROOT / "examples" / name).read_text().split('"""')[1]


@pytest.mark.usefixtures("native_library")
def test_the_job_reports_bad_lines_and_does_the_others(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    good = json.dumps({"token_ids": list(range(40))})
    path.write_text("\n".join([good, "{", '{"tokens": [1]}', "", '{"token_ids": [1, -2]}', good]) + "\n")
    done = run("precompute_jsonl.py", str(path))
    assert done.returncode == 1
    assert [line.split(": ")[0] for line in done.stderr.splitlines()] == [f"{path}:{number}" for number in (2, 3, 5)]
    assert "token_ids[1] is -2" in done.stderr
    # The same prompt twice: its 32 whole tokens are computed once.
    assert_says(
        done.stdout,
        [
            "done: 2 prompts of 80 tokens",
            "32 of them are distinct, 32 those of another prompt, 16 behind",
            "computed: 32 tokens",
            "written: 4 chunks",
        ],
    )


def test_the_job_says_when_it_cannot_start(tmp_path: Path) -> None:
    for arguments, message in (
        ([str(tmp_path / "absent.jsonl")], "absent.jsonl"),
        (["--store", "127.0.0.1:1"], "no Mooncake master listens on 127.0.0.1:1"),
        (["--store", "nowhere"], "the master's address is 'host:port'"),
    ):
        done = run("precompute_jsonl.py", *arguments)
        assert done.returncode == 2, done
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_a_second_run_of_the_job_computes_nothing(serving_master: LocalMooncake, tmp_path: Path) -> None:
    """Another process, over the same journal."""
    arguments = ("--store", serving_master.master_address, "--journal", str(tmp_path / "journal"))
    first = run("precompute_jsonl.py", *arguments)
    assert first.returncode == 0, first.stderr
    assert_says(first.stdout, ["computed: 1776 tokens; in the store already: 0", "written: 159 chunks"])
    second = run("precompute_jsonl.py", *arguments)
    assert second.returncode == 0, second.stderr
    assert_says(second.stdout, ["computed: 0 tokens; in the store already: 1776", "written: 0 chunks, 0 bytes"])
