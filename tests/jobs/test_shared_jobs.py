"""Parts of one job in several processes at once, and on Ray, store what one run stores, each token computed once."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
import pytest
from command_ground import (
    SLOW,
    SLOW_MODULE,
    Figures,
    command,
    computed,
    distinct_tokens,
    ended,
    expected,
    families,
    figures_of,
    start,
    stored,
    until,
    write_corpus,
)

from mooncake_sparse_client.stores.local import LocalMooncake

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(240)]
#: The first tokens are those of all parts, and some parts' families are large.
PROMPTS = families(21, families=4, branches=6) + families(22, families=2, branches=3)
DISTINCT = distinct_tokens(PROMPTS)
SUMMED = ("prompts", "tokens_total", "tokens_distinct", "tokens_reused", "tokens_unstored")


@pytest.fixture(autouse=True)
def no_blocking_calls() -> None:
    """No guard here: no event loop of these tests serves anybody."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(SLOW_MODULE)
    return write_corpus(tmp_path, PROMPTS)


class Job:
    """The parts of a job that fills a cache of a Mooncake."""

    def __init__(self, local: LocalMooncake, model: str, corpus: Path) -> None:
        self._local, self._model, self._folder = local, model, corpus.parent
        self.cache = (corpus.name, *SLOW, "--store", local.master_address, "--model-name", model)

    def start(self, shard: str, pause: float = 0.02) -> subprocess.Popen[str]:
        return start(
            *("precompute", *self.cache, "--shard", shard, "--json", self._figures(shard)),
            cwd=self._folder,
            environ={"PAUSE": str(pause), "COMPUTED": self._log(shard).name},
        )

    def figures(self, shard: str) -> Figures:
        return figures_of(self._figures(shard))

    def log(self, shard: str) -> list[tuple[int, int]]:
        return computed(self._log(shard))

    def _figures(self, shard: str) -> Path:
        return self._folder / f"{shard.replace('/', '-')}.json"

    def _log(self, shard: str) -> Path:
        return self._folder / f"{shard.replace('/', '-')}.log"

    def finish(self, processes: Iterable[subprocess.Popen[str]]) -> None:
        for process in processes:
            done = ended(process)
            assert done.returncode == 0, done

    def is_whole(self, shards: Sequence[str]) -> None:
        """The parts' figures add up to those of one run, and what is stored is the same."""
        whole = expected(PROMPTS, self._model)
        assert stored(self._local.master_address, self._local.metrics_port, self._model) == whole
        figures = [self.figures(shard) for shard in shards]
        assert [found["shard"] for found in figures] == list(shards)
        assert [found["status"] for found in figures] == ["done"] * len(shards)
        totals = {name: sum(found[name] for found in figures) for name in SUMMED}
        assert totals["prompts"] == len(PROMPTS)
        assert totals["tokens_total"] == sum(map(len, PROMPTS))
        assert totals["tokens_distinct"] == DISTINCT
        assert sum(found["tokens_computed"] for found in figures) == DISTINCT
        assert sum(tokens for shard in shards for _, tokens in self.log(shard)) == DISTINCT
        assert sum(found["chunks_written"] for found in figures) == len(whole)


@pytest.fixture
def job(serving_master: LocalMooncake, fresh: str, corpus: Path) -> Job:
    return Job(serving_master, fresh, corpus)


PARTS = ("1/3", "2/3", "3/3")


def test_three_at_once(job: Job) -> None:
    job.finish([job.start(shard) for shard in PARTS])
    job.is_whole(PARTS)
    loads = [job.figures(shard)["tokens_distinct"] for shard in PARTS]
    assert max(loads) < 2 * min(loads)


def test_the_last_part_is_started_first(job: Job) -> None:
    """It waits for the trunk, which part 1 computes, and says so."""
    third = job.start("3/3")
    second = job.start("2/3")
    assert third.stderr is not None
    for line in third.stderr:
        if "waiting for part 1" in line:
            break
    assert job.log("3/3") == []
    job.finish([job.start("1/3"), second, third])
    job.is_whole(PARTS)


def test_the_trunk_goes_before_them(job: Job) -> None:
    job.finish([job.start("trunk/3")])
    trunk = job.figures("trunk/3")
    assert 0 < trunk["tokens_computed"] < DISTINCT
    processes = [job.start(shard) for shard in ("2/3", "3/3")]
    job.finish(processes)
    job.finish([job.start("1/3")])
    # Part 1 counts the trunk too, and has found it there.
    first = job.figures("1/3")
    assert first["tokens_skipped"] == trunk["tokens_distinct"]
    figures = [job.figures(shard) for shard in ("trunk/3", *PARTS)]
    assert sum(found["tokens_computed"] for found in figures) == DISTINCT
    assert sum(found["tokens_distinct"] for found in figures) == DISTINCT + trunk["tokens_distinct"]
    assert stored(job._local.master_address, job._local.metrics_port, job._model) == expected(PROMPTS, job._model)


def test_a_part_that_is_killed_is_resumed(job: Job) -> None:
    """Alone, by its own journal."""
    others = [job.start(shard) for shard in ("1/3", "3/3")]
    second = job.start("2/3", pause=0.05)
    until(lambda: len(job.log("2/3")) >= 3, second)
    second.kill()
    ended(second)
    job.finish(others)
    folder = job._folder
    assert {path.name for path in folder.glob("*.journal.*")} == {
        f"corpus.jsonl.journal.{number}-of-3" for number in (1, 2, 3)
    }
    again = ("precompute", *job.cache, "--shard", "2/3")
    assert "--resume" in command(*again, cwd=folder).stderr
    done = command(*again, "--resume", cwd=folder)
    assert done.returncode == 0, done
    assert stored(job._local.master_address, job._local.metrics_port, job._model) == expected(PROMPTS, job._model)


def test_on_ray(job: Job) -> None:
    pytest.importorskip("ray")
    folder, before = job._folder, _of_ray()
    arguments = ("--engine", "ray", "--workers", "2", "--json", "figures.json", "--report", "report.html")
    environ = {"COMPUTED": str(folder / "computed.log"), "RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0"}
    done = command("precompute", *job.cache, *arguments, cwd=folder, environ=environ, timeout=150)
    assert done.returncode == 0, done
    found = figures_of(folder / "figures.json")
    assert found["status"] == "done"
    assert found["prompts"] == len(PROMPTS)
    assert found["tokens_distinct"] == found["tokens_computed"] == DISTINCT
    assert found["tokens_total"] == sum(map(len, PROMPTS))
    assert sum(tokens for _, tokens in computed(folder / "computed.log")) == DISTINCT
    whole = expected(PROMPTS, job._model)
    assert stored(job._local.master_address, job._local.metrics_port, job._model) == whole
    assert found["chunks_written"] == len(whole)
    assert f"{DISTINCT:,}" in (folder / "report.html").read_text()
    assert {path.name for path in folder.glob("*.journal.*")} == {
        f"corpus.jsonl.journal.{part}-of-2" for part in ("trunk", 1, 2)
    }
    _, alive = psutil.wait_procs(_of_ray() - before, timeout=20)
    assert not alive


def test_on_ray_a_refusal_is_no_traceback(job: Job) -> None:
    """What a worker refuses is said as if it were refused here."""
    pytest.importorskip("ray")
    environ = {"RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0"}
    arguments = ("--engine", "ray", "--spool", "/no/such/folder")
    done = command("precompute", *job.cache, *arguments, cwd=job._folder, environ=environ, timeout=150)
    assert done.returncode == 2, done
    assert "/no/such/folder" in done.stderr
    assert done.stderr.count("\n") < 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("lines", [3, 9])
def test_on_ray_it_is_stopped_and_resumed(number: signal.Signals, lines: int, job: Job) -> None:
    """In the trunk, and in the parts."""
    pytest.importorskip("ray")
    folder, log, before = job._folder, job._folder / "computed.log", _of_ray()
    environ = {"COMPUTED": str(log), "RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0"}
    run = ("precompute", *job.cache, "--engine", "ray", "--json", "figures.json")
    process = start(*run, cwd=folder, environ={**environ, "PAUSE": "0.3"})
    until(lambda: len(computed(log)) >= lines, process)
    process.send_signal(number)
    stopped = ended(process)
    assert stopped.returncode == 3, stopped
    assert "--resume" in stopped.stdout
    found = figures_of(folder / "figures.json")
    assert found["status"] == "stopped"
    assert "asked to stop" in found["message"]
    _, alive = psutil.wait_procs(_of_ray() - before, timeout=20)
    assert not alive
    resumed = command(*run, "--resume", cwd=folder, environ=environ, timeout=150)
    assert resumed.returncode == 0, resumed
    assert stored(job._local.master_address, job._local.metrics_port, job._model) == expected(PROMPTS, job._model)


def _of_ray() -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter(["cmdline", "uids"]):
        words = " ".join(process.info["cmdline"] or ())
        if process.info["uids"] and process.info["uids"].real == os.getuid() and ("ray::" in words or "/ray/" in words):
            found.add(process)
    return found
