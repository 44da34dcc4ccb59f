"""Views of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np

#: Bytes above which a copy is worth letting go of the interpreter's lock.
_LARGE = 256 << 10


def address_of(view: memoryview) -> int:
    """Where the view's bytes begin, writable or not."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def scatter(value: memoryview, buffers: Iterable[memoryview]) -> None:
    """Copy a value's bytes to where they belong, one buffer after another."""
    start = 0
    for buffer in buffers:
        if buffer.nbytes:
            copy_bytes(buffer.cast("B"), value[start : start + buffer.nbytes])
        start += buffer.nbytes


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between flat views of the same size; while a large one is copied, other threads may run."""
    if source.nbytes < _LARGE:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def view_at(address: int, nbytes: int) -> memoryview:
    """A writable view of the bytes at an address. It keeps nothing alive: that is the caller's to do."""
    if not nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
