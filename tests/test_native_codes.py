"""The native store's codes: what each is to a caller, and that no code is taken for another."""

from __future__ import annotations

import copy
import pickle

import pytest

from mooncake_sparse_client.errors import (
    ConnectError,
    SparseStoreError,
    StoreError,
    StoreFullError,
    StoreRejectedError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnknownCodeError,
)
from mooncake_sparse_client.stores import native_codes as codes
from mooncake_sparse_client.waiting import copied

_UNAVAILABLE = StoreUnavailableError
_REJECTED = StoreRejectedError
#: Code, kind, whether to try again, and the error of a call that fails as a whole.
TABLE: list[tuple[int, str, bool, type[StoreError]]] = [
    (-1, "unavailable", True, _UNAVAILABLE),
    (-10, "rejected", False, _REJECTED),
    (-100, "rejected", False, _REJECTED),
    (-101, "unavailable", True, _UNAVAILABLE),
    (-102, "rejected", False, _REJECTED),
    (-103, "unavailable", True, _UNAVAILABLE),
    (-200, "full", True, StoreFullError),
    (-300, "rejected", False, _REJECTED),
    (-400, "rejected", False, _REJECTED),
    (-500, "transfer", True, _UNAVAILABLE),
    (-600, "rejected", False, _REJECTED),
    (-601, "busy", False, _REJECTED),
    (-700, "rejected", False, _REJECTED),
    (-701, "rejected", False, _REJECTED),
    (-702, "transfer", True, _UNAVAILABLE),
    (-703, "busy", True, _UNAVAILABLE),
    (-704, "missing", False, _REJECTED),
    (-705, "busy", False, _REJECTED),
    (-706, "busy", True, _UNAVAILABLE),
    (-707, "lease_expired", True, _UNAVAILABLE),
    (-708, "busy", True, _UNAVAILABLE),
    (-709, "rejected", False, _REJECTED),
    (-710, "missing", False, _REJECTED),
    (-711, "rejected", False, _REJECTED),
    (-712, "missing", False, _REJECTED),
    (-713, "transfer", False, _REJECTED),
    (-714, "busy", True, _UNAVAILABLE),
    (-800, "transfer", True, _UNAVAILABLE),
    (-801, "checksum", False, _REJECTED),
    (-900, "unavailable", True, _UNAVAILABLE),
    (-901, "timeout", True, StoreTimeoutError),
    *((code, "unavailable", True, _UNAVAILABLE) for code in range(-1000, -1008, -1)),
    (-1010, "unavailable", True, _UNAVAILABLE),
    (-1011, "rejected", False, _REJECTED),
    (-1012, "rejected", False, _REJECTED),
    (-1100, "missing", False, _REJECTED),
    (-1101, "transfer", True, _UNAVAILABLE),
    (-1102, "transfer", True, _UNAVAILABLE),
    (-1103, "transfer", True, _UNAVAILABLE),
    (-1104, "rejected", False, _REJECTED),
    (-1105, "busy", True, _UNAVAILABLE),
    (-1106, "rejected", False, _REJECTED),
    (-1200, "missing", False, _REJECTED),
    (-1201, "rejected", False, _REJECTED),
    (-1202, "rejected", False, _REJECTED),
    (-1203, "rejected", False, _REJECTED),
    (-1300, "rejected", False, _REJECTED),
    (-1301, "busy", False, _REJECTED),
    (-1400, "rejected", False, _REJECTED),
    (-1401, "busy", True, _UNAVAILABLE),
    (-1402, "rejected", False, _REJECTED),
    (-1500, "rejected", False, _REJECTED),
    (-1501, "rejected", False, _REJECTED),
    (-1502, "rejected", False, _REJECTED),
    (-1503, "rejected", False, _REJECTED),
    (-1600, "timeout", True, StoreTimeoutError),
    (-1601, "unavailable", True, _UNAVAILABLE),
    (-1602, "full", False, _REJECTED),
    (-1603, "rejected", False, _REJECTED),
    (-1604, "transfer", False, _REJECTED),
    (-1605, "transfer", False, _REJECTED),
    (-1700, "full", True, StoreFullError),
    (-1701, "rejected", False, _REJECTED),
    (-1702, "rejected", False, _REJECTED),
]
UNKNOWN = [-987654, -2, -1008, 1 << 31, 7, 2]
#: Of an existence question: a replica that cannot be had is not there.
NOT_THERE = {"missing", "busy", "transfer"}


def test_the_table_has_every_code() -> None:
    assert [code for code, *_ in TABLE] == sorted(codes.CODES, reverse=True)


@pytest.mark.parametrize(("code", "kind", "retriable", "error"), TABLE)
def test_each_code_has_its_kind_and_class(code: int, kind: str, retriable: bool, error: type[StoreError]) -> None:
    failure = codes.failure_of(code, "reading 'a'")
    assert (failure.kind, failure.retriable) == (kind, retriable)
    assert failure.detail.startswith("reading 'a': ")
    assert str(code) in failure.detail
    raised = codes.error_of(code, "asking")
    assert type(raised) is error
    assert raised.retriable is retriable
    assert str(code) in str(raised)
    assert codes.is_no_answer(code) is (kind not in NOT_THERE)


@pytest.mark.parametrize("code", UNKNOWN)
def test_a_code_that_nobody_knows_is_told_with_its_number(code: int) -> None:
    failure = codes.failure_of(code, "reading 'a'")
    assert (failure.kind, failure.retriable) == ("unknown", False)
    assert str(code) in failure.detail
    raised = codes.error_of(code, "asking")
    assert isinstance(raised, UnknownCodeError)
    assert raised.code == code
    assert str(code) in str(raised)
    assert codes.is_no_answer(code)
    assert not codes.fails_whole_call(code)


def test_yes_and_no_are_answers() -> None:
    assert not codes.is_no_answer(0)
    assert not codes.is_no_answer(1)


def test_what_fails_a_whole_call_is_known_and_no_keys_own_trouble() -> None:
    whole = [code for code in range(-2000, 2000) if codes.fails_whole_call(code)]
    assert whole == [-1010, *range(-1007, -999), -901, -900, -103]


@pytest.mark.parametrize("error", [UnknownCodeError("what", code=-5), ConnectError("what", step="resolve")])
def test_an_error_is_the_same_when_copied_or_sent(error: SparseStoreError) -> None:
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error)), copied(error)):  # noqa: S301 - our own
        assert type(other) is type(error)
        assert str(other) == "what"
        assert vars(other) == vars(error) != {}
