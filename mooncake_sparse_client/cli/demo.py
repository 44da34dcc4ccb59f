"""``demo``: replay a request trace on a Mooncake store and show what masks save."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from ..client import SparseStoreClient
from ..config_values import MIN_SEGMENT_BYTES, parse_size
from ..core.layout import KVCacheLayout
from ..core.masks import check_retention_interval
from ..core.presets import PRESETS, layout_for
from ..errors import ConfigError
from ..stores.memory import MemoryStore
from .arguments import interval_of, naming, write_figures
from .replay import ReplayCounts, replay
from .report import DemoReport
from .simulate import ModelCounts, Policy, simulate
from .trace import ChunkContent, Request, make_workload, read_trace

#: Frames, allocator slack and the store's own high-water mark.
_SEGMENT_SLACK = 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, help="a trace in the Mooncake FAST'25 format; default: a made-up chat")
    parser.add_argument("--requests", type=int, help="how many requests to replay; default: all")
    parser.add_argument("--layout", choices=sorted(PRESETS), default="deepseek-v4", help="default: %(default)s")
    parser.add_argument(
        "--retention", default="0", help="retention interval in tokens, or 'none' to keep every boundary; default: 0"
    )
    parser.add_argument(
        "--scale", type=number, default=1 / 256, help="factor on the model's page sizes; default: 1/256"
    )
    parser.add_argument(
        "--store", default="local", help="local (a Mooncake of its own), memory, or HOST:PORT of a master"
    )
    parser.add_argument("--segment", help="memory for --store local, such as 2GB; default: what the replay needs")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")


def run(arguments: argparse.Namespace) -> int:
    """0 if every byte that was read back was right, else 1."""
    with naming("--scale"):
        layout = layout_for(arguments.layout, scale=arguments.scale)
    with naming("--retention"):
        retention = check_retention_interval(layout, interval_of(arguments.retention))
    if arguments.requests is not None and arguments.requests < 1:
        raise ConfigError(f"--requests must be positive, not {arguments.requests}")
    if arguments.json is not None:
        write_figures(arguments.json, "")  # a replay may be long: say now that its figures have no place to go
    requests = read_trace(arguments.trace, arguments.requests) if arguments.trace else make_workload(arguments.requests)
    ChunkContent(layout)  # says so if the layout's blocks do not divide the trace's
    models = {
        "same": simulate(layout, requests, Policy(retention)),
        "dense": simulate(layout, requests, Policy(None)),
        "not_learned": simulate(layout, requests, Policy(retention, learn_junctions=False)),
        "unmasked": simulate(layout, requests, Policy(None, masked=False)),
    }
    client = _client(arguments, layout, retention, models["same"])
    started = time.monotonic()
    counts = asyncio.run(_replay(client, requests, clean_up=":" in arguments.store))
    seconds = time.monotonic() - started
    report = DemoReport(arguments.layout, retention, arguments.store, layout, counts, models, seconds)
    report.show()
    if arguments.json is not None:
        write_figures(arguments.json, json.dumps(report.figures(), indent=2) + "\n")
    return 0 if counts.wrong_bytes == 0 else 1


def number(text: str) -> float:
    """``text`` such as 0.01 or 1/256, for argparse."""
    over, _, under = text.partition("/")
    return float(over) / float(under or 1)


def _client(
    arguments: argparse.Namespace, layout: KVCacheLayout, retention: int | None, model: ModelCounts
) -> SparseStoreClient:
    if arguments.store == "memory":
        return SparseStoreClient(MemoryStore(), layout, model_name="demo", retention_interval=retention)
    if arguments.store == "local":
        needed = int(model.total_written.bytes * _SEGMENT_SLACK) + 128 * model.total_written.chunks
        size = parse_size(arguments.segment or max(needed, 4 * MIN_SEGMENT_BYTES), "--segment")
        with naming("--segment"):
            return SparseStoreClient.local(layout, model_name="demo", segment_size=size, retention_interval=retention)
    if ":" not in arguments.store:
        raise ConfigError(f"--store is {arguments.store!r}; it is 'local', 'memory' or HOST:PORT of a master")
    # A name of its own, so that an earlier run's chunks are no hits of this one.
    return SparseStoreClient.connect(
        layout,
        model_name=f"demo-{uuid.uuid4().hex[:12]}",
        master_server_address=arguments.store,
        retention_interval=retention,
    )


async def _replay(client: SparseStoreClient, requests: Sequence[Request], *, clean_up: bool) -> ReplayCounts:
    async with client:
        try:
            # No bar unless somebody watches.
            return await replay(client, tqdm(requests, desc="replaying", unit="request", disable=None))
        finally:
            if clean_up:
                for request in requests:
                    await client.remove(client.sequence(request.token_ids()), force=True)
