"""The value header: its bytes, and each kind of damage by name."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import xxhash

from mooncake_sparse_client.core.framing import (
    FRAMED_VERSION,
    HEADER_SIZE,
    FrameMeta,
    ValueFormat,
    pack_header,
    payload_checksum,
    unpack_header,
)

PRINT = "00112233445566ff"
FRAMED = ValueFormat("framed", PRINT)
PAYLOAD = (memoryview(b"keys"), memoryview(bytearray(b"values")))
HEADER = FRAMED.header(3, "abcd.1", PAYLOAD)
META = FrameMeta(
    version=FRAMED_VERSION,
    fingerprint=bytes.fromhex(PRINT),
    group=3,
    length=10,
    checksum=xxhash.xxh3_64_intdigest(b"keysvalues"),
    name_check=xxhash.xxh3_64_intdigest(b"abcd.1"),
)


def test_the_header_is_the_documented_msgpack_array() -> None:
    assert pack_header(META) == HEADER
    assert unpack_header(HEADER) == META
    version, fingerprint, group, length, checksum, name_check, padding = msgpack.unpackb(HEADER)
    assert (version, fingerprint, group) == (1, bytes.fromhex(PRINT), b"\0\0\0\3")
    assert length == (10).to_bytes(8, "big")
    assert checksum == META.checksum.to_bytes(8, "big")
    assert name_check == META.name_check.to_bytes(8, "big")
    assert not any(padding)
    assert len(HEADER) == HEADER_SIZE == 64


def test_an_intact_value_has_no_fault_in_whatever_pieces_it_is() -> None:
    for header in (HEADER, bytearray(HEADER), memoryview(HEADER)):
        assert FRAMED.fault(header, 3, "abcd.1", PAYLOAD) is None
    assert FRAMED.fault(HEADER, 3, "abcd.1", (memoryview(b"keysvalues"),)) is None
    assert FRAMED.fault(HEADER, 3, "abcd.1", tuple(memoryview(bytes([byte])) for byte in b"keysvalues")) is None


def test_an_empty_payload_and_large_numbers_fit() -> None:
    meta = FrameMeta(127, bytes(8), 2**32 - 1, 2**64 - 1, 2**64 - 1, 2**64 - 1)
    assert unpack_header(pack_header(meta)) == meta
    header = FRAMED.header(0, "a", (memoryview(b""),))
    assert FRAMED.fault(header, 0, "a", ()) is None


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        (replace(META, version=FRAMED_VERSION + 1), "version"),
        (replace(META, version=0), "version"),
        (replace(META, fingerprint=bytes(8)), "fingerprint"),
        (replace(META, group=2), "group"),
        (replace(META, length=11), "length"),
        (replace(META, name_check=META.name_check ^ 1), "name"),
        (replace(META, checksum=META.checksum ^ 1), "checksum"),
    ],
)
def test_each_wrong_field_has_its_word(meta: FrameMeta, reason: str) -> None:
    assert FRAMED.fault(pack_header(meta), 3, "abcd.1", PAYLOAD) == reason


def test_one_flipped_payload_byte_is_a_checksum_fault() -> None:
    assert FRAMED.fault(HEADER, 3, "abcd.1", (memoryview(b"keys"), memoryview(b"walues"))) == "checksum"
    # The order of the pieces counts, not where they are cut.
    assert FRAMED.fault(HEADER, 3, "abcd.1", (PAYLOAD[1], PAYLOAD[0])) == "checksum"


def test_a_value_of_another_chunk_is_told() -> None:
    assert FRAMED.fault(HEADER, 3, "abcd.2", PAYLOAD) == "name"
    assert FRAMED.fault(HEADER, 4, "abcd.1", PAYLOAD) == "group"
    assert ValueFormat("framed", "ff" * 8).fault(HEADER, 3, "abcd.1", PAYLOAD) == "fingerprint"


@pytest.mark.parametrize(
    "header",
    [
        b"",
        HEADER[:-1],
        HEADER + b"\0",
        bytes(64),
        b"\xff" * 64,
        b"\xc1" * 64,
        b"\x97\x01".ljust(64, b"\xc0"),
        b"\xdd\xff\xff\xff\xff".ljust(64, b"\0"),
        b"\xc6\xff\xff\xff\xff".ljust(64, b"\0"),
        b"\xdf\xff\xff\xff\xff".ljust(64, b"\0"),
        b"\xdb\xff\xff\xff\xff".ljust(64, b"\0"),
        b"\xc9\xff\xff\xff\xff\x01".ljust(64, b"\0"),
        b"\x91" * 64,
        b"\x81" * 64,
        HEADER.replace(b"\x97\x01", b"\x97\xc3"),
        HEADER.replace(b"\x97\x01", b"\x97\xc0"),
        HEADER.replace(b"\xc4\x04", b"\xa4\x04"),
    ],
)
def test_what_is_no_header_is_told_without_an_exception(header: bytes) -> None:
    assert unpack_header(header) is None
    assert FRAMED.fault(header, 3, "abcd.1", PAYLOAD) == "header"


@pytest.mark.parametrize("mark", [b"\xdd", b"\xc6", b"\xdf", b"\xdb", b"\xc9"])
def test_a_hostile_length_allocates_nothing(mark: bytes) -> None:
    for hostile in (mark + b"\x7f\xff\xff\xff", b"\x97\x01" + mark + b"\x7f\xff\xff\xff"):
        tracemalloc.start()
        try:
            assert unpack_header(hostile.ljust(64, b"\1")) is None
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 100_000


def test_raw_values_have_no_header_and_no_fault() -> None:
    raw = ValueFormat("raw", PRINT)
    assert raw.header(0, "a", PAYLOAD) == b""
    assert raw.header_size == 0
    assert raw.fault(b"", 0, "a", PAYLOAD) is None
    assert (ValueFormat.version_of("raw"), ValueFormat.version_of("framed")) == (0, FRAMED_VERSION)


def test_the_checksum_is_xxh3_of_the_bytes_one_after_another() -> None:
    expected = xxhash.xxh3_64_intdigest(b"keysvalues")
    assert payload_checksum(PAYLOAD) == payload_checksum([memoryview(b"keysvalues")]) == expected
    assert payload_checksum([np.frombuffer(b"keysvalues", dtype=np.uint8).data]) == expected
    assert payload_checksum([]) == xxhash.xxh3_64_intdigest(b"")
