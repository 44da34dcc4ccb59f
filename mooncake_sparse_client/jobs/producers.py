"""Producers: what computes a KV cache for a job, and how a command line names one."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ..chunks import ChunkBuffers
from ..core.layout import GroupSpec, KVCacheLayout
from ..core.masks import BoolArray
from ..core.results import GetResult
from ..errors import ConfigError, InvalidLayoutError

State = TypeVar("State")
#: Where computed chunks are: by ``(group, chunk)``, as a source for ``put``.
ChunkSource: TypeAlias = "Callable[[int, int], ChunkBuffers | None] | Mapping[tuple[int, int], ChunkBuffers]"

_METHODS: Final = ("restore", "fork", "prefill")


class Producer(Protocol[State]):
    """Computes the KV cache of token ids on top of a prefix.

    A *state* is a cache that has seen a prefix, of whatever type the producer likes. A job calls the methods on one
    thread of its own, one at a time, and never again with a state that it gave to ``prefill`` (which may change it and
    answers the one to go on with).
    """

    @property
    def layout(self) -> KVCacheLayout:
        """Of the caches that it computes, with page sizes."""

    def restore(self, got: GetResult) -> State:
        """A state that has seen the first ``got.hit_length`` tokens, from a ``get`` without a sink; a hit of 0 gives
        the state that has seen nothing."""

    def fork(self, state: State) -> State:
        """A second state that has seen the same, so that both may go on, each in its own way."""

    def prefill(
        self, state: State, token_ids: NDArray[np.int64], wanted: Sequence[BoolArray]
    ) -> tuple[State, ChunkSource]:
        """Compute ``token_ids``, which follow on what ``state`` has seen, and answer the state that has seen them too
        and the chunks of theirs that are ``wanted``: one boolean array a group, by absolute chunk.

        Every wanted chunk lies among ``token_ids``, whose number is a positive multiple of the alignment. What the
        source answers must stay as it is, whatever is computed meanwhile.
        """


def load_object(text: str, option: str) -> object:
    """What ``module:name`` names, as a command line gives it; ``name`` may have dots.

    Modules in the current directory are found too, as with ``python -m``. Raises ``ConfigError``, which names
    ``option``.
    """
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{option} {text!r}: write module:name, such as my_package.my_module:my_name")
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a module raises while it is run
        raise ConfigError(
            f"{option} {text!r}: module {module_name!r} does not import: {type(error).__name__}: {error}"
        ) from error
    try:
        return cast(object, operator.attrgetter(name)(module))
    except AttributeError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from error


def load_producer(text: str, layout: KVCacheLayout | None) -> Producer[object]:
    """The producer that the factory ``module:name`` makes, which is called with ``layout``: the one that a command
    line names, or None where it leaves that to the producer.

    Raises ``ConfigError`` for a factory that fails, for what is no producer, and for one of another layout than
    ``layout``; names of groups do not count.
    """
    option = f"--producer {text!r}"
    factory = load_object(text, "--producer")
    if not callable(factory):
        raise ConfigError(f"{option} is {factory!r}, and no factory: it must be callable with a layout or None")
    try:
        made: object = factory(layout)
    except Exception as error:  # whatever somebody else's code raises
        what = "a layout" if layout else "no layout (None)"
        raise ConfigError(f"{option}, called with {what}, raised {type(error).__name__}: {error}") from error
    missing = [name for name in _METHODS if not callable(getattr(made, name, None))]
    if missing:
        raise ConfigError(f"{option} made {made!r}, which is no producer: it has no method {', '.join(missing)}")
    own = getattr(made, "layout", None)
    if not isinstance(own, KVCacheLayout):
        raise ConfigError(f"{option}: the producer's layout must be a KVCacheLayout, not {own!r}")
    try:
        own.page_sizes  # noqa: B018  # it raises where there are none
    except InvalidLayoutError as error:
        raise ConfigError(f"{option}: the producer's layout: {error}") from error
    if layout is not None and _traits(own) != _traits(layout):
        raise ConfigError(
            f"{option} was given the layout {_shown(layout)}, and made a producer of another one, {_shown(own)}: "
            "name the producer's own, or none"
        )
    return cast(Producer[object], made)


def _traits(layout: KVCacheLayout) -> tuple[list[GroupSpec], int]:
    """What two layouts have in common if chunks of the one may go by the keys of the other."""
    return [replace(spec, name="") for spec in layout.groups], layout.hash_block_size


def _shown(layout: KVCacheLayout) -> str:
    groups = [
        f"{spec.kind} {spec.block_size}"
        + (f", {spec.window}" if spec.window else "")
        + (", eagle" if spec.eagle else "")
        + f", {spec.page_size_bytes} bytes"
        for spec in layout.groups
    ]
    return f"[{'; '.join(groups)}; hash blocks of {layout.hash_block_size}]"
