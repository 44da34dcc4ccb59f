"""The native Mooncake library: loading it, saying what is wrong when it does not load, and what we call of it."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
from pathlib import Path
from typing import Final, Protocol

from ..errors import ConfigError, MissingLibraryError
from ..replication import DEFAULT_REPLICATION, Replication

INSTALL_LINES: Final = """
    pip install mooncake-transfer-engine-non-cuda   # any machine
    pip install mooncake-transfer-engine            # CUDA 12
    pip install mooncake-transfer-engine-cuda13     # CUDA 13
They exclude each other."""

logger = logging.getLogger(__name__)

_GLOG_LEVEL: Final = "_ZN3fLI17FLAGS_minloglevelE"
_GLOG_FATAL: Final = 3
#: What the fields of a ``Replication`` are called in the library's ``ReplicateConfig``.
_NATIVE_NAMES: Final = {
    "replica_num": "replica_num",
    "soft_pin": "soft_pin_action",
    "soft_pin_ttl_seconds": "soft_pin_ttl_ms",
    "hard_pin": "with_hard_pin",
    "preferred_segments": "preferred_segments",
    "group_id": "group_ids",
}
APT_LINE: Final = "apt-get install -y libibverbs1 libnuma1 libcurl4"


class NativeStore(Protocol):
    """The part of ``mooncake.store.MooncakeDistributedStore`` that we call. Each answer may be a code.

    ``config`` is what ``native_replication`` makes; left out, the library's own default.
    """

    def setup(self, config: dict[str, str]) -> int: ...
    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int: ...
    def close(self) -> int: ...
    def alloc_from_mem_pool(self, size: int, /) -> int: ...
    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...
    def unregister_buffer(self, buffer_ptr: int) -> int: ...
    def is_exist(self, key: str) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_put_from(
        self, keys: list[str], pointers: list[int], sizes: list[int], config: object = ...
    ) -> list[int]: ...
    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]], config: object = ...
    ) -> list[int]: ...
    def batch_get_into(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]: ...
    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]: ...
    def upsert_from(self, key: str, pointer: int, size: int, config: object = ...) -> int: ...
    def get_size(self, key: str) -> int: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...
    def remove_by_regex(self, pattern: str, force: bool) -> int: ...


def library_folders() -> list[Path]:
    """Where the package ``mooncake`` lies; none where it is not installed. Not by importing it: that may load the
    native library."""
    spec = importlib.util.find_spec("mooncake")
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


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


class HostAllocator(Protocol):
    """The part of ``mooncake.store.MooncakeHostMemAllocator`` that we call."""

    def free(self, address: int, /) -> int: ...


def host_allocator() -> HostAllocator:
    """What frees the memory that ``alloc_from_mem_pool`` gave: a native store does not, not even when it closes."""
    from mooncake import store as library

    allocator: HostAllocator = library.MooncakeHostMemAllocator()
    return allocator


def has_cuda() -> bool:
    """Whether the installed build copies to and from an accelerator's memory; the others would end the process."""
    from mooncake import store as library

    return hasattr(ctypes.CDLL(library.__file__), "cudaMemcpy")


def native_replication(replication: Replication, count: int) -> object | None:
    """The library's own form of ``replication`` for a batch of ``count`` keys; None for the library's default.

    Raises ``ConfigError`` for a setting that the installed version does not have.
    """
    if replication == DEFAULT_REPLICATION:
        return None
    from mooncake import store as library

    config: object = library.ReplicateConfig()
    for name, native_name in _NATIVE_NAMES.items():
        value = getattr(replication, name)
        if value == getattr(DEFAULT_REPLICATION, name):
            continue
        if not hasattr(config, native_name):
            raise ConfigError(
                f"Replication.{name} is {value!r}, but the installed Mooncake has no {native_name} "
                f"({library.__file__}); install a newer one, or leave {name} out"
            )
        if name == "soft_pin":
            value = library.SoftPinAction.ENABLE if value else library.SoftPinAction.DISABLE
        elif name == "soft_pin_ttl_seconds":
            value = max(1, round(value * 1000))
        elif name == "preferred_segments":
            value = list(value)
        elif name == "group_id":
            value = [value] * count  # one a key, or the library refuses the batch
        setattr(config, native_name, value)
    return config


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
