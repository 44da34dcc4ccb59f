"""The examples that run a model say what they promise to say, as their readers run them."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_runs import assert_says, run, run_python

pytestmark = [pytest.mark.models, pytest.mark.timeout(180)]

#: What each example prints, as patterns in the order of its lines.
MODEL_EXAMPLES = {
    "two_processes.py": [
        r"a master serves at 127\.0\.0\.1:\d+, an owner process holds 256 MiB",
        r"the first process: 66 chunks written, 58 never offered",
        r"the second process: 992 of 1000 tokens restored, 573440 bytes",
        r"both say the same 24 tokens: (\d+ ?){24}\n",
    ],
    "precompute_model.py": [
        r"the job is done: 6 prompts of 6240 tokens",
        # Two documents' 62 whole blocks, and three more of each question.
        r"2272 tokens computed, 168 chunks written",
        r"a prompt of the corpus: 1024 of 1040 tokens restored, logits ",
        r"a new question on a document: 992 of 1040 tokens restored, logits ",
        r"the logits are those of the model without any cache",
    ],
    "serving_client.py": [
        r"warming up: first token after \d+ ms; 0 of 300 tokens were restored",
        r"cold: first token after \d+ ms; 0 of 4060 tokens were restored",
        r"warm: first token after \d+ ms; 4000 of 4060 tokens were restored",
        # The second prompt and all of the answer but its last token: whole blocks of them.
        r"second turn: first token after \d+ ms; 4080 of 4124 tokens were restored",
        r"8080 tokens restored, 4556 computed",
        r"store ok: True, requests without it: 0",
    ],
}


@pytest.mark.parametrize("name", MODEL_EXAMPLES)
def test_a_model_example(name: str, native_library: None) -> None:
    done = run(name, timeout=150)
    assert done.stderr == ""
    assert done.returncode == 0
    assert_says(done.stdout, MODEL_EXAMPLES[name])


@pytest.mark.parametrize("missing", ["torch", "transformers", "aiohttp"])
def test_the_server_says_in_a_line_what_it_lacks(missing: str) -> None:
    without = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_path('examples/serving_stack.py')"
    done = run_python("-c", without)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert missing in done.stderr
    assert "pip install 'mooncake-sparse-client[transformers]'" in done.stderr


def test_the_client_ends_with_its_server(tmp_path: Path) -> None:
    """Where the server does not start, its own line is the last one."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    done = run_python(
        "-c",
        f"import os, runpy, sys; os.environ['PYTHONPATH'] += ':{tmp_path}'; sys.argv = ['client']; "
        "runpy.run_path('examples/serving_client.py', run_name='__main__')",
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no torch here" in done.stderr
