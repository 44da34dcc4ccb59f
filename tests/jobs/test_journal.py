"""The journal: what survives a kill, a torn or a damaged record, and what it refuses."""

from __future__ import annotations

import errno
import functools
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgpack
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_sparse_client.errors import ClientClosedError, ConfigError, InvalidRequestError
from mooncake_sparse_client.jobs.journal import Journal, JournalIdentity
from mooncake_sparse_client.jobs.journal_records import decode
from mooncake_sparse_client.jobs.report import RunTotals

JOB = JournalIdentity("model-1", "00112233445566ff", "1/3")
FORMAT = "mooncake-sparse-client job journal"
LOGGER = "mooncake_sparse_client.jobs.journal"

counts = st.integers(0, 1 << 40)
done_records = st.tuples(st.just("done"), st.binary(min_size=16, max_size=16), counts, counts, counts)
end_records = st.tuples(st.just("end"), st.sampled_from(["done", "incomplete", "stopped"]), st.floats(0, 1e9))
run_records = st.tuples(st.just("run"), st.floats(0, 1e10))
records = st.lists(st.one_of(done_records, end_records, run_records), max_size=12)


def framed(parts: Sequence[object]) -> bytes:
    body = msgpack.packb(parts)
    return bytes(msgpack.packb([xxhash.xxh3_64_digest(body), body]))


def header(version: object = 1, job: JournalIdentity = JOB) -> bytes:
    return framed([FORMAT, version, job.cache_id, job.fingerprint, job.shard])


def bodies_of(data: bytes) -> list[list[object]]:
    """By the documented format, apart from the reader under test."""
    found = []
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    for checksum, body in unpacker:
        assert checksum == xxhash.xxh3_64(body).digest()
        found.append(msgpack.unpackb(body))
    return found


def totals_of(bodies: Sequence[Sequence[object]]) -> RunTotals:
    done = [body for body in bodies if body[0] == "done"]
    sums = [sum(body[place] for body in done) for place in (2, 3, 4)]  # type: ignore[misc]
    seconds = 0.0
    for body in bodies:
        seconds += body[2] if body[0] == "end" else 0.0  # type: ignore[operator]
    return RunTotals(sum(body[0] == "run" for body in bodies), *sums, seconds)


def stretches_of(bodies: Sequence[Sequence[object]]) -> set[object]:
    return {body[1] for body in bodies if body[0] == "done"}


def stretch(number: int) -> bytes:
    return number.to_bytes(16, "big")


def add(journal: Journal, number: int) -> None:
    journal.append_done(stretch(number), tokens_computed=number % (1 << 16), chunks_written=2, bytes_written=3)


def open_and_add(path: Path) -> tuple[set[bytes], RunTotals, list[list[object]]]:
    """Resumes, does one more stretch, and reads the file again: what was believed, and all that the file has."""
    with Journal.open(path, JOB, resume=True) as journal:
        believed, earlier = set(journal.done), journal.earlier
        add(journal, 1 << 100)
    with Journal.open(path, JOB, resume=True) as journal:
        assert journal.done == {*believed, stretch(1 << 100)}
        assert journal.earlier.runs == earlier.runs + 1
    return believed, earlier, bodies_of(path.read_bytes())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "job.journal"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_a_resumed_job_finds_what_was_done(path: Path) -> None:
    with Journal.open(path, JOB, resume=True) as journal:
        assert (journal.done, journal.earlier) == (set(), RunTotals())
        add(journal, 5)
        add(journal, 7)
        journal.append_end("stopped", seconds=2)
        assert journal.done == {stretch(5), stretch(7)}
    with Journal.open(path, JOB, resume=True) as journal:
        assert journal.done == {stretch(5), stretch(7)}
        assert journal.earlier == RunTotals(1, 12, 4, 6, 2.0)
        add(journal, 9)  # and is killed
    with Journal.open(path, JOB, resume=True) as journal:
        assert journal.done == {stretch(5), stretch(7), stretch(9)}
        assert journal.earlier == RunTotals(2, 21, 6, 9, 2.0)


def test_the_file_is_as_documented(path: Path) -> None:
    with Journal.open(path, JOB, resume=False) as journal:
        journal.append_done(stretch(5), tokens_computed=128, chunks_written=3, bytes_written=1 << 40)
        journal.append_end("done", seconds=1.5)
    first, run, *others = bodies_of(path.read_bytes())
    assert first == [FORMAT, 1, "model-1", "00112233445566ff", "1/3"]
    assert run[0] == "run"
    assert isinstance(run[1], float)
    assert others == [["done", stretch(5), 128, 3, 1 << 40], ["end", "done", 1.5]]


@settings(max_examples=150, deadline=None)
@given(records, st.data())
def test_a_cut_at_any_byte_leaves_a_prefix(
    folder: Path, written: list[tuple[object, ...]], data: st.DataObject
) -> None:
    path = folder / "cut.journal"
    pieces = [header(), *(framed(record) for record in written)]
    whole = b"".join(pieces)
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    ends = [sum(map(len, pieces[: count + 1])) for count in range(len(pieces))]
    kept = [list(record) for record, end in zip(written, ends[1:], strict=True) if end <= cut]
    believed, earlier, file = open_and_add(path)
    assert believed == stretches_of(kept)
    assert earlier == totals_of(kept)
    assert file[1 : 1 + len(kept)] == kept
    assert [body[0] for body in file[1 + len(kept) :]] == ["run", "done", "run"]


@settings(max_examples=300, deadline=None)
@given(records, st.data())
def test_a_changed_byte_leaves_a_prefix(folder: Path, written: list[tuple[object, ...]], data: st.DataObject) -> None:
    path = folder / "flip.journal"
    pieces = [header(), *(framed(record) for record in written)]
    whole = bytearray(b"".join(pieces))
    place, other = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    whole[place] ^= other
    path.write_bytes(whole)
    if place < len(pieces[0]):
        with pytest.raises(ConfigError, match="is no journal"):
            Journal.open(path, JOB, resume=True)
        assert path.read_bytes() == whole
        return
    ends = [sum(map(len, pieces[: count + 1])) for count in range(len(pieces))]
    kept = [list(record) for record, end in zip(written, ends[1:], strict=True) if end <= place]
    believed, earlier, file = open_and_add(path)
    assert believed == stretches_of(kept)
    assert earlier == totals_of(kept)
    assert file[1 : 1 + len(kept)] == kept


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_nothing_behind_the_records_is_believed_whatever_it_is(folder: Path, rest: bytes) -> None:
    path = folder / "rest.journal"
    path.write_bytes(header() + framed(["run", 1.0]) + rest)
    believed, earlier, _ = open_and_add(path)
    assert (believed, earlier) == (set(), RunTotals(runs=1))


@given(st.binary(max_size=60))
def test_no_body_makes_the_decoder_raise(body: bytes) -> None:
    decode(body)


@pytest.mark.parametrize(
    "parts",
    [
        ["done", b"short", 1, 1, 1],
        ["done", bytes(16), 1, 1],
        ["done", bytes(16), 1, 1, 1.0],
        ["done", "sixteen letters.", 1, 1, 1],
        ["end", "perfect", 1.0],
        ["run"],
        ["later", 1],
        [],
    ],
)
def test_an_intact_record_that_this_version_does_not_know_is_damage(path: Path, parts: list[object]) -> None:
    path.write_bytes(header() + framed(["done", stretch(1), 1, 1, 1]) + framed(parts) + framed(["run", 1.0]))
    believed, earlier, _ = open_and_add(path)
    assert (believed, earlier) == ({stretch(1)}, RunTotals(0, 1, 1, 1))


def test_a_torn_record_is_told_from_damage(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    lines = [framed(["done", stretch(number), 1, 1, 1]) for number in range(3)]
    path.write_bytes(header() + lines[0] + lines[1] + lines[2][:-1])
    with Journal.open(path, JOB, resume=True) as journal:
        assert journal.done == {stretch(0), stretch(1)}
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert f"after {len(lines[2]) - 1} bytes" in record.getMessage()
    caplog.clear()
    path.write_bytes(header() + lines[0] + bytes([*lines[1][:-1], lines[1][-1] ^ 1]) + lines[2])
    with Journal.open(path, JOB, resume=True) as journal:
        assert journal.done == {stretch(0)}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"cut off {len(lines[1]) + len(lines[2])} bytes" in record.getMessage()


def test_a_long_record_without_an_end_is_damage(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(header() + b"\x92\xc4\x08checksum\xc5\xff\xff" + bytes(1000))
    Journal.open(path, JOB, resume=True).close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING


def test_many_records_are_read_across_the_pieces_of_the_file(path: Path) -> None:
    number = 20_000
    path.write_bytes(header() + b"".join(framed(["done", stretch(n), 1, 2, 3]) for n in range(number)))
    with Journal.open(path, JOB, resume=True) as journal:
        assert journal.done == set(map(stretch, range(number)))
        assert journal.earlier == RunTotals(0, number, 2 * number, 3 * number)


@pytest.mark.parametrize(
    "rest",
    [
        b"\xdd\xff\xff\xff\xff" * 1000,  # arrays
        b"\x92\xc6\xff\xff\xff\xff",  # bytes
        b"\xdb\xff\xff\xff\xff" + b"a" * 1000,  # text
        b"\xdf\xff\xff\xff\xff",  # maps
        b"\x92" * 5000,  # nested
        functools.reduce(lambda tree, _: b"\x92" + 2 * tree, range(19), b"\x01"),  # one huge tree of small parts
        bytes(1 << 20),
    ],
    ids=["array", "bytes", "text", "map", "nested", "tree", "zeros"],
)
def test_hostile_sizes_allocate_nothing(path: Path, rest: bytes) -> None:
    path.write_bytes(header() + framed(["run", 1.0]) + rest)
    tracemalloc.start()
    try:
        with Journal.open(path, JOB, resume=True) as journal:
            assert journal.earlier == RunTotals(runs=1)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


KILLED = """
import sys
from pathlib import Path
from mooncake_sparse_client.jobs.journal import Journal, JournalIdentity

with Journal.open(Path(sys.argv[1]), JournalIdentity("model-1", "00112233445566ff", "1/3"), resume=True) as journal:
    start = len(journal.done)
    for number in range(start, start + 10_000_000):
        journal.append_done(number.to_bytes(16, "big"), tokens_computed=1, chunks_written=1, bytes_written=1)
        if number == start + 200:
            print("going", flush=True)
"""


def test_a_killed_process_loses_nothing_that_it_wrote(path: Path) -> None:
    known = 0
    for run in range(3):
        with subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"going\n"
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        with Journal.open(path, JOB, resume=True) as journal:
            assert len(journal.done) > known + 200
            known = len(journal.done)
            assert journal.done == set(map(stretch, range(known)))
            assert journal.earlier == RunTotals(2 * run + 1, known, known, known)


HOLDS = """
import sys
from pathlib import Path
from mooncake_sparse_client.jobs.journal import Journal, JournalIdentity

with Journal.open(Path(sys.argv[1]), JournalIdentity("model-1", "00112233445566ff", "1/3"), resume=True) as journal:
    print("open", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time(path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        before = path.read_bytes()
        for resume in (True, False):
            with pytest.raises(ConfigError, match=f"another process is using the journal {path}"):
                Journal.open(path, JOB, resume=resume)
        assert path.read_bytes() == before
        process.kill()
    Journal.open(path, JOB, resume=True).close()


def test_a_journal_that_was_started_over_is_locked_too(path: Path) -> None:
    for _ in range(2):
        with Journal.open(path, JOB, resume=False) as journal:
            with pytest.raises(ConfigError, match="another process"):
                Journal.open(path, JOB, resume=True)
            journal.append_end("done", seconds=1)


def test_whoever_opened_a_file_that_was_then_replaced_takes_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.open(path, JOB, resume=False) as journal:
        journal.append_end("done", seconds=1)
    plain = os.open
    others: list[Journal] = []

    def open_late(name: str | Path, flags: int, mode: int = 0o777) -> int:
        descriptor = plain(name, flags, mode)
        if name == path and not others:
            others.append(None)  # type: ignore[arg-type]
            others[0] = Journal.open(path, JOB, resume=False)
            add(others[0], 4)
            others[0].close()
        return descriptor

    monkeypatch.setattr(os, "open", open_late)
    with Journal.open(path, JOB, resume=True) as journal:
        assert journal.done == {stretch(4)}
        add(journal, 5)
    assert stretches_of(bodies_of(path.read_bytes())) == {stretch(4), stretch(5)}


@pytest.mark.parametrize("status", ["stopped", "incomplete", None])
def test_an_unfinished_job_is_not_started_over(path: Path, status: str | None) -> None:
    with Journal.open(path, JOB, resume=False) as journal:
        add(journal, 1)
        if status:
            journal.append_end(status, seconds=1)  # type: ignore[arg-type]
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"unfinished job at {path}: resume it \(--resume\) or delete it"):
        Journal.open(path, JOB, resume=False)
    assert path.read_bytes() == before


def test_a_finished_job_is_started_over_or_resumed(path: Path) -> None:
    with Journal.open(path, JOB, resume=False) as journal:
        add(journal, 1)
        journal.append_end("done", seconds=1)
    path.chmod(0o640)
    with Journal.open(path, JOB, resume=True) as journal:
        assert journal.done == {stretch(1)}
        journal.append_end("done", seconds=1)
    with Journal.open(path, JOB, resume=False) as journal:
        assert (journal.done, journal.earlier) == (set(), RunTotals())
    assert [body[0] for body in bodies_of(path.read_bytes())] == [FORMAT, "run"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_a_finished_job_that_was_resumed_and_killed_is_unfinished(path: Path) -> None:
    with Journal.open(path, JOB, resume=False) as journal:
        add(journal, 1)
        journal.append_end("done", seconds=1)
    Journal.open(path, JOB, resume=True).close()
    with pytest.raises(ConfigError, match="unfinished"):
        Journal.open(path, JOB, resume=False)


@pytest.mark.parametrize("end", [True, False])
def test_a_job_that_had_done_nothing_is_started_over(path: Path, end: bool) -> None:
    """It stopped at a wrong line, say, which has been mended since."""
    with Journal.open(path, JOB, resume=False) as journal:
        if end:
            journal.append_end("stopped", seconds=1)
    with Journal.open(path, JOB, resume=False) as journal:
        assert journal.earlier == RunTotals()


def test_an_end_is_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        plain(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    with Journal.open(path, JOB, resume=False) as journal:
        monkeypatch.setattr(os, "fsync", fsync)
        add(journal, 1)
        assert synced == []
        journal.append_end("done", seconds=1)
    assert synced == [path.stat().st_size]


def test_damage_behind_the_end_of_a_finished_job_is_not_started_over(path: Path) -> None:
    path.write_bytes(header() + framed(["end", "done", 1.0]) + b"\x92")
    with pytest.raises(ConfigError, match="unfinished"):
        Journal.open(path, JOB, resume=False)


def test_a_link_stays_one(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    Journal.open(link, JOB, resume=False).close()
    assert link.is_symlink()
    assert bodies_of(path.read_bytes())[1][0] == "run"


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    "content",
    [
        b"precious\n" * 100,
        b"x",
        bytes(500),
        framed(["another format", 1, "model-1", "00112233445566ff", "1/3"]),
        framed(["run", 1.0]),
        framed([1]),
        header()[:-1] + b"\0",
    ],
    ids=["text", "short", "zeros", "format", "no header", "array", "damaged"],
)
def test_what_is_no_journal_is_refused_and_left_alone(path: Path, content: bytes, resume: bool) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path} is no journal of a job"):
        Journal.open(path, JOB, resume=resume)
    assert path.read_bytes() == content


@pytest.mark.parametrize("resume", [True, False])
def test_another_version_and_another_unfinished_job_are_refused(path: Path, resume: bool) -> None:
    path.write_bytes(header(2) + framed(["end", "done", 1.0]))
    with pytest.raises(ConfigError, match="has version 2, and this release reads 1; give another path"):
        Journal.open(path, JOB, resume=resume)
    other = JournalIdentity("model-2", JOB.fingerprint, "")
    path.unlink()
    with Journal.open(path, other, resume=False) as journal:
        add(journal, 1)
    with pytest.raises(ConfigError, match="another job, with cache_id 'model-2', not 'model-1', shard '', not '1/3'"):
        Journal.open(path, JOB, resume=resume)
    assert path.read_bytes().startswith(header(job=other))


@pytest.mark.parametrize("resume", [True, False])
def test_the_journal_of_another_job_that_is_finished_makes_room(path: Path, resume: bool) -> None:
    """Such as last week's, of the model's revision then."""
    other = JournalIdentity("model-2", JOB.fingerprint, "1/3")
    path.write_bytes(header(job=other) + framed(["run", 1.0]) + framed(["end", "done", 1.0]))
    with Journal.open(path, JOB, resume=resume) as journal:
        assert journal.earlier == RunTotals()
    assert path.read_bytes().startswith(header())


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/job cannot be opened: No such file"):
        Journal.open(tmp_path / "nowhere" / "job", JOB, resume=True)
    with pytest.raises(ConfigError, match="cannot be opened: Is a directory"):
        Journal.open(tmp_path, JOB, resume=True)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=f"{pipe} is no file"):
        Journal.open(pipe, JOB, resume=True)
    assert pipe.is_fifo()


@pytest.mark.parametrize("taken", [0, 1, 30])
def test_a_full_disk_leaves_the_whole_records(path: Path, monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    with Journal.open(path, JOB, resume=False) as journal:
        add(journal, 1)
        before = path.read_bytes()
        plain, calls = os.write, [taken] * bool(taken)

        def write(descriptor: int, data: bytes) -> int:
            if calls:
                return plain(descriptor, data[: calls.pop()])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            with pytest.raises(ConfigError, match=f"the journal {path} cannot be written: No space left on device"):
                add(journal, 2)
        assert path.read_bytes() == before
        assert journal.done == {stretch(1)}
        add(journal, 3)
    with Journal.open(path, JOB, resume=True) as journal:
        assert journal.done == {stretch(1), stretch(3)}


FILLS = """
import resource, sys
from pathlib import Path
from mooncake_sparse_client.errors import ConfigError
from mooncake_sparse_client.jobs.journal import Journal, JournalIdentity

resource.setrlimit(resource.RLIMIT_FSIZE, (1001, 1001))
with Journal.open(Path(sys.argv[1]), JournalIdentity("model-1", "00112233445566ff", "1/3"), resume=True) as journal:
    try:
        for number in range(100):
            journal.append_done(number.to_bytes(16, "big"), tokens_computed=1, chunks_written=1, bytes_written=1)
    except ConfigError as error:
        print(len(journal.done), error)
"""


def test_a_file_that_may_not_grow_keeps_whole_records(path: Path) -> None:
    answer = subprocess.run([sys.executable, "-c", textwrap.dedent(FILLS), path], capture_output=True, check=True)
    number, _, words = answer.stdout.decode().partition(" ")
    assert "cannot be written: File too large" in words
    assert stretches_of(bodies_of(path.read_bytes())) == set(map(stretch, range(int(number))))


def test_a_new_journal_that_cannot_be_written_leaves_nothing_of_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.open(path, JOB, resume=False) as journal:
        journal.append_end("done", seconds=1)
    before = path.read_bytes()

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(ConfigError, match="cannot be written: Input/output error"):
            Journal.open(path, JOB, resume=False)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    Journal.open(path, JOB, resume=False).close()


def test_a_torn_record_that_cannot_be_taken_back_ends_the_journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with Journal.open(path, JOB, resume=False) as journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fail)
            patch.setattr(os, "ftruncate", fail)
            with pytest.raises(ConfigError, match="cannot be written"):
                add(journal, 1)
        with pytest.raises(ClientClosedError):
            add(journal, 2)


def test_wrong_calls(path: Path) -> None:
    journal = Journal.open(path, JOB, resume=False)
    with pytest.raises(InvalidRequestError, match="16 bytes, not 3"):
        journal.append_done(b"abc", tokens_computed=1, chunks_written=1, bytes_written=1)
    journal.close()
    journal.close()
    with pytest.raises(ClientClosedError, match=f"the journal {path} is closed"):
        add(journal, 1)
    with pytest.raises(ClientClosedError):
        journal.sync()


def test_no_descriptor_stays_open(path: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with Journal.open(path, JOB, resume=False) as journal:
        add(journal, 1)
    with pytest.raises(ConfigError):
        Journal.open(path, JOB, resume=False)
    with pytest.raises(ConfigError):
        Journal.open(path, JournalIdentity("other", "", ""), resume=True)
    with Journal.open(path, JOB, resume=True), pytest.raises(ConfigError):
        Journal.open(path, JOB, resume=True)
    assert set(Path("/proc/self/fd").iterdir()) == before
