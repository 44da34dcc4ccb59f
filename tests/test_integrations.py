"""What an integration says where its library is not installed; with it, `tests/models` has the tests."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mooncake_sparse_client import PRESETS, layout_for
from mooncake_sparse_client.core.plans import plan_put


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_library_is_named_with_the_line_that_installs_it(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from mooncake_sparse_client.errors import MissingLibraryError\n"
        "try:\n    import mooncake_sparse_client.integrations.transformers\n"
        "except MissingLibraryError as error:\n    print(error.kind, error)"
    )
    # Only what is not installed may be missing besides.
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("missing_library PyTorch and transformers 5 are needed for this integration")
    assert "pip install 'mooncake-sparse-client[transformers]'" in said


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_can_be_explained(name: str) -> None:
    layout = layout_for(name)
    plan = plan_put(layout, 5000, num_prompt_tokens=4000, retention_interval=2048)
    explained = plan.explain()
    assert len(explained.groups) == len(layout.groups)
    kept = [int(mask.sum()) for mask in plan.store_masks]
    for number, (spec, group, count) in enumerate(zip(layout.groups, explained.groups, kept, strict=True)):
        assert f"{number} {spec.name or spec.kind}" in str(explained)
        assert group.kept.chunks == count > 0
        assert group.kept.bytes == count * (spec.page_size_bytes or 0)
