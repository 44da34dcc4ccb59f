"""Free ports on the loopback interface, for processes of our own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Final

from ..errors import ConfigError, LocalProcessError

HOST: Final = "127.0.0.1"


def choose_ports(wanted: Mapping[str, int | None]) -> dict[str, int]:
    """The wanted ports, and free ones in place of None; all differ.

    Raises ``ConfigError`` for what is no port, and ``LocalProcessError`` for one that another program holds.
    """
    chosen: dict[str, int] = {}
    with contextlib.ExitStack() as probes:
        for name, port in sorted(wanted.items(), key=lambda item: item[1] is None):
            if port is not None and not (isinstance(port, int) and 0 < port < 65536):
                raise ConfigError(f"{name}={port} is not a port: use 1 to 65535, or None for a free one")
            try:
                probe = probes.enter_context(socket.create_server((HOST, port or 0)))
            except OSError as error:
                raise LocalProcessError(
                    f"cannot listen on {name}={port} at {HOST}: {error.strerror}; end the program that holds "
                    f"it (ss -ltnp 'sport = :{port}' shows it), pass another port, or None for a free one"
                ) from error
            chosen[name] = probe.getsockname()[1]
    return chosen
