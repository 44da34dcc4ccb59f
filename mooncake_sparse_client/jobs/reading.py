"""Reading the corpus of a client's job."""

from __future__ import annotations

from ..client import SparseStoreClient
from .corpus import Corpus, Prompts, read_corpus
from .options import JobOptions
from .steady import Stop


def read_for(client: SparseStoreClient, prompts: Prompts, options: JobOptions, stop: Stop) -> Corpus:
    """``read_corpus`` with the layout and hashes of a client."""
    return read_corpus(
        prompts,
        client.layout,
        client.hasher,
        on_wrong=options.on_wrong,
        spool_folder=options.spool,
        stop=stop,
    )
