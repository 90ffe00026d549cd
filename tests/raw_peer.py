"""Helpers for tests of the server: peers that send raw bytes over real sockets, and servers as real processes.

Every read returns as soon as its data arrives, or fails after `AMPLE_S`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rallypoint import net
from rallypoint.protocol.c10d import Opcode, encode, hello
from rallypoint.readiness import wait_readable

Seen = TypeVar("Seen")
_Self = TypeVar("_Self", bound="ServerProcess")

AMPLE_S = 60.0
MIB = 1024 * 1024
WAITED, CANCELLED = b"\0", b"\1"


class RawPeer:
    """A connection that speaks PyTorch's protocol, or anything at all."""

    def __init__(self, address: tuple[str, int], greet: bool = True, source: str | None = None) -> None:
        self.socket = socket.create_connection(address, AMPLE_S, (source, 0) if source else None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.done = 0
        if greet:
            self.send(hello(os.getpid()))
            assert self.read(4) == struct.pack("<I", os.getpid())

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    close = __exit__

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, size: int) -> bytes:
        """Read exactly this many bytes."""
        data = bytearray()
        while len(data) < size:
            piece = self.socket.recv(min(size - len(data), MIB))
            if not piece:
                raise ConnectionError(f"hung up after {bytes(data[:100])!r}")
            data += piece
        return bytes(data)

    def rest(self) -> bytes:
        """Read until the other side closes or resets the connection."""
        data = bytearray()
        with contextlib.suppress(ConnectionError):
            while piece := self.socket.recv(MIB):
                data += piece
        return bytes(data)

    def number(self) -> int:
        return int.from_bytes(self.read(8), "little", signed=True)

    def string(self) -> bytes:
        return self.read(self.number())

    # What a healthy client does

    def ping(self) -> None:
        self.send(encode(Opcode.PING, 7))
        assert self.read(4) == b"\7\0\0\0"

    def set(self, key: bytes, value: bytes) -> None:
        """Write, and return when the server has executed it."""
        self.send(encode(Opcode.SET, key, value))
        self.ping()

    def get(self, key: bytes) -> bytes:
        self.send(encode(Opcode.GET, key))
        return self.string()

    def add(self, key: bytes, amount: int) -> int:
        self.send(encode(Opcode.ADD, key, amount))
        return self.number()

    def push(self, key: bytes, item: bytes) -> None:
        self.send(encode(Opcode.QUEUE_PUSH, key, item))
        self.ping()

    def pop(self, key: bytes) -> bytes | None:
        self.send(encode(Opcode.QUEUE_POP, key))
        return self.string() if self.number() else None

    def wait(self, *keys: bytes) -> None:
        """Send a wait; `read(1)` returns the reply."""
        self.send(encode(Opcode.WAIT, len(keys), *keys))

    def work(self, times: int = 20) -> None:
        """Use every kind of operation, and check the replies."""
        for turn in range(times):
            self.done += 1
            key = b"/job/%d/%d" % (self.socket.getsockname()[1], self.done)
            self.set(key, b"v" * turn)
            assert self.get(key) == b"v" * turn
            assert self.add(key + b"n", turn) == turn
            self.wait(key, key + b"n")
            assert self.read(1) == WAITED
            self.push(key, b"item")
            assert self.pop(key) == b"item"


SERVE = """
import json, sys
import msgspec
from rallypoint.server.process import log, serve
from rallypoint.server.settings import Settings
import logging
logging.basicConfig(format="%(message)s", level=logging.INFO)
serve(msgspec.json.decode(sys.argv[1], type=Settings), ready=lambda url: print(url, flush=True))
"""

RELAY = (
    SERVE.replace("server.process", "relay.process")
    .replace("server.settings", "relay.settings")
    .replace("Settings", "RelaySettings")
)

NO_UVLOOP = "raise ImportError('no uvloop in this test')\n"


class ServerProcess:
    """A server in its own process, with any settings, with uvloop or without; it ends with this process."""

    code = SERVE

    def __init__(self, place: Path, uvloop: bool = True, **settings: Any) -> None:
        settings = {"port": 0, "parent_pid": os.getpid(), **settings}
        environment = dict(os.environ)
        if not uvloop:
            (place / "no_uvloop").mkdir(exist_ok=True)
            (place / "no_uvloop" / "uvloop.py").write_text(NO_UVLOOP)
            environment["PYTHONPATH"] = os.pathsep.join([str(place / "no_uvloop"), os.environ.get("PYTHONPATH", "")])
        handle, self._log = tempfile.mkstemp(dir=place, suffix=".log")
        with os.fdopen(handle, "wb") as log:
            command = [sys.executable, "-c", self.code, json.dumps(settings)]
            self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, bufsize=0)
        self.url = read_line(self.child)
        host, port = self.url.removeprefix("tcp://").rsplit(":", 1)
        self.address = (host.strip("[]"), int(port))

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.terminate()
        try:
            assert self.child.wait(AMPLE_S) == 0, self.log()
        finally:
            self.child.kill()
            self.child.wait()
            assert self.child.stdout
            self.child.stdout.close()
        assert "Traceback" not in self.log(), self.log()

    def peer(self, **more: Any) -> RawPeer:
        return RawPeer(self.address, **more)

    def log(self) -> str:
        return Path(self._log).read_text()

    def memory(self, peak: bool = False) -> int:
        """Return the resident memory of the server in bytes, or its peak."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)" if peak else r"VmRSS:\s+(\d+)", status)[0]) * 1024

    def statistics(self) -> dict[str, float]:
        """Return the figures of the server."""
        page = http(self.address, b"GET /statistics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        facts: dict[str, Any] = json.loads(page.partition(b"\r\n\r\n")[2])
        return {name: float(fact) for name, fact in facts.items() if isinstance(fact, (int, float))}

    def until(self, true: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Poll the statistics until a condition is true of them."""
        return until(self.statistics, true)


class RelayProcess(ServerProcess):
    """A relay in its own process; `upstream` is one of its settings."""

    code = RELAY


def until(look: Callable[[], Seen], true: Callable[[Seen], bool]) -> Seen:
    """Poll until a condition is true of what `look` returns; it should take a round trip, for there is no pause."""
    deadline = time.monotonic() + AMPLE_S
    while not true(seen := look()):
        assert time.monotonic() < deadline, f"not true within {AMPLE_S:g} s; last seen: {seen}"
    return seen


def http(address: tuple[str, int], request: bytes) -> bytes:
    with RawPeer(address, greet=False) as peer:
        peer.send(request)
        return peer.rest()


def read_line(child: subprocess.Popen[bytes]) -> str:
    """Read the next line that a process prints, or fail."""
    assert child.stdout is not None
    assert wait_readable(child.stdout, timeout_s=AMPLE_S), f"no output within {AMPLE_S:g} s"
    line = child.stdout.readline().decode().strip()
    assert line, f"it exited with {child.wait(AMPLE_S)} and printed nothing"
    return line


def release(*children: subprocess.Popen[bytes]) -> None:
    """Wait until each of these scripts has printed "up", and then let all of them go on at the same moment."""
    for child in children:
        assert read_line(child) == "up"
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"go\n")


def may_listen(port: int) -> bool:
    """Return True if a port of loopback is free; raise AddressTaken otherwise."""
    for sock in net.listen(["127.0.0.1"], port):
        sock.close()
    return True


def wait_for_end(pid: int) -> None:
    """Return when a process has ended; it need not be a child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert wait_readable(descriptor, timeout_s=AMPLE_S), f"process {pid} still runs after {AMPLE_S:g} s"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def script(code: str, *arguments: object, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python code as a process, which is killed when the block ends."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, **more)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            child.communicate()
