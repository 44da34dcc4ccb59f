"""The places that settings are taken from besides arguments: environment variables, and a JSON file."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from .config_values import CONFIG_PATH_VARIABLE, Setting
from .errors import ConfigError

logger = logging.getLogger(__name__)

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
    "owner_address": "MOONCAKE_CLIENT",
    "pool_size": "MOONCAKE_SPARSE_POOL_SIZE",
    "wait_for_master": "MOONCAKE_SPARSE_WAIT_SECONDS",
}
#: What files may call a setting too: the name that SGLang's files have for it.
_OTHER_NAMES: Final[Mapping[str, str]] = {"client_server_address": "owner_address"}
#: What files written for others of the field may hold, and what means nothing here.
_FOREIGN_KEYS: Final = frozenset(
    (
        *("enable_offload", "enable_ssd_offload", "ssd_offload_path", "storage_root_dir", "standalone_storage"),
        *("enable_client_http_server", "client_http_port", "master_metrics_port"),
        *("check_server", "transfer_timeout", "prefer_local_alloc", "prefer_cross_layer_blocks", "extra_config"),
    )
)


def from_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    """What the variables say; an empty one is not set."""
    return {name: (environ[variable], variable) for name, variable in _VARIABLES.items() if environ.get(variable)}


def from_file(path: Path) -> dict[str, Setting]:
    """What a JSON file says; null and empty text are not set. Raises ``ConfigError`` that names the file."""
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
    settings = {**_OTHER_NAMES, **{name: name for name in _VARIABLES}}  # our own name for a setting wins
    for key in content.keys() - settings.keys() - _FOREIGN_KEYS:
        if guess := near(key, settings):
            raise ConfigError(f"the config file {path} has the unknown key {key!r}{guess}")
        logger.warning("the config file %s has the key %r, which means nothing here", path, key)
    given = {key: name for key, name in settings.items() if content.get(key) not in (None, "")}
    return {name: (content[key], f"{key} in {path}") for key, name in given.items()}


def near(name: str, names: Iterable[str]) -> str:
    """A guess at what was meant, as the rest of a sentence."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    return f"; did you mean {close[0]!r}?" if close else ""
