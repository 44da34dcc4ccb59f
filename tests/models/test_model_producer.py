"""A model as a job's producer: piece by piece, forked and restored, it makes the chunks of one prefill."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import BLOCK, KINDS, build, tokens_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import DynamicCache, PreTrainedTokenizerFast

from mooncake_sparse_client import GetResult, KVCacheLayout, MemoryStore, SparseStoreClient
from mooncake_sparse_client.core.masks import BoolArray
from mooncake_sparse_client.errors import ConfigError, InvalidBufferError, InvalidLayoutError, InvalidRequestError
from mooncake_sparse_client.integrations.model_producer import ModelProducer, tokenizer_of
from mooncake_sparse_client.jobs.producers import load_producer

pytestmark = pytest.mark.models
Chunks = dict[tuple[int, int], NDArray[np.uint8]]
STEM = tokens_of(1, 160)
UNKNOWN = "?"
ONE, TWO = STEM + tokens_of(2, 96), STEM + tokens_of(3, 96)


@pytest.fixture(scope="module", params=KINDS)
def producer(request: pytest.FixtureRequest) -> ModelProducer:
    return ModelProducer(build(request.param), BLOCK, step_tokens=64)


def all_of(layout: KVCacheLayout, start: int, end: int) -> list[BoolArray]:
    """Masks of every chunk of tokens ``[start, end)``."""
    return [np.arange(end // spec.block_size) * spec.block_size >= start for spec in layout.groups]


def go_on(
    producer: ModelProducer, state: DynamicCache, tokens: Sequence[int], stops: Sequence[int]
) -> tuple[DynamicCache, Chunks]:
    """Compute up to each stop; every chunk on the way."""
    found: Chunks = {}
    for stop in stops:
        start = state.get_seq_length()
        wanted = all_of(producer.layout, start, stop)
        state, source = producer.prefill(state, np.array(tokens[start:stop]), wanted)
        for group, mask in enumerate(wanted):
            for chunk in np.flatnonzero(mask).tolist():
                page = source(group, chunk)
                assert page is not None
                found[group, chunk] = page
    assert state.get_seq_length() == stops[-1]
    return state, found


def whole(producer: ModelProducer, tokens: Sequence[int]) -> Chunks:
    """Every chunk, of one forward over all tokens."""
    capture = producer.kv.capture(all_of(producer.layout, 0, len(tokens)))
    producer.kv.prefill(producer._model, tokens, producer.kv.new_cache(), capture)
    return {
        (group, chunk): capture(group, chunk)
        for group, spec in enumerate(producer.layout.groups)
        for chunk in range(len(tokens) // spec.block_size)
    }


def assert_near(found: Chunks, true: Chunks, *, start: int, end: int) -> None:
    """Every chunk of tokens ``[start, end)`` and no other, apart from how numbers are rounded."""
    assert {chunk for _, chunk in found} == set(range(start // BLOCK, end // BLOCK))
    assert len(found) == len({group for group, _ in true}) * (end - start) // BLOCK
    for where, page in found.items():
        np.testing.assert_allclose(page.view(np.float32), true[where].view(np.float32), rtol=0, atol=1e-4)


def states_of(cache: DynamicCache) -> list[torch.Tensor]:
    return [kept for layer in cache.layers for kept in (layer.keys, layer.values) if kept is not None]


def nothing_seen(producer: ModelProducer) -> DynamicCache:
    return producer.restore(GetResult(0))


def test_pieces_and_branches_make_the_chunks_of_one_prefill(producer: ModelProducer) -> None:
    """The branches go on by turns."""
    one, stem = go_on(producer, nothing_seen(producer), STEM, [48, 64, 160])
    two = producer.fork(one)
    one, first = go_on(producer, one, ONE, [176])
    two, other = go_on(producer, two, TWO, [224])
    one, second = go_on(producer, one, ONE, [192, 256])
    two, last = go_on(producer, two, TWO, [256])
    assert_near({**stem, **first, **second}, whole(producer, ONE), start=0, end=256)
    assert_near({**stem, **other, **last}, whole(producer, TWO), start=0, end=256)


@pytest.mark.parametrize("length", [0, 16, 160])
def test_neither_side_of_a_fork_disturbs_the_other(producer: ModelProducer, length: int) -> None:
    """Bit for bit, whichever goes on first, of a state that was computed and of one that was restored."""
    computed, chunks = nothing_seen(producer), {}
    if length:
        computed, chunks = go_on(producer, computed, STEM, [length])
    restored = producer.restore(GetResult(length, chunks={where: page.data for where, page in chunks.items()}))
    for state in (computed, restored):
        _, alone = go_on(producer, producer.fork(state), ONE, [256])
        for fork_first in (True, False):
            original = producer.fork(state)
            twin = producer.fork(original)
            assert [type(layer) for layer in twin.layers] == [type(layer) for layer in original.layers]
            first, second = (twin, original) if fork_first else (original, twin)
            before = [kept.clone() for kept in states_of(second)]
            go_on(producer, first, TWO, [192, 256])
            assert len(states_of(second)) == len(before)
            assert all(map(torch.equal, states_of(second), before))
            _, after = go_on(producer, second, ONE, [256])
            assert after.keys() == alone.keys()
            assert all(np.array_equal(after[where], alone[where]) for where in alone)


def test_a_fork_is_a_copy_to_the_last_tensor(producer: ModelProducer) -> None:
    state, _ = go_on(producer, nothing_seen(producer), STEM, [160])
    twin = producer.fork(state)
    before = [kept.clone() for kept in states_of(twin)]
    for kept in states_of(state):
        kept.zero_()
    assert before
    assert all(map(torch.equal, states_of(twin), before))


@pytest.mark.parametrize("interval", [None, 0])
async def test_from_a_store_it_goes_on_as_if_never_stopped(producer: ModelProducer, interval: int | None) -> None:
    layout = producer.layout
    client = SparseStoreClient(
        MemoryStore(), layout, model_name="m", dtype=producer.kv.dtype, retention_interval=interval
    )
    sequence = client.sequence(STEM)
    plan = client.plan_put(sequence, num_prompt_tokens=160)
    wanted = [mask & ~known for mask, known in zip(plan.store_masks, plan.known, strict=True)]
    state, source = await asyncio.to_thread(
        producer.prefill, nothing_seen(producer), np.array(STEM, dtype=np.int64), wanted
    )
    put = await client.put(sequence, source, num_prompt_tokens=160)
    assert put.written.chunks == sum(int(mask.sum()) for mask in plan.store_masks)
    assert not put.unavailable.chunks
    hit = await client.lookup(client.sequence(TWO))
    assert hit.hit_length == 160
    restored = producer.restore(await client.get(hit))
    _, found = await asyncio.to_thread(go_on, producer, restored, TWO, [192, 256])
    _, unbroken = await asyncio.to_thread(go_on, producer, state, TWO, [192, 256])
    assert_near(found, unbroken, start=160, end=256)
    assert_near(found, await asyncio.to_thread(whole, producer, TWO), start=160, end=256)


def test_another_prefix_makes_other_chunks(producer: ModelProducer) -> None:
    """The comparisons above would notice."""
    true = whole(producer, ONE)
    wrong, _ = go_on(producer, nothing_seen(producer), [*STEM[:150], *TWO[160:170]], [160])
    _, found = go_on(producer, wrong, ONE, [256])
    with pytest.raises(AssertionError):
        assert_near(found, true, start=160, end=256)


def test_what_cannot_be_wanted_or_restored_is_refused(producer: ModelProducer) -> None:
    groups = len(producer.layout.groups)
    ahead = [np.arange(12) == 11] * groups
    with pytest.raises(InvalidRequestError, match=r"chunk 11 of group 0 is wanted, .* seen 160 tokens now"):
        producer.prefill(nothing_seen(producer), np.array(STEM), ahead)
    with pytest.raises(InvalidRequestError, match=f"masks of {groups + 1} groups"):
        producer.prefill(nothing_seen(producer), np.array(STEM), [*ahead, ahead[0]])
    with pytest.raises(InvalidRequestError, match="nothing is left to compute"):
        producer.prefill(nothing_seen(producer), np.array([], dtype=np.int64), ahead)
    with pytest.raises(InvalidBufferError, match="of group 0 is missing"):
        producer.restore(GetResult(160))


# Made and loaded ----------------------------------------------------------------------------------------------


def test_options_are_the_models_own_unless_given() -> None:
    model = build("llama")
    assert ModelProducer(model).kv.dtype == "float32"
    # The config does not know of it.
    assert ModelProducer(model.to(torch.bfloat16)).kv.dtype == "bfloat16"
    wide = ModelProducer(model, 64, dtype="float32", hash_block_size=32)
    assert (wide.layout.alignment, wide.layout.hash_block_size, wide.kv.dtype) == (64, 32, "float32")
    with pytest.raises(InvalidRequestError, match="step_tokens"):
        ModelProducer(model, step_tokens=0)
    with pytest.raises(InvalidLayoutError, match="block_size"):
        ModelProducer(model, 0)
    trained = ModelProducer(build("llama").train())
    with pytest.raises(InvalidRequestError, match="training mode"):
        trained.prefill(nothing_seen(trained), np.array(STEM), [np.zeros(0, bool)])


def test_no_forward_has_more_than_a_step() -> None:
    model = build("llama")
    lengths: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, given, made: lengths.append(given[0].shape[-1]))
    producer = ModelProducer(model, BLOCK, step_tokens=100)
    go_on(producer, nothing_seen(producer), ONE, [160, 256])
    assert lengths == [100, 60, 96]


def test_caches_are_restored_where_they_are_wanted() -> None:
    producer = ModelProducer(build("llama"), BLOCK)
    _, chunks = go_on(producer, nothing_seen(producer), STEM, [32])
    got = GetResult(32, chunks={where: page.data for where, page in chunks.items()})
    elsewhere = ModelProducer(build("llama"), BLOCK, device="meta")
    assert {kept.device.type for kept in states_of(producer.restore(got))} == {"cpu"}
    assert {kept.device.type for kept in states_of(elsewhere.restore(got))} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_a_folder_computes_what_it_did_before(tmp_path: Path, dtype: torch.dtype) -> None:
    model = build("gemma-3", dtype)
    model.save_pretrained(tmp_path)
    loaded = ModelProducer.from_pretrained(str(tmp_path), BLOCK, step_tokens=64)
    assert loaded.kv.dtype == str(dtype).removeprefix("torch.")
    own = ModelProducer(model, BLOCK, step_tokens=64)
    assert loaded.layout == own.layout
    _, found = go_on(loaded, nothing_seen(loaded), STEM, [160])
    _, true = go_on(own, nothing_seen(own), STEM, [160])
    assert all(np.array_equal(found[where], true[where]) for where in true)
    half = ModelProducer.from_pretrained(str(tmp_path), dtype="float16", device="cpu")
    assert half.kv.dtype == "float16"
    go_on(half, nothing_seen(half), STEM, [160])  # what is captured has the type that the layout says


@pytest.mark.parametrize("load", [ModelProducer.from_pretrained, tokenizer_of])
def test_what_cannot_be_loaded_is_said_in_the_librarys_words(load: object, tmp_path: Path) -> None:
    what = "tokenizer" if load is tokenizer_of else "model"
    with pytest.raises(ConfigError, match=rf"no {what} can be loaded from '{tmp_path}/absent', be it .*Error: \w+"):
        load(f"{tmp_path}/absent")
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(ConfigError, match=f"no {what} can be loaded from '{tmp_path}'"):
        load(str(tmp_path))


def test_a_tokenizer_adds_what_it_adds_by_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not warn of a prompt that is longer than the model is said to take."""
    library = logging.getLogger("transformers")
    monkeypatch.setattr(library, "propagate", True)
    monkeypatch.setattr(library, "level", logging.WARNING)
    words = Tokenizer(WordLevel({"<s>": 0, UNKNOWN: 1, "red": 2, "fish": 3}, unk_token=UNKNOWN))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token=UNKNOWN, model_max_length=4)
    fast.save_pretrained(tmp_path)
    tokens = tokenizer_of(str(tmp_path))
    assert tokens("red fish blue fish") == [0, 2, 3, 1, 3]
    assert tokens("") == [0]
    assert not caplog.records


def factory(layout: KVCacheLayout | None) -> ModelProducer:
    return ModelProducer(build("mistral"), layout.groups[0].block_size if layout else BLOCK)


def test_a_factory_of_a_model_can_be_named() -> None:
    assert load_producer(f"{__name__}:factory", None).layout.alignment == BLOCK
    given = ModelProducer(build("mistral"), 32).layout
    assert load_producer(f"{__name__}:factory", given).layout == given
    with pytest.raises(ConfigError, match="made a producer of another one"):
        load_producer(f"{__name__}:factory", ModelProducer(build("llama"), 32).layout)
