"""Loading the native Mooncake library, and saying what is wrong when it does not load."""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Final, Protocol

from ..errors import MissingLibraryError

INSTALL_LINES: Final = """
    pip install mooncake-transfer-engine-non-cuda   # any machine
    pip install mooncake-transfer-engine            # CUDA 12
    pip install mooncake-transfer-engine-cuda13     # CUDA 13
They exclude each other."""

logger = logging.getLogger(__name__)

_GLOG_LEVEL: Final = "_ZN3fLI17FLAGS_minloglevelE"
_GLOG_FATAL: Final = 3
APT_LINE: Final = "apt-get install -y libibverbs1 libnuma1 libcurl4"


class NativeStore(Protocol):
    """The part of ``mooncake.store.MooncakeDistributedStore`` that we call. Each answer may be a code."""

    def setup(self, config: dict[str, str]) -> int: ...
    def close(self) -> int: ...
    def is_exist(self, key: str) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]: ...
    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]: ...
    def upsert_from(self, key: str, pointer: int, size: int) -> int: ...
    def get_size(self, key: str) -> int: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...


def new_native_store() -> NativeStore:
    """A native store that is not set up yet: nothing but ``setup`` may be called on it.

    Raises ``MissingLibraryError`` with the loader's own words and the line that repairs it.
    """
    try:
        from mooncake import store as library
    except ImportError as error:
        raise missing_library(error) from error
    _hush(library.__file__)
    native: NativeStore = library.MooncakeDistributedStore()
    return native


def _hush(library: str) -> None:
    """Unless the user set ``MC_LOG_LEVEL``: keep the native log off the terminal, what is fatal aside.

    It says seventeen lines a connection and one for each key of a failure, all of which callers get as values
    and errors. At its own quietest setting a false alarm at each connection would remain, so the logging
    library's variable is set itself.
    """
    if "MC_LOG_LEVEL" in os.environ:
        return
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(library), _GLOG_LEVEL)
    except (OSError, ValueError) as error:  # another build, linked in another way
        logger.debug("the native log stays as it is: %s", error)
        return
    level.value = _GLOG_FATAL


def missing_library(error: ImportError) -> MissingLibraryError:
    """What to do about an import of ``mooncake.store`` that failed."""
    words = str(error)
    if isinstance(error, ModuleNotFoundError):
        remedy = f"install one of its builds:{INSTALL_LINES}"
    elif "libcuda" in words or "libcudart" in words or "libmlx5" in words:
        remedy = (
            "this build is for machines with CUDA; on others uninstall it and "
            "pip install mooncake-transfer-engine-non-cuda"
        )
    elif "cannot open shared object file" in words:
        remedy = f"install the system's libraries: {APT_LINE}"
    else:
        remedy = f"install a build that fits this Python and system:{INSTALL_LINES}"
    return MissingLibraryError(f"the native Mooncake library does not load: {words}; {remedy}")
