"""Producers: the stand-in for a model, against a plain definition and through a client, and those that are named."""

from __future__ import annotations

import dataclasses
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "core"))
from strategies import layouts, quick

from mooncake_sparse_client import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GetResult,
    KVCacheLayout,
    MambaSpec,
    MemoryStore,
    SlidingWindowSpec,
    SparseStoreClient,
)
from mooncake_sparse_client.core.masks import needed_chunks
from mooncake_sparse_client.errors import ConfigError, InvalidBufferError, InvalidLayoutError, InvalidRequestError
from mooncake_sparse_client.jobs.numpy_producer import NumpyProducer, SeenPrefix
from mooncake_sparse_client.jobs.producers import load_object, load_producer

Chunks = dict[tuple[int, int], bytes]
WORD = (1 << 64) - 1
PAGES = (8, 9, 15, 16, 17, 31, 64, 100)
#: Every kind, by blocks of 4 and 8.
MIXED = KVCacheLayout(
    [
        FullAttentionSpec(8, page_size_bytes=40),
        SlidingWindowSpec(4, 10, page_size_bytes=24),
        SlidingWindowSpec(4, 1, page_size_bytes=16),
        MambaSpec(8, page_size_bytes=33),
        ChunkedLocalAttentionSpec(8, 16, page_size_bytes=17),
    ]
)


def mix(word: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word ^= word >> shift
        word = word * factor & WORD
    return word ^ word >> 31


def chunk_bytes(layout: KVCacheLayout, token_ids: Sequence[int], group: int, chunk: int) -> bytes:
    """A chunk, defined a token and a word at a time."""
    spec = layout.groups[group]
    end = (chunk + 1) * spec.block_size
    total = 0
    for position, token in enumerate(token_ids[:end]):
        total += mix((token * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03) & WORD)
    label = mix(group + 1)
    key = mix((total + end * 0x8CB92BA72F3D8DD7 + label) & WORD)
    words = [(total & WORD) ^ label, *(key ^ mix(number) for number in range(2, 20))]
    return b"".join(word.to_bytes(8, "little") for word in words)[: layout.page_sizes[group]]


def with_pages(layout: KVCacheLayout, seed: int) -> KVCacheLayout:
    dice = random.Random(seed)
    groups = [dataclasses.replace(spec, page_size_bytes=dice.choice(PAGES)) for spec in layout.groups]
    return KVCacheLayout(groups, hash_block_size=layout.hash_block_size)


sized_layouts = st.builds(with_pages, layouts(), st.integers(0, 1000))


def tokens_of(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 1 << 31, count)]


def all_of(layout: KVCacheLayout, start: int, end: int) -> list[np.ndarray]:
    """Masks of every chunk of tokens ``[start, end)``."""
    numbers = [np.arange(end // spec.block_size) for spec in layout.groups]
    return [chunks * spec.block_size >= start for chunks, spec in zip(numbers, layout.groups, strict=True)]


def computed(
    producer: NumpyProducer, state: SeenPrefix, token_ids: Sequence[int], stops: Sequence[int]
) -> tuple[SeenPrefix, Chunks]:
    """Go on up to each stop, and every chunk on the way."""
    found: Chunks = {}
    for stop in stops:
        start = state.num_tokens
        wanted = all_of(producer.layout, start, stop)
        state, made = producer.prefill(state, np.array(token_ids[start:stop]), wanted)
        assert set(made) == {(group, chunk) for group, mask in enumerate(wanted) for chunk in np.flatnonzero(mask)}
        found |= {where: bytes(row.data) for where, row in made.items()}
    return state, found


def whole(producer: NumpyProducer, token_ids: Sequence[int]) -> tuple[SeenPrefix, Chunks]:
    return computed(producer, SeenPrefix(), token_ids, [len(token_ids)])


def got_of(layout: KVCacheLayout, chunks: Chunks, length: int) -> GetResult:
    """What a get of a hit answers."""
    wanted = {
        (group, chunk): memoryview(chunks[group, chunk])
        for group, spec in enumerate(layout.groups)
        for chunk in needed_chunks(spec, length, margin=False)
    }
    return GetResult(length, chunks=wanted)


@quick
@given(sized_layouts, st.integers(1, 6), st.integers(0, 99), st.sets(st.integers(1, 5)))
def test_chunks_are_as_defined_however_the_tokens_come(
    layout: KVCacheLayout, blocks: int, seed: int, cuts: set[int]
) -> None:
    step = layout.alignment
    tokens = tokens_of(seed, blocks * step)
    producer = NumpyProducer(layout)
    stops = [cut * step for cut in sorted(cuts) if cut < blocks] + [len(tokens)]
    end, chunks = computed(producer, SeenPrefix(), tokens, stops)
    assert chunks == {where: chunk_bytes(layout, tokens, *where) for where in chunks}
    assert len(chunks) == sum(len(tokens) // spec.block_size for spec in layout.groups)
    assert (end, chunks) == whole(producer, tokens)


@quick
@given(sized_layouts, st.integers(2, 5), st.integers(0, 99), st.data())
def test_what_is_changed_changes_every_chunk_behind_it(
    layout: KVCacheLayout, blocks: int, seed: int, data: st.DataObject
) -> None:
    """One token, or the order of two; and no chunk before."""
    tokens = tokens_of(seed, blocks * layout.alignment)
    producer = NumpyProducer(layout)
    _, before = whole(producer, tokens)
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(at, len(tokens) - 1))
    changed = list(tokens)
    if other == at:
        changed[at] ^= 1
    else:
        changed[at], changed[other] = changed[other], changed[at]
    _, after = whole(producer, changed)
    for (group, chunk), page in after.items():
        first_behind = at // layout.groups[group].block_size
        assert (page != before[group, chunk]) == (chunk >= first_behind), (group, chunk)


def test_the_same_tokens_elsewhere_or_in_another_group_are_other_bytes() -> None:
    layout = KVCacheLayout([FullAttentionSpec(4, page_size_bytes=24), SlidingWindowSpec(4, 9, page_size_bytes=24)])
    _, chunks = whole(NumpyProducer(layout), [7] * 4000)
    pieces = [page[at : at + 8] for page in chunks.values() for at in (0, 8, 16)]
    assert len(set(pieces)) == len(pieces) == 6000


@quick
@given(sized_layouts, st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_a_restored_state_is_the_one_that_was_reached(layout: KVCacheLayout, hit: int, more: int, seed: int) -> None:
    tokens = tokens_of(seed, (hit + more) * layout.alignment)
    producer = NumpyProducer(layout)
    length = hit * layout.alignment
    state, chunks = computed(producer, SeenPrefix(), tokens, [length])
    got = got_of(layout, chunks, length)
    if got.chunks:
        restored = producer.restore(got)
        assert restored == state
        assert computed(producer, restored, tokens, [len(tokens)]) == computed(producer, state, tokens, [len(tokens)])
    else:
        with pytest.raises(InvalidBufferError, match=f"no group of this layout keeps a chunk for a hit of {length}"):
            producer.restore(got)


@pytest.mark.parametrize("interval", [None, 0, 16])
@pytest.mark.parametrize("eagle", [False, True])
async def test_through_a_store_and_on_is_as_if_never_stopped(interval: int | None, eagle: bool) -> None:
    groups = MIXED.groups[:-1] if eagle else MIXED.groups
    layout = KVCacheLayout(groups, use_eagle=eagle)
    producer = NumpyProducer(layout)
    client = SparseStoreClient(MemoryStore(), layout, model_name="m", retention_interval=interval)
    tokens = tokens_of(3, 104)
    first, longer = client.sequence(tokens[:80]), client.sequence(tokens)
    plan = client.plan_put(first, num_prompt_tokens=80)
    state, source = producer.prefill(SeenPrefix(), np.array(tokens[:80]), plan.store_masks)
    put = await client.put(first, source, num_prompt_tokens=80)
    assert put.written.chunks == len(source) == sum(int(mask.sum()) for mask in plan.store_masks)
    hit = await client.lookup(longer)
    assert hit.hit_length == (72 if eagle else 80)
    restored = producer.restore(await client.get(hit))
    _, expected = whole(producer, tokens)
    end, chunks = computed(producer, restored, tokens, [88, len(tokens)])
    assert end == computed(producer, state, tokens, [len(tokens)])[0]
    assert chunks == {where: expected[where] for where in chunks}
    assert min(chunks) == (0, hit.hit_length // 8)


def test_a_miss_is_restored_as_nothing_seen() -> None:
    assert NumpyProducer(MIXED).restore(GetResult(0)) == SeenPrefix(0, 0)


def test_a_fork_goes_its_own_way() -> None:
    producer = NumpyProducer(MIXED)
    stem, one, two = tokens_of(1, 32), tokens_of(2, 16), tokens_of(3, 16)
    state, _ = whole(producer, stem)
    twin = producer.fork(state)
    for end, ids in ((twin, one), (state, two)):
        assert computed(producer, end, stem + ids, [48])[0] == whole(producer, stem + ids)[0]


def test_chunks_stay_as_they_are_and_can_be_sent_as_they_are() -> None:
    producer = NumpyProducer(MIXED)
    state, made = producer.prefill(SeenPrefix(), np.array(tokens_of(1, 32)), all_of(MIXED, 0, 32))
    before = {where: bytes(row.data) for where, row in made.items()}
    producer.prefill(state, np.array(tokens_of(2, 32)), all_of(MIXED, 32, 64))
    assert {where: bytes(row.data) for where, row in made.items()} == before
    assert all(row.flags.c_contiguous and row.ndim == 1 for row in made.values())


@pytest.mark.parametrize("seed", range(40))
def test_any_one_wrong_byte_is_noticed(seed: int) -> None:
    """Pages of 16 bytes and more."""
    dice = random.Random(seed)
    producer = NumpyProducer(MIXED)
    _, chunks = whole(producer, tokens_of(seed, 48))
    got = got_of(MIXED, chunks, 40)
    group, chunk = dice.choice(sorted(got.chunks))
    page = bytearray(got.chunks[group, chunk])
    page[dice.randrange(len(page))] ^= dice.randint(1, 255)
    wrong = dataclasses.replace(got, chunks={**got.chunks, (group, chunk): memoryview(page)})
    with pytest.raises(InvalidBufferError, match=rf"chunk {chunk} of group {group} is not what was made for its place"):
        producer.restore(wrong)


def test_an_intact_chunk_of_another_place_group_or_prefix_is_noticed() -> None:
    layout = KVCacheLayout([FullAttentionSpec(4, page_size_bytes=20), SlidingWindowSpec(4, 9, page_size_bytes=20)])
    producer = NumpyProducer(layout)
    (_, mine), (_, theirs) = (whole(producer, tokens_of(seed, 40)) for seed in (1, 2))
    got = got_of(layout, mine, 32)

    def restore(**wrong: bytes) -> SeenPrefix:
        chunks = {**got.chunks, (1, 7): memoryview(next(iter(wrong.values())))}
        return producer.restore(dataclasses.replace(got, chunks=chunks))

    assert restore(right=mine[1, 7]) == producer.restore(got)
    for page in (mine[1, 6], mine[0, 7]):
        with pytest.raises(InvalidBufferError, match="chunk 7 of group 1 is not what was made for its place"):
            restore(wrong=page)
    with pytest.raises(InvalidBufferError, match="chunk 7 of group 1 is of another prefix than the chunk of group 0"):
        restore(wrong=theirs[1, 7])
    with pytest.raises(InvalidBufferError, match="chunk 7 of group 1 has 19 bytes, not 20"):
        restore(wrong=mine[1, 7][:-1])
    with pytest.raises(InvalidBufferError, match="chunk 3 of group 0 is missing"):
        producer.restore(GetResult(32, chunks={key: view for key, view in got.chunks.items() if key != (0, 3)}))
    with pytest.raises(InvalidRequestError, match="a hit of 30 tokens is none of this layout"):
        producer.restore(dataclasses.replace(got, hit_length=30))


def test_what_breaks_the_rules_of_prefill_is_refused() -> None:
    layout = KVCacheLayout([FullAttentionSpec(4, page_size_bytes=16), SlidingWindowSpec(8, 9, page_size_bytes=16)])
    producer = NumpyProducer(layout)
    ids = np.array(tokens_of(1, 16))
    state, _ = producer.prefill(SeenPrefix(), ids, [np.zeros(0, bool)] * 2)
    for words, count, wanted in [
        ("chunks 3 to 5 of group 0 are wanted, tokens 12 to 24, .* from 16 to 32", 16, [[3, 5], []]),
        ("chunks 2 to 4 of group 1 are wanted, tokens 16 to 40, .* from 16 to 32", 16, [[], [2, 4]]),
        ("positive multiple of the alignment 8", 12, [[], []]),
        ("positive multiple of the alignment 8", 0, [[], []]),
        ("wanted has 1 masks, and the layout 2 groups", 16, [[]]),
    ]:
        with pytest.raises(InvalidRequestError, match=words):
            producer.prefill(state, ids[:count], [np.isin(np.arange(9), chunks) for chunks in wanted])
    with pytest.raises(InvalidRequestError, match="positive multiple"):
        producer.prefill(state, ids.reshape(2, 8), [np.zeros(0, bool)] * 2)


def test_layouts_without_room_for_a_hash_are_refused() -> None:
    small = KVCacheLayout([FullAttentionSpec(4, page_size_bytes=8), MambaSpec(4, page_size_bytes=7, name="states")])
    with pytest.raises(InvalidLayoutError, match=r"is 7 on group 1 \(states\).*larger scale"):
        NumpyProducer(small)
    with pytest.raises(InvalidLayoutError, match="page_size_bytes is missing on group 0"):
        NumpyProducer(KVCacheLayout([FullAttentionSpec(4)]))
    with pytest.raises(InvalidLayoutError, match="has no layout of its own"):
        NumpyProducer(None)


# Named on a command line --------------------------------------------------------------------------------------

FACTORIES = """
from types import SimpleNamespace
from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout
from mooncake_sparse_client.jobs.numpy_producer import NumpyProducer

def made(layout):
    return NumpyProducer(layout or KVCacheLayout([FullAttentionSpec(4, page_size_bytes=16)]))

def own(layout):
    return NumpyProducer(KVCacheLayout([FullAttentionSpec(4, page_size_bytes=16, name="mine")]))

def failing(layout):
    raise RuntimeError("no such GPU")

def partly(layout):
    return SimpleNamespace(layout=layout, restore=print, fork=None)

def without_pages(layout):
    return SimpleNamespace(layout=KVCacheLayout([FullAttentionSpec(4)]), restore=print, fork=print, prefill=print)

def without_layout(layout):
    return SimpleNamespace(layout="full", restore=print, fork=print, prefill=print)

class Words:
    @staticmethod
    def tokens(text):
        return [len(word) for word in text.split()]

number = 3
"""
FOURS = KVCacheLayout([FullAttentionSpec(4, page_size_bytes=16)])
EIGHTS = KVCacheLayout([SlidingWindowSpec(8, 20, page_size_bytes=16)])


@pytest.fixture
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with modules that only it has."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(Path.cwd()))])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some_factories.py").write_text(FACTORIES)
    (tmp_path / "broken_factories.py").write_text("import some_factories\n1 / 0\n")
    yield tmp_path
    for name in ("some_factories", "broken_factories"):
        sys.modules.pop(name, None)


def test_objects_of_the_current_folder_and_of_packages_are_found(current_folder: Path) -> None:
    assert load_object("mooncake_sparse_client.jobs.numpy_producer:NumpyProducer", "--producer") is NumpyProducer
    tokens = load_object("some_factories:Words.tokens", "--tokenizer")
    assert callable(tokens)
    assert tokens("of two words") == [2, 3, 5]
    assert sys.path.count(str(current_folder)) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("some_factories", "--tokenizer 'some_factories': write module:name"),
        (":made", "--tokenizer ':made': write module:name"),
        ("some_factories:", "write module:name"),
        ("absent_module:made", "'absent_module' does not import: ModuleNotFoundError: No module named 'absent_module'"),
        ("some_factories.inner:x", "does not import: ModuleNotFoundError"),
        (".made:x", "does not import: TypeError"),
        ("broken_factories:made", "module 'broken_factories' does not import: ZeroDivisionError: division by zero"),
        ("some_factories:absent", "--tokenizer 'some_factories:absent': .*'some_factories' has no attribute 'absent'"),
        ("some_factories:Words.absent", "'Words' has no attribute 'absent'"),
    ],
)
@pytest.mark.usefixtures("current_folder")
def test_what_is_not_there_is_said_with_the_option(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_object(text, "--tokenizer")
    assert "--tokenizer" in str(caught.value)


@pytest.mark.usefixtures("current_folder")
def test_a_factory_is_called_with_the_layout_or_none() -> None:
    assert load_producer("some_factories:made", EIGHTS).layout is EIGHTS
    assert load_producer("some_factories:made", None).layout == FOURS
    assert load_producer("some_factories:own", FOURS).layout.groups[0].name == "mine"  # a name makes no difference
    assert load_producer("mooncake_sparse_client.jobs.numpy_producer:NumpyProducer", FOURS).layout is FOURS


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("absent", None, "has no attribute 'absent'"),
        ("number", None, "is 3, and no factory"),
        ("failing", None, "called with no layout (None), raised RuntimeError: no such GPU"),
        ("failing", FOURS, "called with a layout, raised RuntimeError: no such GPU"),
        ("partly", FOURS, "no producer: it has no method fork, prefill"),
        ("without_layout", None, "layout must be a KVCacheLayout, not 'full'"),
        ("without_pages", None, "the producer's layout: page_size_bytes is missing on group 0"),
        ("NumpyProducer", None, "raised InvalidLayoutError: NumpyProducer has no layout of its own"),
        (
            "own",
            EIGHTS,
            "given the layout [sliding_window 8, 20, 16 bytes; hash blocks of 8], and made a producer of another one, "
            "[full 4, 16 bytes; hash blocks of 4]",
        ),
    ],
)
@pytest.mark.usefixtures("current_folder")
def test_what_is_no_producer_of_the_layout_is_refused(name: str, layout: KVCacheLayout | None, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_producer(f"some_factories:{name}", layout)
    assert str(caught.value).startswith(f"--producer 'some_factories:{name}'")
