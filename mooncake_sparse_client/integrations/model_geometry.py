"""What a Hugging Face model config says of the KV cache: which layers cache what, and how a chunk's bytes lie.

A chunk of a group is, for each of its layers in the model's order, the keys and then the values of the chunk's
tokens, each as ``[num_key_value_heads, block_size, head_dim]`` in C order, as the model computed them: keys have
their positions in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ..checks import whole_number
from ..core.layout import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    KVCacheLayout,
    SlidingWindowSpec,
)
from ..errors import InvalidLayoutError

#: How long a prompt gets changes what these say of its first tokens: a prefix has no keys of its own.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
#: The class of a layer without a cache of its own, by name: not all versions have it.
_NO_CACHE = "DummyLayer"


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's keys and values. ``window``: the sliding window, or the attention chunk, in tokens; 0 for none."""

    index: int
    kind: str
    window: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def head_dims(self) -> tuple[int, int]:
        """Numbers a token and head: of keys, of values."""
        return self.key_dim, self.value_dim


@dataclass(frozen=True, slots=True)
class GroupKV:
    """The layers of one group, and the layout's spec of them."""

    spec: GroupSpec
    layers: tuple[LayerKV, ...]

    @property
    def tail_tokens(self) -> int:
        """Tokens before a boundary that the group's chunks must hold for it; 0 where that is all of them."""
        size = self.spec.block_size
        return math.ceil((self.spec.window - 1) / size) * size if self.spec.window else 0


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """A model's layers, grouped as its layout groups them, and the type of their numbers."""

    layout: KVCacheLayout
    groups: tuple[GroupKV, ...]
    dtype: torch.dtype


def geometry_from_config(
    config: PretrainedConfig, block_size: int, dtype: torch.dtype | str | None, hash_block_size: int | None
) -> ModelGeometry:
    """See ``layout_from_config``. Raises ``InvalidLayoutError``, naming the config's field at fault."""
    size = whole_number(block_size, "block_size", InvalidLayoutError, least=1)
    if not isinstance(config, PretrainedConfig):
        raise InvalidLayoutError(f"config must be a config of transformers, such as model.config, not {config!r}")
    text = config.get_text_config(decoder=True)
    _check_it_is_a_decoder(config, text)
    for layer_config in _layer_configs(text):
        _check_prefixes_stand_alone(layer_config, type(text).__name__)
    said = dtype or getattr(text, "dtype", None) or getattr(config, "dtype", None)
    number = _number_type(said or torch.float32)
    by_kind: dict[tuple[str, int], list[LayerKV]] = {}
    for layer in _layers(text):
        by_kind.setdefault((layer.kind, layer.window), []).append(layer)
    if not by_kind:
        raise InvalidLayoutError(f"{type(text).__name__} has no layer with a KV cache of its own")
    # Full attention first: where layers are alike in two models, so are their groups.
    kinds = sorted(by_kind, key=lambda kind: (kind[1] != 0, kind))
    groups = tuple(
        GroupKV(_spec(*kind, size, _page_bytes(by_kind[kind], size, number)), tuple(by_kind[kind])) for kind in kinds
    )
    layout = KVCacheLayout([group.spec for group in groups], hash_block_size=hash_block_size)
    return ModelGeometry(layout, groups, number)


def _spec(kind: str, window: int, block_size: int, page_size_bytes: int) -> GroupSpec:
    if kind == "full":
        return FullAttentionSpec(block_size, page_size_bytes=page_size_bytes, name=kind)
    if kind == "chunked_local":
        return ChunkedLocalAttentionSpec(block_size, window, page_size_bytes=page_size_bytes, name=kind)
    return SlidingWindowSpec(block_size, window, page_size_bytes=page_size_bytes, name=kind)


def _page_bytes(layers: Iterable[LayerKV], block_size: int, dtype: torch.dtype) -> int:
    return sum(layer.heads * block_size * sum(layer.head_dims) * dtype.itemsize for layer in layers)


def _number_type(dtype: object) -> torch.dtype:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidLayoutError(
            f"dtype must be a floating type of torch, such as torch.bfloat16 or 'float32', not {dtype!r}"
        )
    return found


def _check_it_is_a_decoder(config: PretrainedConfig, text: PretrainedConfig) -> None:
    """Raises for a model that is known to generate no text; one that the library does not know may do."""
    name = type(text).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise InvalidLayoutError(f"{name}.is_encoder_decoder: a decoder's cache depends on the encoder's input too")
    kinds = {config.model_type, text.model_type}
    generates = kinds & (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys())
    if not generates and config.model_type in CONFIG_MAPPING_NAMES:
        raise InvalidLayoutError(f"{name}: transformers has no model of type {config.model_type!r} that generates text")


def _check_prefixes_stand_alone(config: PretrainedConfig, name: str) -> None:
    """Raises unless what a layer caches of a token depends on that token and those before it alone."""
    # Encoders that can be made decoders say which of both they are; elsewhere the field means nothing.
    encoder = getattr(config, "is_decoder", None) is False and hasattr(config, "add_cross_attention")
    looks_ahead = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if encoder or looks_ahead or not getattr(config, "is_causal", True):
        raise InvalidLayoutError(f"{name} is not causal: what it caches of a prefix depends on what follows")
    if getattr(config, "cross_attention_layers", None):
        raise InvalidLayoutError(f"{name}.cross_attention_layers: they cache images, which is not described here")
    if getattr(config, "kv_lora_rank", None):
        raise InvalidLayoutError(f"{name}.kv_lora_rank: what MLA caches is not described here; write its layout out")
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if rope in _LENGTH_DEPENDENT_ROPE:
            raise InvalidLayoutError(
                f"{name}.rope_parameters: with rope type {rope!r} the keys of a prefix depend on how long the "
                "prompt is, so that they cannot serve another one"
            )


def _layer_configs(config: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """The config as each layer sees it, where they differ; else the one that all of them share."""
    try:
        return getattr(config, "per_layer_config", None) or [config]
    except AttributeError as error:
        raise InvalidLayoutError(f"{type(config).__name__} says nothing of the layers of a decoder: {error}") from error


def _ropes(parameters: object) -> list[str]:
    """The rope types of parameters that are flat, or one set a layer type."""
    if not isinstance(parameters, Mapping):
        return []
    nested = [found for value in parameters.values() for found in _ropes(value)]
    return [str(parameters.get("rope_type", "default")), *nested]


def _layers(config: PretrainedConfig) -> list[LayerKV]:
    """The layers that cache anything. The library's own cache says how each is kept, its config what each attends."""
    name = type(config).__name__
    try:
        kept = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # what it raises for one that it cannot make
        raise InvalidLayoutError(f"transformers makes no cache from {name}: {error!r}") from error
    types = getattr(config, "layer_types", None)
    chunked = getattr(config, "attention_chunk_size", None) is not None
    configs = _layer_configs(config)
    layers = []
    for index, layer in enumerate(kept):
        if type(layer).__name__ == _NO_CACHE:
            continue
        layer_type = types[index] if types else ""
        if type(layer) is DynamicLayer:
            kind, window = "full", 0
        elif type(layer) is DynamicSlidingWindowLayer:
            local = layer_type == "chunked_attention" or (not types and chunked)
            kind, window = "chunked_local" if local else "sliding_window", int(layer.sliding_window)
        else:
            raise InvalidLayoutError(
                f"{name}: layer {index} ({layer_type or 'of no given type'}) is kept as {type(layer).__name__}, which "
                "is not described here; full, sliding-window and chunked attention are"
            )
        layers.append(LayerKV(index, kind, window, *_shape(configs[index % len(configs)], name)))
    return layers


def _shape(config: PretrainedConfig, name: str) -> tuple[int, int, int]:
    """Heads of keys and values, and the numbers in each: of keys, of values."""
    attention_heads = getattr(config, "num_attention_heads", None)
    heads = getattr(config, "num_key_value_heads", None) or attention_heads
    head_dim = getattr(config, "head_dim", None)
    if not head_dim and attention_heads and getattr(config, "hidden_size", None):
        head_dim = config.hidden_size // attention_heads
    if not isinstance(heads, int) or not isinstance(head_dim, int) or heads < 1 or head_dim < 1:
        raise InvalidLayoutError(
            f"{name} does not say how large its keys are: it has no num_key_value_heads and head_dim, nor "
            "num_attention_heads and hidden_size"
        )
    return heads, head_dim, getattr(config, "v_head_dim", None) or head_dim
