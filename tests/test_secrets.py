"""What names a prefix besides its tokens may be a secret: it is in no key, text, log or error."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from mooncake_sparse_client import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheLayout,
    MemoryStore,
    SlidingWindowSpec,
    SparseStoreClient,
)
from mooncake_sparse_client.errors import SparseStoreError, StoreRejectedError

SECRET = "topsecret"  # noqa: S105 - of the tests alone
LAYOUT = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=64), SlidingWindowSpec(16, 32, page_size_bytes=32)])
TRAITS: dict[str, Any] = {
    "cache_salt": f"{SECRET}-salt",
    "lora": (f"{SECRET}-name", f"/{SECRET}/path"),
    "multimodal": [(f"{SECRET}-image", 3, 40)],
}


class FailingStore(MemoryStore):
    """Fails every call from when it is told to."""

    fails = False

    async def exists(self, keys: Any) -> list[bool]:
        if self.fails:
            raise StoreRejectedError(f"refused: {keys!r}")
        return await super().exists(keys)


def client_of(store: MemoryStore) -> SparseStoreClient:
    hasher = BlockHasher(LAYOUT.hash_block_size, seed=f"{SECRET}-seed")
    return SparseStoreClient(store, LAYOUT, model_name="model", hasher=hasher)


def shown(error: BaseException) -> str:
    """All that a log or a report can show of an error, its causes included."""
    chain, text = [error], "".join(traceback.format_exception(error))
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return text + "".join(f"{each} {each!r} {each.args} {vars(each)}" for each in chain)


async def test_it_is_in_nothing_that_a_client_shows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = FailingStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(200), **TRAITS)
        source: Callable[[int, int], bytes] = lambda group, chunk: bytes(LAYOUT.page_sizes[group])  # noqa: E731
        plan = client.plan_put(sequence)
        put = await client.put(sequence, source)
        hit = await client.lookup(sequence)
        got = await client.get(hit)
        assert hit.hit_length == got.hit_length > 0
        keys = store.keys()
        for key in keys:
            store._values[key] = store._values[key][:-1] + b"!"
        damaged = await client.get(sequence)
        assert damaged.failures
        texts = [*keys, repr(client.keys), client.fingerprint]
        things = (
            sequence,
            sequence._traits,
            hit,
            plan,
            put,
            got,
            damaged,
            hit.explain(),
            plan.explain(),
            client.hasher,
        )
        for thing in things:
            texts += [str(thing), repr(thing)]
        texts += [repr(hit.explain().as_json()), repr(pickle.dumps(hit)), repr(list(store._values.values()))]
        store.fails = True
        with pytest.raises(StoreRejectedError) as caught:
            await client.lookup(client.sequence(range(300), **TRAITS))
        texts.append(shown(caught.value))
        other = SparseStoreClient(store, LAYOUT, model_name="model")
        with pytest.raises(SparseStoreError) as caught_other:
            other.plan_put(sequence)
        texts.append(shown(caught_other.value))
    assert keys
    assert SECRET not in "".join(texts)
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "traits",
    [
        {"cache_salt": SECRET.encode()},
        {"cache_salt": [SECRET]},
        {"cache_salt": f"{SECRET}\ud800"},
        {"lora": SECRET},
        {"lora": (SECRET,)},
        {"lora": (SECRET, SECRET.encode())},
        {"lora": ("name", f"{SECRET}\udfff")},
        {"multimodal": SECRET},
        {"multimodal": [SECRET]},
        {"multimodal": [(SECRET, 1)]},
        {"multimodal": [(1, SECRET, 2)]},
        {"multimodal": [("id", SECRET, 2)]},
        {"multimodal": [("id", 1, SECRET.encode())]},
        {"multimodal": [(SECRET.encode(), 0, 1)]},
        {"multimodal": [(SECRET, 0, 0)]},
    ],
    ids=str,
)
async def test_an_error_about_it_does_not_show_it(traits: dict[str, Any]) -> None:
    async with client_of(MemoryStore()) as client:
        with pytest.raises(SparseStoreError) as caught:
            client.sequence(range(64), **traits)
    assert SECRET not in shown(caught.value).replace(str(traits), "")


@pytest.mark.parametrize("seed", [SECRET.encode(), [SECRET], f"{SECRET}\ud800"], ids=["bytes", "list", "surrogate"])
def test_an_error_about_a_seed_does_not_show_it(seed: Any) -> None:
    with pytest.raises(SparseStoreError) as caught:
        BlockHasher(16, seed=seed)
    assert SECRET not in shown(caught.value)


@pytest.mark.parametrize("extra", [[SECRET], [(SECRET,)], [((SECRET, 1.5),)], [((f"{SECRET}\ud800",),)]], ids=str)
def test_an_error_about_extra_keys_does_not_show_them(extra: Any) -> None:
    with pytest.raises(SparseStoreError) as caught:
        BlockHasher(16).hash_blocks(range(16), extra_keys=extra)
    assert SECRET not in shown(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda client: client.sequence(f"{SECRET} prompt"),
        lambda client: client.sequence([f"{SECRET} prompt"]),
        lambda client: client.sequence([1, f"{SECRET} prompt"]),
        lambda client: client.sequence(range(9)).extend(f"{SECRET} prompt"),
        lambda client: client.plan_put(f"{SECRET} prompt"),
        lambda client: client.hasher.hash_blocks(range(99), parent=f"{SECRET} prompt"),
    ],
)
async def test_a_prompt_in_a_wrong_place_is_not_shown(wrong: Callable[[Any], object]) -> None:
    async with client_of(MemoryStore()) as client:
        with pytest.raises(SparseStoreError) as caught:
            wrong(client)
        assert SECRET not in shown(caught.value).partition("Error: ")[2]


async def test_a_prompt_instead_of_a_sequence_is_not_shown() -> None:
    async with client_of(MemoryStore()) as client:
        for call in (client.lookup, client.get, client.exists, client.remove):
            with pytest.raises(SparseStoreError) as caught:
                await call(f"{SECRET} prompt")  # type: ignore[operator]
            assert SECRET not in str(caught.value)
