"""``explain``: what it says of a put and of a hit, and what it draws."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from mooncake_sparse_client import layout_for, load_mask
from mooncake_sparse_client.cli.image import PARTS, colours
from mooncake_sparse_client.cli.main import main
from mooncake_sparse_client.cli.picture import (
    Grid,
    Picture,
    Row,
    boundaries_of,
    grid_of,
    put_section,
    shares,
)
from mooncake_sparse_client.cli.sketch import PLAIN_SHADES, SHADES, cells, shades_for, sketch
from mooncake_sparse_client.config import RETENTION_VARIABLES
from mooncake_sparse_client.core.plans import plan_put

ROOT = Path(__file__).parent.parent
quick = settings(max_examples=200, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that ``explain`` prints."""
    assert main(["explain", *arguments]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out.splitlines()


def row_of(lines: Sequence[str], label: str, *, after: str) -> str:
    """The cells of a group's row in the section with this title."""
    start = next(number for number, line in enumerate(lines) if line.startswith(after))
    return next(line for line in lines[start:] if f"{line}  ".startswith(f"{label}  "))[len(label) :].strip()


# In words


def test_what_is_kept_is_said_in_words_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tokens", "2100", "--retention-interval", "1024", "--boundary", "600", "--boundary", "1300"]
    lines = explained(capsys, *arguments)
    plan = plan_put(
        layout_for("deepseek-v4"),
        2100,
        boundaries=[600, 1300],
        retention_interval=1024,
        retention_origin="--retention-interval",
    )
    text = "\n".join(lines)
    assert lines[0] == "layout deepseek-v4: blocks of 256, 64, 4, 8 tokens; boundaries are multiples of 256"
    assert str(plan.explain()) in text
    assert "retention interval: 1024 tokens, every multiple is retained (origin: --retention-interval)" in lines
    assert "caller's boundaries: 512, 1280" in lines
    # 8 alignments in at most 91 cells: 64 of 32 tokens, so that a window's block of 64 spans two.
    title = "kept of tokens 0 to 2048; retention: interval 1024"
    assert title in lines
    assert row_of(lines, "0 compressed KV, 256", after=title) == "█" * 64
    window = "·" * 12 + "█" * 4 + "·" * 12 + "█" * 4 + "·" * 4 + "█" * 4 + "·" * 20 + "█" * 4
    assert row_of(lines, "1 window, 64", after=title) == window
    assert row_of(lines, "2 C4 compressor, 4", after=title) == re.sub("·█(?=·|$)", "·░", window.replace("████", "···█"))
    assert row_of(lines, "boundaries", after=title).split() == ["b", "s", "b", "r"]
    assert lines[-2] == "one cell is 32 tokens; of its chunks: · none, ░▒▓ some, █ all"
    assert lines[-1] == "boundaries: s of the retention interval, r replay, b caller's"


def test_marks_and_the_ruler_stand_at_their_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained(capsys, "--tokens", "4000", "--retention-interval", "0", "--boundary", "2560")
    ruler = next(number for number, line in enumerate(lines) if line.lstrip().startswith("|0"))
    start = lines[ruler].index("|")
    cell = int(re.search(r"one cell is (\d+) tokens", "\n".join(lines))[1])  # type: ignore[index]
    ticks = [(found.start() - start, int(found[1])) for found in re.finditer(r"\|(\d+)", lines[ruler])]
    assert len(ticks) > 4
    assert all(column * cell == position for column, position in ticks)
    assert ticks[-1][1] == 3840
    marks = next(line for line in lines if line.startswith("boundaries  "))
    found = {mark.start() - start: mark[0] for mark in re.finditer("[a-z]", marks[start:].rjust(len(marks)))}
    # In the last cell before the boundary, which the windows below it reach.
    assert found == {2560 // cell - 1: "b", 3840 // cell - 1: "r"}


def test_boundaries_behind_the_put_are_named_and_not_marked(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-prompt-tokens", "4400", "--boundary", "9000", "--retention-interval", "0"]
    lines = explained(capsys, *arguments)
    assert "replay boundaries: 4352 (a prompt of 4400 tokens)" in lines
    assert "caller's boundaries: 8960" in lines
    assert not any(line.startswith("boundaries") for line in lines)


def test_a_hit_to_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    lines = explained(
        capsys,
        "--layout",
        "gemma-3",
        "--load",
        "2048",
        "--local-tokens",
        "260",
        "--json",
        str(path),
        "--tokens",
        "4096",
    )
    layout = layout_for("gemma-3")
    masks = load_mask(layout, 2048, local_tokens=260)
    figures = json.loads(path.read_text())
    assert figures["load"] == {
        "hit_length": 2048,
        "local_tokens": 256,
        "groups": [
            {"group": number, "loaded": {"chunks": int(mask.sum()), "bytes": int(mask.sum()) * page}}
            for number, (mask, page) in enumerate(zip(masks, layout.page_sizes, strict=True))
        ],
    }
    assert "a hit of 2048 tokens, 256 of them held by the engine, loads" in lines
    title = "loaded for a hit of 2048 tokens, of which the engine holds 256"
    cells = row_of(lines, "0 full, 16", after=title), row_of(lines, "1 sliding_window, 16", after=title)
    # 86 cells of 48 tokens: the hit covers 42 and two thirds of one, what is held 5 and a third.
    assert cells == ("·····▓" + "█" * 36 + "▓", "·" * 21 + "▓" + "█" * 20 + "▓")


def test_json_is_the_explanation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    explained(
        capsys,
        *("--layout", "jamba", "--tokens", "3000", "--num-prompt-tokens", "2000", "--start-token", "600"),
        *("--retention-interval", "none", "--json", str(path)),
    )
    plan = plan_put(
        layout_for("jamba"),
        3000,
        num_prompt_tokens=2000,
        start_token=600,
        retention_origin="--retention-interval",
    )
    assert json.loads(path.read_text()) == {
        "layout": "jamba",
        "tokens": 3000,
        "put": plan.explain().as_json(),
        "load": None,
    }


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({}, "none, every boundary is retained (origin: default)"),
        ({1: "512"}, f"512 tokens, every multiple is retained (origin: {RETENTION_VARIABLES[1]})"),
        ({0: "0", 1: "512"}, f"0, no boundary is retained but those below (origin: {RETENTION_VARIABLES[0]})"),
    ],
)
def test_the_environment_sets_the_interval(
    variables: dict[int, str], shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, text in variables.items():
        monkeypatch.setenv(RETENTION_VARIABLES[number], text)
    assert f"retention interval: {shown}" in explained(capsys)


def test_plain_letters_where_the_terminal_has_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["explain", "--tokens", "512"]) == 0
    output.flush()
    lines = output.buffer.getvalue().decode("ascii").splitlines()  # type: ignore[attr-defined]
    assert row_of(lines, "1 window, 64", after="kept of tokens 0") == ("." * 16 + "#" * 16) * 2
    assert row_of(lines, "2 C4 compressor, 4", after="kept of tokens 0") == ("." * 31 + "#") * 2
    assert "one cell is 8 tokens; of its chunks: . none, :+* some, # all" in lines


@pytest.mark.parametrize(
    ("encoding", "shades"),
    [("utf-8", SHADES), (None, SHADES), ("cp437", SHADES), ("ascii", PLAIN_SHADES), ("latin-1", PLAIN_SHADES)],
)
def test_shades_that_an_encoding_has(encoding: str | None, shades: str) -> None:
    assert shades_for(encoding) == shades
    assert len(set(shades)) == 5


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("tokens", [256, 4096, 70_000, 1_000_000])
def test_no_line_of_the_picture_is_wider_than_the_terminal(columns: int, tokens: int) -> None:
    plan = plan_put(layout_for("deepseek-v4"), tokens, retention_interval=512)
    picture = Picture("", 256, plan.end_token, [put_section(plan)], boundaries_of(plan))
    lines = sketch(picture, columns)
    assert max(map(len, lines[:-2])) <= min(columns, 22 + 100 + 8)  # label and ruler's end beside the cells
    assert max(map(len, lines[:-2])) >= 45


# What is drawn


@st.composite
def grids(draw: st.DrawFn) -> tuple[Grid, int]:
    alignment = draw(st.sampled_from([1, 2, 12, 16, 17, 256]))
    end = alignment * draw(st.integers(1, 300))
    return grid_of(end, alignment, draw(st.integers(1, 120))), alignment


@quick
@given(st.sampled_from([1, 2, 12, 16, 17, 256]), st.integers(1, 400), st.integers(1, 120))
def test_cells_and_boundaries_fit(alignment: int, blocks: int, most: int) -> None:
    grid = grid_of(alignment * blocks, alignment, most)
    assert 1 <= grid.count <= most
    assert grid.edges.tolist() == [*range(0, grid.end_token, grid.cell), grid.end_token]
    assert grid.cell % alignment == 0 or alignment % grid.cell == 0
    assert 2 * grid.count > min(most, blocks)  # no coarser than that asks for


@quick
@given(grids(), st.integers(1, 6), st.data())
def test_a_cell_shows_the_share_of_its_tokens(case: tuple[Grid, int], divisor: int, data: st.DataObject) -> None:
    grid, alignment = case
    block = alignment // divisor if alignment % divisor == 0 else alignment
    seed = data.draw(st.integers(0, 1 << 32))
    chunks = np.random.default_rng(seed).random(grid.end_token // block) < data.draw(st.sampled_from([0.1, 0.5, 0.95]))
    tokens = np.repeat(chunks, block)
    parts = np.split(tokens, grid.edges[1:-1])
    assert shares(chunks, block, grid).tolist() == [part.sum() / len(part) for part in parts]


def test_a_cell_is_shaded_by_its_share() -> None:
    chunks = np.zeros(9 * 16, dtype=np.bool_)
    for cell, kept in enumerate([0, 1, 5, 6, 10, 11, 15, 16]):
        chunks[cell * 16 : cell * 16 + kept] = True
    outside = np.arange(len(chunks)) >= 8 * 16
    row = Row("row", 1, {"replay": chunks, "skipped": ~chunks & ~outside, "outside": outside})
    assert cells(row, Grid(len(chunks), 16), SHADES) == "·░░▒▒▓▓█ "


def test_a_cell_is_coloured_by_its_reasons() -> None:
    """Four chunks a cell: none kept; all, for two reasons; a half; a little; a half, and the other outside."""
    letters = "....rrbb..jjr...  ss"
    names = {"r": "replay", "b": "boundary", "j": "junction", "s": "segment", ".": "skipped", " ": "outside"}
    parts = {name: np.array([letter == other for other in letters]) for letter, name in names.items()}
    found = colours(Row("row", 8, parts), Grid(len(letters) * 8, 32)) * 255

    def mixed(**amounts: float) -> Any:
        white = {"outside": "#ffffff"} | {part: colour for part, (colour, _) in PARTS.items()}
        return sum(
            amount * np.array([int(white[part][digit : digit + 2], 16) for digit in (1, 3, 5)])
            for part, amount in amounts.items()
        )

    assert found == pytest.approx(
        np.array(
            [
                mixed(skipped=1),
                mixed(replay=0.5, boundary=0.5),
                mixed(skipped=0.5, junction=0.5),
                mixed(skipped=0.6, replay=0.4),  # so that it is seen
                mixed(outside=0.5, segment=0.5),
            ]
        )
    )


def seen_colours(path: Path) -> set[str]:
    """Those of ``PARTS`` that a PNG has whole areas of."""
    pixels = np.round(imread(path)[..., :3] * 255).astype(np.uint8).reshape(-1, 3)
    return {
        part
        for part, (colour, _) in PARTS.items()
        if np.all(pixels == np.frombuffer(bytes.fromhex(colour[1:]), np.uint8), axis=1).sum() > 1500
    }


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), {"dense", "segment", "skipped"}),
        (("--retention-interval", "0"), {"dense", "replay", "skipped"}),
        (
            ("--retention-interval", "1024", "--boundary", "600", "--num-prompt-tokens", "3900", "--load", "1024"),
            {"dense", "segment", "replay", "boundary", "loaded", "skipped"},
        ),
    ],
)
def test_a_png(arguments: tuple[str, ...], parts: set[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    explained(capsys, "--image", str(path), *arguments)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert seen_colours(path) == parts


def test_an_svg_says_what_it_shows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mask.SVG"
    explained(capsys, "--tokens", "8192", "--retention-interval", "0", "--boundary", "3000", "--image", str(path))
    text = path.read_text()
    assert text.startswith("<?xml")
    assert text.endswith("</svg>\n")
    texts = set(re.findall("<!-- (.*?) -->", text))
    assert {
        "deepseek-v4: which chunks are worth storing",
        "kept of tokens 0 to 8192; retention: interval 0",
        "1 window, 64",
        "8,192",
        "kept for a replay boundary",
        "kept for a caller's boundary",
        "caller's boundary",
    } <= texts
    assert not [text for text in texts if "interval" in text and "retention: " not in text]


@pytest.mark.parametrize("interval", [512, 256])
def test_boundaries_are_drawn_unless_the_interval_has_too_many(
    interval: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mask.svg"  # of so many chunks that no lines part them
    arguments = ["--tokens", "70000", "--retention-interval", str(interval), "--boundary", "30000"]
    explained(capsys, *arguments, "--image", str(path))
    text = path.read_text()
    kinds = re.findall(r'<g id="LineCollection_\d+">(.*?)</g>', text, re.DOTALL)
    *periodic, replay, boundary = [[float(x) for x in re.findall(r'd="M ([\d.]+)', kind)] for kind in kinds]
    assert [len(replay), len(boundary)] == [1, 1]
    if interval == 512:
        tokens = np.arange(512, 69_888 + 1, 512)
        scale, start = np.polyfit(tokens, np.array(periodic[0]), 1)
        assert periodic[0] == pytest.approx(start + scale * tokens, abs=0.01)
        assert [*replay, *boundary] == pytest.approx([start + scale * 69_888, start + scale * 29_952], abs=0.01)
    assert len(periodic) == (interval == 512)
    assert ("<!-- boundary of the interval -->" in text) == (interval == 512)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_picture_is_the_same_file(
    suffix: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{name}.{suffix}" for name in ("first", "second")]
    for path, moment in zip(paths, ("0", "1000000000"), strict=True):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", moment)  # whatever the time is
        explained(capsys, "--image", str(path))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert b"1970" not in paths[0].read_bytes()


def test_settings_of_the_user_change_no_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, odd = tmp_path / "plain.png", tmp_path / "odd.png"
    explained(capsys, "--image", str(plain))
    monkeypatch.setitem(matplotlib.rcParams, "figure.facecolor", "black")
    explained(capsys, "--image", str(odd))
    assert matplotlib.rcParams["figure.facecolor"] == "black"
    assert plain.read_bytes() == odd.read_bytes()


def test_a_million_tokens_are_drawn_as_one_raster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mask.svg"
    explained(capsys, "--tokens", "1000000", "--image", str(path))
    assert path.stat().st_size < 200_000  # there are 394,506 chunks


def test_matplotlib_is_loaded_only_to_draw() -> None:
    code = (
        "import sys; from mooncake_sparse_client.cli.main import main; main(['explain']); "
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60).returncode == 0


# What cannot be


def refused(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    """What is said of arguments that cannot be; nothing else is printed."""
    try:
        status = main(["explain", *arguments])
    except SystemExit as error:  # how argparse ends a program
        status = error.code if isinstance(error.code, int) else -1
    output = capsys.readouterr()
    assert (status, output.out) == (2, "")
    return output.err


def test_without_matplotlib_it_is_said_how_to_get_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # an import of it fails
    message = refused(capsys, ["--image", str(tmp_path / "mask.png")])
    assert re.search(r"^explain: --image needs matplotlib, .*pip install 'mooncake-sparse-client\[plot\]'", message)
    assert list(tmp_path.iterdir()) == []
    explained(capsys)  # the rest goes without


@pytest.mark.parametrize("name", ["mask.jpg", "mask", "png", "mask.png.txt"])
def test_a_picture_of_another_kind_is_refused_before_any_work(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    message = refused(capsys, ["--image", str(tmp_path / name), "--json", str(figures), "--tokens", "-1"])
    assert re.search(rf"^explain: --image is '.*{re.escape(name)}'; .* ends in \.png or \.svg$", message)
    assert not figures.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--layout gpt-2", r"argument --layout: invalid choice: 'gpt-2'"),
        ("--tokens x", r"argument --tokens: invalid int value"),
        ("--tokens=-1", r"^explain: --tokens must not be negative, but is -1"),
        ("--tokens 255", r"^explain: --tokens must be from 256, the layout's alignment, to \d+, not 255"),
        ("--tokens 99999999999", r"^explain: --tokens must be from 256.* not 99999999999"),
        ("--num-prompt-tokens=-1", r"^explain: --num-prompt-tokens must not be negative"),
        ("--start-token=-5", r"^explain: --start-token must not be negative"),
        ("--start-token 5000", r"^explain: --start-token: start_token 5000 lies behind the 4096 tokens to put"),
        ("--boundary=-1", r"^explain: --boundary must not be negative, but is -1"),
        ("--retention-interval x", r"^explain: --retention-interval: 'x' is neither a number of tokens nor 'none'"),
        ("--retention-interval=-1", r"^explain: --retention-interval: '-1' is neither"),
        ("--retention-interval 9999999999999999999", r"^explain: --retention-interval: '9+' is neither"),
        ("--retention-interval 100", r"^explain: --retention-interval: .* multiple of the alignment 256, not 100"),
        ("--load 100", r"^explain: --load must be a multiple of the alignment 256 and at most 4096, not 100"),
        ("--load 4352", r"^explain: --load must be .* at most 4096, not 4352"),
        ("--load=-256", r"^explain: --load must not be negative"),
        ("--load 256 --local-tokens=-1", r"^explain: --local-tokens must not be negative"),
        ("--local-tokens 256", r"^explain: --local-tokens .* --load"),
        ("--image /nowhere/mask.png", r"^explain: --image /nowhere/mask\.png cannot be written: No such file"),
        ("--json /nowhere/figures.json", r"^explain: --json /nowhere/figures\.json cannot be written"),
    ],
)
def test_an_argument_that_cannot_be_is_named(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(message, refused(capsys, arguments.split()))


@pytest.mark.parametrize("number", [0, 1])
def test_a_variable_that_cannot_be_is_named(
    number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = RETENTION_VARIABLES[number]
    for text, message in (("100", rf"^explain: {variable}: .* alignment 256, not 100"), ("x", f"^explain: {variable}")):
        monkeypatch.setenv(variable, text)
        assert re.search(message, refused(capsys, []))


def test_local_tokens_beyond_the_hit_leave_nothing_to_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    explained(capsys, "--load", "512", "--local-tokens", "4096", "--json", str(path))
    load = json.loads(path.read_text())["load"]
    assert (load["hit_length"], load["local_tokens"]) == (512, 512)
    assert all(group["loaded"] == {"chunks": 0, "bytes": 0} for group in load["groups"])


def test_a_put_of_nothing_more_is_blank(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained(capsys, "--layout", "gpt-oss", "--tokens", "64", "--start-token", "64")
    assert "keeps 0 of 0 chunks of tokens 64 to 64" in lines
    assert row_of(lines, "0 full, 16", after="kept of tokens 64 to 64") == ""
