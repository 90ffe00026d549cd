"""Nodes for a launcher, and a cluster of etcd on another host: all of them network namespaces.

The agents of the nodes run the servers of the store, and their relays; a server, and a member of etcd, can be killed
while workers train. Agents are members of the crew (`tests/interop/crew.py`) that enter the namespace of their node.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.request import urlopen

from tests.etcd.cluster import fast_flags
from tests.hosts import Host, enter, hosts
from tests.wire import AMPLE_S, until

from rallypoint.deadline import Deadline
from rallypoint.errors import NoQuorum
from rallypoint.etcd.member import FLAGS, environment, find_binary
from rallypoint.storage.etcd_lookup import Found, look_up
from rallypoint.store.url import parse_url

from .agents import run_agent
from .relayed_nodes import Work

__all__ = ["EtcdNodes", "etcd_nodes", "run_job_on", "run_torchrun_on"]

MEMBERS = 3
LOOK_S = 5.0


class EtcdNodes(Work):
    """The hosts, and the members of etcd."""

    def __init__(self, place: Path, nodes: Sequence[Host], etcd_host: Host, undo: contextlib.ExitStack) -> None:
        super().__init__(place)
        self.nodes = nodes
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

    def servers(self) -> Found:
        """Return the servers of the store, and which of them leads."""
        with self._host.inside():
            return look_up(parse_url(self.url).etcd(), Deadline(LOOK_S))

    def kill_member(self, number: int) -> None:
        """Kill a member of etcd."""
        self._members[number].kill()
        self._members[number].wait(AMPLE_S)

    def kill_leader(self) -> str:
        """Kill the server that leads, once every node has one; return its URL, when another leads."""
        found = until(self.servers, lambda found: found.leader and len(found.servers) == len(self.nodes))
        with (
            self._host.inside(),
            urlopen(f"http://{found.leader.removeprefix('tcp://')}/about", timeout=AMPLE_S) as page,
        ):
            os.kill(int(json.load(page)["pid"]), signal.SIGKILL)
        until(self.servers, lambda now: now.leader not in ("", found.leader))
        return str(found.leader)


@contextlib.contextmanager
def etcd_nodes(place: Path, count: int = 2) -> Iterator[EtcdNodes]:
    """Have so many nodes and a cluster for as long as the block lasts."""
    with contextlib.ExitStack() as undo:
        *nodes, etcd_host = undo.enter_context(hosts(count + 1))
        yield EtcdNodes(place, nodes, etcd_host, undo)


def _ports(number: int) -> tuple[int, int]:
    """Return the ports of a member, for clients and for the others."""
    return 2379 + 10 * number, 2380 + 10 * number


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait(AMPLE_S)


# In a member of the crew


def run_torchrun_on(namespace: str, words: list[str], output: str) -> int:
    """Be torchrun on a node."""
    _become_node(namespace)
    return run_agent(words, output)


def run_job_on(namespace: str, words: list[str], output: str) -> int:
    """Be `rallypoint run` on a node."""
    from rallypoint.cli import main

    _become_node(namespace)
    pipe = os.open(output, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(pipe, descriptor)
    try:
        main(["run", *words])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _become_node(namespace: str) -> None:
    enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
