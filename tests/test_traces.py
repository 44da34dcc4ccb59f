"""What the rules are worth on request traces: public ones where they are at hand, a made-up one anywhere.

``MOONCAKE_SPARSE_TRACES`` names the folder with ``conversation_trace.jsonl`` and ``synthetic_trace.jsonl`` of
the Mooncake project's FAST'25 release.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from mooncake_sparse_client import layout_for
from mooncake_sparse_client.cli.simulate import ModelCounts, Policy, simulate
from mooncake_sparse_client.cli.trace import Request, make_workload, read_trace

ROOT = Path(__file__).parent.parent
VARIABLE = "MOONCAKE_SPARSE_TRACES"
FOLDER = os.environ.get(VARIABLE)  # now: a test's own environment has no such settings
LAYOUT = layout_for("deepseek-v4")
DENSE, THIN, LEARNED = Policy(None), Policy(0, learn_junctions=False), Policy(0)


def trace_path(name: str) -> Path:
    if not FOLDER:
        pytest.skip(f"{VARIABLE} does not name a folder with the public Mooncake traces")
    return Path(FOLDER, f"{name}_trace.jsonl")


#: The counts of a policy over one whole trace.
Counted: TypeAlias = Callable[[Policy], ModelCounts]


def counted_on(requests: Sequence[Request]) -> Counted:
    """Each policy is counted once a trace."""
    return functools.cache(lambda policy: simulate(LAYOUT, requests, policy))


@pytest.fixture(scope="module")
def conversation() -> Counted:
    return counted_on(read_trace(trace_path("conversation")))


@pytest.fixture(scope="module")
def synthetic() -> Counted:
    return counted_on(read_trace(trace_path("synthetic")))


@pytest.fixture(scope="module")
def made() -> Counted:
    return counted_on(make_workload())


@pytest.mark.parametrize(
    ("trace", "interval"),
    [("conversation", 0), ("synthetic", 0), ("synthetic", 8192), ("made", 0), ("made", 2048), ("made", 8192)],
)
def test_learning_gains_hits_for_hardly_any_bytes(trace: str, interval: int, request: pytest.FixtureRequest) -> None:
    counted: Counted = request.getfixturevalue(trace)
    dense, learned = counted(DENSE), counted(Policy(interval))
    plain = counted(Policy(interval, learn_junctions=False))
    assert plain.hit_tokens <= learned.hit_tokens <= dense.hit_tokens
    assert plain.total_written.bytes <= learned.total_written.bytes <= 1.03 * plain.total_written.bytes
    if interval == 0:
        assert plain.hit_tokens < learned.hit_tokens


@pytest.mark.parametrize("trace", ["synthetic", "made"])
def test_masks_alone_cost_no_hit(trace: str, request: pytest.FixtureRequest) -> None:
    counted: Counted = request.getfixturevalue(trace)
    dense, unmasked = counted(DENSE), counted(Policy(None, masked=False))
    assert dense.hit_tokens == unmasked.hit_tokens
    assert dense.total_written.bytes < unmasked.total_written.bytes / 2
    assert dense.written[0] == unmasked.written[0] == counted(THIN).written[0]  # full attention keeps everything


def test_an_interval_keeps_nearly_all_hits_of_the_made_workload(made: Counted) -> None:
    dense, kept = made(DENSE), made(Policy(2048))
    assert kept.hit_tokens >= 0.97 * dense.hit_tokens
    assert kept.total_written.bytes <= dense.total_written.bytes / 2


@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_an_interval_keeps_nearly_all_hits_for_a_third_of_the_bytes(trace: str, request: pytest.FixtureRequest) -> None:
    counted: Counted = request.getfixturevalue(trace)
    dense, kept = counted(DENSE), counted(Policy(8192))
    assert kept.hit_tokens >= 0.97 * dense.hit_tokens
    assert kept.total_written.bytes <= dense.total_written.bytes / 3


@pytest.mark.parametrize(
    ("trace", "policy", "hit_tokens", "share_of_dense_bytes"),
    [
        ("conversation", DENSE, 53_447_424, 1),
        ("conversation", THIN, 50_022_400, 0.114),
        ("conversation", LEARNED, 51_233_792, 0.115),
        ("conversation", Policy(8192), 52_368_384, 0.137),
        ("synthetic", DENSE, 39_462_400, 1),
        ("synthetic", THIN, 30_808_320, 0.098),
        ("synthetic", LEARNED, 34_872_576, 0.100),
        ("synthetic", Policy(8192), 38_878_464, 0.122),
    ],
)
def test_known_figures(
    trace: str, policy: Policy, hit_tokens: int, share_of_dense_bytes: float, request: pytest.FixtureRequest
) -> None:
    counted: Counted = request.getfixturevalue(trace)
    assert counted(policy).hit_tokens == hit_tokens
    share = counted(policy).total_written.bytes / counted(DENSE).total_written.bytes
    assert share == pytest.approx(share_of_dense_bytes, abs=0.0005)


def test_the_size_of_the_whole_trace(conversation: Counted) -> None:
    assert conversation(DENSE).total_written.bytes / (1 << 40) == pytest.approx(5.120, abs=0.0005)


@pytest.mark.usefixtures("native_library")
def test_a_trace_on_a_real_store(tmp_path: Path) -> None:
    """Three hundred requests of a public trace, every byte read back and compared."""
    path = trace_path("conversation")
    figures_path = tmp_path / "figures.json"
    arguments = ["--trace", str(path), "--requests", "300", "--store", "local", "--json", str(figures_path)]
    done = subprocess.run(
        [sys.executable, "-m", "mooncake_sparse_client", "demo", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    figures = json.loads(figures_path.read_text())
    assert figures["requests"] == 300
    assert figures["tokens"] == sum(request.num_tokens for request in read_trace(path, 300))
    assert figures["wrong_bytes"] == 0
    assert figures["verified_bytes"] == figures["read"]["bytes"] > 20 << 20
    assert figures["failed"]["chunks"] == 0
    same = figures["models"]["same"]
    assert figures["hit_tokens"] == same["hit_tokens"] > 0
    assert [group["written"] for group in figures["groups"]] == same["groups"]
