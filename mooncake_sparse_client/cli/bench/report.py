"""What the benchmark found: as figures for a file, as tables for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ... import __version__
from ..table import print_table
from .measure import Comparison, Unit, machine

_RATE_NAMES: Mapping[Unit, str] = {
    "GB/s": "throughput_gbps",
    "keys/s": "keys_per_second",
    "lookups/s": "lookups_per_second",
    "tokens/s": "tokens_per_second",
    "chunks/s": "chunks_per_second",
}


@dataclass(frozen=True, slots=True)
class BenchReport:
    """One run: its comparisons, and the figures that compare nothing."""

    plane: str
    repeats: int
    comparisons: Sequence[Comparison]
    figures: Mapping[str, float]
    seconds: float

    def as_json(self) -> dict[str, object]:
        """Plain values. ``ratios``: ours over theirs; ``figures``: rates of both sides, and the others."""
        return {
            "plane": self.plane,
            "version": __version__,
            "repeats": self.repeats,
            "seconds": round(self.seconds, 1),
            "machine": machine(),
            "ratios": {found.name: asdict(found.ratio) for found in self.comparisons},
            "figures": {**self.figures, **self._rates()},
        }

    def show(self) -> None:
        """Print the tables."""
        print(f"{self.plane} plane, {self.repeats} repeats, {self.seconds:.0f} s; ratios are ours over theirs\n")
        if self.comparisons:
            header = ["", "ours", "theirs", "", "ratio", "min", "max"]
            print_table(header, [_row(found) for found in self.comparisons])
        if self.figures:
            print_table(["figure", ""], [[name, f"{value:,.2f}"] for name, value in self.figures.items()])

    def _rates(self) -> dict[str, float]:
        return {
            f"{_RATE_NAMES[found.unit]}.{found.name}.{side}": rate
            for found in self.comparisons
            for side, rate in zip(("ours", "theirs"), found.typical, strict=True)
        }


def _row(found: Comparison) -> list[str]:
    ratio = found.ratio
    rates = [f"{rate:,.2f}" if rate < 100 else f"{rate:,.0f}" for rate in found.typical]
    return [found.name, *rates, found.unit, f"{ratio.median:.2f}", f"{ratio.min:.2f}", f"{ratio.max:.2f}"]
