"""The plots of a ``JobReport``, as SVG. matplotlib is loaded only to draw them."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from ..core.tally import NOTHING
from ..errors import MissingLibraryError
from ..jobs.report import JobReport, Sample
from .image import PARTS
from .job_summary import reasons_of
from .table import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: By what became of tokens: the darker, the more was done for them.
TOKEN_COLOURS: Final = {
    "computed": "#4b3f72",
    "skipped": "#8d7fc0",
    "reused": "#c3b9e3",
    "unstored": "#d5d2cb",
    "not reached": "#f3e2e2",
}
RATE_COLOURS: Final = {"tokens": "#334e68", "bytes": "#9d6b53"}
_OTHER_REASON: Final = ("#9aa0a6", "kept for another reason")
_DARK: Final = {"computed", "skipped"}
#: Over the time of a run; as many samples as there may be, the page stays small.
_BINS: Final = 160
_LONGEST_LABEL: Final = 40
_TOKEN_UNITS: Final = {"tokens": 1, "thousand tokens": 10**3, "million tokens": 10**6, "billion tokens": 10**9}
_BYTE_UNITS: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_TIME_UNITS: Final = {"seconds": 1, "minutes": 60, "hours": 3600}


def load_matplotlib() -> None:
    """Raises ``MissingLibraryError`` where it does not load."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingLibraryError(
            f"a report as a page needs matplotlib, which does not load ({error}); "
            "pip install 'mooncake-sparse-client[plot]' installs it"
        ) from error


def draw_plots(report: JobReport) -> dict[str, tuple[str, str, str]]:
    """Heading, caption and SVG, by name."""
    load_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    drawn = {}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings are
        # Text stays text, which can be searched, and a $ in it a $.
        matplotlib.rcParams.update({"svg.fonttype": "none", "text.parse_math": False, "font.size": 10})
        for name, heading, caption, height, fill in (
            ("tokens", "Tokens, by what became of them", _token_caption(report), 1.5, _fill_tokens),
            ("bytes", "Bytes written, by group and reason", "", 1.4 + 0.36 * len(report.groups), _fill_bytes),
            ("throughput", "Throughput", "Distinct tokens computed or found; values written.", 3.8, _fill_rates),
        ):
            matplotlib.rcParams["svg.hashsalt"] = f"mooncake-sparse-client {name}"
            figure = Figure(figsize=(9, height), layout="constrained")
            figure.patch.set_visible(False)
            fill(figure, report)
            drawn[name] = (heading, caption, _svg(figure, name, heading))
    return drawn


def _svg(figure: Figure, name: str, title: str) -> str:
    """An element for a page that has others: every id in it begins with ``name``."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(  # only inside of tags: what is written in the plot stays as it is
        r"<[^>]*>", lambda tag: re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{name}-", tag[0]), text
    )
    head, _, rest = text.partition(">")
    return f'{head} role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>{rest}'


def token_parts(report: JobReport) -> dict[str, int]:
    """The prompts' tokens, each counted once, by what became of them."""
    computed = max(0, report.tokens_computed - report.tokens_recomputed)
    parts = {
        "computed": computed,
        "skipped": report.tokens_skipped,
        "reused": report.tokens_reused,
        "unstored": report.tokens_unstored,
    }
    return parts | {"not reached": max(0, report.tokens_total - sum(parts.values()))}


def _token_caption(report: JobReport) -> str:
    words = "Skipped: in the store already. Reused: computed for another prompt. Unstored: behind the last whole block."
    if report.tokens_recomputed:
        words += f" {report.tokens_recomputed:,} tokens were computed more than once, and are drawn once."
    return words


def _fill_tokens(figure: Figure, report: JobReport) -> None:
    parts = {name: tokens for name, tokens in token_parts(report).items() if tokens}
    total = sum(parts.values())
    if not total:
        _say(figure, "no tokens")
        return
    axes = figure.subplots()
    unit, divisor = _unit(total, _TOKEN_UNITS)
    left = 0.0
    for name, tokens in parts.items():
        width, share = tokens / divisor, tokens / total
        label = f"{name} {tokens:,} ({share:.1%})"
        axes.barh(0, width, left=left, color=TOKEN_COLOURS[name], edgecolor="white", linewidth=0.8, label=label)
        if share >= 0.013 * len(name):  # it fits
            ink = "white" if name in _DARK else "#222222"
            axes.text(left + width / 2, 0, name, ha="center", va="center", color=ink)
        left += width
    axes.set_xlim(0, total / divisor)
    axes.set_yticks([])
    _frame(axes, unit)
    _legend(figure, axes, columns=3)


def _fill_bytes(figure: Figure, report: JobReport) -> None:
    totals = [sum(group.written.values(), NOTHING).bytes for group in report.groups]
    if not any(totals):
        _say(figure, "nothing written")
        return
    axes = figure.subplots()
    unit, divisor = _unit(max(totals), _BYTE_UNITS)
    rows = range(len(totals))
    left = np.zeros(len(totals))
    for reason in reasons_of(report):
        widths = np.array([group.written.get(reason, NOTHING).bytes / divisor for group in report.groups])
        colour, label = PARTS.get(reason, _OTHER_REASON)
        axes.barh(rows, widths, left=left, height=0.66, color=colour, label=f"{_drawable(reason)}: {label}")
        left += widths
    for row, total in enumerate(totals):
        axes.annotate(
            human_bytes(total), (total / divisor, row), (4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(rows, [_drawable(group.label) for group in report.groups])
    axes.set_ylim(len(totals) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max(totals) / divisor)
    _frame(axes, unit)
    _legend(figure, axes, columns=2)


def _fill_rates(figure: Figure, report: JobReport) -> None:
    binned = rates(report.samples)
    if binned is None:
        _say(figure, "too short a run to draw: fewer than two samples")
        return
    edges, tokens, written = binned
    time_unit, time_divisor = _unit(float(edges[-1]), _TIME_UNITS)
    panels = figure.subplots(2, 1, sharex=True)
    for axes, name, values, units in zip(
        panels, RATE_COLOURS, (tokens, written), (_TOKEN_UNITS, _BYTE_UNITS), strict=True
    ):
        top = float(values.max())
        unit, divisor = _unit(top, units)
        axes.stairs(values / divisor, edges / time_divisor, fill=True, color=RATE_COLOURS[name])
        axes.set_title(f"{unit} a second", loc="left", fontsize=10)
        axes.set_ylim(0, 1.08 * top / divisor or 1)
        _frame(axes, "", grid="y")
    panels[-1].set_xlim(0, float(edges[-1]) / time_divisor)
    panels[-1].set_xlabel(time_unit)


def rates(
    samples: Sequence[Sample],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]] | None:
    """Times that part a run evenly, and tokens and bytes a second between each two. None for too few samples."""
    counted = np.array([(0, 0, 0), *samples], dtype=np.float64)
    counted = np.maximum.accumulate(counted)  # a clock or a count that went back would give rates below zero
    seconds, *columns = counted.T
    if len(samples) < 2 or seconds[-1] <= 0:
        return None
    edges = np.linspace(0, seconds[-1], min(_BINS, len(samples)) + 1)
    tokens, written = (np.diff(np.interp(edges, seconds, column)) / np.diff(edges) for column in columns)
    return edges, tokens, written


def _unit(top: float, units: Mapping[str, int]) -> tuple[str, int]:
    """The largest unit of which ``top`` has at least one, or the smallest."""
    return max(((name, size) for name, size in units.items() if size <= max(top, 1)), key=lambda unit: unit[1])


def _drawable(text: str) -> str:
    """What any font has, and XML allows."""
    plain = "".join(letter if " " <= letter <= "~" else "?" for letter in text)
    return plain if len(plain) <= _LONGEST_LABEL else f"{plain[:_LONGEST_LABEL]}..."


def _say(figure: Figure, words: str) -> None:
    figure.set_size_inches(9, 0.6)
    figure.text(0.5, 0.5, words, ha="center", va="center", color="#777777")


def _frame(axes: Axes, label: str, *, grid: str = "x") -> None:
    axes.set_axisbelow(True)
    axes.grid(axis="x" if grid == "x" else "y", color="#e3e5e8", linewidth=0.8)
    axes.tick_params(length=0, labelsize=9)
    axes.set_xlabel(label, fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(figure: Figure, axes: Axes, *, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False, fontsize=9, handlelength=1.2)
