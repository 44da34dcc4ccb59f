"""A ``JobReport`` as one HTML page: figures, plots and what went wrong. matplotlib is loaded only to draw it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Final

from ..errors import ConfigError
from ..jobs.report import JobReport
from .job_plots import draw_plots, load_matplotlib
from .job_progress import human_time, one_line
from .job_summary import advice, chunk_rows, group_table, status_line, token_rows
from .table import human_bytes

_STYLE: Final = """
:root { color-scheme: light; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222; background: #fff;
  font: 15px/1.45 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .25rem; }
.status { border-left: .35rem solid; padding: .4rem .8rem; margin: 0; background: #f6f7f8; overflow-wrap: anywhere; }
.status p { margin: .3rem 0 0; }
.done { border-color: #2e7d32; } .incomplete { border-color: #e68a00; } .stopped { border-color: #c62828; }
.figures { display: flex; flex-wrap: wrap; gap: 0 4rem; align-items: flex-start; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .2rem; }
th, td { padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #e3e5e8; text-align: right; vertical-align: top; }
th { font-weight: 400; color: #555; }
th:first-child { text-align: left; white-space: pre; }
td:last-child, th:last-child { padding-right: 0; }
.words td, .words th { text-align: left; overflow-wrap: anywhere; }
figure { margin: 1rem 0 0; break-inside: avoid; }
figcaption { color: #555; font-size: .85rem; }
svg { width: 100%; height: auto; }
svg text { font-family: inherit !important; }
@media print { body { margin: 0; max-width: none; } table { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def check_page(path: Path) -> None:
    """Raises what ``write_page`` would, before the work that it is to report: ``MissingLibraryError`` without
    matplotlib, ``ConfigError`` for a file that cannot be written. A file that is there stays as it is."""
    load_matplotlib()
    with _beside(path):
        pass


def write_page(report: JobReport, path: Path, *, title: str) -> None:
    """Write the page to ``path``, in the place of a page that is there; the same report always gives the same bytes.

    Raises ``MissingLibraryError`` without matplotlib, ``ConfigError`` for a file that cannot be written.
    """
    page = _page(report, title)
    with _beside(path) as draft:
        draft.write_text(page, encoding="utf-8")
        draft.replace(os.path.realpath(path))


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A new file in the folder of ``path``, gone afterwards."""
    target = Path(os.path.realpath(path))  # a link stays one
    draft = target.with_name(f".{target.name[:100]}.{os.getpid()}.tmp")
    try:
        if target.exists() and not target.is_file():
            raise ConfigError(f"the report {path} cannot be written: it is a folder, or no plain file")
        draft.touch()
        try:
            yield draft
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"the report {path} cannot be written: {error.strerror}") from error


def _page(report: JobReport, title: str) -> str:
    title = one_line(title)
    plots = draw_plots(report)
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in advice(report))
    tokens = _table("tokens", ["", "tokens", "share"], token_rows(report))
    chunks = _table("chunks", ["", "chunks", "bytes"], chunk_rows(report))
    run = _table("run", ["", ""], _run_rows(report))
    parts = (
        f"<h1>{escape(title)}</h1>",
        f'<div class="status {escape(report.status)}"><b>{escape(status_line(report))}</b>{paragraphs}</div>',
        f'<div class="figures">{tokens}<div>{chunks}{run}</div></div>',
        *(_figure(name, *plot) for name, plot in plots.items()),
        _table("bytes written, by group and reason", *group_table(report)) if report.groups else "",
        _wrong(report),
    )
    body = "\n".join(part for part in parts if part)
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _run_rows(report: JobReport) -> list[list[str]]:
    rate = f"{report.tokens_computed / report.seconds:,.0f}" if report.seconds > 0 else "-"
    rows = [
        ["prompts", f"{report.prompts:,}"],
        ["wrong lines, left out", f"{report.wrong_lines:,}"],
        ["reading the corpus", human_time(report.seconds_reading)],
        ["time behind that", human_time(report.seconds)],
        ["tokens computed a second", rate],
        ["waited for the store", human_time(report.seconds_waited)],
        ["passes over the store", f"{report.passes:,}"],
        ["earlier runs", f"{report.earlier.runs:,}"],
    ]
    if report.earlier.runs:
        rows += [
            ["  tokens computed", f"{report.earlier.tokens_computed:,}"],
            ["  chunks written", f"{report.earlier.chunks_written:,}"],
            ["  bytes written", human_bytes(report.earlier.bytes_written)],
            ["  time", human_time(report.earlier.seconds)],
        ]
    return rows


def _wrong(report: JobReport) -> str:
    if not report.wrong:
        return ""
    rows = [[f"{wrong.line:,}", one_line(wrong.reason)] for wrong in report.wrong]
    caption = f"wrong lines: the first {len(rows):,} of {max(report.wrong_lines, len(rows)):,}"
    return _table(caption, ["line", "why it is no prompt"], rows, style="words")


def _table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, style: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = [
        f'<tr><th scope="row">{escape(label)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for label, *cells in rows
    ]
    named = f' class="{style}"' if style else ""
    top = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    return f"<table{named}><caption>{escape(caption)}</caption>{top}<tbody>{''.join(lines)}</tbody></table>"


def _figure(name: str, heading: str, caption: str, svg: str) -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure data-plot="{name}"><h2>{escape(heading)}</h2>\n{svg}{below}</figure>'
