"""Shared mode: a native client that uses the memory of an owner process (``mooncake_client``) on this host.

The native calls that set it up check little: they hold the interpreter's lock for half a minute on a port where no
owner answers, and take memory until the system ends the process. So both are looked at first.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from ..config import MooncakeConfig
from ..config_values import address_parts
from ..errors import ConfigError, ConnectError
from ..views import view_at
from . import native_codes as codes
from .free_memory import ROOT, free_memory, text_of
from .native import NativeStore, host_allocator
from .regions import MemoryPool

_MISSING_KEY: Final = "mooncake-sparse-client:nothing has this key"
_HOW_TO: Final = (
    "it must run on this host and in this process's network namespace; `python -m mooncake_sparse_client serve` "
    "starts one and prints its address for owner_address / MOONCAKE_CLIENT"
)


def check_owner(address: str, root: Path = ROOT) -> None:
    """Whether an owner process of this host serves at ``address``, whose port is known to be open.

    An owner also listens on a socket of this host that is named by its port, for memory to be handed over. Raises
    ``ConnectError``. Reads a file: call it on a thread.
    """
    name = f"@mooncake_client_{address_parts(address)[1]}.sock"
    if not any(line.endswith(name) for line in text_of(root / "proc/net/unix").splitlines()):
        raise ConnectError(
            f"port {address} is open, but it is no Mooncake owner process (mooncake_client): {_HOW_TO}",
            step="handshake",
        )


def check_free_memory(config: MooncakeConfig, root: Path = ROOT) -> None:
    """Whether the memory that shared mode takes at once can be had: too much of it would end the process.

    Raises ``ConfigError`` with both numbers. Reads files: call it on a thread.
    """
    for free, said_by in free_memory(root):
        if config.pool_size > free:
            raise ConfigError(
                f"pool_size is {config.pool_size} bytes, which mode 'shared' takes at once, but only {free} are free "
                f"({said_by}); choose a smaller pool_size"
            )


def set_up_shared(native: NativeStore, config: MooncakeConfig) -> None:
    """Connect ``native`` to the owner process, with the interpreter's lock held: a millisecond where one answers."""
    check_free_memory(config)
    # No buffer of its own: no call of ours uses one, and the library, which tells a restarted owner of all the memory
    # of the process, would have the owner refuse the second such buffer, for good (spared clients have one too).
    code = native.setup_dummy(0, 0, config.owner_address)
    if code != codes.OK:
        raise ConnectError(
            f"the native client could not be set up with the owner process at {config.owner_address}: "
            f"{codes.meaning_of(code).text} ({code}); check that a mooncake_client of this client's version serves "
            "there, and that its master is up",
            step="setup",
        )


def open_shared_pool(native: NativeStore, config: MooncakeConfig) -> MemoryPool:
    """Memory that this process and the owner share, for ``native``, which is set up.

    It is taken at once, and freed when nothing refers to it any more: the native library would keep it. Raises
    ``ConfigError`` or ``ConnectError``, and has kept nothing then. Runs on a thread, for about half a second a
    gigabyte.
    """
    size, owner = config.pool_size, f"the owner process at {config.owner_address}"
    address = native.alloc_from_mem_pool(size)
    if not address:
        raise ConfigError(
            f"the system refuses pool_size={size} bytes of memory to share with {owner}: choose a smaller pool_size, "
            "or raise the limit (ulimit -v)"
        )
    allocator = host_allocator()
    try:
        _share(native, address, size, owner)
    except BaseException:
        allocator.free(address)
        raise
    return MemoryPool(view_at(address, size), partial(allocator.free, address))


def read_nothing(native: NativeStore, address: int) -> int | None:
    """The code of a read of what is not there to ``address``, which tells whether the owner knows the memory: where it
    does, only the value is missing. None for no answer at all."""
    return next(iter(native.batch_get_into([_MISSING_KEY], [address], [1])), None)


def _share(native: NativeStore, address: int, size: int, owner: str) -> None:
    """Make the memory known to the owner, and see that values can move there."""
    code = native.register_buffer(address, size)
    if code != codes.OK:
        raise ConnectError(
            f"{owner} did not take {size} bytes of shared memory: {codes.meaning_of(code).text} ({code}); {_HOW_TO}"
        )
    found = read_nothing(native, address)
    if found == codes.OBJECT_NOT_FOUND:
        return
    code = codes.INVALID_PARAMS if found is None else found
    native.unregister_buffer(address)
    if codes.fails_whole_call(code):
        trouble = f"{codes.meaning_of(code).text} ({code}); is its master up?"
    else:
        trouble = f"it cannot reach the memory that this process shares with it ({code}): {_HOW_TO}"
    raise ConnectError(f"{owner} cannot move values: {trouble}")
