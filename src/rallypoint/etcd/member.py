"""A member of a local cluster: what is written down of it, the command that runs it, and how to ask it something.

Rejected: a configuration file for each member; etcd ignores all flags beside one, and `ps` would not say what runs.
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

from rallypoint.etcd.process import Process

__all__ = ["HOST", "Member", "Record", "arguments", "ask", "environment", "find_binary", "free_ports"]

HOST = "127.0.0.1"
"""Local members listen here only."""

ASK_S = 2.0
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
"""What suits small clusters; etcd 3.4 and all later have these flags."""


class Member(msgspec.Struct):
    """A member as cluster.json has it; the others dial `dialled_port`, which is `peer_port` but in tests."""

    name: str
    client_port: int
    peer_port: int
    dialled_port: int
    pid: int | None = None
    born: str | None = None

    @property
    def process(self) -> Process | None:
        """The process of this member that was started last, or None."""
        return None if self.pid is None or self.born is None else Process(self.pid, self.born)

    def running(self) -> bool:
        """Say whether its process is there."""
        return self.process is not None and self.process.running()

    def healthy(self, timeout_s: float = ASK_S) -> bool:
        """Say whether it answers, and knows a leader that has a quorum."""
        try:
            return bool(ask(self.client_port, "/health", timeout_s=timeout_s)["health"] == "true")
        except (OSError, HTTPException, ValueError, KeyError):
            return False


class Record(msgspec.Struct):
    """All that is written down of a cluster."""

    token: str
    members: list[Member]

    @classmethod
    def load(cls, path: Path) -> Record | None:
        """Read it; None where there is none. Raises ValueError where the file is damaged."""
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
        """Replace what is written down, as a whole."""
        draft = path.with_suffix(".new")
        with draft.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)


def find_binary() -> str:
    """Return the path of the etcd program; raise FileNotFoundError with what to install."""
    found = shutil.which("etcd") or shutil.which("etcd", path="/usr/bin:/usr/local/bin")
    if found is None:
        raise FileNotFoundError(
            "there is no program `etcd` on the path or in /usr/bin: install it (Debian, Ubuntu: apt-get install "
            "etcd-server; others: the releases of github.com/etcd-io/etcd)"
        )
    return found


def ask(port: int, path: str, body: Any = None, timeout_s: float = ASK_S) -> dict[str, Any]:
    """Ask a member by HTTP: GET, or POST where there is a body; raises OSError, HTTPException or ValueError."""
    connection = HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        found = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if not isinstance(found, dict):
        raise ValueError(f"{path} of port {port} is no object: {found!r}")
    return found


def arguments(member: Member, all_members: Sequence[Member], folder: Path, token: str) -> list[str]:
    """Return the flags that run a member, with its data in a folder."""
    client, peer, dialled = (
        f"http://{HOST}:{port}" for port in (member.client_port, member.peer_port, member.dialled_port)
    )
    return [
        f"--name={member.name}",
        f"--data-dir={folder / member.name}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={dialled}",
        "--initial-cluster=" + ",".join(f"{one.name}=http://{HOST}:{one.dialled_port}" for one in all_members),
        f"--initial-cluster-token={token}",
        *FLAGS,
    ]


def environment() -> dict[str, str]:
    """Return this process's environment without what etcd would take for flags."""
    kept = ("ETCD_UNSUPPORTED_ARCH",)  # without which etcd 3.4 does not run on ARM
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_") or name in kept}


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, and that the system gives to nobody who does not ask for them."""
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
