"""An offline job: compute the KV cache of every prompt in a JSONL file, and nothing twice.

A line is one prompt, ``{"token_ids": [1, 2, 3]}``; lines that are none are reported and left out. Without a file a
small corpus is made up. The producer below stands where an engine of your own would:

    python examples/precompute_jsonl.py
    python examples/precompute_jsonl.py prompts.jsonl --store 127.0.0.1:50051 --journal prompts.journal

``--store local`` (the default) is a Mooncake of this process, whose data goes when it ends: to try it out.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mooncake_sparse_client import (
    FullAttentionSpec,
    GetResult,
    KVCacheLayout,
    SlidingWindowSpec,
    SparseStoreClient,
    SparseStoreError,
)
from mooncake_sparse_client.jobs import JobOptions, JobReport, PrecomputeJob, read_prompts

BLOCK, FULL = 16, 0


class Seen(NamedTuple):
    """A prefix that has been computed. An engine would have its KV cache here."""

    num_tokens: int
    total: int


class SumProducer:
    """A model whose "KV" of a token is the sum of all ids up to it: 8 bytes, alike in both of its layers."""

    layout = KVCacheLayout(
        [FullAttentionSpec(BLOCK, page_size_bytes=8 * BLOCK), SlidingWindowSpec(BLOCK, 64, page_size_bytes=8 * BLOCK)]
    )

    def restore(self, got: GetResult) -> Seen:
        """What was seen, out of chunks that were read."""
        if not got.hit_length:
            return Seen(0, 0)
        last = got.chunks[FULL, got.hit_length // BLOCK - 1]
        return Seen(got.hit_length, int(np.frombuffer(last, np.int64)[-1]))

    def fork(self, state: Seen) -> Seen:
        return state  # nothing changes it; a cache would be copied

    def prefill(
        self, state: Seen, token_ids: np.ndarray, wanted: Sequence[np.ndarray]
    ) -> tuple[Seen, Mapping[tuple[int, int], np.ndarray]]:
        sums = state.total + np.cumsum(token_ids)
        pages, first = sums.reshape(-1, BLOCK), state.num_tokens // BLOCK
        chunks = {
            (group, chunk): pages[chunk - first]
            for group, mask in enumerate(wanted)
            for chunk in np.flatnonzero(mask).tolist()
        }
        return Seen(state.num_tokens + len(token_ids), int(sums[-1])), chunks


def make_corpus(folder: Path) -> Path:
    """Three documents, and four questions on each."""
    path = folder / "prompts.jsonl"
    with path.open("w", encoding="utf-8") as lines:
        for document in range(3):
            for question in range(4):
                token_ids = [document * 10_000 + i for i in range(400)] + [
                    50_000 + question * 100 + i for i in range(60)
                ]
                lines.write(json.dumps({"token_ids": token_ids}) + "\n")
    return path


def connected(store: str) -> SparseStoreClient:
    """Name and layout are what the cache is known by, and the serving side's must be the same."""
    if store == "local":
        return SparseStoreClient.local(
            SumProducer.layout, model_name="sums", segment_size="256MB", retention_interval=0
        )
    return SparseStoreClient.connect(
        SumProducer.layout, model_name="sums", master_server_address=store, mode="remote", retention_interval=0
    )


def show(report: JobReport, path: Path) -> None:
    for wrong in report.wrong:
        print(f"{path}:{wrong.line}: {wrong.reason}", file=sys.stderr)
    print(f"{report.status}: {report.prompts} prompts of {report.tokens_total} tokens {report.message}".rstrip())
    print(
        f"  {report.tokens_distinct} of them are distinct, {report.tokens_reused} those of another prompt, "
        f"{report.tokens_unstored} behind the last whole block"
    )
    print(f"  computed: {report.tokens_computed} tokens; in the store already: {report.tokens_skipped}")
    print(f"  written: {report.chunks_written} chunks, {report.bytes_written} bytes; missing: {report.missing.chunks}")


async def main(arguments: argparse.Namespace) -> int:
    options = JobOptions(
        journal=arguments.journal, resume=arguments.journal is not None, keep_in_process=arguments.store == "local"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.path or make_corpus(Path(folder))
        try:
            async with connected(arguments.store) as client:
                report = await PrecomputeJob(client, SumProducer(), read_prompts(path), options).run()
                show(report, path)
                if report.status == "done":
                    again = await PrecomputeJob(client, SumProducer(), read_prompts(path), options).run()
                    print(f"once more: {again.tokens_computed} tokens computed, {again.chunks_written} chunks written")
        except SparseStoreError as error:
            print(error, file=sys.stderr)
            return 2
    if report.status == "stopped":
        return 3
    return 1 if report.status == "incomplete" or report.wrong_lines else 0


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compute the KV cache of every prompt in a JSONL file.")
    parser.add_argument("path", type=Path, nargs="?", help="one prompt a line; default: a made-up corpus")
    parser.add_argument("--store", default="local", help="'local' (default), or HOST:PORT of a Mooncake master")
    parser.add_argument("--journal", type=Path, help="a file by which the same command goes on after a kill")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(read_arguments())))
