"""A model of Hugging Face transformers as what computes the KV cache of an offline job. Needs the extra
``transformers``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..checks import whole_number
from ..core.layout import KVCacheLayout
from ..core.masks import BoolArray
from ..core.results import GetResult
from ..errors import ConfigError, InvalidRequestError
from .transformers import ChunkCapture, ModelKV  # before the libraries: it says what to install where they are missing

# isort: split
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

__all__ = ["ModelProducer", "model_kv_of", "tokenizer_of", "usual_device"]


class ModelProducer:
    """Computes caches with a model, one sequence at a time, for ``mooncake_sparse_client.jobs``.

    Its states are caches of ``ModelKV.new_cache``. All of it belongs on the one thread that runs the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        block_size: int = 16,
        *,
        dtype: torch.dtype | str | None = None,
        hash_block_size: int | None = None,
        step_tokens: int = 1024,
        device: torch.device | str | None = None,
    ) -> None:
        """``model``: in ``eval`` mode. ``block_size``, ``hash_block_size``: as in ``layout_from_config``. ``dtype``: of
        the cached numbers, ``device``: where restored caches go; by default those of the model. ``step_tokens``:
        tokens of one forward at most.

        Raises ``InvalidLayoutError`` as ``layout_from_config`` does.
        """
        self._step_tokens = whole_number(step_tokens, "step_tokens", InvalidRequestError, least=1)
        self._model = model
        self._device = device
        self._kv = ModelKV(model.config, block_size, dtype=dtype or model.dtype, hash_block_size=hash_block_size)

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        block_size: int = 16,
        *,
        dtype: torch.dtype | str | None = None,
        hash_block_size: int | None = None,
        step_tokens: int = 1024,
        device: torch.device | str | None = None,
    ) -> ModelProducer:
        """With the causal language model in a local folder, or of a name that the Hugging Face hub knows.

        ``dtype``: what the model runs in, by default what its config says, else what its weights are. ``device``:
        where it runs, by default the CPU. Raises ``ConfigError``, with the library's own words, for a model that
        cannot be loaded.
        """
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto")
            model = model.to(device or model.device).eval()
        except Exception as error:  # of many kinds: files, the network, weights, devices, libraries
            raise _not_loaded("model", path, error) from error
        return cls(model, block_size, dtype=dtype, hash_block_size=hash_block_size, step_tokens=step_tokens)

    @property
    def kv(self) -> ModelKV:
        """Its layout, and the ``dtype`` that the client wants to be told."""
        return self._kv

    @property
    def layout(self) -> KVCacheLayout:
        return self._kv.layout

    def restore(self, got: GetResult) -> DynamicCache:
        """See ``ModelKV.restore``."""
        return self._kv.restore(got, device=self._device or self._model.device)

    def fork(self, state: DynamicCache) -> DynamicCache:
        """A copy, tensors too."""
        return copy.deepcopy(state)

    def prefill(
        self, state: DynamicCache, token_ids: NDArray[np.int64], wanted: Sequence[BoolArray]
    ) -> tuple[DynamicCache, ChunkCapture]:
        """Compute ``token_ids``, which follow on what ``state`` has seen, and copy the ``wanted`` chunks of theirs out.

        Answers ``state`` itself, which has grown. Raises ``InvalidRequestError`` if there are chunks among the wanted
        whose tokens were not computed.
        """
        capture = self._kv.capture(wanted)
        # Tokens that the cache has seen count, and are not looked at.
        prompt = [0] * state.get_seq_length() + token_ids.tolist()
        self._kv.prefill(self._model, prompt, state, capture, step_tokens=self._step_tokens)
        for group, mask in enumerate(capture.missing):
            if mask.any():
                raise InvalidRequestError(
                    f"chunk {int(mask.argmax())} of group {group} is wanted, and the cache, which has seen "
                    f"{len(prompt)} tokens now, does not hold it: want chunks of the tokens that are to be computed"
                )
        return state, capture


def usual_device() -> torch.device:
    """A GPU if PyTorch finds one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def model_kv_of(path: str, block_size: int = 16, *, dtype: torch.dtype | str | None = None) -> ModelKV:
    """How the cache of a model lies in chunks, by its config alone: no weights are loaded.

    Raises ``ConfigError``, with the library's own words, for a config that cannot be loaded.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # of many kinds: files, the network, models of another library
        raise _not_loaded("config", path, error) from error
    return ModelKV(config, block_size, dtype=dtype)


def tokenizer_of(path: str) -> Callable[[str], list[int]]:
    """Text to token ids, with the tokenizer in a local folder or of a name that the Hugging Face hub knows.

    Special tokens, such as one for the beginning, are added as the tokenizer does by default. A text that was made by a
    chat template, which writes them out, may get the first one twice: give the job token ids then.

    Raises ``ConfigError``, with the library's own words, for a tokenizer that cannot be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # of many kinds: files, the network, libraries that some tokenizers want
        raise _not_loaded("tokenizer", path, error) from error

    def token_ids(text: str) -> list[int]:
        # Else it warns of prompts that are longer than the model is said to take.
        return cast(list[int], tokenizer.encode(text, verbose=False))

    return token_ids


def _not_loaded(what: str, path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"no {what} can be loaded from {path!r}, be it a local folder or a name on the Hugging Face hub: "
        f"{type(error).__name__}: {error}"
    )
