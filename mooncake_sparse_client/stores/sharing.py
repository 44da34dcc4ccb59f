"""The memory that a native client shares with an owner process: by which name, and whether the owner still knows it.

An owner that restarts while calls are made, or that was stopped for long, knows nothing of our memory any more, and the
native library does not notice: every transfer is refused from then on, while all else works. Nor can it be told again:
the library takes memory that it once registered for registered.

So the same pages get a new name. The library allocates memory of the same size; our pages take the place of its own,
in this process and behind the file descriptor that is handed to the owner; and it is registered. No byte moves, what
callers hold stays as it is, and addresses are translated on their way to the library.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from pathlib import Path
from typing import Any

from ..errors import StoreUnavailableError
from . import native_codes as codes
from .free_memory import ROOT, free_memory
from .native import NativeStore, host_allocator
from .shared_setup import read_nothing

logger = logging.getLogger(__name__)

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


class SharedNative:
    """A native client whose transfers go to addresses that are ``shift`` bytes on; all else is passed on."""

    def __init__(self, native: NativeStore) -> None:
        self._native = native
        self.shift = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def _there(self, addresses: list[int]) -> list[int]:
        shift = self.shift
        return [address + shift for address in addresses] if shift else addresses

    def batch_put_from(self, keys: list[str], pointers: list[int], sizes: list[int], *more: object) -> list[int]:
        return self._native.batch_put_from(keys, self._there(pointers), sizes, *more)

    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]], *more: object
    ) -> list[int]:
        return self._native.batch_put_from_multi_buffers(keys, list(map(self._there, pointers)), sizes, *more)

    def batch_get_into(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        return self._native.batch_get_into(keys, self._there(pointers), sizes)

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        return self._native.batch_get_into_multi_buffers(keys, list(map(self._there, pointers)), sizes)

    def upsert_from(self, key: str, pointer: int, size: int, *more: object) -> int:
        return self._native.upsert_from(key, pointer + self.shift, size, *more)


class Sharing:
    """``nbytes`` at ``address``, allocated and registered by ``native``, and what the owner knows of them."""

    def __init__(self, native: NativeStore, address: int, nbytes: int, where: str) -> None:
        """``where``: the owner's address, for messages."""
        self._plain = native
        self._address, self._nbytes, self._where = address, nbytes, where
        #: What transfers go through.
        self.native = SharedNative(native)
        self._turn = threading.Lock()

    def is_lost(self) -> bool:
        """Whether the owner answers, but does not know the memory. Runs on a thread."""
        return read_nothing(self._plain, self._address + self.native.shift) == codes.INVALID_PARAMS

    def mend(self) -> bool:
        """Share the memory anew where the owner has lost it; whether that was so. Runs on a thread.

        Raises ``StoreUnavailableError`` where it cannot be shared anew for now.
        """
        with self._turn:
            if not self.is_lost():
                return False
            self._share_anew()
            return True

    def _share_anew(self) -> None:
        for free, said_by in free_memory(ROOT):
            if self._nbytes > free:
                # For a moment it is there twice; too much memory would end the process.
                raise self._lost(f"sharing it anew takes {self._nbytes} bytes, and {free} are free ({said_by})")
        own_file = _file_behind(self._address)
        alias = self._plain.alloc_from_mem_pool(self._nbytes)
        if not alias:
            raise self._lost(f"the system refuses {self._nbytes} bytes to share it anew")
        try:
            os.dup2(own_file, _file_behind(alias), inheritable=False)
            _map_again(self._address, self._nbytes, alias)
            code = self._plain.register_buffer(alias, self._nbytes)
            if code != codes.OK:
                raise self._lost(f"it does not take it again: {codes.meaning_of(code).text} ({code})")
        except BaseException:
            host_allocator().free(alias)
            raise
        former, self.native.shift = self._address + self.native.shift, alias - self._address
        if former != self._address:
            host_allocator().free(former)
        logger.warning(
            "the owner process at %s had lost the %d bytes that this process shares with it, as after a restart of it; "
            "they are shared anew, and no byte has moved",
            *(self._where, self._nbytes),
        )

    def forget(self) -> int:
        """Have the owner forget the memory, before the native client is closed or left to others; a code."""
        alias = self._address + self.native.shift
        code = self._plain.unregister_buffer(alias)
        if alias != self._address:
            self._plain.unregister_buffer(self._address)  # known again, perhaps, since the owner has restarted
            host_allocator().free(alias)
            self.native.shift = 0
        return code

    def _lost(self, trouble: str) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the owner process at {self._where} has lost the memory that this process shares with it, as after a "
            f"restart of it; {trouble}"
        )


def _file_behind(address: int) -> int:
    """The descriptor of the file that is mapped at ``address``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            return next(file for file in map(int, os.listdir("/proc/self/fd")) if _inode(file) == int(inode))  # noqa: PTH208
    raise StoreUnavailableError(f"no memory is mapped at {address:#x}")


def _inode(file: int) -> int | None:
    try:
        return os.fstat(file).st_ino
    except OSError:  # closed meanwhile
        return None


def _map_again(address: int, nbytes: int, place: int) -> None:
    """Have the pages at ``address``, which are shared, at ``place`` too, instead of what is mapped there."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    if libc.mremap(address, 0, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, place) != place:
        raise OSError(ctypes.get_errno(), "mremap failed")
