"""Models small enough for any machine, whose attention is that of the real ones, and what they say without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from mooncake_sparse_client.integrations.transformers import cache_argument

torch.set_num_threads(1)
logging.set_verbosity_error()

VOCABULARY = 256
BLOCK = 16
Floats = NDArray[np.float32]
#: By how much logits may differ from those of a run without a cache. Gemma-4 scales its embeddings up, and with them
#: what is rounded: the library's own cache comes near to the first figure there.
TOLERANCE = {"gemma4_text": 1e-4}


def _sizes(**more: object) -> dict[str, object]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        # Large enough for each token before to be felt in the logits, small enough for float32.
        "initializer_range": 0.1,
        **more,
    }


_MIXED = ["sliding_attention", "full_attention"] * 2

#: What the windows are not: a multiple of the block, one more than that, and shorter than a block.
KINDS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_sizes(num_hidden_layers=3)),
    "mistral": lambda: MistralConfig(**_sizes(num_hidden_layers=3, sliding_window=48)),
    "gemma-3": lambda: Gemma3TextConfig(
        **_sizes(num_hidden_layers=4, sliding_window=33, layer_types=_MIXED, query_pre_attn_scalar=16)
    ),
    # Full layers have wider heads, and the last two layers read the cache of those before.
    "gemma-4": lambda: Gemma4TextConfig(
        **_sizes(
            num_hidden_layers=6,
            sliding_window=40,
            layer_types=["sliding_attention", "full_attention"] * 3,
            global_head_dim=32,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCABULARY,
        )
    ),
    "gpt-oss": lambda: GptOssConfig(
        **_sizes(num_hidden_layers=4, sliding_window=8, layer_types=_MIXED, num_local_experts=4, num_experts_per_tok=2)
    ),
    "llama-4": lambda: Llama4TextConfig(
        **_sizes(num_hidden_layers=4, attention_chunk_size=64, num_local_experts=2, intermediate_size_mlp=96)
    ),
}


def build(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same weights in every process."""
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(KINDS[kind](), dtype=dtype).eval()


def tokens_of(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, count)]


def without_cache(model: PreTrainedModel, tokens: Sequence[int]) -> Floats:
    """The logits of every token, computed at once: ``[tokens, vocabulary]``."""
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits.float().numpy()


@dataclass(frozen=True)
class Continued:
    """What a model said when it went on from a restored prefix."""

    hit_length: int
    #: Of the prompt's tokens from ``hit_length`` on, and of the greedy ones but the last.
    logits: Floats
    #: Chosen greedily, one after another.
    greedy: list[int]


def go_on(
    model: PreTrainedModel,
    cache: DynamicCache,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    positions_off_by: int = 0,
) -> Continued:
    """Compute the rest of a prompt on top of a cache, then ``new_tokens`` greedy ones.

    ``positions_off_by``: for tests of the tests, a mistake in where the rest begins.
    """
    hit_length = cache.get_seq_length()
    rows: list[Floats] = []
    tokens = list(prompt)
    at = hit_length
    with torch.no_grad():
        for _ in range(new_tokens):
            options: dict[str, object] = {cache_argument(model): cache}
            if positions_off_by:
                options["position_ids"] = torch.arange(at, len(tokens))[None] + positions_off_by
            rows.append(model(torch.tensor([tokens[at:]]), **options).logits[0].float().numpy())
            at = len(tokens)
            tokens.append(int(rows[-1][-1].argmax()))
    return Continued(hit_length, np.concatenate(rows), tokens[len(prompt) :])


def assert_as_without_cache(model: PreTrainedModel, prompt: Sequence[int], said: Continued) -> None:
    """Each logit within 1e-5 (of most models) of the run without any cache, and the same greedy tokens.

    One run over prompt and answer tells: up to the first token that differed, its logits are those of the greedy run.
    """
    logits = without_cache(model, [*prompt, *said.greedy])
    first, tolerance = len(prompt) - 1, TOLERANCE.get(model.config.model_type, 1e-5)
    assert said.greedy == logits[first:-1].argmax(axis=1).tolist()
    np.testing.assert_allclose(said.logits, logits[said.hit_length : -1], rtol=0, atol=tolerance)
