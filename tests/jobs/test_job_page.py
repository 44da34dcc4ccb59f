"""What a job's report looks like: as a page for a browser, and as tables on a terminal."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from numpy.typing import NDArray

from mooncake_sparse_client.cli.image import PARTS
from mooncake_sparse_client.cli.job_page import check_page, write_page
from mooncake_sparse_client.cli.job_plots import RATE_COLOURS, TOKEN_COLOURS, rates, token_parts
from mooncake_sparse_client.cli.job_summary import show_summary
from mooncake_sparse_client.core.tally import Tally
from mooncake_sparse_client.errors import ConfigError, MissingLibraryError
from mooncake_sparse_client.jobs.prompts import WrongLine
from mooncake_sparse_client.jobs.report import GroupReport, JobReport, RunTotals, Sample

ROOT = Path(__file__).parent.parent.parent
PLOTS = ("tokens", "bytes", "throughput")
MIB = 1 << 20
HOSTILE = "<script>alert(1)</script> & \"quoted\" 'single' \x1b[31m \udc80 <!-- ]]>"
quick = settings(max_examples=100, deadline=None, derandomize=True)


def report_of(**changes: object) -> JobReport:
    """A run that was stopped, with something of everything."""
    groups = (
        GroupReport("mla 256", MIB, {"dense": Tally(400, 400 * MIB)}),
        GroupReport(
            "sliding_window 64, 128",
            MIB,
            {"segment": Tally(200, 200 * MIB), "replay": Tally(100, 100 * MIB), "junction": Tally(50, 50 * MIB)},
        ),
        GroupReport("mamba 4", MIB, {}),
    )
    report = JobReport(
        status="stopped",
        message="the store was out of reach",
        shard=(2, 4),
        prompts=321,
        wrong_lines=2000,
        wrong=tuple(WrongLine(line, f"no tokens in {line}") for line in range(3, 25)),
        tokens_total=20_000_000,
        tokens_distinct=14_000_000,
        tokens_computed=8_200_000,
        tokens_reused=4_000_000,
        tokens_skipped=4_000_000,
        tokens_unstored=2_000_000,
        tokens_restored=1_111_000,
        tokens_recomputed=200_000,
        chunks_written=750,
        bytes_written=750 * MIB,
        existing=Tally(33, 33 * MIB),
        rewritten=Tally(11, 11 * MIB),
        missing=Tally(17, 17 * MIB),
        groups=groups,
        samples=tuple(Sample(float(second), 20_000 * second, 2 * MIB * second) for second in range(1, 401)),
        seconds=400.0,
        passes=2,
        seconds_waited=61.0,
        earlier=RunTotals(3, 5_550_000, 444, 444 * MIB, 90.0),
    )
    return replace(report, **changes)  # type: ignore[arg-type]


def page_of(report: JobReport, folder: Path, title: str = "corpus.jsonl") -> str:
    path = folder / "report.html"
    check_page(path)
    write_page(report, path, title=title)
    assert [item.name for item in folder.iterdir()] == ["report.html"]
    return path.read_text(encoding="utf-8")


class Elements(HTMLParser):
    """Checks that every element ends where it must, and gathers what is there."""

    VOID = ("meta", "link")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def figures_in(page: str) -> dict[str, str]:
    """The SVG of each plot."""
    found = re.findall(r'<figure data-plot="(\w+)">.*?(<svg.*?</svg>).*?</figure>', page, re.DOTALL)
    return dict(found)


def root_of(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)  # noqa: S314 - our own


def words_in(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in root_of(svg).iter() if element.tag.endswith("}text")]


def cells_in(page: str) -> dict[str, list[str]]:
    """A table's cells by the label of their row; of rows with the same label, the first."""
    rows: dict[str, list[str]] = {}
    for label, cells in re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page):
        rows.setdefault(unescape(label).strip(), [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", cells)])
    return rows


# The page


def test_page_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    page = page_of(report_of(), tmp_path)
    elements = Elements(page)
    assert page.startswith("<!DOCTYPE html>")
    assert elements.all("html") == [{"lang": "en"}]
    assert {"charset": "utf-8"} in elements.all("meta")
    assert not {"script", "img", "iframe", "object", "base"} & {tag for tag, _ in elements.tags}
    links = [
        value for _, attributes in elements.tags for name, value in attributes.items() if name.endswith(("href", "src"))
    ]
    assert links
    assert all(link is not None and link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"url\((?!#)|@import", page)


def test_each_plot_is_an_image_with_a_name_and_ids_of_its_own(tmp_path: Path) -> None:
    page = page_of(report_of(), tmp_path)
    figures = figures_in(page)
    assert tuple(figures) == PLOTS
    for name, svg in figures.items():
        root = root_of(svg)
        assert root.get("role") == "img"
        assert root.get("aria-label") == next(iter(root)).text
        ids = [element.get("id") for element in root.iter() if element.get("id") is not None]
        assert ids
        assert all(item is not None and item.startswith(f"{name}-") for item in ids)
        # What is referred to is there.
        assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg)) <= set(ids)
    everything = re.findall(r'\sid="([^"]+)"', page)
    assert len(everything) == len(set(everything))


def test_key_figures_are_there(tmp_path: Path) -> None:
    page = page_of(report_of(), tmp_path)
    cells = cells_in(page)
    assert cells["all"] == ["20,000,000", "100.0%"]
    assert cells["distinct, in whole blocks"] == ["14,000,000", "70.0%"]
    assert cells["computed"] == ["8,200,000", "41.0%"]
    assert cells["more than once"] == ["200,000", "1.0%"]
    assert cells["restored, to go on behind them"] == ["1,111,000", "5.6%"]
    assert cells["written"] == ["750", "750.0 MiB"]
    assert cells["again, in the place of lost ones"] == ["11", "11.0 MiB"]
    assert cells["offered, and there by then"] == ["33", "33.0 MiB"]
    assert cells["missing"] == ["17", "17.0 MiB"]
    assert cells["prompts"] == ["321"]
    assert cells["wrong lines, left out"] == ["2,000"]
    assert cells["tokens computed a second"] == ["20,500"]
    assert cells["time behind that"] == ["6 min 40 s"]
    assert cells["waited for the store"] == ["1 min 1 s"]
    assert cells["passes over the store"] == ["2"]
    assert cells["earlier runs"] == ["3"]
    assert cells["tokens computed"] == ["5,550,000"]
    assert cells["sliding_window 64, 128"] == ["0 B", "200.0 MiB", "100.0 MiB", "50.0 MiB", "350", "350.0 MiB"]
    assert cells["3"] == ["no tokens in 3"]
    assert "the first 22 of 2,000" in page
    assert "stopped: the store was out of reach; 321 prompts; part 2 of 4" in page
    assert "run the same command with --resume" in page


def test_plots_say_what_they_draw(tmp_path: Path) -> None:
    figures = {name: words_in(svg) for name, svg in figures_in(page_of(report_of(), tmp_path)).items()}
    assert "computed 8,000,000 (40.0%)" in figures["tokens"]
    assert "skipped 4,000,000 (20.0%)" in figures["tokens"]
    assert "reused 4,000,000 (20.0%)" in figures["tokens"]
    assert "unstored 2,000,000 (10.0%)" in figures["tokens"]
    assert "not reached 2,000,000 (10.0%)" in figures["tokens"]
    assert {"mla 256", "sliding_window 64, 128", "mamba 4", "400.0 MiB", "350.0 MiB", "0 B"} <= set(figures["bytes"])
    for reason in ("dense", "segment", "replay", "junction"):
        assert f"{reason}: {PARTS[reason][1]}" in figures["bytes"]
    assert {"thousand tokens a second", "MiB a second", "minutes"} <= set(figures["throughput"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tokens_total": 0, "tokens_computed": 0, "tokens_skipped": 0, "tokens_reused": 0, "tokens_unstored": 0},
            "no tokens",
        ),
        ({"groups": ()}, "nothing written"),
        ({"groups": (GroupReport("mla 256", MIB, {"dense": Tally()}),)}, "nothing written"),
        ({"samples": ()}, "too short a run"),
        ({"samples": (Sample(1.0, 10, 10),)}, "too short a run"),
        ({"samples": (Sample(0.0, 0, 0), Sample(0.0, 10, 10)), "seconds": 0.0}, "too short a run"),
    ],
)
def test_where_there_is_nothing_to_draw_the_plot_says_so(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    page = page_of(report_of(**changes), tmp_path)
    Elements(page)
    figures = figures_in(page)
    assert tuple(figures) == PLOTS
    assert sum(word.startswith(said) for svg in figures.values() for word in words_in(svg)) == 1


def test_an_empty_report_has_a_page(tmp_path: Path) -> None:
    page = page_of(JobReport("done"), tmp_path)
    Elements(page)
    assert len(figures_in(page)) == 3
    assert cells_in(page)["tokens computed a second"] == ["-"]


def test_samples_without_progress_are_drawn(tmp_path: Path) -> None:
    page = page_of(report_of(samples=(Sample(1.0, 0, 0), Sample(2.0, 0, 0))), tmp_path)
    assert {"tokens a second", "bytes a second", "seconds"} <= set(words_in(figures_in(page)["throughput"]))


def test_text_from_anywhere_stays_text(tmp_path: Path) -> None:
    page = page_of(
        report_of(
            message=HOSTILE,
            wrong=(WrongLine(7, HOSTILE),),
            groups=(GroupReport(f"$x^2$ {HOSTILE}", 1, {HOSTILE: Tally(1, 1), "dense": Tally(1, 1)}),),
        ),
        tmp_path,
        title=HOSTILE,
    )
    elements = Elements(page)
    assert elements.all("script") == []
    assert "\x1b" not in page
    # Title twice, message, and the wrong line; the group's label and reason in their table, and cut in their plot.
    assert page.count("&lt;script&gt;alert(1)") >= 7
    assert tuple(figures_in(page)) == PLOTS
    words = words_in(figures_in(page)["bytes"])
    assert any(word.startswith("$x^2$ <script>alert(1)") for word in words)


def test_the_same_report_gives_the_same_bytes_whoever_draws_it(tmp_path: Path) -> None:
    report = report_of()
    page = page_of(report, tmp_path)
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert page_of(report, tmp_path) == page
        assert matplotlib.rcParams["font.size"] == 30
    (tmp_path / "pickled").write_bytes(pickle.dumps(report))
    code = (
        "import pathlib, pickle, sys; from mooncake_sparse_client.cli import job_page\n"
        "assert 'matplotlib' not in sys.modules, 'loaded before it is needed'\n"
        "report = pickle.loads(pathlib.Path('pickled').read_bytes())\n"
        "job_page.write_page(report, pathlib.Path('other.html'), title='corpus.jsonl')\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=100)
    assert (tmp_path / "other.html").read_text(encoding="utf-8") == page


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    samples = tuple(Sample(0.1 * number, 1000 * number, 4096 * number) for number in range(1, 100_001))
    report = report_of(samples=samples)
    started = time.perf_counter()
    page = page_of(report, tmp_path)
    assert time.perf_counter() - started < 20  # it takes half a second; a plot of all samples would take minutes
    assert len(page) < 200_000


def test_other_reasons_are_drawn_too(tmp_path: Path) -> None:
    group = GroupReport("mla 256", MIB, {"whim": Tally(2, 2 * MIB), "dense": Tally(1, MIB)})
    page = page_of(report_of(groups=(group,)), tmp_path)
    assert "whim: kept for another reason" in words_in(figures_in(page)["bytes"])
    assert cells_in(page)["mla 256"] == ["1.0 MiB", "2.0 MiB", "3", "3.0 MiB"]


# What is drawn


samples = st.lists(
    st.tuples(st.floats(0.01, 100), st.integers(0, 10**6), st.integers(0, 10**9)), min_size=2, max_size=400
)


@quick
@given(samples)
def test_rates_add_up_to_what_was_done(steps: list[tuple[float, int, int]]) -> None:
    sums = np.cumsum(np.array(steps), axis=0)
    binned = rates([Sample(float(row[0]), int(row[1]), int(row[2])) for row in sums])
    assert binned is not None
    edges, tokens, written = binned
    assert len(edges) <= 161
    assert (edges[0], edges[-1]) == (0, pytest.approx(sums[-1, 0]))
    assert np.all(np.diff(edges) > 0)
    assert tokens.min() >= 0
    assert np.sum(tokens * np.diff(edges)) == pytest.approx(sums[-1, 1])
    assert np.sum(written * np.diff(edges)) == pytest.approx(sums[-1, 2])


def test_rates_tell_slow_times_from_fast_ones() -> None:
    slow = [Sample(float(second), 10 * second, second) for second in range(1, 101)]
    fast = [Sample(100.0 + second, 1000 + 500 * second, 100 + 7 * second) for second in range(1, 101)]
    binned = rates([*slow, *fast])
    assert binned is not None
    edges, tokens, written = binned
    middles = (edges[1:] + edges[:-1]) / 2
    assert tokens[middles < 98] == pytest.approx(10)
    assert tokens[middles > 102] == pytest.approx(500)
    assert written[middles > 102] == pytest.approx(7)


counts = st.integers(0, 10**9)


@quick
@given(counts, counts, counts, counts, counts, counts)
def test_each_token_is_drawn_once(
    once: int, again: int, skipped: int, reused: int, unstored: int, waiting: int
) -> None:
    report = JobReport(
        "stopped",
        tokens_total=once + skipped + reused + unstored + waiting,
        tokens_distinct=once + skipped + waiting,
        tokens_computed=once + again,
        tokens_recomputed=again,
        tokens_skipped=skipped,
        tokens_reused=reused,
        tokens_unstored=unstored,
    )
    assert token_parts(report) == {
        "computed": once,
        "skipped": skipped,
        "reused": reused,
        "unstored": unstored,
        "not reached": waiting,
    }


# In a browser


@pytest.fixture
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium is installed, which would show the page")


def screenshot(browser: str, page: Path) -> NDArray[np.int64]:
    """Rows of pixels: red, green and blue, from 0 to 255."""
    image = page.with_suffix(".png")
    profile = page.with_suffix(".profile")
    profile.mkdir()
    switches = (
        "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
        "disable-component-update disable-sync disable-dev-shm-usage hide-scrollbars force-color-profile=srgb "
        f"window-size=1000,2600 user-data-dir={profile} screenshot={image}"
    )
    subprocess.run(
        [browser, *(f"--{switch}" for switch in switches.split(" ")), page.as_uri()],
        check=True,
        capture_output=True,
        timeout=55,
    )
    pixels: NDArray[np.int64] = np.rint(255 * imread(image)[:, :, :3]).astype(np.int64)
    return pixels


def where(pixels: NDArray[np.int64], colour: str) -> NDArray[np.bool_]:
    """The pixels of just this colour."""
    rgb = list(bytes.fromhex(colour.removeprefix("#")))
    found: NDArray[np.bool_] = np.all(pixels == rgb, axis=2)
    return found


def widths_in(pixels: NDArray[np.int64], colours: Sequence[str]) -> list[float]:
    """Of the first bar with these colours, each colour's share."""
    top = np.flatnonzero(where(pixels, colours[0]).any(axis=1))[0]
    row = pixels[top + 4][None]  # so close to its upper edge nothing is written on a bar
    widths = [int(where(row, colour).sum()) for colour in colours]
    return [width / sum(widths) for width in widths]


@pytest.mark.jobs  # make test-jobs sees to the browser
def test_a_browser_shows_every_plot(tmp_path: Path, browser: str) -> None:
    page = page_of(report_of(), tmp_path)
    bare = tmp_path / "bare.html"
    bare.write_text(re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL), encoding="utf-8")
    shown, without = screenshot(browser, tmp_path / "report.html"), screenshot(browser, bare)
    colours = {
        "tokens": list(TOKEN_COLOURS.values()),
        "bytes": [PARTS[reason][0] for reason in ("dense", "segment", "replay", "junction")],
        "throughput": list(RATE_COLOURS.values()),
    }
    # Where each plot is, from its first row of pixels to its last: one below the other.
    spans = []
    for name in PLOTS:
        for colour in colours[name]:
            assert where(shown, colour).sum() > 1000, (name, colour)
            assert where(without, colour).sum() < 10, (name, colour)
        rows = np.flatnonzero(np.any([where(shown, colour).any(axis=1) for colour in colours[name]], axis=0))
        spans += [rows[0], rows[-1]]
    assert spans == sorted(spans)
    # 8 : 4 : 4 : 2 : 2 million tokens, and 200 : 100 : 50 MiB.
    assert widths_in(shown, colours["tokens"]) == pytest.approx([0.4, 0.2, 0.2, 0.1, 0.1], abs=0.02)
    assert widths_in(shown, colours["bytes"][1:]) == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=0.02)


# The file


def test_an_older_page_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("older")
    check_page(path)
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]

    def full(*arguments: object, **options: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(ConfigError, match=r"report\.html cannot be written: No space left"):
            write_page(report_of(), path, title="corpus")
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]
    write_page(report_of(), path, title="corpus")
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "there" / "report.html")
    check_page(link)
    write_page(JobReport("done"), link, title="corpus")
    assert link.is_symlink()
    assert [item.name for item in (tmp_path / "there").iterdir()] == ["report.html"]


def places(folder: Path) -> Iterator[tuple[Path, str]]:
    yield folder / "absent" / "report.html", "No such file or directory"
    yield folder, "is a folder, or no plain file"
    yield folder / "pipe", "is a folder, or no plain file"
    yield folder / "file" / "report.html", "Not a directory"
    yield folder / f"{'x' * 300}.html", "File name too long"


def test_a_place_that_takes_no_file_is_named_before_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for path, reason in places(tmp_path):
        for call in (check_page, lambda path: write_page(JobReport("done"), path, title="corpus")):
            with pytest.raises(ConfigError) as caught:
                call(path)
            assert str(path) in str(caught.value)
            assert reason in str(caught.value)
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "pipe"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_leave_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        check_page(tmp_path / "report.html")


def test_without_matplotlib_it_is_said_before_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'mooncake-sparse-client\[plot\]'"):
        check_page(tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


# On a terminal


def summary_of(report: JobReport, capsys: pytest.CaptureFixture[str]) -> str:
    show_summary(report, "deepseek-v4")
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def row_of(text: str, label: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.strip().startswith(label))
    return line.strip().removeprefix(label).split()


def test_summary_of_a_stopped_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = summary_of(report_of(), capsys)
    assert text.splitlines()[0] == (
        "stopped: the store was out of reach; 321 prompts; part 2 of 4; layout: deepseek-v4; 6 min 40 s"
    )
    assert row_of(text, "computed") == ["8,200,000", "41.0%"]
    cells = row_of(text, "sliding_window 64, 128")
    assert " ".join(cells) == "0 B 200.0 MiB 100.0 MiB 50.0 MiB 350 350.0 MiB"
    assert row_of(text, "missing") == ["17", "17.0", "MiB"]
    assert "2,000 lines are no prompt and left out:" in text
    assert [line for line in text.splitlines() if "no tokens in" in line] == [
        f"  line {line}: no tokens in {line}" for line in range(3, 13)
    ]
    assert "  and 1,990 more" in text
    assert "11 chunks (11.0 MiB) had been stored before and were gone" in text
    assert "17 chunks (17.0 MiB) are not in the store" in text
    assert text.endswith("run the same command with --resume: what is in the store is not computed again.\n")


def test_summary_of_an_incomplete_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = summary_of(
        report_of(status="incomplete", message="the store is full", wrong_lines=1, wrong=(WrongLine(9, HOSTILE),)),
        capsys,
    )
    assert text.startswith("incomplete: the store is full; ")
    assert "1 line is no prompt and left out:\n  line 9: <script>" in text
    assert "more" not in text.partition("left out:")[2].partition("\n\n")[0]
    assert "\x1b" not in text
    assert "computes only what is missing" in text


def test_summary_of_a_run_that_is_done_asks_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    done = JobReport("done", prompts=1, shard=(0, 4), tokens_total=10, tokens_unstored=10, seconds=1.5)
    text = summary_of(done, capsys)
    assert text.splitlines()[0] == "done; 1 prompt; the trunk of 4 parts; layout: deepseek-v4; 1.5 s"
    assert row_of(text, "unstored: behind the last whole block") == ["10", "100.0%"]
    assert not re.search("again[:.]|gone|not in the store|no prompt", text)
    assert row_of(summary_of(JobReport("done"), capsys), "all") == ["0", "0.0%"]
