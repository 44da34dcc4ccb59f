"""Counting chunks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tally:
    """A number of chunks, and their payload bytes."""

    chunks: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, chunks: int, page_size_bytes: int | None) -> Tally:
        """So many chunks of one group; without bytes where the layout does not say."""
        return cls(chunks, chunks * (page_size_bytes or 0))

    def figures(self) -> dict[str, int]:
        """Plain values, ready for JSON."""
        return {"chunks": self.chunks, "bytes": self.bytes}

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.chunks + other.chunks, self.bytes + other.bytes)

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.chunks - other.chunks, self.bytes - other.bytes)


NOTHING = Tally()
