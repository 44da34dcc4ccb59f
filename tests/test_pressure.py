"""The ledger and back-pressure by themselves."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from mooncake_sparse_client.data_plane.ledger import OUT_OF_REACH_SECONDS, Ledger
from mooncake_sparse_client.data_plane.pressure import LONGEST_PAUSE, Backpressure, Turn, jittered


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_out_of_reach_ends_by_itself_and_stays_suspect() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.mark_out_of_reach("a")
    clock.now += 6
    ledger.mark_out_of_reach("b")
    ledger.mark_damaged("c")
    assert ledger.out_of_reach(["a", "b", "c"]).tolist() == [True, True, False]
    assert ledger.unusable(["a", "b", "c", "d"]).tolist() == [True, True, True, False]
    clock.now += OUT_OF_REACH_SECONDS - 6
    assert ledger.out_of_reach(["a", "b"]).tolist() == [False, True]
    assert ledger.suspect(["a", "b", "c", "d"]).tolist() == [True, True, True, False]
    ledger.mark_out_of_reach("b")
    clock.now += OUT_OF_REACH_SECONDS - 1
    assert ledger.out_of_reach(["b"]).tolist() == [True]
    clock.now += 1
    assert ledger.out_of_reach(["b"]).tolist() == [False]
    ledger.found(["a", "b"])
    assert ledger.suspect(["a", "b", "c"]).tolist() == [False, False, True]


def test_what_is_gone_is_on_no_dead_owner() -> None:
    ledger = Ledger()
    for key in "abc":
        ledger.mark_out_of_reach(key)
    ledger.answered(["a", "b"], np.array([True, False]))
    assert ledger.out_of_reach(["a", "b", "c"]).tolist() == [True, False, True]
    ledger.clear(iter(["a", "c"]))
    assert not ledger.suspect(["a", "c"]).any()


def test_a_ledger_is_bounded() -> None:
    ledger = Ledger()
    for number in range(70_000):
        ledger.mark_out_of_reach(str(number))
        ledger.mark_damaged(str(number))
    assert len(ledger._out_of_reach) == len(ledger._lost) == len(ledger._damaged) == 65536
    assert ledger.unusable(["0", "69999"]).tolist() == [False, True]


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


async def test_without_refusals_nobody_waits() -> None:
    pressure = Backpressure()
    for _ in range(1000):
        turn = await pressure.turn(soon(-1))
        assert turn is not None
        assert turn.may_send()
        assert turn.may_send()
        pressure.accepted(turn)


async def test_pauses_grow_with_refusals_and_end_with_room() -> None:
    pressure = Backpressure()
    pauses = []
    for _ in range(12):
        turn = await pressure.turn(soon()) if len(pauses) < 4 else _fresh(pressure)
        assert turn is not None
        pressure.refused(turn, wholly=True)
        pressure.refused(turn, wholly=True)  # a batch of the same turn: known already
        pauses.append(pressure._pause)
    assert pauses == [min(0.01 * 2**number, LONGEST_PAUSE) for number in range(12)]
    pressure.refused(_fresh(pressure), wholly=False)
    assert pressure._pause == 0.01
    late = _fresh(pressure)
    pressure.refused(_fresh(pressure), wholly=True)
    pressure.accepted(late)  # it was sent before that refusal
    assert pressure.holds
    pressure.accepted(_fresh(pressure))
    assert not pressure.holds


def _fresh(pressure: Backpressure) -> Turn:
    """A turn of now, taken out of order."""
    return Turn(pressure, pressure._era)


async def test_turns_are_given_in_order_one_a_pause() -> None:
    pressure = Backpressure()
    first = await pressure.turn(soon())
    assert first is not None
    pressure.refused(first, wholly=True)
    assert first.may_send()  # it was its turn
    assert not first.may_send()
    order: list[int] = []

    async def wait(number: int) -> None:
        turn = await pressure.turn(soon())
        assert turn is not None
        order.append(number)
        assert turn.may_send()
        assert not turn.may_send()

    begun = time.monotonic()
    await asyncio.gather(*(wait(number) for number in range(5)))
    assert order == list(range(5))
    assert time.monotonic() - begun >= 4 * 0.005


async def test_room_wakes_all_who_wait_for_their_turn() -> None:
    pressure = Backpressure()
    for _ in range(9):
        pressure.refused(_fresh(pressure), wholly=True)
    waiting = [asyncio.create_task(pressure.turn(soon())) for _ in range(20)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    pressure.accepted(_fresh(pressure))
    done, _ = await asyncio.wait(waiting, timeout=0.4)
    assert len(done) == 20


async def test_who_waits_gives_up_in_time_or_when_cancelled() -> None:
    pressure = Backpressure()
    for _ in range(9):
        pressure.refused(_fresh(pressure), wholly=True)
    holder = asyncio.create_task(pressure.turn(soon()))
    await asyncio.sleep(0)
    assert await pressure.turn(soon(0.02)) is None
    holder.cancel()
    assert isinstance((await asyncio.gather(holder, return_exceptions=True))[0], asyncio.CancelledError)
    assert await pressure.turn(soon(10)) is not None


def test_pauses_differ() -> None:
    pauses = {jittered(1.0) for _ in range(50)}
    assert len(pauses) > 40
    assert 0.5 <= min(pauses) < max(pauses) <= 1.0
