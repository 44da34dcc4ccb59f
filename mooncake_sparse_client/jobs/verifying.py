"""Reading a corpus's cache back: what of it is there, damaged or gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields

from ..client import SparseStoreClient
from ..core.results import VerifyResult
from ..core.tally import NOTHING, Tally
from ..waiting import held, one_thread, settled
from .corpus import Corpus, Prompts
from .options import DEFAULT_OPTIONS, JobOptions
from .planning import JobPlanner
from .reading import read_for
from .steady import Patience, Stop
from .tree import Stretch
from .visiting import Visitor

_OUTCOMES = ("intact", "missing", "damaged", "unread")


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What of a corpus's cache is in the store, as reading each chunk shows."""

    cache_id: str = ""
    prompts: int = 0
    wrong_lines: int = 0
    tokens_distinct: int = 0
    #: In stretches all of whose chunks are intact.
    tokens_intact: int = 0
    intact: Tally = NOTHING
    missing: Tally = NOTHING
    damaged: Tally = NOTHING
    #: The owner of their memory does not deliver them for now.
    unread: Tally = NOTHING

    @property
    def is_whole(self) -> bool:
        return not (self.missing.chunks or self.damaged.chunks or self.unread.chunks)

    def figures(self) -> dict[str, object]:
        """Plain values, ready for JSON."""
        plain: dict[str, object] = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in _OUTCOMES:
            plain[name] = getattr(self, name).figures()
        return plain


async def verify_corpus(
    client: SparseStoreClient,
    prompts: Prompts,
    options: JobOptions = DEFAULT_OPTIONS,
    *,
    progress: Callable[[int, int], None] = lambda tokens, total: None,
    tell: Callable[[str], None] = lambda text: None,
) -> VerifyReport:
    """Read back all that a job over the same prompts keeps, and check every byte. Nothing is written.

    ``client``: open, with the settings of the job's, its retention interval too. ``progress`` is called with the
    distinct tokens done, and their total. Raises what a store raises that is out of reach for too long.
    """
    stop, opened = Stop(), ExitStack()

    def read() -> Corpus:
        return opened.enter_context(read_for(client, prompts, options, stop))

    with one_thread("verify-files") as files:
        try:
            # Whoever cancels it need not wait for the end of the corpus.
            corpus = await settled(asyncio.wrap_future(files.submit(read)), stop.set)
            return await _verified(client, corpus, files, options, progress, tell)
        finally:
            await settled(asyncio.wrap_future(files.submit(opened.close)))


async def _verified(
    client: SparseStoreClient,
    corpus: Corpus,
    files: ThreadPoolExecutor,
    options: JobOptions,
    progress: Callable[[int, int], None],
    tell: Callable[[str], None],
) -> VerifyReport:
    planner = JobPlanner(corpus.tree, client.retention_interval, client.retention_origin)
    patience = Patience(options.patience_seconds, Stop(), tell)
    visitor = Visitor(client, corpus, planner, patience, files, options)
    stretches = await held(files.submit(lambda: list(corpus.tree.stretches())))
    sums = dict.fromkeys(_OUTCOMES, NOTHING)
    done = intact = 0

    def note(stretch: Stretch, results: Sequence[VerifyResult]) -> None:
        nonlocal done, intact
        for name in _OUTCOMES:
            sums[name] += sum((getattr(result, name) for result in results), NOTHING)
        tokens = stretch.blocks * corpus.layout.alignment
        done += tokens
        intact += 0 if any(result.failures for result in results) else tokens
        progress(done, corpus.tokens_distinct)

    await visitor.read_all(stretches, note)
    return VerifyReport(
        client.keys.cache_id, corpus.prompts, corpus.wrong_lines, corpus.tokens_distinct, intact, **sums
    )
