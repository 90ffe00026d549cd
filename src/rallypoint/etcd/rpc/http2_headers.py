"""HTTP/2 header blocks (HPACK), and gRPC's status in them. Pure.

Outgoing blocks are not compressed. The library hpack decodes the peer's blocks. Once the peer has agreed to a dynamic
table of size zero, blocks are independent of each other; etcd's are the same for every response, so each is decoded
only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from hpack import Decoder, HPACKError

from rallypoint.etcd.rpc.status import Code

__all__ = ["MAX_HEADERS", "HeaderDecoder", "header_block", "status"]

MAX_HEADERS = 64 * 1024
"""Maximum size of the headers of one response."""

MAX_CACHED_BLOCKS = 64
"""Maximum number of cached header blocks."""


class HeaderDecoder:
    """Decodes the header blocks of one connection, in order."""

    def __init__(self) -> None:
        self._decoder = Decoder(MAX_HEADERS)
        self._stateless = False
        self._decoded: dict[bytes, dict[str, str]] = {}

    def drop_table(self) -> None:
        """Decode without a table from now on: the peer has confirmed its size of zero."""
        self._decoder.max_allowed_table_size = 0
        self._stateless = True

    def decode(self, block: bytes) -> dict[str, str]:
        """Return the headers of a block; raise ValueError if it is malformed."""
        found = self._decoded.get(block)
        if found is None:
            try:
                found = {str(name): str(value) for name, value in self._decoder.decode(block)}
            except HPACKError as error:
                raise ValueError(f"bad header block: {str(error)[:100]}") from None  # it may quote the block
            if self._stateless and len(self._decoded) < MAX_CACHED_BLOCKS:
                self._decoded[block] = found
        return found


def header_block(path: str, authority: str, secure: bool, metadata: Sequence[tuple[str, str]] = ()) -> bytes:
    """Return the header block of a call, without entries for the peer's table."""
    pairs = [("te", "trailers"), ("content-type", "application/grpc"), *metadata]
    block = [b"\x83", b"\x87" if secure else b"\x86"]  # POST and the scheme, from the static table
    block += [b"\x04" + _string_literal(path), b"\x01" + _string_literal(authority)]
    block += [b"\x10" + _string_literal(name) + _string_literal(value) for name, value in pairs]
    return b"".join(block)


def _string_literal(value: str) -> bytes:
    data = value.encode()
    size = len(data)
    if size < 127:
        return bytes((size,)) + data
    size -= 127
    out = bytearray((127,))
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes(out) + bytes((size,)) + data


def status(headers: dict[str, str]) -> tuple[int, str]:
    """Return the status code of a call and the reason, from its headers and trailers."""
    code = headers.get("grpc-status")
    if code is None:
        http = headers.get(":status", "unknown")
        if http == "200":
            return Code.INTERNAL, "its response has no grpc-status"
        return Code.UNAVAILABLE, f"not a gRPC server: HTTP status {http}"
    return int(code), unquote(headers.get("grpc-message", ""))
