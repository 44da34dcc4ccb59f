"""Lookups without a client: the search, driven by whoever says what is there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mooncake_sparse_client import KVCacheLayout, PrefixHit, load_mask
from mooncake_sparse_client.core.search import PrefixSearch

Exists = Callable[[int, int], bool]
Where = tuple[int, int]


def answered(search: PrefixSearch, exists: Exists) -> list[list[Where]]:
    """Answer all questions; the ``(group, chunk)`` that were asked for, request by request."""
    rounds = []
    for questions in search.questions():
        asked = [(group, chunk) for group, chunks in questions for chunk in chunks]
        search.note(questions, np.array([exists(*where) for where in asked], dtype=np.bool_))
        if asked:  # an empty question is but a pause
            rounds.append(asked)
    return rounds


def look_up(layout: KVCacheLayout, num_tokens: int, exists: Exists, local_tokens: int = 0) -> PrefixHit:
    """A lookup as a client makes it, in a store that has the chunks of which ``exists`` says so."""
    search = PrefixSearch(layout, num_tokens, local_tokens=local_tokens)
    rounds = answered(search, exists)
    assert (search.keys_asked, search.requests) == (sum(map(len, rounds)), len(rounds))
    return hit_of(search, layout, num_tokens)


def hit_of(search: PrefixSearch, layout: KVCacheLayout, num_tokens: int) -> PrefixHit:
    """The hit that a search ended with, or has come to."""
    return PrefixHit(
        hit_length=search.hit_length,
        shared_length=search.shared_length,
        load_masks=load_mask(layout, search.hit_length, local_tokens=search.local_tokens),
        layout=layout,
        num_tokens=num_tokens,
        local_tokens=search.local_tokens,
        asked_lengths=tuple(search.asked_lengths),
        known=search.known,
        block_hashes=(),
        cache_id="",
        fingerprint="",
        key_ranks=((0, 0, 0, 0),),
        asked_at=0.0,
        keys_asked=search.keys_asked,
        requests=search.requests,
    )
