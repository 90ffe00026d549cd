"""The servers under test, each a process of its own on a free port: ours, torch's, redis, and a bare echo.

Torch's is a program that holds a TCPStore with `is_master=True`: the libuv server, torch's default. It looks up the
name of every caller; that is left to it, but only in /etc/hosts: where a resolver drops questions, two hundred callers
had to wait 17 s, and that would drown what is compared. It and the echo print their port once they listen, and end
when their standard input does. All run in a session of their own, as ours does, for Linux shares a core out by session.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import rallypoint
from rallypoint.core.c10d import hello

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
REDIS = ("redis-server", "--bind", "127.0.0.1", "--appendonly", "no", "--loglevel", "warning", "--save", "")


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
        yield Running(process.pid, _announced(process))


@contextlib.contextmanager
def echo() -> Iterator[Running]:
    """Run the bare echo."""
    with child([sys.executable, str(Path(__file__).with_name("echo.py"))]) as process:
        yield Running(process.pid, _announced(process))


@contextlib.contextmanager
def redis() -> Iterator[Running]:
    """Run Debian's redis-server, which keeps nothing on disk."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with child([*REDIS, "--port", str(port)]) as process:
        give_up_at = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < give_up_at:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.02)
        else:
            raise RuntimeError(f"redis-server does not listen (exit status {process.poll()})")
        yield Running(process.pid, port)


START = {"rallypoint": ours, "torch": torchs, "redis": redis, "echo": echo}


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


def _announced(process: subprocess.Popen[str]) -> int:
    """Wait for a server to print its port."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a server ended with status {process.wait()} before it listened")
    return int(line)
