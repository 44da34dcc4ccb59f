"""What single settings of a store may be. Each error names the place that the value came from."""

from __future__ import annotations

import math
import re
from typing import Final, Literal, TypeAlias

from .errors import ConfigError

Mode: TypeAlias = Literal["embedded", "remote", "shared"]
#: A value, and where it came from: an argument, a variable, a file.
Setting: TypeAlias = tuple[object, str]

CONFIG_PATH_VARIABLE: Final = "MOONCAKE_CONFIG_PATH"
#: The native store refuses a smaller segment, and is left half alive by it.
MIN_SEGMENT_BYTES: Final = 16 << 20
MIN_POOL_BYTES: Final = 1 << 20

_UNITS: Final = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}


def parse_size(value: object, origin: str) -> int:
    """Bytes from an int or from text such as ``"4GB"``, ``"0.5 GiB"`` or ``"64mb"`` (powers of 1024).

    Raises ``ConfigError`` that names ``origin``.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        unit = match[2].upper().replace("IB", "B") if match else None
        factor = None if unit is None else _UNITS.get(unit, _UNITS.get(unit + "B"))
        if match and factor is not None and len(match[1]) <= 20:
            return int(float(match[1]) * factor)
    raise ConfigError(f"{origin} is {value!r}; a size is a number of bytes, or text such as '512MB' or '4GB'")


def checked_mode(value: object, origin: str) -> Mode:
    value = value.strip() if isinstance(value, str) else value
    # vLLM's word for a store whose memory other processes hold.
    if value in ("remote", "standalone-store"):
        return "remote"
    if value == "embedded":
        return "embedded"
    if value == "shared":
        return "shared"
    raise ConfigError(f"{origin} is {value!r}; the mode is 'remote', 'embedded' or 'shared'")


def checked_master(mode: Mode, value: object, origin: str) -> str:
    """``host:port`` of the master. In shared mode it is not used, and may be what only others understand."""
    if mode == "shared":
        return checked_text(value, origin)
    if not value:
        raise ConfigError(
            "no master address: pass master_server_address='host:port', set MOONCAKE_MASTER, or name a file "
            f"in {CONFIG_PATH_VARIABLE}. `python -m mooncake_sparse_client serve` starts a local one"
        )
    return _checked_address(value, origin, "the master's address is 'host:port', such as '127.0.0.1:50051'")


def checked_owner(mode: Mode, value: object, origin: str) -> str:
    """``host:port`` of the owner process on this host. It is used in shared mode only."""
    if mode != "shared":
        return checked_text(value, origin)
    if not value:
        raise ConfigError(
            "no owner address: mode 'shared' uses the memory of an owner process (mooncake_client) on this host; pass "
            "owner_address='host:port', set MOONCAKE_CLIENT, or name a file in "
            f"{CONFIG_PATH_VARIABLE}. `python -m mooncake_sparse_client serve` starts one and prints its address"
        )
    return _checked_address(value, origin, "the owner's address is 'host:port', such as '127.0.0.1:50052'")


def _checked_address(value: object, origin: str, form: str) -> str:
    pattern = r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})"
    match = re.fullmatch(pattern, value.strip()) if isinstance(value, str) else None
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ConfigError(f"{origin} is {value!r}; {form}")
    return match[0]


def address_parts(address: str) -> tuple[str, int]:
    """Host and port of a checked address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def checked_text(value: object, origin: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{origin} must be text, not {value!r}")
    return value.strip()


def checked_metadata(mode: Mode, value: object, origin: str) -> str:
    value = checked_text(value, origin)
    if mode == "shared":
        return value  # the owner's affair
    if value.upper() == "P2PHANDSHAKE":
        return "P2PHANDSHAKE"  # the native library takes another spelling for the name of an etcd host
    if value.lower().startswith("redis:"):
        raise ConfigError(f"{origin} is {value!r}: redis makes the native library end the process; use P2PHANDSHAKE")
    if not value:
        raise ConfigError(f"{origin} is empty; use P2PHANDSHAKE, etcd://... or http://...")
    return value


def checked_protocol(mode: Mode, value: object, origin: str) -> str:
    protocol = checked_text(value, origin).lower()
    if mode != "shared" and protocol not in ("tcp", "rdma"):  # in shared mode it is between owners
        raise ConfigError(
            f"{origin} is {value!r}; bytes move over 'tcp' or 'rdma': with another protocol the native library would "
            "fail, or fall back to TCP without a word"
        )
    return protocol


def checked_tenant(mode: Mode, value: object, origin: str) -> str:
    tenant = checked_text(value, origin)
    if mode == "shared" and tenant != "default" and origin.startswith("argument"):
        raise ConfigError(
            f"{origin} is {value!r}, but in mode 'shared' the tenant is the owner's: start mooncake_client with "
            f"--tenant_id={tenant}"
        )
    return tenant


def checked_seconds(value: object, origin: str) -> float:
    seconds = _number(value)
    if seconds is None or not 0 < seconds < math.inf:
        raise ConfigError(f"{origin} is {value!r}; it is a positive number of seconds")
    return seconds


def checked_wait(value: object, origin: str) -> float:
    """Seconds, 0 for no waiting."""
    seconds = _number(value)
    if seconds is None or not 0 <= seconds < math.inf:
        raise ConfigError(f"{origin} is {value!r}; it is a number of seconds, or 0 not to wait")
    return seconds


def _number(value: object) -> float | None:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def checked_segment(mode: Mode, value: object, origin: str) -> int:
    """Bytes that this process lends: 0 unless it is embedded."""
    size = parse_size(value, origin)
    if mode != "embedded":
        # A file or environment shared with embedded processes may name a size; it is not for this client.
        if size and origin.startswith("argument"):
            raise ConfigError(f"{origin} is {value!r}, but mode {mode!r} lends no memory; use mode='embedded'")
        return 0
    if size < MIN_SEGMENT_BYTES:
        raise ConfigError(f"{origin} is {size} bytes; the native store wants at least {MIN_SEGMENT_BYTES}")
    return size


def checked_pool(value: object, origin: str) -> int:
    """Bytes of the memory that values move through without a copy."""
    size = parse_size(value, origin)
    if size < MIN_POOL_BYTES:
        raise ConfigError(f"{origin} is {size} bytes; the pool wants at least {MIN_POOL_BYTES} (1 MiB)")
    return size
