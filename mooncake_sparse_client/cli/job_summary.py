"""What a job did, for a person: as tables on a terminal, and as rows for a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..core.tally import NOTHING, Tally
from ..jobs.planning import GroupEstimate, JobEstimate
from ..jobs.prompts import WrongLine
from ..jobs.report import JobReport
from .job_progress import human_time, one_line
from .table import human_bytes, print_table, tally_cells

#: Why a chunk is kept, in the order in which it is shown. Others come behind.
REASONS: Final = ("dense", "segment", "replay", "boundary", "junction")
_MOST_WRONG: Final = 10


def show_summary(report: JobReport, layout_name: str) -> None:
    """Print what a run did, and what to do if something is left."""
    print(f"{status_line(report)}; layout: {layout_name}; {human_time(report.seconds)}")
    print(f"cache: {report.cache_id}\n")
    print_table(["of the prompts' tokens", "tokens", "share"], token_rows(report))
    if report.groups:
        print_table(*group_table(report))
    print_table(["of the chunks", "chunks", "bytes"], chunk_rows(report))
    _show_wrong(report.wrong_lines, report.wrong)
    for line in advice(report):
        print(line)


def show_estimate(estimate: JobEstimate, wrong: Sequence[WrongLine]) -> None:
    """Print what a job would take."""
    totals, total = estimate.totals, max(estimate.totals.tokens, 1)
    counts = {
        "all": totals.tokens,
        "  distinct, in whole blocks: to be computed": totals.distinct,
        "  shared with another prompt": totals.reused,
        "  behind the last whole block: not stored": totals.unstored,
    }
    rows = [[label, f"{tokens:,}", f"{tokens / total:.1%}"] for label, tokens in counts.items()]
    print(f"{totals.prompts:,} {'prompt' if totals.prompts == 1 else 'prompts'}; cache: {estimate.cache_id}\n")
    print_table(["of the prompts' tokens", "tokens", "share"], rows)
    sums = [sum(tallies, NOTHING) for tallies in zip(*map(_estimated, estimate.groups), strict=True)]
    print_table(
        ["to be written, if the store has nothing", "chunks", "bytes", "every boundary", "every chunk"],
        [
            _estimate_row(label, *tallies)
            for label, tallies in [
                *((group.label, _estimated(group)) for group in estimate.groups),
                ("all", tuple(sums)),
            ]
        ],
    )
    _show_wrong(estimate.wrong_lines, wrong)


def _estimated(group: GroupEstimate) -> tuple[Tally, Tally, Tally]:
    return group.total, group.dense, group.unmasked


def _estimate_row(label: str, kept: Tally, dense: Tally, unmasked: Tally) -> list[str]:
    return [label, *tally_cells(kept), human_bytes(dense.bytes), human_bytes(unmasked.bytes)]


def status_line(report: JobReport) -> str:
    """Such as ``stopped: the store was out of reach for 60 s; 12 prompts; part 1 of 4``."""
    status = f"{report.status}: {one_line(report.message)}" if report.message else report.status
    many = "prompt" if report.prompts == 1 else "prompts"
    return "; ".join([status, f"{report.prompts:,} {many}", *_shard_of(report)])


def token_rows(report: JobReport) -> list[list[str]]:
    """What became of the prompts' tokens: a label, indented by what it is a part of, tokens, share of the total."""
    counts = {
        "all": report.tokens_total,
        "  distinct, in whole blocks": report.tokens_distinct,
        "    computed": report.tokens_computed,
        "      more than once": report.tokens_recomputed,
        "    skipped: in the store already": report.tokens_skipped,
        "    restored, to go on behind them": report.tokens_restored,
        "  reused: computed for another prompt": report.tokens_reused,
        "  unstored: behind the last whole block": report.tokens_unstored,
    }
    total = max(report.tokens_total, 1)
    return [[label, f"{tokens:,}", f"{tokens / total:.1%}"] for label, tokens in counts.items()]


def chunk_rows(report: JobReport) -> list[list[str]]:
    """Label, chunks, bytes."""
    tallies = {
        "written": Tally(report.chunks_written, report.bytes_written),
        "  again, in the place of lost ones": report.rewritten,
        "offered, and there by then": report.existing,
        "missing": report.missing,
    }
    return [[label, *tally_cells(tally)] for label, tally in tallies.items()]


def group_table(report: JobReport) -> tuple[list[str], list[list[str]]]:
    """Header and rows of what was written: bytes by group and by reason."""
    reasons = reasons_of(report)
    rows = [
        [
            one_line(group.label),
            *(human_bytes(group.written.get(reason, NOTHING).bytes) for reason in reasons),
            *tally_cells(sum(group.written.values(), NOTHING)),
        ]
        for group in report.groups
    ]
    return ["written, by group", *map(one_line, reasons), "chunks", "bytes"], rows


def reasons_of(report: JobReport) -> list[str]:
    """For which something was written."""
    found = {reason for group in report.groups for reason, tally in group.written.items() if tally.chunks}
    return [*(reason for reason in REASONS if reason in found), *sorted(found.difference(REASONS))]


def advice(report: JobReport) -> list[str]:
    """What is to be done about a run: a line each; nothing for one that is done and lost nothing."""
    lines = []
    if report.rewritten.chunks:
        lines.append(
            f"{_many(report.rewritten)} had been stored before and were gone: the store was started anew, or it evicts "
            "what this job writes, and then wants more memory, or pins."
        )
    if report.missing.chunks:
        lines.append(
            f"{_many(report.missing)} are not in the store: prompts that need them get a shorter hit, or none."
        )
    if report.status == "stopped":
        lines.append("To go on, run the same command with --resume: what is in the store is not computed again.")
    elif report.status == "incomplete":
        lines.append(
            "Another run will hardly change that by itself. See to the reason above, "
            "then run the same command with --resume: it computes only what is missing."
        )
    return lines


def _show_wrong(count: int, wrong: Sequence[WrongLine]) -> None:
    if not count:
        return
    print(f"{count:,} {'line is' if count == 1 else 'lines are'} no prompt and left out:")
    shown = [f"  line {line.line}: {one_line(line.reason)}" for line in wrong[:_MOST_WRONG]]
    more = count - len(shown)
    print("\n".join([*shown, *([f"  and {more:,} more"] if more > 0 else [])]), end="\n\n")


def _shard_of(report: JobReport) -> list[str]:
    if report.shard is None:
        return []
    part, parts = report.shard
    return [f"part {part} of {parts}" if part else f"the trunk of {parts} parts"]


def _many(tally: Tally) -> str:
    return f"{tally.chunks:,} {'chunk' if tally.chunks == 1 else 'chunks'} ({human_bytes(tally.bytes)})"
