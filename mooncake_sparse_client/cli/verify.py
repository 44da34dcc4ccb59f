"""``verify``: read a corpus's cache back, and say what of it is there, damaged or gone.

Exit status: 0 all of it is there; 1 something is not, or a line is no prompt; 2 it could not be looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from ..errors import ConfigError
from ..jobs.options import JobOptions
from ..jobs.prompts import read_prompts
from ..jobs.verifying import VerifyReport, verify_corpus
from .arguments import check_figures, write_figures
from .job_arguments import (
    MEMORY,
    add_cache_arguments,
    add_store_arguments,
    cache_of,
    client_of,
    layout_of,
    tokenizer_for,
)
from .job_progress import JobProgress, one_line
from .table import print_table, tally_cells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cache_arguments(parser)
    add_store_arguments(parser)
    parser.add_argument("--spool", type=Path, metavar="FOLDER", help="for the corpus's tokens; default: TMPDIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")


def run(arguments: argparse.Namespace) -> int:
    """See the module's exit statuses."""
    if not arguments.corpus.is_file():
        raise ConfigError(f"there is no corpus {arguments.corpus}")
    if arguments.store == MEMORY:
        raise ConfigError(f"--store {MEMORY} is empty when it begins: name the store that a job has filled")
    if arguments.json is not None:
        check_figures(arguments.json)
    report = asyncio.run(_verify(arguments))
    if arguments.json is not None:
        write_figures(arguments.json, json.dumps(report.figures(), indent=2) + "\n")
    _show(report)
    return 0 if report.is_whole and not report.wrong_lines else 1


async def _verify(arguments: argparse.Namespace) -> VerifyReport:
    layout, dtype = await asyncio.to_thread(layout_of, arguments)
    client = client_of(arguments, cache_of(arguments, layout, dtype))
    bar: list[JobProgress] = []

    def progress(tokens: int, total: int) -> None:
        if not bar:
            bar.append(JobProgress(total, name="verify", writes=False))
        bar[0].update(tokens, 0)

    prompts = read_prompts(arguments.corpus, tokenizer_for(arguments))
    options = JobOptions(spool=arguments.spool, patience_seconds=arguments.patience)
    try:
        async with client:
            return await verify_corpus(client, prompts, options, progress=progress, tell=_tell)
    finally:
        for shown in bar:
            shown.close()


def _tell(text: str) -> None:
    print(f"verify: {one_line(text)}", file=sys.stderr, flush=True)


def _show(report: VerifyReport) -> None:
    print(f"cache: {report.cache_id}")
    print(
        f"{report.prompts:,} prompts, {report.tokens_distinct:,} distinct tokens in whole blocks; "
        f"{report.tokens_intact:,} of them are wholly there\n"
    )
    tallies = {
        "there, every byte right": report.intact,
        "gone": report.missing,
        "damaged": report.damaged,
        "not to be read for now": report.unread,
    }
    print_table(
        ["of the chunks that a job keeps", "chunks", "bytes"],
        [[label, *tally_cells(tally)] for label, tally in tallies.items()],
    )
    if report.wrong_lines:
        print(f"{report.wrong_lines:,} lines are no prompt")
    if not report.is_whole:
        print("`precompute` writes what is gone again, with --read-back what is damaged too.")
