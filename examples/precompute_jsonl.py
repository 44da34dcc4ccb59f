"""Fill a store overnight: compute and put the KV of every prompt in a JSONL file, and nothing twice.

A line is one prompt, ``{"token_ids": [1, 2, 3]}``. Lines that are none are reported with their number and
skipped, and the exit status is then 1. Without a file a small corpus is made up:

    python examples/precompute_jsonl.py
    python examples/precompute_jsonl.py prompts.jsonl --store 127.0.0.1:50051

``--store local`` (the default) is a Mooncake of its own, whose data goes when the job ends: to try it out.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from mooncake_sparse_client import SparseStoreClient, SparseStoreError, Tally, layout_for

LAYOUT = layout_for("gpt-oss", scale=1 / 256)


def computed(token_ids: list[int], group: int, chunk: int) -> bytes:
    """Put your prefill here. This stand-in depends on every token up to the chunk's end, as real KV does."""
    prefix = token_ids[: (chunk + 1) * LAYOUT.groups[group].block_size]
    return sha256(repr((group, prefix)).encode()).digest() * (LAYOUT.page_sizes[group] // 32)


@dataclass
class Totals:
    """What the job did."""

    prompts: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    written: Tally = Tally()  # noqa: RUF009 - frozen
    existing: Tally = Tally()  # noqa: RUF009
    failed: Tally = Tally()  # noqa: RUF009
    bad_lines: int = 0


def read_prompts(path: Path, totals: Totals) -> Iterator[tuple[int, list[int]]]:
    """Line numbers and token ids, a line at a time."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                yield number, json.loads(line)["token_ids"]
            except (ValueError, KeyError, TypeError) as error:
                report(path, number, f'no {{"token_ids": [...]}}: {error!r}', totals)


def report(path: Path, number: int, trouble: str, totals: Totals) -> None:
    totals.bad_lines += 1
    print(f"{path}:{number}: {trouble}", file=sys.stderr)


async def precompute(client: SparseStoreClient, path: Path) -> Totals:
    totals = Totals()
    for number, token_ids in read_prompts(path, totals):
        try:
            sequence = client.sequence(token_ids)
        except ValueError as error:  # ids that cannot be: the client's errors about input are ValueErrors
            report(path, number, str(error), totals)
            continue
        hit = await client.lookup(sequence)

        def source(group: int, chunk: int, token_ids: list[int] = token_ids) -> bytes:
            return computed(token_ids, group, chunk)

        # confirm: nobody looks at the job's result before morning, so ask again before it counts as written.
        put = await client.put(sequence, source, hit=hit, confirm=True)
        totals.prompts += 1
        totals.tokens += len(sequence)
        totals.hit_tokens += hit.hit_length
        totals.written += put.written
        totals.existing += put.existing
        totals.failed += put.failed + put.unavailable  # a producer that has no bytes is no success here
    return totals


def make_corpus(folder: Path) -> Path:
    """Three documents, and four questions on each."""
    path = folder / "prompts.jsonl"
    with path.open("w", encoding="utf-8") as lines:
        for document in range(3):
            shared = list(range(document * 10_000, document * 10_000 + 400))
            for question in range(4):
                token_ids = shared + list(range(50_000 + question * 100, 50_060 + question * 100))
                lines.write(json.dumps({"token_ids": token_ids}) + "\n")
    return path


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Put the KV of every prompt in a JSONL file.")
    parser.add_argument("path", type=Path, nargs="?", help="one prompt a line; default: a made-up corpus")
    parser.add_argument("--store", default="local", help="'local' (default), or HOST:PORT of a Mooncake master")
    arguments = parser.parse_args()
    if arguments.path is not None and not arguments.path.is_file():
        parser.error(f"there is no file {arguments.path}")
    return arguments


async def main(arguments: argparse.Namespace) -> int:
    if arguments.store == "local":
        client = SparseStoreClient.local(LAYOUT, model_name="gpt-oss", segment_size="256MB", retention_interval=0)
    else:
        client = SparseStoreClient.connect(
            LAYOUT, model_name="gpt-oss", master_server_address=arguments.store, retention_interval=0
        )

    with tempfile.TemporaryDirectory() as folder:
        path = arguments.path or make_corpus(Path(folder))
        try:
            async with client:
                totals = await precompute(client, path)
        except (OSError, SparseStoreError) as error:
            print(error, file=sys.stderr)
            return 2
    print(f"{totals.prompts} prompts of {totals.tokens} tokens; {totals.hit_tokens} tokens were there already")
    print(f"written: {totals.written.chunks} chunks, {totals.written.bytes} bytes")
    print(f"already there: {totals.existing.chunks} chunks; failed: {totals.failed.chunks} chunks")
    print(f"bad lines: {totals.bad_lines}")
    return 1 if totals.bad_lines or totals.failed.chunks else 0


sys.exit(asyncio.run(main(read_arguments())))
