"""A model's prompts, computed ahead: an offline job fills a Mooncake, and a server beside it only reads.

The model is a tiny Gemma-3 with random weights: sliding windows and full attention by turns. The corpus is six prompts,
three questions on each of two documents. It wants the extra ``transformers``; nothing is downloaded:

    python examples/precompute_model.py
"""

import asyncio

from mooncake_sparse_client import LocalMooncake, SparseStoreClient
from mooncake_sparse_client.errors import MissingLibraryError
from mooncake_sparse_client.jobs import PrecomputeJob

try:
    from mooncake_sparse_client.integrations.model_producer import ModelProducer
    from mooncake_sparse_client.integrations.transformers import ModelKV
except MissingLibraryError as error:
    raise SystemExit(str(error)) from None

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel

BLOCK = 16
#: How far apart two ways to compute the same logits may be, in float32: each rounds in its own way.
NEAR = 1e-4

DOCUMENTS = [[(number * number + seed) % 251 for number in range(1000)] for seed in (3, 7)]
QUESTIONS = [[(number * seed) % 241 for number in range(40)] for seed in (11, 13, 17)]
CORPUS = [document + question for document in DOCUMENTS for question in QUESTIONS]
NEW = DOCUMENTS[1] + [(number * 19) % 239 for number in range(40)]


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)  # job and server must have the same weights, as they would have from one checkpoint
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
    """Job and server say the same of the cache, or the server finds nothing: name, type, revision and layout."""
    return SparseStoreClient.connect(
        kv.layout, model_name="tiny-gemma-3", dtype=kv.dtype, retention_interval=0, master_server_address=address
    )


async def precompute(address: str) -> None:
    """By night."""
    producer = ModelProducer(make_model(), BLOCK)
    async with connected(producer.kv, address) as client:
        report = await PrecomputeJob(client, producer, CORPUS).run()
    print(f"the job is {report.status}: {report.prompts} prompts of {report.tokens_total} tokens", flush=True)
    print(f"{report.tokens_computed} tokens computed, {report.chunks_written} chunks written", flush=True)
    if report.status != "done":
        raise SystemExit(report.message)


async def serve(address: str) -> None:
    """By day: look up, restore, compute what is left."""
    model = make_model()
    kv = ModelKV(model.config, BLOCK)
    async with connected(kv, address) as client:
        for name, prompt in (("a prompt of the corpus", CORPUS[0]), ("a new question on a document", NEW)):
            got = await client.get(client.sequence(prompt))
            cached = await asyncio.to_thread(kv.prefill, model, prompt, kv.restore(got))
            plain = await asyncio.to_thread(without_cache, model, prompt)
            apart = float((cached - plain).abs().max())
            print(f"{name}: {got.hit_length} of {len(prompt)} tokens restored, logits {apart:.0e} apart", flush=True)
            if not got.hit_length or apart > NEAR:
                raise SystemExit("that is not what the model says")


@torch.no_grad()
def without_cache(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt]), use_cache=False).logits[0, -1]


async def main() -> None:
    async with await LocalMooncake.start(memory=256 << 20) as local:
        await precompute(local.master_address)
        await serve(local.master_address)
    print("the logits are those of the model without any cache")


asyncio.run(main())
