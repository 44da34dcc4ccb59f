"""SparseStoreClient: what a serving stack or a job awaits. It runs the core's plans on a store."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from operator import is_not
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .chunks import Sink, Source, check_source
from .core.hashing import TokenIds
from .core.masks import BoolArray, store_mask, token_count
from .core.plans import PrefixHit, PutPlan, plan_put
from .core.results import GetResult, Health, PutResult, RemoveResult, VerifyResult
from .core.sequence import TokenSequence
from .data_plane.auditing import Audit
from .data_plane.ends import BufferEnd, PagedEnd
from .data_plane.movers import DirectMover, StagedMover
from .data_plane.writing import PutStep
from .errors import InvalidRequestError, StoreError
from .lifecycle import ClientLifecycle
from .paged import PagedKVCache
from .request_checks import check_hit, check_own, check_plan, check_sequence, check_trust
from .stores.regions import Region

#: Prompts with more tokens than this to hash are hashed on a thread.
_HASH_INLINE_TOKENS = 4096
#: Seconds. What masters lease by default is 5 or 10; a store speaks of the shorter one, to be safe when it reads.
_LONGEST_LEASE = 10.0


class _Wanted(NamedTuple):
    """What ``put`` and ``plan_put`` are asked to keep; see ``put``."""

    hit: PrefixHit | None = None
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    start_token: int = 0
    boundaries: Sequence[int] = ()


class SparseStoreClient(ClientLifecycle):
    """Keeps a KV cache in a store: writes the chunks that a later prefix hit can reach, finds the longest
    prefix that every layer group can resume from, and reads it back.

    Made over any ``Store`` (which stays the caller's to close), or by ``connect`` or ``local``, which open one
    in ``async with`` and close it. ``dtype`` and ``revision`` keep the caches of other weights apart.
    ``profile``: ``native``, or ``vllm`` to share keys with a fleet running vLLM. ``timeout`` in seconds bounds
    every call; one that moves bytes to or from paged memory without a copy ends when the native call does.
    ``when_down``: whether a store that cannot be reached raises, or counts as one that has nothing. ``resilience``: how
    often such a store is asked again, and when it counts as down and is left alone for a while.

    Raises the errors of ``mooncake_sparse_client.errors``; a miss is never one.
    """

    def sequence(
        self,
        token_ids: TokenIds,
        *,
        cache_salt: str | None = None,
        lora: tuple[str, str] | None = None,
        multimodal: Sequence[tuple[str, int, int]] = (),
        prompt_embeds: ArrayLike | None = None,
    ) -> TokenSequence:
        """A request's tokens, and what else names its prefixes; see ``TokenSequence``."""
        self._check_not_closed()
        return TokenSequence(
            self.hasher,
            token_ids,
            cache_salt=cache_salt,
            lora=lora,
            multimodal=multimodal,
            prompt_embeds=prompt_embeds,
        )

    async def lookup(self, sequence: TokenSequence, *, local_tokens: int = 0) -> PrefixHit:
        """Find the longest prefix that every group can resume from. A miss is a hit of 0 tokens.

        ``local_tokens``: a prefix that the engine holds itself; not asked for, not loaded, and the hit is
        never below it (rounded down to the alignment).
        """
        local = token_count(local_tokens, "local_tokens")
        hashes, num_tokens = await self._hashes(sequence)
        try:
            async with self._asking("looking a sequence up"):
                return await self._asker.lookup(hashes, num_tokens, local)
        except self._misses:
            return self._asker.nothing(hashes, num_tokens, local)

    async def get(self, hit_or_sequence: PrefixHit | TokenSequence, *, into: Sink | None = None) -> GetResult:
        """Read the chunks of a hit, or of a sequence's own lookup.

        ``into``: where the bytes go: a registered ``PagedKVCache`` with the request's block tables, without a copy;
        or ``(group, chunk) -> writable buffer(s)`` as a callable or mapping; without one they come back in
        ``GetResult.chunks``. When chunks are gone, late, short or damaged, the result's
        ``hit_length`` is the longest prefix that can be resumed from what did arrive.
        """
        self._check_open()
        if into is not None:
            check_source(into)
        mover = self._mover(into)
        if self.keys.rank not in self.keys.lookup_ranks:
            raise InvalidRequestError(
                f"this client's own rank {self.keys.rank} is not among its key_ranks {self.keys.lookup_ranks}: "
                "it may look up, but the chunks of its own rank were never asked for"
            )
        hashes: tuple[bytes, ...] = ()
        num_tokens, hit = 0, None
        if isinstance(hit_or_sequence, TokenSequence):
            hashes, num_tokens = await self._hashes(hit_or_sequence)
        else:
            hit = hit_or_sequence
            self._check_hit(hit)
        try:
            async with self._asking("reading a hit", moving=True):
                if hit is None:
                    hit = await self._asker.lookup(hashes, num_tokens, 0)
                return await self._reader.get(hit, self._asker.again(hit), mover)
        except self._misses as error:
            return self._reader.nothing(hit or self._asker.nothing(hashes, num_tokens, 0), error.kind)

    def put(
        self,
        sequence: TokenSequence,
        source: Source,
        *,
        hit: PrefixHit | None = None,
        num_tokens: int | None = None,
        num_prompt_tokens: int | None = None,
        start_token: int = 0,
        boundaries: Sequence[int] = (),
        confirm: bool = False,
        plan: PutPlan | None = None,
    ) -> Coroutine[None, None, PutResult]:
        """Write the chunks of the sequence that a later hit could reach and the store lacks.

        ``source``: a registered ``PagedKVCache`` with the request's block tables, whose bytes move without a copy;
        or ``(group, chunk) -> buffer(s) or None`` as a callable or mapping. Asked only for those chunks, on the
        event loop, a batch at a time. ``num_tokens``: how far the cache really reaches, rounded
        down to the alignment; default all. ``num_prompt_tokens``: default the sequence's length. ``hit``: this
        request's own lookup; what it saw is not asked again, and the junction that it found is kept.
        ``start_token``: the last result's ``end_token`` when one request puts in steps. ``boundaries``: token
        positions that later requests will part at. ``confirm``: ask again before a chunk counts as written.
        ``plan``: what ``plan_put`` answered for this sequence, in place of ``hit`` and whatever else it was made from.

        The sequence is taken as long as it is when this is called, whenever the put is awaited: tokens that it
        grows by meanwhile have no cache yet. What the source hands out must stay as it is until the put is over.

        Raises ``InvalidRequestError`` and ``InvalidBufferError``; a chunk that the store refuses is counted
        as ``failed``.
        """
        length = len(sequence) if isinstance(sequence, TokenSequence) else 0
        wanted = _Wanted(hit, num_tokens, num_prompt_tokens, start_token, boundaries)
        return self._put(sequence, length, source, wanted, plan, confirm=confirm)

    async def _put(
        self,
        sequence: TokenSequence,
        length: int,
        source: Source,
        wanted: _Wanted,
        plan: PutPlan | None,
        *,
        confirm: bool,
    ) -> PutResult:
        self._check_open()
        check_source(source)
        if plan is not None and any(map(is_not, wanted, _Wanted())):
            raise InvalidRequestError("a plan says what to keep: leave out hit, start_token and the like")
        mover = self._mover(source)
        hashes, _ = await self._hashes(sequence, length)
        if plan is None:
            plan = self._plan(hashes, length, wanted)
        else:
            self._check_plan(plan, hashes, length)
        mover.check(plan.store_masks)
        step = PutStep(self._transport, plan, hashes, mover, confirm=confirm, patience=self._patience)
        try:
            async with self._asking(f"putting tokens {plan.start_token} to {plan.end_token}", step.so_far, moving=True):
                await step.run()
        except self._misses as error:
            step.fail_the_rest(error.kind)
        return step.result()

    def plan_put(
        self,
        sequence: TokenSequence,
        *,
        hit: PrefixHit | None = None,
        num_tokens: int | None = None,
        num_prompt_tokens: int | None = None,
        start_token: int = 0,
        boundaries: Sequence[int] = (),
    ) -> PutPlan:
        """What ``put`` would keep, decided without asking the store."""
        self._check_not_closed()
        self._check_sequence(sequence)
        wanted = _Wanted(hit, num_tokens, num_prompt_tokens, start_token, boundaries)
        return self._plan(sequence.block_hashes, len(sequence), wanted)

    def _plan(self, hashes: tuple[bytes, ...], length: int, wanted: _Wanted) -> PutPlan:
        hit = wanted.hit
        if hit is not None:
            self._check_own_hit(hit, hashes)
        return plan_put(
            self.layout,
            length,
            hit=hit,
            trust_hit=hit is not None and self.keys.rank in hit.key_ranks,
            num_tokens=wanted.num_tokens,
            num_prompt_tokens=wanted.num_prompt_tokens,
            start_token=wanted.start_token,
            boundaries=wanted.boundaries,
            retention_interval=self.retention_interval,
            retention_origin=self.retention_origin,
        )

    async def exists(
        self, sequence: TokenSequence, *, all_chunks: bool = False, plan: PutPlan | None = None
    ) -> tuple[BoolArray, ...]:
        """Which chunks of the sequence's whole blocks are in the store: one boolean array a group.

        Asks only for chunks that some boundary could need, the others are False; ``all_chunks``: for all; ``plan``
        (of ``plan_put`` for this sequence): for those that it keeps, in arrays like its ``store_masks``.
        """
        hashes, num_tokens = await self._hashes(sequence)
        if plan is not None:
            if all_chunks:
                raise InvalidRequestError("all_chunks and plan say different things: ask for one of them")
            self._check_plan(plan, hashes, num_tokens)
            wanted = plan.store_masks
        else:
            wanted = store_mask(self.layout, self.layout.align(num_tokens))
            wanted = tuple(map(np.ones_like, wanted)) if all_chunks else wanted
        try:
            async with self._asking("asking for the chunks of a sequence"):
                return await self._asker.exists(hashes, wanted)
        except self._misses:
            return tuple(map(np.zeros_like, wanted))

    async def verify(self, sequence: TokenSequence, *, plan: PutPlan | None = None) -> VerifyResult:
        """Read back every chunk that ``plan`` keeps (default: that a put of the whole sequence would), check each
        byte as a get does, and hand none over.

        It moves all of these bytes: much more than a get, which reads the chunks of one boundary. A chunk that turns
        out damaged counts as absent, as in a get, and is replaced by the next put. Raises what a store that is out of
        reach raises, whatever ``when_down`` says.
        """
        hashes, num_tokens = await self._hashes(sequence)
        if plan is None:
            plan = self._plan(hashes, num_tokens, _Wanted())
        else:
            self._check_plan(plan, hashes, num_tokens)
        async with self._asking(f"verifying tokens {plan.start_token} to {plan.end_token}", moving=True):
            return await Audit(self._transport, plan, hashes).run()

    async def remove(self, sequence: TokenSequence, *, force: bool = False) -> RemoveResult:
        """Delete the sequence's chunks under this client's keys, prefixes shared with others included.

        ``force`` takes chunks too that are leased to readers for now.
        """
        hashes, num_tokens = await self._hashes(sequence)
        async with self._asking("removing the chunks of a sequence"):
            return await self._asker.remove(hashes, num_tokens, force=force)

    async def clear(self, *, force: bool = False) -> int:
        """Delete this client's whole cache, every sequence, group and rank of it, and answer how many keys went.

        The cache is what has this client's ``keys.cache_id``: the model, prefix and namespace in it are its own, so
        that nobody else's keys are touched. ``force`` takes chunks too that are leased to readers for now; without it
        they stay. Hits from before say no more what is there. The master looks at each key that it has.

        Raises ``InvalidRequestError`` where the keys have no namespace, since others write under such keys.
        """
        self._check_open()
        if not self._identity.owns_namespace:
            raise InvalidRequestError(
                f"the keys of {self.keys.cache_id!r} have no namespace: others write under them too, such as a fleet "
                "running vLLM, and would lose their values; remove sequences one by one"
            )
        async with self._asking("clearing the cache"):
            removed = await self._transport.store.remove_prefix(self.keys.cache_stem, force=force)
        self._transport.ledger.forget()
        return removed

    async def register(self, cache: PagedKVCache) -> bool:
        """Make paged memory known to the store: once, before its first use as a source or sink.

        All of a cache's block tables share it, and registering it again is nothing. It must stay where it is
        until ``unregister``, or until the client is closed. Answers whether values move to and from it without
        a copy. Else they are staged: in shared mode where the memory is not of ``allocate``, in remote mode where
        the pieces of a value (the header of a framed one counts) are so small that one copy is quicker, and where
        the native library refuses the memory, which is logged.

        Raises ``InvalidBufferError`` for memory that does not fit the layout, or that nothing can reach.
        """
        self._check_open()
        async with self._bounded("registering memory"):
            return (await self._registry.register(cache)).direct

    async def unregister(self, cache: PagedKVCache) -> None:
        """Let go of a cache's memory before the client is closed. No call may be using it."""
        self._check_open()
        async with self._bounded("unregistering memory"):
            await self._registry.unregister(cache)

    def allocate(self, nbytes: int) -> Region:
        """Memory that values move to and from without a copy, in whatever mode: ``.view`` and ``.array``.

        It comes from the store's pool (``pool_size``), to which it returns when nothing refers to it any more;
        it stays valid when the client is closed before. A ``PagedKVCache`` over it is registered like any other.

        Raises ``InvalidRequestError`` when the pool has no room for ``nbytes``.
        """
        self._check_open()
        return self._transport.memory.allocate(nbytes)

    async def health(self) -> Health:
        """Whether the store answers now, within ``resilience.hang_seconds``. A store that does not is a value too.

        It is asked in any case, also while other calls are refused.
        """
        try:
            async with self._bounded("asking whether the store is there", self._resilience.hang_seconds):
                return await self._transport.store.health()
        except StoreError as error:
            return Health(ok=False, kind=error.kind, detail=str(error))

    def _mover(self, end: Source | Sink | None) -> DirectMover | StagedMover:
        """How bytes move between this source or sink and the store."""
        if not isinstance(end, PagedKVCache):
            return StagedMover(self._transport, BufferEnd(end, self._identity.page_sizes))
        known = self._registry[end]
        if known.direct:
            return DirectMover(self._transport, end, known.pieces)
        return StagedMover(self._transport, PagedEnd(end))

    async def _hashes(self, sequence: TokenSequence, length: int | None = None) -> tuple[tuple[bytes, ...], int]:
        """The block hashes of the sequence's first ``length`` tokens (now: all), and that number."""
        self._check_open()
        self._check_sequence(sequence)
        if not self._misses:
            self._transport.check_up()  # before much is hashed for nothing
        num_tokens = len(sequence) if length is None else length
        if sequence.unhashed_tokens > _HASH_INLINE_TOKENS:
            hashes = await self._transport.compute(lambda: sequence.block_hashes)
        else:
            hashes = sequence.block_hashes
        return hashes[: num_tokens // self.hasher.block_size], num_tokens

    @property
    def _patience(self) -> float:
        """Seconds for a full store to make room: a lease must have run out by then, and time be left to say so."""
        lease = max(self._transport.store.lease_seconds or 0, _LONGEST_LEASE)
        return min(self._timeout / 2, lease + 1)

    def _check_sequence(self, sequence: TokenSequence) -> None:
        check_sequence(sequence, self.hasher)

    def _check_hit(self, hit: PrefixHit) -> None:
        check_hit(hit, self.keys, self.fingerprint)

    def _check_plan(self, plan: PutPlan, hashes: tuple[bytes, ...], num_tokens: int) -> None:
        check_plan(plan, self.layout, num_tokens)
        if plan.hit is not None:
            self._check_own_hit(plan.hit, hashes)
            check_trust(plan, self.keys)

    def _check_own_hit(self, hit: PrefixHit, hashes: tuple[bytes, ...]) -> None:
        self._check_hit(hit)
        check_own(hit, hashes)
