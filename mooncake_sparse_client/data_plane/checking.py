"""Checksums of many payloads, and what they say of values that were read. Runs on threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..core.framing import payload_checksum
from ..identity import Identity
from ..stores.base import Failure
from .lane import Answers
from .pacing import paced
from .transfer import Jobs

Views: TypeAlias = tuple[memoryview, ...]
Bytes: TypeAlias = NDArray[np.uint8]

#: What a reader finds wrong with bytes that did arrive, or with their number.
DAMAGE: Final = frozenset({"header", "version", "fingerprint", "group", "length", "name", "checksum"})
#: Nothing is stored under the key.
MISSING: Final = "missing"


def checksums(payloads: Iterable[Views]) -> list[int]:
    return [payload_checksum(payload) for payload in paced(payloads)]


def framed(identity: Identity, jobs: Jobs, sums: list[int], heads: Callable[[slice], Bytes]) -> None:
    """Write the headers of payloads with the checksums ``sums``; ``heads``: the rows that those of a run go to."""
    for group, run in jobs.runs:
        names = identity.names_of(group, jobs.keys[run])
        heads(run)[:] = identity.value_format.headers(group, names, sums[run], identity.page_sizes[group])


def checked(
    identity: Identity,
    jobs: Jobs,
    heads: Callable[[slice], Bytes],
    payload: Callable[[int], Views],
    answers: Answers,
    deliver: Callable[[int], object] = lambda number: None,
) -> Answers:
    """The answers of a read, with a failure for each value that arrived and is not what was asked for.

    ``heads``: the headers of a run that were read, one a row; ``payload``: what came behind the one of a number.
    ``deliver`` is called with the number of each value that is intact, while its bytes are still at hand.
    """
    found = list(answers)
    for group, run in jobs.runs:
        names = identity.names_of(group, jobs.keys[run])
        length = identity.page_sizes[group]
        promised = identity.value_format.promised(heads(run), group, names, length)
        for number in paced(range(run.start, run.stop)):
            if answers[number] is not None:
                continue
            views = payload(number)
            if promised[number - run.start] == payload_checksum(views):
                deliver(number)
            else:
                header = heads(run)[number - run.start].tobytes()
                reason = identity.value_format.fault(header, group, names[number - run.start], views)
                reason = reason or "checksum"  # whoever else writes to that memory, it was wrong a moment ago
                found[number] = Failure(reason, False, f"{jobs.keys[number]!r} is damaged: {reason}")
    return found
