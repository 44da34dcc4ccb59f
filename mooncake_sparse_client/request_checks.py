"""What a client's calls are given must be the client's own. Each check raises ``InvalidRequestError``."""

from __future__ import annotations

from .core.hashing import BlockHasher
from .core.keys import KeySchema
from .core.layout import KVCacheLayout
from .core.plans import PrefixHit, PutPlan
from .core.sequence import TokenSequence
from .errors import InvalidRequestError


def check_sequence(sequence: TokenSequence, hasher: BlockHasher) -> None:
    """Hashed as the client's keys are."""
    if not isinstance(sequence, TokenSequence):
        raise InvalidRequestError(f"expected a sequence made by client.sequence(...), not {type(sequence).__name__}")
    if sequence.hasher != hasher:
        raise InvalidRequestError(f"the sequence is hashed by {sequence.hasher}, this client's keys by {hasher}")


def check_hit(hit: PrefixHit, keys: KeySchema, fingerprint: str) -> None:
    """Of the same cache."""
    if not isinstance(hit, PrefixHit):
        raise InvalidRequestError(f"expected the PrefixHit of a lookup, or a sequence, not {type(hit).__name__}")
    if hit.cache_id != keys.cache_id:
        raise InvalidRequestError(f"the hit is of the cache {hit.cache_id!r}, this client's is {keys.cache_id!r}")
    if hit.fingerprint != fingerprint:
        raise InvalidRequestError(
            "the hit is of a client with another layout, dtype, revision or hasher; look up with this client, "
            "or with one made alike"
        )


def check_own(hit: PrefixHit, block_hashes: tuple[bytes, ...]) -> None:
    """Of the sequence with these hashes."""
    if block_hashes[: len(hit.block_hashes)] != hit.block_hashes:
        raise InvalidRequestError(
            "hit is not of this sequence: its tokens, salt, LoRA, images or embeddings differ; "
            "pass the hit of the request's own lookup"
        )


def check_plan(plan: PutPlan, layout: KVCacheLayout, num_tokens: int) -> None:
    """Of this layout, and of no more tokens than the sequence has."""
    if not isinstance(plan, PutPlan):
        raise InvalidRequestError(f"plan must be the PutPlan of plan_put, not {type(plan).__name__}")
    if plan.layout.groups != layout.groups:
        raise InvalidRequestError("the plan is of another layout than this client's: plan with this client")
    if plan.end_token > num_tokens:
        raise InvalidRequestError(
            f"the plan is of {plan.end_token} tokens, and this sequence has {num_tokens}: pass the plan that was made "
            "for it"
        )


def check_trust(plan: PutPlan, keys: KeySchema) -> None:
    """What a plan believes to be stored must have been asked for under the rank's own keys."""
    if plan.hit is not None and keys.rank not in plan.hit.key_ranks and any(known.any() for known in plan.known):
        raise InvalidRequestError(
            f"the plan trusts a lookup of the ranks {plan.hit.key_ranks}, and this client writes rank {keys.rank}: "
            "plan with this client"
        )
