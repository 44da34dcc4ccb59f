"""The serving stack of the examples, over real HTTP and a real Mooncake: answers are those of the model alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from mooncake_sparse_client import MemoryStore, SparseStoreClient, WrappedStore
from mooncake_sparse_client.integrations.transformers import cache_argument
from mooncake_sparse_client.stores.base import GetItem, PutItem
from mooncake_sparse_client.stores.local import LocalMooncake

ROOT = Path(__file__).parent.parent.parent
sys.path += [str(ROOT / "examples"), str(ROOT / "tests" / "faults")]
import serving_stack  # noqa: E402
from ground import Ground  # noqa: E402
from serving_stack import Engine, PrefixCache, make_app, open_client, serving  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.timeout(180)]
#: Below this a difference of logits could be the noise of another order of additions.
LEAST_MARGIN = 1e-3
TROUBLES = ("expired", "cancelled", "rejected")
FOREVER = {"token_ids": [1, 2, 3], "max_tokens": 8000}  # twenty seconds of steps, at least


@dataclass
class Chat:
    """A prompt and its right answer; ``then`` is the talk's second turn."""

    tokens: list[int]
    answer: list[int]
    then: Chat | None = None


@torch.no_grad()
def greedy(model: PreTrainedModel, tokens: list[int], count: int) -> list[int] | None:
    """What the model answers by itself, on the library's own cache; None if the choice of a token was not clear."""
    cache, new, answer = DynamicCache(config=model.config), torch.tensor([tokens]), []
    for _ in range(count):
        logits = model(new, **{cache_argument(model): cache}, use_cache=True).logits[0, -1]
        best = logits.topk(2)
        if float(best.values[0] - best.values[1]) < LEAST_MARGIN:
            return None
        answer.append(int(best.indices[0]))
        new = best.indices[None, :1]
    return answer


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.set_num_threads(1)  # as the engine does: more are slower, for so small a model
    return serving_stack.make_model(width=64, layers=4)


@pytest.fixture(scope="module")
def chats(model: PreTrainedModel) -> list[Chat]:
    """200 requests: ten system prompts, tails of all lengths, and a second turn for every fourth."""
    draw = random.Random(5)

    def new_tokens(count: int) -> list[int]:
        return [draw.randrange(256) for _ in range(count)]

    def chat(start: list[int], least: int, most: int) -> Chat:
        answer = None
        while answer is None:
            tokens = start + new_tokens(draw.randint(least, most))
            answer = greedy(model, tokens, draw.randint(8, 16))
        return Chat(tokens, answer)

    systems = [new_tokens(count) for count in (20, 50, 80, 100, 128, 150, 200, 230, 260, 300)]
    found = [chat(systems[number % 10], 10, 60) for number in range(160)]
    for first in found[::4]:
        first.then = chat(first.tokens + first.answer, 3, 20)
    assert max(len(first.tokens) for first in found) <= 400
    assert len({tuple(first.answer) for first in found}) > 150
    return found


@dataclass
class Served:
    """A server under test, and what its answers said."""

    url: str
    session: aiohttp.ClientSession
    cache: PrefixCache
    engine: Engine
    ends: list[dict[str, Any]] = field(default_factory=list)

    async def ask(self, **body: object) -> list[dict[str, Any]]:
        async with self.session.post(f"{self.url}/generate", json=body) as response:
            assert response.status == 200, await response.text()
            return [json.loads(line) async for line in response.content]

    async def answers(self, chat: Chat, **options: object) -> None:
        """The whole talk is answered right."""
        *tokens, end = await self.ask(token_ids=chat.tokens, max_tokens=len(chat.answer), **options)
        assert [line.get("token") for line in tokens] == chat.answer, (end, tokens)
        assert end["done"] is True
        assert end["prompt_tokens"] == len(chat.tokens)
        self.ends.append(end)
        if chat.then is not None:
            await self.answers(chat.then, **options)

    async def get(self, path: str) -> dict[str, Any]:
        async with self.session.get(f"{self.url}/{path}") as response:
            found: dict[str, Any] = await response.json()
            return found

    async def until(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 20.0) -> dict[str, Any]:
        """Until the metrics are so."""
        async with asyncio.timeout(seconds):
            while not condition(found := await self.get("metrics")):
                await asyncio.sleep(0.02)
        return found

    async def hits_come(self, chat: Chat, seconds: float = 60.0) -> None:
        """Within so long what one request stores is there for the next."""
        self.ends.clear()
        async with asyncio.timeout(seconds):
            while not self.ends or not self.ends[-1]["hit_length"]:
                await self.answers(Chat(chat.tokens, chat.answer))
                await asyncio.sleep(0.1)

    async def store_is_ok(self, seconds: float = 30.0) -> None:
        async with asyncio.timeout(seconds):
            while not (await self.get("health"))["store"]["ok"]:
                await asyncio.sleep(0.1)

    async def nothing_runs(self) -> None:
        """All places are free, and the model's thread does nothing more."""
        await self.until(lambda now: not now["running"] and not now["waiting"])
        await self.engine.run(int)  # a step that had begun is over
        steps = self.engine.steps
        await asyncio.sleep(0.1)
        assert self.engine.steps == steps


@contextlib.asynccontextmanager
async def served(
    model: PreTrainedModel,
    store: str | SparseStoreClient,
    *,
    budget: float = 1.0,
    cache: dict[str, float] | None = None,
    **limits: float,
) -> AsyncIterator[Served]:
    engine = Engine(model, step_tokens=64)
    client = open_client(store, engine.kv, 0, budget) if isinstance(store, str) else store
    prefix_cache = PrefixCache(client, engine.kv, budget=budget, **cache or {})
    async with (
        serving(make_app(engine, prefix_cache, **limits), grace=0.2) as url,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        yield Served(url, session, prefix_cache, engine)


async def side_by_side(server: Served, chats: Sequence[Chat], count: int = 16, **options: object) -> None:
    """So many users, each with one talk after another."""
    left = iter(chats)

    async def user() -> None:
        for chat in left:
            await server.answers(chat, **options)

    async with asyncio.TaskGroup() as users:
        for _ in range(count):
            users.create_task(user())


async def test_every_answer_is_the_models_own_and_the_hits_are_real(
    model: PreTrainedModel, chats: list[Chat], serving_master: LocalMooncake
) -> None:
    # A budget that a machine with other work does not use up.
    async with served(model, serving_master.master_address, budget=20.0) as server:
        await side_by_side(server, chats)
        now = await server.until(lambda now: not now["puts_under_way"])
        health = await server.get("health")
    prompts = sum(end["prompt_tokens"] for end in server.ends)
    restored = sum(end["hit_length"] for end in server.ends)
    assert len(server.ends) == 200
    assert restored > 0.4 * prompts
    # A prompt's tokens are restored or computed; of an answer all but the last are computed.
    assert (now["requests"], now["tokens_prompt"], now["tokens_restored"]) == (200, prompts, restored)
    assert now["tokens_computed"] == prompts - restored + now["tokens_generated"] - 200
    assert now["puts"] + now.get("puts_dropped", 0) == 400
    assert not any(now.get(name) for name in ("degraded", "puts_failed", *TROUBLES)), now
    assert health["store"]["ok"] is True
    assert health["degraded"] is False


@pytest.mark.usefixtures("native_library")
async def test_a_master_that_is_killed_and_comes_back_costs_hits_and_no_answer(
    model: PreTrainedModel, chats: list[Chat]
) -> None:
    async with Ground() as ground, served(model, ground.master_address) as server:
        run = asyncio.create_task(side_by_side(server, chats))
        await server.until(lambda now: now.get("requests", 0) >= 60, 60)
        await ground.master.kill()
        before = (await server.get("metrics")).get("degraded", 0)
        await server.until(lambda now: now.get("degraded", 0) >= before + 10, 60)
        assert not (await server.get("health"))["store"]["ok"]
        await ground.master.start()
        await run
        assert len(server.ends) == 200
        await server.hits_come(chats[0])
        assert (await server.get("health"))["degraded"] is False
        await server.store_is_ok()
        now = await server.get("metrics")
    assert not any(now.get(name) for name in TROUBLES), now


@pytest.mark.usefixtures("native_library")
async def test_a_store_that_is_not_there_costs_nothing_but_hits_and_is_used_when_it_comes(
    model: PreTrainedModel, chats: list[Chat]
) -> None:
    ground = Ground()
    async with contextlib.aclosing(ground), served(model, ground.master_address) as server:
        await side_by_side(server, chats[:16])
        health, now = await server.get("health"), await server.get("metrics")
        assert {end["hit_length"] for end in server.ends} == {0}
        assert health["serving"] is True
        assert health["degraded"] is True
        assert (health["store"]["ok"], health["store"]["kind"]) == (False, "connect_failed")
        assert ground.master_address in health["store"]["detail"]
        assert now["degraded"] == now["requests"]
        await ground.master.start()
        await ground.owner.start()
        await server.hits_come(chats[0])
        await server.store_is_ok()


async def test_without_a_store_it_serves_and_does_not_call_that_degraded(
    model: PreTrainedModel, chats: list[Chat]
) -> None:
    async with served(model, "none") as server:
        await side_by_side(server, chats[:4])
        assert (await server.get("health"))["store"]["kind"] == "off"
        assert not (await server.get("metrics"))["degraded"]


async def test_what_is_more_than_the_limits_is_refused_at_once(model: PreTrainedModel, chats: list[Chat]) -> None:
    async with served(model, "none", max_running=2, max_waiting=1) as server:
        users = [asyncio.create_task(server.ask(**FOREVER)) for _ in range(3)]
        await server.until(lambda now: (now["running"], now["waiting"]) == (2, 1))
        async with server.session.post(f"{server.url}/generate", data=b"never looked at") as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
        assert (await server.get("metrics"))["rejected"] == 1
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)
        await server.nothing_runs()
        await server.answers(chats[0])  # the places are free again


async def test_a_deadline_ends_a_request_whether_it_runs_or_waits(model: PreTrainedModel, chats: list[Chat]) -> None:
    async with served(model, "none", max_running=1) as server:
        running = asyncio.create_task(server.ask(**FOREVER, timeout=3.0))
        await server.until(lambda now: now["running"] == 1)
        async with server.session.post(f"{server.url}/generate", json=FOREVER | {"timeout": 0.1}) as response:
            assert response.status == 504  # it never had its turn, so nothing was sent
        *tokens, last = await running
        assert tokens
        assert last == {"error": "the deadline has passed"}
        await server.nothing_runs()
        assert (await server.get("metrics"))["expired"] == 2
        await server.answers(chats[0])


async def test_a_client_that_goes_away_takes_its_work_along(model: PreTrainedModel, chats: list[Chat]) -> None:
    async with served(model, "none", max_running=1) as server:
        response = await server.session.post(f"{server.url}/generate", json=FOREVER)
        assert "token" in json.loads(await response.content.readline())
        waiting = asyncio.create_task(server.ask(**FOREVER))
        await server.until(lambda now: now["waiting"] == 1)
        waiting.cancel()
        await server.until(lambda now: now["waiting"] == 0)
        assert (await server.get("metrics"))["running"] == 1
        response.close()
        await server.nothing_runs()
        assert (await server.get("metrics"))["cancelled"] == 2
        await server.answers(chats[0])


class HeldStore(WrappedStore):
    """Puts wait until ``go_on`` is set; ``begun`` says that one does.

    ``lose_one``: the next read finds its first chunk gone. ``silent``: no question is answered.
    """

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.lose_one = self.silent = False

    async def put(self, items: Sequence[PutItem]) -> Any:
        self.begun.set()
        await self.go_on.wait()
        return await super().put(items)

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        if self.silent:
            await asyncio.Event().wait()
        return await super().exists(keys)

    async def get(self, items: Sequence[GetItem]) -> Any:
        if self.lose_one:
            self.lose_one = False
            await self.inner.remove([items[0].key], force=True)
        return await super().get(items)


def client_of(store: HeldStore, model: PreTrainedModel) -> SparseStoreClient:
    kv = serving_stack.ModelKV(model.config)
    return SparseStoreClient(
        store, kv.layout, model_name="held", dtype=kv.dtype, retention_interval=0, when_down="miss", timeout=300.0
    )


async def test_a_store_that_does_not_answer_costs_the_budget_and_no_deadline(
    model: PreTrainedModel, chats: list[Chat]
) -> None:
    store, chat = HeldStore(), Chat(chats[0].tokens, chats[0].answer)
    store.silent = True
    async with served(model, client_of(store, model), cache={"drain": 0.1}) as server:
        body = {"token_ids": chat.tokens, "timeout": 0.1}
        async with server.session.post(f"{server.url}/generate", json=body) as response:
            assert response.status == 504
        await server.nothing_runs()
        assert not server.cache.degraded  # nobody waited for long enough to know
        await server.answers(chat)
        now = await server.get("metrics")
        assert (now["degraded"], now["degraded_budget"]) == (1, 1)
        assert (await server.get("health"))["degraded"] is True


async def test_puts_are_bounded_and_what_is_dropped_is_counted(model: PreTrainedModel, chats: list[Chat]) -> None:
    store = HeldStore()
    async with served(model, client_of(store, model), cache={"max_puts": 1}) as server:
        for chat in chats[:3]:
            await server.answers(Chat(chat.tokens, chat.answer))
        now = await server.get("metrics")
        assert (now["puts_under_way"], now["puts_dropped"]) == (1, 5)
        store.go_on.set()
        await server.until(lambda now: now.get("puts") == 1)


async def test_what_a_dropped_put_would_have_stored_is_left_to_the_next_one(
    model: PreTrainedModel, chats: list[Chat]
) -> None:
    async with served(model, client_of(HeldStore(), model), cache={"max_put_bytes": 1}) as server:
        cache = server.cache
        first, other = [await cache.fetch(chat.tokens, None, ()) for chat in chats[:2]]
        lost = cache.capture(first)
        begun = cache.capture(other)
        await server.engine.next_token(chats[1].tokens, await server.engine.restore(None), begun)
        cache.put(other, begun)
        cache.put(first, lost)  # one is under way, with more bytes than may be
        assert (cache.puts_under_way, cache.counters["puts_dropped"]) == (1, 1)
        assert cache.capture(first) is None  # nothing is copied for what would be dropped
        server.cache._max_put_bytes = 1 << 30
        again = cache.capture(first)
        assert [mask.tolist() for mask in again.missing] == [mask.tolist() for mask in lost.missing]
        assert again.missing[0].any()
        assert not any(mask.any() for mask in cache.capture(other).missing)  # its put is under way


async def test_a_second_turn_starts_where_the_answer_ended_and_only_for_its_own_tenant(
    model: PreTrainedModel, chats: list[Chat]
) -> None:
    store, talk = HeldStore(), chats[0]
    assert talk.then is not None
    store.go_on.set()
    async with served(model, client_of(store, model)) as server:
        await server.answers(Chat(talk.tokens, talk.answer), cache_salt="tenant-a")
        await server.until(lambda now: now.get("puts") == 2)
        await server.answers(talk.then, cache_salt="tenant-b")
        await server.answers(talk.then, cache_salt="tenant-a")
    known = len(talk.tokens) + len(talk.answer) - 1  # the last token of an answer has no cache
    assert [end["hit_length"] for end in server.ends] == [0, 0, known // 16 * 16]


async def test_what_was_lost_between_lookup_and_get_is_computed_and_stored_again(
    model: PreTrainedModel, chats: list[Chat]
) -> None:
    store, chat = HeldStore(), Chat(chats[0].tokens, chats[0].answer)
    store.go_on.set()
    async with served(model, client_of(store, model)) as server:
        for asked, lose in enumerate((False, True, False), start=1):
            store.lose_one = lose
            await server.answers(chat)
            await server.until(lambda now, puts=2 * asked: now.get("puts") == puts)
        now = await server.get("metrics")
    whole = (len(chat.tokens) - 1) // 16 * 16
    assert [end["hit_length"] for end in server.ends] == [0, 0, whole]
    assert now["chunks_lost_missing"] == 1
    assert not server.cache.degraded


@pytest.mark.parametrize("in_time", [True, False])
async def test_the_end_waits_for_puts_but_not_for_ever(
    model: PreTrainedModel, chats: list[Chat], in_time: bool
) -> None:
    store = HeldStore()
    drain = 100.0 if in_time else 0.2
    began = time.monotonic()
    async with served(model, client_of(store, model), cache={"drain": drain}) as server:
        await server.answers(Chat(chats[0].tokens, chats[0].answer))
        await store.begun.wait()
        if in_time:
            asyncio.get_running_loop().call_later(0.5, store.go_on.set)
    assert time.monotonic() - began < 60  # neither the drain's 100 seconds nor the client's 300
    assert server.cache.puts_under_way == 0
    assert server.cache.counters["puts"] == (2 if in_time else 0)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"token_ids": [256]}',
        b'{"token_ids": [true]}',
        b'{"text": "x", "max_tokens": 0}',
        b'{"text": "x", "max_tokens": 16384}',
        b'{"text": "x", "timeout": 0}',
        b'{"text": "x", "cache_salt": 1}',
        b'{"text": "x", "boundaries": [2]}',
        b'{"text": null}',
        b"[" * 100_000,
    ],
)
async def test_a_body_that_makes_no_sense_is_refused_with_a_reason(model: PreTrainedModel, body: bytes) -> None:
    async with (
        served(model, "none") as server,
        server.session.post(f"{server.url}/generate", data=body) as response,
    ):
        assert response.status == 400
        assert await response.text()


async def test_a_salt_or_charset_that_is_none_is_refused(model: PreTrainedModel) -> None:
    async with served(model, client_of(HeldStore(), model)) as server:
        url = f"{server.url}/generate"
        async with server.session.post(url, json={"text": "x", "cache_salt": ""}) as response:
            assert response.status == 400
            assert "cache_salt" in await response.text()
        headers = {"Content-Type": "application/json; charset=none"}
        async with server.session.post(url, data=b'{"text": "x"}', headers=headers) as response:
            assert response.status == 400
        await server.nothing_runs()


async def test_the_script_ends_in_order_on_sigterm_in_the_middle_of_an_answer() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "examples/serving_stack.py", "--store", "none", "--width", "64", "--layers", "4"),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().split()[-1]
        body = FOREVER | {"timeout": 3.0}
        async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as response:
            assert "token" in json.loads(await response.content.readline())
            process.send_signal(signal.SIGTERM)
            assert b"deadline" in (await response.read()).splitlines()[-1]  # it went on until then
            _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert (process.returncode, errors) == (0, b"")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
