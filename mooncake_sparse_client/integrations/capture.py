"""Chunks taken out of a transformers cache, as a source for ``put``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..core.masks import BoolArray
from ..errors import InvalidBufferError
from .model_geometry import GroupKV, LayerKV, ModelGeometry
from .window_layer import WindowLayer


class ChunkCapture:
    """The chunks of one sequence that a put will ask for, copied out of a cache while it holds them.

    Call ``take`` after each forward. It copies each wanted chunk once, as soon as the cache has all of its tokens, so
    that the cache may go on growing, or be given up, while a put is still under way. Ask it like any source:
    ``capture(group, chunk)`` answers the chunk's bytes, or None for one that was never whole in the cache.
    """

    def __init__(self, geometry: ModelGeometry, wanted: Sequence[BoolArray]) -> None:
        """``wanted``: one mask a group, which become the capture's own. See ``ModelKV.capture``."""
        self._geometry = geometry
        self._wanted = list(wanted)
        self._taken: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self._seen = 0

    def __call__(self, group: int, chunk: int) -> NDArray[np.uint8] | None:
        return self._taken.get((group, chunk))

    @property
    def missing(self) -> tuple[BoolArray, ...]:
        """One boolean array a group: the chunks that are wanted and have not been taken yet."""
        return tuple(mask.copy() for mask in self._wanted)

    @property
    def nbytes(self) -> int:
        """Bytes of all the chunks that have been taken."""
        return sum(page.nbytes for page in self._taken.values())

    def take(self, cache: Cache) -> int:
        """Copy the wanted chunks that ``cache`` holds whole by now, and answer how many these were.

        ``cache``: of this model, one sequence in it, its tokens those of the sequence from the first on. Layers of
        ``ModelKV.new_cache`` and ``restore`` hold whole what the last forward computed, and the windows before it;
        the library's own hold only what a window sees. Call it on the thread that runs the model.

        Raises ``InvalidBufferError`` for a cache of another model, type or batch, and for one from which tokens have
        been taken back since: their chunks may have been taken already.
        """
        before = len(self._taken)
        held = [self._held(cache, group) for group in self._geometry.groups]
        seen = min(length for length, _ in held)
        if seen < self._seen:
            raise InvalidBufferError(
                f"the cache has seen {seen} tokens, and had seen {self._seen} when chunks were last taken: go on with "
                "a new capture, since chunks of the tokens that were taken back may be in this one"
            )
        self._seen = seen
        for number, (group, (length, first)) in enumerate(zip(self._geometry.groups, held, strict=True)):
            size = group.spec.block_size
            mask = self._wanted[number]
            chunks = np.flatnonzero(mask[: length // size])
            chunks = chunks[chunks * size >= first]
            for start, end in _runs(chunks):
                pages = self._pages(cache, group, start * size, end * size)
                self._taken.update({(number, start + at): page for at, page in enumerate(pages)})
            mask[chunks] = False
        return len(self._taken) - before

    def _pages(self, cache: Cache, group: GroupKV, first_token: int, end_token: int) -> NDArray[np.uint8]:
        """The chunks of tokens ``[first_token, end_token)``, one a row."""
        size = group.spec.block_size
        count = (end_token - first_token) // size
        pages = torch.empty((count, group.spec.page_size_bytes or 0), dtype=torch.uint8)
        offset = 0
        for layer in group.layers:
            kept = cache.layers[layer.index]
            behind = kept.get_seq_length() - end_token
            for states, head_dim in zip((kept.keys, kept.values), layer.head_dims, strict=True):
                part = layer.heads * size * head_dim * self._geometry.dtype.itemsize
                rows = states.detach()[0].narrow(-2, states.shape[-2] - behind - count * size, count * size)
                blocks = rows.reshape(layer.heads, count, size, head_dim).transpose(0, 1)
                place = pages[:, offset : offset + part].view(self._geometry.dtype)
                place.view(blocks.shape).copy_(blocks)
                offset += part
        found: NDArray[np.uint8] = pages.numpy()
        return found

    def _held(self, cache: Cache, group: GroupKV) -> tuple[int, int]:
        """How many tokens the group's layers have seen, and the first of those that all of them hold."""
        lengths, first = [], 0
        for layer in group.layers:
            kept = _layer_of(cache, layer)
            lengths.append(kept.get_seq_length())
            if lengths[-1]:
                _check_states(kept, layer, self._geometry.dtype)
                first = max(first, _first_held(kept))
        if len(set(lengths)) != 1:
            raise InvalidBufferError(
                f"layers {[layer.index for layer in group.layers]} of the cache have seen {lengths} tokens: take "
                "chunks after a forward, not while one is running"
            )
        return lengths[0], first


def _runs(chunks: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """The ascending numbers as ranges: first, and one past the last."""
    for run in np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1):
        if run.size:
            yield int(run[0]), int(run[-1]) + 1


def _layer_of(cache: Cache, layer: LayerKV) -> DynamicLayer:
    """The cache's own layer. Raises ``InvalidBufferError`` if it is none of the kind that the layout says."""
    kept = cache.layers[layer.index] if layer.index < len(cache.layers) else None
    expected = (WindowLayer, DynamicSlidingWindowLayer) if layer.window else (DynamicLayer,)
    if kept is None or type(kept) not in expected or (layer.window and kept.sliding_window != layer.window):
        raise InvalidBufferError(
            f"layer {layer.index} of the cache is {type(kept).__name__}, but the layout says {layer.kind} "
            f"{layer.window or ''}: make the cache with ModelKV.new_cache() or restore(), or with "
            "DynamicCache(config=...) of the same config"
        )
    return kept


def _check_states(kept: DynamicLayer, layer: LayerKV, dtype: torch.dtype) -> None:
    for states, head_dim in zip((kept.keys, kept.values), layer.head_dims, strict=True):
        expected = (1, layer.heads, states.shape[-2], head_dim)
        if tuple(states.shape) != expected or states.dtype != dtype:
            raise InvalidBufferError(
                f"layer {layer.index} of the cache holds {states.dtype} of shape {tuple(states.shape)}, but the layout "
                f"says {dtype} of shape {expected}: one sequence, its heads, tokens, head_dim; give ModelKV the "
                "model's own config, and dtype= if the model runs in another than the config says"
            )


def _first_held(kept: DynamicLayer) -> int:
    """The first token whose keys and values a layer holds."""
    if isinstance(kept, WindowLayer):
        return kept.first_held
    seen: int = kept.get_seq_length() - kept.keys.shape[-2]
    return seen
