"""Finding the longest usable prefix by asking little: which chunks to ask for next, until the answer is known.

A lookup asks in stages, each only as far as the ones before it allow:

1. Full attention needs every chunk from the start, so it is asked from there, in windows that grow: a miss costs one
   small request, and a hole ends the search at once. (Chunks are evicted in the midst too: halving would be fooled.)
2. Chunked local attention, and then sliding windows and recurrent states with it, are asked for all that the longest
   boundary that is still possible needs, and the next ones below it. A missing chunk rules out every boundary that
   needs it. Boundaries further down are first probed with one chunk each, more of them from round to round.

No chunk is asked for twice, and none that no boundary needs. The answer is the longest usable prefix as ``prefix``
defines it; this module decides in which order to look.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import chain, repeat
from typing import Final, TypeAlias

import numpy as np

from .layout import ChunkedLocalAttentionSpec, FullAttentionSpec, GroupSpec, KVCacheLayout, SlidingWindowSpec
from .masks import BoolArray, needed_chunks, needed_ranges

#: ``(group, chunks)`` to ask for.
Questions: TypeAlias = list[tuple[int, Sequence[int]]]

#: What is known of a chunk. ``ASKED``: in the request under way; ``HELD``: by the engine, so never asked for.
UNKNOWN, PRESENT, ABSENT, ASKED, HELD = range(5)

#: Keys of a lookup's first request, by how much its windows over full attention grow, and up to what.
_FIRST: Final = 64
_GROWTH: Final = 8
_MOST: Final = 32768
#: In each round over boundaries: keys for the whole needs of the longest ones, and for probes of others.
_ROUNDS: Final = ((32, 0), (64, 512), (512, 4096), (4096, 1 << 62))
#: Boundaries that are looked at without a pause: a millisecond's work.
_BREATH: Final = 256
#: While nothing is known of a prompt at all, a few probes tell a miss.
_BLIND_ROUND: Final = (0, _FIRST)


class PrefixSearch:
    """The search for one request's longest usable prefix.

    ::

        for questions in search.questions():
            search.note(questions, ...)  # whether each chunk is there
        search.hit_length

    What is known stays: ``questions`` goes on after ``lose`` or ``doubt`` without asking for the rest again.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        num_tokens: int,
        *,
        local_tokens: int = 0,
        ranks: int = 1,
        known: Sequence[bytes] | None = None,
    ) -> None:
        """``ranks``: keys that stand for one chunk. ``known``: what an earlier search of the same request knew."""
        self._ranks = ranks
        self._alignment = layout.alignment
        self._cap = layout.hit_cap(num_tokens)
        self._local = min(layout.align(local_tokens), self._cap)
        states = nothing_known(layout, num_tokens, self._local) if known is None else known
        self._groups = [_Group(number, layout, bytearray(states[number])) for number in range(len(layout.groups))]
        self._doubted: Questions = []
        self._steps = 0
        #: How far each group was asked, in tokens.
        self.asked_lengths = [self._local] * len(layout.groups)
        #: Once there are no more questions: the longest usable prefix, in tokens, and the longest that the dense
        #: groups alone can serve (``hit_length`` if there are none).
        self.hit_length = self.shared_length = self._local

    @property
    def known(self) -> tuple[bytes, ...]:
        """What is known of each group's chunks, a byte each."""
        return tuple(bytes(group.states) for group in self._groups)

    def questions(self) -> Iterator[Questions]:
        """What to ask for, one request after another. Each must be answered by ``note`` before the next.

        An empty one asks for nothing. It comes after each millisecond or so of looking for the next, so that others
        can have their turn.
        """
        if self._doubted:
            yield self._doubted
            self._doubted = []
        kinds = (FullAttentionSpec, ChunkedLocalAttentionSpec)
        full, chunked = ([group for group in self._groups if isinstance(group.spec, kind)] for kind in kinds)
        sparse = [group for group in self._groups if not group.spec.dense]
        top = self._cap
        if full:
            self._note_asked(full, top)
            top = yield from self._ask_windows(full, top)
        if chunked:
            self._note_asked(chunked, top)
            top = yield from self._ask_boundaries(chunked, top, blind=not full)
        shared = top
        if sparse:
            self._note_asked(sparse, top)
            top = yield from self._ask_boundaries(chunked + sparse, top, blind=not full and not chunked)
        self.hit_length, self.shared_length = top, shared if full or chunked else top

    def note(self, questions: Questions, present: BoolArray) -> None:
        """Whether each chunk of ``questions`` is there, in their order."""
        answers = np.where(present, np.uint8(PRESENT), np.uint8(ABSENT)).tobytes()
        first = 0
        for number, chunks in questions:
            last = first + len(chunks)
            states = self._groups[number].states
            if isinstance(chunks, range):
                states[chunks.start : chunks.stop] = answers[first:last]
            else:
                for chunk, answer in zip(chunks, answers[first:last], strict=True):
                    states[chunk] = answer
            first = last

    def lose(self, group: int, chunk: int) -> None:
        """This chunk is not to be had, whatever was answered."""
        self._groups[group].states[chunk] = ABSENT

    def doubt(self, hit_length: int) -> None:
        """Ask again for what a hit of so many tokens needs, draft margin included, all at once."""
        for group in self._groups:
            needed = needed_chunks(group.spec, hit_length)
            again = range(max(needed.start, self._local // group.spec.block_size), needed.stop)
            if again:
                group.states[again.start : again.stop] = bytes(len(again))
                self._doubted.append((group.number, again))

    def only_into(self, room: Sequence[BoolArray]) -> None:
        """Pass over boundaries of whose chunks, the draft margin aside, some have no ``room`` to be read into."""
        for group, mask in zip(self._groups, room, strict=True):
            group.room = bytearray(np.where(mask, np.uint8(PRESENT), np.uint8(ABSENT)).tobytes())
            held = min(self._local // group.spec.block_size, len(group.room))
            group.room[:held] = bytes([HELD]) * held

    def _ask_windows(self, groups: list[_Group], top: int) -> Generator[Questions, None, int]:
        """Ask groups of full attention from the start on; returns the longest boundary that they can serve."""
        keys = _FIRST
        while True:
            top = yield from self._possible(groups, top)
            questions = self._window(groups, top, keys)
            if not questions:
                return top
            yield questions
            keys = min(keys * _GROWTH, _MOST)

    def _window(self, groups: list[_Group], top: int, keys: int) -> Questions:
        """The next chunks below ``top`` of which nothing is known, some ``keys`` in all."""
        firsts = [(group, group.find(UNKNOWN, *group.needs(top))) for group in groups if top > self._local]
        firsts = [(group, first) for group, first in firsts if first >= 0]
        if not firsts:
            return []
        begin = min(first * group.spec.block_size for group, first in firsts)
        end = begin + int(keys / sum(self._ranks / group.spec.block_size for group, _ in firsts))
        questions: Questions = []
        for group, first in firsts:
            size = group.spec.block_size
            last = min(max(end // size, first + (first * size == begin)), group.needs(top)[1])
            chunks: Sequence[int] = range(first, last)
            if group.states.count(UNKNOWN, first, last) < len(chunks):
                chunks = [chunk for chunk in chunks if group.states[chunk] == UNKNOWN]
            if chunks:
                questions.append((group.number, chunks))
        return questions

    def _ask_boundaries(self, groups: list[_Group], top: int, *, blind: bool) -> Generator[Questions, None, int]:
        """Ask groups for the tails of boundaries, from ``top`` down; returns the longest that they can serve.

        ``blind``: nothing is known of this prompt yet.
        """
        for keys, probes in chain([_BLIND_ROUND] if blind else [], _ROUNDS, repeat(_ROUNDS[-1])):
            top = yield from self._possible(groups, top)
            questions = yield from self._round(groups, top, keys, probes)
            if not questions:
                break
            yield questions
        return top

    def _round(self, groups: list[_Group], top: int, keys: int, probes: int) -> Generator[Questions, None, Questions]:
        """What the longest boundaries need, some ``keys`` in all, and one chunk each of others, ``probes`` keys."""
        asked: dict[int, list[int]] = {group.number: [] for group in groups}
        boundary = top
        while boundary > self._local and (keys > 0 or probes > 0):
            needs = [(group, *group.needs(boundary)) for group in groups]
            unknown = [
                (group, first, stop) for group, start, stop in needs if (first := group.find(UNKNOWN, start, stop)) >= 0
            ]
            awaited = [
                group.below(first) for group, start, stop in needs if (first := group.find(ASKED, start, stop)) >= 0
            ]
            if not unknown and not awaited:
                break  # nobody needs to know of shorter ones
            if keys > 0:
                for group, first, stop in unknown:
                    chunks = group.ask(first, stop)
                    asked[group.number] += chunks
                    keys -= len(chunks) * self._ranks
                keys -= 1  # so that boundaries that need nothing new come to an end too
                lower = boundary - self._alignment
            elif awaited:
                lower = min(awaited)  # those between may be ruled out by what is asked already
            else:
                group, first, _ = max(unknown, key=lambda found: found[0].reach)
                asked[group.number] += group.ask(first, first + 1)
                probes -= self._ranks
                lower = group.below(first)
            boundary = yield from self._possible(groups, lower)
        return [(number, sorted(chunks)) for number, chunks in asked.items() if chunks]

    def _possible(self, groups: list[_Group], boundary: int) -> Generator[Questions, None, int]:
        """The longest at or below ``boundary`` that nothing known rules out; ``local_tokens`` never are."""
        while boundary > self._local:
            self._steps += 1
            if self._steps % _BREATH == 0:
                yield []
            for group in groups:
                lower = group.next_below(boundary)
                if lower < boundary:
                    break
            else:
                return boundary
            boundary = lower
        return self._local

    def _note_asked(self, groups: list[_Group], top: int) -> None:
        for group in groups:
            self.asked_lengths[group.number] = top


class _Group:
    """What is known of one group's chunks, and which of them a boundary needs."""

    __slots__ = ("_alignment", "_margin", "number", "reach", "room", "spec", "states")

    def __init__(self, number: int, layout: KVCacheLayout, states: bytearray) -> None:
        self.number = number
        self.spec = layout.groups[number]
        self.states = states
        #: ``ABSENT`` for each chunk that could not be read anyway; None where all could.
        self.room: bytearray | None = None
        #: Tokens over which one missing chunk rules boundaries out, at most.
        self.reach = _reach(self.spec)
        self._alignment = layout.alignment
        self._margin = int(self.spec.eagle)

    def needs(self, boundary: int) -> tuple[int, int]:
        """The first chunk that ``boundary`` needs, and one past the last."""
        return needed_ranges(self.spec, boundary)

    def find(self, state: int, start: int, stop: int) -> int:
        """The first chunk of ``[start, stop)`` in this state; -1 for none."""
        return self.states.find(state, start, stop)

    def ask(self, first: int, stop: int) -> list[int]:
        """Those of ``[first, stop)`` of which nothing is known, asked for from now on."""
        chunks = [chunk for chunk in range(first, stop) if self.states[chunk] == UNKNOWN]
        for chunk in chunks:
            self.states[chunk] = ASKED
        return chunks

    def below(self, chunk: int) -> int:
        """The longest boundary that ends before it would need ``chunk``."""
        return (chunk - self._margin) * self.spec.block_size // self._alignment * self._alignment

    def next_below(self, boundary: int) -> int:
        """``boundary`` if nothing rules it out, else the next one that is possible beside what does."""
        start, stop = needed_ranges(self.spec, boundary)
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
