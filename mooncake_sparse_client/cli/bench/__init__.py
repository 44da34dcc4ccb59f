"""``bench``: this client beside the plain native calls."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
