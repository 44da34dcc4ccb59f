"""The lookup plane: how soon it is known what the store holds of a prompt, beside the straightforward way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from ...client import SparseStoreClient
from ...core.layout import KVCacheLayout
from ...core.masks import BoolArray, store_mask
from ...core.plans import PrefixHit
from ...core.prefix import longest_usable_prefix
from ...stores.local import LocalMooncake
from .crowd import crowd_names, measure_crowd
from .ground import Ground, open_ground
from .measure import Amount, Comparison, Side, on_thread
from .plain_lookup import PlainLookup, hash_blocks
from .repeating import repeated, repeated_on_thread
from .rules import RULE_NAMES, measure_rules, some_tokens
from .session import Effort, Plane, Session
from .shelves import Shelf, Values, client_keys, lookup_client, small_values, stored_upto

#: What the store holds of a prompt; ``holes``: all but one chunk of every group in a hundred.
Case: TypeAlias = Literal["miss", "half", "all", "holes"]
_CASES: Final[tuple[Case, ...]] = get_args(Case)
_LAYOUTS: Final = ("llama", "gemma-3", "deepseek-v4")
#: Tokens of a prompt. The one that is meant where none is named comes with figures.
_LENGTHS: Final = {"8K": 8 << 10, "128K": 128 << 10, "1M": 1 << 20}
_USUAL: Final = "128K"
#: The one that a quick run makes shorter.
_LONGEST: Final = "1M"
_HOLES: Final = 0.01

_MIB: Final = 1 << 20
#: Room for some half a million values, and then as much again that the store would not evict before.
_SEGMENT: Final = 1024 * _MIB
#: Staging of the clients that are open at a time.
_POOL: Final = 256 * _MIB


def _lookup_name(case: Case, layout: str, length: str) -> str:
    return f"lookup.{case}.{layout}" if length == _USUAL else f"lookup.{case}.{layout}.{length}"


def _names_of(case: Case, layout: str, length: str) -> list[str]:
    """What is measured while the store holds this."""
    names = [_lookup_name(case, layout, length)]
    if length == _USUAL:
        names += [f"keys_asked.{layout}.{case}", f"requests.{layout}.{case}"]
        names += [f"tokens_to_hit.{layout}"] if case == "all" else []
    return names


def _names_for(layout: str, length: str) -> list[str]:
    return [name for case in _CASES for name in _names_of(case, layout, length)]


def presence(case: Case, layout: KVCacheLayout, num_tokens: int) -> list[BoolArray]:
    """The chunks that the store holds, one boolean array a group; of ``half``, those of the first half."""
    part = {"miss": 0, "half": num_tokens // 2, "all": num_tokens, "holes": num_tokens}[case]
    masks = stored_upto(layout, num_tokens, part)
    if case == "holes":
        dice = np.random.default_rng(0)
        for mask in masks:
            mask[dice.choice(len(mask), max(1, round(len(mask) * _HOLES)), replace=False)] = False
    return masks


class Prompt:
    """One prompt, known to both sides: its hashes are ready, its chunks under keys of each side's own."""

    def __init__(self, client: SparseStoreClient, plain: PlainLookup, values: Values, num_tokens: int) -> None:
        self._client, self._plain = client, plain
        self.num_tokens, self.layout = num_tokens, client.layout
        self._ids: list[int] = some_tokens(num_tokens, seed=num_tokens).tolist()
        self._sequence = client.sequence(self._ids)
        self._hashes = self._plain_hashes()
        everything = stored_upto(self.layout, num_tokens, num_tokens)
        # The straightforward way writes what it has; ours what a later hit could reach.
        self._shelves = [
            Shelf(values, plain.keys(self._hashes), everything),
            Shelf(
                values,
                client_keys(client, self._sequence.block_hashes, num_tokens),
                store_mask(self.layout, num_tokens),
            ),
        ]

    def _plain_hashes(self) -> list[bytes]:
        return hash_blocks("sha256", self._ids, self._plain.block_size, "bench")

    async def hold(self, present: list[BoolArray]) -> None:
        """Let the store hold these chunks, and no others of the prompt."""
        for shelf in self._shelves:
            await on_thread(partial(shelf.hold, present))

    async def lookup(self) -> PrefixHit:
        return await self._client.lookup(self._sequence)

    async def _lookup_of_tokens(self) -> PrefixHit:
        return await self._client.lookup(self._client.sequence(self._ids))

    def sides(self, effort: Effort, wanted: int, *, hashed: bool) -> tuple[Side, Side]:
        """Both ways to find a hit of ``wanted`` tokens: from the hashes, or from the token ids."""
        ours: Callable[[], Awaitable[PrefixHit]] = self.lookup if hashed else self._lookup_of_tokens

        def theirs() -> int:
            return self._plain.find(self._hashes if hashed else self._plain_hashes(), self.num_tokens)

        return (
            repeated(effort, "our lookup", ours, lambda hit: hit.hit_length == wanted),
            repeated_on_thread(effort, "the plain lookup", theirs, lambda length: length == wanted),
        )


async def _measure(session: Session) -> None:
    await measure_rules(session)
    if not session.wants(*_STORE_NAMES):
        return
    async with (
        await LocalMooncake.start() as local,
        open_ground("embedded", local, segment=_SEGMENT, pool=_POOL) as ground,
    ):
        with small_values(ground.native) as values:
            for layout in _LAYOUTS:
                for length in _LENGTHS:
                    if session.wants(*_names_for(layout, length)):
                        await _measure_prompt(session, ground, values, layout, length)
                await measure_crowd(session, ground.store, values, layout)


async def _measure_prompt(session: Session, ground: Ground, values: Values, layout: str, length: str) -> None:
    num_tokens = session.effort.scaled(_LENGTHS[length]) if length == _LONGEST else _LENGTHS[length]
    async with lookup_client(ground.store, layout) as client:
        plain = PlainLookup(ground.native, client.layout, f"bench-plain-{layout}")
        prompt = Prompt(client, plain, values, client.layout.align(num_tokens))
        session.figures[f"tokens.{length}"] = prompt.num_tokens  # a quick run's is not what the name says
        for case in _CASES:
            if session.wants(*_names_of(case, layout, length)):
                await _measure_case(session, prompt, case, layout, length)
        await prompt.hold(presence("miss", prompt.layout, prompt.num_tokens))


async def _measure_case(session: Session, prompt: Prompt, case: Case, layout: str, length: str) -> None:
    present = presence(case, prompt.layout, prompt.num_tokens)
    await prompt.hold(present)
    wanted = longest_usable_prefix(prompt.layout, prompt.num_tokens, present)
    name, sides = _lookup_name(case, layout, length), prompt.sides(session.effort, wanted, hashed=True)
    _note_times(session, await session.compare(name, *sides, Amount(1, "lookups/s")))
    if length != _USUAL:
        return
    if case == "all":
        sides = prompt.sides(session.effort, wanted, hashed=False)
        await session.compare(f"tokens_to_hit.{layout}", *sides, Amount(prompt.num_tokens, "tokens/s"))
    hit = await prompt.lookup()
    for figure, value in (("keys_asked", hit.keys_asked), ("requests", hit.requests)):
        if session.wants(f"{figure}.{layout}.{case}"):
            session.note(f"{figure}.{layout}.{case}", {f"{figure}.{layout}.{case}": value})


def _note_times(session: Session, found: Comparison | None) -> None:
    """Milliseconds a lookup, which say more than rates."""
    if found is not None:
        for side, rate in zip(("ours", "theirs"), found.typical, strict=True):
            session.figures[f"ms.{found.name}.{side}"] = 1000 / rate


_STORE_NAMES: Final = [
    name
    for layout in _LAYOUTS
    for some in (*(_names_for(layout, length) for length in _LENGTHS), crowd_names(layout))
    for name in some
]
LOOKUP: Final = Plane([*RULE_NAMES, *_STORE_NAMES], _measure)
