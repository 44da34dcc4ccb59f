"""Random layouts, requests and holes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mooncake_sparse_client import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    KVCacheLayout,
    MambaSpec,
    SlidingWindowSpec,
)

#: No deadline: a loaded machine is no failure. The same examples every time.
quick = settings(max_examples=200, deadline=None, derandomize=True)
slower = settings(quick, max_examples=60)

_FAMILIES = ((2, 4, 8, 16), (4, 8), (2, 8), (4, 16), (2, 3, 6), (4, 6, 12), (16,))


def random_spec(dice: random.Random, sizes: Sequence[int], *, draft: bool) -> GroupSpec:
    """One group; with ``draft`` none that excludes draft layers."""
    size, name, page = dice.choice(sizes), dice.choice(["", "some layers"]), dice.choice([None, 7, 64])
    flag = draft and dice.random() < 0.6
    match dice.choice(["sliding", "full", "recurrent", "recurrent" if draft else "chunked", "sliding"]):
        case "full":
            return FullAttentionSpec(size, eagle=flag, name=name, page_size_bytes=page)
        case "sliding":
            window = dice.choice([1, size, size + 1, size + 2, 2 * size, dice.randint(1, 100)])
            return SlidingWindowSpec(size, window, eagle=flag, name=name, page_size_bytes=page)
        case "chunked":
            return ChunkedLocalAttentionSpec(size, size * dice.randint(1, 10), name=name, page_size_bytes=page)
        case _:
            return MambaSpec(size, name=name, page_size_bytes=page)


def random_layout(dice: random.Random, count: int) -> KVCacheLayout:
    """A layout of ``count`` groups, with or without draft layers."""
    draft, sizes = dice.random() < 0.5, dice.choice(_FAMILIES)
    groups = [random_spec(dice, sizes, draft=draft) for _ in range(count)]
    could = any(isinstance(spec, FullAttentionSpec | SlidingWindowSpec) for spec in groups)
    everywhere = draft and could and dice.random() < 0.3
    step = math.lcm(*(spec.block_size for spec in groups))
    blocks = [
        block
        for block in range(1, step + 1)
        if step % block == 0 and all(spec.block_size % block == 0 or block % spec.block_size == 0 for spec in groups)
    ]
    return KVCacheLayout(groups, use_eagle=everywhere, hash_block_size=dice.choice([None, dice.choice(blocks)]))


def layouts() -> st.SearchStrategy[KVCacheLayout]:
    """Layouts of one to four groups. From a seed: drawn part by part they would mostly be alike."""
    seeds = st.integers(0, 2**32 - 1)
    return st.builds(
        lambda seed, count: random_layout(random.Random(seed), count), seeds, st.sampled_from([3, 2, 1, 4])
    )


@dataclass(frozen=True)
class Put:
    """What one put may be told, with a layout."""

    layout: KVCacheLayout
    num_tokens: int
    interval: int | None
    prompt: int | None
    positions: list[int]


@st.composite
def puts(draw: st.DrawFn) -> Put:
    """A whole put: up to 12 alignments, any retention, prompt length and boundaries."""
    layout = draw(layouts())
    step = layout.alignment
    longest = 14 * step
    return Put(
        layout=layout,
        num_tokens=step * draw(st.sampled_from([4, 0, 1, 2, 3, 5, 6, 9, 12])),
        interval=draw(st.one_of(st.none(), st.just(0), st.integers(1, 6).map(lambda times: times * step))),
        prompt=draw(st.one_of(st.none(), st.integers(0, 12).map(lambda times: times * step), st.integers(0, longest))),
        positions=draw(st.lists(st.integers(0, longest), max_size=3)),
    )


@dataclass(frozen=True)
class Request:
    """A request, and the chunks of it that a store holds."""

    layout: KVCacheLayout
    num_tokens: int
    present: list[set[int]]
    local_tokens: int

    def exists(self, group: int, chunk: int) -> bool:
        return chunk in self.present[group]

    def arrays(self) -> list[NDArray[np.bool_]]:
        """``present`` as the package takes it."""
        return [
            np.isin(np.arange(self.num_tokens // spec.block_size + 2), sorted(chunks))
            for spec, chunks in zip(self.layout.groups, self.present, strict=True)
        ]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A request of up to 10 alignments, with a few holes or with few chunks."""
    layout = draw(layouts())
    blocks = draw(st.sampled_from([3, 0, 1, 2, 4, 6, 10]))
    num_tokens = blocks * layout.alignment + draw(st.integers(0, layout.alignment - 1))
    present = []
    for spec in layout.groups:
        count = num_tokens // spec.block_size + 2
        some = draw(st.sets(st.integers(0, count - 1), max_size=min(count, 4)))
        # Mostly holes in what is whole: a random half would seldom be usable anywhere.
        present.append(some if draw(st.integers(0, 7)) == 0 else set(range(count)) - some)
    local = draw(st.one_of(st.just(0), st.integers(0, num_tokens + layout.alignment)))
    return Request(layout, num_tokens, present, local)


#: One extra key's parts, few enough that equal ones meet.
_PARTS = st.one_of(
    st.sampled_from(["lora", "a", "some/path", "", "naïve"]),
    st.integers(-(2**40), 2**40),
    st.sampled_from([b"", b"\x00\xff", b"digest-of-something"]),
)
extras = st.one_of(
    st.none(), st.lists(st.lists(_PARTS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=4).map(tuple)
)


@dataclass(frozen=True)
class Traits:
    """What names a prefix besides its tokens."""

    cache_salt: str | None
    lora: tuple[str, str] | None
    multimodal: list[tuple[str, int, int]]
    prompt_embeds: NDArray[np.float32] | None


@st.composite
def traits(draw: st.DrawFn, num_tokens: int) -> Traits:
    """Traits of a sequence of at most ``num_tokens`` tokens."""
    items = st.tuples(st.sampled_from(["image-1", "audio"]), st.integers(0, num_tokens + 4), st.integers(1, 20))
    embeds = np.arange(2 * num_tokens, dtype=np.float32).reshape(num_tokens, 2)
    return Traits(
        cache_salt=draw(st.sampled_from([None, "tenant-a"])),
        lora=draw(st.sampled_from([None, ("adapter", "/adapters/1"), ("same", "same")])),
        multimodal=draw(st.lists(items, max_size=3)),
        prompt_embeds=draw(st.sampled_from([None, embeds])),
    )
