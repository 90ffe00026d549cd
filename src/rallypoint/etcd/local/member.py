"""A member of a local cluster: its record in cluster.json, its command line, and HTTP requests to it.

Rejected: a configuration file for each member. With one, etcd ignores all flags, and `ps` would not show the settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.etcd.local.process import Process

__all__ = ["HOST", "EtcdMember", "ClusterRecord", "arguments", "ask", "environment", "find_binary", "free_ports"]

HOST = "127.0.0.1"
"""The only address on which local members listen."""

REQUEST_S = 2.0
LOWEST_PORT = 10_000
FLAGS = (
    "--initial-cluster-state=new",
    "--pre-vote=true",
    "--auto-compaction-mode=periodic",
    "--auto-compaction-retention=5m",
    "--snapshot-count=10000",
    "--logger=zap",
    "--log-outputs=stderr",
    "--log-level=warn",
)
"""Flags for small clusters, valid for etcd 3.4 and later."""


class EtcdMember(msgspec.Struct):
    """A member in cluster.json; others connect to `advertised_port`, which differs from `peer_port` only in tests."""

    name: str
    client_port: int
    peer_port: int
    advertised_port: int = msgspec.field(name="dialled_port")
    pid: int | None = None
    start_time: str | None = msgspec.field(default=None, name="born")

    @property
    def process(self) -> Process | None:
        """The last started process of this member, or None."""
        return None if self.pid is None or self.start_time is None else Process(self.pid, self.start_time)

    def running(self) -> bool:
        """Return whether its process is running."""
        return self.process is not None and self.process.running()

    def healthy(self, timeout_s: float = REQUEST_S) -> bool:
        """Return whether it answers and has a leader with a quorum."""
        try:
            return bool(ask(self.client_port, "/health", timeout_s=timeout_s)["health"] == "true")
        except (OSError, HTTPException, ValueError, KeyError):
            return False


class ClusterRecord(msgspec.Struct):
    """The contents of cluster.json."""

    token: str
    members: list[EtcdMember]

    @classmethod
    def load(cls, path: Path) -> ClusterRecord | None:
        """Read the file; return None if it does not exist. Raises ValueError if it is damaged."""
        try:
            record = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        if not record.members:
            raise ValueError(f"{path} names no members")
        return record

    def save(self, path: Path) -> None:
        """Replace the file atomically."""
        temporary = path.with_suffix(".new")
        with temporary.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def find_binary() -> str:
    """Return the path of the etcd program; raise FileNotFoundError that says how to install it."""
    found = shutil.which("etcd") or shutil.which("etcd", path="/usr/bin:/usr/local/bin")
    if found is None:
        raise FileNotFoundError(
            "no program `etcd` on the path or in /usr/bin: install it (Debian, Ubuntu: apt-get install "
            "etcd-server; others: the releases of github.com/etcd-io/etcd)"
        )
    return found


def ask(port: int, path: str, body: Any = None, timeout_s: float = REQUEST_S) -> dict[str, Any]:
    """Send a member an HTTP request, POST if there is a body; raises OSError, HTTPException or ValueError."""
    connection = HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        found = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if not isinstance(found, dict):
        raise ValueError(f"{path} of port {port} is not an object: {found!r}")
    return found


def arguments(member: EtcdMember, all_members: Sequence[EtcdMember], folder: Path, token: str) -> list[str]:
    """Return the flags of a member with its data in `folder`."""
    client, peer, advertised = (
        f"http://{HOST}:{port}" for port in (member.client_port, member.peer_port, member.advertised_port)
    )
    return [
        f"--name={member.name}",
        f"--data-dir={folder / member.name}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={advertised}",
        "--initial-cluster=" + ",".join(f"{one.name}=http://{HOST}:{one.advertised_port}" for one in all_members),
        f"--initial-cluster-token={token}",
        *FLAGS,
    ]


def environment() -> dict[str, str]:
    """Return this process's environment without the variables that etcd reads as flags."""
    kept = ("ETCD_UNSUPPORTED_ARCH",)  # etcd 3.4 needs it on ARM
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_") or name in kept}


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago and are outside the ephemeral range."""
    try:
        ends = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        ends = 0
    candidates = range(LOWEST_PORT, ends if ends > 2 * LOWEST_PORT else 65_536)
    found: list[int] = []
    for port in random.sample(candidates, len(candidates)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found.append(port)
        if len(found) == count:
            break
    return found
