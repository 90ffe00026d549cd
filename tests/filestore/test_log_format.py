"""The bytes of a log: a truncated end is torn, and any other change is a flaw."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.filestore.log_format import HEADER_BYTES, MAGIC, PADDING, Header, frame, scan

PAYLOADS = st.lists(st.binary(max_size=60).filter(lambda data: not data.startswith(PADDING)), max_size=5)
GENERATIONS = st.integers(0, 2**64 - 1)


def log(payloads: list[bytes], generation: int) -> bytes:
    return b"".join(frame(payload, generation) for payload in payloads)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@given(GENERATIONS, st.integers(0, 2**62), st.integers(0, 2**62))
def test_headers_survive_a_round_trip(generation: int, start: int, cut: int) -> None:
    data = Header(generation, start, cut).pack()
    assert len(data) == HEADER_BYTES and data.startswith(MAGIC)
    assert Header.unpack(data + b"records") == (generation, start, cut)


def test_a_header_with_a_changed_or_missing_byte_is_invalid() -> None:
    data = Header(7, 44, 0).pack()
    assert [at for at in range(len(data)) if Header.unpack(flipped(data, at)) is not None] == []
    assert [size for size in range(len(data)) if Header.unpack(data[:size]) is not None] == []


@given(PAYLOADS, GENERATIONS)
def test_records_survive_a_round_trip(payloads: list[bytes], generation: int) -> None:
    data = log(payloads, generation)
    assert scan(data, generation) == (payloads, len(data), "")


def test_a_log_cut_at_any_byte_ends_before_the_torn_record() -> None:
    whole, last = log([b"one", b"", b"three"], 5), frame(b"the last", 5)
    for size in range(len(last)):
        assert scan(whole + last[:size], 5) == ([b"one", b"", b"three"], len(whole), "")


def test_a_changed_byte_before_the_last_record_is_a_flaw_at_its_record() -> None:
    first, second, last = frame(b"first", 5), frame(b"second", 5), frame(b"last", 5)
    for at in range(len(first), len(first + second)):
        found = scan(flipped(first + second + last, at), 5)
        assert found.payloads == [b"first"] and found.used == len(first)
        assert "does not match its checksum" in found.flaw


def test_a_changed_last_payload_counts_as_torn_but_a_changed_length_does_not() -> None:
    first, last = frame(b"first", 5), frame(b"last", 5)
    assert scan(flipped(first + last, len(first + last) - 1), 5) == ([b"first"], len(first), "")
    assert scan(flipped(first + last, len(first)), 5).flaw


@pytest.mark.parametrize("other", [0, 4, 6])
def test_records_of_another_generation_are_a_flaw(other: int) -> None:
    assert scan(frame(b"new", 5) + frame(b"old", other), 5).flaw


def test_padding_is_skipped_and_its_records_can_be_read() -> None:
    inner = log([b"a", b"b"], 6)
    outer = frame(PADDING + inner, 5)
    assert scan(outer + frame(b"c", 5), 5).payloads == [b"c"]
    assert scan(outer[-len(inner) :], 6).payloads == [b"a", b"b"]
