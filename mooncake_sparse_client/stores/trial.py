"""Trying a native set-up in a throwaway process first.

The native library checks little: where a port is open and no Mooncake answers, its set-up holds the interpreter's lock,
and so stops every thread and the event loop, for half a minute. A process of its own may be killed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Hashable
from typing import Final

from ..config import MooncakeConfig
from ..errors import ConfigError, ConnectError
from ..waiting import settled
from . import _trial
from . import native_codes as codes
from .native import library_folders, missing_library

logger = logging.getLogger(__name__)

#: Seconds. A trial takes a fifth of one where a Mooncake answers.
_MOST: Final = 10.0
#: Seconds for which a place that answered is taken for one that answers.
_FRESH: Final = 10.0
_KEY: Final = "mooncake-sparse-client:trial"
#: What the library logs of a call that has another form on the other side.
_FOREIGN_CALL: Final = re.compile(r"invalid rpc arg|failed to deserialize|rpc function not registered")
#: Of a master that keeps tenants apart, about a tenant that it does not know; and of others, which take any.
_NOT_REGISTERED: Final = -1701
_TAKEN: Final = frozenset({codes.OK, codes.NO_AVAILABLE_HANDLE, codes.TRANSFER_FAIL})
_answered_at: dict[Hashable, float] = {}


async def try_set_up(config: MooncakeConfig, settings: dict[str, str], *, seconds: float) -> None:
    """See that a Mooncake of this version answers where ``config`` says, unless it has done so just now.

    ``settings``: what the native ``setup`` gets; not used in shared mode. Nothing of the process is left when this
    returns or raises. Raises ``ConnectError`` with its step, ``ConfigError`` (tenants), and ``MissingLibraryError``.
    """
    place = (config.where, config.mode, config.protocol, config.tenant_id, config.metadata_server)
    if time.monotonic() - _answered_at.pop(place, -_FRESH) >= _FRESH:
        await _try(config, settings, min(seconds, _MOST))
    _answered_at[place] = time.monotonic()


async def _try(config: MooncakeConfig, settings: dict[str, str], seconds: float) -> None:
    wanted = {
        "path": await asyncio.to_thread(_library_folder),
        "key": _KEY,
        "tenant": config.mode != "shared" and config.tenant_id != "default",
        **({"owner": config.owner_address} if config.mode == "shared" else {"settings": settings}),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", _trial.__file__, str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # Its log is read here, and not to go to files.
        env={**{name: os.environ[name] for name in os.environ if name != "MC_LOG_DIR"}, "MC_LOG_LEVEL": "INFO"},
    )
    try:
        async with asyncio.timeout(seconds):
            said, log = await process.communicate(json.dumps(wanted).encode())
    except TimeoutError:
        raise _no_answer(config, f"nothing came back within {seconds:.3g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await settled(asyncio.create_task(process.wait()))
        process._transport.close()  # type: ignore[attr-defined]  # its pipes, which a cancelled ``communicate`` leaves
    _judge(config, process.returncode, said.decode(errors="replace"), log.decode(errors="replace"))


def _judge(config: MooncakeConfig, status: int | None, said: str, log: str) -> None:
    """Raises what the trial has shown to be wrong."""
    try:
        found = json.loads(said)
        set_up, answer = int(found["set_up"]), found["answer"]
    except (ValueError, KeyError, TypeError):
        words = " ".join(log.splitlines()[-1:])
        if "ImportError" in words or "ModuleNotFoundError" in words:
            raise missing_library(ImportError(words.partition(": ")[2])) from None
        raise ConnectError(
            f"trying to connect to {config.where} in a process of its own ended it (status {status}): {words}",
            step="setup",
        ) from None
    if set_up == codes.OK and answer is not None and not codes.is_no_answer(answer):
        _judge_tenants(config, found)
        return
    versions = re.search(r"[Vv]ersion mismatch[^\n]*", log)
    if versions or (set_up == codes.OK and _FOREIGN_CALL.search(log)):
        said = versions[0] if versions else "it does not understand this version's requests"
        raise ConnectError(
            f"the Mooncake at {config.where} is of another version than this process's library: {said}; install the "
            "same version of mooncake-transfer-engine on both sides",
            step="version",
        )
    code = set_up if set_up != codes.OK else answer
    if config.mode != "shared" and config.metadata_server != "P2PHANDSHAKE" and "master_client.cpp" not in log:
        raise ConnectError(
            f"the master at {config.where} answers, but not the metadata server {config.metadata_server}: "
            f"{codes.meaning_of(code).text} ({code}); correct metadata_server / MOONCAKE_TE_META_DATA_SERVER",
            step="metadata",
        )
    raise _no_answer(config, f"{codes.meaning_of(code).text} ({code})")


def _judge_tenants(config: MooncakeConfig, found: dict[str, int]) -> None:
    own, nobody = found.get("own"), found.get("nobody")
    if own == _NOT_REGISTERED:
        raise ConfigError(
            f"the master at {config.where} does not know tenant_id {config.tenant_id!r}: register it "
            "there, with a quota"
        )
    if nobody in _TAKEN:
        raise ConfigError(
            f"tenant_id is {config.tenant_id!r}, but the master at {config.where} keeps no tenants apart: all would "
            "share one namespace; start it with --enable_multi_tenants, or leave tenant_id out"
        )
    if nobody not in (None, _NOT_REGISTERED):
        logger.warning(
            "whether the master at %s keeps tenants apart cannot be told (%s); without --enable_multi_tenants tenant "
            "%r shares one namespace with all others",
            *(config.where, nobody, config.tenant_id),
        )


def _no_answer(config: MooncakeConfig, trouble: str) -> ConnectError:
    who = "owner process (mooncake_client)" if config.mode == "shared" else "master"
    return ConnectError(
        f"port {config.where} is open, but no Mooncake {who} of this version answers there: {trouble}; is it the right "
        f"port (not that of its metrics), and does the {who} still run?",
        step="handshake",
    )


def _library_folder() -> str:
    """What the trial must have on its path to import ``mooncake``."""
    try:
        for folder in library_folders():
            return str(folder.parent)
    except ImportError as error:
        raise missing_library(error) from error
    raise missing_library(ModuleNotFoundError("No module named 'mooncake'"))
