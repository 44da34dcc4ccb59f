"""NativeMemory: what a native client is told of memory, in which order, and what callers may rely on."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mooncake_sparse_client.config import MooncakeConfig
from mooncake_sparse_client.errors import ClientClosedError, ConfigError, ConnectError, InvalidRequestError
from mooncake_sparse_client.stores.connecting import Opened, open_native_store
from mooncake_sparse_client.stores.local import LocalMooncake
from mooncake_sparse_client.stores.native_memory import NativeMemory
from mooncake_sparse_client.stores.regions import MemoryPool

KIB, MIB = 1 << 10, 1 << 20
REMOTE = MooncakeConfig("master:1", pool_size=MIB)
SHARED = MooncakeConfig(mode="shared", owner_address="owner:1", pool_size=MIB)
#: An address far from any real memory: nothing is ever moved there.
FAR = 1 << 40


@dataclass
class Ledger:
    """What a native client remembers of memory, by its own rules; ``refuse`` makes it say no."""

    known: dict[int, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    refuse: Callable[[str, int], bool] = lambda what, address: False
    refusal: int = -600
    #: Cleared: calls wait in it, as large registrations do.
    may_go: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_go.set()

    def register_buffer(self, address: int, size: int) -> int:
        self.entered.set()
        assert self.may_go.wait(30)
        overlaps = any(begin < address + size and address < begin + known for begin, known in self.known.items())
        if overlaps or self.refuse("register", address):
            self.log.append(f"refused {address:#x}")
            return -600
        self.known[address] = size
        self.log.append(f"register {address:#x} {size}")
        return 0

    def unregister_buffer(self, address: int) -> int:
        self.entered.set()
        assert self.may_go.wait(30)
        if self.known.pop(address, None) is None or self.refuse("unregister", address):
            self.log.append(f"refused to forget {address:#x}")
            return self.refusal
        self.log.append(f"unregister {address:#x}")
        return 0

    def close(self) -> int:
        self.log.append("close")
        return 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The body runs while calls wait."""
        self.entered.clear()
        self.may_go.clear()
        try:
            yield
        finally:
            self.may_go.set()


def memory_of(ledger: Ledger, config: MooncakeConfig = REMOTE) -> NativeMemory:
    native: Any = ledger
    pool = MemoryPool(bytearray(MIB), lambda: ledger.log.append("free"))
    assert native.register_buffer(pool.address, pool.nbytes) == 0
    ledger.log.clear()
    return NativeMemory(native, pool, config)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


async def entered(ledger: Ledger) -> None:
    assert await asyncio.to_thread(ledger.entered.wait, 30)


async def test_only_what_is_new_is_registered(ledger: Ledger) -> None:
    memory = memory_of(ledger)
    before = dict(ledger.known)
    assert not memory.covers(FAR, 1)
    assert await memory.register(FAR, 100)
    assert await memory.register(FAR + 50, 100)
    assert await memory.register(FAR, 100)
    assert ledger.log == [f"register {FAR:#x} 100", f"register {FAR + 100:#x} 50"]
    assert memory.covers(FAR, 150)
    assert not memory.covers(FAR, 151)
    await memory.unregister(FAR, 100)
    await memory.unregister(FAR + 50, 100)
    assert memory.covers(FAR, 100)
    await memory.unregister(FAR, 100)
    assert not memory.covers(FAR, 1)
    assert ledger.known == before
    assert not [line for line in ledger.log if "refused" in line]


async def test_memory_of_the_pool_is_registered_already(ledger: Ledger) -> None:
    memory = memory_of(ledger)
    region = memory.allocate(10 * KIB)
    assert memory.covers(region.address, region.nbytes)
    assert await memory.register(region.address, region.nbytes)
    await memory.unregister(region.address, region.nbytes)
    assert memory.covers(region.address, region.nbytes)
    assert ledger.log == []


async def test_a_range_that_was_not_registered_is_the_caller_s_error(ledger: Ledger) -> None:
    memory = memory_of(ledger)
    with pytest.raises(InvalidRequestError, match="not registered"):
        await memory.unregister(FAR, 100)
    with pytest.raises(InvalidRequestError, match="nbytes"):
        await memory.register(FAR, 0)
    assert ledger.log == []


async def test_a_refusal_leaves_nothing_registered(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    memory = memory_of(ledger)
    assert await memory.register(FAR + 100, 100)
    before = dict(ledger.known)
    ledger.refuse = lambda what, address: (what, address) == ("register", FAR + 200)
    assert not await memory.register(FAR, 300)
    assert ledger.known == before
    assert not memory.covers(FAR, 1)
    assert memory.covers(FAR + 100, 100)
    (record,) = caplog.records
    for word in ("master:1", f"{FAR + 200:#x}", "-600"):
        assert word in record.getMessage()
    ledger.refuse = lambda what, address: False
    assert await memory.register(FAR, 300)
    assert memory.covers(FAR, 300)


async def test_what_is_being_registered_is_not_covered_yet(ledger: Ledger) -> None:
    memory = memory_of(ledger)
    with ledger.waiting():
        registering = asyncio.create_task(memory.register(FAR, 100))
        await entered(ledger)
        assert not memory.covers(FAR, 100)
    assert await registering
    with ledger.waiting():
        removing = asyncio.create_task(memory.unregister(FAR, 100))
        await entered(ledger)
        assert not memory.covers(FAR, 100)
    await removing


async def test_callers_side_by_side_do_not_get_in_each_other_s_way(ledger: Ledger) -> None:
    memory = memory_of(ledger)
    before = dict(ledger.known)
    dice = random.Random(5)

    async def caller() -> None:
        for _ in range(10):
            address, nbytes = FAR + dice.randrange(50), dice.randrange(1, 50)
            assert await memory.register(address, nbytes)
            assert memory.covers(address, nbytes)
            await asyncio.sleep(0)
            assert memory.covers(address, nbytes)
            await memory.unregister(address, nbytes)

    await asyncio.gather(*(caller() for _ in range(8)))
    assert ledger.known == before
    assert not [line for line in ledger.log if "refused" in line]


async def test_a_cancelled_registration_is_undone_before_the_caller_hears_of_it(ledger: Ledger) -> None:
    memory = memory_of(ledger)
    before = dict(ledger.known)
    with ledger.waiting():
        registering = asyncio.create_task(memory.register(FAR, 100))
        await entered(ledger)
        registering.cancel()
        await asyncio.wait([registering], timeout=0.05)
        assert not registering.done()
        registering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await registering
    assert ledger.known == before
    assert not memory.covers(FAR, 1)


async def test_a_cancelled_registration_that_was_refused_has_nothing_to_undo(ledger: Ledger) -> None:
    memory = memory_of(ledger)
    ledger.refuse = lambda what, address: what == "register"
    with ledger.waiting():
        registering = asyncio.create_task(memory.register(FAR, 100))
        await entered(ledger)
        registering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await registering
    assert ledger.log == [f"refused {FAR:#x}"]


async def test_a_cancelled_unregistration_is_done(ledger: Ledger) -> None:
    memory = memory_of(ledger)
    before = dict(ledger.known)
    assert await memory.register(FAR, 100)
    with ledger.waiting():
        removing = asyncio.create_task(memory.unregister(FAR, 100))
        await entered(ledger)
        removing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await removing
    assert ledger.known == before


async def test_native_calls_run_where_the_store_wants_them(ledger: Ledger) -> None:
    memory = memory_of(ledger)
    ran: list[str] = []

    async def run(call: Callable[[], Any]) -> Any:
        ran.append(ledger.log[-1] if ledger.log else "nothing yet")
        return await asyncio.to_thread(call)

    memory.run_on(run)
    assert await memory.register(FAR, 100)
    await memory.unregister(FAR, 100)
    assert ran == ["nothing yet", f"register {FAR:#x} 100"]


async def test_closing_unregisters_then_closes_then_frees(ledger: Ledger) -> None:
    memory = memory_of(ledger)
    (pool,) = ledger.known
    assert await memory.register(FAR, 100)
    ledger.log.clear()
    await asyncio.to_thread(memory.close)
    assert sorted(ledger.log[:2]) == sorted([f"unregister {FAR:#x}", f"unregister {pool:#x}"])
    assert ledger.log[2:] == ["close", "free"]
    await asyncio.to_thread(memory.close)
    assert len(ledger.log) == 4


async def test_nothing_is_to_be_had_after_closing(ledger: Ledger) -> None:
    for config in (REMOTE, SHARED):
        memory = memory_of(ledger, config)
        region = memory.allocate(KIB)
        await asyncio.to_thread(memory.close)
        ledger.log.clear()
        assert not memory.covers(region.address, KIB)
        with pytest.raises(ClientClosedError, match=config.where):
            memory.allocate(KIB)
        with pytest.raises(ClientClosedError, match="connect again"):
            await memory.register(region.address, KIB)
        await memory.unregister(region.address, KIB)
        assert ledger.log == []


async def test_a_registration_that_comes_after_closing_touches_nothing(ledger: Ledger) -> None:
    memory = memory_of(ledger)
    with ledger.waiting():
        closing = asyncio.create_task(asyncio.to_thread(memory.close))
        await entered(ledger)
        registering = asyncio.create_task(memory.register(FAR, 100))
        removing = asyncio.create_task(memory.unregister(FAR, 100))
        await asyncio.wait([registering, removing], timeout=0.05)
    await closing
    with pytest.raises(ClientClosedError):
        await registering
    await removing
    assert [line.split()[0] for line in ledger.log] == ["unregister", "close", "free"]


@pytest.mark.parametrize(("code", "said"), [(-600, 1), (-900, 0)])
async def test_closing_goes_on_where_the_library_will_not_forget(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, code: int, said: int
) -> None:
    memory = memory_of(ledger)
    ledger.refuse = lambda what, address: True
    ledger.refusal = code
    await asyncio.to_thread(memory.close)
    assert ledger.log[-2:] == ["close", "free"]
    assert ["does not let go" in record.getMessage() for record in caplog.records] == [True] * said


async def test_memory_that_callers_hold_outlives_the_client(ledger: Ledger) -> None:
    memory = memory_of(ledger)
    part = memory.allocate(KIB).array[100:]
    part[:] = 7
    await asyncio.to_thread(memory.close)
    assert ledger.log[-1] == "close"
    assert set(part) == {7}
    del part
    gc.collect()
    assert ledger.log[-1] == "free"


async def test_with_an_owner_only_the_pool_can_be_used(ledger: Ledger) -> None:
    memory = memory_of(ledger, SHARED)
    region = memory.allocate(10 * KIB)
    assert await memory.register(region.address, region.nbytes)
    assert not await memory.register(FAR, 100)
    assert not await memory.register(region.address, 2 * MIB)
    await memory.unregister(region.address, region.nbytes)
    assert memory.covers(region.address, region.nbytes)
    assert not memory.covers(FAR, 100)
    assert ledger.log == []


def test_a_pool_that_is_refused_says_so(ledger: Ledger) -> None:
    native: Any = ledger
    ledger.refuse = lambda what, address: True
    with pytest.raises(ConnectError, match=r"master:1.*pool_size=1048576.*-600"):
        NativeMemory.open(native, REMOTE)
    with pytest.raises(ConfigError, match="pool_size"):
        NativeMemory.open(native, replace(REMOTE, pool_size=1 << 60))


# A real client


@pytest.fixture(scope="module")
def opened(serving_master: LocalMooncake, fixtures_loop: Any) -> Iterator[Opened]:
    config = MooncakeConfig(serving_master.master_address, local_hostname="127.0.0.1", pool_size=4 * MIB)
    opened: Opened = fixtures_loop.run(open_native_store(config, timeout=30))
    yield opened
    fixtures_loop.run(asyncio.to_thread(opened.memory.close))


async def test_values_move_from_and_to_the_pool_and_registered_memory(opened: Opened, fresh: str) -> None:
    native, real = opened
    source, target = real.allocate(10_000), bytearray(10_000)
    source.view[:] = random.Random(1).randbytes(10_000)
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    assert await real.register(address, 6_000)
    assert await real.register(address, 10_000)  # what is new of it only, or the library refuses
    assert real.covers(address, 10_000)
    written = await asyncio.to_thread(native.batch_put_from, [fresh], [source.address], [source.nbytes])
    assert written == [0]
    assert await asyncio.to_thread(native.batch_get_into, [fresh], [address], [10_000]) == [10_000]
    assert target == source.view
    await real.unregister(address, 10_000)
    await real.unregister(address, 6_000)
    assert not real.covers(address, 1)


async def test_the_native_client_takes_back_what_it_forgot(opened: Opened) -> None:
    native, real = opened
    target = bytearray(4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    for _ in range(3):
        assert await real.register(address, 4096)
        assert await asyncio.to_thread(native.register_buffer, address, 4096) == -600  # it is known
        await real.unregister(address, 4096)
    assert await asyncio.to_thread(native.unregister_buffer, address) == -600  # and forgotten
