"""The soak in small: every kind of fault once, under load, and nothing is wrong afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).with_name("soak.py")


@pytest.mark.usefixtures("native_library")
def test_half_a_minute_of_faults(tmp_path: Path) -> None:
    """In a process of its own: what would end that does not end the tests, and what it holds is its own."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(SOAK), "--quick", "--minutes", "0.3", "--seed", "7", "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=110,
        env={
            **{name: text for name, text in os.environ.items() if not name.startswith("MC_")},
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(report.read_text())
    assert found["tally"]["violations"] == []
    # A run in which little happened would prove little.
    assert len(found["faults"]) == 9
    outcomes = found["tally"]["outcomes"]
    for needed in ("remote get: hit", "shared get: hit", "shared get paged: hit", "remote get: cancelled"):
        assert outcomes[needed], outcomes
    assert any(count for outcome, count in outcomes.items() if outcome.startswith("damage") and "done" in outcome)
    assert found["tally"]["bytes_verified"] > 1_000_000
