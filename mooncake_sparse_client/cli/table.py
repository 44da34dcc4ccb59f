"""Plain tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.tables import table_lines
from ..core.tally import Tally


def human_bytes(number: int) -> str:
    """``number`` of bytes in the largest unit that leaves at least one."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("\n".join(table_lines(header, rows)), end="\n\n")


def tally_cells(tally: Tally) -> list[str]:
    """Chunks and bytes, as cells of a row."""
    return [f"{tally.chunks:,}", human_bytes(tally.bytes)]
