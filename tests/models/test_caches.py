"""Out of a cache and back into one: what is handed out is whole and right, and attention sees what it always saw."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import BLOCK, KINDS, assert_as_without_cache, build, go_on, tokens_of
from transformers import AutoModelForCausalLM, DynamicCache, OpenAIGPTConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from mooncake_sparse_client import GetResult, MemoryStore, SparseStoreClient
from mooncake_sparse_client.core.masks import needed_chunks
from mooncake_sparse_client.errors import InvalidBufferError, InvalidRequestError, InvalidTokensError
from mooncake_sparse_client.integrations.transformers import ModelKV, cache_argument
from mooncake_sparse_client.integrations.window_layer import WindowLayer

pytestmark = pytest.mark.models
TOKENS = tokens_of(1, 300)
#: Lengths of forwards, one after another: prefills, decoding, and both by turns.
STEPS = st.lists(st.integers(1, 40) | st.just(1), min_size=1, max_size=25)


def states(start: int, count: int) -> torch.Tensor:
    """What stands for keys: each token's number, so that it shows which tokens are where."""
    return torch.arange(start, start + count, dtype=torch.float32).view(1, 1, count, 1)


@given(st.integers(2, 40), st.integers(0, 20), STEPS)
def test_attention_is_shown_what_the_librarys_own_layer_shows(window: int, more: int, steps: Sequence[int]) -> None:
    ours, theirs = WindowLayer(window, window - 1 + more), DynamicSlidingWindowLayer(sliding_window=window)
    seen = 0
    for step in steps:
        assert ours.get_mask_sizes(step) == theirs.get_mask_sizes(step)
        new = states(seen, step)
        seen += step
        for mine, other in zip(ours.update(new, -new), theirs.update(new, -new), strict=True):
            assert torch.equal(mine, other)
        assert ours.get_seq_length() == theirs.get_seq_length() == seen
        held = ours.keys.flatten().tolist()
        assert held == list(range(ours.first_held, seen))
        assert ours.first_held <= max(0, seen - step - (window - 1 + more))


@given(st.integers(2, 40), st.integers(0, 60), st.integers(0, 60), STEPS)
def test_a_layer_filled_goes_on_as_if_it_had_seen_the_prefix(
    window: int, length: int, held: int, steps: Sequence[int]
) -> None:
    """``held``: chunked attention may need fewer tokens than its window is wide; the others count as masked."""
    held = min(held, length)
    ours, theirs = WindowLayer(window, 64), DynamicSlidingWindowLayer(sliding_window=window)
    ours.fill(states(length - held, held), states(length - held, held), length)
    if length:
        theirs.update(states(0, length), states(0, length))
    assert ours.first_held == length - held
    seen = length
    for step in steps:
        assert ours.get_mask_sizes(step) == theirs.get_mask_sizes(step)
        mine, _ = ours.update(states(seen, step), states(seen, step))
        other, _ = theirs.update(states(seen, step), states(seen, step))
        seen += step
        assert mine.shape == other.shape
        real = other >= length - held
        assert torch.equal(mine[real], other[real])
        assert not mine[~real].any()
        assert ours.first_held >= length - held


def test_tokens_are_taken_back_as_far_as_the_window_stays_full() -> None:
    layer = WindowLayer(9, 20)
    layer.update(states(0, 50), states(0, 50))
    layer.crop(-30)
    assert layer.keys.flatten().tolist() == list(range(20))
    assert layer.get_seq_length() == 20
    layer.crop(0)
    layer.update(states(20, 1), states(20, 1))
    layer.crop(-1)
    layer.update(states(20, 30), states(20, 30))
    layer.update(states(50, 1), states(50, 1))
    with pytest.raises(ValueError, match="cannot go back by 14 tokens"):
        layer.crop(-14)
    with pytest.raises(ValueError, match="cannot go back"):
        layer.crop(3)
    layer.crop(-13)
    assert layer.keys.flatten().tolist() == list(range(30, 38))
    layer.reset()
    assert layer.get_seq_length() == 0
    shown, _ = layer.update(states(0, 3), states(0, 3))
    assert shown.flatten().tolist() == [0, 1, 2]
    layer.activate_past_recording()
    for token in range(3, 60):
        layer.update(states(token, 1), states(token, 1))
    assert layer.first_held == 0
    layer.crop(-5)
    assert (layer.first_held, layer.get_seq_length()) == (35, 55)  # what was kept for going back is dropped
    empty = WindowLayer(9, 20)
    empty.crop(0)
    with pytest.raises(ValueError, match="cannot go back by 3 tokens"):
        empty.crop(-3)


def test_a_layer_that_starts_anew_holds_what_it_is_given() -> None:
    layer = WindowLayer(9, 20)
    layer.fill(states(96, 2), states(96, 2), 98)
    assert layer.first_held == 96
    layer.reset()
    layer.update(states(0, 30), states(0, 30))
    assert layer.first_held == 0


class Truth:
    """Every chunk of a prompt, out of a cache that has all of it."""

    def __init__(self, kind: str) -> None:
        self.model: PreTrainedModel = build(kind)
        self.kv = ModelKV(self.model.config, BLOCK)
        self.layout = self.kv.layout
        self.masks = [np.ones(len(TOKENS) // BLOCK, dtype=bool) for _ in self.layout.groups]
        capture = self.kv.capture(self.masks)
        assert self.kv.prefill(self.model, TOKENS, self.kv.new_cache(), capture).shape == (256,)
        assert not any(mask.any() for mask in capture.missing)
        self.chunks = {
            (group, chunk): capture(group, chunk)
            for group, mask in enumerate(self.masks)
            for chunk in np.flatnonzero(mask).tolist()
        }
        assert capture.nbytes == sum(page.nbytes for page in self.chunks.values())

    def got(self, length: int) -> GetResult:
        wanted = {
            (group, chunk): self.chunks[group, chunk].data
            for group, spec in enumerate(self.layout.groups)
            for chunk in needed_chunks(spec, length)
        }
        return GetResult(length, chunks=wanted)


@pytest.fixture(scope="module", params=KINDS)
def truth(request: pytest.FixtureRequest) -> Truth:
    return Truth(request.param)


def assert_right(truth: Truth, capture: object) -> int:
    """Every chunk that a capture hands out is the true one; how many these are."""
    handed = {where: page for where in truth.chunks if (page := capture(*where)) is not None}
    for where, page in handed.items():
        got, true = page.view(np.float32), truth.chunks[where].view(np.float32)
        np.testing.assert_allclose(got, true, rtol=0, atol=1e-4)  # numbers around 1, rounded differently
    for group, mask in enumerate(capture.missing):
        assert set(np.flatnonzero(~mask).tolist()) == {chunk for at, chunk in handed if at == group}
    return len(handed)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_steps_what_is_taken_is_whole_and_right(truth: Truth, seed: int) -> None:
    """From any restored prefix on, in any steps, captured now and then, with the library's cache or ours."""
    dice = np.random.default_rng(seed)
    ours, often = seed % 3 > 0, seed % 2 > 0
    start = int(dice.integers(0, 11)) * BLOCK if ours else 0
    cache = truth.kv.restore(truth.got(start)) if ours else DynamicCache(config=truth.model.config)
    capture = truth.kv.capture(truth.masks)
    capture.take(cache)
    seen = start
    while seen < len(TOKENS):
        step = min(int(dice.choice([1, 5, 40, 120])), len(TOKENS) - seen)
        truth.kv.prefill(truth.model, TOKENS[: seen + step], cache, step_tokens=step)
        seen += step
        if often or seen == len(TOKENS):
            capture.take(cache)
    assert_right(truth, capture)
    for group, spec in enumerate(truth.layout.groups):
        taken = {chunk for chunk in range(18) if capture(group, chunk) is not None}
        if not spec.window:
            assert taken == set(range(18))
        elif ours:
            restored = needed_chunks(spec, start)
            computed = range(start // BLOCK, 18) if often else needed_chunks(spec, 288)
            assert taken >= set(restored) | {chunk for chunk in computed if chunk * BLOCK >= start}


def test_after_decoding_the_tails_of_the_last_two_boundaries_are_whole(truth: Truth) -> None:
    for length in (255, 256, 257, 263, 271, 272, 288, 299):
        cache = truth.kv.new_cache()
        truth.kv.prefill(truth.model, TOKENS[:200], cache)
        truth.kv.prefill(truth.model, TOKENS[:length], cache, step_tokens=1 if length % 7 == 0 else 3)
        capture = truth.kv.capture(truth.masks)
        capture.take(cache)
        for group, spec in enumerate(truth.layout.groups):
            for boundary in (length // BLOCK * BLOCK, (length - 1) // BLOCK * BLOCK):
                assert all(capture(group, chunk) is not None for chunk in needed_chunks(spec, boundary))


def test_a_window_that_the_librarys_cache_holds_in_part_is_not_handed_out() -> None:
    truth = Truth("gemma-3")  # a window of 33: the next token sees 32 before it, two whole blocks
    cache = DynamicCache(config=truth.model.config)
    truth.kv.prefill(truth.model, TOKENS[:288], cache)
    capture = truth.kv.capture(truth.masks)
    assert capture.take(cache) == 18 + 2
    assert [capture(1, chunk) is None for chunk in (15, 16, 17)] == [True, False, False]
    truth.kv.prefill(truth.model, TOKENS[:289], cache)
    later = truth.kv.capture(truth.masks)
    assert later.take(cache) == 18 + 1  # the first token of chunk 16 is gone
    assert later.take(cache) == 0
    assert_right(truth, later)


def test_padding_in_front_of_a_restored_run_is_never_handed_out() -> None:
    truth = Truth("llama-4")  # runs of 64: at 80 tokens only the last block of the run's is restored
    cache = truth.kv.restore(truth.got(80))
    assert [layer.keys.shape[-2] for layer in cache.layers] == [63, 63, 63, 80]
    capture = truth.kv.capture(truth.masks)
    capture.take(cache)
    assert [chunk for chunk in range(18) if capture(1, chunk) is not None] == [4]
    assert_right(truth, capture)


@pytest.mark.parametrize("length", [0, 16, 32, 64, 208, 288])
def test_generate_goes_on_from_a_restored_cache(truth: Truth, length: int) -> None:
    """Greedily and with beams, and with candidates of which some are taken back where the cache starts empty."""
    model, ids = truth.model, torch.tensor([TOKENS])
    ways: list[dict[str, int]] = [{}, {"num_beams": 3}]
    # The library itself goes wrong with assisted decoding on any cache that has tokens in it.
    for options in [*ways, {"prompt_lookup_num_tokens": 4}] if not length else ways:
        cache = truth.kv.restore(truth.got(length))
        if length and "num_beams" in options:
            cache.batch_repeat_interleave(options["num_beams"])
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False, **options}
        assert torch.equal(model.generate(ids, **asked), model.generate(ids, **{cache_argument(model): cache}, **asked))


def test_a_restored_cache_is_a_copy_and_its_own_chunks_come_out_again(truth: Truth) -> None:
    got = truth.got(208)
    cache = truth.kv.restore(got)
    capture = truth.kv.capture(truth.masks)
    capture.take(cache)
    for where, page in got.chunks.items():
        assert np.array_equal(capture(*where), np.frombuffer(page, np.uint8))
    keys = [layer.keys for layer in cache.layers if layer.keys is not None]
    before = [kept.clone() for kept in keys]
    truth.chunks[0, 12][:] ^= 1
    assert all(map(torch.equal, keys, before))
    truth.chunks[0, 12][:] ^= 1
    said = go_on(truth.model, cache, TOKENS, 4)
    assert_as_without_cache(truth.model, TOKENS, said)


def test_a_cache_that_is_not_of_the_layout_is_refused() -> None:
    truth = Truth("gemma-3")
    others = {
        r"is DynamicSlidingWindowLayer, but the layout says sliding_window 33": DynamicCache(
            config=replace_window(KINDS["gemma-3"](), 20)
        ),
        r"layer 1 of the cache is NoneType": DynamicCache(),
        r"layer 1 of the cache is StaticLayer": StaticCache(config=truth.model.config, max_cache_len=64),
    }
    for words, cache in others.items():
        with pytest.raises(InvalidBufferError, match=words):
            truth.kv.capture(truth.masks).take(cache)
    two = truth.kv.new_cache()
    with torch.no_grad():
        truth.model(torch.tensor([TOKENS[:20]] * 2), **{cache_argument(truth.model): two})
    with pytest.raises(InvalidBufferError, match=r"shape \(2, 2, 20, 16\)"):
        truth.kv.capture(truth.masks).take(two)
    half = ModelKV(truth.model.config, BLOCK, dtype="bfloat16")
    cache = half.new_cache()
    with pytest.raises(InvalidBufferError, match=r"holds torch.float32 .* but the layout says torch.bfloat16"):
        half.prefill(truth.model, TOKENS, cache, half.capture(truth.masks))
    cache = truth.kv.new_cache()
    cache.layers[0].update(torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 16))
    with pytest.raises(InvalidBufferError, match=r"have seen \[5, 0\] tokens"):
        truth.kv.capture(truth.masks).take(cache)


def replace_window(config: object, window: int) -> object:
    config.sliding_window = window
    return config


async def test_what_cannot_be_restored_or_computed_is_refused() -> None:
    truth = Truth.__new__(Truth)
    truth.kv = ModelKV(KINDS["llama"](), BLOCK)
    client = SparseStoreClient(MemoryStore(), truth.kv.layout, model_name="m", dtype=truth.kv.dtype)
    sequence = client.sequence(TOKENS)
    page = bytes(truth.kv.layout.page_sizes[0])
    await client.put(sequence, lambda group, chunk: page)
    got = await client.get(await client.lookup(sequence, local_tokens=32))
    with pytest.raises(InvalidBufferError, match=r"chunk 0 of group 0 is missing.*without local_tokens"):
        truth.kv.restore(got)
    with pytest.raises(InvalidBufferError, match="chunk 0 of group 0 has 3 bytes"):
        truth.kv.restore(GetResult(16, chunks={(0, 0): memoryview(b"abc")}))
    with pytest.raises(InvalidRequestError, match="a hit of 17 tokens"):
        truth.kv.restore(replace(got, hit_length=17))
    with pytest.raises(InvalidRequestError, match="masks of 2 groups, and the model has 1"):
        truth.kv.capture([np.ones(3, bool)] * 2)


def test_a_prefill_of_nothing_is_refused() -> None:
    model = build("llama")
    kv = ModelKV(model.config, BLOCK)
    cache = kv.new_cache()
    kv.prefill(model, TOKENS[:20], cache)
    with pytest.raises(InvalidRequestError, match="nothing is left to compute"):
        kv.prefill(model, TOKENS[:20], cache)
    with pytest.raises(InvalidRequestError, match="step_tokens"):
        kv.prefill(model, TOKENS, cache, step_tokens=0)


async def test_a_put_takes_what_was_captured_while_the_cache_grows_on() -> None:
    """What a hit saw is not captured again, and a chunk that was never whole is unavailable, not wrong."""
    model = await asyncio.to_thread(build, "gemma-3")
    kv = ModelKV(model.config, BLOCK)
    client = SparseStoreClient(MemoryStore(), kv.layout, model_name="m", dtype=kv.dtype, retention_interval=None)
    first = client.sequence(TOKENS[:160])
    capture = kv.capture(client.plan_put(first))
    cache = DynamicCache(config=model.config)  # holds no window's tail but the last
    await asyncio.to_thread(kv.prefill, model, TOKENS[:160], cache, capture)
    put = await client.put(first, capture)
    assert put.failed.chunks == 0
    assert put.unavailable.chunks == 8
    sequence = client.sequence(TOKENS)
    hit = await client.lookup(sequence)
    assert hit.hit_length == 160
    restored = kv.restore(await client.get(hit))
    rest = kv.capture(client.plan_put(sequence, hit=hit))
    assert int(rest.missing[0].sum()) == 8
    await asyncio.to_thread(kv.prefill, model, TOKENS, restored, rest)
    putting = asyncio.create_task(client.put(sequence, rest, hit=hit))
    await asyncio.to_thread(go_on, model, restored, [*TOKENS, 1], 8)
    put = await putting
    assert put.written.chunks == 16
    assert (await client.lookup(sequence)).hit_length == 288


def test_a_cache_that_was_computed_with_gradients_is_captured_alike() -> None:
    truth = Truth("gemma-3")
    cache = truth.kv.new_cache()
    truth.model(torch.tensor([TOKENS]), **{cache_argument(truth.model): cache})
    assert cache.layers[0].keys.requires_grad
    capture = truth.kv.capture(truth.masks)
    capture.take(cache)
    assert not any(mask.any() for mask in capture.missing)
    assert_right(truth, capture)


def test_a_cache_that_has_gone_back_wants_a_new_capture() -> None:
    truth = Truth("gemma-3")
    cache = truth.kv.new_cache()
    capture = truth.kv.capture(truth.masks)
    truth.kv.prefill(truth.model, TOKENS[:100], cache, capture)
    cache.crop(-8)
    with pytest.raises(InvalidBufferError, match="has seen 92 tokens, and had seen 100"):
        capture.take(cache)
    again = truth.kv.capture(truth.masks)
    truth.kv.prefill(truth.model, TOKENS, cache, again)
    assert_right(truth, again)


def test_window_layers_hold_a_step_and_a_tail_and_no_more(truth: Truth) -> None:
    cache = truth.kv.new_cache()
    truth.kv.prefill(truth.model, TOKENS[:250], cache, step_tokens=30)
    truth.kv.prefill(truth.model, TOKENS, cache, step_tokens=1)
    for group in truth.layout.groups:
        if group.window:
            held = [layer.keys.shape[-2] for layer in cache.layers if isinstance(layer, WindowLayer)]
            assert set(held) == {-(-(group.window - 1) // BLOCK) * BLOCK + BLOCK + 1}
    assert not cache.layers[0].keys.requires_grad


def test_what_is_missing_is_told_by_copies() -> None:
    capture = ModelKV(KINDS["llama"](), BLOCK).capture([np.ones(3, bool)])
    capture.missing[0][:] = False
    assert capture.missing[0].all()


def test_a_model_that_would_compute_something_else_is_refused() -> None:
    model = build("llama")
    kv = ModelKV(model.config, BLOCK)
    with pytest.raises(InvalidRequestError, match=r"call model.eval\(\)"):
        kv.prefill(model.train(), TOKENS, kv.new_cache())
    for ids in ("abc", [1.5], [[1, 2]], [None]):
        with pytest.raises(InvalidTokensError, match="whole numbers"):
            kv.prefill(model.eval(), ids, kv.new_cache())
    forgetful = AutoModelForCausalLM.from_config(OpenAIGPTConfig(n_embd=16, n_layer=1, n_head=2, vocab_size=256)).eval()
    kv = ModelKV(forgetful.config, BLOCK)
    with pytest.raises(InvalidRequestError, match=r"OpenAIGPTLMHeadModel was given 20 tokens .* has seen 0 now"):
        kv.prefill(forgetful, TOKENS[:20], kv.new_cache())
