"""Reading a corpus once: its prefix tree in memory, the tokens of its distinct blocks in a file."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from ..core.hashing import BlockHasher, TokenIds
from ..core.layout import KVCacheLayout
from ..core.sequence import TokenSequence
from ..errors import ConfigError, InvalidTokensError
from .prompts import Prompt, WrongLine
from .steady import Stop, StoppedError
from .tree import PrefixTree, Stretch

#: What is done about a line that is no prompt: it is left out and reported, or the job does not start.
OnWrong: TypeAlias = Literal["skip", "stop"]
#: What a corpus may be made of; bare token ids are a prompt.
Prompts: TypeAlias = "Iterable[Prompt | WrongLine | TokenIds]"
#: Wrong lines that are remembered; all are counted.
_MOST_WRONG = 1000


class Spool:
    """The tokens of distinct blocks, in a temporary file of 4 bytes a token (8 where ids need them).

    A corpus is read in its own order and computed in that of its tree, so its tokens are wanted again, in another
    order. They may be more than memory holds; and a text need not go through its tokenizer twice.
    """

    def __init__(self, token_limit: int, folder: Path | None) -> None:
        self._dtype = np.dtype(np.uint32 if token_limit <= 1 << 32 else np.int64)
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="precompute-")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise ConfigError(
                f"no file for the tokens can be made in {folder or 'TMPDIR'}: {error.strerror}"
            ) from error
        self._tokens = 0

    @property
    def tokens(self) -> int:
        return self._tokens

    def append(self, token_ids: NDArray[np.int64]) -> None:
        """Raises ``ConfigError`` if the file cannot grow."""
        try:
            self._file.write(token_ids.astype(self._dtype).tobytes())
        except OSError as error:
            raise ConfigError(
                f"the tokens of the corpus, {self._dtype.itemsize} bytes each, do not fit into their file: "
                f"{error.strerror}; name a folder with more room (--spool)"
            ) from error
        self._tokens += len(token_ids)

    def read(self, place: int, tokens: int) -> NDArray[np.int64]:
        """So many tokens from ``place`` on. For one thread at a time."""
        self._file.seek(place * self._dtype.itemsize)
        found = np.frombuffer(self._file.read(tokens * self._dtype.itemsize), dtype=self._dtype)
        return found.astype(np.int64)

    def close(self) -> None:
        self._file.close()


@dataclass(slots=True)
class Corpus:
    """All prompts of a corpus, read. Its methods read a file: call them on a thread, one at a time."""

    layout: KVCacheLayout
    hasher: BlockHasher
    tree: PrefixTree
    spool: Spool
    prompts: int = 0
    tokens: int = 0
    wrong_lines: int = 0
    #: The first of them.
    wrong: list[WrongLine] = field(default_factory=list)
    #: That reading them took.
    seconds: float = 0.0

    @property
    def tokens_distinct(self) -> int:
        return self.tree.distinct_blocks * self.layout.alignment

    def token_ids(self, stretch: Stretch) -> NDArray[np.int64]:
        """Of the whole path, from the first token to the stretch's end."""
        size = self.layout.alignment
        runs: list[tuple[int, int]] = []
        for at in stretch.path():
            place, tokens = at.place, at.blocks * size
            if runs and sum(runs[-1]) == place:  # read together what lies together
                place, tokens = runs[-1][0], runs.pop()[1] + tokens
            runs.append((place, tokens))
        return np.concatenate([self.spool.read(place, tokens) for place, tokens in runs])

    def sequence(self, stretch: Stretch) -> TokenSequence:
        """The tokens of the whole path, and its salt, hashed."""
        sequence = TokenSequence(self.hasher, self.token_ids(stretch), cache_salt=stretch.cache_salt)
        sequence.block_hashes  # noqa: B018 - hashes them now, on this thread
        return sequence

    def add(self, prompt: Prompt) -> None:
        """Raises ``InvalidTokensError`` for ids, or a salt, that cannot be."""
        sequence = TokenSequence(self.hasher, prompt.token_ids, cache_salt=prompt.cache_salt)
        length, size = len(sequence), self.layout.alignment
        if not length:
            raise InvalidTokensError("there are no tokens")
        new = self.tree.add(sequence.block_hashes, length, self.spool.tokens, prompt.cache_salt)
        end = self.layout.align(length)
        if new:
            self.spool.append(sequence.token_ids[end - new * size : end])
        self.prompts += 1
        self.tokens += length

    def note_wrong(self, line: WrongLine) -> None:
        self.wrong_lines += 1
        if len(self.wrong) < _MOST_WRONG:
            self.wrong.append(line)

    def close(self) -> None:
        self.spool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_corpus(
    prompts: Prompts,
    layout: KVCacheLayout,
    hasher: BlockHasher,
    *,
    on_wrong: OnWrong = "skip",
    spool_folder: Path | None = None,
    stop: Stop | None = None,
) -> Corpus:
    """Read all prompts and build their tree. ``layout`` and ``hasher``: those of the client that is to put them.

    Reads files, for as long as the corpus takes, or until somebody sets ``stop``: call it on a thread.

    Raises ``ConfigError``, ``StoppedError``; ``InvalidTokensError`` for a wrong line with ``on_wrong="stop"``.
    """
    if on_wrong not in get_args(OnWrong):
        raise ConfigError(f"on_wrong is {on_wrong!r}; it is 'skip' or 'stop'")
    corpus = Corpus(layout, hasher, PrefixTree(layout, len(hasher.none_hash)), Spool(hasher.token_limit, spool_folder))
    started = time.monotonic()
    try:
        for number, entry in enumerate(prompts, 1):
            wrong = _taken(corpus, entry, number)
            if wrong is not None:
                corpus.note_wrong(wrong)
                if on_wrong == "stop":
                    raise InvalidTokensError(f"line {wrong.line}: {wrong.reason}")
            if stop is not None and stop.is_set:
                raise StoppedError(f"it was asked to stop while it read the corpus, at prompt {corpus.prompts}")
    except BaseException:
        corpus.close()
        raise
    corpus.seconds = time.monotonic() - started
    return corpus


def _taken(corpus: Corpus, entry: Prompt | WrongLine | TokenIds, number: int) -> WrongLine | None:
    """Add what is a prompt; what is wrong with one that is none."""
    if isinstance(entry, WrongLine):
        return entry
    if isinstance(entry, int | np.integer):
        raise ConfigError("the prompts are one flat list of token ids: give a list of such lists")
    prompt = entry if isinstance(entry, Prompt) else Prompt(entry)
    try:
        corpus.add(prompt)
    except InvalidTokensError as error:
        return WrongLine(prompt.line or number, str(error))
    return None
