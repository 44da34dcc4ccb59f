"""A ``Picture`` as lines of text."""

from __future__ import annotations

from typing import Final

import numpy as np

from .picture import OUTSIDE, Grid, Picture, Row, grid_of, shares, tick_step

#: From a cell with none of its chunks to one with all of them.
SHADES: Final = "·░▒▓█"
PLAIN_SHADES: Final = ".:+*#"
MOST_CELLS: Final = 100
_LEAST_CELLS: Final = 20
#: Boundaries on the line below the rows, and what they are. Where several lie in one cell, the last is shown.
_MARKS: Final = {
    "segment": ("s", "of the retention interval"),
    "replay": ("r", "replay"),
    "boundary": ("b", "caller's"),
    "junction": ("j", "learned junction"),
}


def shades_for(encoding: str | None) -> str:
    """``SHADES`` if text in ``encoding`` can hold them (None: any text), else ASCII."""
    try:
        SHADES.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_SHADES
    return SHADES


def sketch(picture: Picture, columns: int, shades: str = SHADES) -> list[str]:
    """The picture in lines of at most ``columns`` characters, if that leaves room for some cells."""
    marks = "boundaries"
    label = max(len(text) for text in (marks, *(row.label for section in picture.sections for row in section.rows)))
    room = min(MOST_CELLS, columns - label - 3 - len(str(picture.end_token)))
    grid = grid_of(picture.end_token, picture.alignment, max(room, _LEAST_CELLS))
    lines = []
    for section in picture.sections:
        lines += [section.title, f"{'':{label}}  {ruler(grid, picture.alignment)}"]
        lines += [f"{row.label:{label}}  {cells(row, grid, shades)}" for row in section.rows]
        if section is picture.sections[0] and picture.boundaries:
            lines.append(f"{marks:{label}}  {boundary_marks(picture, grid)}")
        lines.append("")
    lines.append(
        f"one cell is {grid.cell} tokens; of its chunks: {shades[0]} none, {shades[1:4]} some, {shades[4]} all"
    )
    if picture.boundaries:
        lines.append(f"{marks}: " + ", ".join(" ".join(_MARKS[reason]) for reason in picture.boundaries))
    return [line.rstrip() for line in lines]


def cells(row: Row, grid: Grid, shades: str) -> str:
    """One character a cell: how much of it the group keeps or loads; a space where that is not spoken of."""
    kept = shares(row.chosen, row.block_size, grid).tolist()
    outside = row.parts.get(OUTSIDE, np.zeros_like(row.chosen))
    hidden = shares(outside, row.block_size, grid).tolist()
    return "".join(" " if blank == 1 else shades[_level(share)] for share, blank in zip(kept, hidden, strict=True))


def _level(share: float) -> int:
    """0 for none, 4 for all, 1 to 3 between."""
    return 1 + int(share * 3) if share else 0


def ruler(grid: Grid, alignment: int) -> str:
    """Token positions, each behind a bar that stands at it."""
    end = str(grid.end_token)
    step = tick_step(grid, alignment, len(end) + 2)
    line = ""
    for position in range(0, grid.end_token, step):
        text = f"|{position}"
        if position // grid.cell + len(text) < grid.count:
            line = line.ljust(position // grid.cell) + text
    return f"{line:{grid.count}}|{end}"


def boundary_marks(picture: Picture, grid: Grid) -> str:
    """A letter in the last cell before each boundary."""
    line = [" "] * grid.count
    for reason, (mark, _) in _MARKS.items():
        for position in picture.boundaries.get(reason, ()):
            line[(position - 1) // grid.cell] = mark
    return "".join(line)
