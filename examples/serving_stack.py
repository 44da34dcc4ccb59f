"""An HTTP server for a transformers model that keeps its prompts' KV cache in a Mooncake store: where to start from.

The model is tiny, with random weights made on the spot, and its tokens are bytes; all the rest is what a real server
does. A request is admitted or refused before any work, has a deadline, gets from the cache what is there within a
small budget of time, computes the rest, and streams its tokens as they come; what is worth keeping is put in the
background. A store that is down costs hits, and nothing else. Needs the extra ``transformers``:

    python examples/serving_stack.py --store local --port 8000
    curl -N localhost:8000/generate -d '{"text": "Once upon a time", "max_tokens": 20}'

``POST /generate`` takes ``text`` or ``token_ids``, and ``max_tokens``, ``timeout`` (seconds), ``cache_salt`` and
``boundaries`` (positions where other prompts will part from this one, such as the end of a system prompt). It answers a
line of JSON for each token, and a last one. ``GET /health`` says how the store is, ``GET /metrics`` has the counters.
A batch is one sequence here: steps of several requests take turns on the model's thread.
"""

import argparse
import asyncio
import contextlib
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from mooncake_sparse_client import GetResult, Health, PrefixHit, PutResult, Resilience, SparseStoreClient, TokenSequence
from mooncake_sparse_client.errors import ConnectError, InvalidInputError, SetupError, SparseStoreError, StoreError

try:
    import torch
    from aiohttp import web
    from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, PreTrainedModel

    from mooncake_sparse_client.integrations.transformers import ChunkCapture, ModelKV
except ImportError as error:
    raise SystemExit(f"{error}; this example needs: pip install 'mooncake-sparse-client[transformers]'") from None

T = TypeVar("T")
SEED = 20
OUT_OF_REACH = ("down", "unavailable", "timeout")


def make_model(width: int = 256, layers: int = 8) -> PreTrainedModel:
    """A decoder over bytes, the same whenever it is made: full attention and sliding windows by turns."""
    torch.manual_seed(SEED)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
    config = Gemma3TextConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        layer_types=["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
        sliding_window=64,
        max_position_embeddings=16384,
        initializer_range=0.2,  # with this and the next line a token depends on all of its past, as a trained model's
        query_pre_attn_scalar=1,
        tie_word_embeddings=False,
        **heads,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    return AutoModelForCausalLM.from_config(config).eval()


class Engine:
    """The model, on one thread of its own, so that the event loop never waits for it.

    A step of a prefill or a decode is one job of the thread. Jobs run in the order in which they come, so requests take
    turns; a request that is cancelled asks for no further one.
    """

    def __init__(self, model: PreTrainedModel, *, step_tokens: int = 256) -> None:
        torch.set_num_threads(1)  # more are slower, for so small a model
        self.kv = ModelKV(model.config)
        self.longest: int = model.config.max_position_embeddings
        self.steps = self.tokens_computed = 0
        self._model = model
        self._step_tokens = step_tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    async def restore(self, got: GetResult | None) -> DynamicCache:
        restore = partial(self.kv.restore, device=self._model.device)
        return await (self.run(self.kv.new_cache) if got is None else self.run(restore, got))

    async def run(self, job: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job, *arguments)

    async def next_token(self, tokens: list[int], cache: DynamicCache, capture: ChunkCapture | None = None) -> int:
        """Compute what the cache lacks of ``tokens``, a step at a time, and choose what follows them."""
        while True:
            end = min(cache.get_seq_length() + self._step_tokens, len(tokens))
            best = await self.run(self._step, tokens[:end], cache, capture)
            if end == len(tokens):
                return best

    def _step(self, tokens: list[int], cache: DynamicCache, capture: ChunkCapture | None) -> int:
        self.steps += 1
        self.tokens_computed += len(tokens) - cache.get_seq_length()
        return int(self.kv.prefill(self._model, tokens, cache, capture).argmax())

    async def aclose(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)


@dataclass
class Turn:
    """What the cache side knows of one request."""

    sequence: TokenSequence | None = None  # None: there is no store to ask
    boundaries: Sequence[int] = ()
    hit: PrefixHit | None = None
    got: GetResult | None = None
    wanted: Sequence[NDArray[np.bool_]] = ()  # what the last capture is of
    taken: Sequence[NDArray[np.bool_]] = ()  # what puts have been begun for


class PrefixCache:
    """The store, seen from a request: never an error, never longer than a budget, and no put that nobody owns."""

    def __init__(
        self,
        client: SparseStoreClient | None,
        kv: ModelKV,
        *,
        budget: float = 1.0,
        max_puts: int = 32,
        max_put_bytes: int = 1 << 30,
        drain: float = 5.0,
    ) -> None:
        """``budget``: seconds that a request waits for the store. ``max_puts``, ``max_put_bytes``: how many puts may be
        under way, and with how many bytes of chunks. ``drain``: seconds that they may go on when the server ends."""
        self.counters: Counter[str] = Counter()
        self.degraded = client is not None  # the last request had to do without the store
        self._client, self._kv = client, kv
        self._budget, self._max_puts, self._max_put_bytes, self._drain = budget, max_puts, max_put_bytes, drain
        self._open, self._trouble = False, "none is wanted"
        self._opening: asyncio.Task[None] | None = None
        self._puts: dict[asyncio.Task[None], int] = {}  # with the bytes that they hold

    async def __aenter__(self) -> Self:
        """Connect. Where no store answers, go on without one, and keep trying."""
        if self._client is not None and not await self._connects(self._client):
            self._opening = asyncio.create_task(self._keep_connecting(self._client))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        if self._puts:
            await asyncio.wait(self._puts, timeout=self._drain)
        late = [*self._puts, *([self._opening] if self._opening else [])]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _connects(self, client: SparseStoreClient) -> bool:
        try:
            await client.__aenter__()
        except ConnectError as error:  # another SetupError is a mistake of whoever started us
            self._trouble = str(error)
            return False
        self._open, self.degraded = True, False
        return True

    async def _keep_connecting(self, client: SparseStoreClient) -> None:
        connected = False
        while not connected:
            await asyncio.sleep(1.0)
            try:
                connected = await self._connects(client)
            except SparseStoreError as error:  # nobody waits for this task: say it, and try again
                self._trouble = str(error)

    async def fetch(self, tokens: list[int], salt: str | None, boundaries: Sequence[int]) -> Turn:
        """Look a prompt up and read what is there: within the budget, or nothing."""
        if self._client is None or not self._open:
            self.counters["degraded"] += self._client is not None
            return Turn()
        turn = Turn(self._client.sequence(tokens, cache_salt=salt), boundaries)
        trouble = ""
        try:
            async with asyncio.timeout(self._budget):
                turn.hit = await self._client.lookup(turn.sequence)
                turn.got = await self._client.get(turn.hit)
        except StoreError as error:
            trouble = error.kind
        except TimeoutError:
            trouble = "budget"
        else:
            reasons = Counter(failure.reason for failure in turn.got.failures)
            self.counters.update({f"chunks_lost_{reason}": count for reason, count in reasons.items()})
            self.counters.update(f"limited_by_group_{group}" for group in turn.hit.report.limited_by)
            # With when_down="miss", a store that could not be reached raises nothing: its results say so.
            trouble = next((reason for reason in OUT_OF_REACH if reason in reasons), "")
            trouble = trouble or ("" if turn.hit.answered else "down")
            self.counters["tokens_restored"] += turn.got.hit_length
            if turn.got.hit_length < turn.hit.hit_length:
                turn.hit = None  # part of what it saw is gone: let the puts ask for all, and fill every hole
        self.degraded = bool(trouble)
        if trouble:
            self.counters.update({"degraded": 1, f"degraded_{trouble}": 1})
        return turn

    def capture(self, turn: Turn) -> ChunkCapture | None:
        """What is to be taken out of the model's cache for the turn's next put; None if nothing is."""
        if self._client is None or turn.sequence is None or self._too_much():
            return None
        plan = self._client.plan_put(turn.sequence, hit=turn.hit, boundaries=turn.boundaries)
        turn.wanted = plan.store_masks
        return self._kv.capture(plan, but=turn.taken)  # the put before has those

    def _too_much(self) -> bool:
        """Whether so many puts are under way that another one is dropped, which is counted."""
        dropped = len(self._puts) >= self._max_puts or sum(self._puts.values()) >= self._max_put_bytes
        self.counters["puts_dropped"] += dropped
        return dropped

    def put(self, turn: Turn, capture: ChunkCapture | None) -> None:
        """Begin to store what was captured, in the background; drop it where too many puts are under way."""
        if self._client is None or turn.sequence is None or capture is None or self._too_much():
            return
        turn.taken = turn.wanted
        # Made here and not by the task: a put takes the sequence as long as it is when it is called.
        putting = self._client.put(turn.sequence, capture, hit=turn.hit, boundaries=turn.boundaries)
        task = asyncio.create_task(self._finish(putting))
        self._puts[task] = capture.nbytes
        task.add_done_callback(self._puts.pop)

    async def _finish(self, putting: Coroutine[None, None, PutResult]) -> None:
        try:
            put = await putting
        except SparseStoreError as error:
            self.counters.update({"puts_failed": 1, f"puts_failed_{error.kind}": 1})
            return
        self.counters.update({"puts": 1, "chunks_written": put.written.chunks})
        self.counters.update(f"chunks_failed_{failure.reason}" for failure in put.failures)

    @property
    def puts_under_way(self) -> int:
        return len(self._puts)

    async def health(self) -> Health:
        """Asks the store itself, for as long as the client's ``Resilience.hang_seconds``."""
        if self._client is None or not self._open:
            return Health(ok=False, kind="off" if self._client is None else "connect_failed", detail=self._trouble)
        return await self._client.health()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's body, checked."""

    tokens: list[int]
    max_tokens: int
    timeout: float
    salt: str | None
    boundaries: list[int]

    @classmethod
    def read(cls, body: object, longest: int, timeout: float) -> Self:
        """Raises ``ValueError`` with a text for the client, who may ask for less time than ``timeout``."""
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        text = body.get("text", "")
        tokens = body["token_ids"] if "token_ids" in body else list(text.encode()) if isinstance(text, str) else []
        if not tokens or not _whole(tokens, 0, 255):
            raise ValueError("give text, or token_ids: a list of whole numbers from 0 to 255")
        count, boundaries = body.get("max_tokens", 16), body.get("boundaries", [])
        if not _whole([count], 1, longest - len(tokens)) or not _whole(boundaries, 0, len(tokens)):
            raise ValueError(
                f"max_tokens must be from 1 to {longest} less the prompt, boundaries positions in the prompt"
            )
        seconds, salt = body.get("timeout", timeout), body.get("cache_salt")
        if type(seconds) not in (int, float) or not seconds > 0 or not isinstance(salt, str | None):
            raise ValueError("timeout must be a number of seconds above 0, cache_salt a string")
        return cls(tokens, count, min(seconds, timeout), salt, boundaries)


def _whole(numbers: object, least: int, most: int) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and least <= number <= most for number in numbers)


class Places:
    """Admission: so many requests run, so many wait in order, and the next one is refused at once."""

    def __init__(self, running: int, waiting: int) -> None:
        self._free, self._most = asyncio.Semaphore(running), running + waiting
        self.admitted = self.running = self.rejected = 0

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        if self.admitted >= self._most:
            self.rejected += 1
            raise web.HTTPServiceUnavailable(text="all places are taken", headers={"Retry-After": "1"})
        self.admitted += 1
        try:
            yield
        finally:
            self.admitted -= 1

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with self._free:
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1


class Lines:
    """An answer in lines of JSON. Its status is sent with the first line, so until then it can be another one."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})

    async def send(self, **line: object) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(json.dumps(line).encode() + b"\n")


class Server:
    """Each request goes the same way, ``_answer``, if it is admitted, and until its deadline or its client's end."""

    def __init__(
        self, engine: Engine, cache: PrefixCache, *, max_running: int = 16, max_waiting: int = 64, timeout: float = 60.0
    ) -> None:
        """``timeout``: seconds that a request may take, the wait for its turn included; a client may ask for less."""
        self._engine, self._cache, self._timeout = engine, cache, timeout
        self._places = Places(max_running, max_waiting)
        self._counters: Counter[str] = Counter()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        began = asyncio.get_running_loop().time()
        lines = Lines(request)
        try:
            with self._places.admit():
                async with asyncio.timeout_at(began + self._timeout) as deadline:
                    prompt = await self._read(request)
                    deadline.reschedule(began + prompt.timeout)
                    async with self._places.turn():
                        await self._answer(prompt, lines, began)
        except TimeoutError:
            self._counters["expired"] += 1
            if not lines.response.prepared:
                raise web.HTTPGatewayTimeout(text="the deadline has passed") from None
            with contextlib.suppress(TimeoutError, ConnectionError):  # of a client that reads nothing
                async with asyncio.timeout(1):
                    await lines.send(error="the deadline has passed")
        except InvalidInputError as error:  # a salt that is none, before anything is sent
            raise web.HTTPBadRequest(text=str(error)) from None
        except (asyncio.CancelledError, ConnectionError):  # the client has gone, or the server ends
            self._counters["cancelled"] += 1
            raise
        return lines.response

    async def _read(self, request: web.Request) -> Prompt:
        try:
            return Prompt.read(await request.json(), self._engine.longest, self._timeout)
        except (ValueError, LookupError, RecursionError) as error:  # no JSON, a foreign charset, too deep
            raise web.HTTPBadRequest(text=str(error)) from None

    async def _answer(self, prompt: Prompt, lines: Lines, began: float) -> None:
        """Restore, compute the rest, stream; put after the prefill, and again after the last token."""
        self._counters.update({"requests": 1, "tokens_prompt": len(prompt.tokens)})
        tokens, length = list(prompt.tokens), len(prompt.tokens)
        turn = await self._cache.fetch(tokens, prompt.salt, prompt.boundaries)
        hit_length = turn.got.hit_length if turn.got else 0
        kv_cache = await self._engine.restore(turn.got)
        turn.got = None  # its bytes have been copied

        capture = self._cache.capture(turn)
        tokens.append(await self._engine.next_token(tokens, kv_cache, capture))
        self._cache.put(turn, capture)
        ttft_ms = round((asyncio.get_running_loop().time() - began) * 1000, 1)
        await lines.send(token=tokens[-1])
        while len(tokens) < length + prompt.max_tokens:
            tokens.append(await self._engine.next_token(tokens, kv_cache))
            await lines.send(token=tokens[-1])

        if turn.sequence is not None:  # the next turn of a conversation starts with all this
            turn.sequence.extend(tokens[length:-1])  # the last token has no cache yet
            if (capture := self._cache.capture(turn)) is not None:
                await self._engine.run(capture.take, kv_cache)
            self._cache.put(turn, capture)
        self._counters["tokens_generated"] += prompt.max_tokens
        text = bytes(tokens[length:]).decode(errors="replace")
        await lines.send(done=True, hit_length=hit_length, prompt_tokens=length, ttft_ms=ttft_ms, text=text)

    async def health(self, _: web.Request) -> web.Response:
        store = await self._cache.health()
        state = {"ok": store.ok, "kind": store.kind, "detail": store.detail}
        return web.json_response({"serving": True, "store": state, "degraded": self._cache.degraded})

    async def metrics(self, _: web.Request) -> web.Response:
        now = {
            "running": self._places.running,
            "waiting": self._places.admitted - self._places.running,
            "rejected": self._places.rejected,
            "steps": self._engine.steps,
            "tokens_computed": self._engine.tokens_computed,
            "puts_under_way": self._cache.puts_under_way,
        }
        return web.json_response(now | self._counters | self._cache.counters)


def make_app(engine: Engine, cache: PrefixCache, **limits: float) -> web.Application:
    """The application, which opens the cache side when it starts, and closes both when it ends; ``limits``: those of
    ``Server``."""
    server = Server(engine, cache, **limits)

    async def life(_: web.Application) -> AsyncIterator[None]:
        async with contextlib.aclosing(engine), cache:
            yield

    app = web.Application()
    app.cleanup_ctx.append(life)
    app.router.add_post("/generate", server.generate)
    app.router.add_get("/health", server.health)
    app.router.add_get("/metrics", server.metrics)
    return app


@contextlib.asynccontextmanager
async def serving(app: web.Application, port: int = 0, *, grace: float = 5.0) -> AsyncIterator[str]:
    """Serve on this machine, at the URL that is yielded. At the end requests may go on for ``grace`` seconds."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=grace)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def open_client(store: str, kv: ModelKV, retention_interval: int, budget: float) -> SparseStoreClient | None:
    """``store``: ``none``, ``local`` for one of our own, or a master's address. ``budget``: as for ``PrefixCache``."""
    settings = {
        "model_name": "serving-stack",
        "dtype": kv.dtype,
        "revision": f"random weights, seed {SEED}",  # what other weights compute is another cache
        "retention_interval": retention_interval,
        "when_down": "miss",
        "timeout": 5 * budget,  # puts may take longer
        "resilience": Resilience(hang_seconds=budget),  # what does not answer in it is left alone
    }
    if store in ("none", "local"):
        return SparseStoreClient.local(kv.layout, **settings) if store == "local" else None
    return SparseStoreClient.connect(kv.layout, master_server_address=store, **settings)


async def main(options: argparse.Namespace) -> None:
    engine = Engine(make_model(options.width, options.layers))
    client = open_client(options.store, engine.kv, options.retention, options.budget)
    cache = PrefixCache(client, engine.kv, budget=options.budget)
    limits = {"max_running": options.max_running, "max_waiting": options.max_waiting, "timeout": options.timeout}
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(make_app(engine, cache, **limits), options.port) as url:
        print(f"serving at {url}", flush=True)
        await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="serve a tiny transformers model, with its KV cache in a store")
    parser.add_argument("--store", default="local", help="HOST:PORT of a master, local (the default), or none")
    for name, default, meaning in (
        ("port", 0, "0: a free one"),
        ("max-running", 16, "requests that run"),
        ("max-waiting", 64, "requests that wait"),
        ("timeout", 60.0, "seconds for a request"),
        ("budget", 1.0, "seconds that a request waits for the store"),
        ("retention", 256, "the retention interval in tokens"),
        ("width", 256, "of the model"),
        ("layers", 8, "of the model"),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{meaning}; default {default}")
    try:
        asyncio.run(main(parser.parse_args()))
    except (SetupError, InvalidInputError, OSError) as error:  # the last: a port that is in use
        raise SystemExit(str(error)) from None
