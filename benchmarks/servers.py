"""The servers under test, each a process of its own on a free port: ours, torch's, redis, and a bare echo.

Torch's is a program that holds a TCPStore with `is_master=True`: the libuv server, torch's default. It looks up the
name of every caller; that is left to it, but only in /etc/hosts: where a resolver drops questions, two hundred callers
had to wait 17 s, and that would drown what is compared. It and the echo print their port once they listen, and end
when their standard input does. All run in a session of their own, as ours does, for Linux shares a core out by session.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import rallypoint
from rallypoint.protocol.c10d import hello

ROOT = Path(__file__).resolve().parents[1]
TORCH = """
import sys
from benchmarks.rig import ask_no_resolver
from torch.distributed import TCPStore
ask_no_resolver()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
BEFORE = """
import sys
sys.path.insert(0, sys.argv[1] + "/src")
from rallypoint.server.process import serve
from rallypoint.server.settings import Settings
serve(Settings(port=0), ready=lambda url: print(url.rpartition(":")[2], flush=True))
"""
REDIS = ("redis-server", "--bind", "127.0.0.1", "--loglevel", "warning", "--save", "")


SCRATCH = ROOT / ".bench"
"""Where data directories are: on the file system of the checkout, and out of its way if a run is killed."""


class Running(NamedTuple):
    """A server that takes connections on 127.0.0.1."""

    pid: int
    port: int


@contextlib.contextmanager
def ours() -> Iterator[Running]:
    """Run our server."""
    with rallypoint.Server() as server:
        yield Running(server.pid, server.port)


@contextlib.contextmanager
def torchs() -> Iterator[Running]:
    """Run torch's server."""
    with child([sys.executable, "-c", TORCH]) as process:
        yield Running(process.pid, announced_port(process))


@contextlib.contextmanager
def echo() -> Iterator[Running]:
    """Run the bare echo."""
    with child([sys.executable, str(Path(__file__).with_name("echo.py"))]) as process:
        yield Running(process.pid, announced_port(process))


@contextlib.contextmanager
def redis(appends: str = "no", *options: str) -> Iterator[Running]:
    """Run Debian's redis-server, which keeps nothing on disk unless it is told to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with child([*REDIS, "--appendonly", appends, *options, "--port", str(port)]) as process:
        give_up_at = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < give_up_at:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.02)
        else:
            raise RuntimeError(f"redis-server does not listen (exit status {process.poll()})")
        yield Running(process.pid, port)


@contextlib.contextmanager
def durable() -> Iterator[Running]:
    """Run our server with a data directory."""
    with scratch_directory() as directory, rallypoint.Server(data_dir=directory) as server:
        yield Running(server.pid, server.port)


@contextlib.contextmanager
def durable_redis() -> Iterator[Running]:
    """Run Debian's redis-server with an append-only file that is synced before every reply."""
    with scratch_directory() as directory, redis("yes", "--appendfsync", "always", "--dir", directory) as server:
        yield server


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """Make a directory that is removed at the end of a `with` block."""
    SCRATCH.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir=SCRATCH)


@contextlib.contextmanager
def before() -> Iterator[Running]:
    """Run our server as it was in the checkout that RALLYPOINT_BEFORE names."""
    with child([sys.executable, "-c", BEFORE, os.environ["RALLYPOINT_BEFORE"]]) as process:
        yield Running(process.pid, announced_port(process))


START = {
    "rallypoint": ours,
    "durable": durable,
    "before": before,
    "torch": torchs,
    "redis": redis,
    "durable redis": durable_redis,
    "echo": echo,
}


@contextlib.contextmanager
def serving(names: Sequence[str]) -> Iterator[dict[str, Running]]:
    """Run several servers, by name."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(START[name]()) for name in names}


def greeted(port: int) -> socket.socket:
    """Connect without torch, and greet as its client does; return once the server has answered."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(hello(nonce=1))
    if sock.recv(4) != (1).to_bytes(4, "little"):
        raise RuntimeError(f"the server on port {port} does not answer as a TCPStore does")
    return sock


@contextlib.contextmanager
def child(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a program while it is needed."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def announced_port(process: subprocess.Popen[str]) -> int:
    """Return the port that a server prints once it listens."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a server ended with status {process.wait()} before it listened")
    return int(line)
