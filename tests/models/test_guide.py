"""The Python of the guide to the integration runs, in the order of the page."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path

import pytest
import torch
from tiny_models import assert_as_without_cache, build, go_on, tokens_of

from mooncake_sparse_client import MemoryStore

pytestmark = pytest.mark.models
PAGE = Path(__file__).parent.parent.parent / "docs" / "transformers.md"


async def test_the_blocks_of_the_page_run_one_after_another() -> None:
    model = await asyncio.to_thread(build, "gemma-3")
    token_ids = tokens_of(4, 200)
    model.generation_config.do_sample = False
    model.generation_config.pad_token_id = token_ids[50]  # a token like any other in a prompt
    names: dict[str, object] = {
        "asyncio": asyncio,
        "model": model,
        "prompts": [tokens_of(6, 40), tokens_of(6, 60)],
        "store": MemoryStore(),
        "token_ids": token_ids,
        "torch": torch,
    }
    blocks = re.findall(r"^```python notest\n([\s\S]*?)^```$", await asyncio.to_thread(PAGE.read_text), re.MULTILINE)
    assert len(blocks) == 3
    for block in blocks:
        code = compile(block, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = eval(code, names)  # noqa: S307 - our own documentation
        if inspect.iscoroutine(running):
            await running
    # What was stored is what the page says: the next turn resumes at the last boundary of the whole text.
    text, client, kv = names["text"], names["client"], names["kv"]
    assert len(text) == 401
    following = [*text, *tokens_of(5, 30)]
    got = await client.get(client.sequence(following))
    assert got.hit_length == 400
    said = await asyncio.to_thread(go_on, model, kv.restore(got), following, 8)
    await asyncio.to_thread(assert_as_without_cache, model, following, said)
    report = names["report"]
    assert (report.status, report.prompts) == ("done", 2)
    assert report.tokens_computed == report.tokens_distinct == 48
