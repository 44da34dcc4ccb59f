"""A soak: two clients under load, random faults of the store beneath them, and figures that must stay as they are.

``python tests/faults/soak.py --minutes 10 --seed 1`` reports what was injected and what happened. Exit status 1 says
that a byte was wrong, a call hung, an error was none of ours, something grew, or a client did not work again in time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from ground import MIB, Ground, Subject
from soak_users import LAYOUT, SLACK, TIMEOUT, Prompts, Tally, User, works

from mooncake_sparse_client import (
    GetItem,
    Limits,
    MooncakeStore,
    PutItem,
    SparseStoreClient,
    chunk_name,
    load_config,
)
from mooncake_sparse_client.core.framing import HEADER_SIZE
from mooncake_sparse_client.errors import StoreError

#: Seconds after a fault has ended in which each client must work again.
RECOVERY: Final = 30.0
#: Values that a damaging fault overwrites.
_DAMAGED: Final = 20
_LIMITS: Final = Limits(max_batch_bytes=2 * MIB, staging_bytes=8 * MIB)
_PROCESSES: Final = ("kill master", "stop master", "kill owner", "stop owner", "kill both")
_DAMAGES: Final = ("flip", "cut", "grow", "swap")


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: quiet stretches, a killed process's absence, a stopped one's pause, a master's memory of owners."""

    lull: tuple[float, float]
    gaps: tuple[float, ...]
    pauses: tuple[float, ...]
    client_ttl: int


LONG: Final = Pace(lull=(2.0, 6.0), gaps=(0.1, 0.3, 1, 2, 3, 4, 6, 8), pauses=(0.3, 1, 3, 6, 12), client_ttl=10)
QUICK: Final = Pace(lull=(0.3, 0.8), gaps=(0.1, 0.2), pauses=(0.3, 0.6), client_ttl=2)


@dataclass(frozen=True, slots=True)
class Usage:
    """What this process holds while no call is under way."""

    rss: int
    threads: int
    tasks: int
    descriptors: int


#: What may be more at the end than after the first round of faults. Threads and descriptors: the native library opens a
#: connection to a process that is new when it first needs it, and lets go of those to dead ones late. Memory: the
#: allocators of C and Python give back what they like. A leak at every fault, or every call, is far more than that.
_MARGIN: Final = Usage(rss=48 * MIB, threads=4, tasks=2, descriptors=16)


@dataclass(slots=True)
class Report:
    """What was injected, and what happened."""

    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    #: Seconds from a fault's end until both clients worked again, the longest of each kind.
    recovery: dict[str, float] = field(default_factory=dict)
    #: Milliseconds for which the event loop ran nothing else, the longest of each kind of fault.
    stalls: dict[str, float] = field(default_factory=dict)
    usage: list[Usage] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def plain(self) -> dict[str, Any]:
        """The same for JSON."""
        tally = self.tally
        return {
            "seed": self.seed,
            "seconds": self.seconds,
            "faults": dict(self.faults),
            "recovery": self.recovery,
            "stalls": self.stalls,
            "usage": [asdict(held) for held in self.usage],
            "tally": {
                "outcomes": dict(tally.outcomes),
                "longest": tally.longest,
                "bytes_verified": tally.bytes_verified,
                "violations": tally.violations,
            },
        }

    def text(self) -> str:
        tally = self.tally
        lines = [
            f"soak of {self.seconds:.0f} s, seed {self.seed}: {self.faults.total()} faults, "
            f"{tally.outcomes.total()} outcomes, {tally.bytes_verified / 1e9:.2f} GB verified",
            "",
            f"{'fault':<14}{'count':>6}{'works again after, s':>24}{'longest stall, ms':>20}",
            *(
                f"{kind:<14}{count:>6}{self.recovery.get(kind, 0):>24.1f}{self.stalls.get(kind, 0):>20.0f}"
                for kind, count in sorted(self.faults.items())
            ),
            "",
            *(f"{count:>8}  {outcome}" for outcome, count in sorted(tally.outcomes.items())),
            "",
            "longest calls, s: " + ", ".join(f"{name} {took:.1f}" for name, took in sorted(tally.longest.items())),
            "",
            *(
                f"{held.rss / MIB:8.1f} MiB {held.threads:4} threads {held.tasks:4} tasks {held.descriptors:4} files"
                for held in self.usage
            ),
            "",
            *(f"VIOLATION: {text}" for text in tally.violations),
            f"{len(tally.violations)} violations" if tally.violations else "nothing was wrong",
        ]
        return "\n".join(lines) + "\n"


class Soak:
    """One run over one ground."""

    def __init__(self, ground: Ground, pace: Pace, report: Report) -> None:
        self._ground, self._pace, self._report = ground, pace, report
        self._draw = random.Random(report.seed)
        self._prompts = Prompts(report.seed, 24)
        self._clients: dict[str, SparseStoreClient] = {}
        self._users: list[User] = []
        self._raw: MooncakeStore

    async def run(self, seconds: float) -> None:
        """Faults for about so long, each kind once in any event, and the verdicts."""
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            await self._open(stack)
            faults = self._faults()
            idle = await usage()
            for number, kind in enumerate(faults):
                if number >= self._first_round and time.monotonic() - began > seconds:
                    break
                await self._fault(kind)
                self._report.usage.append(await usage(idle))
            self._judge_growth(idle)
            self._report.seconds = time.monotonic() - began

    async def _open(self, stack: AsyncExitStack) -> None:
        where = {"master_server_address": self._ground.master_address, "owner_address": self._ground.owner_address}
        for mode in ("remote", "shared"):
            client = SparseStoreClient.connect(
                *(LAYOUT,),
                mode=mode,  # type: ignore[arg-type]
                model_name="soak",
                config=load_config(mode, environ={}, pool_size=64 * MIB, **where),  # type: ignore[arg-type]
                retention_interval=None,
                limits=_LIMITS,
                timeout=TIMEOUT,
            )
            self._clients[mode] = await stack.enter_async_context(client)
            for number in range(3):
                user = User(f"{mode} {number}", client, self._prompts, self._report.tally, self._report.seed)
                await user.open()
                self._users.append(user)
        raw = load_config("remote", environ={}, pool_size=4 * MIB, **where)  # type: ignore[arg-type]
        self._raw = await stack.enter_async_context(await MooncakeStore.connect(raw, timeout=TIMEOUT))

    @property
    def _first_round(self) -> int:
        return len(_PROCESSES) + len(_DAMAGES)

    def _faults(self) -> Iterator[str]:
        """Every kind in each round, in another order."""
        while True:
            yield from self._draw.sample([*_PROCESSES, *_DAMAGES], self._first_round)

    async def _fault(self, kind: str) -> None:
        """A quiet stretch, a fault, and what follows until all works again, under load; then the load ends."""
        stop = asyncio.Event()
        load = [asyncio.create_task(user.work(stop)) for user in self._users]
        async with self._watched(kind):
            await asyncio.sleep(self._draw.uniform(*self._pace.lull))
            await self._inject(kind)
            self._report.faults[kind] += 1
            over = time.monotonic()
            await asyncio.gather(*(self._working_again(kind, name, over) for name in self._clients))
            await asyncio.sleep(self._draw.uniform(*self._pace.lull))
            stop.set()
            await asyncio.gather(*load)

    async def _inject(self, kind: str) -> None:
        master, owner = self._ground.master, self._ground.owner
        if kind in _DAMAGES:
            await self._damage(kind)
        elif kind == "kill both":
            await asyncio.gather(*(subject.restart(self._draw.choice(self._pace.gaps)) for subject in (master, owner)))
        else:
            subject: Subject = master if kind.endswith("master") else owner
            if kind.startswith("kill"):
                await subject.restart(self._draw.choice(self._pace.gaps))
            else:
                await subject.pause(self._draw.choice(self._pace.pauses))

    async def _working_again(self, kind: str, name: str, over: float) -> None:
        last = "no answer"
        while time.monotonic() - over < RECOVERY:
            try:
                if await asyncio.wait_for(works(self._clients[name], self._prompts), RECOVERY):
                    took = time.monotonic() - over
                    self._report.recovery[kind] = max(self._report.recovery.get(kind, 0.0), took)
                    return
                last = "it did not store, or did not find what it had stored"
            except StoreError as error:
                last = repr(error)
            except TimeoutError:
                last = f"a put and a get together took more than {RECOVERY:g} s"
            await asyncio.sleep(0.1)
        self._report.tally.violation(f"the {name} client does not work {RECOVERY:g} s after {kind!r}: {last}")

    async def _damage(self, kind: str) -> None:
        """Overwrite what is stored, behind the clients' backs."""
        for _ in range(_DAMAGED):
            try:
                done = await asyncio.wait_for(self._damage_one(kind), TIMEOUT + SLACK)
            except (StoreError, TimeoutError):
                done = False
            self._report.tally.outcomes[f"damage {kind}: {'done' if done else 'not there'}"] += 1

    async def _damage_one(self, kind: str) -> bool:
        client = self._clients["remote"]
        hashes = client.sequence(self._draw.choice(self._prompts.tokens)).block_hashes
        group = self._draw.randrange(len(LAYOUT.groups))
        chunks = [chunk for chunk in range(44) if chunk_name(client.layout, hashes, group, chunk)]
        one, other = (
            client.keys.key(group, chunk_name(client.layout, hashes, group, chunk) or "")
            for chunk in self._draw.sample(chunks, 2)
        )
        content, foreign = await self._stored(one, group), await self._stored(other, group)
        if content is None or foreign is None:
            return False
        if kind == "flip":
            content[self._draw.randrange(len(content))] ^= 1 << self._draw.randrange(8)
        elif kind == "cut":
            del content[self._draw.randrange(1, len(content)) :]
        elif kind == "grow":
            content += self._draw.randbytes(self._draw.randrange(1, 5000))
        else:
            content = foreign
        return await self._raw.put([PutItem(one, (memoryview(content),), replace=True)]) == [None]

    async def _stored(self, key: str, group: int) -> bytearray | None:
        """A value of the usual length, to change."""
        room = memoryview(bytearray(LAYOUT.page_sizes[group] + HEADER_SIZE))
        return bytearray(room) if await self._raw.get([GetItem(key, (room,))]) == [None] else None

    @asynccontextmanager
    async def _watched(self, kind: str) -> AsyncIterator[None]:
        """Notes the longest time for which the event loop was held up."""

        async def watch() -> None:
            while True:
                asked = time.monotonic()
                await asyncio.sleep(0.01)
                stall = 1000 * (time.monotonic() - asked - 0.01)
                self._report.stalls[kind] = max(self._report.stalls.get(kind, 0.0), stall)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    def _judge_growth(self, idle: Usage) -> None:
        """Compare the end with the end of the first round; the tasks with those of a client that was never used."""
        first, last = self._report.usage[self._first_round - 1], self._report.usage[-1]
        early = Usage(rss=first.rss, threads=first.threads, tasks=idle.tasks, descriptors=first.descriptors)
        for name, margin in asdict(_MARGIN).items():
            before, after = getattr(early, name), getattr(last, name)
            if after > before + margin:
                self._report.tally.violation(f"GROWTH: {name} from {before} to {after}, allowed are {margin} more")


async def usage(idle: Usage | None = None) -> Usage:
    """What this process holds once what calls have left behind is over: within the time of a native call that hangs,
    if there are more tasks than there were ``idle``."""
    process = psutil.Process()
    deadline = time.monotonic() + 40
    while True:
        await asyncio.sleep(0.3)
        gc.collect()
        rss, threads, files = await asyncio.to_thread(
            lambda: (process.memory_info().rss, process.num_threads(), process.num_fds())
        )
        tasks = len(asyncio.all_tasks())
        if idle is None or tasks <= idle.tasks or time.monotonic() > deadline:
            return Usage(rss=rss, threads=threads, tasks=tasks, descriptors=files)


async def soak(seconds: float, pace: Pace, seed: int) -> Report:
    """Run it. What nobody awaited, and failed, is a violation as well."""
    report = Report(seed)

    def unexpected(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        report.tally.violation(
            f"nobody handled: {context.get('message')} {context.get('exception')!r} {context.get('task')}"
        )

    asyncio.get_running_loop().set_exception_handler(unexpected)
    async with Ground(client_ttl=pace.client_ttl, lease_ttl=min(5, pace.client_ttl)) as ground:
        await Soak(ground, pace, report).run(seconds)
    gc.collect()
    await asyncio.sleep(0)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Two clients under random faults: nothing wrong, nothing hangs.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="short faults with short stretches between them")
    parser.add_argument("--json", type=Path, help="write the report there, too")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(name)s %(message)s")
    report = asyncio.run(soak(60 * given.minutes, QUICK if given.quick else LONG, given.seed))
    sys.stdout.write(report.text())
    if given.json:
        given.json.write_text(json.dumps(report.plain(), indent=1))
    return 1 if report.tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
