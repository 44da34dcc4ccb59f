"""Jobs that are killed and resumed, or whose master is: what is stored at the end is what one quiet run stores."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "faults"))
from command_ground import (
    OWN_LAYOUT,
    SLOW,
    SLOW_MODULE,
    Ids,
    command,
    computed,
    distinct_tokens,
    ended,
    expected,
    figures_of,
    start,
    stored,
    until,
    write_corpus,
)
from conftest import LoopThread
from ground import Ground

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(300)]

#: Tokens that are computed at a time, all stretches are made of whole steps, and the longest of them, in steps.
STEP, LONGEST = 32, 3
#: Bytes of a step's chunks of the full group, which all are kept, and with a window's.
LEAST, MOST = 2 * 256, 2 * (256 + 32)
#: Bytes that may be pending: one step can be computed while another is put.
PENDING = 2 * MOST
KILLS = 20


@pytest.fixture(autouse=True)
def no_blocking_calls() -> None:
    """No guard here: no event loop of these tests serves anybody."""


@pytest.fixture
def ground(native_library: None, fixtures_loop: LoopThread) -> Iterator[Ground]:
    made = Ground()
    # What a killed writer had begun is in the others' way for so long.
    made.master._arguments += ["--put_start_discard_timeout_sec=2", "--put_start_release_timeout_sec=4"]
    fixtures_loop.run(made.__aenter__())
    yield made
    fixtures_loop.run(made.aclose())


def a_tree(seed: int, prompts: int) -> list[Ids]:
    """Prompts of a tree of stretches, each of one to ``LONGEST`` steps and with no end within it."""
    dice = random.Random(seed)

    def stretch() -> Ids:
        return [dice.randrange(1, 1_000_000) for _ in range(STEP * dice.randint(1, LONGEST))]

    inner = [stretch()]
    while len(inner) < prompts // 4:
        inner.append(dice.choice(inner) + stretch())
    return [dice.choice(inner) + stretch() + [7] * dice.randrange(1, 16) for _ in range(prompts)]


def test_killed_twenty_times_and_resumed(ground: Ground, fresh: str, tmp_path: Path) -> None:
    prompts = a_tree(11, 220)
    dice, log = random.Random(12), tmp_path / "computed.log"
    corpus = write_corpus(tmp_path, prompts)
    (tmp_path / "slow.py").write_text(SLOW_MODULE)
    run = ("precompute", corpus.name, *SLOW, "--store", ground.master_address, "--model-name", fresh, "--resume")
    run += ("--step-tokens", str(STEP), "--pending", str(PENDING), "--json", "figures.json")
    at_work = 0
    for _ in range(KILLS):
        before, more = len(computed(log)), dice.randint(0, 40)
        process = start(*run, cwd=tmp_path, environ={"PAUSE": "0.015"})
        if more:
            until(lambda: len(computed(log)) >= before + more, process)  # noqa: B023 - called here
        time.sleep(dice.uniform(0, 0.1))
        process.kill()
        assert ended(process).returncode == -signal.SIGKILL
        at_work += len(computed(log)) > before
    assert at_work >= KILLS // 2
    assert sum(tokens for _, tokens in computed(log)) < distinct_tokens(prompts), "all was over before the last kill"

    last = command(*run, cwd=tmp_path)
    assert last.returncode == 0, last
    found = figures_of(tmp_path / "figures.json")
    assert found["status"] == "done"
    assert at_work <= found["earlier"]["runs"] <= KILLS
    assert stored(ground.master_address, ground.metrics_port, fresh) == expected(prompts, fresh)
    distinct = distinct_tokens(prompts)
    assert found["tokens_distinct"] == distinct
    repeated = sum(tokens for _, tokens in computed(log)) - distinct
    # A kill loses what is pending: so many steps, each perhaps of another stretch, which is begun anew then, since
    # windows are kept at its end alone.
    assert 0 <= repeated <= at_work * (PENDING // LEAST) * LONGEST * STEP
    verified = command("verify", corpus.name, *run[2:-7], cwd=tmp_path)
    assert verified.returncode == 0, verified


@pytest.mark.parametrize("gap", [0.5, 8.0])
def test_the_master_is_killed_and_comes_back(
    gap: float, ground: Ground, fixtures_loop: LoopThread, fresh: str, tmp_path: Path
) -> None:
    """It has forgotten all that was stored: the job goes on, writes it again, and says so."""
    prompts = a_tree(13, 40)
    corpus, log = write_corpus(tmp_path, prompts), tmp_path / "computed.log"
    (tmp_path / "slow.py").write_text(SLOW_MODULE)
    cache = (corpus.name, *SLOW, "--store", ground.master_address, "--model-name", fresh)
    run = ("precompute", *cache, "--step-tokens", str(STEP), "--json", "figures.json")
    process = start(*run, cwd=tmp_path, environ={"PAUSE": "0.05"})
    until(lambda: len(computed(log)) >= 30, process)
    fixtures_loop.run(ground.master.restart(gap))
    done = ended(process, 120)
    assert done.returncode == 0, done
    found = figures_of(tmp_path / "figures.json")
    assert found["status"] == "done"
    assert found["rewritten"]["chunks"] > 0
    assert found["passes"] > 1
    distinct = distinct_tokens(prompts)
    assert found["tokens_computed"] - found["tokens_recomputed"] + found["tokens_skipped"] == distinct
    assert sum(tokens for _, tokens in computed(log)) == found["tokens_computed"]
    assert "had been stored before and were gone" in done.stdout
    if gap > 5:  # else the client's own retries may do
        assert found["seconds_waited"] > 0
        assert "trying again" in done.stderr
    whole = expected(prompts, fresh, OWN_LAYOUT)
    assert stored(ground.master_address, ground.metrics_port, fresh) == whole
    assert found["chunks_written"] == len(whole) + found["rewritten"]["chunks"]
    verified = command("verify", *cache, cwd=tmp_path)
    assert verified.returncode == 0, verified
