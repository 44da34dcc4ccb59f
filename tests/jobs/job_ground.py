"""What the tests of whole jobs stand on: corpora, what a job over them must store by definition, and odd stores."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from test_planning import junctions_of, random_corpus

from mooncake_sparse_client import (
    Failure,
    FullAttentionSpec,
    GetItem,
    GetResult,
    KVCacheLayout,
    Limits,
    MambaSpec,
    MemoryStore,
    PutItem,
    Resilience,
    SlidingWindowSpec,
    SparseStoreClient,
    Store,
    TokenSequence,
    WrappedStore,
    store_mask,
)
from mooncake_sparse_client.core.framing import HEADER_SIZE
from mooncake_sparse_client.core.keys import KeyBuilder
from mooncake_sparse_client.jobs.job import PrecomputeJob
from mooncake_sparse_client.jobs.numpy_producer import NumpyProducer, SeenPrefix
from mooncake_sparse_client.jobs.options import JobOptions
from mooncake_sparse_client.jobs.prompts import Prompt
from mooncake_sparse_client.jobs.report import JobReport

Ids = list[int]
#: Values by their keys, without headers.
Contents = dict[str, bytes]
WORD = (1 << 64) - 1
PAGES = (16, 17, 24, 31, 64, 100)
#: Blocks of 4 and 8; no draft layers.
LAYOUT = KVCacheLayout(
    [
        FullAttentionSpec(8, page_size_bytes=40),
        SlidingWindowSpec(4, 10, page_size_bytes=24),
        MambaSpec(8, page_size_bytes=33),
    ]
)
#: Less memory than the default, which a client takes at once; no breaker, whose own tests these are not.
LIMITS = Limits(max_batch_bytes=1 << 16, staging_bytes=1 << 21)
ONCE = Resilience(attempts=1, breaker=False)


def client_of(store: Store, layout: KVCacheLayout = LAYOUT, interval: int | None = 0, **settings: Any) -> Any:
    settings = {"model_name": "m", "limits": LIMITS, "resilience": ONCE, **settings}
    return SparseStoreClient(store, layout, retention_interval=interval, **settings)


def with_pages(layout: KVCacheLayout, seed: int) -> KVCacheLayout:
    """Pages that show damage wherever it is: of 16 bytes at least."""
    dice = random.Random(seed)
    groups = [dataclasses.replace(spec, page_size_bytes=dice.choice(PAGES)) for spec in layout.groups]
    return KVCacheLayout(groups, hash_block_size=layout.hash_block_size)


def can_restore(layout: KVCacheLayout) -> bool:
    """Whether every hit has a chunk that ends there, out of which the NumPy producer tells what was seen."""
    return any(
        isinstance(spec, FullAttentionSpec | MambaSpec) or (isinstance(spec, SlidingWindowSpec) and spec.window > 1)
        for spec in layout.groups
    )


def a_corpus(seed: int, prompts: int = 12, layout: KVCacheLayout = LAYOUT) -> list[Prompt]:
    """So many prompts at least, a few of them with a salt."""
    dice, found = random.Random(seed), list[Prompt]()
    while len(found) < prompts:
        salt = None if dice.random() < 0.8 else dice.choice(["a", "b"])
        found += [Prompt(ids, cache_salt=salt) for ids in random_corpus(dice, layout)]
    return found


def ids_of(prompt: Prompt) -> Ids:
    return [int(token) for token in prompt.token_ids]


# What is stored, by definition.


def mixed(word: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word ^= word >> shift
        word = word * factor & WORD
    return word ^ word >> 31


def prefix_sums(ids: Iterable[int]) -> list[int]:
    """For each number of tokens the hash of so many."""
    sums = [0]
    for position, token in enumerate(ids):
        sums.append(sums[-1] + mixed((token * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03) & WORD) & WORD)
    return sums


def chunk_bytes(layout: KVCacheLayout, sums: Sequence[int], group: int, chunk: int) -> bytes:
    """A chunk of the NumPy producer, a word at a time."""
    end, nbytes, label = (chunk + 1) * layout.groups[group].block_size, layout.page_sizes[group], mixed(group + 1)
    key = mixed((sums[end] + end * 0x8CB92BA72F3D8DD7 + label) & WORD)
    words = [sums[end] ^ label, *(key ^ mixed(number) for number in range(2, -(-nbytes // 8) + 1))]
    return b"".join(word.to_bytes(8, "little") for word in words)[:nbytes]


def wanted_masks(
    layout: KVCacheLayout, ids: Ids, alike: Sequence[Ids], interval: int | None
) -> tuple[np.ndarray[Any, Any], ...]:
    """What a put of the whole prompt keeps, with the junctions at which others of its salt part from it."""
    return store_mask(
        layout,
        layout.align(len(ids)),
        retention_interval=interval,
        num_prompt_tokens=len(ids),
        boundaries=junctions_of(ids, alike, layout.alignment),
    )


def by_definition(layout: KVCacheLayout, prompts: Sequence[Prompt], interval: int | None) -> Contents:
    """What a store holds when a job over the prompts is done."""
    client = client_of(MemoryStore(), layout, interval)
    builder, found = KeyBuilder(layout, client.keys), Contents()
    for prompt in prompts:
        ids = ids_of(prompt)
        alike = [ids_of(other) for other in prompts if other.cache_salt == prompt.cache_salt]
        hashes = TokenSequence(client.hasher, ids, cache_salt=prompt.cache_salt).block_hashes
        sums = prefix_sums(ids)
        for group, mask in enumerate(wanted_masks(layout, ids, alike, interval)):
            chunks = np.flatnonzero(mask).tolist()
            keys = builder.own_keys(hashes, group, chunks)
            found |= {key: chunk_bytes(layout, sums, group, chunk) for key, chunk in zip(keys, chunks, strict=True)}
    return found


def distinct_tokens(layout: KVCacheLayout, prompts: Iterable[Prompt]) -> int:
    size = layout.alignment
    blocks = {
        (prompt.cache_salt, tuple(prompt.token_ids[: (block + 1) * size]))
        for prompt in prompts
        for block in range(len(prompt.token_ids) // size)
    }
    return len(blocks) * size


async def contents(store: MemoryStore, layout: KVCacheLayout = LAYOUT, some: Iterable[str] | None = None) -> Contents:
    """All that it holds, or ``some``, read back."""
    keys = list(store.keys() if some is None else some)
    room = [bytearray(HEADER_SIZE + layout.page_sizes[group_of(key)]) for key in keys]
    failures = await store.get([GetItem(key, (memoryview(value),)) for key, value in zip(keys, room, strict=True)])
    assert not any(failures), failures
    return {key: bytes(value[HEADER_SIZE:]) for key, value in zip(keys, room, strict=True)}


def group_of(key: str) -> int:
    return int(key.split("@group:")[1].split("@")[0])


def same_contents(found: Contents, wanted: Contents) -> None:
    """Says which keys, where a dict of bytes would fill the screen."""
    lacking, beyond = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    assert (lacking[:3], beyond[:3]) == ([], []), f"{len(lacking)} are missing, {len(beyond)} too many"
    wrong = [key for key, value in wanted.items() if found[key] != value]
    assert wrong[:3] == [], f"{len(wrong)} values of {len(wanted)} are wrong"


class Unhurried(WrappedStore):
    """Lets others have a few turns at each call."""

    def __init__(self, inner: Store, seed: int = 0) -> None:
        super().__init__(inner)
        self._dice = random.Random(seed)

    async def _turns(self) -> None:
        for _ in range(self._dice.randint(0, 4)):
            await asyncio.sleep(0)

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        await self._turns()
        return await super().exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        await self._turns()
        return await super().put(items)

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        await self._turns()
        return await super().get(items)


class Box:
    """A state that can be gone on from once."""

    def __init__(self, seen: SeenPrefix) -> None:
        self._seen: SeenPrefix | None = seen

    @property
    def seen(self) -> SeenPrefix:
        assert self._seen is not None, "this state was given to prefill before"
        return self._seen

    def take(self) -> SeenPrefix:
        seen, self._seen = self.seen, None
        return seen


class StrictProducer:
    """The NumPy producer, for jobs that keep the rules: one call at a time, all on one thread, and no state is used
    again that was given to ``prefill``."""

    def __init__(self, layout: KVCacheLayout = LAYOUT) -> None:
        self._numpy = NumpyProducer(layout)
        self._turn, self._threads = threading.Lock(), set[int]()
        self._states: weakref.WeakSet[Box] = weakref.WeakSet()
        #: States that there were at one time.
        self.most_states = 0

    @property
    def layout(self) -> KVCacheLayout:
        return self._numpy.layout

    def restore(self, got: GetResult) -> Box:
        with self._alone():
            return self._boxed(self._numpy.restore(got))

    def fork(self, state: Box) -> Box:
        with self._alone():
            return self._boxed(self._numpy.fork(state.seen))

    def prefill(self, state: Box, token_ids: Any, wanted: Any) -> Any:
        with self._alone():
            seen, source = self._numpy.prefill(state.take(), token_ids, wanted)
            return self._boxed(seen), source

    def _boxed(self, seen: SeenPrefix) -> Box:
        box = Box(seen)
        self._states.add(box)
        self.most_states = max(self.most_states, len(self._states))
        return box

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._threads.add(threading.get_ident())
        assert len(self._threads) == 1, "calls come from several threads"
        assert self._turn.acquire(blocking=False), "one call at a time"
        try:
            yield
        finally:
            self._turn.release()


# Running jobs.


class Told:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.total = -1
        self.updates: list[tuple[int, int]] = []
        self.messages: list[str] = []
        self.on_update: Callable[[], object] = lambda: None

    def __call__(self, tokens: int) -> Told:
        self.total = tokens
        return self

    def update(self, tokens: int, bytes_written: int) -> None:
        self.updates.append((tokens, bytes_written))
        self.on_update()

    def message(self, text: str) -> None:
        self.messages.append(text)


async def run_job(
    store: Store,
    prompts: Iterable[Any],
    layout: KVCacheLayout = LAYOUT,
    interval: int | None = 0,
    *,
    client: dict[str, Any] | None = None,
    producer: Any = None,
    watch: Any = None,
    **options: Any,
) -> JobReport:
    """One job with a client of its own; ``client``: more settings of that."""
    watching = {} if watch is None else {"watch": watch}
    async with client_of(store, layout, interval, **(client or {})) as opened:
        return await PrecomputeJob(
            opened, producer or StrictProducer(layout), prompts, JobOptions(**options), **watching
        ).run()


async def undisturbed(
    prompts: Sequence[Prompt], layout: KVCacheLayout = LAYOUT, interval: int | None = 0
) -> tuple[JobReport, Contents]:
    store = MemoryStore()
    report = await run_job(store, prompts, layout, interval)
    assert report.status == "done"
    return report, await contents(store, layout)


def sums_hold(report: JobReport) -> None:
    """What every finished report says of itself."""
    assert report.tokens_total == report.tokens_distinct + report.tokens_reused + report.tokens_unstored
    assert report.tokens_distinct == report.tokens_computed - report.tokens_recomputed + report.tokens_skipped
    by_group = [tally for group in report.groups for tally in group.written.values()]
    assert report.chunks_written == sum(tally.chunks for tally in by_group)
    assert report.bytes_written == sum(tally.bytes for tally in by_group)


class Leftovers:
    """What a job must not leave: threads, its files open, and tasks other than the caller's. Made before it, on no
    loop; ``tasks`` is to be called on its loop, the rest behind it."""

    def __init__(self) -> None:
        self._files = self._open_files()

    @staticmethod
    def _open_files() -> list[str]:
        """Journals and spools. (What else is open may be another test's, and go at any time.)"""
        found = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the one that lists them
                found.append(str(descriptor.readlink()))
        return sorted(name for name in found if "journal" in name or "precompute-" in name)

    @staticmethod
    def tasks() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert others == set()

    def check(self) -> None:
        deadline = time.monotonic() + 20  # an idle thread that was told to end needs a moment
        while threads := [thread for thread in threading.enumerate() if thread.name.startswith("precompute")]:
            assert time.monotonic() < deadline, threads
            time.sleep(0.001)
        assert self._open_files() == self._files
