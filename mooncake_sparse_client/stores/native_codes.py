"""The native store's error codes: each with a stable word, whether to try again, and what it means.

From the public ``types.h`` of mooncake-store 0.3.13. Nothing outside ``stores`` ever sees a code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ..errors import (
    StoreError,
    StoreFullError,
    StoreRejectedError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnknownCodeError,
)
from .base import Failure


class CodeMeaning(NamedTuple):
    """``kind`` is a ``Failure``'s word; ``text`` what happened and what to do."""

    kind: str
    retriable: bool
    text: str


OK: Final = 0
NO_AVAILABLE_HANDLE: Final = -200
INVALID_PARAMS: Final = -600
OBJECT_NOT_FOUND: Final = -704
OBJECT_HAS_LEASE: Final = -706
TRANSFER_FAIL: Final = -800

_REJECTED: Final = ("rejected", False)
_BUSY: Final = ("busy", True)

CODES: Final[Mapping[int, CodeMeaning]] = {
    # In mode "shared" also what a question gets that did not reach the master.
    -1: CodeMeaning("unavailable", True, "the native store failed within, or cannot reach its master"),
    -10: CodeMeaning(*_REJECTED, "a buffer is too small"),
    -100: CodeMeaning(*_REJECTED, "shard index out of range"),
    -101: CodeMeaning("unavailable", True, "the owner of the memory is not known to the master (any more)"),
    -102: CodeMeaning(*_REJECTED, "the segment exists already"),
    -103: CodeMeaning("unavailable", True, "the master does not know this client (any more)"),
    -200: CodeMeaning("full", True, "no room: no memory is mounted, or all of it is leased or pinned for now"),
    -300: CodeMeaning(*_REJECTED, "client and master are of different versions; install the same on both"),
    -400: CodeMeaning(*_REJECTED, "the key is not accepted"),
    -500: CodeMeaning("transfer", True, "writing failed"),
    -600: CodeMeaning(*_REJECTED, "invalid parameters, or the native client is not set up"),
    -601: CodeMeaning("busy", False, "another writer took the key over"),
    -700: CodeMeaning(*_REJECTED, "invalid write"),
    -701: CodeMeaning(*_REJECTED, "invalid read"),
    -702: CodeMeaning("transfer", True, "no complete replica"),
    -703: CodeMeaning(*_BUSY, "another writer has not finished, or was abandoned; wait up to 30 s"),
    -704: CodeMeaning("missing", False, "not in the store"),
    -705: CodeMeaning("busy", False, "already in the store"),
    -706: CodeMeaning(*_BUSY, "leased to a reader for now"),
    -707: CodeMeaning("lease_expired", True, "the read outlived its lease, its bytes cannot be trusted"),
    -708: CodeMeaning(*_BUSY, "being replicated"),
    -709: CodeMeaning(*_REJECTED, "no replication task"),
    -710: CodeMeaning("missing", False, "the replica is not there"),
    -711: CodeMeaning(*_REJECTED, "the replica exists already"),
    -712: CodeMeaning("missing", False, "the replica is gone"),
    -713: CodeMeaning("transfer", False, "the replica is not in this host's memory"),
    -714: CodeMeaning(*_BUSY, "the replica is in use"),
    -800: CodeMeaning("transfer", True, "the owner of the memory did not deliver; it may be gone"),
    -801: CodeMeaning("checksum", False, "the store's own checksum does not match"),
    -900: CodeMeaning("unavailable", True, "the master cannot be reached"),
    -901: CodeMeaning("timeout", True, "the master did not answer in time"),
    -1000: CodeMeaning("unavailable", True, "etcd failed"),
    -1001: CodeMeaning("unavailable", True, "etcd has no such key"),
    -1002: CodeMeaning("unavailable", True, "an etcd transaction failed"),
    -1003: CodeMeaning("unavailable", True, "an etcd call was cancelled"),
    -1004: CodeMeaning("unavailable", True, "the operation log lacks an entry"),
    -1005: CodeMeaning("unavailable", True, "a Kubernetes lease failed"),
    -1006: CodeMeaning("unavailable", True, "no Kubernetes lease"),
    -1007: CodeMeaning("unavailable", True, "the operation log is not caught up"),
    -1010: CodeMeaning("unavailable", True, "not available in the store's present state"),
    -1011: CodeMeaning(*_REJECTED, "not available in the store's mode"),
    -1012: CodeMeaning(*_REJECTED, "not supported by this store"),
    -1100: CodeMeaning("missing", False, "the file of the disk tier is not there"),
    -1101: CodeMeaning("transfer", True, "a file of the disk tier cannot be opened"),
    -1102: CodeMeaning("transfer", True, "a file of the disk tier cannot be read"),
    -1103: CodeMeaning("transfer", True, "a file of the disk tier cannot be written"),
    -1104: CodeMeaning(*_REJECTED, "invalid buffer for the disk tier"),
    -1105: CodeMeaning(*_BUSY, "a file of the disk tier is locked"),
    -1106: CodeMeaning(*_REJECTED, "invalid file handle in the disk tier"),
    -1200: CodeMeaning("missing", False, "the offload bucket is not there"),
    -1201: CodeMeaning(*_REJECTED, "the offload bucket exists already"),
    -1202: CodeMeaning(*_REJECTED, "too many keys for an offload bucket"),
    -1203: CodeMeaning(*_REJECTED, "too many keys to offload"),
    -1300: CodeMeaning(*_REJECTED, "offloading is off"),
    -1301: CodeMeaning("busy", False, "offloading is under way"),
    -1400: CodeMeaning(*_REJECTED, "no such task"),
    -1401: CodeMeaning(*_BUSY, "too many tasks are waiting"),
    -1402: CodeMeaning(*_REJECTED, "no such job"),
    -1500: CodeMeaning(*_REJECTED, "the master's state cannot be serialized"),
    -1501: CodeMeaning(*_REJECTED, "serializing the master's state failed"),
    -1502: CodeMeaning(*_REJECTED, "reading the master's state failed"),
    -1503: CodeMeaning(*_REJECTED, "keeping the master's state failed"),
    -1600: CodeMeaning("timeout", True, "the distributed file system did not answer in time"),
    -1601: CodeMeaning("unavailable", True, "the distributed file system is not available"),
    -1602: CodeMeaning("full", False, "the distributed file system's quota is used up"),
    -1603: CodeMeaning(*_REJECTED, "the distributed file system denies access"),
    -1604: CodeMeaning("transfer", False, "a stale handle of the distributed file system"),
    -1605: CodeMeaning("transfer", False, "a partial write to the distributed file system"),
    -1700: CodeMeaning("full", True, "the tenant's quota is used up"),
    -1701: CodeMeaning(*_REJECTED, "the tenant is not registered with the master"),
    -1702: CodeMeaning(*_REJECTED, "the tenant still has data"),
}


def meaning_of(code: int) -> CodeMeaning:
    """What a code says. One that is not in the table is ``unknown`` and carries its number: a positive one, too, where
    0 or an error is expected."""
    return CODES.get(code) or CodeMeaning("unknown", False, f"the native store's code {code}, unknown to this version")


def failure_of(code: int, what: str) -> Failure:
    """A code as one key's failure."""
    meaning = meaning_of(code)
    return Failure(meaning.kind, meaning.retriable, f"{what}: {meaning.text} ({code})")


#: By kind, what a call raises that may work later; ``StoreUnavailableError`` for any other kind.
_RETRIABLE: Final[Mapping[str, type[StoreError]]] = {"timeout": StoreTimeoutError, "full": StoreFullError}


def error_of(code: int, what: str) -> StoreError:
    """A code as the exception of a call that failed as a whole; as ``retriable`` as the code."""
    meaning = meaning_of(code)
    message = f"{what}: {meaning.text} ({code})"
    if meaning.kind == "unknown":
        return UnknownCodeError(message, code=code)
    if not meaning.retriable:
        return StoreRejectedError(message)
    return _RETRIABLE.get(meaning.kind, StoreUnavailableError)(message)


#: What says that the store as a whole is out of reach, which is no single key's trouble.
_WHOLE_CALL: Final = frozenset({-103, -900, -901, *range(-1010, -999)}) & CODES.keys()


def is_no_answer(code: int) -> bool:
    """Whether an existence question was not answered by this. A replica that is busy or out of reach is not there."""
    return code not in (0, 1) and meaning_of(code).kind not in ("missing", "busy", "transfer")


def fails_whole_call(code: int) -> bool:
    """Whether the code means that no key of the batch could be served."""
    return code in _WHOLE_CALL
