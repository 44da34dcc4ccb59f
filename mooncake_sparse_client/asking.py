"""Carrying out questions: lookups, existence, and the removal of what was found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from .core.masks import BoolArray, load_mask, read_only, store_mask
from .core.plans import PrefixHit, lookup_questions, lookup_stages, needed_again, no_presence
from .core.prefix import PrefixReport, explain_prefix
from .core.results import RemoveResult
from .data_plane.transfer import Transport
from .stores.base import RemoveOutcome

Hashes: TypeAlias = tuple[bytes, ...]


class Asker:
    """Asks one client's store, through its transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._identity = transport.identity

    async def lookup(self, hashes: Hashes, num_tokens: int, local_tokens: int) -> PrefixHit:
        """Ask stage by stage, each only as far as the ones before it allow."""
        layout, asked_at = self._identity.layout, time.monotonic()
        upto = layout.hit_cap(num_tokens)
        local = min(layout.align(local_tokens), upto)
        present, asked, keys_asked = no_presence(layout, num_tokens), [local] * len(layout.groups), 0
        for stage in lookup_stages(layout):
            questions = lookup_questions(layout, num_tokens, stage, upto=upto, local_tokens=local)
            keys_asked += await self._ask(questions, hashes, present)
            for group in stage:
                asked[group] = upto
            report = explain_prefix(layout, num_tokens, present, local_tokens=local, asked_lengths=asked)
            upto = min(upto, *(report.group_lengths[group] for group in stage))
        return self._hit(hashes, num_tokens, present, report, local, asked_at=asked_at, keys_asked=keys_asked)

    def nothing(self, hashes: Hashes, num_tokens: int, local_tokens: int) -> PrefixHit:
        """The hit of a store that has nothing, or was not asked."""
        layout, present = self._identity.layout, no_presence(self._identity.layout, num_tokens)
        local = min(layout.align(local_tokens), layout.hit_cap(num_tokens))
        asked = [local] * len(layout.groups)
        report = explain_prefix(layout, num_tokens, present, local_tokens=local, asked_lengths=asked)
        return self._hit(hashes, num_tokens, present, report, local, asked_at=time.monotonic(), keys_asked=0)

    def _hit(
        self,
        hashes: Hashes,
        num_tokens: int,
        present: tuple[BoolArray, ...],
        report: PrefixReport,
        local: int,
        *,
        asked_at: float,
        keys_asked: int,
    ) -> PrefixHit:
        schema = self._identity.keys.schema
        return PrefixHit(
            hit_length=report.hit_length,
            shared_length=report.shared_length,
            load_masks=read_only(load_mask(self._identity.layout, report.hit_length, local_tokens=local)),
            report=report,
            num_tokens=num_tokens,
            local_tokens=local,
            present=read_only(present),
            block_hashes=hashes,
            cache_id=schema.cache_id,
            fingerprint=self._identity.value_format.fingerprint,
            key_ranks=schema.lookup_ranks,
            asked_at=asked_at,
            keys_asked=keys_asked,
        )

    async def present_now(self, hit: PrefixHit) -> tuple[BoolArray, ...]:
        """What a hit saw, asked again where the store's lease on it may have ended."""
        lease = self._transport.store.lease_seconds
        if lease is None or time.monotonic() - hit.asked_at < lease:
            return hit.present
        questions = needed_again(self._identity.layout, hit)
        present = tuple(seen & ~asked for seen, asked in zip(hit.present, questions, strict=True))
        await self._ask(questions, hit.block_hashes, present)
        return present

    async def exists(self, hashes: Hashes, num_tokens: int, *, all_chunks: bool) -> tuple[BoolArray, ...]:
        layout = self._identity.layout
        questions = store_mask(layout, layout.align(num_tokens))
        if all_chunks:
            questions = tuple(np.ones_like(mask) for mask in questions)
        present = no_presence(layout, num_tokens)
        await self._ask(questions, hashes, present)
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

    async def _ask(self, questions: Sequence[BoolArray], hashes: Hashes, present: Sequence[BoolArray]) -> int:
        """Set ``present`` where every rank's key is there; returns how many keys were asked for."""
        builder = self._identity.keys
        chunks = [np.flatnonzero(mask) for mask in questions]
        keys = await self._transport.keys(builder.ranked_keys, hashes, list(enumerate(chunks)))
        if not keys:
            return 0
        answers = await self._transport.exists(keys)
        ranks = len(builder.schema.lookup_ranks)
        everywhere = np.logical_and.reduce(answers.reshape(-1, ranks), axis=1)
        first = 0
        for group, some in enumerate(chunks):
            present[group][some] = everywhere[first : first + len(some)]
            first += len(some)
        return len(keys)
