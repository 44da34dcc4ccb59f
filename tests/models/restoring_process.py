"""Another process: it restores prefixes from a store and goes on from them.

A line of JSON on standard input is a job, a line on standard output its answer; arrays go by way of a file.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
from tiny_models import BLOCK, Continued, build, go_on

from mooncake_sparse_client import SparseStoreClient
from mooncake_sparse_client.integrations.transformers import ModelKV


@dataclass(frozen=True)
class Job:
    """``prompts`` of one model kind, to be restored from a master and continued by ``new_tokens``."""

    kind: str
    master: str
    model_name: str
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    answer: str = ""


async def carry_out(job: Job) -> list[Continued]:
    model = build(job.kind)
    kv = ModelKV(model.config, BLOCK)
    caches = []
    async with SparseStoreClient.connect(
        kv.layout, model_name=job.model_name, dtype=kv.dtype, master_server_address=job.master
    ) as client:
        for prompt in job.prompts:
            got = await client.get(await client.lookup(client.sequence(prompt)))
            assert not got.failures, got.failures
            caches.append(kv.restore(got))
    return [go_on(model, cache, prompt, job.new_tokens) for cache, prompt in zip(caches, job.prompts, strict=True)]


class RestoringProcess:
    """This file as a process of its own. It stays, since loading PyTorch takes seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def carry_out(self, job: Job) -> list[Continued]:
        self._jobs += 1
        path = self._folder / f"{self._jobs}.npz"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({**asdict(job), "answer": str(path)}), file=self._process.stdin, flush=True)
        said = json.loads(self._process.stdout.readline() or '"the restoring process has ended"')
        assert said == "done", said
        with np.load(path) as arrays:
            return [
                Continued(int(arrays[f"hit{n}"]), arrays[f"logits{n}"], arrays[f"greedy{n}"].tolist())
                for n in range(len(job.prompts))
            ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


def main() -> None:
    for line in sys.stdin:
        job = Job(**json.loads(line))
        arrays: dict[str, object] = {}
        for number, said in enumerate(asyncio.run(carry_out(job))):
            arrays |= {f"hit{number}": said.hit_length, f"logits{number}": said.logits, f"greedy{number}": said.greedy}
        np.savez(job.answer, **arrays)
        sys.stdout.write('"done"\n')
        sys.stdout.flush()


if __name__ == "__main__":
    main()
