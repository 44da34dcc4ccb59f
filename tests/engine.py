"""An engine's paged memory, for tests: each group in several arrays, chunks in blocks here and there."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mooncake_sparse_client import KVCacheLayout, PagedKVCache

PADDING = 24  # bytes between blocks that are nobody's


def page(group: int, chunk: int, nbytes: int) -> bytes:
    """Bytes that no other chunk has."""
    return random.Random(f"{group}/{chunk}").randbytes(nbytes)


class Engine:
    """``pieces`` memories a group, ``num_blocks`` blocks each; chunk ``i`` in a block drawn by ``seed``.

    ``memory``: where the arrays lie, when not on the heap: flat bytes, such as ``client.allocate(...)`` gives.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        num_blocks: int,
        *,
        pieces: int = 2,
        seed: int = 0,
        memory: NDArray[np.uint8] | None = None,
    ) -> None:
        self.layout = layout
        self.parts = [_cut(size, pieces) for size in layout.page_sizes]
        self.arrays: list[list[NDArray[np.uint8]]] = []
        memory = np.zeros(self.nbytes(layout, num_blocks, pieces), dtype=np.uint8) if memory is None else memory
        start = 0
        for parts in self.parts:
            group = []
            for size in parts:
                rows = memory[start : start + num_blocks * (size + PADDING)].reshape(num_blocks, -1)
                rows[:] = 0
                group.append(rows[:, :size])
                start += rows.size
            self.arrays.append(group)
        dice = np.random.default_rng(seed)
        self.tables = [dice.permutation(num_blocks) for _ in layout.groups]
        self.memory = memory
        self.cache = PagedKVCache(self.arrays)

    @staticmethod
    def nbytes(layout: KVCacheLayout, num_blocks: int, pieces: int = 2) -> int:
        return sum(num_blocks * (size + PADDING) for page in layout.page_sizes for size in _cut(page, pieces))

    @property
    def at(self) -> PagedKVCache:
        return self.cache.at(self.tables)

    def fill(self) -> Engine:
        """Give every chunk its bytes."""
        for group, table in enumerate(self.tables):
            for chunk, block in enumerate(table.tolist()):
                content = np.frombuffer(page(group, chunk, self.layout.page_sizes[group]), dtype=np.uint8)
                start = 0
                for array in self.arrays[group]:
                    array[block] = content[start : start + array.shape[1]]
                    start += array.shape[1]
        return self

    def bytes_of(self, group: int, chunk: int) -> bytes:
        block = self.tables[group][chunk]
        return b"".join(array[block].tobytes() for array in self.arrays[group])

    def has(self, chunks: Sequence[tuple[int, int]]) -> bool:
        """Whether these chunks have their bytes."""
        return all(
            self.bytes_of(group, chunk) == page(group, chunk, self.layout.page_sizes[group]) for group, chunk in chunks
        )

    def is_blank(self, chunks: Sequence[tuple[int, int]]) -> bool:
        return not any(any(self.bytes_of(group, chunk)) for group, chunk in chunks)


def _cut(size: int, pieces: int) -> list[int]:
    """Sizes of the pieces of a page: unequal ones, as few as there are bytes for."""
    pieces = min(pieces, size)
    first = size - (pieces - 1) * (size // pieces)
    return [first] + [size // pieces] * (pieces - 1)
