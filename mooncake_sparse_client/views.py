"""Views of memory."""

from __future__ import annotations

import numpy as np


def address_of(view: memoryview) -> int:
    """Where the view's bytes begin, writable or not."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
