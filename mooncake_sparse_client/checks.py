"""Checks of single values that several places make; each raises the caller's error and names the field."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from operator import index
from typing import Final, TypeVar

from .errors import SparseStoreError

T = TypeVar("T")

#: What NumPy's 64-bit indices can hold.
_MOST: Final = (1 << 63) - 1


def whole_number(value: object, name: str, error: type[SparseStoreError], *, least: int = 0) -> int:
    """``value`` as a plain int from ``least`` to 2^63 - 1. NumPy's ints are ints, a bool is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise error(f"{name} must be an int, not {reprlib.repr(value)}")
    number = index(value)
    if number < least:
        bound = f"be at least {least}" if least else "not be negative"
        raise error(f"{name} must {bound}, but is {number}")
    if number > _MOST:
        raise error(f"{name} must be at most {_MOST}, not {number}")
    return number


def plain_text(
    value: object, name: str, error: type[SparseStoreError], *, may_be_empty: bool = False, secret: bool = False
) -> str:
    """``value`` as a plain str that can be written as UTF-8. No error shows a ``secret`` one."""
    if not isinstance(value, str):
        raise error(f"{name} must be text, not {_shown(value, secret=secret)}")
    if not value and not may_be_empty:
        raise error(f"{name} must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError as reason:
        flaw = f"{reason.reason} at position {reason.start}"  # the error itself has all of the text
    else:
        # A subclass (an enum's member, NumPy's str_) would be pickled, and so hashed, in another way.
        return str.__str__(value)
    raise error(f"{name} is no text that can be written as UTF-8: {flaw}")


def items_of(values: Iterable[T], name: str, error: type[SparseStoreError], *, secret: bool = False) -> list[T]:
    """``values`` as a list; text is not taken for a list of letters. No error shows ``secret`` ones."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise error(f"{name} must be a list or tuple, not {_shown(values, secret=secret)}")
    return list(values)


def _shown(value: object, *, secret: bool) -> str:
    return f"of type {type(value).__name__}" if secret else reprlib.repr(value)
