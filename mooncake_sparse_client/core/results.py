"""What the client's calls answer, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .tally import NOTHING, Tally


class ChunkFailure(NamedTuple):
    """One chunk that could not be written or read, and why, in a stable word.

    Reads: ``missing``, ``length``, ``lease_expired``, ``transfer``, and for framed values ``header``,
    ``version``, ``fingerprint``, ``group``, ``name`` (an intact value of another chunk) and ``checksum``.
    Writes: ``full``, ``transfer``, ``busy``, ``unconfirmed``. Either: ``unavailable``, ``timeout``,
    ``rejected``, ``unknown``.
    """

    group: int
    chunk: int
    reason: str


@dataclass(frozen=True, slots=True)
class PutResult:
    """What a put did. ``end_token`` is the ``start_token`` of the same request's next step."""

    end_token: int
    #: Written by this call.
    written: Tally = NOTHING
    #: Already in the store, or written by another call meanwhile.
    existing: Tally = NOTHING
    #: Needed by no retained boundary: never offered to the store.
    unreachable: Tally = NOTHING
    #: The source had no bytes for them (an engine frees old window blocks); no failure.
    unavailable: Tally = NOTHING
    #: Not stored; see ``failures``.
    failed: Tally = NOTHING
    failures: tuple[ChunkFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class GetResult:
    """What a get restored: the first ``hit_length`` tokens. What lies beyond it in a sink is undefined."""

    hit_length: int
    #: Chunks that were expected and did not arrive intact; the hit was shortened to do without them.
    failures: tuple[ChunkFailure, ...] = ()
    #: Without a sink, the bytes of every chunk of the load mask at ``hit_length``, by ``(group, chunk)``; else empty.
    chunks: Mapping[tuple[int, int], memoryview] = field(default_factory=dict, repr=False)
    #: Chunks that were read and belong to the hit.
    loaded: Tally = NOTHING


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What became of the chunks that a plan keeps, by reading each of them back."""

    #: In the store, with the bytes that were put.
    intact: Tally = NOTHING
    missing: Tally = NOTHING
    #: There, and not what was put: counted as absent from now on, where nobody else writes under these keys.
    damaged: Tally = NOTHING
    #: Not to be read for now: the owner of their memory does not deliver them.
    unread: Tally = NOTHING
    failures: tuple[ChunkFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class RemoveResult:
    """How many chunks went, were not there, or are leased to a reader for now."""

    removed: int = 0
    absent: int = 0
    leased: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the store answers now. ``kind`` is the error's when it does not."""

    ok: bool
    kind: str = ""
    detail: str = ""
