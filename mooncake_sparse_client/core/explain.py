"""Why a lookup found what it found, and why a put keeps what it keeps: as values, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Final

import numpy as np

from .layout import GroupSpec, KVCacheLayout
from .masks import BoolArray, needed_chunks
from .prefix import PrefixReport
from .reasons import Reason, ReasonArray
from .tables import table_lines
from .tally import NOTHING, Tally


@dataclass(frozen=True, slots=True)
class GroupLookup:
    """What a lookup learned of one group. Lengths in tokens."""

    group: int
    name: str
    kind: str
    block_size: int
    #: The longest prefix that the group alone could serve, as far as it was asked.
    length: int
    #: How far it was asked: no further than what the groups before it allow.
    asked_length: int
    chunks_asked: int
    #: The first chunk that was asked for and is missing, of those that the boundary after the hit needs where the
    #: group limits, else of those that the one after ``length`` does. None where none is: the group could serve all
    #: that it was asked for, or the request does not reach the end of its draft margin.
    first_missing: int | None
    #: Whether the group held the hit back.
    limits: bool


@dataclass(frozen=True, slots=True)
class LookupExplanation:
    """Why a hit is as long as it is. ``str()`` of it is for people, ``as_json()`` for programs. Lengths in tokens."""

    hit_length: int
    #: What the dense groups (full, chunked local) alone could serve.
    shared_length: int
    #: The longest hit that the request may have at all.
    cap: int
    num_tokens: int
    #: The prefix that the engine holds itself.
    local_tokens: int
    keys_asked: int
    #: Questions that were put one after another.
    requests: int
    #: The groups that held the hit back; empty when it is as long as it may be, or when nothing was asked.
    limited_by: tuple[int, ...]
    groups: tuple[GroupLookup, ...]

    def as_json(self) -> dict[str, object]:
        """The same names, as values that ``json.dumps`` takes."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    def __str__(self) -> str:
        return "\n".join(
            [
                f"hit {self.hit_length} of at most {self.cap} tokens; {self._why()}",
                f"tokens: {self.num_tokens}; held by the engine: {self.local_tokens}; "
                f"keys asked: {self.keys_asked:,}; requests: {self.requests}",
                *(
                    [f"the dense groups (full, chunked local) alone could serve: {self.shared_length}"]
                    if self.shared_length > self.hit_length
                    else []
                ),
                "",
                *table_lines(
                    ["group", "block", "could serve", "asked up to", "chunks asked", "first missing", "limits"],
                    [
                        [
                            _label(group),
                            str(group.block_size),
                            str(group.length),
                            str(group.asked_length),
                            f"{group.chunks_asked:,}",
                            "-" if group.first_missing is None else str(group.first_missing),
                            "yes" if group.limits else "",
                        ]
                        for group in self.groups
                    ],
                ),
            ]
        )

    def _why(self) -> str:
        if self.hit_length == self.cap:
            return "the request may not hit more"
        limits = [_limit(self.groups[number]) for number in self.limited_by]
        return "; ".join(limits) or "no group was asked for more"


@dataclass(frozen=True, slots=True)
class GroupPut:
    """What a put keeps of one group, and why. Each chunk counts once; the reasons are those of ``Reason``."""

    group: int
    name: str
    kind: str
    block_size: int
    #: Bytes of one chunk; None where the layout does not say, and bytes are 0 then.
    page_size_bytes: int | None
    dense: Tally
    segment: Tally
    replay: Tally
    boundary: Tally
    junction: Tally
    #: Never offered to the store.
    skipped: Tally
    #: Of the kept chunks, those that the request's own lookup saw in the store.
    known: Tally

    @property
    def kept(self) -> Tally:
        return sum((self.segment, self.replay, self.boundary, self.junction), self.dense)


@dataclass(frozen=True, slots=True)
class PutExplanation:
    """Why a put keeps what it keeps. ``str()`` of it is for people, ``as_json()`` for programs. Lengths in tokens."""

    start_token: int
    end_token: int
    num_prompt_tokens: int
    #: None: every boundary is retained; 0: none but those below.
    retention_interval: int | None
    #: Where the interval was set: ``argument``, a variable's name or ``default``; empty where nobody said.
    retention_origin: str
    #: The boundaries that are retained besides the interval's: the prompt's, the caller's and the learned ones.
    replay_boundaries: tuple[int, ...]
    caller_boundaries: tuple[int, ...]
    junctions: tuple[int, ...]
    groups: tuple[GroupPut, ...]

    @property
    def kept(self) -> Tally:
        """All groups' kept chunks."""
        return sum((group.kept for group in self.groups), NOTHING)

    @property
    def skipped(self) -> Tally:
        """All groups' chunks that are never offered."""
        return sum((group.skipped for group in self.groups), NOTHING)

    def as_json(self) -> dict[str, object]:
        """The same names, as values that ``json.dumps`` takes."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    def __str__(self) -> str:
        kept, every = self.kept, self.kept + self.skipped
        # Reasons that keep nothing anywhere would only make the table wide.
        columns = [name for name in _COUNTED if any(getattr(group, name).chunks for group in self.groups)]
        return "\n".join(
            [
                f"keeps {kept.chunks:,} of {every.chunks:,} chunks of tokens {self.start_token} to {self.end_token}",
                f"retention interval: {self._interval()}",
                f"replay boundaries: {_listed(self.replay_boundaries)} (a prompt of {self.num_prompt_tokens} tokens)",
                f"caller's boundaries: {_listed(self.caller_boundaries)}",
                f"learned junctions: {_listed(self.junctions)}",
                "",
                *table_lines(
                    ["group", "block", *columns, "bytes kept", "bytes skipped"],
                    [[_label(group), str(group.block_size), *_counts(group, columns)] for group in self.groups],
                ),
            ]
        )

    def _interval(self) -> str:
        origin = f" (origin: {self.retention_origin})" if self.retention_origin else ""
        match self.retention_interval:
            case None:
                return f"none, every boundary is retained{origin}"
            case 0:
                return f"0, no boundary is retained but those below{origin}"
            case interval:
                return f"{interval} tokens, every multiple is retained{origin}"


def explain_lookup(
    layout: KVCacheLayout,
    report: PrefixReport,
    asked: Sequence[BoolArray],
    present: Sequence[BoolArray],
    *,
    num_tokens: int,
    local_tokens: int,
    keys_asked: int,
    requests: int,
) -> LookupExplanation:
    """``report`` and the chunks it is of, told group by group. ``asked``, ``present``: one boolean array a group."""
    return LookupExplanation(
        hit_length=report.hit_length,
        shared_length=report.shared_length,
        cap=report.cap,
        num_tokens=num_tokens,
        local_tokens=local_tokens,
        keys_asked=keys_asked,
        requests=requests,
        limited_by=report.limited_by,
        groups=tuple(
            GroupLookup(
                group=number,
                name=spec.name,
                kind=spec.kind,
                block_size=spec.block_size,
                length=length,
                asked_length=most,
                chunks_asked=int(np.count_nonzero(asked[number])),
                first_missing=_first_missing(spec, before + layout.alignment, most, asked[number] & ~present[number]),
                limits=limits,
            )
            for number, (spec, length, most) in enumerate(
                zip(layout.groups, report.group_lengths, report.asked_lengths, strict=True)
            )
            for limits in (number in report.limited_by,)
            for before in (report.hit_length if limits else length,)
        ),
    )


def _first_missing(spec: GroupSpec, boundary: int, most: int, missing: BoolArray) -> int | None:
    """The first missing chunk that ``boundary`` needs, if the group was asked so far."""
    if boundary > most:
        return None
    needed = needed_chunks(spec, boundary)
    found = np.flatnonzero(missing[needed.start : needed.stop])
    return needed.start + int(found[0]) if len(found) else None


def count_reasons(
    layout: KVCacheLayout, reasons: Sequence[ReasonArray], known: Sequence[BoolArray]
) -> tuple[GroupPut, ...]:
    """The chunks of ``reasons`` (see ``chunk_reasons``) and the ``known`` ones, counted group by group."""
    return tuple(
        _count(number, spec, np.bincount(codes, minlength=len(Reason)).tolist(), int(np.count_nonzero(seen)))
        for number, (spec, codes, seen) in enumerate(zip(layout.groups, reasons, known, strict=True))
    )


def _count(number: int, spec: GroupSpec, counts: Sequence[int], known: int) -> GroupPut:
    page = spec.page_size_bytes
    return GroupPut(
        group=number,
        name=spec.name,
        kind=spec.kind,
        block_size=spec.block_size,
        page_size_bytes=page,
        dense=Tally.of(counts[Reason.DENSE], page),
        segment=Tally.of(counts[Reason.SEGMENT], page),
        replay=Tally.of(counts[Reason.REPLAY], page),
        boundary=Tally.of(counts[Reason.BOUNDARY], page),
        junction=Tally.of(counts[Reason.JUNCTION], page),
        skipped=Tally.of(counts[Reason.SKIPPED], page),
        known=Tally.of(known, page),
    )


def _limit(group: GroupLookup) -> str:
    who = f"group {group.group} ({group.name or group.kind}) limits"
    if group.first_missing is None:
        return f"{who}: the request ends before its next draft margin"
    return f"{who}: chunk {group.first_missing} is missing"


_COUNTED: Final = ("dense", "segment", "replay", "boundary", "junction", "skipped", "known")


def _counts(group: GroupPut, columns: Sequence[str]) -> list[str]:
    chunks = [f"{getattr(group, name).chunks:,}" for name in columns]
    if group.page_size_bytes is None:
        return [*chunks, "-", "-"]
    return [*chunks, f"{group.kept.bytes:,}", f"{group.skipped.bytes:,}"]


def _label(group: GroupLookup | GroupPut) -> str:
    return f"{group.group} {group.name} ({group.kind})" if group.name else f"{group.group} {group.kind}"


def _listed(boundaries: Sequence[int]) -> str:
    return ", ".join(map(str, boundaries)) or "none"


def _plain(value: object) -> object:
    """Values with fields as mappings, tuples as lists."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
