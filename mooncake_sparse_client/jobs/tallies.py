"""What a run has done so far."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from ..core.layout import KVCacheLayout
from ..core.plans import PutPlan
from ..core.tally import NOTHING, Tally
from .planning import KEPT
from .report import SAMPLES, GroupReport, Sample
from .tree import Stretch


class RunTally:
    """Counts of one run; see ``JobReport`` for their meaning."""

    def __init__(self, layout: KVCacheLayout) -> None:
        self._layout = layout
        self._started = time.monotonic()
        self.tokens_computed = self.tokens_skipped = self.tokens_restored = self.tokens_recomputed = 0
        self.existing = self.rewritten = NOTHING
        self._chunks: list[Counter[int]] = [Counter() for _ in layout.groups]
        self._written = NOTHING
        self._passed: set[Stretch] = set()
        self._samples: list[Sample] = [Sample(0.0, 0, 0)]
        self._every, self._since = 1, 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def written(self) -> Tally:
        return self._written

    @property
    def tokens_done(self) -> int:
        """Distinct tokens that were computed, or found to be stored."""
        return self.tokens_computed - self.tokens_recomputed + self.tokens_skipped

    def note_prefill(self, tokens: int) -> None:
        """So many tokens were given to the producer."""
        self.tokens_computed += tokens

    def note_computed(self, stretch: Stretch, first: int, last: int) -> None:
        """Tokens ``[first, last)`` were; what else there is of the stretch was stored."""
        size = self._layout.alignment
        start, end = stretch.start * size, stretch.end * size
        if stretch in self._passed:
            self.tokens_recomputed += last - first
            return
        self._passed.add(stretch)
        self.tokens_recomputed += max(0, start - first)
        self.tokens_skipped += max(0, first - start) + end - last

    def note_skipped(self, stretch: Stretch) -> None:
        """All of a stretch was stored."""
        if stretch not in self._passed:
            self._passed.add(stretch)
            self.tokens_skipped += stretch.blocks * self._layout.alignment

    def note_put(self, plan: PutPlan, written: Iterable[tuple[int, int]], *, again: bool) -> Tally:
        """Chunks of a plan that were written, ``again`` if they had been stored before; how many they are."""
        reasons, chunks, nbytes = plan.reasons, 0, 0
        for group, chunk in written:
            self._chunks[group][int(reasons[group][chunk])] += 1
            chunks += 1
            nbytes += self._layout.page_sizes[group]
        added = Tally(chunks, nbytes)
        self._written += added
        if again:
            self.rewritten += added
        self.sample()
        return added

    def note_existing(self, counts: Sequence[int]) -> None:
        """So many chunks of each group were offered, and there by then."""
        for count, size in zip(counts, self._layout.page_sizes, strict=True):
            self.existing += Tally.of(count, size)

    def sample(self) -> None:
        """Note how far the run is."""
        self._since += 1
        if self._since < self._every:
            return
        self._since = 0
        self._samples.append(Sample(round(self.seconds, 3), self.tokens_done, self._written.bytes))
        if len(self._samples) >= 2 * SAMPLES:  # leave every second one out from now on
            self._samples, self._every = self._samples[::2], 2 * self._every

    def samples(self) -> tuple[Sample, ...]:
        return (*self._samples, Sample(round(self.seconds, 3), self.tokens_done, self._written.bytes))

    def groups(self) -> tuple[GroupReport, ...]:
        return tuple(
            GroupReport(
                spec.label,
                size,
                {reason.name.lower(): Tally.of(chunks[reason], size) for reason in KEPT if chunks[reason]},
            )
            for spec, size, chunks in zip(self._layout.groups, self._layout.page_sizes, self._chunks, strict=True)
        )
