"""``bench --plane lookup``: the straightforward way that lookups are measured against, and what is measured."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_sparse_client import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KeySchema,
    KVCacheLayout,
    MambaSpec,
    MemoryStore,
    SlidingWindowSpec,
    layout_for,
    longest_usable_prefix,
    store_mask,
)
from mooncake_sparse_client.cli.bench import crowd, lookup, repeating, rules
from mooncake_sparse_client.cli.bench.ground import Ground
from mooncake_sparse_client.cli.bench.plain_lookup import (
    PlainLookup,
    digest_blocks,
    hash_blocks,
    plain_load_mask,
    plain_store_mask,
)
from mooncake_sparse_client.cli.bench.repeating import repeated, repeated_on_thread
from mooncake_sparse_client.cli.bench.session import Effort, Session
from mooncake_sparse_client.cli.bench.shelves import Shelf, Values, lookup_client, small_values
from mooncake_sparse_client.cli.main import main
from mooncake_sparse_client.core.keys import chunk_name
from mooncake_sparse_client.core.masks import BoolArray, load_mask
from mooncake_sparse_client.errors import InvalidLayoutError, StoreAnswerError
from mooncake_sparse_client.stores.base import Store

quick = settings(max_examples=150, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def no_blocking_calls() -> None:
    """No guard here: a command's loop serves nobody else."""


class FakeMooncake(MemoryStore):
    """Keys without values, which a client and native calls see alike."""

    def __init__(self) -> None:
        super().__init__()
        self.there: set[str] = set()
        self.log: list[tuple[str, int]] = []
        self.broken = False

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self.log.append(("ask", len(keys)))
        return [key in self.there for key in keys]

    def register_buffer(self, pointer: int, size: int) -> int:
        self.log.append(("register", size))
        return 0

    def unregister_buffer(self, pointer: int) -> int:
        self.log.append(("unregister", pointer))
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.log.append(("exist", len(keys)))
        return [-900 if self.broken else int(key in self.there) for key in keys]

    def batch_put_from(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        self.log.append(("put", len(keys)))
        self.there.update(keys)
        return [-200 if self.broken else 0] * len(keys)

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        self.log.append(("remove", len(keys)))
        found = [key in self.there for key in keys]
        self.there.difference_update(keys)
        return [0 if there else -704 for there in found]

    def counted(self, what: str) -> int:
        return sum(number for name, number in self.log if name == what)


# The straightforward way


@pytest.mark.parametrize("kind", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_plain_hashes_are_those_of_vllm(kind: Any) -> None:
    ids = rules.some_tokens(203).tolist()
    assert tuple(hash_blocks(kind, ids, 16, "seed")) == BlockHasher(16, kind, "seed").hash_blocks(ids)
    assert hash_blocks(kind, ids[:15], 16, "seed") == []


def test_bare_digests_are_of_as_many_bytes_as_a_packed_block() -> None:
    assert digest_blocks(3, 16) == [hashlib.sha256(bytes(32 + 64)).digest()] * 3


#: Blocks that divide each other, as the plain lookup's layouts have them.
_SIZES = st.sampled_from([2, 4, 8])
_FULL = st.builds(FullAttentionSpec, _SIZES)
_SLIDING = st.builds(SlidingWindowSpec, _SIZES, st.integers(1, 30))
_LAYOUTS = st.lists(st.one_of(_FULL, _SLIDING), min_size=1, max_size=4).map(KVCacheLayout)


def hashes_of(layout: KVCacheLayout, num_tokens: int) -> list[bytes]:
    return [number.to_bytes(8) for number in range(num_tokens // layout.common_block_size)]


def keys_of(layout: KVCacheLayout, hashes: Sequence[bytes], masks: Sequence[BoolArray]) -> set[str]:
    """The keys of the chunks that ``masks`` choose, by way of the package's own definitions."""
    schema, named = KeySchema.vllm("model"), layout.with_hash_block_size(layout.common_block_size)
    chosen = [(group, chunk) for group, mask in enumerate(masks) for chunk in np.flatnonzero(mask).tolist()]
    return {schema.key(group, str(chunk_name(named, hashes, group, chunk))) for group, chunk in chosen}


@quick
@given(layout=_LAYOUTS, blocks=st.integers(0, 12), more=st.integers(0, 7), seed=st.integers(0, 999), data=st.data())
def test_the_plain_lookup_finds_the_longest_usable_prefix(
    layout: KVCacheLayout, blocks: int, more: int, seed: int, data: st.DataObject
) -> None:
    num_tokens = blocks * layout.alignment + min(more, layout.alignment - 1)
    dice, share = np.random.default_rng(seed), data.draw(st.sampled_from([1.0, 0.97, 0.9, 0.7, 0.0]))
    present = [dice.random(num_tokens // spec.block_size) < share for spec in layout.groups]
    native, hashes = FakeMooncake(), hashes_of(layout, num_tokens)
    native.there = keys_of(layout, hashes, present)
    plain = PlainLookup(native, layout, "model")
    assert plain.find(hashes, num_tokens) == longest_usable_prefix(layout, num_tokens, present)
    assert native.log == [("exist", sum(map(len, present)))]


@pytest.mark.parametrize("name", ["llama", "gemma-3", "deepseek-v4"])
def test_plain_keys_are_those_of_vllm(name: str) -> None:
    layout = layout_for(name)
    hashes = hashes_of(layout, 2048)
    keys = PlainLookup(FakeMooncake(), layout, "model").keys(hashes)
    everything = [np.ones(2048 // spec.block_size, dtype=np.bool_) for spec in layout.groups]
    assert set(itertools.chain.from_iterable(keys)) == keys_of(layout, hashes, everything)
    assert [len(some) for some in keys] == [len(mask) for mask in everything]
    assert keys[0][0].startswith("model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@")


@pytest.mark.parametrize(
    "layout",
    [
        KVCacheLayout([FullAttentionSpec(4), MambaSpec(4)]),
        KVCacheLayout([FullAttentionSpec(4), ChunkedLocalAttentionSpec(4, 8)]),
        KVCacheLayout([FullAttentionSpec(4, eagle=True)]),
    ],
)
def test_the_plain_lookup_says_what_it_does_not_know(layout: KVCacheLayout) -> None:
    with pytest.raises(InvalidLayoutError, match="full attention and sliding windows without draft layers"):
        PlainLookup(FakeMooncake(), layout, "model")


def test_a_store_that_does_not_answer_is_no_quick_miss() -> None:
    native = FakeMooncake()
    native.broken = True
    with pytest.raises(StoreAnswerError, match="a native question of 1 keys answered -900"):
        PlainLookup(native, KVCacheLayout([FullAttentionSpec(4)]), "model").find([b"hash"], 9)


@quick
@given(layout=_LAYOUTS, blocks=st.integers(0, 12), times=st.one_of(st.none(), st.integers(0, 5)))
def test_plain_masks_are_the_masks(layout: KVCacheLayout, blocks: int, times: int | None) -> None:
    num_tokens = blocks * layout.alignment
    interval = None if times is None else times * layout.alignment
    wanted = store_mask(layout, num_tokens, retention_interval=interval, num_prompt_tokens=num_tokens)
    assert plain_store_mask(layout, num_tokens, interval) == [mask.tolist() for mask in wanted]
    assert plain_load_mask(layout, num_tokens) == [mask.tolist() for mask in load_mask(layout, num_tokens)]


# Sides


async def test_work_is_repeated_until_it_has_taken_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=2.0)  # two seconds pass from look to look
    monkeypatch.setattr(repeating, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(repeating, "_RUN_SECONDS", 5.0)
    done: list[str] = []

    async def work() -> str:
        done.append("here")
        return "right"

    def blocking() -> str:
        done.append("on a thread")
        return "right"

    here = repeated(Effort(repeats=1), "work", work, lambda answer: answer == "right")
    assert await here.run() == 2.0
    assert done == ["here"] * 3
    here.check()
    elsewhere = repeated_on_thread(Effort(repeats=1), "work", blocking, lambda answer: answer == "wrong")
    assert await elsewhere.run() == 2.0
    assert done[3:] == ["on a thread"] * 3
    with pytest.raises(StoreAnswerError, match="work has a wrong answer: 'right'"):
        elsewhere.check()


def test_a_shelf_writes_and_removes_what_it_takes() -> None:
    native = FakeMooncake()
    with small_values(native) as values:  # type: ignore[arg-type]
        shelf = Shelf(
            values, [["a", "b", "c", "d"], ["x", "y"]], [np.array([1, 1, 0, 1], bool), np.array([1, 1], bool)]
        )
        shelf.hold([np.array([1, 1, 1, 0], bool), np.array([0, 1], bool)])
        assert native.there == {"a", "b", "y"}  # c is never written
        shelf.hold([np.array([0, 1, 1, 1], bool), np.array([0, 1], bool)])
        assert native.there == {"b", "d", "y"}
        shelf.hold([np.zeros(4, bool), np.zeros(2, bool)])
        assert not native.there
    assert native.counted("put") == 4
    assert native.log[0] == ("register", 16)
    assert native.log[-1][0] == "unregister"


def test_a_full_store_is_told() -> None:
    native = FakeMooncake()
    native.broken = True
    with pytest.raises(StoreAnswerError, match="a native put of 2 keys answered -200 where 0 is right; is the memory"):
        Values(native, np.ones(16, dtype=np.uint8)).put(["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(StoreAnswerError, match="a native removal of 1 keys answered -704"):
        Values(native, np.ones(16, dtype=np.uint8)).remove(["c"])  # type: ignore[arg-type]


def test_what_the_store_holds_of_a_prompt() -> None:
    layout = layout_for("deepseek-v4")
    held: dict[lookup.Case, list[int]] = {
        case: [int(mask.sum()) for mask in lookup.presence(case, layout, 8192)]
        for case in ("miss", "half", "all", "holes")
    }
    assert held["miss"] == [0, 0, 0, 0]
    assert held["half"] == [16, 64, 1024, 512]
    assert held["all"] == [32, 128, 2048, 1024]
    assert held["holes"] == [31, 127, 2028, 1014]
    again = lookup.presence("holes", layout, 8192)
    assert all(map(np.array_equal, lookup.presence("holes", layout, 8192), again))


async def test_a_counting_store_counts_questions() -> None:
    fake = FakeMooncake()
    counting = crowd.CountingStore(fake)
    assert isinstance(counting, Store)
    fake.there = {"a"}
    assert await counting.exists(["a", "b"]) == [True, False]
    assert (await counting.health()).ok
    assert counting.questions == 1


# The whole


def wanted_names() -> set[str]:
    """The names that others rely on."""
    layouts, cases = ("llama", "gemma-3", "deepseek-v4"), ("miss", "half", "all", "holes")
    kinds = ("sha256_packed", "sha256_packed_array", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
    return {
        *(f"hash.{kind}.{block}" for kind in kinds for block in (4, 16, 256)),
        *("store_mask.1M", "store_mask.1M.0", "store_mask.1M.16384", "load_mask.1M"),
        *(f"lookup.{case}.{layout}{end}" for case in cases for layout in layouts for end in ("", ".8K", ".1M")),
        *(f"tokens_to_hit.{layout}" for layout in layouts),
        *(f"{figure}.{layout}.{case}" for figure in ("keys_asked", "requests") for layout in layouts for case in cases),
        *(f"{start}concurrent.1000{end}" for start in ("", "wire_requests.") for end in ("", ".llama", ".deepseek-v4")),
    }


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeMooncake:
    """Everything on keys of this process, with short prompts and little patience."""
    mooncake = FakeMooncake()

    class NoProcesses:
        @classmethod
        async def start(cls, **_: object) -> NoProcesses:
            mooncake.log.append(("start", 1))
            return cls()

        async def __aenter__(self) -> NoProcesses:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    @asynccontextmanager
    async def open_ground(*_: object, **__: object) -> AsyncIterator[Ground]:
        yield Ground("embedded", mooncake, mooncake)  # type: ignore[arg-type]

    monkeypatch.setattr(lookup, "LocalMooncake", NoProcesses)
    monkeypatch.setattr(lookup, "open_ground", open_ground)
    monkeypatch.setattr(lookup, "_LENGTHS", {"8K": 1024, "128K": 2048, "1M": 512_000})
    monkeypatch.setattr(crowd, "_REQUESTS", 40)
    return mooncake


async def test_everything_that_is_named_is_measured(fake: FakeMooncake) -> None:
    done: list[str] = []
    session = Session(Effort(repeats=1, scale=0.01), done=done.append)
    await lookup.LOOKUP.measure(session)
    assert sorted(done) == sorted(lookup.LOOKUP.names) == sorted(wanted_names())
    assert not fake.there  # one measurement's keys are no part of the next
    for found in session.comparisons:
        assert found.ratio.median > 0
    figures = session.figures
    for name in (name for name in wanted_names() if name.startswith("lookup.")):
        found = next(found for found in session.comparisons if found.name == name)
        assert figures[f"ms.{name}.ours"] == pytest.approx(1000 / found.typical[0])
        assert figures[f"ms.{name}.theirs"] == pytest.approx(1000 / found.typical[1])
    for name in ("keys_asked.llama.all", "requests.gemma-3.half", "wire_requests.concurrent.1000"):
        assert figures[name] >= 1
    assert figures["tokens.128K"] == 2048  # exactly as the figures say, even in a quick run
    assert figures["tokens.1M"] == 5120


async def test_what_is_not_wanted_is_not_set_up(fake: FakeMooncake) -> None:
    session = Session(Effort(repeats=1, scale=0.01), only=["hash.sha256.16", "store_mask.1M.0"])
    await lookup.LOOKUP.measure(session)
    assert [found.name for found in session.comparisons] == ["hash.sha256.16", "store_mask.1M.0"]
    assert not fake.log
    session = Session(Effort(repeats=1), only=["lookup.half.llama.8K"])
    await lookup.LOOKUP.measure(session)
    assert [found.name for found in session.comparisons] == ["lookup.half.llama.8K"]
    assert fake.counted("start") == 1
    assert fake.counted("put") == 2 * 512 // 16  # each side's half of the short prompt, and nothing else
    name = "lookup.half.llama.8K"
    assert set(session.figures) == {"tokens.8K", f"ms.{name}.ours", f"ms.{name}.theirs"}


async def test_each_side_writes_what_it_would(fake: FakeMooncake) -> None:
    session = Session(Effort(repeats=1, scale=0.01), only=["lookup.all.deepseek-v4.8K"])
    await lookup.LOOKUP.measure(session)
    everything = 1024 // 256 + 1024 // 64 + 1024 // 4 + 1024 // 8
    reachable = 4 * (1 + 2 + 2 + 16)  # of 256 tokens, the chunks that some window ends with
    assert fake.counted("put") == everything + reachable


async def test_figures_can_be_had_alone(fake: FakeMooncake) -> None:
    done: list[str] = []
    session = Session(Effort(repeats=1), only=["keys_asked.llama.all", "wire_requests.*.llama"], done=done.append)
    await lookup.LOOKUP.measure(session)
    assert done == ["keys_asked.llama.all", "wire_requests.concurrent.1000.llama"]
    assert not session.comparisons
    assert fake.counted("exist") == 0  # the other side was not run


async def test_a_crowd_that_misses_its_documents_is_told(fake: FakeMooncake) -> None:
    async with lookup_client(fake, "llama") as client:
        sequences = [client.sequence(range(number, number + 8192)) for number in range(3)]
        with pytest.raises(StoreAnswerError, match="a lookup found 0 tokens of a document of 6144"):
            await crowd._seconds_each(crowd._all_at_once(client, sequences))
        with pytest.raises(StoreAnswerError, match="a lookup found 0 tokens of a document of 6144"):
            await crowd._seconds_each(crowd._one_by_one(client, sequences))


@pytest.mark.usefixtures("native_library")
def test_bench_on_a_real_master(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    only = ["lookup.holes.deepseek-v4.8K", "lookup.all.gemma-3.8K", "hash.sha256_packed.16", "keys_asked.llama.miss"]
    options = [word for name in only for word in ("--only", name)]
    assert main(["bench", "--plane", "lookup", "--quick", "--repeats", "1", "--json", str(path), *options]) == 0
    found = json.loads(path.read_text())
    assert found["plane"] == "lookup"
    assert sorted(found["ratios"]) == ["hash.sha256_packed.16", "lookup.all.gemma-3.8K", "lookup.holes.deepseek-v4.8K"]
    for name, unit in (("lookup.all.gemma-3.8K", "lookups"), ("hash.sha256_packed.16", "tokens")):
        ratio, figures = found["ratios"][name], found["figures"]
        assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
        rates = {side: figures[f"{unit}_per_second.{name}.{side}"] for side in ("ours", "theirs")}
        assert rates["ours"] / rates["theirs"] == pytest.approx(ratio["median"])
    assert found["figures"]["ms.lookup.all.gemma-3.8K.theirs"] > 0
    assert found["figures"]["keys_asked.llama.miss"] >= 1
    assert any(line.startswith("lookup.all.gemma-3.8K ") for line in capsys.readouterr().out.splitlines())
