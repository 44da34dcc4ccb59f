"""The Python in the documentation runs, and its links lead somewhere."""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mooncake_sparse_client
import mooncake_sparse_client.jobs
from mooncake_sparse_client import Limits, MooncakeConfig, Replication, Resilience, errors
from mooncake_sparse_client.cli import precompute, verify
from mooncake_sparse_client.config import RETENTION_VARIABLES
from mooncake_sparse_client.config_places import _VARIABLES
from mooncake_sparse_client.jobs import JobOptions, JobReport, Shard, VerifyReport

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FENCE = re.compile(r"^```(.*)\n([\s\S]*?)^```$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One ``python`` block: where it starts, and whether it is only to be compiled."""

    line: int
    code: str
    runs: bool


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = []
    for found in FENCE.finditer(text):
        language, *marks = found[1].split() or [""]
        if language == "python":
            assert set(marks) <= {"notest"}, f"{page.name}: unknown mark in ```{found[1]}"
            blocks.append(Block(text.count("\n", 0, found.start(2)), found[2], "notest" not in marks))
    return blocks


def compiled(page: Path, block: Block) -> Any:
    # Empty lines in front, so that a traceback names the page's own line.
    source = "\n" * block.line + block.code
    return compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def run(page: Path) -> dict[str, Any]:
    """Runs the blocks in order, in one namespace and on one event loop."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for block in blocks_of(page):
            code = compiled(page, block)
            if not block.runs:
                continue
            result = eval(code, namespace)  # noqa: S307 - our own documentation
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(result)
    return namespace


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_python_of_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run(page)


def test_a_page_that_is_wrong_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n```python\nimport asyncio\nx = 1\n```\n\n```python notest\nraise ValueError\n```\n\n"
        "```text\nnot python\n```\n\n```python\nawait asyncio.sleep(0)\nassert x == 2, 'x'\n```\n"
    )
    assert [(block.line, block.runs) for block in blocks_of(page)] == [(3, True), (8, False), (16, True)]
    with pytest.raises(AssertionError, match="x") as failure:
        run(page)
    assert failure.traceback[-1].lineno == 17  # counted from 0
    page.write_text("```python notest\nprint(\n```\n")
    with pytest.raises(SyntaxError):
        run(page)


def test_pages_have_python_to_run() -> None:
    counts = {page.name: sum(block.runs for block in blocks_of(page)) for page in PAGES}
    assert set(counts) == {
        "README.md",
        "concepts.md",
        "configuration.md",
        "errors.md",
        "jobs.md",
        "keys.md",
        "memory.md",
        "own-engine.md",
        "performance.md",
        "reference.md",
        "resilience.md",
        "security.md",
        "serving.md",
        "transformers.md",
    }
    assert sum(len(blocks_of(page)) for page in PAGES) > len(PAGES)


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_every_page_is_to_be_found() -> None:
    start, readme = text_of("README.md"), PAGES[0].read_text(encoding="utf-8")
    for page in (page.name for page in PAGES[1:] if page.name != "README.md"):
        assert f"]({page}): " in start
        assert f"](docs/{page})" in readme


def test_every_public_class_and_function_is_explained() -> None:
    text = "".join(text_of(name) for name in ("reference.md", "configuration.md", "keys.md", "errors.md"))
    public = {name: getattr(mooncake_sparse_client, name) for name in mooncake_sparse_client.__all__}
    things = {name for name, value in public.items() if inspect.isclass(value) or inspect.isfunction(value)}
    assert "PagedKVCache" in things
    assert things - set(re.findall(r"\w+", text)) == set()


def test_every_error_is_explained() -> None:
    text = text_of("errors.md")
    classes = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    assert len(classes) > 15
    for error in classes:
        assert error.__name__ in text
        row = re.search(rf"^\| `{error.kind}` \|.*\| (yes|no) \|", text, re.MULTILINE)
        assert row, f"no row for the kind {error.kind}"
        assert (row[1] == "yes") is error.retriable


def test_every_setting_is_explained() -> None:
    text = text_of("configuration.md")
    for name, variable in _VARIABLES.items():
        assert re.search(rf"^\| `{name}`.*`{variable}`", text, re.MULTILINE), name
    for name in MooncakeConfig.__dataclass_fields__:
        assert f"`{name}`" in text
    for name, field in (Limits.__dataclass_fields__ | Replication.__dataclass_fields__).items():
        row = re.search(rf"^\| `{name}` \| ([^|]*) \|", text, re.MULTILINE)
        assert row, name
        shown = row[1].split(" (")[0].replace(",", "").strip("`")
        assert shown == (str(field.default) or '""')
    for variable in (*RETENTION_VARIABLES, "MOONCAKE_CONFIG_PATH"):
        assert f"`{variable}`" in text


def test_every_field_of_resilience_is_explained() -> None:
    text = text_of("resilience.md")
    for name, field in Resilience.__dataclass_fields__.items():
        row = re.search(rf"^\| `{name}` \| ([^|]*) \|", text, re.MULTILINE)
        assert row, name
        assert row[1] == str(field.default)


def test_every_public_name_of_the_jobs_is_explained() -> None:
    names = set(mooncake_sparse_client.jobs.__all__)
    assert "PrecomputeJob" in names
    assert {name for name in names if not hasattr(mooncake_sparse_client.jobs, name)} == set()
    assert names - set(re.findall(r"\w+", text_of("jobs.md"))) == set()


def test_every_field_of_the_job_options_is_explained() -> None:
    text = text_of("jobs.md").partition("| field of `JobOptions` |")[2]
    for name, field in JobOptions.__dataclass_fields__.items():
        row = re.search(rf"^\| `{name}` \| ([^|]*) \|", text, re.MULTILINE)
        assert row, name
        default = Shard(1, 1) if (shown := row[1].strip("`")) == "Shard(1, 1)" else ast.literal_eval(shown)
        assert default == field.default, name


def test_every_figure_of_a_job_is_explained() -> None:
    """All keys of its JSON, those of a verification too."""
    text = text_of("jobs.md")
    report = text.partition("## The report")[2].partition("\n## ")[0]
    keys = {key for row in re.findall(r"^\| (`.*?) \|", report, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    assert keys == set(JobReport("done").figures())
    checked = text.partition("## Verify, and heal")[2].partition("\n## ")[0]
    assert set(VerifyReport().figures()) - set(re.findall(r"`(\w+)`", checked)) == set()


def test_every_option_of_the_job_commands_is_explained() -> None:
    text = text_of("jobs.md")
    for command in (precompute, verify):
        parser = argparse.ArgumentParser(add_help=False)
        command.add_arguments(parser)
        options = {action.option_strings[-1] for action in parser._actions if action.option_strings}
        assert options
        assert {option for option in options if not re.search(rf"{option}\b", text)} == set()


def test_the_changes_name_this_version() -> None:
    assert f"## [{mooncake_sparse_client.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
