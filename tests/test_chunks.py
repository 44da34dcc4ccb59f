"""Sources and sinks: which memory fits a chunk, and what a wrong one says."""

from __future__ import annotations

import ctypes
import mmap
from array import array
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from mooncake_sparse_client.chunks import check_source, open_sink, read_source
from mooncake_sparse_client.errors import InvalidBufferError


def read(found: Any, nbytes: int) -> bytes:
    """The bytes that a source's buffer stands for."""
    views = read_source(lambda group, chunk: found, 0, 0, nbytes)
    assert views is not None
    for view in views:
        assert (view.format, view.itemsize, view.ndim, view.c_contiguous) == ("B", 1, 1, True)
    return b"".join(views)


def refused(words: list[str], call: Any) -> None:
    """``call`` raises InvalidBufferError with all ``words``."""
    with pytest.raises(InvalidBufferError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


FLOATS = np.array([1.5, -2.25, 3.0], dtype=np.float32)


@pytest.mark.parametrize(
    "buffer",
    [
        b"0123456789ab",
        bytearray(b"0123456789ab"),
        memoryview(b"x0123456789ab")[1:],
        array("i", [1, -2, 3]),
        array("f", [1.5, -2.25, 3.0]),
        array("b", [-1] * 12),
        FLOATS,
        FLOATS.astype(np.float64)[:0].astype(np.uint8).tobytes() + FLOATS.tobytes(),
        FLOATS.astype(">f4"),
        np.arange(6, dtype=np.float16).reshape(2, 3),
        np.arange(6, dtype=np.uint16),
        np.arange(6, dtype=np.uint16).view("V2"),
        np.zeros(2, dtype=[("k", "<f4"), ("v", "<u2")]),
        np.array(["2024-01-01"], dtype="M8[s]").repeat(2)[:1].view(np.uint8).repeat(2)[:12],
        np.arange(12, dtype=np.int8),
        np.ones((2, 3, 2), dtype=bool),
        np.zeros((), dtype="V12"),
        np.array(FLOATS, order="C").data,
        memoryview(array("i", [1, -2, 3])),
        memoryview(bytes(12)).cast("B", (3, 4)),
        (ctypes.c_float * 3)(1.5, 2.5, 3.5),
        (ctypes.c_ubyte * 12)(*range(12)),
        np.ma.array(np.arange(12, dtype=np.uint8)),
    ],
    ids=lambda buffer: type(buffer).__name__,
)
def test_wide_items_are_stored_by_their_bytes(buffer: Any) -> None:
    plain = buffer.tobytes() if hasattr(buffer, "tobytes") else bytes(memoryview(buffer))
    assert len(plain) == 12
    assert read(buffer, 12) == plain
    assert read([buffer], 12) == plain
    assert read((buffer, buffer), 24) == plain * 2


def test_views_are_no_copies() -> None:
    numbers = np.arange(6, dtype=np.uint16)
    views = read_source({(0, 0): numbers}, 0, 0, 12)
    assert views is not None
    numbers[0] = 0xBEEF
    assert bytes(views[0][:2]) == numbers[:1].tobytes()
    flat = bytearray(8)
    (sink,) = open_sink({(0, 0): flat}, 0, 0, 8)
    sink[:] = b"restored"
    assert flat == b"restored"


def test_mapped_memory() -> None:
    with mmap.mmap(-1, 16) as memory:
        memory[:] = b"0123456789abcdef"
        (view,) = open_sink({(0, 0): memory}, 0, 0, 16)
        assert bytes(view) == b"0123456789abcdef"
        view.release()


def test_pieces_stand_one_after_another() -> None:
    pieces: list[Any] = [b"key", np.frombuffer(b"value", dtype=np.uint8), memoryview(b""), array("H", [1])]
    assert read(pieces, 10) == b"keyvalue" + array("H", [1]).tobytes()
    views = read_source(lambda group, chunk: pieces, 0, 0, 10)
    assert views is not None
    # Empty pieces go: native code takes none of zero bytes.
    assert [view.nbytes for view in views] == [3, 5, 2]
    sinks: list[Any] = [bytearray(3), np.zeros(5, dtype=np.uint8)]
    assert [view.nbytes for view in open_sink(lambda group, chunk: sinks, 0, 0, 8)] == [3, 5]


def test_empty_arrays_of_any_shape_are_empty_pieces() -> None:
    assert read([np.zeros((2, 0), dtype=np.float32), b"ab"], 2) == b"ab"
    assert read([np.zeros((2, 0)).data, b"ab"], 2) == b"ab"


def test_the_source_is_asked_for_its_group_and_chunk() -> None:
    asked = []

    def source(group: int, chunk: int) -> bytes | None:
        asked.append((group, chunk))
        return b"ab" if chunk else None

    assert read_source(source, 3, 7, 2) == (memoryview(b"ab"),)
    assert read_source(source, 3, 0, 2) is None
    assert asked == [(3, 7), (3, 0)]


def test_what_a_mapping_lacks_is_not_to_be_had() -> None:
    source = {(0, 1): b"ab"}
    assert read_source(source, 0, 1, 2) == (memoryview(b"ab"),)
    assert read_source(source, 1, 0, 2) is None
    assert read_source({(0, 0): None}, 0, 0, 2) is None  # type: ignore[dict-item]
    made: defaultdict[tuple[int, int], bytes] = defaultdict(lambda: b"ab")
    assert read_source(made, 0, 0, 2) is None
    assert not made


@pytest.mark.parametrize("found", [None, {}])
def test_a_sink_has_room_for_every_chunk(found: Any) -> None:
    sink: Any = found if isinstance(found, dict) else lambda group, chunk: found
    refused(["sink", "group 2", "chunk 5", "missing"], lambda: open_sink(sink, 2, 5, 4))


@pytest.mark.parametrize(
    ("found", "size"),
    [
        (b"", 0),
        (b"abc", 3),
        (b"abcde", 5),
        ([], 0),
        ([b"ab", b"c"], 3),
        ((b"ab", b"cde"), 5),
        (array("i", [1, 2]), 8),
        (np.zeros(4, dtype=np.float16), 8),
        (np.zeros((4, 0)), 0),
    ],
)
def test_a_size_that_does_not_fit_names_both_numbers(found: Any, size: int) -> None:
    words = ["group 1", "chunk 9", f"{size} bytes", "page_size_bytes", "4"]
    refused(["source", *words], lambda: read_source(lambda group, chunk: found, 1, 9, 4))
    refused(["sink", *words], lambda: open_sink({(1, 9): found}, 1, 9, 4))


def test_a_read_only_sink_is_refused() -> None:
    frozen = np.zeros(4, dtype=np.uint8)
    frozen.flags.writeable = False
    buffers: list[Any] = [b"abcd", frozen, memoryview(bytearray(4)).toreadonly(), [bytearray(2), b"cd"]]
    for buffer in buffers:
        refused(
            ["sink", "group 0", "chunk 3", "read-only", "bytearray"],
            lambda buffer=buffer: open_sink({(0, 3): buffer}, 0, 3, 4),
        )
        assert read(buffer, 4)


@pytest.mark.parametrize(
    "found",
    [
        memoryview(bytearray(8))[::2],
        np.zeros(8, dtype=np.uint8)[::2],
        np.zeros((2, 4), dtype=np.uint8)[:, :2],
        np.asfortranarray(np.zeros((2, 2), dtype=np.uint8)),
        np.arange(4, dtype=np.uint8)[::-1],
        np.broadcast_to(np.uint8(1), (4,)),
        [bytearray(2), memoryview(bytearray(4))[::2]],
    ],
    ids=["memoryview", "step", "columns", "fortran", "reversed", "broadcast", "piece"],
)
def test_strided_memory_is_refused(found: Any) -> None:
    for call in (read_source, open_sink):
        refused(["group 0", "chunk 3", "copy it"], lambda call=call: call({(0, 3): found}, 0, 3, 4))


@pytest.mark.parametrize(
    "found",
    ["text", 5, 1.5, [1, 2, 3, 4], [[b"ab"], b"cd"], object(), {"k": b"ab"}, [b"ab", None], iter([b"abcd"])],
    ids=lambda found: type(found).__name__,
)
def test_what_is_no_buffer_is_refused(found: Any) -> None:
    for call in (read_source, open_sink):
        refused(["group 0", "chunk 3", "no buffer"], lambda call=call: call({(0, 3): found}, 0, 3, 4))


def test_objects_are_no_plain_data() -> None:
    refused(["plain data"], lambda: read(np.array([None]), 8))
    refused(["plain data"], lambda: read(np.zeros(1, dtype=[("a", object)]), 8))


def test_released_memory_is_refused() -> None:
    view = memoryview(bytearray(4))
    view.release()
    refused(["group 0", "chunk 0"], lambda: read(view, 4))


def test_an_exception_of_the_source_is_its_own() -> None:
    class BrokenError(Exception):
        """Of the caller."""

    def source(group: int, chunk: int) -> bytes:
        raise BrokenError

    with pytest.raises(BrokenError):
        read_source(source, 0, 0, 4)
    with pytest.raises(BrokenError):
        open_sink(source, 0, 0, 4)


@pytest.mark.parametrize("source", [None, 5, "text", b"ab", [b"ab"], [((0, 0), b"ab")]])
def test_what_is_neither_callable_nor_mapping_is_no_source(source: Any) -> None:
    refused(["callable (group, chunk)", "mapping", repr(source)], lambda: check_source(source))


def test_callables_and_mappings_are_sources() -> None:
    check_source({})
    check_source(lambda group, chunk: None)
    check_source(defaultdict(bytes))
