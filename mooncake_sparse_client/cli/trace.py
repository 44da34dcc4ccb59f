"""Request traces: what was asked, in which order, and what each block's tokens and bytes are.

The format is that of the public Mooncake traces: one JSON object a line with ``input_length`` (tokens) and
``hash_ids`` (one a block of 512 tokens; equal ids, equal prefixes). The partial last block has an id that
nothing can share, so a request's tokens are its whole blocks.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..core.layout import KVCacheLayout
from ..errors import ConfigError

TRACE_BLOCK: Final = 512
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ``block_ids`` number the distinct blocks of the trace by their content; ``prefix_ids[i]`` is
    the same in two requests exactly if their first ``i + 1`` blocks are."""

    block_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return TRACE_BLOCK * len(self.block_ids)

    def token_ids(self) -> NDArray[np.int64]:
        """Token ids below 2^32; those of two blocks differ unless the blocks are equal."""
        starts = np.array(self.block_ids, dtype=np.int64).reshape(-1, 1) * TRACE_BLOCK
        return (starts + np.arange(TRACE_BLOCK)).reshape(-1)


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """The first ``limit`` requests of a trace file, all by default. Raises ``ConfigError`` naming the line."""
    entries: list[list[int]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(itertools.islice(lines, limit), 1):
                entries.append(_hash_ids(line, f"{path}:{number}"))
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the trace {path} is no UTF-8 text: {error}") from error
    if not any(entries):
        raise ConfigError(f"the trace {path} has no request of at least {TRACE_BLOCK} tokens, one whole block")
    return _numbered(entries)


def _hash_ids(line: str, where: str) -> list[int]:
    try:
        entry = json.loads(line)
        blocks = int(entry["input_length"]) // TRACE_BLOCK
        ids = [int(value) for value in entry["hash_ids"]]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{where}: no trace entry with input_length and hash_ids: {error!r}") from error
    if blocks < 0 or len(ids) < blocks:
        raise ConfigError(f"{where}: {len(ids)} hash_ids do not cover {blocks} whole blocks")
    return ids[:blocks]


def make_workload(requests: int | None = None, *, seed: int = 0) -> list[Request]:
    """A small chat service made on the spot: users talk in turns, over system prompts that they share."""
    draw = random.Random(seed)  # noqa: S311 - a workload, no secret
    fresh = iter(range(1 << 22))

    def blocks(least: int, most: int) -> list[int]:
        return [next(fresh) for _ in range(draw.randint(least, most))]

    systems = [blocks(2, 6) for _ in range(3)]
    talks = [list(draw.choice(systems)) for _ in range(14)]
    turns: list[list[int]] = []
    while len(turns) < (48 if requests is None else requests):
        talk = draw.choice(talks)
        talk += blocks(1, 4)
        turns.append(list(talk))
        if len(talk) > 24:
            talks[talks.index(talk)] = list(draw.choice(systems))
    return _numbered(turns)


def _numbered(requests: Iterable[list[int]]) -> list[Request]:
    """Number the distinct blocks, and the distinct prefixes."""
    blocks: dict[int, int] = {}
    prefixes: dict[tuple[int, int], int] = {}
    numbered = []
    for hash_ids in requests:
        prefix_ids: list[int] = []
        for value in hash_ids:
            parent = prefix_ids[-1] if prefix_ids else -1
            prefix_ids.append(prefixes.setdefault((parent, value), len(prefixes)))
        numbered.append(Request(tuple(blocks.setdefault(value, len(blocks)) for value in hash_ids), tuple(prefix_ids)))
    return numbered


class ChunkContent:
    """What a chunk's bytes should be, from the prefix that it ends in. Built apart from keys and hashes, so
    that bytes found under a wrong key are told."""

    def __init__(self, layout: KVCacheLayout) -> None:
        for spec in layout.groups:
            if TRACE_BLOCK % spec.block_size:
                raise ConfigError(
                    f"a trace has blocks of {TRACE_BLOCK} tokens; the layout's {spec.block_size} does not divide them"
                )
        self._layout = layout
        self._ramps = [np.arange(-(-size // 8), dtype=np.uint64) * _MIX for size in layout.page_sizes]

    def of(self, request: Request, group: int, chunk: int) -> memoryview:
        """The bytes of one chunk of the request."""
        in_block = TRACE_BLOCK // self._layout.groups[group].block_size
        prefix = request.prefix_ids[chunk // in_block]
        seed = ((prefix * in_block + chunk % in_block) * len(self._ramps) + group + 1) * int(_MIX) % (1 << 64)
        words = self._ramps[group] ^ np.uint64(seed)
        words ^= words >> np.uint64(29)
        return (words * _MIX).view(np.uint8)[: self._layout.page_sizes[group]].data
