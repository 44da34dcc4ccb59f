"""``bench``: measure this client beside the straightforward way, in one run on a Mooncake of its own."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Final

from tqdm import tqdm

from ...errors import ConfigError
from ..arguments import write_figures
from .data import DATA
from .lookup import LOOKUP
from .report import BenchReport
from .session import FULL, QUICK, Plane, Session, matching

_PLANES: Final[dict[str, Plane]] = {"data": DATA, "lookup": LOOKUP}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plane", choices=sorted(_PLANES), default="data", help="what to measure; default: data")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")
    parser.add_argument("--repeats", type=int, metavar="N", help=f"of each comparison; default: {FULL.repeats}")
    parser.add_argument(
        "--quick", action="store_true", help="about a minute: less data, shorter prompts, fewer repeats"
    )
    parser.add_argument(
        "--only", action="append", metavar="GLOB", help="measurements by name, such as 'get.raw.*'; may be repeated"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and report; 0 unless an error is raised."""
    plane, only = _PLANES[arguments.plane], arguments.only or ["*"]
    plane.check(only)
    effort = QUICK if arguments.quick else FULL
    if arguments.repeats is not None:
        if arguments.repeats < 1:
            raise ConfigError(f"--repeats must be positive, not {arguments.repeats}")
        effort = replace(effort, repeats=arguments.repeats)
    if arguments.json is not None:
        write_figures(arguments.json, "")  # a run takes minutes: say now that its figures have no place to go
    started = monotonic()
    # No bar unless somebody watches.
    with tqdm(total=len(matching(plane.names, only)), desc="measuring", disable=None) as bar:
        session = Session(effort, only=only, done=lambda _: bar.update())
        asyncio.run(plane.measure(session))
    report = BenchReport(arguments.plane, effort.repeats, session.comparisons, session.figures, monotonic() - started)
    report.show()
    if arguments.json is not None:
        write_figures(arguments.json, json.dumps(report.as_json(), indent=2) + "\n")
    return 0
