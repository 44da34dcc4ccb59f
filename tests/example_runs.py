"""Examples as their readers run them: each a script of its own, started from the top of the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(name: str, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return run_python(f"examples/{name}", *arguments, timeout=timeout)


def run_python(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # this checkout's package, installed or not
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def assert_says(output: str, patterns: Sequence[str]) -> None:
    position = 0
    for pattern in patterns:
        found = re.compile(pattern).search(output, position)
        assert found, f"no {pattern!r} from here on: {output[position:]!r}"
        position = found.end()
