"""Nodes for a launcher, and a cluster of etcd on another host; every host is a network namespace.

The agents of the nodes (node_agents.py) run the servers of the store, and their relays. A server and a member of etcd
can be killed while workers train.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.etcd.cluster import fast_flags
from tests.hosts import Host, hosts
from tests.pages import pid_at
from tests.raw_peer import AMPLE_S, until
from tests.security.credential_files import CredentialFiles

from rallypoint.deadline import Deadline
from rallypoint.errors import NoQuorum
from rallypoint.etcd.local.member import FLAGS, environment, find_binary
from rallypoint.security.credentials import OPEN
from rallypoint.storage.etcd.lookup import StoreServers, look_up
from rallypoint.store.url import parse_url

from .relayed_nodes import Work

__all__ = ["EtcdNodes", "etcd_nodes"]

MEMBERS = 3
LOOK_S = 5.0


class EtcdNodes(Work):
    """The hosts, and the members of etcd."""

    def __init__(
        self, place: Path, nodes: Sequence[Host], etcd_host: Host, undo: contextlib.ExitStack, protected: bool
    ) -> None:
        super().__init__(place)
        self.nodes = nodes
        self.files = CredentialFiles(place / "files", nodes) if protected else None
        """The token and the certificate of the nodes, for their launchers."""

        self._host = etcd_host
        self._members = [self._start(number, undo) for number in range(MEMBERS)]
        places = ",".join(f"{etcd_host.address}:{client}" for client, _ in map(_ports, range(MEMBERS)))
        self.url = f"etcd://{places}/job"
        until(self._answers, bool)

    def _start(self, number: int, undo: contextlib.ExitStack) -> subprocess.Popen[bytes]:
        address = self._host.address
        client, peer = (f"http://{address}:{port}" for port in _ports(number))
        every = ",".join(f"m{other}=http://{address}:{_ports(other)[1]}" for other in range(MEMBERS))
        folder = str(self.place / f"m{number}")
        flags = {
            "name": f"m{number}",
            "data-dir": folder,
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": every,
        }
        words = [find_binary(), *(f"--{name}={value}" for name, value in flags.items()), *FLAGS, *fast_flags()]
        member = self._host.popen(words, env=environment(), stderr=subprocess.DEVNULL)
        undo.callback(_end, member)
        return member

    def _answers(self) -> bool:
        with contextlib.suppress(NoQuorum):
            self.servers()
            return True
        return False

    def servers(self) -> StoreServers:
        """Return the servers of the store, and which of them leads."""
        with self._host.inside():
            return look_up(parse_url(self.url).etcd(), Deadline(LOOK_S))

    def kill_member(self, number: int) -> None:
        """Kill a member of etcd."""
        self._members[number].kill()
        self._members[number].wait(AMPLE_S)

    def kill_leader(self) -> str:
        """Kill the leading server, once every node has a server; return its URL when another leads."""
        found = until(self.servers, lambda found: bool(found.leader) and len(found.servers) == len(self.nodes))
        known = self.files.credentials if self.files else OPEN
        with self._host.inside():
            os.kill(pid_at(found.leader, known.token, known.tls_ca), signal.SIGKILL)
        until(self.servers, lambda now: now.leader not in ("", found.leader))
        return found.leader


@contextlib.contextmanager
def etcd_nodes(place: Path, count: int = 2, protected: bool = False) -> Iterator[EtcdNodes]:
    """Create nodes and a cluster for the duration of the block; `protected` nodes have a token and TLS."""
    with contextlib.ExitStack() as undo:
        *nodes, etcd_host = undo.enter_context(hosts(count + 1))
        yield EtcdNodes(place, nodes, etcd_host, undo, protected)


def _ports(number: int) -> tuple[int, int]:
    """Return the ports of a member for clients and for peers."""
    return 2379 + 10 * number, 2380 + 10 * number


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait(AMPLE_S)
