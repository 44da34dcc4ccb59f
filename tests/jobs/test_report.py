"""Reports of a job's parts as one: what is summed, what is not, and how their curves join."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mooncake_sparse_client import Tally
from mooncake_sparse_client.jobs.prompts import WrongLine
from mooncake_sparse_client.jobs.report import SAMPLES, GroupReport, JobReport, RunTotals, Sample

TALLIES = ("existing", "rewritten", "missing")
SUMMED = (
    "prompts",
    "tokens_total",
    "tokens_distinct",
    "tokens_computed",
    "tokens_reused",
    "tokens_skipped",
    "tokens_unstored",
    "tokens_restored",
    "tokens_recomputed",
    "chunks_written",
    "bytes_written",
)
#: Each part has gone through the whole corpus, and all of them at once.
LARGEST = ("wrong_lines", "seconds_reading", "passes", "seconds_waited")


def part(number: int, factor: int = 1, **changes: Any) -> JobReport:
    """All of whose figures differ, ``factor`` times as large as another's."""
    figures: dict[str, Any] = {name: factor * (index + 1) for index, name in enumerate((*SUMMED, *LARGEST, "seconds"))}
    tallies = {name: Tally(factor * index, factor * index * 100) for index, name in enumerate(TALLIES, 1)}
    earlier = RunTotals(*(factor * index for index in range(1, 6)))
    return JobReport(
        **{"status": "done", "cache_id": "c", "shard": (number, 3), "earlier": earlier, **figures, **tallies, **changes}
    )


def test_sums_of_parts_are_sums_and_the_rest_is_the_largest() -> None:
    parts = [part(1), part(2, 10), part(3, 100)]
    joined = JobReport.of_parts(parts)
    for name in SUMMED:
        assert getattr(joined, name) == 111 * getattr(parts[0], name), name
    for name in LARGEST:
        assert getattr(joined, name) == 100 * getattr(parts[0], name), name
    for index, name in enumerate(TALLIES, 1):
        assert getattr(joined, name) == Tally(111 * index, 11100 * index), name
    assert joined.earlier == RunTotals(*(111 * index for index in range(1, 6)))
    assert (joined.status, joined.message, joined.cache_id, joined.shard) == ("done", "", "c", None)
    assert {field.name for field in dataclasses.fields(JobReport)} == {
        *(*SUMMED, *LARGEST, *TALLIES, "earlier", "status", "message", "cache_id", "shard"),
        *("wrong", "groups", "samples", "seconds"),
    }  # a new one wants to be joined too


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [
        (("done", "done"), "done"),
        (("incomplete", "done"), "incomplete"),
        (("done", "stopped"), "stopped"),
        (("stopped", "incomplete"), "stopped"),
    ],
)
def test_the_worst_part_says_how_it_went(statuses: tuple[str, str], worst: str) -> None:
    parts = [part(number, status=status) for number, status in enumerate(statuses, 1)]
    assert JobReport.of_parts(parts).status == worst


def test_each_message_says_whose_it_is() -> None:
    parts = [part(0, message="it was full"), part(1), part(2, message="it was asked to stop")]
    assert JobReport.of_parts(parts).message == "part trunk/3: it was full; part 2/3: it was asked to stop"


def test_wrong_lines_are_not_summed() -> None:
    wrong = (WrongLine(3, "no JSON"),)
    joined = JobReport.of_parts([part(number, wrong_lines=1, wrong=wrong) for number in (1, 2)])
    assert (joined.wrong_lines, joined.wrong) == (1, wrong)


def groups(*chunks: dict[str, int]) -> tuple[GroupReport, ...]:
    return tuple(
        GroupReport(f"group {index}", 10, {reason: Tally(count, 10 * count) for reason, count in written.items()})
        for index, written in enumerate(chunks)
    )


def test_groups_are_joined_by_reason() -> None:
    joined = JobReport.of_parts(
        [part(1, groups=groups({"dense": 1}, {"replay": 2})), part(2, groups=groups({"dense": 4}, {"junction": 8}))]
    )
    assert joined.groups == groups({"dense": 5}, {"replay": 2, "junction": 8})


def test_a_part_that_was_stopped_as_it_read_its_corpus_takes_nothing_from_the_others() -> None:
    """It has written nothing, and has no groups."""
    written = groups({"dense": 1}, {"replay": 2})
    for parts in ([part(1, groups=written), part(2)], [part(1), part(2, groups=written)]):
        assert JobReport.of_parts(parts).groups == written
    assert JobReport.of_parts([part(1), part(2)]).groups == ()


# Time.


CURVE = (Sample(0.0, 0, 0), Sample(1.0, 8, 100), Sample(3.0, 24, 100))
OTHER = (Sample(0.0, 0, 0), Sample(2.0, 16, 1000))


def test_curves_of_parts_add_up_at_each_time() -> None:
    joined = JobReport.of_parts([part(1, samples=CURVE, seconds=3.0), part(2, samples=OTHER, seconds=2.5)])
    assert joined.samples == (
        Sample(0.0, 0, 0),
        Sample(1.0, 8, 100),
        Sample(2.0, 24, 1100),
        Sample(3.0, 40, 1100),
    )
    assert joined.seconds == 3.0


def test_parts_begin_behind_a_trunk_of_its_own() -> None:
    trunk = part(0, samples=OTHER, seconds=2.5)
    joined = JobReport.of_parts([trunk, part(1, samples=CURVE, seconds=3.0), part(2, samples=OTHER, seconds=2.5)])
    assert [sample.seconds for sample in joined.samples] == [0.0, 2.0, 3.5, 4.5, 5.5]
    assert joined.samples[-1] == Sample(5.5, 56, 2100)
    assert joined.seconds == 5.5


def test_a_joined_curve_has_a_bounded_number_of_points_and_its_end() -> None:
    curve = tuple(Sample(float(number), 8 * number, number) for number in range(2 * SAMPLES))
    joined = JobReport.of_parts([part(number, samples=curve) for number in (1, 2, 3)])
    assert SAMPLES / 2 <= len(joined.samples) <= SAMPLES + 1
    assert joined.samples[0] == Sample(0.0, 0, 0)
    assert joined.samples[-1] == Sample(curve[-1].seconds, 3 * curve[-1].tokens, 3 * curve[-1].bytes)
    assert list(joined.samples) == sorted(joined.samples)


@pytest.mark.parametrize(
    ("shard", "name", "is_trunk"),
    [(None, "", False), ((0, 2), "trunk/2", True), ((1, 2), "1/2", False)],
)
def test_a_part_has_a_name(shard: tuple[int, int] | None, name: str, is_trunk: bool) -> None:
    report = JobReport("done", shard=shard)
    assert (report.part, report.is_trunk, report.figures()["shard"]) == (name, is_trunk, name or None)


def test_a_rate_is_of_distinct_tokens() -> None:
    report = JobReport("done", tokens_computed=30, tokens_recomputed=10, tokens_skipped=20, seconds=4.0)
    assert report.tokens_per_second == 10.0
    assert JobReport("stopped").tokens_per_second == 0.0
