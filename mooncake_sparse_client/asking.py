"""Carrying out questions: lookups, existence, and the removal of what was found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from .core.known import PRESENT, in_state
from .core.masks import BoolArray, load_mask, read_only
from .core.plans import PrefixHit
from .core.results import RemoveResult
from .core.search import PrefixSearch
from .data_plane.reading import Room
from .data_plane.transfer import Parts, Transport, chosen, parts_of, runs_of
from .stores.base import RemoveOutcome

Hashes: TypeAlias = tuple[bytes, ...]
#: Chunks that are named and asked for at a time where all of them are, so that it takes the same memory for any number.
_WINDOW = 16384


class Asker:
    """Asks one client's store, through its transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._identity = transport.identity
        self._ranks = len(transport.identity.keys.schema.lookup_ranks)

    async def lookup(self, hashes: Hashes, num_tokens: int, local_tokens: int) -> PrefixHit:
        """Ask until the longest usable prefix is known; see ``core.search``."""
        asked_at = time.monotonic()
        search = self.search(num_tokens, local_tokens)
        await self.settle(search, hashes)
        return self._hit(search, hashes, num_tokens, asked_at)

    def nothing(self, hashes: Hashes, num_tokens: int, local_tokens: int) -> PrefixHit:
        """The hit of a store that has not answered, and so counts as one that has nothing."""
        hit = self._hit(self.search(num_tokens, local_tokens), hashes, num_tokens, time.monotonic())
        return replace(hit, answered=False)

    def again(self, hit: PrefixHit) -> HitSearch:
        """The search that ended with ``hit``, to be gone on with."""
        return HitSearch(self, hit, self._transport.store.lease_seconds)

    def search(self, num_tokens: int, local_tokens: int, known: Sequence[bytes] | None = None) -> PrefixSearch:
        """A search that has asked nothing yet; ``known``: what an earlier one knew."""
        return PrefixSearch(
            self._identity.layout, num_tokens, local_tokens=local_tokens, ranks=self._ranks, known=known
        )

    async def settle(self, search: PrefixSearch, hashes: Hashes) -> None:
        """Ask until the search has its answer."""
        for questions in search.questions():
            if questions:
                search.note(questions, await self._present(questions, hashes))
            else:
                await asyncio.sleep(0)

    def _hit(self, search: PrefixSearch, hashes: Hashes, num_tokens: int, asked_at: float) -> PrefixHit:
        layout, schema = self._identity.layout, self._identity.keys.schema
        masks = load_mask(layout, search.hit_length, local_tokens=search.local_tokens)
        return PrefixHit(
            hit_length=search.hit_length,
            shared_length=search.shared_length,
            load_masks=read_only(masks),
            layout=layout,
            num_tokens=num_tokens,
            local_tokens=search.local_tokens,
            asked_lengths=tuple(search.asked_lengths),
            known=search.known,
            block_hashes=hashes,
            cache_id=schema.cache_id,
            fingerprint=self._identity.value_format.fingerprint,
            key_ranks=schema.lookup_ranks,
            asked_at=asked_at,
            keys_asked=search.keys_asked,
            requests=search.requests,
        )

    async def exists(self, hashes: Hashes, wanted: Sequence[BoolArray]) -> tuple[BoolArray, ...]:
        """Which of the ``wanted`` chunks are there: arrays like those."""
        groups, chunks = chosen(wanted)
        found = np.zeros(len(groups), dtype=np.bool_)
        for start in range(0, len(groups), _WINDOW):
            window = slice(start, start + _WINDOW)
            parts = parts_of(runs_of(groups[window]), chunks[window])
            found[window] = await self._present(parts, hashes)
        present = tuple(map(np.zeros_like, wanted))
        for group, run in runs_of(groups):
            present[group][chunks[run]] = found[run]
        return present

    async def remove(self, hashes: Hashes, num_tokens: int, *, force: bool) -> RemoveResult:
        layout = self._identity.layout
        everything = [range(layout.align(num_tokens) // spec.block_size) for spec in layout.groups]
        keys = await self._transport.keys(self._identity.keys.own_keys, hashes, list(enumerate(everything)))

        async def remove(batch: Sequence[str]) -> list[RemoveOutcome]:
            return await self._transport.store.remove(batch, force=force)

        outcomes = await self._transport.in_key_batches(keys, remove)
        if RemoveOutcome.LEASED in outcomes:
            pairs = zip(keys, outcomes, strict=True)
            keys = [key for key, outcome in pairs if outcome is not RemoveOutcome.LEASED]
        self._transport.ledger.clear(keys)
        return RemoveResult(
            removed=outcomes.count(RemoveOutcome.REMOVED),
            absent=outcomes.count(RemoveOutcome.ABSENT),
            leased=outcomes.count(RemoveOutcome.LEASED),
        )

    async def _present(self, questions: Parts, hashes: Hashes) -> BoolArray:
        """Whether each chunk of ``questions`` is there, under every rank's key."""
        keys = await self._transport.keys(self._identity.keys.ranked_keys, hashes, questions)
        found = await self._transport.exists(keys)
        return found if self._ranks == 1 else np.logical_and.reduce(found.reshape(-1, self._ranks), axis=1)


class HitSearch:
    """What is believed of the chunks of one hit, by now."""

    def __init__(self, asker: Asker, hit: PrefixHit, lease_seconds: float | None) -> None:
        self._asker = asker
        self._hit = hit
        self._old = lease_seconds is not None and time.monotonic() - hit.asked_at >= lease_seconds

    @cached_property
    def _search(self) -> PrefixSearch:
        """Asks only for what the hit does not know. Made once it is needed: most gets find all that they expect."""
        return self._asker.search(self._hit.num_tokens, self._hit.local_tokens, self._hit.known)

    @property
    def present(self) -> tuple[BoolArray, ...]:
        """The chunks that are believed to be in the store, one boolean array a group."""
        return in_state(self._search.known, PRESENT)

    async def hit_length(self, room: Room) -> int:
        """How long the hit still is, in tokens: asked again where the store's lease on it may have run out."""
        if not self._old:
            return self._hit.hit_length
        self._search.doubt(self._hit.hit_length)
        length = await self._settled()
        return length if length == self._hit.hit_length else await self.without((), room)

    async def without(self, lost: Iterable[tuple[int, int]], room: Room) -> int:
        """The longest prefix below that does without ``lost`` chunks, and whose chunks the sink has room for."""
        self.lose(lost)
        if (places := room()) is not None:
            self._search.only_into(places)
        return await self._settled()

    def lose(self, lost: Iterable[tuple[int, int]]) -> None:
        """These ``(group, chunk)`` are not to be had."""
        for group, chunk in lost:
            self._search.lose(group, chunk)

    async def _settled(self) -> int:
        await self._asker.settle(self._search, self._hit.block_hashes)
        return self._search.hit_length
