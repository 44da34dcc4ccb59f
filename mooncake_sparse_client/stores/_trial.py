"""Sets a native client up and asks it something, in a process of its own, which may hang or end without harm.

Started by its path as ``python -I -S _trial.py PARENT``, with the standard library only; what to do comes as JSON on
standard input: ``path`` (where the package ``mooncake`` lies), ``settings`` (for ``setup``) or ``owner`` (for
``setup_dummy``), a ``key``, and ``tenant`` (whether to see what the master does with tenants). It writes one JSON
object to standard output: the codes ``set_up`` and, once that is done, ``answer``, and with ``tenant`` also ``own`` and
``nobody``. The library's log goes to standard error, and it leaves without closing anything.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import uuid
from typing import Any

STDOUT = 1
PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return  # whoever asked is gone already
    wanted = json.load(sys.stdin)
    sys.path.append(wanted["path"])
    from mooncake import store as library

    native = library.MooncakeDistributedStore()
    owner = wanted.get("owner")
    code = native.setup_dummy(0, 0, owner) if owner else native.setup(wanted["settings"])
    found = {"set_up": code, "answer": ask(native, wanted["key"]) if code == 0 else None}
    if code == 0 and wanted["tenant"]:
        found["own"] = put(native)
        found["nobody"] = put_as_nobody(library, wanted["settings"])
    os.write(STDOUT, json.dumps(found).encode())
    os._exit(0)


def ask(native: Any, key: str) -> int:
    """The code of two questions: masters of other versions may understand the first, and not what reads and writes."""
    exists: int = native.is_exist(key)
    return exists if exists < 0 else int(native.get_size(key))


def put_as_nobody(library: Any, settings: dict[str, str]) -> int:
    """What the master answers to a tenant that it cannot know."""
    native = library.MooncakeDistributedStore()
    code = native.setup({**settings, "tenant_id": f"nobody-{uuid.uuid4().hex}"})
    return put(native) if code == 0 else int(code)


def put(native: Any) -> int:
    """The answer to a put of one byte, which does not stay."""
    key = f"mooncake-sparse-client:trial:{uuid.uuid4().hex}"
    code: int = native.put(key, b"-")
    if code == 0:
        native.remove(key, True)
    return code


if __name__ == "__main__":
    main()
