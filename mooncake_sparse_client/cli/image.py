"""A ``Picture`` as a PNG or SVG file. matplotlib is loaded only to draw one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, MissingLibraryError
from .picture import OUTSIDE, SKIPPED, Grid, Picture, Row, grid_of, shares, tick_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours that people who see few of them can tell apart too, and what they stand for.
PARTS: Final = {
    "dense": ("#4878a8", "always kept (dense group)"),
    "segment": ("#2a9d8f", "kept for the retention interval"),
    "replay": ("#e68a00", "kept for a replay boundary"),
    "boundary": ("#8e44ad", "kept for a caller's boundary"),
    "junction": ("#c2185b", "kept for a learned junction"),
    "loaded": ("#37474f", "loaded"),
    SKIPPED: ("#e9ebee", "left out"),
}
_LINES: Final = {
    "segment": "boundary of the interval",
    "replay": "replay boundary",
    "boundary": "caller's boundary",
    "junction": "learned junction",
}
_BACKGROUND: Final = "#ffffff"
#: Cells over the width of the picture.
_CELLS: Final = 1600
#: A cell that keeps little of its chunks is drawn as if it kept this share of them: else it would not be seen.
_LEAST_SHARE: Final = 0.4
#: More chunks than these are drawn without lines between, and more boundaries of the interval not at all.
_MOST_LINES: Final = 160
_FORMATS: Final = (".png", ".svg")


def check_image(path: Path) -> None:
    """Raises ``ConfigError`` unless ``path`` ends like a file that can be drawn."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--image is {str(path)!r}; a picture is a file that ends in {' or '.join(_FORMATS)}")


def draw(picture: Picture, path: Path) -> None:
    """Draw to ``path``; the same picture always gives the same bytes.

    Raises ``MissingLibraryError`` without matplotlib, ``ConfigError`` for a file that cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingLibraryError(
            f"--image needs matplotlib, which does not load ({error}); "
            "pip install 'mooncake-sparse-client[plot]' installs it"
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings are
        matplotlib.rcParams["svg.hashsalt"] = "mooncake-sparse-client"
        figure = Figure(figsize=(12, _height(picture)), layout="constrained")
        _fill(figure, picture)
        kind = path.suffix.lower().removeprefix(".")
        try:
            figure.savefig(path, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        except OSError as error:
            raise ConfigError(f"--image {path} cannot be written: {error.strerror}") from error


def _height(picture: Picture) -> float:
    """Inches."""
    return 1.6 + sum(0.5 + 0.42 * len(section.rows) for section in picture.sections)


def _fill(figure: Figure, picture: Picture) -> None:
    grid = grid_of(picture.end_token, picture.alignment, _CELLS)
    figure.suptitle(picture.title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    heights = [len(section.rows) + 0.5 for section in picture.sections]
    plots = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    for axes, section in zip(plots, picture.sections, strict=True):
        axes.set_title(section.title, loc="left", fontsize=10)
        for number, row in enumerate(section.rows):
            _draw_row(axes, number, row, grid)
        _frame(axes, picture, grid, section.rows)
    _draw_boundaries(plots[0], picture)
    _draw_legend(figure, picture)


def _draw_row(axes: Axes, number: int, row: Row, grid: Grid) -> None:
    top, bottom = number - 0.4, number + 0.4
    axes.imshow(
        colours(row, grid)[None], extent=(0, grid.end_token, bottom, top), aspect="auto", interpolation="nearest"
    )
    if len(row.chosen) <= _MOST_LINES:
        edges = [chunk * row.block_size for chunk in range(1, len(row.chosen))]
        axes.vlines(edges, top, bottom, color=_BACKGROUND, linewidth=0.6)


def colours(row: Row, grid: Grid) -> NDArray[np.float64]:
    """Red, green and blue of each cell, from 0 to 1: of its chunks' colours, mixed."""
    parts = {part: shares(chunks, row.block_size, grid) for part, chunks in row.parts.items() if chunks.any()}
    outside = parts.pop(OUTSIDE, np.zeros(grid.count))
    parts.pop(SKIPPED, None)
    chosen = shares(row.chosen, row.block_size, grid)
    shown = np.where(chosen > 0, np.maximum(chosen, np.minimum(_LEAST_SHARE, 1 - outside)), 0)
    mixed = np.outer(outside, _rgb(_BACKGROUND)) + np.outer(1 - outside - shown, _rgb(PARTS[SKIPPED][0]))
    stretch = np.divide(shown, chosen, out=np.zeros(grid.count), where=chosen > 0)
    for part, share in parts.items():
        mixed += np.outer(share * stretch, _rgb(PARTS[part][0]))
    return np.clip(mixed, 0, 1)


def _rgb(colour: str) -> NDArray[np.float64]:
    return np.frombuffer(bytes.fromhex(colour.removeprefix("#")), dtype=np.uint8) / 255


def _frame(axes: Axes, picture: Picture, grid: Grid, rows: Sequence[Row]) -> None:
    axes.set_xlim(0, picture.end_token)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    step = tick_step(grid, picture.alignment, grid.count // 12)
    ticks = range(0, picture.end_token + 1, step)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    mixed = any(row.block_size < grid.cell for row in rows)
    axes.set_xlabel("tokens" + ("; lighter: only some of the chunks there" if mixed else ""), fontsize=9)
    axes.tick_params(length=3, labelsize=9)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_boundaries(axes: Axes, picture: Picture) -> None:
    for reason, positions in _drawn_boundaries(picture).items():
        faint = reason == "segment"
        axes.vlines(
            positions,
            *(-0.5, len(picture.sections[0].rows) - 0.5),
            color=PARTS[reason][0],
            linewidth=0.8 if faint else 1.4,
            linestyle=":" if faint else "--",
            clip_on=False,
        )


def _drawn_boundaries(picture: Picture) -> dict[str, Sequence[int]]:
    """By the reason. Too many of the interval's would hide the rows."""
    return {
        reason: positions
        for reason, positions in picture.boundaries.items()
        if reason != "segment" or len(positions) <= _MOST_LINES
    }


def _draw_legend(figure: Figure, picture: Picture) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [row for section in picture.sections for row in section.rows]
    used = [part for part in PARTS if any(row.parts[part].any() for row in rows if part in row.parts)]
    patches = [Patch(color=PARTS[part][0], label=PARTS[part][1]) for part in used]
    lines = [
        Line2D([], [], color=PARTS[reason][0], linestyle=":" if reason == "segment" else "--", label=_LINES[reason])
        for reason in _drawn_boundaries(picture)
    ]
    figure.legend(
        handles=[*patches, *lines], loc="outside lower left", ncols=4, frameon=False, fontsize=9, handlelength=1.6
    )
