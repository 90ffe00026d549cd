"""Strangers at a relay's port and at the server's port for relays, while healthy clients of the relay keep working.

The healthy clients must get the right replies, no one else may be disconnected, the memory of both processes must stay
bounded, and neither may log an error. Nothing is asserted about time.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.faults.test_bad_input import BAD, flood
from tests.raw_peer import AMPLE_S, MIB, RawPeer, RelayProcess, ServerProcess, until

import rallypoint
from rallypoint.core import ops
from rallypoint.protocol import channels, native
from rallypoint.protocol.c10d import Opcode, encode, hello
from rallypoint.protocol.channels import WINDOW, close_frame, credit_frame, data_frames, data_head
from rallypoint.protocol.native import Hello, frame
from rallypoint.readiness import wait_readable
from rallypoint.relay.torch.client import MAX_LARGE

STRANGERS = 4
HUGE = struct.pack("<I", 2**32 - 1)
HELLO = frame(Hello(native.VERSION, "stranger"))


class Scene(NamedTuple):
    """A server, its relay, and a client of each protocol at the relay."""

    server: ServerProcess
    relay: RelayProcess
    torchs: RawPeer
    ours: rallypoint.Store

    def works(self, times: int = 2) -> None:
        """Check that the healthy clients work, and are still connected."""
        self.torchs.work(times)
        before = self.ours.add("worked", 0)
        assert self.ours.add("worked", times) == before + times


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with (
        ServerProcess(tmp_path) as server,
        RelayProcess(tmp_path, upstream=server.url) as relay,
        relay.peer() as torchs,
        rallypoint.connect(relay.url, timeout=AMPLE_S) as ours,
    ):
        made = Scene(server, relay, torchs, ours)
        made.works()
        yield made


# At the relay's port

NATIVE = {
    "half a preface": native.PREFACE[:5],
    "a preface and no more": native.PREFACE,
    "half a hello": native.PREFACE + HELLO[:-3],
    "a huge hello": native.PREFACE + HUGE + b"\xff" * 100_000,
    "a huge request": native.PREFACE + HELLO + HUGE + b"\xff" * 100_000,
    "noise behind a hello": native.PREFACE + HELLO + random.Random(7).randbytes(100_000),
    "noise for a hello": native.PREFACE + random.Random(8).randbytes(100_000),
    "another relay": channels.PREFACE + data_frames(1, HELLO),
    "noise of another relay": channels.PREFACE + random.Random(9).randbytes(100_000),
    "HTTP without end": b"GET /" + b"x" * 200_000,
    "a round of no name": b"PUT /rounds/ HTTP/1.1\r\n\r\n",
    "an endless round": b"PUT /rounds/" + b"r" * 60_000 + b"/1 HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("said", [*NATIVE.values(), *BAD.values()], ids=[*NATIVE, *BAD])
def test_bad_input_at_a_relay_ends_only_its_own_connection(scene: Scene, said: bytes) -> None:
    greet = said in BAD.values()
    with scene.relay.peer(greet=greet) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.send(said)
        scene.works()
        with contextlib.suppress(OSError):
            stranger.socket.shutdown(1)
        stranger.rest()
    scene.works()
    scene.relay.until(lambda facts: facts["connections"] == 3)  # the healthy ones, and that of this request
    assert scene.relay.memory(peak=True) < 100 * MIB


@pytest.mark.parametrize("speaks", ["torch", "ours"])
def test_strangers_at_a_relay_that_never_read_hold_bounded_memory(scene: Scene, speaks: str) -> None:
    value = b"v" * 4 * MIB
    scene.ours.set("large", value)
    before = scene.relay.memory(), scene.server.memory()
    with contextlib.ExitStack() as stack:
        for _ in range(STRANGERS):
            stranger = stack.enter_context(scene.relay.peer(greet=False))
            flood(stranger, asks_torch() if speaks == "torch" else asks_native())
        scene.works(20)
        assert scene.ours.get("large") == value
        grown = scene.relay.memory(peak=True) - before[0], scene.server.memory(peak=True) - before[1]
        bound = STRANGERS * MAX_LARGE * 2 * len(value) + 64 * MIB  # each answer is put together from its parts
        assert max(grown) < bound, f"{[size // MIB for size in grown]} MiB"
    scene.relay.until(lambda facts: facts["connections"] == 3)
    scene.works()


def asks_torch() -> bytes:
    return hello(os.getpid()) + encode(Opcode.GET, b"/large") * 50_000


def asks_native() -> bytes:
    asking = b"".join(frame(ops.Get(number, b"/large", 0.0)) for number in range(1, 50_000))
    return native.PREFACE + HELLO + asking


# At the server's port, as a relay


@pytest.fixture
def impostor(scene: Scene) -> Iterator[RawPeer]:
    """A connection with channels to the server."""
    with scene.server.peer(greet=False) as peer:
        peer.send(channels.PREFACE)
        assert peer.read(4) == channels.ACCEPTED
        yield peer


BROKEN: dict[str, Callable[[], bytes]] = {
    "a window that is overrun": lambda: data_frames(1, HELLO + b"\xff" * 2 * WINDOW),
    "credit without end": lambda: data_frames(1, HELLO) + credit_frame(1, (1 << 24) - 1) * 1000,
    "credit for nobody": lambda: credit_frame(7, 1),
    "data behind the end": lambda: data_frames(1, HELLO) + close_frame(1) + data_frames(1, HELLO),
    "an end of nobody": lambda: close_frame(9) * 1000,
    "two ends": lambda: data_frames(1, HELLO) + close_frame(1) * 2,
    "channels backwards": lambda: data_frames(9, HELLO) + data_frames(3, HELLO),
    "channel zero": lambda: data_frames(0, HELLO),
    "empty data": lambda: data_head(1, 0) * 10_000,
    "a chunk too large": lambda: data_head(1, channels.MAX_CHUNK + 1),
    "an unknown kind": lambda: struct.pack("<II", 1, 200 << 24),
    "a shared frame": lambda: struct.pack("<II", 3, channels.SHARED << 24 | 4) + b"abcd",
    "a thousand hellos": lambda: data_frames(1, HELLO * 1000),
    "a reason that is no text": lambda: data_frames(1, HELLO) + struct.pack("<II", 1, 2 << 24 | 3) + b"\xff\xfe\xfd",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_relay_that_breaks_the_protocol_harms_only_itself(scene: Scene, impostor: RawPeer, name: str) -> None:
    with contextlib.suppress(ConnectionError):
        impostor.send(BROKEN[name]())
    scene.works()
    with contextlib.suppress(OSError):
        impostor.socket.shutdown(1)
    impostor.rest()
    scene.works()
    assert scene.server.memory(peak=True) < 120 * MIB


def test_random_frames_harm_only_their_connection(scene: Scene) -> None:
    chance = random.Random(11)
    for _ in range(40):
        with scene.server.peer(greet=False) as peer, contextlib.suppress(ConnectionError):
            peer.send(channels.PREFACE + b"".join(some_frame(chance) for _ in range(chance.randrange(1, 200))))
            peer.socket.shutdown(1)
            peer.rest()
        scene.works(1)


def some_frame(chance: random.Random) -> bytes:
    """Return a frame that is often well-formed, on one of a few channels."""
    channel = chance.randrange(1, 5) if chance.random() < 0.98 else chance.randrange(1 << 32)
    request = chance.choice(
        (ops.Set(0, b"/k", b"v"), ops.Get(0, b"/none", 5.0), ops.Push(0, b"/q", b"i"), ops.Bye(0), ops.Drop(0, 3))
    )
    makers: list[Callable[[], bytes]] = [
        lambda: data_frames(channel, HELLO),
        lambda: data_frames(channel, frame(request)),
        lambda: data_frames(channel, frame(request)[: chance.randrange(9)]),
        lambda: credit_frame(channel, chance.randrange(1 << chance.randrange(1, 24))),
        lambda: close_frame(channel, "by chance"),
    ]
    return chance.choices(makers, (3, 6, 1, 1, 1))[0]()


def test_a_hundred_thousand_channels_hold_bounded_memory(scene: Scene, impostor: RawPeer) -> None:
    opened = threading.Thread(target=open_channels, args=(impostor, 100_000))
    opened.start()
    scene.works(50)
    opened.join(AMPLE_S)
    scene.works()
    assert scene.server.memory(peak=True) < 300 * MIB, f"{scene.server.memory(peak=True) // MIB} MiB"
    impostor.close()
    scene.server.until(lambda facts: facts["connections"] <= 2)  # the relay's, and that of this request
    scene.works()


def open_channels(impostor: RawPeer, count: int) -> None:
    with contextlib.suppress(ConnectionError):
        for first in range(1, count, 1000):
            impostor.send(b"".join(data_frames(number, HELLO[:2]) for number in range(first, first + 1000)))


# Stopped and killed


@pytest.mark.parametrize("who", ["server", "relay"])
def test_clients_wait_for_a_stopped_relay_or_server(scene: Scene, who: str) -> None:
    """Requests to a stopped process are answered after it continues, and not before."""
    child = getattr(scene, who).child
    answers: list[int] = []
    asks = threading.Thread(target=lambda: answers.append(scene.ours.add("while stopped", 1)))
    os.kill(child.pid, signal.SIGSTOP)
    try:
        until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2][0], lambda state: state == "T")
        asks.start()
        scene.torchs.send(encode(Opcode.ADD, b"/asked while stopped", 1))
        assert not wait_readable(scene.torchs.socket, timeout_s=0.0) and not answers
    finally:
        os.kill(child.pid, signal.SIGCONT)
    assert scene.torchs.number() == 1
    asks.join(AMPLE_S)
    assert answers == [1]
    scene.works()
