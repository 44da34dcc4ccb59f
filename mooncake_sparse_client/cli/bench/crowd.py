"""Many lookups at once, of prompts that share documents, beside the same lookups one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...client import SparseStoreClient
from ...core.masks import BoolArray, store_mask
from ...core.plans import PrefixHit
from ...core.sequence import TokenSequence
from ...errors import StoreAnswerError
from ...stores.base import Store
from ...stores.wrapping import WrappedStore
from .measure import Amount, Side, on_thread
from .rules import some_tokens
from .session import Session
from .shelves import Shelf, Values, client_keys, lookup_client, stored_upto

_REQUESTS: Final = 1000
_DOCUMENTS: Final = 20
#: A multiple of every alignment: what a request hits is its whole document.
_DOCUMENT_TOKENS: Final = 6 << 10
_PROMPT_TOKENS: Final = 8 << 10
#: The layout that is meant where none is named.
_USUAL_LAYOUT: Final = "gemma-3"


def crowd_names(layout: str) -> list[str]:
    """The comparison, and the figure beside it."""
    name = "concurrent.1000" if layout == _USUAL_LAYOUT else f"concurrent.1000.{layout}"
    return [name, f"wire_requests.{name}"]


async def measure_crowd(session: Session, store: Store, values: Values, layout: str) -> None:
    name, wire_requests = crowd_names(layout)
    if not session.wants(name, wire_requests):
        return
    counting = CountingStore(store)
    async with lookup_client(store, layout) as client, lookup_client(counting, layout) as counted:
        crowd = [_hashed(client.sequence(ids)) for ids in _prompts()]
        # One request of each document will do: no tail is stored.
        shelves = [_shelf(client, values, sequence) for sequence in crowd[:_DOCUMENTS]]
        await on_thread(partial(_hold, shelves, stored_upto(client.layout, _PROMPT_TOKENS, _DOCUMENT_TOKENS)))
        some = crowd[: session.effort.scaled(_REQUESTS)]
        ours = Side(lambda: _seconds_each(_all_at_once(client, crowd)))
        theirs = Side(lambda: _seconds_each(_one_by_one(client, some)))
        await session.compare(name, ours, theirs, Amount(1, "lookups/s"))
        if session.wants(wire_requests):
            _check(await _all_at_once(counted, crowd))
            session.note(wire_requests, {wire_requests: counting.questions})
        await on_thread(partial(_hold, shelves, stored_upto(client.layout, _PROMPT_TOKENS, 0)))


def _prompts() -> Iterator[NDArray[np.int64]]:
    documents = [some_tokens(_DOCUMENT_TOKENS, seed) for seed in range(_DOCUMENTS)]
    for number in range(_REQUESTS):
        tail = some_tokens(_PROMPT_TOKENS - _DOCUMENT_TOKENS, _DOCUMENTS + number)
        yield np.concatenate([documents[number % _DOCUMENTS], tail])


def _hashed(sequence: TokenSequence) -> TokenSequence:
    sequence.block_hashes  # noqa: B018 - hashed now, and not while somebody is measured
    return sequence


def _shelf(client: SparseStoreClient, values: Values, sequence: TokenSequence) -> Shelf:
    keys = client_keys(client, sequence.block_hashes, _PROMPT_TOKENS)
    return Shelf(values, keys, store_mask(client.layout, _PROMPT_TOKENS))


def _hold(shelves: Sequence[Shelf], present: Sequence[BoolArray]) -> None:
    for shelf in shelves:
        shelf.hold(present)


async def _all_at_once(client: SparseStoreClient, crowd: Sequence[TokenSequence]) -> list[PrefixHit]:
    return await asyncio.gather(*map(client.lookup, crowd))


async def _one_by_one(client: SparseStoreClient, crowd: Sequence[TokenSequence]) -> list[PrefixHit]:
    return [await client.lookup(sequence) for sequence in crowd]


async def _seconds_each(looking_up: Awaitable[list[PrefixHit]]) -> float:
    """Seconds that one of the lookups takes, when all are as they should be."""
    started = perf_counter()
    hits = await looking_up
    seconds = perf_counter() - started
    _check(hits)
    return seconds / len(hits)


def _check(hits: Sequence[PrefixHit]) -> None:
    for hit in hits:
        if hit.hit_length != _DOCUMENT_TOKENS:
            raise StoreAnswerError(f"a lookup found {hit.hit_length} tokens of a document of {_DOCUMENT_TOKENS}")


class CountingStore(WrappedStore):
    """Counts the existence questions that reach a store."""

    questions = 0

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self.questions += 1
        return await super().exists(keys)
