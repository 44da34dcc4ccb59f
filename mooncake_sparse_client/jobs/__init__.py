"""Offline jobs: compute the KV cache of a corpus and put it in a store. Start with ``PrecomputeJob``."""

from .job import PrecomputeJob
from .numpy_producer import NumpyProducer
from .options import JobOptions
from .producers import Producer
from .prompts import Prompt, WrongLine, read_prompts
from .report import JobReport
from .sharding import Shard
from .verifying import VerifyReport, verify_corpus

__all__ = [
    "JobOptions",
    "JobReport",
    "NumpyProducer",
    "PrecomputeJob",
    "Producer",
    "Prompt",
    "Shard",
    "VerifyReport",
    "WrongLine",
    "read_prompts",
    "verify_corpus",
]
