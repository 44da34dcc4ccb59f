"""A layout out of a model's config: as the presets say, as the model caches, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import BLOCK, KINDS, build, tokens_of
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BltConfig,
    FalconConfig,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    Phi3Config,
    PretrainedConfig,
    ResNetConfig,
    T5Config,
)
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.jamba import JambaConfig
from transformers.models.mllama import MllamaConfig

from mooncake_sparse_client import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    PutExplanation,
    layout_for,
    store_mask,
)
from mooncake_sparse_client.core.plans import plan_put
from mooncake_sparse_client.errors import InvalidBufferError, InvalidLayoutError, InvalidRequestError
from mooncake_sparse_client.integrations.transformers import ModelKV, cache_argument, layout_from_config

pytestmark = pytest.mark.models

EIGHT_BILLION = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "dtype": "bfloat16",
}
#: The figures of the public configs that the presets name.
PUBLIC: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**EIGHT_BILLION),
    "mistral": lambda: MistralConfig(**EIGHT_BILLION, sliding_window=4096),
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
    cached = sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values) if states is not None)
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
        (lambda: ModernBertConfig(), "no model of type 'modernbert' that generates text"),
        (lambda: ResNetConfig(), "no model of type 'resnet' that generates text"),
        (lambda: BltConfig(), "says nothing of the layers of a decoder"),
        (lambda: LlamaConfig(is_causal=False), "is not causal"),
        (lambda: Gemma3TextConfig(use_bidirectional_attention=True), "is not causal"),
        (lambda: DeepseekV3Config(), "kv_lora_rank"),
        (lambda: JambaConfig(), "layer 0 (linear_attention) is kept as LinearAttentionLayer"),
        (
            lambda: LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
            "rope type 'dynamic'",
        ),
        (lambda: LlamaConfig(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope type 'dynamic'"),
        (
            lambda: Phi3Config(
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 48,
                    "long_factor": [2.0] * 48,
                }
            ),
            "rope type 'longrope'",
        ),
        (
            lambda: Gemma3TextConfig(
                rope_parameters={
                    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                }
            ),
            "rope type 'dynamic'",
        ),
        (lambda: Gemma4TextConfig(use_bidirectional_attention="all"), "is not causal"),
        (lambda: MllamaConfig(), "cross_attention_layers"),
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
    for nothing in (None, {}, "llama"):
        with pytest.raises(InvalidLayoutError, match="config must be a config of transformers"):
            layout_from_config(nothing)
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


def test_what_the_config_says_less_of_is_taken_as_the_library_takes_it() -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    # An attention chunk without layer types means chunks in every layer.
    local = layout_from_config(LlamaConfig(**sizes, attention_chunk_size=64))
    assert shapes(local) == [(ChunkedLocalAttentionSpec, 16, 64, 2 * 2 * 16 * 16 * 4)]
    # Values may be narrower than keys.
    narrow = layout_from_config(LlamaConfig(**sizes, v_head_dim=4))
    assert shapes(narrow) == [(FullAttentionSpec, 16, 0, 2 * 16 * (16 + 4) * 4)]
    # A field of encoders, that this decoder's config has too.
    assert layout_from_config(GPTNeoXConfig(num_hidden_layers=1, num_attention_heads=4, hidden_size=64)).groups
    # The type of the whole model, where the text's own config has none.
    whole = Gemma3Config(
        text_config={"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 16}, dtype="bfloat16"
    )
    assert ModelKV(whole).dtype == "bfloat16"
    assert ModelKV(LlamaConfig(**sizes)).dtype == "float32"
    assert ModelKV(LlamaConfig(**sizes), dtype="torch.float16").dtype == "float16"


def test_a_plan_of_another_layout_is_refused() -> None:
    config = KINDS["llama"]()
    other = plan_put(layout_from_config(config, 32), 96)
    with pytest.raises(InvalidRequestError, match="another layout"):
        ModelKV(config).capture(other)
    # The hash block is the client's to choose: the chunks are the same.
    finer = plan_put(layout_from_config(config).with_hash_block_size(8), 96)
    assert int(ModelKV(config).capture(finer).missing[0].sum()) == 6


def test_a_wrapped_model_is_given_its_cache_by_the_right_name() -> None:
    model = build("llama")

    class Wrapper(torch.nn.Module):
        def forward(self, *args: object, **kwargs: object) -> object:
            return model(*args, **kwargs)

    assert cache_argument(Wrapper()) == cache_argument(model)
