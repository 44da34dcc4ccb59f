"""What a put, a lookup or a get will do, as values; the client carries them out.

Everything is decided here from counts, masks and what is known to be present. Chunk indices are absolute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..checks import items_of
from ..errors import InvalidRequestError
from .explain import LookupExplanation, PutExplanation, count_reasons, explain_lookup
from .keys import Rank
from .known import ABSENT, PRESENT, in_state
from .layout import FullAttentionSpec, KVCacheLayout
from .masks import (
    BoolArray,
    check_retention_interval,
    kept_chunks,
    read_only,
    retained_boundaries,
    token_count,
)
from .prefix import PrefixReport, explain_prefix
from .reasons import Reason, ReasonArray, chunk_reasons
from .tally import Tally


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHit:
    """The answer of a lookup. A miss is a hit of 0 tokens (or of ``local_tokens``)."""

    #: Leading tokens whose cache can be reused.
    hit_length: int
    #: What the dense groups alone could serve; above ``hit_length`` where sparse groups held the hit back.
    shared_length: int
    #: One boolean array a group: the chunks that ``get`` reads.
    load_masks: tuple[BoolArray, ...] = field(repr=False)
    layout: KVCacheLayout = field(repr=False)
    #: Tokens of the sequence at the time of the lookup.
    num_tokens: int
    #: The prefix that the engine said it holds itself, rounded down to the alignment.
    local_tokens: int
    #: How far each group was asked, in tokens: no group is asked beyond what those before it allow.
    asked_lengths: tuple[int, ...] = field(repr=False)
    #: What is known of each group's chunks, a byte each (see ``core.known``).
    known: tuple[bytes, ...] = field(repr=False)
    #: The sequence's block hashes at the time: what the hit is of.
    block_hashes: tuple[bytes, ...] = field(repr=False)
    #: Which cache was asked, of what shape, under which ranks' keys.
    cache_id: str
    fingerprint: str
    key_ranks: tuple[Rank, ...]
    #: ``time.monotonic()`` of the first question, in seconds.
    asked_at: float
    #: Keys that the lookup asked for.
    keys_asked: int
    #: Questions that were put one after another. What concurrent lookups ask at a time travels together.
    requests: int
    #: False where the store could not be reached, and counts as one that has nothing (``when_down="miss"``).
    answered: bool = True

    @property
    def present(self) -> tuple[BoolArray, ...]:
        """One boolean array a group: the chunks that the lookup saw in the store. What was not asked is False."""
        return read_only(in_state(self.known, PRESENT))

    @property
    def asked(self) -> tuple[BoolArray, ...]:
        """One boolean array a group: the chunks that the lookup asked for."""
        answered = zip(self.present, in_state(self.known, ABSENT), strict=True)
        return read_only(present | absent for present, absent in answered)

    @property
    def report(self) -> PrefixReport:
        """How far each group alone could serve the request, and which group limited the hit."""
        return explain_prefix(
            self.layout,
            self.num_tokens,
            self.present,
            local_tokens=self.local_tokens,
            asked=self.asked,
            asked_lengths=self.asked_lengths,
        )

    def explain(self) -> LookupExplanation:
        """Why the hit is as long as it is, group by group; ``str()`` of it is for people."""
        return explain_lookup(
            self.layout,
            self.report,
            self.asked,
            self.present,
            num_tokens=self.num_tokens,
            local_tokens=self.local_tokens,
            keys_asked=self.keys_asked,
            requests=self.requests,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PutPlan:
    """What a put would keep of tokens ``[start_token, end_token)``, both aligned."""

    layout: KVCacheLayout = field(repr=False)
    start_token: int
    end_token: int
    num_prompt_tokens: int
    retention_interval: int | None
    #: Where the interval was set: ``argument``, a variable's name or ``default``; empty where nobody said.
    retention_origin: str
    #: Boundaries kept besides the interval's: the replay boundaries and the caller's, learned ones included.
    boundaries: tuple[int, ...]
    #: The same by where they come from: the prompt, the caller, and what this request's own lookup showed.
    replay_boundaries: tuple[int, ...]
    caller_boundaries: tuple[int, ...]
    junctions: tuple[int, ...]
    #: One boolean array a group, ``end_token // block_size`` long: the chunks to keep.
    store_masks: tuple[BoolArray, ...] = field(repr=False)
    #: Of those, the chunks that the request's own lookup showed to be in the store.
    known: tuple[BoolArray, ...] = field(repr=False)
    #: A group's kept and never offered chunks.
    reachable: tuple[Tally, ...]
    unreachable: tuple[Tally, ...]
    #: The request's own lookup, which ``known`` and ``junctions`` are of.
    hit: PrefixHit | None = field(default=None, repr=False)

    @property
    def reasons(self) -> tuple[ReasonArray, ...]:
        """One array of ``Reason`` a group, as long as its store mask: why each chunk is kept, or is not."""
        boundaries = {
            Reason.REPLAY: self.replay_boundaries,
            Reason.BOUNDARY: self.caller_boundaries,
            Reason.JUNCTION: self.junctions,
        }
        return chunk_reasons(self.layout, self.store_masks, self.start_token, self.retention_interval, boundaries)

    def explain(self) -> PutExplanation:
        """Why the put keeps what it keeps, group by group; ``str()`` of it is for people."""
        return PutExplanation(
            start_token=self.start_token,
            end_token=self.end_token,
            num_prompt_tokens=self.num_prompt_tokens,
            retention_interval=self.retention_interval,
            retention_origin=self.retention_origin,
            replay_boundaries=self.replay_boundaries,
            caller_boundaries=self.caller_boundaries,
            junctions=self.junctions,
            groups=count_reasons(self.layout, self.reasons, self.known),
        )


def plan_put(
    layout: KVCacheLayout,
    sequence_tokens: int,
    *,
    hit: PrefixHit | None = None,
    trust_hit: bool = True,
    num_tokens: int | None = None,
    num_prompt_tokens: int | None = None,
    start_token: int = 0,
    boundaries: Sequence[int] = (),
    retention_interval: int | None = None,
    retention_origin: str = "",
) -> PutPlan:
    """Decide which chunks of a sequence of ``sequence_tokens`` to keep.

    ``hit``: this request's own lookup. Where sparse groups held it below ``shared_length``, that position
    joins the boundaries: the prompt is about to be computed past it, and the next one that shares it hits
    there. ``trust_hit``: what the hit saw counts as present. ``retention_origin``: where the interval was set.

    Raises ``InvalidRequestError`` for counts that contradict each other.
    """
    total = sequence_tokens if num_tokens is None else token_count(num_tokens, "num_tokens")
    if total > sequence_tokens:
        raise InvalidRequestError(
            f"num_tokens is {total}, but the sequence has {sequence_tokens} tokens and so no hashes for the rest; "
            "extend() the sequence by the tokens whose cache really exists"
        )
    prompt = sequence_tokens if num_prompt_tokens is None else token_count(num_prompt_tokens, "num_prompt_tokens")
    start, end = layout.align(token_count(start_token, "start_token")), layout.align(total)
    if start > end:
        raise InvalidRequestError(f"start_token {start_token} lies behind the {total} tokens to put")
    positions = items_of(boundaries, "boundaries", InvalidRequestError)
    interval = check_retention_interval(layout, retention_interval)
    learned = learned_junctions(layout, hit.hit_length, hit.shared_length) if hit is not None else []
    return _plan(
        layout,
        range(start, end),
        prompt,
        (interval, retention_origin),
        replay=retained_boundaries(layout, prompt, ()),
        caller=retained_boundaries(layout, None, positions) if positions else (),
        junctions=retained_boundaries(layout, None, learned) if learned else (),
        hit=hit,
        trust_hit=trust_hit,
    )


def plan_stretch(
    layout: KVCacheLayout,
    start_token: int,
    end_token: int,
    *,
    replay_boundaries: Sequence[int] = (),
    junctions: Sequence[int] = (),
    retention_interval: int | None = None,
    retention_origin: str = "",
) -> PutPlan:
    """What to keep of tokens ``[start_token, end_token)``, both aligned, for all the prompts that pass through them.

    ``replay_boundaries`` and ``junctions`` of those prompts, as ``retained_boundaries`` gives them: ascending. Those
    behind ``end_token`` count too, since their windows may reach back. ``retention_interval`` is checked.
    """
    return _plan(
        layout,
        range(start_token, end_token),
        end_token,
        (retention_interval, retention_origin),
        replay=tuple(replay_boundaries),
        junctions=tuple(junctions),
    )


def _plan(
    layout: KVCacheLayout,
    tokens: range,
    num_prompt_tokens: int,
    retention: tuple[int | None, str],
    *,
    replay: tuple[int, ...],
    caller: tuple[int, ...] = (),
    junctions: tuple[int, ...] = (),
    hit: PrefixHit | None = None,
    trust_hit: bool = False,
) -> PutPlan:
    start, end = tokens.start, tokens.stop
    interval, origin = retention
    retained = tuple(sorted({*replay, *caller, *junctions}))
    masks = kept_chunks(layout, start, end, interval, retained)
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    return PutPlan(
        layout=layout,
        start_token=start,
        end_token=end,
        num_prompt_tokens=num_prompt_tokens,
        retention_interval=interval,
        retention_origin=origin,
        boundaries=retained,
        replay_boundaries=replay,
        caller_boundaries=caller,
        junctions=junctions,
        store_masks=read_only(masks),
        known=read_only(_known(masks, hit if trust_hit else None)),
        hit=hit,
        reachable=tuple(
            Tally.of(count, spec.page_size_bytes) for spec, count in zip(layout.groups, counts, strict=True)
        ),
        unreachable=tuple(
            Tally.of((end - start) // spec.block_size - count, spec.page_size_bytes)
            for spec, count in zip(layout.groups, counts, strict=True)
        ),
    )


def learned_junctions(layout: KVCacheLayout, hit_length: int, shared_length: int) -> list[int]:
    """The boundary that a lookup showed to be a junction, if it did.

    Only full attention shows that a prefix is shared: at the start of a run a chunked local group needs nothing,
    so it could serve boundaries of prompts that nobody has stored.
    """
    shared = shared_length > hit_length and any(isinstance(spec, FullAttentionSpec) for spec in layout.groups)
    return [shared_length] if shared else []


def _known(masks: tuple[BoolArray, ...], hit: PrefixHit | None) -> Iterator[BoolArray]:
    """Those chunks of ``masks`` that the hit saw."""
    if hit is None:
        yield from map(np.zeros_like, masks)
        return
    for mask, present in zip(masks, hit.present, strict=True):
        known = np.zeros_like(mask)
        both = min(len(mask), len(present))
        np.logical_and(mask[:both], present[:both], out=known[:both])
        yield known


def no_presence(layout: KVCacheLayout, num_tokens: int) -> tuple[BoolArray, ...]:
    """One all-False array a group over the whole aligned blocks of ``num_tokens``."""
    aligned = layout.align(num_tokens)
    return tuple(np.zeros(aligned // spec.block_size, dtype=np.bool_) for spec in layout.groups)
