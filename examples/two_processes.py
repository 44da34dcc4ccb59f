"""A real model in two processes over one master: the first prefills a prompt and stores it, the second goes on from it.

The model is a tiny Gemma-3 with random weights, made alike in both: sliding windows and full attention by turns. The
second process restores what it finds, computes the tokens that are left, and must say what the first one says. It wants
the extra ``transformers``; nothing is downloaded:

    python examples/two_processes.py
"""

import asyncio
import sys

from mooncake_sparse_client import LocalMooncake, SparseStoreClient
from mooncake_sparse_client.errors import MissingLibraryError

try:
    from mooncake_sparse_client.integrations.transformers import ModelKV, cache_argument
except MissingLibraryError as error:
    raise SystemExit(str(error)) from None

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel

BLOCK, ANSWER = 16, 24
PROMPT = [number * number % 251 for number in range(1000)]


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)  # both processes must have the same weights, as they would have from one checkpoint
    config = Gemma3TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def connected(kv: ModelKV, address: str) -> SparseStoreClient:
    """Name, type, revision and layout are what the cache is known by: of other weights, say another revision."""
    return SparseStoreClient.connect(
        kv.layout, model_name="tiny-gemma-3", dtype=kv.dtype, retention_interval=0, master_server_address=address
    )


def answer(model: PreTrainedModel, cache: object) -> list[int]:
    """Greedy tokens behind the prompt, of which the cache has a part already."""
    ids = torch.tensor([PROMPT])
    # Without a mask, `generate` would take tokens that are the pad token for padding.
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": ANSWER, "do_sample": False}
    said = model.generate(ids, **{cache_argument(model): cache}, **options)
    return said[0, len(PROMPT) :].tolist()


async def write(address: str) -> None:
    model = make_model()
    kv = ModelKV(model.config, BLOCK)
    async with connected(kv, address) as client:
        sequence = client.sequence(PROMPT)
        computed = len(PROMPT) - 1  # all but the last token, which `answer` computes
        capture = kv.capture(client.plan_put(sequence, num_tokens=computed))
        cache = kv.new_cache()
        # A step's chunks are copied out before the window moves on.
        await asyncio.to_thread(kv.prefill, model, PROMPT[:computed], cache, capture, step_tokens=256)
        put = await client.put(sequence, capture, num_tokens=computed, confirm=True)
        print(f"{put.written.chunks} chunks written, {put.unreachable.chunks} never offered", file=sys.stderr)
        if put.failures or put.unavailable.chunks:
            raise SystemExit(f"not all that is reachable was stored: {put}")
        print(*await asyncio.to_thread(answer, model, cache))


async def read(address: str) -> None:
    model = make_model()
    kv = ModelKV(model.config, BLOCK)
    async with connected(kv, address) as client:
        got = await client.get(client.sequence(PROMPT))
        cache = kv.restore(got)
        print(f"{got.hit_length} of {len(PROMPT)} tokens restored, {got.loaded.bytes} bytes", file=sys.stderr)
        print(*await asyncio.to_thread(answer, model, cache))


async def another_process(*arguments: str) -> tuple[str, str]:
    """This script as a process of its own: what it answers, and what it has to say of itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, words = await process.communicate()
    if process.returncode != 0:
        raise SystemExit(words.decode())
    return said.decode().strip(), words.decode().strip().splitlines()[-1]


async def main() -> None:
    if len(sys.argv) > 1:
        await {"write": write, "read": read}[sys.argv[1]](sys.argv[2])
        return
    async with await LocalMooncake.start(memory=256 << 20) as local:
        print(f"a master serves at {local.master_address}, an owner process holds 256 MiB", flush=True)
        first, words = await another_process("write", local.master_address)
        print(f"the first process: {words}", flush=True)
        second, words = await another_process("read", local.master_address)
        print(f"the second process: {words}", flush=True)
    if first != second:
        raise SystemExit(f"they do not say the same:\n{first}\n{second}")
    print(f"both say the same {len(first.split())} tokens: {first}")


asyncio.run(main())
