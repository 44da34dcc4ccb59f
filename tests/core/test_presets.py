"""Layouts by name."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_sparse_client import PRESETS, KVCacheLayout, layout_for, store_mask
from mooncake_sparse_client.errors import InvalidLayoutError

#: Kind, block size and window of each group, from the models' public configurations.
STRUCTURE: dict[str, list[tuple[str, int, int]]] = {
    "llama": [("full", 16, 0)],
    "mistral": [("sliding_window", 16, 4096)],
    "gemma-3": [("full", 16, 0), ("sliding_window", 16, 1024)],
    "gpt-oss": [("full", 16, 0), ("sliding_window", 16, 128)],
    "llama-4": [("full", 16, 0), ("chunked_local", 16, 8192)],
    "deepseek-v4": [
        ("full", 256, 0),
        ("sliding_window", 64, 128),
        ("sliding_window", 4, 8),
        ("sliding_window", 8, 128),
    ],
    "jamba": [("full", 256, 0), ("recurrent", 256, 0)],
}

PAGE_SIZES = {
    "llama": (2_097_152,),
    "mistral": (2_097_152,),
    "gemma-3": (1_048_576, 5_242_880),
    "gpt-oss": (393_216, 393_216),
    "llama-4": (786_432, 2_359_296),
    "deepseek-v4": (1_002_240, 1_609_920, 870_912, 656_640),
    "jamba": (4_194_304, 8_716_288),
}


def test_every_preset_is_known_here() -> None:
    assert set(PRESETS) == set(STRUCTURE) == set(PAGE_SIZES)


@pytest.mark.parametrize("name", STRUCTURE)
def test_the_groups_of_a_preset(name: str) -> None:
    layout = layout_for(name)
    assert isinstance(layout, KVCacheLayout)
    assert [(spec.kind, spec.block_size, spec.window) for spec in layout.groups] == STRUCTURE[name]
    assert layout.page_sizes == PAGE_SIZES[name]
    assert layout.alignment == max(size for _, size, _ in STRUCTURE[name])
    assert not layout.use_eagle


@pytest.mark.parametrize("name", STRUCTURE)
def test_every_preset_says_where_its_numbers_come_from(name: str) -> None:
    text = PRESETS[name].__doc__ or ""
    assert "config" in text or "issue" in text
    for size in set(PAGE_SIZES[name]):
        assert f"{size:,}" in text


@pytest.mark.parametrize("name", STRUCTURE)
def test_scale_shrinks_the_pages_alone(name: str) -> None:
    small, whole = layout_for(name, scale=0.001), layout_for(name)
    assert [(spec.kind, spec.block_size, spec.window) for spec in small.groups] == STRUCTURE[name]
    for less, full in zip(small.page_sizes, whole.page_sizes, strict=True):
        assert abs(less - full / 1000) <= 1
    assert set(layout_for(name, scale=1e-12).page_sizes) == {16}


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf"), float("-inf")])
def test_bad_scales(scale: float) -> None:
    with pytest.raises(InvalidLayoutError, match="scale must be positive"):
        layout_for("llama", scale=scale)


@pytest.mark.parametrize("name", ["LLAMA", "", "gpt-5", None])
def test_unknown_names_list_the_known_ones(name: Any) -> None:
    with pytest.raises(InvalidLayoutError) as caught:
        layout_for(name)
    for known in STRUCTURE:
        assert known in str(caught.value)
    assert repr(name) in str(caught.value)


def test_a_long_prompt_of_many_small_blocks_asks_for_a_bounded_number_of_keys() -> None:
    # Every chunk that some boundary of 128K tokens could need: the most that one lookup may ask for.
    assert sum(int(mask.sum()) for mask in store_mask(layout_for("deepseek-v4"), 1 << 17)) <= 10_752
