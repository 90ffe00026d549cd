"""Batches as values in etcd, and their keys: packed batches are read back, even behind an unfinished one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.storage.etcd import batch as etcd_batch
from rallypoint.storage.etcd.batch import MAX_BYTES, Assembler, pack
from rallypoint.storage.etcd.layout import Layout

RECORDS = st.lists(st.binary(max_size=40), max_size=8)
WHOLE = 3
"""The first byte of a value that is a whole batch."""

REQUEST_BYTES = 1572864
"""etcd's default limit of a request."""


@pytest.fixture(autouse=True, scope="module")
def small_values() -> Iterator[None]:
    """Split batches into parts small enough for hypothesis."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(etcd_batch, "MAX_BYTES", 16)
        yield


@given(st.lists(RECORDS, max_size=5))
def test_batches_are_read_back_in_order_and_separate(batches: list[list[bytes]]) -> None:
    assembler = Assembler()
    taken = [assembler.take(value) for batch in batches for value in pack(batch)]
    assert [records for records in taken if records] == [batch for batch in batches if batch]
    assert not assembler.inside


@given(RECORDS, RECORDS, st.data())
def test_an_unfinished_batch_is_skipped(torn: list[bytes], whole: list[bytes], data: st.DataObject) -> None:
    parts = pack(torn)
    kept = data.draw(st.integers(0, len(parts) - 1))
    assembler = Assembler()
    assert [assembler.take(value) for value in parts[:kept]] == [[]] * kept
    assert assembler.inside == bool(kept)
    assert [record for value in pack(whole) for record in assembler.take(value)] == whole


@given(st.binary(max_size=40))
def test_random_bytes_are_a_batch_or_a_value_error(value: bytes) -> None:
    assembler = Assembler()
    try:
        records = assembler.take(value)
    except ValueError:
        return
    if value[0] == WHOLE:
        assert b"".join(part[1:] for part in pack(records)) == value[1:]


@pytest.mark.parametrize("value", [b"", b"\x00rest", b"\x02rest", b"\x04", b"\x03\x05\0\0\0four", b"\x03\x05\0"])
def test_an_invalid_value_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="batch"):
        Assembler().take(value)


def test_every_value_of_a_large_batch_fits_into_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_batch, "MAX_BYTES", MAX_BYTES)
    batch = [b"a" * (3 * MAX_BYTES), b"", b"b" * (MAX_BYTES - 1), b"c"]
    values = pack(batch)
    assert len(values) == 5
    assert max(map(len, values)) == MAX_BYTES < REQUEST_BYTES
    assembler = Assembler()
    assert [record for value in values for record in assembler.take(value)] == batch
    assert len(pack([b"a" * (MAX_BYTES - 5)])) == 1, "a batch that just fits is one value"
    assert len(pack([b"a" * (MAX_BYTES - 4)])) == 2


def test_the_order_of_keys_is_the_order_of_the_log() -> None:
    layout = Layout("jobs/one")
    indices = [1, 2, 9, 10, 99, 100, 10**15]
    keys = [layout.entry(index) for index in indices]
    assert keys == sorted(keys)
    assert [layout.index(key) for key in keys] == indices
    parts = [layout.part(index, number) for index in (1, 20) for number in (0, 9, 10, 1000)]
    assert parts == sorted(parts)
    assert all(layout.parts(1) <= part < layout.parts(20) for part in parts[:4])


def test_keys_of_a_store_are_within_its_prefix() -> None:
    layout, other = Layout("jobs"), Layout("jobs2")
    mine = [layout.lease, layout.epoch, layout.leader, layout.snapshot, layout.server("a"), layout.entry(1)]
    mine.append(layout.part(1, 0))
    assert all(layout.prefix <= key < layout.end for key in mine)
    assert not any(other.prefix <= key < other.end for key in mine)
    ranges = [(layout.entries, layout.entries_end), (layout.snapshots, layout.parts(10**15))]
    inside = [[key for key in mine if first <= key < end] for first, end in ranges]
    assert inside == [[layout.entry(1)], [layout.part(1, 0)]], "deleting one kind of key deletes no other"
