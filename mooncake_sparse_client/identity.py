"""What a client's values are called and look like: layout, hasher, keys and value format as one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from .core.framing import ValueFormat, ValueFormatName
from .core.hashing import BlockHasher, HashAlgorithm
from .core.keys import KeyBuilder, KeySchema, fingerprint
from .core.layout import KVCacheLayout
from .errors import ConfigError, InvalidHasherError, InvalidKeyError, InvalidLayoutError

logger = logging.getLogger(__name__)

Profile: TypeAlias = Literal["native", "vllm"]

_ALGORITHM: dict[Profile, HashAlgorithm] = {"native": "sha256_packed", "vllm": "sha256"}
_FORMAT: dict[Profile, ValueFormatName] = {"native": "framed", "vllm": "raw"}


@dataclass(frozen=True, slots=True)
class Identity:
    """Two clients with equal identities read each other's chunks; with others they never meet by accident."""

    layout: KVCacheLayout
    hasher: BlockHasher
    keys: KeyBuilder
    value_format: ValueFormat
    #: Bytes of one chunk's payload, a number a group.
    page_sizes: tuple[int, ...]

    @property
    def owns_namespace(self) -> bool:
        """Whether nobody else writes under these keys, so that a damaged value may be replaced."""
        return bool(self.keys.schema.namespace)

    def names_of(self, group: int, keys: Sequence[str]) -> list[str]:
        """The names of a group's chunks, from their keys under the own rank."""
        behind = len(self.keys.schema.stem(group, self.keys.schema.rank))
        return [key[behind:] for key in keys]

    def value_bytes(self, group: int) -> int:
        """Bytes of one stored value of a group, header included."""
        return self.page_sizes[group] + self.value_format.header_size


def resolve_identity(
    layout: KVCacheLayout,
    *,
    model_name: str,
    dtype: str = "bfloat16",
    revision: str = "",
    profile: Profile = "native",
    keys: KeySchema | None = None,
    hasher: BlockHasher | None = None,
    value_format: ValueFormatName | None = None,
) -> Identity:
    """Fill in what the profile sets and the caller did not.

    ``native``: packed hashes, one an alignment, a fingerprint in the keys, framed values. ``vllm``: vLLM's
    pickled SHA-256 with its seed, a hash every ``layout.common_block_size`` tokens, plain keys, raw values.
    A hash block given to the layout wins over the profile's.

    Raises the ``InvalidInputError`` of the part that does not fit, ``ConfigError`` for an unknown profile.
    """
    if profile not in get_args(Profile):
        raise ConfigError(f"profile is {profile!r}; it is 'native' or 'vllm'")
    name = value_format or _FORMAT[profile]
    if name not in get_args(ValueFormatName):
        raise ConfigError(f"value_format is {value_format!r}; it is 'framed' or 'raw'")
    if not isinstance(layout, KVCacheLayout):
        raise InvalidLayoutError(f"layout must be a KVCacheLayout, not {layout!r}")
    page_sizes = layout.page_sizes
    if profile == "vllm" and not layout.hash_block_size_given:
        layout = layout.with_hash_block_size(layout.common_block_size)
    if hasher is None:
        hasher = BlockHasher(layout.hash_block_size, _ALGORITHM[profile])
    if not isinstance(hasher, BlockHasher):
        raise InvalidHasherError(f"hasher must be a BlockHasher, not {hasher!r}")
    if profile == "vllm" and hasher.algorithm == "sha256_packed":
        logger.warning("packed hashes with the vllm profile: no fleet running vLLM computes them")
    if hasher.block_size != layout.hash_block_size:
        raise InvalidHasherError(
            f"the hasher's block_size is {hasher.block_size}, but the layout's chunks are named by hash blocks of "
            f"{layout.hash_block_size} tokens; make the hasher with that, or give the layout hash_block_size="
        )
    digits = fingerprint(layout, hasher, format_version=ValueFormat.version_of(name), dtype=dtype, revision=revision)
    schema = _schema(keys, model_name, profile, digits)
    return Identity(layout, hasher, KeyBuilder(layout, schema), ValueFormat(name, digits), page_sizes)


def _schema(keys: KeySchema | None, model_name: str, profile: Profile, digits: str) -> KeySchema:
    if keys is None:
        keys = KeySchema.vllm(model_name) if profile == "vllm" else KeySchema(model_name)
    elif not isinstance(keys, KeySchema):
        raise InvalidKeyError(f"keys must be a KeySchema, not {keys!r}")
    elif keys.model_name != model_name:
        raise InvalidKeyError(f"model_name is {model_name!r}, but keys has {keys.model_name!r}; give one name")
    if keys.plain and profile == "native":
        logger.warning("plain keys with the native profile: a fleet running vLLM finds them only by profile='vllm'")
    if keys.namespace and profile == "vllm":
        logger.warning("a namespace with the vllm profile: no fleet running vLLM finds such keys")
    if keys.plain or keys.namespace or profile == "vllm":
        return keys
    return keys.with_namespace(f"@fp:{digits}")
