"""Blocks of memory at a fixed stride, as inference engines keep the cache of a layer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .checks import whole_number
from .errors import InvalidBufferError

#: The most blocks that are looked at one by one, where strides differ.
_MOST_BLOCKS: Final = 1 << 22
_OF_A_TENSOR: Final = ("shape", "device", "data_ptr", "element_size", "stride", "is_contiguous", "__getitem__")


class DeviceLike(Protocol):
    """Where a tensor lives."""

    @property
    def type(self) -> str: ...


class TensorLike(Protocol):
    """What is asked of a tensor. PyTorch's have it, and are known by it: PyTorch is never imported."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def device(self) -> DeviceLike: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def stride(self) -> Sequence[int]: ...
    def is_contiguous(self) -> bool: ...
    def __getitem__(self, index: int, /) -> TensorLike: ...


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Equal blocks of memory at a fixed stride: one layer's cache, or its K or V alone.

    ``address``: of block 0. ``block_stride``: bytes from one block to the next. ``block_bytes``: bytes of a
    block that belong to the chunk, at most the stride. ``owner`` is kept alive with this description.
    ``on_device``: an accelerator's memory, which the CPU cannot read. ``readonly``: nothing is read into it.

    The numbers are believed: an address that is not this process's own memory crashes it, or stores what is
    not yours. ``of`` takes them from an array or a tensor. Raises ``InvalidBufferError`` for what cannot be.
    """

    address: int
    block_stride: int
    block_bytes: int
    num_blocks: int
    owner: object = field(default=None, repr=False, compare=False)
    on_device: bool = False
    readonly: bool = False

    def __post_init__(self) -> None:
        for name in ("address", "block_stride", "block_bytes", "num_blocks"):
            number = whole_number(getattr(self, name), name, InvalidBufferError, least=1)
            object.__setattr__(self, name, number)
        for name in ("on_device", "readonly"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidBufferError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.block_stride < self.block_bytes:
            raise InvalidBufferError(
                f"block_stride {self.block_stride} is less than block_bytes {self.block_bytes}: the blocks "
                "would overlap; each needs bytes of its own"
            )
        whole_number(self.end, f"the end of {self.num_blocks} blocks from address {self.address}", InvalidBufferError)

    @classmethod
    def of(cls, memory: NDArray[np.generic] | TensorLike) -> BlockMemory:
        """The blocks of a NumPy array or a PyTorch tensor of shape ``(num_blocks, ...)``: ``memory[i]`` is block ``i``.

        The first axis may be strided; one block must be C-contiguous plain data. The array is kept alive. Of a
        ``(2, num_blocks, ...)`` tensor give ``kv[0]`` and ``kv[1]``. Raises ``InvalidBufferError``.
        """
        if isinstance(memory, np.ndarray):
            return _of_array(memory)
        if all(hasattr(memory, name) for name in _OF_A_TENSOR):
            return _of_tensor(memory)
        raise InvalidBufferError(
            f"blocks of memory are a NumPy array, a tensor or a BlockMemory, not a {type(memory).__name__}; "
            "describe other memory by its address, with BlockMemory(...)"
        )

    @property
    def end(self) -> int:
        """The address behind the last block's bytes."""
        return self.address + (self.num_blocks - 1) * self.block_stride + self.block_bytes

    @property
    def span(self) -> tuple[int, int]:
        """``(address, nbytes)`` that cover all blocks, and what lies between them."""
        return self.address, self.end - self.address


#: What describes equal blocks of memory.
Blocks: TypeAlias = "BlockMemory | NDArray[np.generic] | TensorLike"


def _of_array(array: NDArray[np.generic]) -> BlockMemory:
    # A subclass may answer an index in its own way.
    plain = np.asarray(array)
    size, count = _block_shape(plain.shape, plain.itemsize)
    if plain.dtype.hasobject or not plain[0, ...].flags.c_contiguous:
        raise InvalidBufferError(
            "one block of the array is not C-contiguous plain data; only the first axis may stride"
        )
    address: int = plain.__array_interface__["data"][0]
    stride = _block_stride(plain.strides[0], size, count)
    return BlockMemory(address, stride, size, count, array, readonly=not plain.flags.writeable)


def _of_tensor(tensor: TensorLike) -> BlockMemory:
    try:
        size, count = _block_shape(tuple(tensor.shape), tensor.element_size())
        if not tensor[0].is_contiguous():
            raise InvalidBufferError("one block of the tensor is not contiguous; only the first axis may stride")
        stride = _block_stride(tensor.stride()[0] * tensor.element_size(), size, count)
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise InvalidBufferError(f"the tensor has no memory of its own that could be described: {error}") from error
    if not address:
        raise InvalidBufferError(
            "the tensor's data_ptr() is 0: it has no memory (a meta tensor, or one that was freed)"
        )
    return BlockMemory(address, stride, size, count, tensor, on_device=tensor.device.type != "cpu")


def _block_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Bytes of one block, and how many blocks."""
    size = math.prod(shape[1:]) * itemsize
    if not shape or not shape[0] or not size:
        raise InvalidBufferError(f"shape {shape} must be (num_blocks, ...), with a block and a byte in it at least")
    return size, shape[0]


def _block_stride(stride: int, size: int, count: int) -> int:
    # How far a second block would be says nothing of one, and may be anything.
    if count == 1:
        return size
    if stride < size:
        raise InvalidBufferError(
            f"the first axis has a stride of {stride} bytes for blocks of {size}: blocks must follow one another "
            "and not overlap; an expanded, broadcast or reversed first axis will not do"
        )
    return stride


def clash(one: BlockMemory, other: BlockMemory) -> str:
    """Why the two cannot stand together; empty if no block of one has a byte of the other's, as if interleaved."""
    low, high = sorted((one, other), key=lambda memory: memory.address)
    if low.end <= high.address:
        return ""
    if low.block_stride == high.block_stride:
        # Every block of the higher one begins as far into one of the lower, or into the gap behind it.
        offset = (high.address - low.address) % low.block_stride
        shared = offset < low.block_bytes or offset + high.block_bytes > low.block_stride
        return "have bytes in common" if shared else ""
    few, many = sorted((one, other), key=lambda memory: memory.num_blocks)
    if few.num_blocks > _MOST_BLOCKS:
        return "lie within one another at different strides, with too many blocks to tell them apart"
    begins = few.address + np.arange(few.num_blocks) * few.block_stride
    before = np.clip((begins - many.address) // many.block_stride, 0, many.num_blocks - 1)
    for near in (before, np.minimum(before + 1, many.num_blocks - 1)):
        starts = many.address + near * many.block_stride
        if ((begins < starts + many.block_bytes) & (starts < begins + few.block_bytes)).any():
            return "have bytes in common"
    return ""


class _Exposed:
    """Tells NumPy of a memory's bytes, all of its span, and keeps their owner for whoever holds a view."""

    def __init__(self, memory: BlockMemory) -> None:
        self.owner = memory.owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (memory.address, memory.readonly),
            "shape": memory.span[1:],
        }


class BlockGroup:
    """The memories that make the chunks of one group, and the numbers that their places are made of."""

    def __init__(self, number: int, memories: tuple[BlockMemory, ...]) -> None:
        self.number = number
        self.memories = memories
        #: Bytes of each piece of a chunk, and of all.
        self.sizes = tuple(memory.block_bytes for memory in memories)
        self.page_size = sum(self.sizes)
        #: The least of the memories: a block must be in all.
        self.num_blocks = min(memory.num_blocks for memory in memories)
        self.addresses = np.array([memory.address for memory in memories], dtype=np.int64)
        self.strides = np.array([memory.block_stride for memory in memories], dtype=np.int64)
        self.on_device = any(memory.on_device for memory in memories)
        self.readonly = any(memory.readonly for memory in memories)

    def cut(self, block: int) -> list[memoryview]:
        """The pieces of one block, in place. Raises ``InvalidBufferError`` for what the CPU cannot reach."""
        return [view[block * stride : block * stride + size] for view, stride, size in self._views]

    @cached_property
    def _views(self) -> tuple[tuple[memoryview, int, int], ...]:
        self._check_reach()
        return tuple(
            (np.asarray(_Exposed(memory)).data, memory.block_stride, memory.block_bytes) for memory in self.memories
        )

    def _check_reach(self) -> None:
        if self.on_device:
            raise InvalidBufferError(
                f"group {self.number} lies in a device's memory, which the CPU cannot reach; use its places() instead"
            )


class _Use(NamedTuple):
    """One memory where the caller named it."""

    group: int
    number: int
    memory: BlockMemory

    def __str__(self) -> str:
        return f"groups[{self.group}][{self.number}]"


class PagedMemory:
    """The checked memory of a paged cache, that all its views share. Compared and hashed by identity.

    Raises ``InvalidBufferError`` for memories that have bytes in common, but are not one pool for several groups.
    """

    def __init__(self, groups: Iterable[tuple[BlockMemory, ...]]) -> None:
        self.groups = tuple(BlockGroup(number, memories) for number, memories in enumerate(groups))
        pools: dict[tuple[int, int, int], list[_Use]] = defaultdict(list)
        for group in self.groups:
            for number, memory in enumerate(group.memories):
                pool = pools[memory.address, memory.block_stride, memory.block_bytes]
                pool.append(_Use(group.number, number, memory))
        fullest = [max(pool, key=lambda use: use.memory.num_blocks) for pool in pools.values()]
        fullest.sort(key=lambda use: use.memory.address)
        _check_once_a_group(pools.values())
        _check_apart(fullest)
        #: Each memory once, as the user of most blocks has it, by address.
        self.distinct = tuple(use.memory for use in fullest)
        users = {frozenset(use.group for use in pool) for pool in pools.values()}
        #: Which groups take their blocks from one pool, the largest such sets; a group by itself is one too.
        self.sharing = sorted(tuple(sorted(some)) for some in users if not any(some < more for more in users))


def _check_once_a_group(pools: Iterable[list[_Use]]) -> None:
    for pool in pools:
        for use, again in pairwise(pool):
            if use.group == again.group:
                raise InvalidBufferError(f"{use} and {again} are the same blocks; a group has each of them once")


def _check_apart(uses: Iterable[_Use]) -> None:
    """Raises ``InvalidBufferError`` if two of the memories, sorted by address, have bytes in common."""
    near: list[_Use] = []
    for use in uses:
        near = [other for other in near if other.memory.end > use.memory.address]
        for other in near:
            if why := clash(other.memory, use.memory):
                raise InvalidBufferError(
                    f"{other} and {use} {why}: {other.memory} and {use.memory}; only groups may share blocks, "
                    "and only the very same (address, block_stride, block_bytes)"
                )
        near.append(use)
