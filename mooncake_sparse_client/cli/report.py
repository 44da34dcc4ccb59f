"""What ``demo`` found: as figures for a file, as tables for a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.layout import KVCacheLayout
from ..core.tally import NOTHING, Tally
from .replay import ReplayCounts
from .simulate import ModelCounts
from .table import human_bytes, print_table, tally_cells

#: The counts that stand beside the run's own, by their name among the figures.
MODEL_LABELS = {
    "same": "  counted by the model store",
    "not_learned": "without learned junctions",
    "dense": "dense (every boundary)",
    "unmasked": "without masks",
}


@dataclass(frozen=True, slots=True)
class DemoReport:
    """One replay, and what the model store counted over the same requests."""

    layout_name: str
    retention_interval: int | None
    store: str
    layout: KVCacheLayout
    counts: ReplayCounts
    models: Mapping[str, ModelCounts]
    seconds: float

    def figures(self) -> dict[str, object]:
        """Plain values, ready for JSON. Bytes are payload bytes at the demo's scale."""
        counts = self.counts
        return {
            "layout": self.layout_name,
            "retention_interval": self.retention_interval,
            "store": self.store,
            "requests": counts.requests,
            "tokens": counts.tokens,
            "hit_tokens": counts.hit_tokens,
            "hit_rate": counts.hit_rate,
            "written": self._written.figures(),
            "existing": counts.existing.figures(),
            "unreachable": counts.unreachable.figures(),
            "failed": counts.failed.figures(),
            "read": counts.read.figures(),
            "verified_bytes": counts.verified_bytes,
            "wrong_bytes": counts.wrong_bytes,
            "seconds": round(self.seconds, 3),
            "groups": [
                {"group": spec.label, "page_size_bytes": spec.page_size_bytes, "written": tally.figures()}
                for spec, tally in zip(self.layout.groups, counts.written, strict=True)
            ],
            "models": {
                name: {
                    "hit_tokens": model.hit_tokens,
                    "hit_rate": model.hit_rate,
                    "written": model.total_written.figures(),
                    "groups": [tally.figures() for tally in model.written],
                }
                for name, model in self.models.items()
            },
        }

    def show(self) -> None:
        """Print the tables."""
        counts = self.counts
        keeps = "every boundary" if self.retention_interval is None else f"interval {self.retention_interval}"
        many = "request" if counts.requests == 1 else "requests"
        print(
            f"{counts.requests} {many}, {counts.tokens:,} tokens; layout: {self.layout_name}; retention: {keeps}; "
            f"store: {self.store}; {self.seconds:.1f} s\n"
        )
        self._show_comparison()
        self._show_groups()
        self._show_chunks()
        print(f"{counts.verified_bytes:,} bytes verified, {counts.wrong_bytes:,} wrong")

    @property
    def _written(self) -> Tally:
        return sum(self.counts.written, NOTHING)

    def _show_comparison(self) -> None:
        rows = [("this run", self.counts.hit_tokens, self.counts.hit_rate, self._written)]
        for name, label in MODEL_LABELS.items():
            model = self.models[name]
            rows.append((label, model.hit_tokens, model.hit_rate, model.total_written))
        dense = max(1, self.models["dense"].total_written.bytes)
        print_table(
            ["", "hit tokens", "hit rate", "chunks written", "bytes written", "of dense"],
            [
                [label, f"{hits:,}", f"{rate:.1%}", *tally_cells(tally), f"{tally.bytes / dense:.0%}"]
                for label, hits, rate, tally in rows
            ],
        )

    def _show_groups(self) -> None:
        groups = zip(self.layout.groups, self.counts.written, self.models["dense"].written, strict=True)
        print_table(
            ["group", "chunks written", "bytes written", "dense writes"],
            [[spec.label, *tally_cells(tally), human_bytes(dense.bytes)] for spec, tally, dense in groups],
        )

    def _show_chunks(self) -> None:
        counts = self.counts
        tallies = {
            "written": self._written,
            "already there": counts.existing,
            "unreachable, never offered": counts.unreachable,
            "failed": counts.failed,
            "read back": counts.read,
        }
        print_table(
            ["of all requests' puts", "chunks", "bytes"],
            [[label, *tally_cells(tally)] for label, tally in tallies.items()],
        )
