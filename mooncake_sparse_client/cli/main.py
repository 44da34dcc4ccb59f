"""The command line's entry: ``python -m mooncake_sparse_client COMMAND``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..errors import SparseStoreError
from . import bench, demo, explain, precompute, serve, verify

Run: TypeAlias = Callable[[argparse.Namespace], int]
_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Run, str]] = {
    "bench": (
        bench.add_arguments,
        bench.run,
        "measure this client beside the plain native calls, or its lookups beside the plain way",
    ),
    "demo": (demo.add_arguments, demo.run, "replay a request trace on a Mooncake store and show what masks save"),
    "explain": (explain.add_arguments, explain.run, "show which chunks a put keeps, and why, and draw them"),
    "precompute": (
        precompute.add_arguments,
        precompute.run,
        "compute what a store lacks of the KV cache of a corpus, and put it there",
    ),
    "serve": (serve.add_arguments, serve.run, "run a local Mooncake (master and owner) to develop against"),
    "verify": (
        verify.add_arguments,
        verify.run,
        "read a corpus's KV cache back, and say what of it is there, damaged or gone",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 the command found something wrong, 2 it could not run."""
    parser = argparse.ArgumentParser(
        prog="python -m mooncake_sparse_client",
        description="A KV cache in a Mooncake store that keeps only what a later prefix hit can reach.",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show the client's own log")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_arguments, _, summary) in _COMMANDS.items():
        add_arguments(commands.add_parser(name, help=summary, description=summary))
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="%(name)s: %(message)s")
    try:
        status = _COMMANDS[arguments.command][1](arguments)
        if sys.stdout is not None:  # whoever started this may have closed it
            sys.stdout.flush()
        return status
    except SparseStoreError as error:
        print(f"{arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left (`| head`); spare Python's own complaint when it flushes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
