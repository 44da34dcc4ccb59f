"""``precompute`` as a scheduler and a person use it: what it says, writes and answers, and how it refuses to begin."""

from __future__ import annotations

import argparse
import gzip
import json
import re
import signal
import socket
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import pytest
from command_ground import (
    LAYOUT,
    NUMPY,
    SLOW,
    SLOW_MODULE,
    command,
    computed,
    distinct_tokens,
    ended,
    expected,
    families,
    figures_of,
    refusal,
    start,
    stored,
    until,
    write_corpus,
)

from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout, SparseStoreClient, layout_for
from mooncake_sparse_client.cli.job_arguments import Cache, add_cache_arguments, cache_of
from mooncake_sparse_client.cli.main import main
from mooncake_sparse_client.cli.precompute import add_arguments, options_of
from mooncake_sparse_client.errors import ConfigError
from mooncake_sparse_client.jobs.options import JobOptions
from mooncake_sparse_client.jobs.sharding import Shard
from mooncake_sparse_client.stores.local import LocalMooncake

MEMORY = ("--store", "memory")
PROMPTS = families(1)
DISTINCT = distinct_tokens(PROMPTS)
TOTAL = sum(map(len, PROMPTS))


@pytest.fixture(autouse=True)
def no_blocking_calls() -> None:
    """No guard here: a command's loop serves nobody else, and its progress takes locks in it."""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a folder of its own, the current one, beside a module of producers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "slow", raising=False)
    (tmp_path / "slow.py").write_text(SLOW_MODULE)
    return write_corpus(tmp_path, PROMPTS)


@pytest.fixture
def wrong_lines(corpus: Path) -> Path:
    """Lines 2 and 4 are no prompts."""
    lines = corpus.read_text().splitlines()
    corpus.write_text("\n".join([lines[0], "{", lines[1], '{"token_ids": [-1]}', lines[2]]) + "\n")
    return corpus


# What it says and writes.


def test_dry_run(corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing but a layout is wanted, no store; what it counts is what a run then writes."""
    figures = tmp_path / "figures.json"
    assert main(["precompute", str(corpus), "--dry-run", *LAYOUT, "--json", str(figures)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert f"{DISTINCT:,}" in said.out
    found = figures_of(figures)
    assert (found["prompts"], found["wrong_lines"], found["tokens_distinct"]) == (len(PROMPTS), 0, DISTINCT)
    assert found["tokens_total"] == TOTAL == DISTINCT + found["tokens_reused"] + found["tokens_unstored"]
    assert main(["precompute", str(corpus), *NUMPY, *MEMORY, "--json", str(figures)]) == 0
    done = figures_of(figures)
    assert (found["chunks"], found["bytes"]) == (done["chunks_written"], done["bytes_written"])
    for name in ("tokens_total", "tokens_distinct", "tokens_reused", "tokens_unstored"):
        assert found[name] == done[name]
    sums = [sum(tally["chunks"] for tally in group["kept"].values()) for group in found["groups"]]
    assert sum(sums) == found["chunks"]
    for group in found["groups"]:
        kept = sum(tally["bytes"] for tally in group["kept"].values())
        assert kept <= group["dense"]["bytes"] <= group["unmasked"]["bytes"]


def test_dry_run_of_parts_adds_up(corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sums = dict.fromkeys(("prompts", "tokens_total", "tokens_distinct", "chunks", "bytes"), 0)
    for part in range(4):
        arguments = ["--json", str(figures), *(["--shard", f"{part}/3"] if part else [])]
        assert main(["precompute", str(corpus), "--dry-run", *LAYOUT, *arguments]) == 0
        found = figures_of(figures)
        for name in sums:
            sums[name] += found[name] if part else -found[name]
    assert set(sums.values()) == {0}


def test_dry_run_tells_of_wrong_lines(wrong_lines: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    assert main(["precompute", str(wrong_lines), "--dry-run", *LAYOUT, "--json", str(figures)]) == 1
    assert re.search(r"2 lines are no prompt.*\n  line 2: .*\n  line 4: ", capsys.readouterr().out)
    assert figures_of(figures)["wrong_lines"] == 2
    said = refusal(capsys, "precompute", wrong_lines, "--dry-run", *LAYOUT, "--on-wrong", "stop")
    assert "line 2" in said


def test_a_run_in_memory(corpus: Path, tmp_path: Path) -> None:
    """As a process, to the end: on a pipe it says where it is, and its figures are right."""
    done = command("precompute", corpus.name, *NUMPY, *MEMORY, "--json", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done
    found = figures_of(tmp_path / "figures.json")
    assert found["status"] == "done"
    assert found["prompts"] == len(PROMPTS)
    assert found["tokens_total"] == TOTAL
    assert found["tokens_distinct"] == found["tokens_computed"] == DISTINCT
    whole = sum(len(ids) // 16 * 16 for ids in PROMPTS)
    assert found["tokens_reused"] == whole - DISTINCT
    assert found["tokens_unstored"] == TOTAL - whole
    assert found["wrong_lines"] == 0
    assert found["wrong"] == []
    layout = layout_for("gpt-oss", scale=0.001)
    written = [sum(tally["chunks"] for tally in group["written"].values()) for group in found["groups"]]
    assert written[0] == DISTINCT // 16
    assert 0 < written[1] < written[0]
    assert found["chunks_written"] == sum(written)
    assert found["bytes_written"] == sum(map(int.__mul__, written, layout.page_sizes))
    assert f"precompute: {DISTINCT:,} of {DISTINCT:,} tokens (100 %) in " in done.stderr
    assert re.search(rf"^ *computed +{DISTINCT:,} ", done.stdout, re.MULTILINE)
    assert done.stdout.startswith(f"done; {len(PROMPTS)} prompts; layout: gpt-oss; ")
    assert {path.name for path in tmp_path.iterdir()} >= {"corpus.jsonl", "figures.json"}
    assert not list(tmp_path.glob("*.journal"))  # it would speak of what has gone


def test_a_report_is_written(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["precompute", str(corpus), *NUMPY, *MEMORY, "--report", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "corpus.jsonl: gpt-oss" in page
    assert f"{DISTINCT:,}" in page


def test_wrong_lines_are_left_out(wrong_lines: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    assert main(["precompute", str(wrong_lines), *NUMPY, *MEMORY, "--json", str(figures)]) == 1
    said = capsys.readouterr()
    assert re.search(r"line 2: .*\n.*line 4: ", said.err)
    assert "2 lines are no prompt and left out" in said.out
    found = figures_of(figures)
    assert found["status"] == "done"
    assert found["wrong_lines"] == 2
    assert [wrong["line"] for wrong in found["wrong"]] == [2, 4]
    assert found["tokens_computed"] == distinct_tokens(PROMPTS[:3])


def test_a_wrong_line_stops_it(wrong_lines: Path, serving_master: LocalMooncake, fresh: str, tmp_path: Path) -> None:
    at = ("--store", serving_master.master_address, "--model-name", fresh)
    done = command("precompute", wrong_lines.name, *SLOW, *at, "--on-wrong", "stop", cwd=tmp_path)
    assert done.returncode == 2
    assert "precompute: line 2: " in done.stderr
    assert done.stdout == ""
    assert computed(tmp_path / "computed.log") == []
    assert stored(serving_master.master_address, serving_master.metrics_port, fresh) == {}


def test_all_lines_are_wrong(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.write_text("nothing\n" * 30)
    assert main(["precompute", str(corpus), *NUMPY, *MEMORY]) == 1
    said = capsys.readouterr()
    assert "done; 0 prompts" in said.out
    assert "30 lines are no prompt" in said.out
    assert "and 20 more" in said.out


def test_an_empty_corpus_is_done(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.write_text("")
    assert main(["precompute", str(corpus), *NUMPY, *MEMORY]) == 0
    assert "done; 0 prompts" in capsys.readouterr().out


# What it reads.


def test_text_goes_through_a_tokenizer(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["one " * 50, "three five " * 20]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    figures = tmp_path / "figures.json"
    arguments = [str(corpus), *NUMPY, *MEMORY, "--json", str(figures)]
    assert main(["precompute", *arguments, "--tokenizer", "slow:words"]) == 0
    found = figures_of(figures)
    assert (found["tokens_total"], found["tokens_computed"]) == (90, distinct_tokens([[3] * 50, [5, 4] * 20]))
    capsys.readouterr()
    said = refusal(capsys, "precompute", corpus, *NUMPY, *MEMORY)
    assert "--tokenizer" in said or "tokenizer" in said
    assert f"{corpus}:1" in said
    said = refusal(capsys, "precompute", corpus, *NUMPY, *MEMORY, "--tokenizer", "slow:nothing")
    assert "--tokenizer 'slow:nothing'" in said
    said = refusal(capsys, "precompute", corpus, *NUMPY, *MEMORY, "--tokenizer", "slow:PAUSE")
    assert "no function" in said


def test_parquet_and_packed_lines(corpus: Path, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"token_ids": PROMPTS}), tmp_path / "rows.parquet")
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    for name in ("rows.parquet", "lines.jsonl.gz"):
        figures = tmp_path / "figures.json"
        assert main(["precompute", str(tmp_path / name), *NUMPY, *MEMORY, "--json", str(figures)]) == 0
        assert figures_of(figures)["tokens_computed"] == DISTINCT


def test_a_producer_of_ones_own(corpus: Path, tmp_path: Path) -> None:
    at = (*MEMORY, "--model-name", "m")
    done = command("precompute", corpus.name, *SLOW, *at, "--json", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done
    assert "slow:make" in done.stdout
    found = figures_of(tmp_path / "figures.json")
    assert [group["page_size_bytes"] for group in found["groups"]] == [256, 32]
    assert sum(tokens for _, tokens in computed(tmp_path / "computed.log")) == found["tokens_computed"] == DISTINCT
    assert found["chunks_written"] == len(expected(PROMPTS, "m"))


@pytest.mark.parametrize(
    ("fault", "words"), [("raise RuntimeError('too hot')", "RuntimeError: too hot"), ("return state, {}", None)]
)
def test_a_producer_fails(fault: str, words: str | None, corpus: Path, tmp_path: Path) -> None:
    """Its own stack is shown. One that leaves chunks out is none that fails: they are missing."""
    (tmp_path / "failing.py").write_text(
        f"from slow import LAYOUT, NumpyProducer\n\nclass Failing(NumpyProducer):\n"
        f"    def prefill(self, state, token_ids, wanted):\n        {fault}\n\n"
        "def make(layout):\n    return Failing(LAYOUT)\n"
    )
    process = start("precompute", corpus.name, "--producer", "failing:make", "--model-name", "m", *MEMORY, cwd=tmp_path)
    done = ended(process, stack=words is not None)
    if words is not None:
        assert done.returncode == 4, done
        assert words in done.stderr
        assert "precompute: --producer failing:make: the producer raised RuntimeError: too hot" in done.stderr
        assert done.stdout == ""
    else:
        assert done.returncode == 1, done
        assert done.stdout.startswith("incomplete: ")
        assert "the producer does not deliver them" in done.stdout


# How it refuses to begin.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layout", "nope"), "nope"),
        ((*NUMPY, "--scale", "0"), "--scale"),
        ((*NUMPY, "--shard", "4/3"), "--shard: there is no part 4 of 3"),
        ((*NUMPY, "--shard", "0/3"), "--shard: '0/3'"),
        ((*NUMPY, "--shard", "1"), "--shard: '1'"),
        ((*NUMPY, "--pending", "many"), "--pending is 'many'"),
        ((*NUMPY, "--pending", "0"), "max_bytes_pending"),
        ((*NUMPY, "--step-tokens", "0"), "step_tokens"),
        ((*NUMPY, "--patience", "nan"), "patience_seconds"),
        ((*NUMPY, "--trunk-wait", "-1"), "trunk_seconds"),
        ((*NUMPY, "--timeout", "0"), "timeout"),
        ((*NUMPY, "--bytes-per-second", "much"), "--bytes-per-second is 'much'"),
        ((*NUMPY, "--bytes-per-second", "0"), "bytes_per_second"),
        ((*NUMPY, "--requests-per-second", "0"), "requests_per_second"),
        ((*NUMPY, "--replicas", "0"), "--replicas"),
        ((*NUMPY, "--soft-pin", "-1"), "--soft-pin"),
        ((*NUMPY, "--retention", "100"), "--retention"),
        ((*NUMPY, "--retention", "some"), "--retention"),
        ((*NUMPY, "--spool", "/no/such/folder"), "/no/such/folder"),
        ((*NUMPY, "--mode", "remote"), "--mode remote"),
        ((*NUMPY, "--resume"), "nothing to resume"),
        ((*NUMPY, "--journal", "job.journal"), "no journal"),
        ((*NUMPY, "--json", "/no/such/folder/figures.json"), "--json /no/such/folder/figures.json"),
        ((*NUMPY, "--report", "/no/such/folder/report.html"), "--report"),
        ((*NUMPY, "--report", "."), "--report"),
        ((*NUMPY, "--engine", "ray"), "--store memory"),
        (LAYOUT, "--producer is missing"),
        (("--producer", "slow:make"), "--model-name is missing"),
        (("--producer", "numpy"), "--layout"),
        ((*LAYOUT, "--producer", "slow"), "module:name"),
        ((*LAYOUT, "--producer", "no_such_module:make"), "no_such_module"),
        ((*LAYOUT, "--producer", "slow:nothing"), "nothing"),
        ((*LAYOUT, "--producer", "slow:PAUSE"), "no factory"),
        ((*LAYOUT, "--producer", "slow:fails"), "RuntimeError: no such weights"),
        ((*LAYOUT, "--producer", "slow:words"), "AttributeError"),
        ((*LAYOUT, "--producer", "slow:make"), "made a producer of another one"),
    ],
)
def test_it_refuses(
    arguments: tuple[str, ...], words: str, corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = set(tmp_path.iterdir())
    assert words in refusal(capsys, "precompute", corpus, *arguments, *MEMORY)
    assert {path.name for path in set(tmp_path.iterdir()) - before} <= {"computed.log", "__pycache__"}
    assert computed(tmp_path / "computed.log") == []


@pytest.mark.parametrize("name", ["none.jsonl", "."])
def test_there_is_no_corpus(name: str, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for dry in ((), ("--dry-run",)):
        assert f"there is no corpus {name}" in refusal(capsys, "precompute", name, *NUMPY, *MEMORY, *dry)


def test_what_is_no_corpus(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ".jsonl" in refusal(capsys, "precompute", corpus.rename("corpus.csv"), *NUMPY, *MEMORY)
    packed = gzip.compress(Path("corpus.csv").read_bytes())
    Path("cut.jsonl.gz").write_bytes(packed[:-20])
    assert "cut.jsonl.gz" in refusal(capsys, "precompute", "cut.jsonl.gz", *NUMPY, *MEMORY)


@pytest.mark.parametrize("mode", ["remote", "shared", "embedded"])
def test_there_is_no_store(mode: str, corpus: Path, capsys: pytest.CaptureFixture[str], native_library: None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        said = refusal(capsys, "precompute", corpus, *NUMPY, "--store", address, "--mode", mode)
    assert address in said
    assert "serve" in said
    assert not list(Path.cwd().glob("*.journal"))


def test_no_store_is_named(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no master address" in refusal(capsys, "precompute", corpus, *NUMPY)
    assert "'nowhere'" in refusal(capsys, "precompute", corpus, *NUMPY, "--store", "nowhere")


def test_a_report_without_its_library(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before the night, not after it."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    said = refusal(capsys, "precompute", corpus, *NUMPY, *MEMORY, "--report", "report.html")
    assert "pip install" in said
    assert not Path("report.html").exists()


# What reaches the client.


class _EnoughError(ConfigError):
    pass


def settings_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """What a client is connected with."""
    found: dict[str, Any] = {}

    def connect(layout: object, **settings: Any) -> SparseStoreClient:
        found.update(settings)
        raise _EnoughError

    monkeypatch.setattr(SparseStoreClient, "connect", connect)
    assert main(["precompute", "corpus.jsonl", *NUMPY, *arguments]) == 2
    assert found
    return found


def test_the_brakes_reach_the_client(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings_of(monkeypatch, "--requests-per-second", "7", "--bytes-per-second", "3MB", "--timeout", "9")
    assert (found["limits"].requests_per_second, found["limits"].bytes_per_second) == (7, 3 << 20)
    assert found["timeout"] == 9
    found = settings_of(monkeypatch)
    assert (found["limits"].requests_per_second, found["limits"].bytes_per_second) == (None, None)


def test_pins_and_replicas_reach_the_client(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "replication" not in settings_of(monkeypatch)  # what the environment says stands
    made = settings_of(monkeypatch, "--replicas", "2")["replication"]
    assert (made.replica_num, made.soft_pin, made.hard_pin) == (2, None, False)
    made = settings_of(monkeypatch, "--soft-pin")["replication"]
    assert (made.replica_num, made.soft_pin, made.soft_pin_ttl_seconds) == (1, True, None)
    made = settings_of(monkeypatch, "--soft-pin", "90")["replication"]
    assert (made.soft_pin, made.soft_pin_ttl_seconds) == (True, 90)
    assert settings_of(monkeypatch, "--hard-pin")["replication"].hard_pin


def test_store_and_cache_reach_the_client(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings_of(monkeypatch, "--store", "somewhere:5", "--model-name", "m", "--dtype", "float16")
    assert (found["master_server_address"], found["model_name"], found["dtype"]) == ("somewhere:5", "m", "float16")
    assert (found["mode"], found["retention_interval"]) == (None, 16384)
    found = settings_of(monkeypatch, "--store", "here:6", "--mode", "shared", "--retention", "none", "--revision", "r")
    assert (found["owner_address"], found["mode"], found["revision"]) == ("here:6", "shared", "r")
    assert "master_server_address" not in found
    assert found["retention_interval"] is None


def cache_for(block: int, *arguments: str) -> Cache:
    parser = argparse.ArgumentParser()
    add_cache_arguments(parser)
    layout = KVCacheLayout([FullAttentionSpec(block, page_size_bytes=32)])
    return cache_of(parser.parse_args(["corpus.jsonl", *arguments]), layout)


def test_the_retention_that_nobody_names_is_of_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    name = ("--model-name", "m")
    assert [cache_for(block, *name).retention for block in (16, 24, 16384, 32768)] == [16384, 16368, 16384, 32768]
    assert cache_for(24, *name).retention_origin == "default"
    assert cache_for(24, *name, "--retention", "48").retention == 48
    for text, interval in (("480", 480), ("0", 0)):
        monkeypatch.setenv("MOONCAKE_SPARSE_RETENTION_INTERVAL", text)
        assert cache_for(24, *name).retention == interval
        assert cache_for(24, *name, "--retention", "none").retention is None


def test_the_model_is_called_after_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However that is written; by any other name as that says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    for model in ("llama", "llama/", "./llama", str(tmp_path / "llama"), "../" + tmp_path.name + "/llama"):
        assert cache_for(16, "--model", model).model_name == "llama"
    assert cache_for(16, "--model", "somebody/llama").model_name == "somebody/llama"
    assert cache_for(16, "--model", "llama", "--model-name", "other").model_name == "other"
    assert cache_for(16, "--layout", "gpt-oss", "--model", "llama").model_name == "gpt-oss"
    with pytest.raises(ConfigError, match="--model-name is missing"):
        cache_for(16)


def test_what_is_said_of_the_job_reaches_it(corpus: Path, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def options(*arguments: str, shard: str = "1/1") -> JobOptions:
        return options_of(parser.parse_args([str(corpus), *arguments]), Shard.parse(shard))

    journal = corpus.with_name("corpus.jsonl.journal")
    assert options() == JobOptions(journal=journal)
    said = (
        *("--resume", "--on-wrong", "stop", "--keep-in-process", "--read-back", "--step-tokens", "7"),
        *("--pending", "5MB", "--trunk-wait", "3", "--patience", "4", "--spool", str(tmp_path)),
    )
    assert options(*said, shard="2/3") == JobOptions(
        journal=journal.with_name("corpus.jsonl.journal.2-of-3"),
        resume=True,
        shard=Shard(2, 3),
        on_wrong="stop",
        keep_in_process=True,
        read_back=True,
        step_tokens=7,
        max_bytes_pending=5 << 20,
        patience_seconds=4,
        trunk_seconds=3,
        spool=tmp_path,
    )
    assert options("--journal", "j", shard="trunk/3").journal == Path("j.trunk-of-3")


def test_figures_of_before_stay_until_there_are_new_ones(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = Path("figures.json")
    figures.write_text("of before")
    refusal(capsys, "precompute", corpus, *NUMPY, *MEMORY, "--json", figures, "--shard", "4/3")
    assert figures.read_text() == "of before"
    assert main(["precompute", str(corpus), *NUMPY, *MEMORY, "--json", str(figures)]) == 0
    assert figures_of(figures)["status"] == "done"


# On a Mooncake.


def test_a_second_run_computes_nothing(corpus: Path, serving_master: LocalMooncake, fresh: str, tmp_path: Path) -> None:
    at = ("--store", serving_master.master_address, "--model-name", fresh)
    run = ("precompute", corpus.name, *SLOW, *at, "--json", "figures.json")
    first = command(*run, "--requests-per-second", "200", "--bytes-per-second", "100MB", "--soft-pin", cwd=tmp_path)
    assert first.returncode == 0, first
    assert figures_of(tmp_path / "figures.json")["tokens_computed"] == DISTINCT
    held = stored(serving_master.master_address, serving_master.metrics_port, fresh)
    assert held == expected(PROMPTS, fresh)
    (tmp_path / "computed.log").unlink()
    second = command(*run, cwd=tmp_path)
    assert second.returncode == 0, second
    found = figures_of(tmp_path / "figures.json")
    assert computed(tmp_path / "computed.log") == []
    assert (found["tokens_computed"], found["tokens_skipped"], found["chunks_written"]) == (0, DISTINCT, 0)
    assert f"{DISTINCT:,} of {DISTINCT:,} tokens (100 %)" in second.stderr
    verified = command("verify", corpus.name, *SLOW, *at, cwd=tmp_path)
    assert verified.returncode == 0, verified


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_is_stopped_and_resumed(
    number: signal.Signals, corpus: Path, serving_master: LocalMooncake, fresh: str, tmp_path: Path
) -> None:
    """No more is computed twice than one prompt's own tokens; and its journal is nobody else's meanwhile."""
    at = ("--store", serving_master.master_address, "--model-name", fresh)
    run = ("precompute", corpus.name, *SLOW, *at, "--json", "figures.json", "--step-tokens", "32")
    log = tmp_path / "computed.log"
    process = start(*run, cwd=tmp_path, environ={"PAUSE": "0.1"})
    until(lambda: len(computed(log)) >= 9, process)  # the first stretch is stored
    if number == signal.SIGTERM:
        other = command(*run[:-4], cwd=tmp_path)
        assert other.returncode == 2
        assert "another process is using the journal" in other.stderr
    process.send_signal(number)
    stopped = ended(process)
    assert stopped.returncode == 3, stopped
    assert stopped.stdout.startswith("stopped: ")
    assert "--resume" in stopped.stdout
    found = figures_of(tmp_path / "figures.json")
    assert found["status"] == "stopped"
    assert 0 < found["tokens_computed"] < DISTINCT
    if number == signal.SIGINT:
        again = command(*run, cwd=tmp_path)
        assert again.returncode == 2
        assert "unfinished" in again.stderr
        assert "--resume" in again.stderr
    resumed = command(*run, "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed
    found = figures_of(tmp_path / "figures.json")
    assert found["earlier"]["runs"] == 1
    # The stretch that it was in the midst of: windows are kept at its ends, so what goes on begins at one.
    assert 0 <= sum(tokens for _, tokens in computed(log)) - DISTINCT < 192
    held = stored(serving_master.master_address, serving_master.metrics_port, fresh)
    assert held == expected(PROMPTS, fresh)


def test_a_second_interrupt_ends_it_at_once(
    corpus: Path, serving_master: LocalMooncake, fresh: str, tmp_path: Path
) -> None:
    at = ("--store", serving_master.master_address, "--model-name", fresh)
    process = start("precompute", corpus.name, *SLOW, *at, cwd=tmp_path, environ={"PAUSE": "3"})
    until(lambda: len(computed(tmp_path / "computed.log")) >= 1, process)
    process.send_signal(signal.SIGINT)
    with pytest.raises(TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    assert ended(process).returncode == 130


def test_results_would_go_with_the_process(
    corpus: Path, serving_master: LocalMooncake, fresh: str, tmp_path: Path
) -> None:
    at = ("--store", serving_master.master_address, "--model-name", fresh, "--mode", "embedded")
    environ = {"MOONCAKE_GLOBAL_SEGMENT_SIZE": str(64 << 20)}
    refused = command("precompute", corpus.name, *SLOW, *at, cwd=tmp_path, environ=environ)
    assert refused.returncode == 2
    assert "all results would go with it" in refused.stderr
    assert "--keep-in-process" in refused.stderr
    assert computed(tmp_path / "computed.log") == []
    allowed = command("precompute", corpus.name, *SLOW, *at, "--keep-in-process", cwd=tmp_path, environ=environ)
    assert allowed.returncode == 0, allowed
