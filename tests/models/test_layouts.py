"""A layout out of a model's config: as the presets say, as the model caches, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import BLOCK, KINDS, build, tokens_of
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    T5Config,
)
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.jamba import JambaConfig

from mooncake_sparse_client import KVCacheLayout, PutExplanation, layout_for, store_mask
from mooncake_sparse_client.core.plans import plan_put
from mooncake_sparse_client.errors import InvalidBufferError, InvalidLayoutError
from mooncake_sparse_client.integrations.transformers import ModelKV, cache_argument, layout_from_config

pytestmark = pytest.mark.models

#: The figures of the public configs that the presets name.
PUBLIC: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, dtype="bfloat16"
    ),
    "mistral": lambda: MistralConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        sliding_window=4096,
        dtype="bfloat16",
    ),
    "gemma-3": lambda: Gemma3TextConfig(
        num_hidden_layers=48,
        hidden_size=3840,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        sliding_window=1024,
        dtype="bfloat16",
    ),
    "gpt-oss": lambda: GptOssConfig(num_hidden_layers=24, dtype="bfloat16"),
    "llama-4": lambda: Llama4TextConfig(dtype="bfloat16"),
}


def shapes(layout: KVCacheLayout) -> list[tuple[type, int, int, int | None]]:
    return [(type(spec), spec.block_size, spec.window, spec.page_size_bytes) for spec in layout.groups]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_presets_are_what_the_configs_say(name: str) -> None:
    assert shapes(layout_from_config(PUBLIC[name]())) == shapes(layout_for(name))


@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_has_the_bytes_that_the_model_caches(kind: str, block_size: int) -> None:
    """The library's own cache, before any window is full, holds what a block of each group takes."""
    model = build(kind, torch.bfloat16)
    kv = ModelKV(model.config, block_size, dtype="bfloat16")
    cache = kv.new_cache()
    kv.prefill(model, tokens_of(3, block_size), cache)
    cached = sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values))
    assert sum(kv.layout.page_sizes) == cached
    assert kv.layout.alignment == block_size


def test_what_a_layout_from_a_config_keeps_can_be_explained() -> None:
    layout = layout_from_config(KINDS["gemma-3"](), 8, hash_block_size=4)
    assert (layout.alignment, layout.hash_block_size) == (8, 4)
    plan = plan_put(layout, 100, retention_interval=0)
    explained = plan.explain()
    assert isinstance(explained, PutExplanation)
    assert "sliding_window" in str(explained)
    assert [int(mask.sum()) for mask in store_mask(layout, 96, retention_interval=0, num_prompt_tokens=100)] == [12, 4]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: T5Config(), "is_encoder_decoder"),
        (lambda: BertConfig(), "is not causal"),
        (lambda: Gemma3TextConfig(use_bidirectional_attention=True), "is not causal"),
        (lambda: DeepseekV3Config(), "kv_lora_rank"),
        (lambda: JambaConfig(), "layer 0 (linear_attention) is kept as LinearAttentionLayer"),
        (
            lambda: LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
            "rope type 'dynamic'",
        ),
        (lambda: Llama4TextConfig(attention_chunk_size=100), "must be a multiple of block_size 16"),
    ],
)
def test_what_cannot_be_described_is_refused(config: Callable[[], PretrainedConfig], words: str) -> None:
    with pytest.raises(InvalidLayoutError) as refusal:
        layout_from_config(config())
    assert words in str(refusal.value)


def test_arguments_that_cannot_be_are_refused() -> None:
    config = KINDS["llama"]()
    for dtype in ("int8", "no type", torch.int64, 16):
        with pytest.raises(InvalidLayoutError, match="floating type"):
            layout_from_config(config, dtype=dtype)
    for size in (0, -1, 1.5, True):
        with pytest.raises(InvalidLayoutError, match="block_size"):
            layout_from_config(config, size)
    with pytest.raises(InvalidLayoutError, match="hash_block_size"):
        layout_from_config(config, hash_block_size=5)


def test_a_config_that_says_less_than_its_model_caches_is_noticed_before_anything_is_stored() -> None:
    """Falcon's config has 4 heads, of which its keys and values have one."""
    config = FalconConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=256)
    kv = ModelKV(config)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(InvalidBufferError, match=r"layer 0 of the cache holds .* but the layout says"):
        kv.prefill(model, tokens_of(1, 20), kv.new_cache(), kv.capture(store_mask(kv.layout, 16)))


def test_models_with_other_names_for_their_sizes() -> None:
    spec = layout_from_config(GPT2Config(n_layer=2, n_head=4, n_embd=64), dtype="float16").groups[0]
    assert spec.page_size_bytes == 2 * 2 * BLOCK * 64 * 2


def test_the_cache_argument_is_one_that_the_model_takes() -> None:
    model = build("llama")
    kv = ModelKV(model.config)
    cache = kv.new_cache()
    with torch.no_grad():
        model(torch.tensor([tokens_of(1, 5)]), **{cache_argument(model): cache})
    assert cache.get_seq_length() == 5
