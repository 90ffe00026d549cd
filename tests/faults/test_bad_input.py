"""Peers that send bad input, or too much, too little or too slowly, while a healthy client keeps working.

The healthy client must get the right replies, stored data must stay, and the server's memory must stay bounded. Nothing
is asserted about time.
"""

from __future__ import annotations

import contextlib
import random
import resource
import struct
from collections.abc import Iterator

import pytest
from tests.faults.conftest import Start
from tests.raw_peer import MIB, RawPeer, ServerProcess

from rallypoint import net
from rallypoint.protocol.c10d import Opcode, encode

BAD = {
    "an oversized key": encode(Opcode.SET, b"k" * 8193, b"v"),
    "an oversized value": b"\1" + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 8 * MIB + 1),
    "an endless value": b"\1" + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 2**64 - 1) + b"v" * 100_000,
    "an endless list": b"\6" + struct.pack("<Q", 2**63),
    "an unknown opcode": b"\x80",
    "a second greeting": encode(Opcode.VALIDATE, 0x3C85F7CE),
    "HTTP in the middle": b"GET / HTTP/1.1\r\n\r\n",
    "a letter for a number": encode(Opcode.SET, b"/letter", b"x") + encode(Opcode.ADD, b"/letter", 1),
    "noise": random.Random(5).randbytes(100_000),
}


@pytest.fixture(params=["uvloop", "asyncio", pytest.param("etcd", marks=pytest.mark.needs("etcd"))])
def server(request: pytest.FixtureRequest, start: Start) -> ServerProcess:
    if request.param == "etcd":
        return start(storage=request.getfixturevalue("etcd_url"))
    return start(uvloop=request.param == "uvloop")


@pytest.fixture
def healthy(server: ServerProcess) -> Iterator[RawPeer]:
    with server.peer() as peer:
        yield peer


def test_bad_input_ends_only_its_own_connection(server: ServerProcess, healthy: RawPeer) -> None:
    waiting = server.peer()
    waiting.wait(b"/awaited")
    for bad in BAD.values():
        with server.peer() as peer:
            with contextlib.suppress(ConnectionError):
                peer.send(bad)
            assert peer.rest() == b""
            healthy.work(2)
    healthy.set(b"/awaited", b"")
    assert waiting.read(1) == b"\0"
    waiting.close()
    assert server.log().count("dropped") == 1, "one line for one address"


def test_half_messages_take_no_effect_and_leave_nothing(server: ServerProcess, healthy: RawPeer) -> None:
    message = encode(Opcode.MULTI_SET, 2, b"/half/a", b"v", b"/half/b", b"v" * 100_000)
    for size in (1, 9, 20, 50, 5_000, len(message) - 1):
        with server.peer() as peer:
            peer.send(message[:size])
            healthy.work(1)
    healthy.send(encode(Opcode.CHECK, 1, b"/half/a"))
    assert healthy.read(1) == b"\1"
    server.until(lambda facts: facts["connections"] == 2)  # the healthy one, and that of this request
    bytes_held = server.statistics()["bytes"]
    assert bytes_held < 100_000


def test_one_byte_at_a_time(server: ServerProcess, healthy: RawPeer) -> None:
    slow = server.peer()
    for byte in encode(Opcode.MULTI_SET, 2, b"/slow/a", b"one", b"/slow/b", b"two"):
        assert healthy.get(b"/slow/a") == b""
        slow.send(bytes((byte,)))
    slow.ping()
    assert healthy.get(b"/slow/a") == b"one" and healthy.get(b"/slow/b") == b"two"
    slow.close()


def flood(peer: RawPeer, data: bytes) -> None:
    """Send as much as the socket accepts without blocking."""
    peer.socket.setblocking(False)
    view = memoryview(data)
    with contextlib.suppress(BlockingIOError):
        while view:
            view = view[peer.socket.send(view) :]


def send_quietly(peer: RawPeer, data: bytes) -> None:
    """Send as much as the other side accepts; it may disconnect."""
    with contextlib.suppress(ConnectionError):
        peer.send(data)


@pytest.mark.parametrize("value_bytes", [8 * MIB, 60_000, 10])
def test_a_peer_that_never_reads_holds_bounded_memory(
    server: ServerProcess, healthy: RawPeer, value_bytes: int
) -> None:
    healthy.set(b"/large", b"v" * value_bytes)
    before = server.memory()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            flood(stack.enter_context(server.peer()), encode(Opcode.GET, b"/large") * 100_000)
        healthy.work(30)
        assert healthy.get(b"/large") == b"v" * value_bytes
        grown = server.memory(peak=True) - before
        assert grown < 3 * (2 * value_bytes + 4 * MIB) + 3 * value_bytes + 16 * MIB, f"{grown / MIB:.0f} MiB"
    server.until(lambda facts: facts["connections"] == 2)
    healthy.work(1)


def test_a_peer_that_reads_late_gets_everything_in_order(server: ServerProcess, healthy: RawPeer) -> None:
    values = [bytes((n,)) * 300_000 for n in range(40)]
    for n, value in enumerate(values):
        healthy.set(b"/late/%d" % n, value)
    late = server.peer()
    late.send(b"".join(encode(Opcode.GET, b"/late/%d" % n) + encode(Opcode.ADD, b"/late", 1) for n in range(40)))
    healthy.work(5)
    for n, value in enumerate(values):
        assert late.string() == value
        assert late.number() == n + 1
    late.close()


def test_a_browser_that_never_reads_holds_bounded_memory(server: ServerProcess, healthy: RawPeer) -> None:
    before = server.memory()
    mute = server.peer(greet=False)
    flood(mute, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 200_000)
    healthy.work(30)
    assert server.memory(peak=True) - before < 32 * MIB
    mute.close()


def test_the_kernel_disconnects_a_live_peer_that_never_reads(start: Start) -> None:
    server = start()
    with server.peer() as healthy, server.peer() as mute:
        healthy.set(b"/large", b"v" * 8 * MIB)
        mute.send(encode(Opcode.GET, b"/large") * 100)
        healthy.work(2)
        facts = server.until(lambda facts: facts["connections"] == 2)  # otherwise it may hold memory for ever
        assert facts["bytes"] < 9 * MIB


@pytest.mark.parametrize("uvloop", [True, False])
def test_half_sent_messages_stay_within_the_memory_limit(start: Start, uvloop: bool) -> None:
    server = start(uvloop, max_memory=48 * MIB)
    half = encode(Opcode.SET, b"/half", b"v" * 8 * MIB)[: -1 * MIB]
    with server.peer() as healthy, contextlib.ExitStack() as stack:
        healthy.set(b"/kept", b"v" * 8 * MIB)
        before = server.memory()
        for _ in range(20):  # 140 MiB of requests
            send_quietly(stack.enter_context(server.peer()), half)
            healthy.work(1)
        facts = server.until(lambda facts: facts["bytes"] <= 48 * MIB)
        assert facts["connections"] < 12, "those past the limit must have been dropped"
        assert healthy.get(b"/kept") == b"v" * 8 * MIB
        grown = server.memory(peak=True) - before
        assert grown < 100 * MIB, f"{grown / MIB:.0f} MiB"
        assert "the server's memory limit is reached" in server.log()
    with server.peer() as later:
        server.until(lambda facts: facts["bytes"] < 9 * MIB)
        later.set(b"/after", b"v" * 8 * MIB)
        assert later.get(b"/after") == b"v" * 8 * MIB


@pytest.mark.parametrize("uvloop", [True, False])
def test_unread_answers_stay_within_the_memory_limit(start: Start, uvloop: bool) -> None:
    server = start(uvloop, max_memory=64 * MIB)
    with server.peer() as healthy, contextlib.ExitStack() as stack:
        healthy.set(b"/large", b"v" * 8 * MIB)
        before = server.memory()
        for _ in range(30):
            mute = stack.enter_context(server.peer())
            send_quietly(mute, encode(Opcode.GET, b"/large") * 100)
            healthy.work(1)
        assert healthy.get(b"/large") == b"v" * 8 * MIB
        assert server.statistics()["bytes"] <= 64 * MIB
        grown = server.memory(peak=True) - before
        assert grown < 200 * MIB, f"{grown / MIB:.0f} MiB"


def test_a_full_store_disconnects_only_writers(start: Start) -> None:
    server = start(max_memory=4 * MIB)
    with server.peer() as healthy:
        healthy.set(b"/kept", b"v" * MIB)
        for message in (
            encode(Opcode.SET, b"/a", b"v" * 4 * MIB),
            encode(Opcode.APPEND, b"/kept", b"v" * 3 * MIB),
            encode(Opcode.QUEUE_PUSH, b"/q", b"v" * 3 * MIB),
            encode(Opcode.MULTI_SET, 2, b"/a", b"", b"/b", b"v" * 3 * MIB),
            encode(Opcode.COMPARE_SET, b"/a", b"", b"v" * 3 * MIB),
        ):
            with server.peer() as writer:
                send_quietly(writer, message)
                assert writer.rest() == b""
        assert healthy.get(b"/kept") == b"v" * MIB
        assert healthy.get(b"/a") == b"" and healthy.pop(b"/q") is None
        healthy.work()
        facts = server.statistics()
        assert facts["bytes"] < 2 * MIB


def test_500_connections_with_half_a_message_each(server: ServerProcess, healthy: RawPeer) -> None:
    net.raise_file_limit(4096)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2000
    message = encode(Opcode.SET, b"/one-of-500", b"v" * 2_000)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(server.peer()) for _ in range(500)]
        for n, peer in enumerate(peers):
            peer.send(message[: 1 + n * 4])
        healthy.work(5)
        assert healthy.get(b"/one-of-500") == b""
        assert server.statistics()["connections"] >= 501
        peers[77].send(message[1 + 77 * 4 :])
        peers[77].ping()
        assert healthy.get(b"/one-of-500") == b"v" * 2_000
    server.until(lambda facts: facts["connections"] == 2)
