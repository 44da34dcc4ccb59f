"""What a put, a lookup or a get will do, as values; the client carries them out.

Everything is decided here from counts, masks and what is known to be present. Chunk indices are absolute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..checks import items_of
from ..errors import InvalidRequestError
from .keys import Rank
from .layout import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheLayout, MambaSpec, SlidingWindowSpec
from .masks import (
    BoolArray,
    load_mask,
    needed_chunks,
    periodic_mask,
    read_only,
    retained_boundaries,
    store_mask,
    token_count,
)
from .prefix import PrefixReport, candidate_boundaries, longest, usable_boundaries


@dataclass(frozen=True, slots=True)
class Tally:
    """A number of chunks, and their payload bytes."""

    chunks: int = 0
    bytes: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.chunks + other.chunks, self.bytes + other.bytes)


NOTHING = Tally()


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHit:
    """The answer of a lookup. A miss is a hit of 0 tokens (or of ``local_tokens``)."""

    #: Leading tokens whose cache can be reused.
    hit_length: int
    #: What the dense groups alone could serve; above ``hit_length`` where sparse groups held the hit back.
    shared_length: int
    #: One boolean array a group: the chunks that ``get`` reads.
    load_masks: tuple[BoolArray, ...] = field(repr=False)
    #: Each group's own longest prefix, and which group limited the hit.
    report: PrefixReport
    #: Tokens of the sequence at the time of the lookup.
    num_tokens: int
    #: The prefix that the engine said it holds itself, rounded down to the alignment.
    local_tokens: int
    #: One boolean array a group: the chunks that the lookup saw in the store. What was not asked is False.
    present: tuple[BoolArray, ...] = field(repr=False)
    #: The sequence's block hashes at the time: what the hit is of.
    block_hashes: tuple[bytes, ...] = field(repr=False)
    #: Which cache was asked, of what shape, under which ranks' keys.
    cache_id: str
    fingerprint: str
    key_ranks: tuple[Rank, ...]
    #: ``time.monotonic()`` of the question, in seconds.
    asked_at: float
    #: Keys that the lookup asked for.
    keys_asked: int


@dataclass(frozen=True, slots=True, eq=False)
class PutPlan:
    """What a put would keep of tokens ``[start_token, end_token)``, both aligned."""

    start_token: int
    end_token: int
    retention_interval: int | None
    #: Boundaries kept besides the interval's: the replay boundaries and the caller's, learned ones included.
    boundaries: tuple[int, ...]
    #: One boolean array a group, ``end_token // block_size`` long: the chunks to keep.
    store_masks: tuple[BoolArray, ...] = field(repr=False)
    #: Of those, the chunks that the request's own lookup showed to be in the store.
    known: tuple[BoolArray, ...] = field(repr=False)
    #: A group's kept and never offered chunks.
    reachable: tuple[Tally, ...]
    unreachable: tuple[Tally, ...]

    def kept(self) -> Iterator[list[tuple[int, bool]]]:
        """For each group, ``(chunk, known)`` of every chunk to keep."""
        for mask, known in zip(self.store_masks, self.known, strict=True):
            chunks = np.flatnonzero(mask)
            yield list(zip(chunks.tolist(), known[chunks].tolist(), strict=True))


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
) -> PutPlan:
    """Decide which chunks of a sequence of ``sequence_tokens`` to keep.

    ``hit``: this request's own lookup. Where sparse groups held it below ``shared_length``, that position
    joins the boundaries: the prompt is about to be computed past it, and the next one that shares it hits
    there. ``trust_hit``: what the hit saw counts as present.

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
    if hit is not None:
        positions += learned_junctions(layout, hit.hit_length, hit.shared_length)
    masks = store_mask(
        layout,
        end,
        start_token=start,
        retention_interval=retention_interval,
        num_prompt_tokens=prompt,
        boundaries=positions,
    )
    return PutPlan(
        start_token=start,
        end_token=end,
        retention_interval=retention_interval,
        boundaries=retained_boundaries(layout, prompt, positions),
        store_masks=read_only(masks),
        known=read_only(_known(masks, hit if trust_hit else None)),
        reachable=tuple(_tally(layout, group, int(mask.sum())) for group, mask in enumerate(masks)),
        unreachable=tuple(
            _tally(layout, group, (end - start) // layout.groups[group].block_size - int(mask.sum()))
            for group, mask in enumerate(masks)
        ),
    )


def learned_junctions(layout: KVCacheLayout, hit_length: int, shared_length: int) -> list[int]:
    """The boundary that a lookup showed to be a junction, if it did.

    Only full attention shows that a prefix is shared: at the start of a run a chunked local group needs nothing,
    so it could serve boundaries of prompts that nobody has stored.
    """
    shared = shared_length > hit_length and any(isinstance(spec, FullAttentionSpec) for spec in layout.groups)
    return [shared_length] if shared else []


def _known(masks: tuple[BoolArray, ...], hit: PrefixHit | None) -> tuple[BoolArray, ...]:
    known = []
    for group, mask in enumerate(masks):
        seen = np.zeros_like(mask)
        if hit is not None:
            present = hit.present[group][: len(mask)]
            seen[: len(present)] = present
        known.append(seen & mask)
    return tuple(known)


def _tally(layout: KVCacheLayout, group: int, chunks: int) -> Tally:
    return Tally(chunks, chunks * (layout.groups[group].page_size_bytes or 0))


def no_presence(layout: KVCacheLayout, num_tokens: int) -> tuple[BoolArray, ...]:
    """One all-False array a group over the whole aligned blocks of ``num_tokens``."""
    aligned = layout.align(num_tokens)
    return tuple(np.zeros(aligned // spec.block_size, dtype=np.bool_) for spec in layout.groups)


def lookup_stages(layout: KVCacheLayout) -> list[list[int]]:
    """The groups in the order in which a lookup asks them: those that shorten a prefix for the fewest keys
    first, so that a miss is known before the others are asked."""
    kinds = ((FullAttentionSpec,), (ChunkedLocalAttentionSpec,), (SlidingWindowSpec, MambaSpec))
    stages = [[number for number, spec in enumerate(layout.groups) if isinstance(spec, kind)] for kind in kinds]
    return [stage for stage in stages if stage]


def lookup_questions(
    layout: KVCacheLayout, num_tokens: int, groups: Sequence[int], *, upto: int, local_tokens: int
) -> tuple[BoolArray, ...]:
    """The chunks of ``groups`` that some boundary above ``local_tokens`` and at or below ``upto`` needs."""
    questions = no_presence(layout, num_tokens)
    if upto <= local_tokens:
        return questions
    for number in groups:
        spec, mask = layout.groups[number], questions[number]
        asked = slice(local_tokens // spec.block_size, needed_chunks(spec, upto).stop)
        mask[asked] = periodic_mask(layout, spec, len(mask), None)[asked]
    return questions


def needed_again(layout: KVCacheLayout, hit: PrefixHit) -> tuple[BoolArray, ...]:
    """The chunks to ask for again when a hit has grown old: what it needs, margin included, less what the
    engine holds."""
    questions = no_presence(layout, hit.num_tokens)
    for spec, mask in zip(layout.groups, questions, strict=True):
        needed = needed_chunks(spec, hit.hit_length)
        mask[max(needed.start, hit.local_tokens // spec.block_size) : needed.stop] = True
    return questions


@dataclass(frozen=True, slots=True, eq=False)
class GetPlan:
    """The next step of a get: the prefix aimed at, and the chunks that it still lacks."""

    hit_length: int
    #: One boolean array a group: what the prefix needs, and what of it has not arrived.
    load_masks: tuple[BoolArray, ...] = field(repr=False)
    missing: tuple[BoolArray, ...] = field(repr=False)

    @property
    def complete(self) -> bool:
        return not any(mask.any() for mask in self.missing)


def plan_get(
    layout: KVCacheLayout,
    num_tokens: int,
    present: Sequence[BoolArray],
    arrived: Sequence[BoolArray],
    *,
    local_tokens: int,
    room: Sequence[BoolArray] | None = None,
) -> GetPlan:
    """Aim at the longest prefix that ``present`` allows; what has arrived is not read again.

    ``room``: the chunks that there is a place for; None for all.
    """
    usable = usable_boundaries(layout, num_tokens, present, local_tokens=local_tokens)
    if room is not None:
        usable &= usable_boundaries(layout, num_tokens, room, local_tokens=local_tokens, margin=False)
    length = longest(candidate_boundaries(layout, num_tokens), usable)
    masks = load_mask(layout, length, local_tokens=local_tokens)
    missing = tuple(mask & ~have[: len(mask)] for mask, have in zip(masks, arrived, strict=True))
    return GetPlan(length, masks, missing)


def longest_arrived_prefix(
    layout: KVCacheLayout,
    num_tokens: int,
    present: Sequence[BoolArray],
    arrived: Sequence[BoolArray],
    *,
    local_tokens: int,
) -> int:
    """The longest usable prefix whose load mask has wholly arrived, else what the engine holds itself."""
    usable = usable_boundaries(layout, num_tokens, present, local_tokens=local_tokens)
    loaded = usable_boundaries(layout, num_tokens, arrived, local_tokens=local_tokens, margin=False)
    return longest(candidate_boundaries(layout, num_tokens), usable & loaded)


def cut_batches(sizes: Sequence[int] | NDArray[np.int64], *, max_bytes: int, max_count: int) -> list[range]:
    """Consecutive runs of items of at most ``max_bytes`` and ``max_count``; an item that is larger than
    ``max_bytes`` goes alone."""
    ends = np.cumsum(sizes, dtype=np.int64)
    batches: list[range] = []
    first = before = 0
    while first < len(ends):
        fits = int(np.searchsorted(ends, before + max_bytes, side="right"))
        stop = max(min(fits, first + max_count), first + 1)
        batches.append(range(first, stop))
        first, before = stop, int(ends[stop - 1])
    return batches
