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
from itertools import chain
from typing import Final, TypeAlias

from .known import ABSENT, ASKED, UNKNOWN, KnownChunks, nothing_known, states_of
from .layout import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheLayout
from .masks import BoolArray, needed_chunks

#: ``(group, chunks)`` to ask for.
Questions: TypeAlias = list[tuple[int, Sequence[int]]]

#: Keys of a lookup's first request, by how much its windows over full attention grow, and up to what.
_FIRST: Final = 64
_GROWTH: Final = 8
_MOST: Final = 65536
#: In each round over boundaries: keys for the whole needs of the longest ones, and for probes of others. Later rounds
#: go on to grow, so that there are few.
_ROUNDS: Final = ((32, 0), (64, 512), (512, 4096))
#: While nothing is known of a prompt at all, a few probes tell a miss.
_BLIND_ROUND: Final = (0, _FIRST)
#: Boundaries and chunks that are looked at without a pause: a millisecond's work.
_BREATH: Final = 256


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
        #: What the engine holds, aligned, and no more than the request may hit.
        self.local_tokens = min(layout.align(local_tokens), self._cap)
        states = nothing_known(layout, num_tokens, self.local_tokens) if known is None else known
        self._groups = [KnownChunks(number, layout, bytearray(states[number])) for number in range(len(layout.groups))]
        self._doubted: Questions = []
        #: Whether nothing was asked yet.
        self._blind = known is None
        self._work = 0
        #: Keys that were asked for, and requests that were answered.
        self.keys_asked = self.requests = 0
        #: How far each group was asked, in tokens.
        self.asked_lengths = [self.local_tokens] * len(layout.groups)
        #: Once there are no more questions: the longest usable prefix, in tokens, and the longest that the dense
        #: groups alone can serve (``hit_length`` if there are none).
        self.hit_length = self.shared_length = self.local_tokens

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
            self._set_out(full, top)
            top = yield from self._ask_windows(full, top)
        if chunked:
            self._set_out(chunked, top)
            top = yield from self._ask_boundaries(chunked, top)
        shared = top
        if sparse:
            self._set_out(sparse, top)
            top = yield from self._ask_boundaries(chunked + sparse, top)
        self.hit_length, self.shared_length = top, shared if full or chunked else top

    def note(self, questions: Questions, present: BoolArray) -> None:
        """Whether each chunk of ``questions`` is there, in their order."""
        answers = states_of(present)
        first = 0
        for number, chunks in questions:
            self._groups[number].note(chunks, answers[first : first + len(chunks)])
            first += len(chunks)
        self._blind = False
        self.keys_asked += first * self._ranks
        self.requests += 1

    def lose(self, group: int, chunk: int) -> None:
        """This chunk is not to be had, whatever was answered."""
        self._groups[group].states[chunk] = ABSENT

    def doubt(self, hit_length: int) -> None:
        """Believe no longer that anything is there, ask for what a hit of so many tokens needs, draft margin included,
        all at once, and look for nothing longer."""
        self._cap = max(hit_length, self.local_tokens)
        for group in self._groups:
            group.doubt()
            needed = needed_chunks(group.spec, hit_length if hit_length > self.local_tokens else 0)
            again = range(max(needed.start, self.local_tokens // group.spec.block_size), needed.stop)
            if again:
                self._doubted.append((group.number, again))

    def only_into(self, room: Sequence[BoolArray]) -> None:
        """Pass over boundaries of whose chunks, the draft margin aside, some have no ``room`` to be read into."""
        for group, mask in zip(self._groups, room, strict=True):
            group.only_into(mask, self.local_tokens)

    def _ask_windows(self, groups: list[KnownChunks], top: int) -> Generator[Questions, None, int]:
        """Ask groups of full attention from the start on; returns the longest boundary that they can serve."""
        keys = _FIRST
        while True:
            top = yield from self._possible(groups, top)
            questions = self._window(groups, top, keys)
            if not questions:
                return top
            yield questions
            keys = min(keys * _GROWTH, _MOST)

    def _window(self, groups: list[KnownChunks], top: int, keys: int) -> Questions:
        """The next chunks below ``top`` of which nothing is known, some ``keys`` in all."""
        firsts = [(group, group.states.find(UNKNOWN, *group.needs(top))) for group in groups if top > self.local_tokens]
        firsts = [(group, first) for group, first in firsts if first >= 0]
        if not firsts:
            return []
        begin = min(first * group.spec.block_size for group, first in firsts)
        end = begin + int(keys / sum(self._ranks / group.spec.block_size for group, _ in firsts))
        questions: Questions = []
        for group, first in firsts:
            last = min(end // group.spec.block_size, group.needs(top)[1])
            chunks: Sequence[int] = range(first, last)
            if group.states.count(UNKNOWN, first, last) < len(chunks):
                chunks = [chunk for chunk in chunks if group.states[chunk] == UNKNOWN]
            if chunks:
                questions.append((group.number, chunks))
        return questions or [(firsts[0][0].number, range(firsts[0][1], firsts[0][1] + 1))]

    def _ask_boundaries(self, groups: list[KnownChunks], top: int) -> Generator[Questions, None, int]:
        """Ask groups for the tails of boundaries, from ``top`` down; returns the longest that they can serve."""
        for keys, probes in chain([_BLIND_ROUND] if self._blind else [], _rounds()):
            top = yield from self._possible(groups, top)
            questions = yield from self._round(groups, top, keys, probes)
            if not questions:
                break
            yield questions
        return top

    def _round(
        self, groups: list[KnownChunks], top: int, keys: int, probes: int
    ) -> Generator[Questions, None, Questions]:
        """What the longest boundaries need, some ``keys`` in all, and one chunk each of others, ``probes`` keys."""
        asked: dict[int, list[int]] = {group.number: [] for group in groups}
        boundary = top
        while boundary > self.local_tokens and (keys > 0 or probes > 0):
            needs = [(group, *group.needs(boundary)) for group in groups]
            unknown = [
                (group, first, stop)
                for group, start, stop in needs
                if (first := group.states.find(UNKNOWN, start, stop)) >= 0
            ]
            awaited = [
                group.below(first)
                for group, start, stop in needs
                if (first := group.states.find(ASKED, start, stop)) >= 0
            ]
            if not unknown and not awaited:
                break  # nobody needs to know of shorter ones
            if keys > 0:
                for group, first, stop in unknown:
                    chunks = group.ask(first, stop)
                    asked[group.number] += chunks
                    keys -= len(chunks) * self._ranks
                    self._work += len(chunks) // 4
                keys -= 1  # so that boundaries that need nothing new come to an end too
                lower = boundary - self._alignment
            elif awaited:
                lower = min(awaited)  # those between may be ruled out by what is asked already
            else:
                group, first, _ = max(unknown, key=lambda found: found[0].promise)
                asked[group.number] += group.ask(first, first + 1)
                probes -= self._ranks
                lower = group.below(first)
            boundary = yield from self._possible(groups, lower)
        return [(number, sorted(chunks)) for number, chunks in asked.items() if chunks]

    def _possible(self, groups: list[KnownChunks], boundary: int) -> Generator[Questions, None, int]:
        """The longest at or below ``boundary`` that nothing known rules out; ``local_tokens`` never are."""
        while boundary > self.local_tokens:
            self._work += 1
            if self._work >= _BREATH:
                self._work = 0
                yield []
            for group in groups:
                lower = group.next_below(boundary)
                if lower < boundary:
                    break
            else:
                return boundary
            boundary = lower
        return self.local_tokens

    def _set_out(self, groups: list[KnownChunks], top: int) -> None:
        for group in groups:
            self.asked_lengths[group.number] = top


def _rounds() -> Iterator[tuple[int, int]]:
    yield from _ROUNDS
    keys, probes = _ROUNDS[-1]
    while True:
        keys, probes = keys * _GROWTH, probes * _GROWTH
        yield keys, probes
