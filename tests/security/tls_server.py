"""A TLS server of the standard library in a thread, for one connection, and the memory of this process."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.raw_peer import AMPLE_S

from rallypoint.client.tls_socket import TlsSocket

__all__ = ["LENGTH", "check_echoes", "peak_memory", "read_exactly", "serving"]

LENGTH = struct.Struct("<I")


@contextlib.contextmanager
def serving(
    handle: Callable[[ssl.SSLSocket], object], context: ssl.SSLContext
) -> Iterator[tuple[tuple[str, int], Future[object]]]:
    """Serve one connection by `handle`; yield the address, and what `handle` will return or raise."""

    def serve() -> object:
        with listener, listener.accept()[0] as plain:
            plain.settimeout(AMPLE_S)
            with context.wrap_socket(plain, server_side=True, suppress_ragged_eofs=False) as peer:
                return handle(peer)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(AMPLE_S)
        address = listener.getsockname()
        served = pool.submit(serve)
        yield address, served


def read_exactly(sock: ssl.SSLSocket, size: int, at_once: int = 1 << 20) -> bytes:
    """Read so many bytes."""
    parts = bytearray()
    while len(parts) < size:
        data = sock.recv(min(at_once, size - len(parts)))
        assert data, f"the end after {len(parts)} of {size} bytes"
        parts += data
    return bytes(parts)


def check_echoes(sock: TlsSocket, threads: int, each: int) -> None:
    """Have threads write messages, read them all back from a server that echoes, and check that each came whole."""

    def write(number: int) -> None:
        chance = random.Random(number)
        for _ in range(each):
            body = bytes([number]) * chance.choice((1, 100, 5000, 100_000))
            sock.sendall(LENGTH.pack(len(body)) + body)

    sock.settimeout(AMPLE_S)
    received, found = bytearray(), [0] * threads
    with ThreadPoolExecutor(threads) as pool:
        writing = [pool.submit(write, number) for number in range(threads)]
        while sum(found) < threads * each:
            received += sock.recv(65536)
            while len(received) >= 4 and len(received) >= (size := 4 + LENGTH.unpack_from(received)[0]):
                body = bytes(received[4:size])
                assert len(set(body)) == 1  # of one writer, whole
                found[body[0]] += 1
                del received[:size]
        for done in writing:
            done.result(AMPLE_S)
    assert found == [each] * threads and not received


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Yield a function that returns by how many bytes this process has grown at most since the start of the block."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size again
    before = _peak()
    yield lambda: _peak() - before


def _peak() -> int:
    return int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
