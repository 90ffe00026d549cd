"""A capture of what passes between hosts (`tests/hosts.py`), as somebody sees it who can read their network.

The kernel keeps the packets until they are read, at the end: no thread has to keep up, and a full buffer is an error.
"""

from __future__ import annotations

import socket
import struct
from collections import defaultdict

from tests.hosts import Host

__all__ = ["Capture"]

ETHERNET_BYTES, IPV4, TCP = 14, 0x0800, 6
SOL_PACKET, PACKET_STATISTICS, SO_RCVBUFFORCE = 263, 6, 33
BUFFER_BYTES = 64 * 1024 * 1024


class Capture:
    """The TCP streams to and from a host, from now on."""

    def __init__(self, host: Host) -> None:
        self._socket = host.capturing_socket()
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        self._streams: dict[bytes, bytearray] = defaultdict(bytearray)

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def streams(self) -> list[bytes]:
        """Return the bytes of each connection so far, each direction for itself, in the order of the packets."""
        while True:
            try:
                packet = self._socket.recv(1 << 17)
            except BlockingIOError:
                break
            self._take(packet[ETHERNET_BYTES:], *struct.unpack_from("!12xH", packet))
        _, lost = struct.unpack("II", self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        assert not lost, f"{lost} packets did not fit into the buffer"
        return [bytes(stream) for stream in self._streams.values()]

    def _take(self, packet: bytes, kind: int) -> None:
        if kind != IPV4 or packet[9] != TCP:
            return
        header, size = 4 * (packet[0] & 15), int.from_bytes(packet[2:4], "big")
        segment = packet[header:size]
        self._streams[packet[12:20] + segment[:4]] += segment[4 * (segment[12] >> 4) :]
