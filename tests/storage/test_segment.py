"""The bytes of a segment: every torn last frame is recognized as torn, and every flipped bit as damage.

A log here has three frames; the last one has several sectors, some of them with only zeros or a single bit: whatever
the payload, bytes that were never written must not be confused with damaged ones.
"""

from __future__ import annotations

import io
import itertools
import random
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.storage.logs import frame, scanned

from rallypoint.storage.errors import StorageDamaged
from rallypoint.storage.file.segment import SECTOR_BYTES, SegmentTail, encode, frame_bytes, scan

FIRST = 41
"""The number of the first frame."""

PAYLOADS = {
    "random": [random.Random(1).randbytes(1700), b"", b"end"],
    "zeros": [bytes(1700)],
    "one bit": [bytes(1000) + b"\x01" + bytes(699)],
    "last bit": [bytes(475) + b"\x01"],
    "first of a sector": [bytes(476) + b"\x80"],
    "another log": [frame(FIRST + 3, b"x") * 4],
}


def log(last: list[bytes]) -> tuple[bytes, int]:
    """Return a log of three frames, and where the third begins."""
    earlier = frame(FIRST, b"one", b"uno") + frame(FIRST + 1, b"two" * 300)
    return earlier + frame(FIRST + 2, *last), len(earlier)


EARLIER = [[b"one", b"uno"], [b"two" * 300]]


def read(data: bytes) -> tuple[list[list[bytes]], SegmentTail]:
    return scanned(scan(io.BytesIO(data), "the log", FIRST))


def damage(data: bytes) -> StorageDamaged:
    with pytest.raises(StorageDamaged) as caught:
        read(data)
    assert caught.value.path == "the log" and f"byte {caught.value.offset}" in str(caught.value)
    return caught.value


def reseal(data: bytearray) -> None:
    """Correct the checksum of a header."""
    data[28:32] = struct.pack("<I", zlib.crc32(data[:28]))


every_payload = pytest.mark.parametrize("last", PAYLOADS.values(), ids=PAYLOADS.keys())


# Round trips


@given(st.lists(st.lists(st.binary(max_size=2000), min_size=1, max_size=6), max_size=5), st.integers(0, 3))
def test_frames_survive_a_round_trip(batches: list[list[bytes]], preallocated: int) -> None:
    data = b"".join(frame(FIRST + index, *batch) for index, batch in enumerate(batches))
    found, tail = read(data + bytes(700 * preallocated))
    assert found == batches
    assert tail == SegmentTail(len(data), FIRST + len(batches), torn=False)


@pytest.mark.parametrize("near", [480, 480 + 508, 480 + 2047 * 508, 480 + 4095 * 508])
@pytest.mark.parametrize("off_by", [-5, -4, -3, 0, 1])
def test_sizes_around_every_boundary_survive_a_round_trip(near: int, off_by: int) -> None:
    record = random.Random(near).randbytes(near + off_by)
    pieces = list(encode([record], FIRST))
    assert pieces[-1][0] == 0, "the piece with the header comes last"
    data = frame(FIRST, record)
    assert [at for at, _ in sorted(pieces)] == list(range(0, len(data), 1 << 20))
    assert len(data) == frame_bytes([record]) and len(data) % SECTOR_BYTES == 0
    assert len(data) - len(record) - 36 < SECTOR_BYTES + len(record) // 508 * 4, "no more padding than needed"
    assert read(data)[0] == [[record]]


def test_a_batch_of_many_records_survives_a_round_trip() -> None:
    batch = [random.Random(size).randbytes(size) for size in range(2500)]
    assert read(frame(FIRST, *batch, b"", b""))[0] == [[*batch, b"", b""]]


# Interrupted writes are torn


@every_payload
@pytest.mark.parametrize("preallocated", [False, True])
def test_a_truncated_last_frame_is_torn(last: list[bytes], preallocated: bool) -> None:
    data, start = log(last)
    for end in range(start, len(data)):
        cut = data[:end]
        if preallocated and end % SECTOR_BYTES == 0:
            cut += bytes(4 * SECTOR_BYTES)
        found, tail = read(cut)
        assert found == EARLIER
        assert tail == SegmentTail(start, FIRST + 2, torn=end > start)


@every_payload
def test_a_last_frame_with_missing_sectors_is_torn(last: list[bytes]) -> None:
    data, start = log(last)
    offsets = range(start, len(data), SECTOR_BYTES)
    for count in range(1, len(offsets) + 1):
        for missing in itertools.combinations(offsets, count):
            torn = bytearray(data)
            for offset in missing:
                torn[offset : offset + SECTOR_BYTES] = bytes(SECTOR_BYTES)
            written = count < len(offsets)
            for size in (*offsets, len(torn), len(torn) + 5000):
                shown = bytes(torn[:size].ljust(size, b"\0"))
                found, tail = read(shown)
                assert found == EARLIER
                assert tail == SegmentTail(start, FIRST + 2, torn=any(shown[start:]))
                assert written or not tail.torn


def test_a_large_frame_without_its_header_is_torn() -> None:
    data = frame(FIRST, bytes(3 << 20))
    torn = bytes(SECTOR_BYTES) + data[SECTOR_BYTES : 2 << 20] + bytes(1 << 20)
    assert read(torn) == ([], SegmentTail(0, FIRST, torn=True))


# Everything else is damage


@every_payload
def test_a_changed_byte_is_damage(last: list[bytes]) -> None:
    data, _ = log(last)
    starts = [0, SECTOR_BYTES, 3 * SECTOR_BYTES]
    for at, tail in itertools.product(range(len(data)), (b"", bytes(1024))):
        frame_start = max(start for start in starts if start <= at)
        for changed in {data[at] ^ 1 << (at % 8), 0, 0xFF, ord("m")} - {data[at]}:
            error = damage(data[:at] + bytes([changed]) + data[at + 1 :] + tail)
            assert error.offset in (frame_start, at - at % SECTOR_BYTES), (at, error)


def test_a_flipped_bit_in_a_header_is_damage() -> None:
    data, start = log([bytes(600)])
    for bit in range(start * 8, (start + 40) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert damage(bytes(flipped)).offset == start


@every_payload
def test_a_missing_sector_before_the_last_frame_is_damage(last: list[bytes]) -> None:
    data, start = log(last)
    for missing in range(0, start, SECTOR_BYTES):
        error = damage(data[:missing] + bytes(SECTOR_BYTES) + data[missing + SECTOR_BYTES :])
        assert error.offset == (missing and SECTOR_BYTES)


@every_payload
def test_a_torn_frame_with_data_behind_it_is_damage(last: list[bytes]) -> None:
    data, start = log(last)
    whole = len(data)
    sectors = range(start, whole, SECTOR_BYTES)
    for missing in sectors if len(sectors) > 1 else ():
        torn = data[:missing] + bytes(SECTOR_BYTES) + data[missing + SECTOR_BYTES :]
        assert damage(torn + frame(FIRST + 3, b"next")).offset == start
        assert damage(torn + bytes(1024) + frame(FIRST + 3, b"next")).offset == start
        assert damage(torn + bytes(1024) + b"garbage").offset in (start, whole + 1024)


@pytest.mark.parametrize("at", [0, 1, 511, 512, 100_000, 2 << 20])
@pytest.mark.parametrize("garbage", [b"\x01", b"garbage", b"RALY" + b"x" * 60, b"R", b"mor3"])
def test_garbage_after_the_last_frame_is_damage(at: int, garbage: bytes) -> None:
    data, _ = log([b"last"])
    where = len(data) + at
    if at == 0 and garbage == b"R":
        garbage += bytes(600)  # alone it could be the beginning of a frame
    error = damage(data + bytes(at) + garbage + bytes(10))
    assert error.offset in (len(data), where - where % SECTOR_BYTES)


def test_frames_out_of_order_are_damage() -> None:
    one, two, three = (frame(FIRST + index, b"%d" % index) for index in range(3))
    assert damage(one + three).offset == len(one)
    assert f"number {FIRST + 2}, expected {FIRST + 1}" in damage(one + three).why
    assert damage(one + one).offset == len(one)
    assert damage(two).offset == 0
    assert damage(one + two + three + one).offset == 3 * SECTOR_BYTES


def test_the_checksum_of_another_frame_number_is_damage() -> None:
    """A valid header with the checksum that its frame would have under the next number."""
    record = random.Random(2).randbytes(900)
    data, other = bytearray(frame(FIRST, record)), frame(FIRST + 1, record)
    data[8:12] = other[8:12]
    reseal(data)
    assert damage(bytes(data)).why == "a frame does not match its checksum"


def test_a_torn_frame_with_a_damaged_sector_is_damage() -> None:
    """Even with a missing sector, the others must be intact."""
    data, start = log([bytes(1700)])
    torn = bytearray(data)
    torn[start + SECTOR_BYTES : start + 2 * SECTOR_BYTES] = bytes(SECTOR_BYTES)
    assert read(bytes(torn))[1].torn
    torn[start + 2 * SECTOR_BYTES + 3] ^= 1
    assert damage(bytes(torn)).offset == start + 2 * SECTOR_BYTES


def test_a_header_of_another_format_is_damage() -> None:
    data = bytearray(frame(FIRST, b"x"))
    data[:4] = b"more"
    reseal(data)
    assert damage(bytes(data)).offset == 0


def test_a_later_format_version_is_named() -> None:
    data = bytearray(frame(FIRST, b"x"))
    data[4] = 9
    reseal(data)
    assert "format version 9" in damage(bytes(data)).why


@pytest.mark.parametrize("length", [0, 93, 97, 99, 101, 2**32 - 1])
def test_records_that_do_not_fill_their_frame_are_damage(length: int) -> None:
    data = bytearray(frame(FIRST, b"\xff" * 100))
    data[32:36] = struct.pack("<I", length)
    data[8:12] = struct.pack("<I", zlib.crc32(data[32:], FIRST))
    reseal(data)
    assert "do not fill" in damage(bytes(data)).why
