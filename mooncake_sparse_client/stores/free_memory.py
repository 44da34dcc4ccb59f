"""How much memory this process may still take, as the system's files say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

#: The machine's own files; another folder for tests.
ROOT: Final = Path("/")


class _Groups(NamedTuple):
    """Where one version of the kernel's control groups says what memory a process may take."""

    own: str
    mounted: str
    limit: str
    used: str
    cached: str


_GROUPS: Final = (
    _Groups(r"^0::/(.*)$", "", "memory.max", "memory.current", "inactive_file"),
    _Groups(
        r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.*)$",
        *("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
)
_MACHINE: Final = "proc/meminfo"


def available_memory(root: Path = ROOT) -> int | None:
    """Bytes that the machine has available; None where it does not say."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text_of(root / _MACHINE), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def free_memory(root: Path) -> Iterator[tuple[int, Path]]:
    """Bytes that this process may still take, by each file that says so."""
    if (available := available_memory(root)) is not None:
        yield available, root / _MACHINE
    for kind in _GROUPS:
        mounted = root / "sys/fs/cgroup" / kind.mounted
        own = re.search(kind.own, text_of(root / "proc/self/cgroup"), re.MULTILINE)
        group = mounted / own[1] if own else mounted
        for place in (group, *group.parents):
            limit, used = text_of(place / kind.limit).strip(), text_of(place / kind.used).strip()
            if limit.isdigit() and used.isdigit():
                # Pages of files that nobody uses make way.
                cached = re.search(rf"^{kind.cached} (\d+)$", text_of(place / "memory.stat"), re.MULTILINE)
                yield max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0)), place / kind.limit
            if place == mounted:
                break


def text_of(path: Path) -> str:
    """What a file of the system says; nothing where this system has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
