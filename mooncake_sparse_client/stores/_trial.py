"""Sets a native client up and asks it something, in a process of its own, which may hang or end without harm.

Started by its path as ``python -I -S _trial.py PARENT``, with the standard library only; what to do comes as JSON on standard
input: ``path`` (where the package ``mooncake`` lies), ``settings`` (for ``setup``) or ``owner`` (for ``setup_dummy``),
and a ``key``. It writes ``{"set_up": code, "answer": code or null}`` to standard output, the library's log goes to
standard error, and it leaves without closing anything.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

STDOUT = 1
PR_SET_PDEATHSIG = 1
LOCAL_BUFFER = 1 << 20


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return  # whoever asked is gone already
    wanted = json.load(sys.stdin)
    sys.path.append(wanted["path"])
    from mooncake import store as library

    native = library.MooncakeDistributedStore()
    owner = wanted.get("owner")
    code = native.setup_dummy(0, LOCAL_BUFFER, owner) if owner else native.setup(wanted["settings"])
    answer = native.is_exist(wanted["key"]) if code == 0 else None
    os.write(STDOUT, json.dumps({"set_up": code, "answer": answer}).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
