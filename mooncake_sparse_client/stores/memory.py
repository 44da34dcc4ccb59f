"""MemoryStore: a perfect store in this process's memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ..core.results import Health
from ..errors import ClientClosedError, ConfigError
from ..views import scatter
from .base import Failure, GetItem, PutItem, RemoveOutcome, check_distinct, check_items, check_prefix
from .regions import HeapMemory, StoreMemory


class MemoryStore:
    """Behaves like the real store without its faults, and shows what it holds.

    ``capacity_bytes``: None for no bound; else the values used longest ago make room for new ones. For tests,
    as a model, and to try the API where the native library is absent.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        if capacity_bytes is not None and (
            isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int) or capacity_bytes < 1
        ):
            raise ConfigError(f"capacity_bytes must be None or a positive number of bytes, not {capacity_bytes!r}")
        self._capacity = capacity_bytes
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self._nbytes = 0
        self._closed = False

    def keys(self) -> tuple[str, ...]:
        """The keys it holds, the one used longest ago first."""
        return tuple(self._values)

    @property
    def nbytes(self) -> int:
        """The bytes of all values."""
        return self._nbytes

    @property
    def max_value_bytes(self) -> int | None:
        return self._capacity

    @property
    def lease_seconds(self) -> float | None:
        return None

    @property
    def memory(self) -> StoreMemory:
        return HeapMemory()

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self._check_open()
        check_distinct(keys)
        return [self._touch(key) is not None for key in keys]

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        self._check_open()
        check_items(items, writable=False)
        return [self._put(item) for item in items]

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        self._check_open()
        check_items(items, writable=True)
        return [self._get(item) for item in items]

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        self._check_open()
        check_distinct(keys)
        return [RemoveOutcome.REMOVED if self._drop(key) else RemoveOutcome.ABSENT for key in keys]

    async def remove_prefix(self, prefix: str, *, force: bool = False) -> int:
        self._check_open()
        check_prefix(prefix)
        return sum(self._drop(key) for key in self.keys() if key.startswith(prefix))

    async def health(self) -> Health:
        self._check_open()
        return Health(ok=True)

    async def aclose(self) -> None:
        self._closed = True
        self._values.clear()
        self._nbytes = 0

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError("this MemoryStore is closed; make a new one")

    def _touch(self, key: str) -> bytes | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def _put(self, item: PutItem) -> Failure | None:
        if self._touch(item.key) is not None and not item.replace:
            return None
        value = b"".join(item.buffers)
        if not value:
            return Failure("rejected", False, "an empty value cannot be stored")
        if self._capacity is not None and len(value) > self._capacity:
            return Failure("full", False, f"a value of {len(value)} bytes is larger than the store of {self._capacity}")
        self._drop(item.key)
        self._values[item.key] = value
        self._nbytes += len(value)
        while self._capacity is not None and self._nbytes > self._capacity:
            self._drop(next(iter(self._values)))
        return None

    def _get(self, item: GetItem) -> Failure | None:
        value = self._touch(item.key)
        if value is None:
            return Failure("missing", False, f"{item.key!r} is not in the store")
        wanted = sum(buffer.nbytes for buffer in item.buffers)
        if wanted != len(value):
            return Failure("length", False, f"{item.key!r} has {len(value)} bytes, not {wanted}")
        scatter(memoryview(value), item.buffers)
        return None

    def _drop(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._nbytes -= len(value)
        return True
