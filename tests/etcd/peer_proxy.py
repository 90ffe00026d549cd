"""A process beside the tests: it forwards the traffic between members of etcd, and ends them when the tests end.

Its first argument is the number of ports to listen on, which members dial instead of each other; the others are
folders to remove at the end. Its input is a line of JSON for each change, always the whole state; it prints "ok" when
the change is in effect:

    {"members": [[pid, peer port] or null, ...], "cut": [0]}

While some members are cut off, only connections between the others are allowed: the pid tells whose a connection is,
because a member may dial from any port. Other connections are closed, and new ones refused. When the input ends, so do
the members: not even SIGKILL of the tests leaves one behind. Rejected: threads of the tests' own process; a busy test
would delay heartbeats and cause elections.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import struct
import sys
from typing import Any

from rallypoint.readiness import wait_readable

SOCK_DIAG, BY_FAMILY, REQUEST = 4, 20, 1  # linux/netlink.h, linux/sock_diag.h
END_S = 10.0
Pair = tuple[asyncio.StreamWriter, asyncio.StreamWriter]


class PeerProxy:
    """The proxies, and which members are cut off."""

    def __init__(self) -> None:
        self._members: list[list[int] | None] = []
        self._cut: set[int] = set()
        self._ports: list[int] = []
        self._pairs: dict[Pair, tuple[int, int]] = {}
        self._handles: dict[int, int] = {}  # by pid; a pid may be reused, a descriptor refers to one process

    async def listen(self, count: int) -> list[int]:
        """Open a port for each member."""
        for index in range(count):
            server = await asyncio.start_server(functools.partial(self._carry, index), "127.0.0.1", 0)
            self._ports.append(server.sockets[0].getsockname()[1])
        return self._ports

    def change(self, members: list[list[int] | None], cut: list[int]) -> None:
        """Apply a new state, and close the connections that it does not allow."""
        self._members, self._cut = members, set(cut)
        for pid in {member[0] for member in members if member} - set(self._handles):
            with contextlib.suppress(OSError):
                self._handles[pid] = os.pidfd_open(pid)
        for pid in set(self._handles) - {member[0] for member in members if member}:
            os.close(self._handles.pop(pid))
        for pair, (target, port) in list(self._pairs.items()):
            if not self._allowed(target, port):
                _abort(pair)

    def end_members(self) -> None:
        """Kill all members, and wait for their end."""
        for handle in self._handles.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        for handle in self._handles.values():
            wait_readable(handle, timeout_s=END_S)

    def _allowed(self, target: int, port: int) -> bool:
        if not self._cut:
            return True
        if target in self._cut:
            return False
        inode = _inode(port, self._ports[target])
        others = [member for index, member in enumerate(self._members) if index not in self._cut]
        return any(member is not None and inode in _sockets(member[0]) for member in others)

    async def _carry(self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("peername")[1]
        there = self._members[target] if target < len(self._members) else None
        try:
            if there is None or not self._allowed(target, port):
                raise ConnectionError
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", there[1])
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        self._pairs[pair] = (target, port)
        if not self._allowed(target, port):  # it may have changed meanwhile
            _abort(pair)
        try:
            await asyncio.wait(
                [asyncio.ensure_future(_pump(reader, far_writer)), asyncio.ensure_future(_pump(far_reader, writer))],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            del self._pairs[pair]
            _abort(pair)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


def _abort(pair: Pair) -> None:
    for writer in pair:
        writer.transport.abort()


def _inode(own: int, other: int) -> str:
    """Ask the kernel for the inode of the socket on loopback with these ports, its own and its peer's; "0" if none.

    Rejected: /proc/net/tcp, which becomes slow with many recent connections.
    """
    loopback, nothing = socket.inet_aton("127.0.0.1"), bytes(12)
    ends = struct.pack(">HH", own, other) + 2 * (loopback + nothing) + struct.pack("=III", 0, 2**32 - 1, 2**32 - 1)
    body = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 0, 2**32 - 1) + ends
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(body), BY_FAMILY, REQUEST, 0, 0) + body)
        answer = kernel.recv(8192)
    (kind,) = struct.unpack_from("=H", answer, 4)
    (inode,) = struct.unpack_from("=I", answer, 16 + 68) if kind == BY_FAMILY else (0,)
    return str(inode)


def _sockets(pid: int) -> set[str]:
    """Return the sockets that a process has."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(entry.path).partition(":")
                if kind == "socket":
                    found.add(inode.strip("[]"))
    return found


async def main() -> None:
    """Serve until the input ends."""
    proxy = PeerProxy()
    try:
        print(json.dumps(await proxy.listen(int(sys.argv[1]))), flush=True)
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            state: dict[str, Any] = json.loads(line)
            proxy.change(state["members"], state["cut"])
            print("ok", flush=True)
    finally:
        proxy.end_members()
        for folder in sys.argv[2:]:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # without closing the connections


if __name__ == "__main__":
    asyncio.run(main())
