"""``verify`` tells what is gone and what is damaged, and ``precompute`` heals both."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_ground import (
    HEADER_SIZE,
    NUMPY,
    OWN_LAYOUT,
    SLOW,
    SLOW_MODULE,
    Contents,
    command,
    computed,
    distinct_tokens,
    expected,
    families,
    figures_of,
    refusal,
    stored,
    with_raw_store,
    write_corpus,
)

from mooncake_sparse_client import (
    Failure,
    GetItem,
    MemoryStore,
    MooncakeStore,
    PutItem,
    RemoveOutcome,
    Resilience,
    SparseStoreClient,
    WrappedStore,
)
from mooncake_sparse_client.cli import verify
from mooncake_sparse_client.cli.main import main
from mooncake_sparse_client.errors import StoreUnavailableError
from mooncake_sparse_client.stores.local import LocalMooncake

PROMPTS = families(2, families=2, branches=3)
DISTINCT = distinct_tokens(PROMPTS)


@pytest.fixture(autouse=True)
def no_blocking_calls() -> None:
    """No guard here: a command's loop serves nobody else, and its progress takes locks in it."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(SLOW_MODULE)
    return write_corpus(tmp_path, PROMPTS)


def test_what_is_gone_or_damaged_is_told_and_healed(
    corpus: Path, serving_master: LocalMooncake, fresh: str, tmp_path: Path
) -> None:
    address = serving_master.master_address
    cache = (corpus.name, *SLOW, "--store", address, "--model-name", fresh, "--json", "figures.json")
    filled = command("precompute", *cache, cwd=tmp_path)
    assert filled.returncode == 0, filled
    whole = expected(PROMPTS, fresh)
    windows = [key for key in whole if "@group:1@" in key]
    full = [key for key in whole if "@group:0@" in key]
    gone, damaged = [full[5], windows[0]], [full[-1], windows[-2], windows[-1]]
    asyncio.run(with_raw_store(address, lambda store: spoil(store, whole, gone, damaged)))

    verified = command("verify", *cache, cwd=tmp_path)
    assert verified.returncode == 1, verified
    found = figures_of(tmp_path / "figures.json")
    assert found["missing"] == tally(gone, whole)
    assert found["damaged"] == tally(damaged, whole)
    assert found["intact"] == tally(set(whole) - {*gone, *damaged}, whole)
    assert found["unread"] == {"chunks": 0, "bytes": 0}
    assert (found["prompts"], found["tokens_distinct"]) == (len(PROMPTS), DISTINCT)
    assert 0 < found["tokens_intact"] < DISTINCT
    assert re.search(r"^gone +2 ", verified.stdout, re.MULTILINE)
    assert re.search(r"^damaged +3 ", verified.stdout, re.MULTILINE)
    assert "--read-back" in verified.stdout

    log = tmp_path / "computed.log"
    log.unlink()
    # Whoever only asks takes what is damaged for stored.
    asked = command("precompute", *cache, cwd=tmp_path)
    assert asked.returncode == 0, asked
    assert figures_of(tmp_path / "figures.json")["chunks_written"] == len(gone)
    still = command("verify", *cache, cwd=tmp_path)
    assert still.returncode == 1
    found = figures_of(tmp_path / "figures.json")
    assert (found["missing"]["chunks"], found["damaged"]) == (0, tally(damaged, whole))

    healed = command("precompute", *cache, "--read-back", cwd=tmp_path)
    assert healed.returncode == 0, healed
    assert figures_of(tmp_path / "figures.json")["chunks_written"] == len(damaged)
    assert 0 < sum(tokens for _, tokens in computed(log)) < DISTINCT
    assert stored(address, serving_master.metrics_port, fresh) == whole
    well = command("verify", *cache, cwd=tmp_path)
    assert well.returncode == 0, well
    found = figures_of(tmp_path / "figures.json")
    assert (found["intact"], found["tokens_intact"]) == (tally(whole, whole), DISTINCT)
    assert "--read-back" not in well.stdout


async def spoil(store: MooncakeStore, whole: Contents, gone: Sequence[str], damaged: Sequence[str]) -> None:
    """Remove some values, and put others with one bit turned."""
    keys = [*gone, *damaged]
    assert await store.remove(keys, force=True) == [RemoveOutcome.REMOVED] * len(keys)
    for key in damaged:
        value = bytearray(whole[key])
        value[-1] ^= 1
        assert await store.put([PutItem(key, (memoryview(value),))]) == [None]


def tally(keys: Sequence[str] | set[str] | Contents, whole: Contents) -> dict[str, int]:
    """As the figures have it: bytes without headers."""
    return {"chunks": len(keys), "bytes": sum(len(whole[key]) - HEADER_SIZE for key in keys)}


def test_nothing_is_there(corpus: Path, serving_master: LocalMooncake, fresh: str, tmp_path: Path) -> None:
    """Nor is it written; and a wrong line is told of."""
    corpus.write_text(corpus.read_text() + "{\n")
    address = serving_master.master_address
    cache = (corpus.name, *SLOW, "--store", address, "--model-name", fresh, "--json", "figures.json")
    verified = command("verify", *cache, cwd=tmp_path)
    assert verified.returncode == 1, verified
    whole = expected(PROMPTS, fresh)
    found = figures_of(tmp_path / "figures.json")
    assert (found["missing"], found["intact"]["chunks"]) == (tally(whole, whole), 0)
    assert (found["tokens_intact"], found["wrong_lines"]) == (0, 1)
    assert stored(address, serving_master.metrics_port, fresh, OWN_LAYOUT) == {}


def test_it_tells_of_a_store_that_is_out_of_reach(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: it may wait for it for minutes."""
    store, asked = MemoryStore(), itertools.count()

    class Out(WrappedStore):
        async def exists(self, keys: Sequence[str]) -> list[bool]:
            if next(asked) == 0:
                raise StoreUnavailableError("the master is away")
            return await super().exists(keys)

        async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
            if next(asked) == 0:
                raise StoreUnavailableError("the master is away")
            return await super().get(items)

    client = SparseStoreClient(Out(store), OWN_LAYOUT, model_name="m", resilience=Resilience(attempts=1, breaker=False))
    monkeypatch.setattr(verify, "client_of", lambda arguments, cache: client)
    assert main(["verify", str(corpus), *NUMPY]) == 1
    said = capsys.readouterr()
    assert re.search(r"^verify: .*the master is away; trying again", said.err, re.MULTILINE)
    assert "verify: going on" in said.err
    assert f"{DISTINCT:,} of {DISTINCT:,} tokens" in said.err
    assert re.search(r"^gone +[1-9]", said.out, re.MULTILINE)


def test_it_refuses(corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus.parent)
    assert "--store memory" in refusal(capsys, "verify", corpus, *NUMPY, "--store", "memory")
    assert "there is no corpus" in refusal(capsys, "verify", "none.jsonl", *NUMPY)
    assert "--layout" in refusal(capsys, "verify", corpus)
    assert "no master address" in refusal(capsys, "verify", corpus, *NUMPY)
    assert "--json" in refusal(capsys, "verify", corpus, *NUMPY, "--json", "/no/such/folder/figures.json")
