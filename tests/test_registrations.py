"""Registrations: what the native library must be told, against a model that knows each byte."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_sparse_client.errors import InvalidRequestError
from mooncake_sparse_client.stores.registrations import Registrations

#: No deadline: a loaded machine is no failure. The same examples every time.
quick = settings(max_examples=300, deadline=None, derandomize=True)


class Library:
    """The native library, as strict as it is: no overlaps, exact bases, and it counts what it is asked."""

    def __init__(self) -> None:
        self.pieces: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        assert nbytes > 0
        for begin, length in self.pieces.items():
            assert address + nbytes <= begin or begin + length <= address, "overlaps what is registered"
        self.pieces[address] = nbytes

    def unregister(self, address: int, nbytes: int) -> None:
        assert self.pieces.pop(address) == nbytes

    def knows(self, byte: int) -> bool:
        return any(begin <= byte < begin + nbytes for begin, nbytes in self.pieces.items())


def bytes_of(piece: tuple[int, int]) -> set[int]:
    return set(range(piece[0], sum(piece)))


ranges = st.tuples(st.integers(1, 40), st.integers(1, 15))
# A range is one to add, a fraction one to remove: which of those that were added. Then whether adding it fails.
moves = st.lists(st.tuples(ranges | st.floats(0, 0.999), st.booleans()), max_size=40)


@quick
@given(moves=moves, probes=st.lists(ranges, min_size=5, max_size=5))
def test_the_library_knows_what_is_needed_and_no_piece_more(
    moves: list[tuple[tuple[int, int] | float, bool]], probes: list[tuple[int, int]]
) -> None:
    known, library = Registrations(), Library()
    added: Counter[tuple[int, int]] = Counter()
    for move, fails in moves:
        if isinstance(move, tuple):
            pieces = known.add(*move)
            new = bytes_of(move) - {byte for byte in range(1, 60) if library.knows(byte)}
            assert sorted(byte for piece in pieces for byte in bytes_of(piece)) == sorted(new)
            assert all(after[0] > sum(before) for before, after in pairwise(pieces))  # as few
            if fails:
                before = dict(library.pieces)
                assert known.remove(*move) == pieces  # whatever had been registered of them
                assert known.pieces() == sorted(before.items())
                continue
            for piece in pieces:
                library.register(*piece)
            added[move] += 1
        elif added:
            chosen = sorted(added)[int(move * len(added))]
            for piece in known.remove(*chosen):
                library.unregister(*piece)
            added[chosen] -= 1
            added += Counter()
        assert known.pieces() == sorted(library.pieces.items())
        needed = {byte for one in added for byte in bytes_of(one)}
        assert all(library.knows(byte) for byte in needed)
        assert all(bytes_of(piece) & needed for piece in known.pieces())
        for probe in probes:
            assert known.covers(*probe) == all(library.knows(byte) for byte in bytes_of(probe))
    for one in list(added.elements()):
        for piece in known.remove(*one):
            library.unregister(*piece)
    assert (known.pieces(), library.pieces) == ([], {})


def test_an_example_by_hand() -> None:
    known = Registrations()
    assert known.add(100, 50) == [(100, 50)]
    assert known.add(300, 50) == [(300, 50)]
    assert known.add(120, 10) == []
    assert known.add(90, 300) == [(90, 10), (150, 150), (350, 40)]
    assert known.pieces() == [(90, 10), (100, 50), (150, 150), (300, 50), (350, 40)]
    assert known.covers(95, 290)
    assert known.remove(100, 50) == []  # both others still touch it
    assert known.remove(90, 300) == [(90, 10), (150, 150), (350, 40)]
    assert known.pieces() == [(100, 50), (300, 50)]
    assert known.covers(149, 1)  # a piece stays whole while a part of it is needed
    assert known.remove(120, 10) == [(100, 50)]
    assert known.remove(300, 50) == [(300, 50)]


def test_what_was_added_twice_is_removed_twice() -> None:
    known = Registrations()
    assert (known.add(10, 5), known.add(10, 5)) == ([(10, 5)], [])
    assert known.remove(10, 5) == []
    assert known.covers(10, 5)
    assert known.remove(10, 5) == [(10, 5)]
    assert not known.covers(10, 1)


@pytest.mark.parametrize("where", [(10, 4), (11, 4), (9, 5), (10, 6), (20, 5), (50, 1)])
def test_only_what_was_added_can_be_removed(where: tuple[int, int]) -> None:
    known = Registrations()
    known.add(10, 5)
    known.add(20, 5)
    known.remove(20, 5)
    with pytest.raises(InvalidRequestError, match=rf"the {where[1]} bytes at {where[0]:#x} are not registered"):
        known.remove(*where)
    assert known.pieces() == [(10, 5)]
    assert known.remove(10, 5) == [(10, 5)]


@pytest.mark.parametrize(("address", "nbytes"), [(0, 5), (-1, 5), (5, 0), (5, -1), (5, 1.5), ("5", 5), (5, True)])
def test_a_range_has_an_address_and_bytes(address: Any, nbytes: Any) -> None:
    known = Registrations()
    with pytest.raises(InvalidRequestError, match=r"address|nbytes"):
        known.add(address, nbytes)
    with pytest.raises(InvalidRequestError, match=r"address|nbytes"):
        known.remove(address, nbytes)
    assert known.pieces() == []
