"""What a job did, as values and as figures for a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from ..core.tally import NOTHING, Tally
from .prompts import WrongLine
from .sharding import Shard

#: ``done``: everything is in the store. ``incomplete``: some chunks are not, for reasons that another run will hardly
#: change. ``stopped``: the store was out of reach for too long, or somebody stopped the job; it can be resumed.
Status: TypeAlias = Literal["done", "incomplete", "stopped"]

#: Points of a curve of progress, some more or less.
SAMPLES: Final = 1000
#: The worst one last.
_STATUSES: tuple[Status, ...] = get_args(Status)


class Sample(NamedTuple):
    """How far a run was at some time."""

    #: Since the run began.
    seconds: float
    #: Distinct tokens that were computed, or found to be stored.
    tokens: int
    #: Of values written.
    bytes: int


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What a run wrote of one layer group."""

    #: Such as ``sliding_window 64, 128``: kind, block size and window in tokens.
    label: str
    page_size_bytes: int
    #: By the word for why a chunk is kept: ``dense``, ``segment``, ``replay``, ``junction``.
    written: Mapping[str, Tally]


@dataclass(frozen=True, slots=True)
class RunTotals:
    """What one or several runs of a job did, of stretches that were stored whole."""

    runs: int = 0
    tokens_computed: int = 0
    chunks_written: int = 0
    bytes_written: int = 0
    seconds: float = 0.0

    def __add__(self, other: RunTotals) -> RunTotals:
        return RunTotals(*(getattr(self, name.name) + getattr(other, name.name) for name in fields(self)))


@dataclass(frozen=True, slots=True)
class JobReport:
    """One run of a job. Of the prompts' tokens ``tokens_total = tokens_distinct + tokens_reused + tokens_unstored``,
    and ``tokens_distinct = tokens_computed - tokens_recomputed + tokens_skipped`` once it is done."""

    status: Status
    #: Why it is not done; empty if it is.
    message: str = ""
    #: What its keys say of model, revision and shape: whoever is to find the results must have the same.
    cache_id: str = ""
    #: ``(part, of how many)``; part 0 is the trunk that the others share. None: all of the corpus.
    shard: tuple[int, int] | None = None
    prompts: int = 0
    wrong_lines: int = 0
    #: The first of them.
    wrong: tuple[WrongLine, ...] = ()
    tokens_total: int = 0
    #: In whole blocks of the alignment, each prefix once.
    tokens_distinct: int = 0
    #: Given to the producer.
    tokens_computed: int = 0
    #: Of prompts that share their beginning with another prompt, which stands for it.
    tokens_reused: int = 0
    #: In the store already, and not computed.
    tokens_skipped: int = 0
    #: Behind each prompt's last whole block: neither computed nor stored.
    tokens_unstored: int = 0
    #: Read back from the store, to go on behind them.
    tokens_restored: int = 0
    #: Of those computed: more than once, since the store has lost what was there, or a hit was shorter.
    tokens_recomputed: int = 0
    chunks_written: int = 0
    bytes_written: int = 0
    existing: Tally = NOTHING
    #: Of those written: in the place of what had been in the store before, in this run or an earlier one.
    rewritten: Tally = NOTHING
    #: Wanted, and not in the store at the end.
    missing: Tally = NOTHING
    groups: tuple[GroupReport, ...] = ()
    samples: tuple[Sample, ...] = field(default=(), repr=False)
    #: Of the run, behind the reading of the corpus.
    seconds: float = 0.0
    seconds_reading: float = 0.0
    #: Times that the store was gone through.
    passes: int = 0
    #: Seconds in which the store could not be reached.
    seconds_waited: float = 0.0
    #: What earlier runs of the same journal did.
    earlier: RunTotals = RunTotals()

    @property
    def totals(self) -> RunTotals:
        """This run in short."""
        return RunTotals(1, self.tokens_computed, self.chunks_written, self.bytes_written, self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Distinct tokens that were computed or found to be stored, in a second of the run."""
        done = self.tokens_computed - self.tokens_recomputed + self.tokens_skipped
        return done / self.seconds if self.seconds else 0.0

    @classmethod
    def of_parts(cls, reports: Sequence[JobReport]) -> JobReport:
        """What the parts of a job did together, as if all had begun at once, behind the trunk if that was one."""
        worst = max(reports, key=lambda report: _STATUSES.index(report.status))
        summed = {
            item.name: sum((getattr(report, item.name) for report in reports[1:]), getattr(reports[0], item.name))
            for item in fields(cls)
            if item.name.startswith(("tokens_", "chunks_", "bytes_"))
            or item.name in ("prompts", "existing", "rewritten", "missing", "earlier")
        }
        trunk_seconds = sum(report.seconds for report in reports if report.is_trunk)
        begun = [0.0 if report.is_trunk else trunk_seconds for report in reports]
        return cls(
            status=worst.status,
            cache_id=reports[0].cache_id,
            message="; ".join(f"part {report.part}: {report.message}" for report in reports if report.message),
            wrong_lines=max(report.wrong_lines for report in reports),  # each has read the whole corpus
            wrong=reports[0].wrong,
            groups=tuple(
                _joined(*same) for same in zip(*(part.groups for part in reports if part.groups), strict=True)
            ),
            samples=_joined_samples(reports, begun),
            seconds=max(start + report.seconds for start, report in zip(begun, reports, strict=True)),
            seconds_reading=max(report.seconds_reading for report in reports),
            passes=max(report.passes for report in reports),
            seconds_waited=max(report.seconds_waited for report in reports),
            **summed,
        )

    @property
    def is_trunk(self) -> bool:
        """Whether this is of a job for the trunk alone."""
        return self.shard is not None and self.shard[0] == 0

    @property
    def part(self) -> str:
        """``1/3``, say, or ``trunk/3``; empty for a job that is all of one."""
        return "" if self.shard is None else str(Shard(*self.shard))

    def figures(self) -> dict[str, object]:
        """Plain values, ready for JSON."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        plain["shard"] = self.part or None
        plain["tokens_per_second"] = round(self.tokens_per_second, 1)
        for name in ("existing", "rewritten", "missing"):
            plain[name] = getattr(self, name).figures()
        plain["wrong"] = [{"line": line.line, "reason": line.reason} for line in self.wrong]
        plain["groups"] = [
            {
                "group": group.label,
                "page_size_bytes": group.page_size_bytes,
                "written": {reason: tally.figures() for reason, tally in group.written.items()},
            }
            for group in self.groups
        ]
        plain["samples"] = [sample._asdict() for sample in self.samples]
        plain["earlier"] = {item.name: getattr(self.earlier, item.name) for item in fields(self.earlier)}
        return plain


def _joined_samples(reports: Sequence[JobReport], begun: Sequence[float]) -> tuple[Sample, ...]:
    """All parts' curves of progress as one; ``begun``: when each began."""
    steps = [
        (start + after.seconds, after.tokens - before.tokens, after.bytes - before.bytes)
        for report, start in zip(reports, begun, strict=True)
        for before, after in pairwise(report.samples)
    ]
    joined = [Sample(0.0, 0, 0)]
    for seconds, tokens, nbytes in sorted(steps):
        joined.append(Sample(seconds, joined[-1].tokens + tokens, joined[-1].bytes + nbytes))
    return (*joined[: -1 : 1 + len(joined) // SAMPLES], joined[-1])


def _joined(*groups: GroupReport) -> GroupReport:
    """The same group's reports as one."""
    written: dict[str, Tally] = {}
    for group in groups:
        for reason, tally in group.written.items():
            written[reason] = written.get(reason, NOTHING) + tally
    return replace(groups[0], written=written)
