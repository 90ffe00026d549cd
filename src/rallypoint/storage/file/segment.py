"""The format of log segments and snapshots: frames, and the verdict on the end of a file. Pure: opens no files.

A file is a sequence of frames. A frame contains one batch of records, begins at a multiple of 512 bytes (a sector), and
is padded with zeros to the next one. Its sequence number is one more than that of the previous frame.

    first sector     START, version, kind, checksum of the rest of the frame, payload length, sequence number, checksum
                     of these; then 480 bytes of payload
    other sectors    MORE, then 508 bytes of payload
    payload          for each record its length, then its bytes

The checksum of a frame covers every byte of it, including the padding, and is seeded with the sequence number. Space
after the last frame may be preallocated: zeros mean "nothing written yet".

A disk writes a sector entirely or not at all, and the sectors of one write in any order; a write of a killed process
may stop after any page. So a crash during the write of a frame leaves a subset of its sectors; the others are still
zero or past the end of the file. Since all earlier frames were synced, and none follows, the verdict at an offset
where no complete frame begins is

    end       zeros, or nothing, up to the end of the file
    torn      a frame of which at least one sector is zero or missing, every other sector is in its place, and only
              zeros follow. If the first sector is missing, the length is unknown, and any number of MORE sectors may
              follow
    damage    everything else: a header or a frame whose bytes are all present but do not match the checksum, bytes
              outside any frame, a later frame behind a bad one, an unexpected sequence number

START and MORE decide the hard cases. No written sector is all zeros, even if its payload is, and changing one byte
cannot make it so: an acknowledged frame with a flipped byte is never mistaken for a torn one. No payload reaches the
first bytes of a sector, so none can look like a later frame. A header fits in its sector, so it is never written in
part. One case is indistinguishable from a torn frame: an acknowledged last frame of which the disk lost a whole sector.

Callers decide about a torn frame: in the last segment it is cut off, elsewhere it is damage too.

Rejected: frames packed without padding, as in etcd. Commits of 60 bytes would take 100 bytes instead of 512, and no
less time; but headers would straddle sectors, each commit would rewrite a sector with acknowledged data, and a payload
of zeros with a flipped byte would pass for a torn frame.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from rallypoint.storage.errors import StorageDamaged

__all__ = ["BATCH", "CHUNKS", "END", "SECTOR_BYTES", "SegmentFrame", "SegmentTail", "encode", "frame_bytes", "scan"]

SECTOR_BYTES = 512
"""The unit that a disk writes entirely or not at all; frames begin at multiples of it."""

BATCH, CHUNKS, END = 1, 2, 3
"""Kinds of frames: the records of one commit; chunks of a snapshot; the end of a snapshot."""

START, MORE = b"RALY", b"more"  # they differ in every byte
VERSION = 1

_FIELDS = struct.Struct("<4sBBxxIQQ")
_CHECK = struct.Struct("<I")
_LENGTH = struct.Struct("<I")
_HEADER_BYTES = _FIELDS.size + _CHECK.size
_FIRST_BYTES = SECTOR_BYTES - _HEADER_BYTES
_MORE_BYTES = SECTOR_BYTES - len(MORE)
_PIECE_SECTORS = 2048
_ZEROS = bytes(_PIECE_SECTORS * SECTOR_BYTES)


class SegmentFrame(NamedTuple):
    """A frame that was read: its kind, its records, and its offset in the file."""

    kind: int
    records: list[bytes]
    offset: int


class SegmentTail(NamedTuple):
    """The end of a file's frames: its offset, the next sequence number, and whether a torn frame is there."""

    end: int
    sequence: int
    torn: bool


class _Header(NamedTuple):
    version: int
    kind: int
    check: int
    length: int
    sequence: int


def frame_bytes(records: Sequence[bytes]) -> int:
    """Return the size of a frame with these records."""
    return _size(sum(map(len, records)) + _LENGTH.size * len(records))


def encode(records: Sequence[bytes], sequence: int, kind: int = BATCH) -> Iterator[tuple[int, bytes]]:
    """Yield the frame in pieces of at most 1 MiB, each with its offset in the frame; the piece at offset 0 comes last.

    That piece contains the header, with the checksum of all the others.
    """
    length = sum(map(len, records)) + _LENGTH.size * len(records)
    pieces = _pieces(records, _size(length))
    first = next(pieces)
    check = zlib.crc32(first, sequence & 0xFFFFFFFF)
    at = _HEADER_BYTES + len(first)
    for piece in pieces:
        check = zlib.crc32(piece, check)
        yield at, piece
        at += len(piece)
    fields = _FIELDS.pack(START, VERSION, kind, check, length, sequence)
    yield 0, b"".join((fields, _CHECK.pack(zlib.crc32(fields)), first))


def scan(file: BinaryIO, path: str, sequence: int) -> Generator[SegmentFrame, None, SegmentTail]:
    """Yield the frames of a file, the first of which has this sequence number; return the tail.

    Reads one frame at a time. Raises StorageDamaged, naming `path`.
    """
    at = 0
    while first := file.read(SECTOR_BYTES):
        header = _parse_header(first, path, at)
        if header is None:
            return SegmentTail(at, sequence, _is_torn_headless(file, first, path, at))
        _expect(header, sequence, path, at)
        size = _size(header.length)
        rest = file.read(size - SECTOR_BYTES) if size > SECTOR_BYTES else b""
        check = zlib.crc32(rest, zlib.crc32(first[_HEADER_BYTES:], sequence & 0xFFFFFFFF))
        short = len(first) + len(rest) < size
        if short or check != header.check:
            _require_torn(file, rest, short, path, at)
            return SegmentTail(at, sequence, True)
        yield SegmentFrame(header.kind, _records(first, rest, header.length, path, at), at)
        at += size
        sequence += 1
    return SegmentTail(at, sequence, False)


# Writing


def _size(length: int) -> int:
    more = max(0, length - _FIRST_BYTES)
    return SECTOR_BYTES * (1 - (-more // _MORE_BYTES))


def _pieces(records: Sequence[bytes], size: int) -> Iterator[bytes]:
    """Yield the frame without its header: the payload, with MORE before each further sector, then the padding."""
    if size <= _PIECE_SECTORS * SECTOR_BYTES:  # nearly every commit: all in one piece
        payload = b"".join(_payload(records))
        sectors = [payload[at : at + _MORE_BYTES] for at in range(_FIRST_BYTES, len(payload), _MORE_BYTES)]
        yield MORE.join((payload[:_FIRST_BYTES], *sectors)).ljust(size - _HEADER_BYTES, b"\0")
        return
    left = size - _HEADER_BYTES
    limit = _FIRST_BYTES + (_PIECE_SECTORS - 1) * _MORE_BYTES
    room = _FIRST_BYTES
    for block in _blocks(_payload(records), limit, _PIECE_SECTORS * _MORE_BYTES):
        sectors = [block[at : at + _MORE_BYTES] for at in range(room, len(block), _MORE_BYTES)]
        piece = MORE.join((block[:room], *sectors))
        left -= len(piece)
        if left < SECTOR_BYTES:  # less than a sector is left: this was the last block
            piece, left = piece + bytes(left), 0
        room = 0  # a further piece begins with MORE
        yield piece


def _payload(records: Sequence[bytes]) -> list[bytes]:
    return [part for record in records for part in (_LENGTH.pack(len(record)), record)]


def _blocks(parts: Iterable[bytes], first: int, size: int) -> Iterator[bytes]:
    """Join the parts and split them again: a block of `first` bytes, blocks of `size` bytes, and the rest."""
    held: list[bytes | memoryview] = []
    room = first
    for part in parts:
        view = memoryview(part)
        while len(view) > room:
            held.append(view[:room])
            yield b"".join(held)
            held, view, room = [], view[room:], size
        held.append(view)
        room -= len(view)
    yield b"".join(held)


# Reading


def _parse_header(first: bytes, path: str, at: int) -> _Header | None:
    """Return the header in the first sector of a frame, None if there is none. Raises StorageDamaged."""
    if len(first) < _HEADER_BYTES or _is_zero(first):
        if not _begins_with(first, START) and not _is_zero(first):
            raise StorageDamaged(path=path, offset=at, why="bytes outside any frame")
        return None
    if _CHECK.unpack_from(first, _FIELDS.size)[0] != zlib.crc32(first[: _FIELDS.size]):
        raise StorageDamaged(path=path, offset=at, why="the header of a frame does not match its checksum")
    magic, *fields = _FIELDS.unpack_from(first)
    if magic != START:
        raise StorageDamaged(path=path, offset=at, why="bytes outside any frame")
    return _Header(*fields)


def _expect(header: _Header, sequence: int, path: str, at: int) -> None:
    if header.version != VERSION:
        why = f"format version {header.version}, but this version of rallypoint reads {VERSION}"
        raise StorageDamaged(path=path, offset=at, why=why)
    if header.sequence != sequence:
        why = f"frame number {header.sequence}, expected {sequence}"
        raise StorageDamaged(path=path, offset=at, why=why)


def _records(first: bytes, rest: bytes, length: int, path: str, at: int) -> list[bytes]:
    sectors = [rest[start : start + _MORE_BYTES] for start in range(len(MORE), len(rest), SECTOR_BYTES)]
    payload = b"".join((first[_HEADER_BYTES:], *sectors))
    records = []
    begin = 0
    while begin + _LENGTH.size <= length:
        (size,) = _LENGTH.unpack_from(payload, begin)
        begin += _LENGTH.size + size
        records.append(payload[begin - size : begin])
    if begin != length:
        raise StorageDamaged(path=path, offset=at, why="the records of a frame do not fill it")
    return records


# Verdicts


def _is_torn_headless(file: BinaryIO, first: bytes, path: str, at: int) -> bool:
    """Judge the rest of a file that begins with a sector of zeros, or ends inside a header; return whether it is torn.

    It is the end if only zeros follow; torn if MORE sectors are among them.
    """
    torn = not _is_zero(first)
    for offset, sector in _written_sectors(file, at + len(first)):
        if _begins_with(sector, START):
            why = f"no frame here, but another frame follows at byte {offset}"
            raise StorageDamaged(path=path, offset=at, why=why)
        if not _begins_with(sector, MORE):
            raise StorageDamaged(path=path, offset=offset, why="bytes outside any frame")
        torn = True
    return torn


def _require_torn(file: BinaryIO, rest: bytes, missing: bool, path: str, at: int) -> None:
    """Raise StorageDamaged unless an incomplete frame can result from an interrupted write.

    `rest` is the frame after its first sector, as far as the file has it; `missing`: the file ends before the frame.
    """
    for start in range(0, len(rest), SECTOR_BYTES):
        sector = rest[start : start + SECTOR_BYTES]
        if _is_zero(sector):
            missing = True
        elif not _begins_with(sector, MORE):
            offset = at + SECTOR_BYTES + start
            raise StorageDamaged(path=path, offset=offset, why="bytes inside a frame that are not part of it")
    if not missing:
        raise StorageDamaged(path=path, offset=at, why="a frame does not match its checksum")
    for offset, _ in _written_sectors(file, at + SECTOR_BYTES + len(rest)):
        why = f"a frame does not match its checksum, and data follows at byte {offset}"
        raise StorageDamaged(path=path, offset=at, why=why)


def _written_sectors(file: BinaryIO, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield each sector that is not all zeros, with its offset, up to the end of the file."""
    while block := file.read(len(_ZEROS)):
        if not _is_zero(block):
            for start in range(0, len(block), SECTOR_BYTES):
                sector = block[start : start + SECTOR_BYTES]
                if not _is_zero(sector):
                    yield at + start, sector
        at += len(block)


def _is_zero(data: bytes) -> bool:
    return data == _ZEROS[: len(data)]


def _begins_with(sector: bytes, magic: bytes) -> bool:
    """Return whether a sector, which the end of the file may cut short, begins with the magic."""
    return sector[: len(magic)] == magic[: len(sector)]
