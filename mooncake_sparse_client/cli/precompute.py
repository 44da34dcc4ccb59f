"""``precompute``: compute what a store lacks of the KV cache of a corpus, and put it there.

Exit status: 0 all of it is in the store; 1 all but wrong lines, or chunks that the store did not keep; 2 it could not
begin; 3 it was stopped, or the store was out of reach for too long: the same command with ``--resume`` goes on; 4 the
producer failed.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..config_values import parse_size
from ..errors import ConfigError, InvalidTokensError, ProducerError
from ..jobs.corpus import read_corpus
from ..jobs.job import PrecomputeJob
from ..jobs.options import DEFAULT_OPTIONS, JobOptions
from ..jobs.planning import CorpusTotals, JobEstimate, JobPlanner
from ..jobs.prompts import Prompt, WrongLine, read_prompts
from ..jobs.ray_engine import RayOptions, run_on_ray
from ..jobs.report import JobReport
from ..jobs.sharding import Shard, share_out
from .arguments import check_figures, naming, write_figures
from .job_arguments import (
    MEMORY,
    add_cache_arguments,
    add_store_arguments,
    add_writing_arguments,
    cache_of,
    client_of,
    layout_of,
    producer_of,
    tokenizer_for,
)
from .job_page import check_page, write_page
from .job_progress import JobProgress
from .job_summary import show_estimate, show_summary

_DONE, _INCOMPLETE, _STOPPED, _FAILED = 0, 1, 3, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = DEFAULT_OPTIONS
    add_cache_arguments(parser)
    add_store_arguments(parser)
    add_writing_arguments(parser)
    job = parser.add_argument_group("the job")
    job.add_argument("--dry-run", action="store_true", help="say what it would take; no store is needed")
    job.add_argument(
        "--journal",
        type=Path,
        metavar="FILE",
        help="of its progress; default: CORPUS.journal (.I-of-N)",
    )
    job.add_argument("--resume", action="store_true", help="go on where the journal ends, or begin")
    job.add_argument(
        "--shard",
        metavar="I/N",
        help="do this part of N; the trunk that parts share is done by part 1, or before them all as trunk/N",
    )
    job.add_argument("--on-wrong", choices=("skip", "stop"), default=defaults.on_wrong, help="lines that are no prompt")
    job.add_argument(
        "--keep-in-process", action="store_true", help="let the results lie in a segment that ends with this process"
    )
    job.add_argument(
        "--read-back", action="store_true", help="believe only what was read of what is stored; replaces damaged values"
    )
    job.add_argument(
        "--step-tokens", type=int, default=defaults.step_tokens, metavar="N", help="computed and put at a time"
    )
    job.add_argument("--pending", default="256MB", metavar="SIZE", help="computed and not yet stored; default: 256MB")
    job.add_argument(
        "--trunk-wait",
        type=float,
        default=defaults.trunk_seconds,
        metavar="SECONDS",
        help="for part 1 to store the trunk; then a part computes it itself; default: %(default)s",
    )
    job.add_argument(
        "--spool", type=Path, metavar="FOLDER", help="for the corpus's tokens, 4 bytes each; default: TMPDIR"
    )
    job.add_argument("--report", type=Path, metavar="FILE", help="write a page with plots to this .html file")
    job.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    ray = parser.add_argument_group("on a cluster")
    ray.add_argument("--engine", choices=("local", "ray"), default="local", help="default: %(default)s")
    ray.add_argument("--workers", type=int, default=2, metavar="N", help="of ray: parts of the job; default: 2")
    ray.add_argument("--ray-address", default="", metavar="ADDRESS", help="default: RAY_ADDRESS, else Ray starts here")
    ray.add_argument("--ray-cpus", type=float, default=1, metavar="N", help="of each part; default: 1")
    ray.add_argument("--ray-gpus", type=float, default=0, metavar="N", help="of each part; default: 0")


def run(arguments: argparse.Namespace) -> int:
    """See the module's exit statuses."""
    if not arguments.corpus.is_file():
        raise ConfigError(f"there is no corpus {arguments.corpus}")
    if arguments.json is not None:
        check_figures(arguments.json)  # a job may be long: say now that its figures have no place to go
    if arguments.dry_run:
        return _dry_run(arguments)
    if arguments.report is not None:
        with naming("--report"):
            check_page(arguments.report)
    try:
        report = _run_on_ray(arguments) if arguments.engine == "ray" else run_part(arguments, _shard(arguments))
    except ProducerError as error:
        traceback.print_exception(error.__cause__ or error)
        print(f"precompute: --producer {arguments.producer}: {error}", file=sys.stderr)
        return _FAILED
    name = arguments.layout or f"that of {arguments.model or arguments.producer}"
    # Files first: who reads the output may be gone.
    if arguments.json is not None:
        write_figures(arguments.json, json.dumps(report.figures(), indent=2) + "\n")
    if arguments.report is not None:
        write_page(report, arguments.report, title=f"{arguments.corpus.name}: {name}")
    show_summary(report, name)
    if report.status == "stopped":
        return _STOPPED
    return _INCOMPLETE if report.status == "incomplete" or report.wrong_lines else _DONE


def run_part(arguments: argparse.Namespace, shard: Shard) -> JobReport:
    """Do one part of the job, on this machine."""
    producer, dtype = producer_of(arguments)
    cache = cache_of(arguments, producer.layout, dtype)
    client, options = client_of(arguments, cache), options_of(arguments, shard)
    prompts = _prompts(arguments)

    async def job() -> JobReport:
        bar: list[JobProgress] = []

        def watch(tokens: int) -> JobProgress:
            bar.append(JobProgress(tokens))
            return bar[0]

        async with client:
            job = PrecomputeJob(client, producer, prompts, options, watch=watch)
            try:
                with _signals(job.stop):
                    return await job.run()
            finally:
                for shown in bar:
                    shown.close()

    print(f"precompute: reading {arguments.corpus}", file=sys.stderr, flush=True)
    try:
        return asyncio.run(job())
    except asyncio.CancelledError:  # by the second Ctrl-C
        raise KeyboardInterrupt from None


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C call ``stop``; a second Ctrl-C gives up what is under way."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # noqa: S101 - it runs in one

    def first() -> None:
        stop()
        loop.add_signal_handler(signal.SIGINT, task.cancel)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def options_of(arguments: argparse.Namespace, shard: Shard) -> JobOptions:
    """Raises ``ConfigError``."""
    journal = arguments.journal or arguments.corpus.with_name(f"{arguments.corpus.name}.journal")
    if shard.part:
        journal = journal.with_name(f"{journal.name}.{shard.number or 'trunk'}-of-{shard.count}")
    if arguments.store == MEMORY:  # what a journal says would not be there any more
        if arguments.resume or arguments.journal:
            raise ConfigError(f"--store {MEMORY} ends with this process: there is nothing to resume, and no journal")
        journal = None
    return JobOptions(
        journal=journal,
        resume=arguments.resume,
        shard=shard,
        on_wrong=arguments.on_wrong,
        keep_in_process=arguments.keep_in_process,
        read_back=arguments.read_back,
        step_tokens=arguments.step_tokens,
        max_bytes_pending=parse_size(arguments.pending, "--pending"),
        patience_seconds=arguments.patience,
        trunk_seconds=arguments.trunk_wait,
        spool=arguments.spool,
    )


def _shard(arguments: argparse.Namespace) -> Shard:
    if arguments.shard is None:
        return Shard()
    with naming("--shard"):
        return Shard.parse(arguments.shard)


def _prompts(arguments: argparse.Namespace) -> Iterable[Prompt | WrongLine]:
    return read_prompts(arguments.corpus, tokenizer_for(arguments))


def _run_on_ray(arguments: argparse.Namespace) -> JobReport:
    if arguments.shard is not None:
        raise ConfigError("--shard is for processes that you start yourself; --engine ray shares out by itself")
    if arguments.store == MEMORY:
        raise ConfigError(f"--store {MEMORY} is one process's own; the workers of --engine ray want a Mooncake")
    if arguments.workers < 1:
        raise ConfigError(f"--workers must be positive, not {arguments.workers}")
    # Workers have other current directories.
    paths = {name: value.resolve() for name, value in vars(arguments).items() if isinstance(value, Path)}
    absolute = argparse.Namespace(**{**vars(arguments), **paths})
    ray = RayOptions(arguments.workers, arguments.ray_address, arguments.ray_cpus, arguments.ray_gpus)
    return JobReport.of_parts(run_on_ray(functools.partial(run_part, absolute), ray))


def _dry_run(arguments: argparse.Namespace) -> int:
    """Count what the job would do."""
    if arguments.report is not None:
        raise ConfigError("--report draws what a job did; a dry run has figures: --json writes them")
    shard = _shard(arguments)
    layout, dtype = layout_of(arguments)
    cache = cache_of(arguments, layout, dtype)
    identity = cache.identity
    try:
        corpus = read_corpus(
            _prompts(arguments),
            identity.layout,
            identity.hasher,
            on_wrong=arguments.on_wrong,
            spool_folder=arguments.spool,
        )
    except InvalidTokensError as error:
        raise ConfigError(f"{arguments.corpus}: {error}") from error
    with corpus:
        trunk, own = share_out(corpus.tree, shard.count).of(shard)
        stretches = (*trunk, *own)
        estimate = JobEstimate(
            CorpusTotals.of(corpus.tree, stretches, with_root=shard.has_trunk),
            JobPlanner(corpus.tree, cache.retention).estimate(stretches),
            corpus.wrong_lines,
            identity.keys.schema.cache_id,
        )
    if arguments.json is not None:
        write_figures(arguments.json, json.dumps(estimate.figures(), indent=2) + "\n")
    show_estimate(estimate, corpus.wrong)
    return _INCOMPLETE if estimate.wrong_lines else _DONE
