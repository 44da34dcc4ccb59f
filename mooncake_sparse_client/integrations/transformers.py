"""Hugging Face transformers: a model's layout, chunks out of its cache, and a hit back into one.

::

    kv = ModelKV(model.config)                                     # layers, groups, page sizes
    client = SparseStoreClient.connect(kv.layout, model_name=..., dtype=kv.dtype)

    sequence = client.sequence(token_ids)
    hit = await client.lookup(sequence)
    got = await client.get(hit)
    cache = kv.restore(got)                                        # got.hit_length tokens are in it
    if got.hit_length < hit.hit_length:
        hit = None                                                 # what it saw is gone in part
    capture = kv.capture(client.plan_put(sequence, hit=hit))       # what the put will want
    logits = kv.prefill(model, token_ids, cache, capture)          # the rest
    await client.put(sequence, capture, hit=hit)

Text only: of one sequence, without padding, in a ``DynamicCache``. Everything here but the client's calls computes or
copies, and belongs on the thread that runs the model. Needs the extra ``transformers``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..checks import whole_number
from ..core.layout import KVCacheLayout
from ..core.masks import BoolArray, needed_chunks
from ..core.plans import PutPlan
from ..core.results import GetResult
from ..errors import InvalidBufferError, InvalidRequestError, InvalidTokensError, MissingLibraryError

try:
    import torch
    import transformers
    from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel

    from .capture import ChunkCapture
    from .model_geometry import GroupKV, LayerKV, geometry_from_config
    from .window_layer import WindowLayer
except ImportError as error:
    raise MissingLibraryError(
        f"PyTorch and transformers 5 are needed for this integration, and did not load: {error}; "
        "install them with: pip install 'mooncake-sparse-client[transformers]'"
    ) from error

# Before, it kept some recurrent states as if they were attention, and took tokens back by another rule.
if not hasattr(WindowLayer, "activate_past_recording"):
    raise MissingLibraryError(
        f"transformers {transformers.__version__} is too old for this integration: install transformers 5.18 or later"
    )

__all__ = ["ChunkCapture", "ModelKV", "cache_argument", "layout_from_config"]


def layout_from_config(
    config: PretrainedConfig,
    block_size: int = 16,
    *,
    dtype: torch.dtype | str | None = None,
    hash_block_size: int | None = None,
) -> KVCacheLayout:
    """The layout of a model's KV cache: a group for full attention, for each sliding window, for chunked attention.

    ``block_size``: tokens a chunk, in every group. ``dtype``: of the cached numbers; default the config's own, else
    float32. The page sizes are those of the whole model: one rank, all layers.

    Raises ``InvalidLayoutError`` for what a prefix cache cannot serve, or is not described here: recurrent and
    compressed layers, MLA, encoders, attention that looks ahead, rotary scaling that depends on the prompt's length.
    """
    return geometry_from_config(config, block_size, dtype, hash_block_size).layout


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's ``forward`` and ``generate`` call their cache: ``cache``, or ``past_key_values`` in earlier
    versions of transformers 5, and in code from elsewhere."""
    for names in (model.forward, GenerationMixin.prepare_inputs_for_generation):  # the second: a wrapper takes anything
        for name in ("cache", "past_key_values"):
            if name in inspect.signature(names).parameters:
                return name
    return "past_key_values"


class ModelKV:
    """How one model's KV cache lies in chunks, and the ways from a cache to chunks and back.

    The arguments are those of ``layout_from_config``.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        block_size: int = 16,
        *,
        dtype: torch.dtype | str | None = None,
        hash_block_size: int | None = None,
    ) -> None:
        self._config = config
        self._geometry = geometry_from_config(config, block_size, dtype, hash_block_size)

    @property
    def layout(self) -> KVCacheLayout:
        return self._geometry.layout

    @property
    def dtype(self) -> str:
        """The type of the cached numbers as the client wants it said, such as ``bfloat16``."""
        return str(self._geometry.dtype).removeprefix("torch.")

    def new_cache(self) -> DynamicCache:
        """An empty cache for ``forward`` and ``generate`` whose windows can be captured by whole chunks.

        It holds somewhat more than the library's own: in front of what the last forward computed, the tokens that the
        window's chunks of the last two boundaries hold.
        """
        cache = DynamicCache(config=self._config)
        for group in self._geometry.groups:
            if group.spec.window:
                kept = group.tail_tokens + self.layout.alignment
                for layer in group.layers:
                    cache.layers[layer.index] = WindowLayer(layer.window, kept)
        return cache

    def restore(self, got: GetResult, *, device: torch.device | str = "cpu") -> DynamicCache:
        """A cache that has seen the first ``got.hit_length`` tokens, from the chunks that a ``get`` without a sink
        answered, for a hit of a lookup without ``local_tokens``. A miss gives an empty cache.

        ``generate`` and ``forward`` go on from it: the next token's position is ``got.hit_length``. Its tensors are
        copies; ``device`` is where the model wants them.

        Raises ``InvalidBufferError`` for chunks that are missing or of another size.
        """
        cache = self.new_cache()
        length = got.hit_length
        if length % self.layout.alignment:
            raise InvalidRequestError(
                f"a hit of {length} tokens is none of this model's layout, whose hits are multiples of "
                f"{self.layout.alignment}"
            )
        if not length:
            return cache
        for number, group in enumerate(self._geometry.groups):
            chunks = needed_chunks(group.spec, length)
            pages = _gather(got.chunks, number, chunks, group.spec.page_size_bytes or 0)
            for layer, keys, values in self._unpack(group, pages, device):
                kept = cache.layers[layer.index]
                if isinstance(kept, WindowLayer):
                    kept.fill(keys, values, length)
                else:
                    kept.update(keys, values)
        return cache

    def _unpack(
        self, group: GroupKV, pages: torch.Tensor, device: torch.device | str
    ) -> Iterator[tuple[LayerKV, torch.Tensor, torch.Tensor]]:
        """Each layer's keys and values ``[1, heads, tokens, head_dim]`` out of pages, one a row."""
        size, count, offset = group.spec.block_size, pages.shape[0], 0
        for layer in group.layers:
            states = []
            for head_dim in layer.head_dims:
                part = layer.heads * size * head_dim * self._geometry.dtype.itemsize
                numbers = pages[:, offset : offset + part].reshape(-1).view(self._geometry.dtype)
                blocks = numbers.view(count, layer.heads, size, head_dim).transpose(0, 1)
                states.append(blocks.reshape(1, layer.heads, count * size, head_dim).to(device))
                offset += part
            yield layer, states[0], states[1]

    def capture(self, plan: PutPlan | Sequence[BoolArray], *, but: Sequence[BoolArray] = ()) -> ChunkCapture:
        """A source for the put that ``plan`` is of: ``client.plan_put``, with the arguments of the put.

        What the plan's ``hit`` saw in the store is left out: where the get came back shorter than the hit, plan and
        put without it. So is what ``but`` has, such as the ``store_masks`` of a plan whose chunks another capture has
        taken. In place of a plan, masks will do, one boolean array a group.
        """
        if isinstance(plan, PutPlan):
            if plan.layout.groups != self.layout.groups:
                raise InvalidRequestError("the plan is of another layout: give the client this model's own, kv.layout")
            plan = [mask & ~known for mask, known in zip(plan.store_masks, plan.known, strict=True)]
        if len(plan) != len(self._geometry.groups):
            raise InvalidRequestError(
                f"there are masks of {len(plan)} groups, and the model has {len(self._geometry.groups)}"
            )
        wanted = [np.array(mask, dtype=np.bool_) for mask in plan]
        for mask, taken in zip(wanted, but, strict=False):
            mask[: taken.size] &= ~taken[: mask.size]
        return ChunkCapture(self._geometry, wanted)

    def prefill(
        self,
        model: PreTrainedModel,
        token_ids: Sequence[int],
        cache: DynamicCache,
        capture: ChunkCapture | None = None,
        *,
        step_tokens: int = 1024,
    ) -> torch.Tensor:
        """Compute the tokens that ``cache`` has not seen, and answer the logits of the last one, ``[vocabulary]``.

        In steps of at most ``step_tokens``, after each of which ``capture`` takes its chunks: a window's layers then
        never hold more than a step, and yet each tail in front of a boundary to be kept is whole in one of them.

        Raises ``InvalidRequestError`` if the cache has seen all of them already (the last token yields the logits), if
        the model is in training mode, or does not use the cache.
        """
        step = whole_number(step_tokens, "step_tokens", InvalidRequestError, least=1)
        if model.training:
            raise InvalidRequestError("the model is in training mode, and drops numbers at random: call model.eval()")
        seen: int = cache.get_seq_length()
        if seen >= len(token_ids):
            raise InvalidRequestError(
                f"the cache has seen {seen} tokens and there are {len(token_ids)}: nothing is left to compute"
            )
        ids = _as_ids(token_ids[seen:]).to(model.device)
        options: dict[str, object] = {cache_argument(model): cache, "use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            options["logits_to_keep"] = 1
        with torch.no_grad():
            for start in range(0, ids.shape[1], step):
                now = ids[:, start : start + step]
                logits: torch.Tensor = model(now, **options).logits
                seen += now.shape[1]
                if cache.get_seq_length() != seen:
                    raise InvalidRequestError(
                        f"{type(model).__name__} was given {seen} tokens and a cache, which has seen "
                        f"{cache.get_seq_length()} now: it does not keep its keys there"
                    )
                if capture is not None:
                    capture.take(cache)
        return logits[0, -1]


def _as_ids(token_ids: Sequence[int]) -> torch.Tensor:
    """Token ids as the model's input, ``[1, tokens]``."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidTokensError(
            f"token_ids must be a list or an array of whole numbers, not {type(token_ids).__name__}"
        )
    return torch.as_tensor(ids.astype(np.int64))[None]


def _gather(
    chunks: Mapping[tuple[int, int], memoryview], group: int, wanted: range, page_size_bytes: int
) -> torch.Tensor:
    """The wanted chunks of a group, one a row."""
    pages = np.empty((len(wanted), page_size_bytes), dtype=np.uint8)
    for row, chunk in enumerate(wanted):
        found = chunks.get((group, chunk))
        if found is None or found.nbytes != page_size_bytes:
            what = "is missing" if found is None else f"has {found.nbytes} bytes, not {page_size_bytes}"
            raise InvalidBufferError(
                f"chunk {chunk} of group {group} {what}: restore() wants the result of a get without `into`, of a hit "
                "that was looked up without local_tokens, by a client with this model's layout"
            )
        pages[row] = np.frombuffer(found, dtype=np.uint8)
    return torch.from_numpy(pages)
