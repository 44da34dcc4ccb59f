"""Asyncio client for a KV cache in a Mooncake store. Start with ``SparseStoreClient``."""

from .block_memory import BlockMemory
from .chunks import Buffer, ChunkBuffers, Sink, Source
from .client import SparseStoreClient
from .config import FROM_ENV, Limits, MooncakeConfig, load_config
from .config_values import Mode
from .core.explain import GroupLookup, GroupPut, LookupExplanation, PutExplanation
from .core.hashing import BlockHasher, HashAlgorithm, TokenIds
from .core.keys import KeySchema, Rank, chunk_name
from .core.layout import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    KVCacheLayout,
    MambaSpec,
    SlidingWindowSpec,
)
from .core.masks import load_mask, store_mask
from .core.plans import PrefixHit, PutPlan
from .core.prefix import PrefixReport, explain_prefix, longest_usable_prefix
from .core.presets import PRESETS, layout_for
from .core.reasons import Reason
from .core.results import ChunkFailure, GetResult, Health, PutResult, RemoveResult, VerifyResult
from .core.sequence import TokenSequence
from .core.tally import Tally
from .errors import SparseStoreError
from .identity import Profile
from .paged import PagedKVCache
from .replication import Replication
from .resilience import Resilience
from .settings import WhenDown
from .stores.base import Failure, GetItem, PlacedGets, PlacedPuts, PutItem, RemoveOutcome, Store
from .stores.breaker import BreakerStore
from .stores.local import LocalMooncake
from .stores.memory import MemoryStore
from .stores.mooncake import MooncakeStore
from .stores.regions import HeapMemory, Region, StoreMemory
from .stores.retry import RetryingStore
from .stores.throttle import ThrottledStore
from .stores.wrapping import WrappedStore

__version__ = "0.1.0"

__all__ = [
    "FROM_ENV",
    "PRESETS",
    "BlockHasher",
    "BlockMemory",
    "BreakerStore",
    "Buffer",
    "ChunkBuffers",
    "ChunkFailure",
    "ChunkedLocalAttentionSpec",
    "Failure",
    "FullAttentionSpec",
    "GetItem",
    "GetResult",
    "GroupLookup",
    "GroupPut",
    "GroupSpec",
    "HashAlgorithm",
    "Health",
    "HeapMemory",
    "KVCacheLayout",
    "KeySchema",
    "Limits",
    "LocalMooncake",
    "LookupExplanation",
    "MambaSpec",
    "MemoryStore",
    "Mode",
    "MooncakeConfig",
    "MooncakeStore",
    "PagedKVCache",
    "PlacedGets",
    "PlacedPuts",
    "PrefixHit",
    "PrefixReport",
    "Profile",
    "PutExplanation",
    "PutItem",
    "PutPlan",
    "PutResult",
    "Rank",
    "Reason",
    "Region",
    "RemoveOutcome",
    "RemoveResult",
    "Replication",
    "Resilience",
    "RetryingStore",
    "Sink",
    "SlidingWindowSpec",
    "Source",
    "SparseStoreClient",
    "SparseStoreError",
    "Store",
    "StoreMemory",
    "Tally",
    "ThrottledStore",
    "TokenIds",
    "TokenSequence",
    "VerifyResult",
    "WhenDown",
    "WrappedStore",
    "chunk_name",
    "explain_prefix",
    "layout_for",
    "load_config",
    "load_mask",
    "longest_usable_prefix",
    "store_mask",
]
