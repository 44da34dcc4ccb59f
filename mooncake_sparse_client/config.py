"""Settings: where the store is, what a client may use, and how long windows are kept.

Each setting of ``MooncakeConfig`` is taken from the first place that has it: an argument, an environment
variable, the JSON file that ``MOONCAKE_CONFIG_PATH`` names, the default. Errors say which place was wrong.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Final, TypedDict, Unpack

from .checks import whole_number
from .config_values import (
    CONFIG_PATH_VARIABLE,
    Mode,
    Setting,
    checked_address,
    checked_metadata,
    checked_mode,
    checked_protocol,
    checked_seconds,
    checked_segment,
    checked_text,
    parse_size,
)
from .errors import ConfigError

logger = logging.getLogger(__name__)

RETENTION_VARIABLES: Final = ("MOONCAKE_SPARSE_RETENTION_INTERVAL", "VLLM_PREFIX_CACHE_RETENTION_INTERVAL")
DEFAULT_LOCAL_BUFFER: Final = 16 << 20
DEFAULT_SEGMENT: Final = 1 << 30

_VARIABLES: Final[Mapping[str, str]] = {
    "mode": "MOONCAKE_MODE",
    "master_server_address": "MOONCAKE_MASTER",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "lease_seconds": "MOONCAKE_SPARSE_LEASE_SECONDS",
}
#: What files written for others of the field may hold, and what means nothing here.
_FOREIGN_KEYS: Final = frozenset(
    (
        *("enable_offload", "enable_ssd_offload", "ssd_offload_path", "storage_root_dir", "standalone_storage"),
        *("enable_client_http_server", "client_http_port", "master_metrics_port", "client_server_address"),
        *("check_server", "transfer_timeout", "prefer_local_alloc", "prefer_cross_layer_blocks", "extra_config"),
    )
)


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


_ARGUMENTS: Final = frozenset(MooncakeSettings.__annotations__)


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """How to reach a Mooncake store. Made by ``load_config``, which checks it."""

    #: ``host:port`` of the master.
    master_server_address: str
    #: ``remote``: a user of other processes' memory. ``embedded``: this process lends ``global_segment_size``.
    mode: Mode = "remote"
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    #: Bytes lent to the store; 0 in remote mode.
    global_segment_size: int = 0
    #: Bytes of the native library's own staging buffer.
    local_buffer_size: int = DEFAULT_LOCAL_BUFFER
    tenant_id: str = "default"
    #: The name that other processes reach this one by; empty: the address that leads to the master.
    local_hostname: str = ""
    #: How long the master leases a key that was asked for. Masters differ (5 s, then 10 s) and do not say;
    #: the shorter one only makes a client ask again sooner.
    lease_seconds: float = 5.0

    @property
    def master_host(self) -> str:
        return self.master_server_address.rpartition(":")[0].strip("[]")

    @property
    def master_port(self) -> int:
        return int(self.master_server_address.rpartition(":")[2])


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may use of the store and of this machine.

    ``max_batch_bytes``: bytes of one put or get request. ``max_batch_chunks``: chunks of one put or get.
    ``max_batch_keys``: keys of one existence question or remove. ``concurrency``: put and get requests in
    flight at once. ``requests_per_second``: None for no limit; requests are let through first come first served.

    Raises ``ConfigError``.
    """

    max_batch_bytes: int = 16 << 20
    max_batch_chunks: int = 1024
    max_batch_keys: int = 8192
    concurrency: int = 2
    requests_per_second: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_bytes", "max_batch_chunks", "max_batch_keys", "concurrency", "requests_per_second"):
            value = getattr(self, name)
            if value is None and name == "requests_per_second":
                continue
            object.__setattr__(self, name, whole_number(value, f"Limits.{name}", ConfigError, least=1))


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
            found |= _read_file(Path(path))
        found |= {name: (environ[variable], variable) for name, variable in _VARIABLES.items() if environ.get(variable)}
    for name in settings.keys() - _ARGUMENTS:
        raise ConfigError(f"unknown setting {name!r}{_near(name)}; there are {', '.join(sorted(_ARGUMENTS))}")
    given = {"mode": mode, **settings}
    found |= {name: (value, f"argument {name}") for name, value in given.items() if value is not None}
    return _checked(found)


def _read_file(path: Path) -> dict[str, Setting]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {path} ({error.strerror}); see {CONFIG_PATH_VARIABLE}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"the config file {path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"the config file {path} must hold one JSON object, not a {type(content).__name__}")
    for key in content.keys() - _VARIABLES.keys() - _FOREIGN_KEYS:
        if near := _near(key):
            raise ConfigError(f"the config file {path} has the unknown key {key!r}{near}")
        logger.warning("the config file %s has the key %r, which means nothing here", path, key)
    return {name: (content[name], f"{name} in {path}") for name in _VARIABLES if content.get(name) not in (None, "")}


def _near(name: str) -> str:
    """A guess at what was meant, as the rest of a sentence."""
    near = difflib.get_close_matches(name, [*_VARIABLES, *_ARGUMENTS], n=1, cutoff=0.8)
    return f"; did you mean {near[0]!r}?" if near else ""


def _checked(found: Mapping[str, Setting]) -> MooncakeConfig:
    def setting(name: str, default: object) -> Setting:
        return found.get(name, (default, name))

    mode = checked_mode(*setting("mode", "remote"))
    return MooncakeConfig(
        master_server_address=checked_address(*setting("master_server_address", "")),
        mode=mode,
        metadata_server=checked_metadata(*setting("metadata_server", "P2PHANDSHAKE")),
        protocol=checked_protocol(*setting("protocol", "tcp")),
        device_name=checked_text(*setting("device_name", "")),
        global_segment_size=checked_segment(mode, *setting("global_segment_size", DEFAULT_SEGMENT)),
        local_buffer_size=parse_size(*setting("local_buffer_size", DEFAULT_LOCAL_BUFFER)),
        tenant_id=checked_text(*setting("tenant_id", "default")),
        local_hostname=checked_text(*setting("local_hostname", "")),
        lease_seconds=checked_seconds(*setting("lease_seconds", 5.0)),
    )
