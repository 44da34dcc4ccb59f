"""A layer of a transformers cache that keeps a little more than its attention sees."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer


class WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]  # the library is not typed
    """Keys and values of a sliding window, or of chunked attention, that can be stored and restored by whole chunks.

    The library's own layer drops all but the last ``sliding_window - 1`` tokens. That is what the next token needs,
    but a chunk at the edge of it is then there in part only, and could never be stored: its key says that it is whole.
    This one keeps, besides what the last forward computed, the ``kept_tokens`` before. Attention is shown neither more
    nor less than by the library's layer.

    ``keys`` and ``values`` are of the shape ``[1, heads, tokens, head_dim]``; the last token is number
    ``cumulative_length - 1``. Tokens before ``first_held`` may stand in them as padding, where attention is told of
    them but never looks at them.
    """

    def __init__(self, sliding_window: int, kept_tokens: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.kept_tokens = kept_tokens
        self.record_past = False
        self._real_from = 0

    @property
    def first_held(self) -> int:
        """The first token whose keys and values are here, padding not counted."""
        held = self.keys.shape[-2] if self.is_initialized else 0
        return max(self._real_from, self.cumulative_length - held)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        # The library starts with tensors of no dimensions, of which there is no last token.
        self.keys, self.values = key_states.narrow(-2, 0, 0), value_states.narrow(-2, 0, 0)

    def fill(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Start as if ``length`` tokens had been computed, of which ``keys`` and ``values`` hold the last ones."""
        visible = min(length, self.sliding_window - 1)
        self._real_from = length - keys.shape[-2]
        self.lazy_initialization(keys, values)
        # Chunked attention needs nothing of the run before, but its mask is laid over a whole window.
        padding = (0, 0, max(visible - keys.shape[-2], 0), 0)
        self.keys = torch.nn.functional.pad(keys, padding)
        self.values = torch.nn.functional.pad(values, padding)
        self.cumulative_length = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        before = self.keys.shape[-2]
        # While a caller may still take tokens back (`activate_past_recording`), all are kept.
        kept = before if self.record_past else min(before, self.kept_tokens)
        self.keys = torch.cat([self.keys.narrow(-2, before - kept, kept), key_states], dim=-2)
        self.values = torch.cat([self.values.narrow(-2, before - kept, kept), value_states], dim=-2)
        self.cumulative_length += new
        visible = min(self.sliding_window - 1 + new, kept + new)
        start = kept + new - visible
        return self.keys.narrow(-2, start, visible), self.values.narrow(-2, start, visible)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last ``-tokens_to_remove`` tokens back, as far as what is left still fills the window, and drop what
        was kept for that."""
        dropped, held = -tokens_to_remove, self.keys.shape[-2] if self.is_initialized else 0
        length, left = self.cumulative_length - dropped, held - dropped
        if dropped < 0 or left < min(max(length, 0), self.sliding_window - 1):
            raise ValueError(
                f"this cache cannot go back by {dropped} tokens: it would hold {left} of the "
                f"{self.sliding_window - 1} before that a window of {self.sliding_window} sees; "
                "call activate_past_recording() before the tokens that may be taken back"
            )
        if held:
            kept = min(left, self.kept_tokens)
            self.keys = self.keys.narrow(-2, left - kept, kept)
            self.values = self.values.narrow(-2, left - kept, kept)
            self.cumulative_length = length

    def reset(self) -> None:
        super().reset()
        self.keys = self.values = None
        self.is_initialized = False
        self.cumulative_length = 0
        self._real_from = 0
