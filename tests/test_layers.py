"""Who may import whom: cli > jobs > client > data plane > chunks, stores > core > errors, and the core does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mooncake_sparse_client

PACKAGE = Path(mooncake_sparse_client.__file__).parent
#: What each place may import of the package, besides itself. What is not listed is the client's own layer.
ALLOWED = {
    "errors": set(),
    "checks": {"errors"},
    "waiting": {"errors"},
    "views": set(),
    "config_values": {"errors"},
    "config_places": {"errors", "config_values"},
    "replication": {"errors", "checks", "config_values"},
    "config": {"errors", "checks", "config_values", "config_places", "replication"},
    "core": {"errors", "checks"},
    "resilience": {"errors", "checks"},
    "block_memory": {"errors", "checks"},
    "paged": {"errors", "core", "block_memory"},
    "chunks": {"errors", "views", "paged"},
    "stores": {"errors", "checks", "core", "config", "config_values", "replication", "resilience", "views", "waiting"},
    "identity": {"errors", "core"},
    "integrations": {"errors", "checks", "core"},
    "data_plane": {
        *("errors", "checks", "core", "config", "resilience", "identity", "waiting", "views"),
        *("block_memory", "paged", "chunks", "stores"),
    },
}
#: Inside the core, from the bottom: a module imports only from lines above its own.
CORE_ORDER = [
    {"encoding"},
    {"layout", "hashing", "tally", "tables"},
    {"masks", "keys", "sequence", "presets", "framing"},
    {"prefix", "known", "reasons"},
    {"search"},
    {"explain"},
    {"plans"},
    {"results"},
]


def imports(path: Path) -> set[str]:
    """Full names of all that a module imports."""
    package = ("mooncake_sparse_client", *path.relative_to(PACKAGE).with_suffix("").parts)[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            stem = ".".join(part for part in (base, node.module or "") if part)
            found |= {stem} if node.module else {f"{stem}.{alias.name}" for alias in node.names}
    return found


def inner(name: str) -> list[str]:
    """The parts of a name below the package, none for a foreign one."""
    parts = name.split(".")
    return parts[1:] if parts[0] == "mooncake_sparse_client" else []


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_below(path: Path) -> None:
    place = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for name in imports(path):
        target = inner(name)
        if target and place in ALLOWED:
            assert target[0] == place or target[0] in ALLOWED[place], f"{path.name} imports {name}"
        if target and place != "cli":
            assert target[0] != "cli", f"{path.name} imports {name}"
        if target and place not in ("cli", "jobs"):
            assert target[0] != "jobs", f"{path.name} imports {name}"
        if target and place not in ("cli", "integrations"):
            assert target[0] != "integrations", f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_the_core_is_layered_and_does_nothing(path: Path) -> None:
    ranks = {name: rank for rank, names in enumerate(CORE_ORDER) for name in names}
    for name in imports(path):
        target = inner(name)
        if len(target) > 1:
            assert ranks[target[1]] < ranks[path.stem], f"core/{path.name} imports {name}"
        assert name.split(".")[0] not in {"asyncio", "mooncake", "torch", "socket", "subprocess"}, path.name


def test_importing_the_package_loads_no_native_library() -> None:
    foreign = {"mooncake", "torch", "transformers", "aiohttp", "ray", "pyarrow", "matplotlib"}
    code = f"import sys, mooncake_sparse_client; print(sorted({foreign} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"


def test_public_names_are_sorted_and_there() -> None:
    names = mooncake_sparse_client.__all__
    assert len(set(names)) == len(names)
    for name in names:
        assert hasattr(mooncake_sparse_client, name)
