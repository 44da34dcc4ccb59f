"""What a cache saves a serving stack: the time to the first token, cold and warm, and a conversation's second turn.

Starts ``serving_stack.py`` with a Mooncake of its own, and stops it at the end; ``--url`` uses one that runs. Two
prompts share a long prefix, as those of one application do: the first is computed from the start, the second restores
the prefix. Then the talk goes on, and the server restores question and answer. The server needs the extra
``transformers``:

    python examples/serving_client.py
    python examples/serving_client.py --url http://127.0.0.1:8000
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

try:
    import aiohttp
except ImportError as error:
    raise SystemExit(f"{error}; this example needs: pip install 'mooncake-sparse-client[transformers]'") from None

SERVER = Path(__file__).with_name("serving_stack.py")
PREFIX_TOKENS = 4000


@contextlib.asynccontextmanager
async def own_server() -> AsyncIterator[str]:
    """A server with a store of its own, at the URL that it prints when it is ready."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVER), "--store", "local", "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    try:
        line = (await process.stdout.readline()).decode()
        if not line:
            raise SystemExit(await process.wait())  # it has said why
        yield line.split()[-1]
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def ask(session: aiohttp.ClientSession, url: str, what: str, tokens: list[int], **options: object) -> list[int]:
    """One request: prints what it took, and answers the tokens that came."""
    answer, said = [], {}
    body = {"token_ids": tokens, "max_tokens": 24, **options}
    async with session.post(f"{url}/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            said = json.loads(line)
            if "error" in said:
                raise SystemExit(f"{what}: {said['error']}")
            if "token" in said:
                answer.append(said["token"])
    if not said.get("done"):
        raise SystemExit(f"{what}: the answer has no end")
    print(
        f"{what}: first token after {said['ttft_ms']:.0f} ms; "
        f"{said['hit_length']} of {said['prompt_tokens']} tokens were restored"
    )
    return answer


async def puts_are_done(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until what was put in the background is stored: for the figures only, nobody else has to."""
    while True:
        async with session.get(f"{url}/metrics") as response:
            if not (await response.json())["puts_under_way"]:
                return
        await asyncio.sleep(0.05)


async def talk(url: str) -> None:
    draw = random.Random()  # a new prefix each time, so that the first request is cold

    def new_tokens(count: int) -> list[int]:
        return [draw.randrange(256) for _ in range(count)]

    prefix = new_tokens(PREFIX_TOKENS)
    async with aiohttp.ClientSession() as session:
        await ask(session, url, "warming up", new_tokens(300))
        for what in ("cold", "warm"):
            prompt = prefix + new_tokens(60)
            answer = await ask(session, url, what, prompt, boundaries=[len(prefix)])
            await puts_are_done(session, url)
        await ask(session, url, "second turn", prompt + answer + new_tokens(40))
        async with session.get(f"{url}/health") as response:
            health = await response.json()
        async with session.get(f"{url}/metrics") as response:
            counters = await response.json()
    print(f"{counters.get('tokens_restored', 0)} tokens restored, {counters['tokens_computed']} computed")
    print(f"store ok: {health['store']['ok']}, requests without it: {counters.get('degraded', 0)}")


async def main(url: str | None) -> None:
    async with contextlib.nullcontext(url) if url else own_server() as served_at:
        await talk(served_at)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="ask a serving_stack.py, cold and warm")
    parser.add_argument("--url", help="of a server that runs; default: start one")
    asyncio.run(main(parser.parse_args().url))
