"""Layouts by name, with page sizes from the models' public configs.

Bytes of one chunk are those of all the group's layers together, for one block of tokens, on one rank, with
keys and values in bfloat16 (2 bytes) unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..errors import InvalidLayoutError
from .layout import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    KVCacheLayout,
    MambaSpec,
    SlidingWindowSpec,
)

_BF16 = 2


def _kv_bytes(*, layers: int, tokens: int, kv_heads: int, head_dim: int) -> int:
    """Keys and values of ``tokens`` tokens in ``layers`` layers, bfloat16."""
    return layers * tokens * 2 * kv_heads * head_dim * _BF16


def llama() -> list[GroupSpec]:
    """Llama-3.1-8B (config.json): 32 full layers, 8 KV heads of 128.

    16 tokens: 32 * 16 * 2 * 8 * 128 * 2 = 2,097,152 bytes.
    """
    return [FullAttentionSpec(16, page_size_bytes=_kv_bytes(layers=32, tokens=16, kv_heads=8, head_dim=128))]


def mistral() -> list[GroupSpec]:
    """Mistral-7B-v0.1 (config.json): 32 layers, each a window of 4096, 8 KV heads of 128.

    16 tokens: 32 * 16 * 2 * 8 * 128 * 2 = 2,097,152 bytes.
    """
    size = _kv_bytes(layers=32, tokens=16, kv_heads=8, head_dim=128)
    return [SlidingWindowSpec(16, 4096, page_size_bytes=size)]


def gemma_3() -> list[GroupSpec]:
    """Gemma-3-12B (config.json): 48 layers, five windows of 1024 to one full, 8 KV heads of 256.

    16 tokens: 8 full layers take 8 * 16 * 2 * 8 * 256 * 2 = 1,048,576 bytes, 40 sliding ones 5,242,880.
    """
    full = _kv_bytes(layers=8, tokens=16, kv_heads=8, head_dim=256)
    return [
        FullAttentionSpec(16, page_size_bytes=full),
        SlidingWindowSpec(16, 1024, page_size_bytes=5 * full),
    ]


def gpt_oss() -> list[GroupSpec]:
    """gpt-oss-20b (config.json): 24 layers, full and windows of 128 by turns, 8 KV heads of 64.

    16 tokens: 12 layers of each take 12 * 16 * 2 * 8 * 64 * 2 = 393,216 bytes.
    """
    size = _kv_bytes(layers=12, tokens=16, kv_heads=8, head_dim=64)
    return [FullAttentionSpec(16, page_size_bytes=size), SlidingWindowSpec(16, 128, page_size_bytes=size)]


def llama_4() -> list[GroupSpec]:
    """Llama-4-Scout (config.json, text): 48 layers, every fourth full, the others in runs of 8192 tokens,
    8 KV heads of 128.

    16 tokens: 12 full layers take 12 * 16 * 2 * 8 * 128 * 2 = 786,432 bytes, 36 chunked ones 2,359,296.
    """
    full = _kv_bytes(layers=12, tokens=16, kv_heads=8, head_dim=128)
    return [
        FullAttentionSpec(16, page_size_bytes=full),
        ChunkedLocalAttentionSpec(16, 8192, page_size_bytes=3 * full),
    ]


def deepseek_v4() -> list[GroupSpec]:
    """DeepSeek-V4-Flash (config.json) as vLLM 0.32.0 groups it: 43 layers, 21 of them compressing 4 tokens to one
    (C4) and 20 compressing 128 (C128), each with a window of 128 beside.

    fp8 entries of 584 bytes, C4 indexer entries of 132, float32 compressor states; every layer's page is
    rounded up to a multiple of 576. The same sums are reported in vllm-project/vllm#54703.

    - full 256: 21 * 37,440 (64 C4 entries) + 21 * 8,640 (indexer) + 20 * 1,728 (2 C128 entries) = 1,002,240
    - window 128, blocks of 64: 43 * 37,440 (64 entries) = 1,609,920
    - C4 compressor, blocks of 4: 21 * 32,832 (4 * 2 * 2 * 512 * 4 bytes) + 21 * 8,640 (indexer's) = 870,912
    - C128 compressor, blocks of 8: 20 * 32,832 (8 * 2 * 512 * 4 bytes) = 656,640
    """
    return [
        FullAttentionSpec(256, page_size_bytes=1_002_240, name="compressed KV"),
        SlidingWindowSpec(64, 128, page_size_bytes=1_609_920, name="window"),
        SlidingWindowSpec(4, 8, page_size_bytes=870_912, name="C4 compressor"),
        SlidingWindowSpec(8, 128, page_size_bytes=656_640, name="C128 compressor"),
    ]


def jamba() -> list[GroupSpec]:
    """Jamba-v0.1 (config.json): 32 layers, 4 of them full with 8 KV heads of 128, 28 Mamba with an inner size
    of 8192, 16 states and a convolution of 4.

    256 tokens of the full layers: 4 * 256 * 2 * 8 * 128 * 2 = 4,194,304 bytes. A state:
    28 * 8192 * (16 + 3) * 2 = 8,716,288 bytes, whatever the tokens.
    """
    return [
        FullAttentionSpec(256, page_size_bytes=_kv_bytes(layers=4, tokens=256, kv_heads=8, head_dim=128)),
        MambaSpec(256, page_size_bytes=28 * 8192 * (16 + 3) * _BF16),
    ]


PRESETS: Mapping[str, Callable[[], list[GroupSpec]]] = {
    "llama": llama,
    "mistral": mistral,
    "gemma-3": gemma_3,
    "gpt-oss": gpt_oss,
    "llama-4": llama_4,
    "deepseek-v4": deepseek_v4,
    "jamba": jamba,
}


def layout_for(name: str, *, scale: float = 1.0) -> KVCacheLayout:
    """The layout of a preset. ``scale`` shrinks its page sizes (never below 16 bytes) so that a demonstration
    fits a laptop. Raises ``InvalidLayoutError`` for an unknown name or a scale that is not positive."""
    if name not in PRESETS:
        raise InvalidLayoutError(f"there is no layout {name!r}; there are {', '.join(PRESETS)}")
    if not 0 < scale < float("inf"):
        raise InvalidLayoutError(f"scale must be positive, not {scale!r}")
    groups = [
        replace(spec, page_size_bytes=max(16, round((spec.page_size_bytes or 0) * scale))) for spec in PRESETS[name]()
    ]
    return KVCacheLayout(groups)
