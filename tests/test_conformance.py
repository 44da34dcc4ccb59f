"""Every case of tests/conformance: right answers that other implementations of the same rules share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_sparse_client.core.hashing import BlockHasher
from mooncake_sparse_client.core.keys import KeySchema, chunk_hash_position, chunk_name
from mooncake_sparse_client.core.layout import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    KVCacheLayout,
    MambaSpec,
    SlidingWindowSpec,
)
from mooncake_sparse_client.core.masks import load_mask, store_mask
from mooncake_sparse_client.core.prefix import longest_usable_prefix

Case = dict[str, Any]
FOLDER = Path(__file__).parent / "conformance"


def cases(name: str, count: int) -> Any:
    found = json.loads((FOLDER / f"{name}.json").read_text())["cases"]
    assert len(found) == count
    return pytest.mark.parametrize("case", found, ids=[f"{name}-{number}" for number in range(count)])


def spec(group: Case) -> GroupSpec:
    kinds = {
        "full": FullAttentionSpec,
        "sliding": SlidingWindowSpec,
        "chunked": ChunkedLocalAttentionSpec,
        "mamba": MambaSpec,
    }
    return kinds[group["kind"]](**{key: value for key, value in group.items() if key != "kind"})


def layout_of(case: Case) -> KVCacheLayout:
    return KVCacheLayout(
        [spec(group) for group in case["groups"]],
        hash_block_size=case["hash_block_size"],
        use_eagle=case.get("use_eagle", False),
    )


def indices(masks: tuple[np.ndarray, ...]) -> list[list[int]]:
    return [np.flatnonzero(mask).tolist() for mask in masks]


def presence(layout: KVCacheLayout, num_tokens: int, chunks: list[list[int]]) -> list[np.ndarray]:
    arrays = []
    for group, present in zip(layout.groups, chunks, strict=True):
        array = np.zeros(num_tokens // group.block_size + 2, dtype=bool)
        array[present] = True
        arrays.append(array)
    return arrays


@cases("store_masks", 311)
def test_store_mask(case: Case) -> None:
    masks = store_mask(
        layout_of(case),
        case["num_tokens"],
        start_token=case["start_token"],
        retention_interval=case["retention_interval"],
        num_prompt_tokens=case["num_prompt_tokens"],
    )
    assert indices(masks) == case["store_chunks"]


@cases("store_masks_boundaries", 80)
def test_store_mask_with_boundaries(case: Case) -> None:
    masks = store_mask(
        layout_of(case),
        case["num_tokens"],
        retention_interval=case["retention_interval"],
        num_prompt_tokens=case["num_prompt_tokens"],
        boundaries=case["boundaries"],
    )
    assert indices(masks) == case["store_chunks"]


@cases("lookups", 300)
def test_lookup(case: Case) -> None:
    layout = layout_of(case)
    present = presence(layout, case["num_tokens"], case["present_chunks"])
    hit = longest_usable_prefix(layout, case["num_tokens"], present)
    assert hit == case["hit_tokens"]
    assert indices(load_mask(layout, hit)) == case["load_chunks"]


@cases("lookups_local", 120)
def test_lookup_with_local_tokens(case: Case) -> None:
    layout, local = layout_of(case), case["local_tokens"]
    present = presence(layout, case["num_tokens"], case["present_chunks"])
    hit = longest_usable_prefix(layout, case["num_tokens"], present, local_tokens=local)
    assert hit == case["hit_tokens"]
    assert indices(load_mask(layout, hit, local_tokens=local)) == case["load_chunks"]


def extra_of(extra: list[Any] | None) -> tuple[Any, ...] | None:
    if extra is None:
        return None
    return tuple(
        tuple(bytes.fromhex(part["bytes_hex"]) if isinstance(part, dict) else part for part in key) for key in extra
    )


def check_chain(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    hasher = BlockHasher(case["block_size"], case["algorithm"], case["seed"])
    assert hasher.none_hash.hex() == case["none_hash"]
    hashes = hasher.hash_blocks(case["token_ids"], extra_keys=[extra_of(extra) for extra in case["extra_keys"]])
    assert [digest.hex() for digest in hashes] == case["block_hashes"]


@cases("block_hashes", 100)
def test_block_hashes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_chain(case, monkeypatch)


@cases("block_hashes_packed", 60)
def test_packed_block_hashes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_chain(case, monkeypatch)


@cases("chunk_names", 60)
def test_chunk_name(case: Case) -> None:
    groups = [FullAttentionSpec(size) for size in case["block_sizes"]]
    layout = KVCacheLayout(groups, hash_block_size=case["hash_block_size"])
    position = chunk_hash_position(layout, case["group"], case["chunk"])
    assert position == (case["hash_index"], case["distance"])
    hashes = [bytes([number]) for number in range(256)]
    expected = f"{case['hash_index'] % 256:02x}" + (f".{case['distance']}" if case["distance"] else "")
    if case["hash_index"] < 256:
        assert chunk_name(layout, hashes, case["group"], case["chunk"]) == expected
    assert chunk_name(layout, hashes[: case["hash_index"]], case["group"], case["chunk"]) is None


@cases("keys", 40)
def test_key(case: Case) -> None:
    ranks = {name: case[name] for name in ("tp_rank", "pcp_rank", "dcp_rank", "pp_rank")}
    schema = KeySchema(case["model_name"], cache_prefix=case["cache_prefix"], **ranks)
    assert schema.key(case["group_id"], case["chunk_hash"]) == case["key"]
