"""What a search knows of each group's chunks, a byte a chunk, and what that says about boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from .layout import ChunkedLocalAttentionSpec, GroupSpec, KVCacheLayout, SlidingWindowSpec
from .masks import BoolArray, needed_ranges

#: What is known of a chunk. ``ASKED``: in the request under way; ``HELD``: by the engine, so never asked for.
UNKNOWN, PRESENT, ABSENT, ASKED, HELD = range(5)
#: ``bytes.translate``: what was seen to be there is not known any more.
_DOUBTED: Final = bytes(UNKNOWN if state == PRESENT else state for state in range(256))


class KnownChunks:
    """What is known of one group's chunks, and which of them a boundary needs."""

    __slots__ = ("_alignment", "_answered", "_margin", "_missing", "_reach", "number", "room", "spec", "states")

    def __init__(self, number: int, layout: KVCacheLayout, states: bytearray) -> None:
        self.number = number
        self.spec = layout.groups[number]
        self.states = states
        #: ``ABSENT`` for each chunk that could not be read anyway; None where all could.
        self.room: bytearray | None = None
        #: Tokens over which one missing chunk rules boundaries out, at most.
        self._reach = _reach(self.spec)
        self._answered = self._missing = 0
        self._alignment = layout.alignment
        self._margin = int(self.spec.eagle)

    def needs(self, boundary: int) -> tuple[int, int]:
        """The first chunk that ``boundary`` needs, and one past the last."""
        return needed_ranges(self.spec, boundary)

    def doubt(self) -> None:
        """Believe no longer that anything is there."""
        self.states = self.states.translate(_DOUBTED)

    def only_into(self, room: BoolArray, local_tokens: int) -> None:
        """Rule out boundaries whose chunks there is no ``room`` to read into. What the engine holds needs none."""
        self.room = bytearray(states_of(room))
        held = min(local_tokens // self.spec.block_size, len(room))
        self.room[:held] = bytes([HELD]) * held

    def ask(self, first: int, stop: int) -> list[int]:
        """Those of ``[first, stop)`` of which nothing is known, asked for from now on. ``first`` is one of them."""
        chunks = []
        while first >= 0:
            chunks.append(first)
            self.states[first] = ASKED
            first = self.states.find(UNKNOWN, first + 1, stop)
        return chunks

    def note(self, chunks: Sequence[int], answers: bytes) -> None:
        """``PRESENT`` or ``ABSENT`` for each of ``chunks``."""
        if isinstance(chunks, range):
            self.states[chunks.start : chunks.stop] = answers
        else:
            for chunk, answer in zip(chunks, answers, strict=True):
                self.states[chunk] = answer
        self._answered += len(answers)
        self._missing += answers.count(ABSENT)

    @property
    def promise(self) -> tuple[float, int]:
        """How much a probe of this group may rule out: more where more was missing so far."""
        return self._missing / max(self._answered, 1), self._reach

    def below(self, chunk: int) -> int:
        """The longest boundary that ends before it would need ``chunk``."""
        return (chunk - self._margin) * self.spec.block_size // self._alignment * self._alignment

    def next_below(self, boundary: int) -> int:
        """``boundary`` if nothing rules it out, else the next one that is possible beside what does."""
        start, stop = self.needs(boundary)
        if stop > len(self.states):  # the draft margin's chunk, which the request does not fill
            return self.below(len(self.states))
        missing = self.states.find(ABSENT, start, stop)
        if missing >= 0:
            return self.below(missing)
        if self.room is not None:
            start, stop = needed_ranges(self.spec, boundary, margin=False)
            missing = self.room.find(ABSENT, start, stop)
            if missing < 0 and stop > len(self.room):
                missing = max(start, len(self.room))
            if missing >= 0:
                return self.below(missing + self._margin)
        return boundary


def states_of(present: BoolArray) -> bytes:
    """``PRESENT`` or ``ABSENT`` for each chunk."""
    return np.where(present, np.uint8(PRESENT), np.uint8(ABSENT)).tobytes()


def nothing_known(layout: KVCacheLayout, num_tokens: int, local_tokens: int) -> list[bytes]:
    """A byte for each chunk of each group's whole blocks; ``local_tokens``, aligned, are held by the engine."""
    counts = [(local_tokens // spec.block_size, layout.align(num_tokens) // spec.block_size) for spec in layout.groups]
    return [bytes([HELD]) * held + bytes(count - held) for held, count in counts]


def in_state(known: Sequence[bytes], state: int) -> tuple[BoolArray, ...]:
    """Which of each group's chunks are in ``state``."""
    return tuple(np.frombuffer(states, dtype=np.uint8) == state for states in known)


def _reach(spec: GroupSpec) -> int:
    if isinstance(spec, SlidingWindowSpec):
        return spec.window_chunks * spec.block_size
    return spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else spec.block_size
