"""Memory that values move through: parts of one pool that come back by themselves, or fresh memory each time."""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ..checks import whole_number
from ..errors import ConfigError, InvalidBufferError, InvalidRequestError
from ..views import address_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: Bytes of a page. Parts of a pool begin at one, so that no two share one.
PAGE = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A piece of memory. Whatever is made from ``view`` or ``array`` keeps it, the address alone does not."""

    address: int
    nbytes: int
    #: All of it: flat, writable bytes.
    view: memoryview

    @property
    def array(self) -> NDArray[np.uint8]:
        """The same memory as a writable array of bytes."""
        return np.frombuffer(self.view, dtype=np.uint8)


class StoreMemory(Protocol):
    """The memory that a store's values move to and from without a copy."""

    @property
    def gather_bytes(self) -> int:
        """Where the pieces of a value have fewer bytes than this on average, one copy into a single piece takes
        less time than the pieces would; 0 where pieces cost nothing to speak of."""

    @property
    def reaches_devices(self) -> bool:
        """Whether values move to and from an accelerator's memory too."""

    def allocate(self, nbytes: int) -> Region:
        """Such memory, its bytes undefined, for as long as something refers to a view of it.

        Raises ``InvalidRequestError`` for no bytes, and where there is not enough of it.
        """

    async def register(self, address: int, nbytes: int) -> bool:
        """Make memory of the caller's such memory; False where this store cannot."""

    async def unregister(self, address: int, nbytes: int) -> None:
        """Take back one ``register`` of exactly this range. Nothing may move to or from it any more."""

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether all of this range is such memory."""


class HeapMemory:
    """The memory of a store that can move values to and from any: there is nothing to register."""

    gather_bytes = 0
    reaches_devices = False

    def allocate(self, nbytes: int) -> Region:
        """Fresh memory, its bytes undefined, without a bound."""
        return _region(np.empty(_wanted(nbytes), dtype=np.uint8))

    async def register(self, address: int, nbytes: int) -> bool:
        return True

    async def unregister(self, address: int, nbytes: int) -> None:
        return None

    def covers(self, address: int, nbytes: int) -> bool:
        return True


class SpaceAllocator:
    """Who has which of ``size`` bytes, as offsets from 0: arithmetic alone, without any memory.

    Parts begin at multiples of ``alignment`` bytes. Gaps are whole: neighbours join when they come back.
    """

    def __init__(self, size: int, alignment: int = 64) -> None:
        size = whole_number(size, "size", ConfigError, least=1)
        self._alignment = whole_number(alignment, "alignment", ConfigError, least=1)
        #: ``(begin, end)``, ascending; no two touch.
        self._gaps = [(0, size)]
        #: The end of each part that is out, by where it begins.
        self._ends: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has, in however many gaps."""
        return sum(map(_length, self._gaps))

    @property
    def largest_gap(self) -> int:
        """The most bytes that ``take`` would give now."""
        return max(map(_length, self._gaps), default=0)

    def take(self, nbytes: int) -> int | None:
        """The offset of ``nbytes`` in the smallest gap that has them; None where no gap has."""
        nbytes = _wanted(nbytes)
        fitting = [gap for gap in self._gaps if _length(gap) >= nbytes]
        if not fitting:
            return None
        begin, end = gap = min(fitting, key=_length)
        # Rounded up, so that what is left begins aligned; at the end of the space there may be less.
        last = min(begin + -(-nbytes // self._alignment) * self._alignment, end)
        at = bisect_left(self._gaps, gap)
        self._gaps[at : at + 1] = [(last, end)] if last < end else []
        self._ends[begin] = last
        return begin

    def give_back(self, offset: int) -> None:
        """Free the part that begins at ``offset``. Raises ``InvalidRequestError`` if none does."""
        begin, end = offset, self._ends.pop(offset, None)
        if end is None:
            raise InvalidRequestError(f"no part begins at offset {offset}: give back each part that was taken, once")
        at = bisect_left(self._gaps, (begin, end))
        if at < len(self._gaps) and self._gaps[at][0] == end:
            _, end = self._gaps.pop(at)
        if at > 0 and self._gaps[at - 1][1] == begin:
            at -= 1
            begin, _ = self._gaps.pop(at)
        self._gaps.insert(at, (begin, end))


class MemoryPool:
    """One piece of memory, given out in parts that come back by themselves.

    A part is free again when nothing refers to a view of it any more: neither the ``Region`` nor slices, arrays or
    tensors made from it. (What only a reference cycle holds goes with the next garbage collection, which
    ``allocate`` asks for when it finds no room.) Parts outlive the pool. Any thread may allocate and let go.

    ``base``: what the memory belongs to; any object with a writable, contiguous buffer. ``on_unused`` is called once
    nobody can reach the memory any more, the pool and all views being gone, to free what Python does not. It may be
    called on any thread and in the midst of anything, so it must not wait for a lock; at the end of the process it is
    not called. ``alignment``: parts begin at multiples of so many bytes from the pool's own address.

    Raises ``InvalidBufferError`` for a ``base`` that cannot be written to.
    """

    def __init__(
        self, base: WriteableBuffer, on_unused: Callable[[], object] | None = None, *, alignment: int = PAGE
    ) -> None:
        try:
            memory = np.frombuffer(memoryview(base), dtype=np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise InvalidBufferError(f"the base of a pool is no contiguous buffer: {error}") from error
        if not memory.nbytes or not memory.flags.writeable:
            raise InvalidBufferError("the base of a pool is empty or read-only; give writable memory")
        self._memory = _region(memory)
        self._space = SpaceAllocator(memory.nbytes, alignment)
        self._lock = threading.Lock()
        # Offsets of parts that nobody has any more. They are noted without a lock: the garbage collector may do
        # it in the midst of anything, of ``allocate`` too.
        self._returned: deque[int] = deque()
        if on_unused is not None:
            weakref.finalize(memory, on_unused).atexit = False

    @property
    def address(self) -> int:
        return self._memory.address

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has, in however many gaps."""
        with self._lock:
            self._collect()
            return self._space.free_bytes

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether all of this range lies in the pool, given out or not."""
        return self.address <= address <= address + nbytes <= self.address + self.nbytes

    def allocate(self, nbytes: int) -> Region:
        """A part of exactly ``nbytes``, its bytes undefined.

        Raises ``InvalidRequestError`` where no gap is large enough.
        """
        nbytes = _wanted(nbytes)
        offset = self._take(nbytes)
        if offset is None:
            gc.collect()  # takes a moment, but parts that only reference cycles hold are nobody's
            offset = self._take(nbytes)
        if offset is None:
            raise InvalidRequestError(
                f"{nbytes} bytes were asked of a memory pool of {self.nbytes}, whose largest gap has "
                f"{self._space.largest_gap} ({self._space.free_bytes} are free in all); let go of parts of it, "
                "or give the store a larger pool_size"
            )
        # An array of its own over a view: views of views lead to it, not past it to the pool's.
        part = np.frombuffer(self._memory.view[offset : offset + nbytes], dtype=np.uint8)
        weakref.finalize(part, self._returned.append, offset).atexit = False
        return _region(part)

    def _take(self, nbytes: int) -> int | None:
        with self._lock:
            self._collect()
            return self._space.take(nbytes)

    def _collect(self) -> None:
        while self._returned:
            self._space.give_back(self._returned.popleft())


def anonymous_pool(nbytes: int) -> MemoryPool:
    """A pool of fresh memory of this process, page by page taken from the machine when first written to.

    Raises ``ConfigError`` where the system refuses.
    """
    nbytes = whole_number(nbytes, "pool_size", ConfigError, least=1)
    try:
        return MemoryPool(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise ConfigError(
            f"the system refuses {nbytes} bytes for a memory pool: {error}; choose a smaller pool_size"
        ) from error


def _region(memory: NDArray[np.uint8]) -> Region:
    """All of ``memory``, which lives until the last view of the region is gone.

    Arrays are not the garbage collector's to find, so what watches one hears of its true end. An object that the
    collector tracks would be called dead while finalizers of the same cycle still use it, or bring it back.
    """
    view = memory.data
    return Region(address_of(view), view.nbytes, view)


def _wanted(nbytes: int) -> int:
    return whole_number(nbytes, "nbytes", InvalidRequestError, least=1)


def _length(gap: tuple[int, int]) -> int:
    return gap[1] - gap[0]
