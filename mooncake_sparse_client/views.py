"""Views of memory."""

from __future__ import annotations

import ctypes

import numpy as np


def address_of(view: memoryview) -> int:
    """Where the view's bytes begin, writable or not."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def view_at(address: int, nbytes: int) -> memoryview:
    """A writable view of the bytes at an address. It keeps nothing alive: that is the caller's to do."""
    if not nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
