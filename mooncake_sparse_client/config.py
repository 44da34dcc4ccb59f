"""Settings: where the store is, what a client may use, and how long windows are kept.

Each setting of ``MooncakeConfig`` is taken from the first place that has it: an argument, an environment
variable, the JSON file that ``MOONCAKE_CONFIG_PATH`` names, the default. Errors say which place was wrong.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Final, TypedDict, Unpack

from .checks import whole_number
from .config_places import from_environment, from_file, near
from .config_values import (
    CONFIG_PATH_VARIABLE,
    Mode,
    Setting,
    address_parts,
    checked_master,
    checked_metadata,
    checked_mode,
    checked_owner,
    checked_pool,
    checked_protocol,
    checked_seconds,
    checked_segment,
    checked_tenant,
    checked_text,
    checked_wait,
    parse_size,
)
from .errors import ConfigError
from .replication import DEFAULT_REPLICATION, Replication, checked_replication

RETENTION_VARIABLES: Final = ("MOONCAKE_SPARSE_RETENTION_INTERVAL", "VLLM_PREFIX_CACHE_RETENTION_INTERVAL")
DEFAULT_LOCAL_BUFFER: Final = 16 << 20
DEFAULT_SEGMENT: Final = 1 << 30
DEFAULT_POOL: Final = 256 << 20
#: Bytes of staging memory that a batch may need besides its values.
MIN_HEADER_ROOM: Final = 1 << 20


class FromEnv(Enum):
    """The one value that says: take it from the environment."""

    FROM_ENV = "from the environment"

    def __repr__(self) -> str:
        return "FROM_ENV"


FROM_ENV: Final = FromEnv.FROM_ENV


class MooncakeSettings(TypedDict, total=False):
    """The arguments that override environment, file and defaults. Sizes in bytes, or text like "4GB"."""

    master_server_address: str
    metadata_server: str
    protocol: str
    device_name: str
    global_segment_size: int | str
    local_buffer_size: int | str
    tenant_id: str
    local_hostname: str
    lease_seconds: float | str
    owner_address: str
    pool_size: int | str
    replication: Replication
    wait_for_master: float | str


_ARGUMENTS: Final = frozenset(MooncakeSettings.__annotations__)


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """How to reach a Mooncake store. Made by ``load_config``, which checks it."""

    #: ``host:port`` of the master; not used in shared mode.
    master_server_address: str = ""
    #: ``remote``: a user of other processes' memory. ``embedded``: this process lends ``global_segment_size``.
    #: ``shared``: a user of the memory that an owner process on this host holds.
    mode: Mode = "remote"
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    #: Bytes lent to the store; 0 unless embedded.
    global_segment_size: int = 0
    #: Bytes of the native library's own staging buffer.
    local_buffer_size: int = DEFAULT_LOCAL_BUFFER
    tenant_id: str = "default"
    #: The name that other processes reach this one by; empty: the address that leads to the master.
    local_hostname: str = ""
    #: How long the master leases a key that was asked for. Masters differ (5 s, then 10 s) and do not say;
    #: the shorter one only makes a client ask again sooner.
    lease_seconds: float = 5.0
    #: ``host:port`` of the owner process on this host; used in shared mode only.
    owner_address: str = ""
    #: Bytes of memory that values move through without a copy: a client's staging slots, and what its callers
    #: allocate. In shared mode all of it is taken at once.
    pool_size: int = DEFAULT_POOL
    #: How the store keeps what is written.
    replication: Replication = DEFAULT_REPLICATION
    #: Seconds to wait, when connecting, for a master (in shared mode an owner process) that is not up yet.
    wait_for_master: float = 0.0

    @property
    def where(self) -> str:
        """The address that is connected to: the owner's in shared mode, else the master's."""
        return self.owner_address if self.mode == "shared" else self.master_server_address

    @property
    def master_host(self) -> str:
        return address_parts(self.master_server_address)[0]

    @property
    def master_port(self) -> int:
        return address_parts(self.master_server_address)[1]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may use of the store and of this machine.

    ``max_batch_bytes``, ``max_batch_chunks``, ``max_batch_pieces``: what one put or get request holds. A piece is
    what of a value lies together in memory; with more than 2,000 of them under way over TCP, in all requests at
    once, the native library fails, which matters where embedded segments lie on several hosts.
    ``max_batch_keys``: keys of one existence request or remove; what asks for more than 1,024 keys travels in
    several, four at a time, or with ``requests_per_second`` in as few as may be. ``concurrency``: put and get
    requests in flight at once; questions are not counted. ``max_bytes_in_flight``: bytes of all put and get
    batches that are being prepared, moved or checked. ``staging_bytes``: memory for values that cannot move
    straight to and from the caller's memory, and for headers; at least ``max_batch_bytes`` and 1 MiB.
    ``requests_per_second`` and ``bytes_per_second`` (of values, read or written): None for no limit; requests
    are let through first come first served.

    Raises ``ConfigError``.
    """

    max_batch_bytes: int = 16 << 20
    max_batch_chunks: int = 512
    max_batch_keys: int = 8192
    max_batch_pieces: int = 2048
    concurrency: int = 2
    requests_per_second: int | None = None
    max_bytes_in_flight: int = 64 << 20
    staging_bytes: int = 64 << 20
    bytes_per_second: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            number = whole_number(value, f"Limits.{field.name}", ConfigError, least=1)
            object.__setattr__(self, field.name, number)
        least = self.max_batch_bytes + MIN_HEADER_ROOM
        if self.staging_bytes < least:
            raise ConfigError(
                f"Limits.staging_bytes is {self.staging_bytes}, too little for one batch of max_batch_bytes="
                f"{self.max_batch_bytes} with its headers: make it at least {least}, or the batches smaller"
            )


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention interval in tokens, and where it was set."""

    interval: int | None
    origin: str


def load_retention(given: int | FromEnv | None = FROM_ENV, environ: Mapping[str, str] | None = None) -> Retention:
    """The client's retention interval: the argument, else the first of ``RETENTION_VARIABLES`` that is set.

    Raises ``ConfigError`` that names the variable whose text is empty, negative or no number.
    """
    if given is not FROM_ENV:
        return Retention(given, "argument")
    environ = os.environ if environ is None else environ
    for variable in RETENTION_VARIABLES:
        text = environ.get(variable)
        if text is None:
            continue
        if not re.fullmatch(r"[0-9]{1,18}", text.strip()):
            raise ConfigError(
                f"{variable} is {text!r}; set it to a number of tokens (0 keeps no periodic boundary), "
                "or unset it to keep every boundary"
            )
        return Retention(int(text), variable)
    return Retention(None, "default")


def load_config(
    mode: Mode | None = None,
    *,
    config: MooncakeConfig | str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    **settings: Unpack[MooncakeSettings],
) -> MooncakeConfig:
    """Gather and check the settings: ``settings`` (see ``MooncakeSettings``), environment, file, defaults.

    ``config``: a file instead of the one that ``MOONCAKE_CONFIG_PATH`` names; or a ready ``MooncakeConfig``,
    which leaves environment and file aside. Raises ``ConfigError``. Reads a file: call it on a thread.
    """
    environ = os.environ if environ is None else environ
    found: dict[str, Setting] = {}
    if isinstance(config, MooncakeConfig):
        found |= {field.name: (getattr(config, field.name), f"config.{field.name}") for field in fields(config)}
    else:
        if config is not None and not isinstance(config, str | os.PathLike):
            raise ConfigError(f"config must be a MooncakeConfig or a file's path, not {config!r}")
        if path := config or environ.get(CONFIG_PATH_VARIABLE):
            found |= from_file(Path(path))
        found |= from_environment(environ)
    for name in settings.keys() - _ARGUMENTS:
        raise ConfigError(
            f"unknown setting {name!r}{near(name, _ARGUMENTS)}; there are {', '.join(sorted(_ARGUMENTS))}"
        )
    given = {"mode": mode, **settings}
    found |= {name: (value, f"argument {name}") for name, value in given.items() if value is not None}
    return _checked(found)


def _checked(found: Mapping[str, Setting]) -> MooncakeConfig:
    def setting(name: str, default: object) -> Setting:
        return found.get(name, (default, name))

    mode = checked_mode(*setting("mode", "remote"))
    owner, owner_origin = setting("owner_address", "")
    if owner and mode != "shared" and not setting("master_server_address", "")[0]:
        raise ConfigError(
            f"{owner_origin} is {owner!r}, but mode {mode!r} uses a master, and there is no master address: pass "
            "mode='shared' (MOONCAKE_MODE=shared) to use an owner process, or master_server_address (MOONCAKE_MASTER)"
        )
    return MooncakeConfig(
        master_server_address=checked_master(mode, *setting("master_server_address", "")),
        mode=mode,
        metadata_server=checked_metadata(mode, *setting("metadata_server", "P2PHANDSHAKE")),
        protocol=checked_protocol(mode, *setting("protocol", "tcp")),
        device_name=checked_text(*setting("device_name", "")),
        global_segment_size=checked_segment(mode, *setting("global_segment_size", DEFAULT_SEGMENT)),
        local_buffer_size=parse_size(*setting("local_buffer_size", DEFAULT_LOCAL_BUFFER)),
        tenant_id=checked_tenant(mode, *setting("tenant_id", "default")),
        local_hostname=checked_text(*setting("local_hostname", "")),
        lease_seconds=checked_seconds(*setting("lease_seconds", 5.0)),
        owner_address=checked_owner(mode, owner, owner_origin),
        pool_size=checked_pool(*setting("pool_size", DEFAULT_POOL)),
        replication=checked_replication(*setting("replication", DEFAULT_REPLICATION)),
        wait_for_master=checked_wait(*setting("wait_for_master", 0.0)),
    )
