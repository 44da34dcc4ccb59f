"""The end of the process, while native clients are open.

The native library closes its clients when the process ends, which takes a second or two, but minutes where the other
side hangs; and in a fork, whose copies of them have no threads, it would end the process by a signal, or hang. Then
the process leaves without it, with the exit status that it has.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from .native import NativeStore

T = TypeVar("T")

#: Seconds that a client may take to answer when the process ends. A living one needs a millisecond.
_LAST_WORD: Final = 1.0
_ASKED: Final = "mooncake-sparse-client:still there"
#: Native clients that the library is to close. They must not be collected: that closes them too.
_open: list[NativeStore] = []
#: Whether there is one that cannot be closed.
_stuck = False


def opened(native: NativeStore) -> None:
    """From now on ``native`` is set up."""
    closed(native)
    _open.append(native)


def closed(native: NativeStore) -> None:
    """From now on ``native`` may be collected."""
    _open[:] = [other for other in _open if other is not native]


def leave(native: NativeStore, memory: object) -> None:
    """Leave ``native``, which cannot be closed, and its memory to the end of the process."""
    global _stuck
    _stuck = True
    closed(native)
    _keep_for_ever(native)
    _keep_for_ever(memory)


def _keep_for_ever(thing: object) -> None:
    """Not even the interpreter's end collects it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def answer_within(seconds: float, call: Callable[[], T]) -> T | None:
    """What ``call`` answers in so many seconds; None if nothing. Then its thread goes on, and holds up nobody."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(call()), name="mooncake-last-word", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def answers(native: NativeStore, seconds: float) -> bool:
    """Whether the other side of ``native`` answers in so many seconds."""

    def ask() -> bool:
        # The first call on a connection to what has restarted since fails at once.
        return any(native.is_exist(_ASKED) >= 0 for _ in range(2))

    return bool(answer_within(seconds, ask))


def _at_exit() -> None:
    """Calls in flight are over by now: the interpreter waits for the threads of its pools."""
    if _stuck or not all(answers(native, _LAST_WORD) for native in _open):
        _end_without_the_library()


def _in_fork() -> None:
    if _open or _stuck:
        _end_without_the_library()


def _end_without_the_library() -> None:
    """Have the process end before the library's own end of it, which was registered earlier and so comes later."""
    for native in _open:
        _keep_for_ever(native)  # collecting it would close it
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)  # is called with the exit status


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_fork)
