"""Asyncio client for a KV cache in a Mooncake store. Start with ``SparseStoreClient``."""

from .chunks import Sink, Source
from .client import SparseStoreClient
from .config import FROM_ENV, Limits, MooncakeConfig, load_config
from .core.hashing import BlockHasher
from .core.keys import KeySchema, chunk_name
from .core.layout import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    KVCacheLayout,
    MambaSpec,
    SlidingWindowSpec,
)
from .core.masks import load_mask, store_mask
from .core.plans import PrefixHit, PutPlan, Tally
from .core.prefix import PrefixReport, explain_prefix, longest_usable_prefix
from .core.presets import PRESETS, layout_for
from .core.results import ChunkFailure, GetResult, Health, PutResult, RemoveResult
from .core.sequence import TokenSequence
from .errors import SparseStoreError
from .stores.base import Failure, GetItem, PutItem, RemoveOutcome, Store
from .stores.local import LocalMooncake
from .stores.memory import MemoryStore
from .stores.mooncake import MooncakeStore

__version__ = "0.1.0"

__all__ = [
    "FROM_ENV",
    "PRESETS",
    "BlockHasher",
    "ChunkFailure",
    "ChunkedLocalAttentionSpec",
    "Failure",
    "FullAttentionSpec",
    "GetItem",
    "GetResult",
    "GroupSpec",
    "Health",
    "KVCacheLayout",
    "KeySchema",
    "Limits",
    "LocalMooncake",
    "MambaSpec",
    "MemoryStore",
    "MooncakeConfig",
    "MooncakeStore",
    "PrefixHit",
    "PrefixReport",
    "PutItem",
    "PutPlan",
    "PutResult",
    "RemoveOutcome",
    "RemoveResult",
    "Sink",
    "SlidingWindowSpec",
    "Source",
    "SparseStoreClient",
    "SparseStoreError",
    "Store",
    "Tally",
    "TokenSequence",
    "chunk_name",
    "explain_prefix",
    "layout_for",
    "load_config",
    "load_mask",
    "longest_usable_prefix",
    "store_mask",
]
