"""A job's parts as tasks on a Ray cluster: the user's own, or one of Ray's on this machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, MissingLibraryError, SparseStoreError
from .report import JobReport
from .sharding import Shard


@dataclass(frozen=True, slots=True)
class RayOptions:
    """``parts``: how many tasks the job is cut into. ``address``: of a cluster; empty: the one that ``RAY_ADDRESS``
    names, else Ray is started here, with a worker for each part. ``num_cpus`` and ``num_gpus``: what each task wants.
    """

    parts: int = 2
    address: str = ""
    num_cpus: float = 1
    num_gpus: float = 0


def run_on_ray(run_part: Callable[[Shard], JobReport], options: RayOptions) -> list[JobReport]:
    """``run_part`` for each part, on the workers of a cluster; the reports of all, that of the trunk first.

    What the parts share is computed by a task of its own, before they start. ``run_part`` must be picklable, and what
    it reads (the corpus, a model) must be there on every machine. Blocks until all are over. A part that fails is
    raised once the others have ended, so that what they do is not lost.

    Raises ``MissingLibraryError`` without Ray, and ``ConfigError`` where no cluster is to be had.
    """
    ray = _import_ray()
    started_here = not ray.is_initialized()
    if started_here:
        _connect(ray, options)
    try:

        def do(number: int) -> JobReport:
            return run_part(Shard(number, options.parts, trunk_apart=True))

        part = ray.remote(do).options(num_cpus=options.num_cpus, num_gpus=options.num_gpus, max_retries=0)
        with _stop_requests() as stop:

            def done(*numbers: int) -> list[JobReport]:
                running = [part.remote(number) for number in numbers]
                _wait(ray, running, stop)
                return [_result(ray, *which, options.parts) for which in zip(running, numbers, strict=True)]

            (trunk,) = done(0)
            if trunk.status == "stopped":
                return [trunk]
            return [trunk, *done(*range(1, options.parts + 1))]
    finally:
        if started_here:
            ray.shutdown()


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """Set by SIGTERM and the first Ctrl-C; a second Ctrl-C is a ``KeyboardInterrupt``. After Ray's start, which sets
    handlers of its own."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def first(number: int, frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, first) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ray: Any, parts: Sequence[Any], stop: threading.Event) -> None:
    """Until all parts are over; a request to stop is handed on to those that run."""
    running, told = list(parts), False
    while running:
        _, running = ray.wait(running, num_returns=len(running), timeout=0.5)
        if stop.is_set() and not told:
            told = True
            for part in running:
                ray.cancel(part)  # an interrupt, which a part at work takes for a request to stop


def _result(ray: Any, reference: Any, number: int, parts: int) -> JobReport:
    """What a task answers, or raises: Ray's own error has the task's whole stack for a message."""
    try:
        report: JobReport = ray.get(reference)
    except ray.exceptions.TaskCancelledError:  # before it had begun its work
        return JobReport("stopped", "it was asked to stop", shard=(number, parts))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SparseStoreError):
            raise error.cause from error
        raise
    return report


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingLibraryError(
            f"Ray is needed for this, and did not load: {error}; install it with: "
            "pip install 'mooncake-sparse-client[ray]'"
        ) from error
    return ray


def _connect(ray: Any, options: RayOptions) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what is started for a job tells nobody of it
    here: dict[str, Any] = {"num_cpus": max(1, round(options.parts * options.num_cpus)), "include_dashboard": False}
    try:
        try:
            ray.init(address=options.address or None, log_to_driver=True, **({} if options.address else here))
        except ValueError:
            if options.address:
                raise
            ray.init(log_to_driver=True)  # RAY_ADDRESS names a cluster, whose processors are not ours to set
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster at {options.address or 'RAY_ADDRESS or on this machine'}: {error}"
        ) from error
