"""What the tests of the server share: peers that speak bytes over real sockets, and servers as real processes.

No read here waits for ever, and none for a set time: each ends by what it waits for, or fails after `AMPLE_S`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rallypoint.protocol.c10d import Opcode, encode, hello

AMPLE_S = 60.0
MIB = 1024 * 1024
TOLD, CANCELLED = b"\0", b"\1"


class Peer:
    """A connection that speaks PyTorch's protocol, or anything at all."""

    def __init__(self, address: tuple[str, int], greet: bool = True, source: str | None = None) -> None:
        self.socket = socket.create_connection(address, AMPLE_S, (source, 0) if source else None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.done = 0
        if greet:
            self.send(hello(os.getpid()))
            assert self.read(4) == struct.pack("<I", os.getpid())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    close = __exit__

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, size: int) -> bytes:
        """Read exactly so much."""
        data = bytearray()
        while len(data) < size:
            piece = self.socket.recv(min(size - len(data), MIB))
            if not piece:
                raise ConnectionError(f"hung up after {bytes(data[:100])!r}")
            data += piece
        return bytes(data)

    def rest(self) -> bytes:
        """Read until the other side hangs up, gently or not."""
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
        """Write, and return when that is done."""
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
        """Begin to wait; `read(1)` is then the answer."""
        self.send(encode(Opcode.WAIT, len(keys), *keys))

    def work(self, times: int = 20) -> None:
        """Do a little of everything, and check it."""
        for turn in range(times):
            self.done += 1
            key = b"/job/%d/%d" % (self.socket.getsockname()[1], self.done)
            self.set(key, b"v" * turn)
            assert self.get(key) == b"v" * turn
            assert self.add(key + b"n", turn) == turn
            self.wait(key, key + b"n")
            assert self.read(1) == TOLD
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

NO_UVLOOP = "raise ImportError('there is no uvloop here')\n"


class Serving:
    """A server in a process of its own, with any settings, on uvloop or without; it ends with this process."""

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

    def __enter__(self) -> Serving:
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

    def peer(self, **more: Any) -> Peer:
        return Peer(self.address, **more)

    def log(self) -> str:
        return Path(self._log).read_text()

    def memory(self, peak: bool = False) -> int:
        """The bytes of main memory that the server has, or has ever had."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)" if peak else r"VmRSS:\s+(\d+)", status)[0]) * 1024

    def statistics(self) -> dict[str, float]:
        """What the server's own page says it holds."""
        page = http(self.address, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").decode()
        return {name: float(value) for name, value in re.findall(r"<td>(\w+)</td><td>([\d.]+)</td>", page)}

    def until(self, true: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Ask for the statistics until they are so."""
        return until(self.statistics, true)


class Relaying(Serving):
    """A relay in a process of its own; `upstream` is one of its settings."""

    code = RELAY


def until(look: Callable[[], Any], true: Callable[[Any], bool]) -> Any:
    """Look again and again, by calls that take a round trip each, until what is seen is so."""
    deadline = time.monotonic() + AMPLE_S
    while not true(seen := look()):
        assert time.monotonic() < deadline, f"it never came to be; at last there was {seen}"
    return seen


def http(address: tuple[str, int], request: bytes) -> bytes:
    with Peer(address, greet=False) as peer:
        peer.send(request)
        return peer.rest()


def read_line(child: subprocess.Popen[bytes]) -> str:
    """Read what a process says next, or fail."""
    assert child.stdout is not None
    assert select.select([child.stdout], [], [], AMPLE_S)[0], "it says nothing"
    line = child.stdout.readline().decode().strip()
    assert line, f"it ended with {child.wait(AMPLE_S)} and said nothing"
    return line


def wait_for_end(pid: int) -> None:
    """Return when a process is gone, whosever child it was."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], AMPLE_S)[0], f"process {pid} lives on"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def script(code: str, *arguments: object, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python code as a process that is gone when the block ends."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, **more)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            child.communicate()
