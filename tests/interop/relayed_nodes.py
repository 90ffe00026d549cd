"""Two nodes with a relay each, and a server with a data directory on a third host; every host is a network namespace.

Workers are forked processes (`tests/interop/torch_processes.py`) that enter the namespace of their node. Each node's
relay listens on its loopback, at the same port. The server can be killed, and a node's link to it cut, while they work.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.hosts import Host, enter, hosts
from tests.raw_peer import AMPLE_S, read_line, until
from tests.security.credential_files import CredentialFiles

from .torch_processes import TorchProcess

__all__ = [
    "RELAY_PORT",
    "SERVER_PORT",
    "RelayedNodes",
    "Work",
    "become_worker",
    "relayed_nodes",
    "stop_asked",
    "tell_progress",
]

SERVER_PORT, RELAY_PORT = 29400, 29500
CUT_S = 1.0
STEPS = 3
"""How many steps show that the work goes on."""


class Work:
    """The workers as seen by a test, which communicates with them through the files `progress` and `stop`."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def steps(self) -> int:
        """Return how many steps the workers have made."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self.place / "progress").read_text())
        return 0

    def work_on(self, members: Sequence[TorchProcess], steps: int = STEPS) -> None:
        """Return when the workers have made a few more steps."""
        enough = self.steps() + steps

        def look() -> int:
            for member in members:
                if not _lives(member.pid):
                    member.result()  # raises its error
            return self.steps()

        until(look, lambda made: made >= enough)

    def stop(self) -> None:
        """Ask the workers to end."""
        (self.place / "stop").write_text("")


class RelayedNodes(Work):
    """The hosts, and what runs on them."""

    def __init__(
        self, place: Path, nodes: Sequence[Host], server_host: Host, undo: contextlib.ExitStack, protected: bool
    ) -> None:
        super().__init__(place)
        self.nodes, self.server_host = nodes, server_host
        self.files = CredentialFiles(place / "files", (*nodes, server_host)) if protected else None
        """The token and the certificate of the server, and of launchers."""

        self.upstream = f"tcp://{server_host.address}:{SERVER_PORT}"
        self._undo = undo
        self._server = self._serve()

    def start_relays(self) -> None:
        """Start a relay on every node."""
        for node in self.nodes:
            self._start(node, "relay", "--upstream", self.upstream, "--port", str(RELAY_PORT))

    def _serve(self) -> subprocess.Popen[bytes]:
        options = [
            "--host",
            self.server_host.address,
            "--port",
            str(SERVER_PORT),
            "--data-dir",
            str(self.place / "data"),
            *(self.files.options() if self.files else ()),
        ]
        return self._start(self.server_host, "serve", *options)

    def _start(self, host: Host, *words: str) -> subprocess.Popen[bytes]:
        """Start one of our commands, and return once it listens."""
        child = host.popen([sys.executable, "-m", "rallypoint", *words], stdout=subprocess.PIPE)
        self._undo.callback(_end, child)
        read_line(child)
        return child

    def arguments(self, rank: int) -> tuple[str, str, str, int]:
        """Return what `become_worker` needs."""
        return self.nodes[rank % len(self.nodes)].namespace, self.upstream, str(self.place), rank

    # Faults

    def restart_server(self) -> None:
        """Kill the server, and start it again with its data."""
        self._server.kill()
        self._server.wait(AMPLE_S)
        self._server = self._serve()

    def cut(self, node: Host) -> None:
        """Cut a node's link to the server for a second; its connections to the other node stay."""
        node.cut_from(self.server_host)
        time.sleep(CUT_S)
        node.mend_to(self.server_host)

    # Statistics

    def statistics(self, node: Host) -> Any:
        """Return the statistics of a node's relay."""
        with node.inside(), urlopen(f"http://127.0.0.1:{RELAY_PORT}/statistics", timeout=AMPLE_S) as page:
            return json.load(page)


@contextlib.contextmanager
def relayed_nodes(place: Path, relays: bool = True, protected: bool = False) -> Iterator[RelayedNodes]:
    """Create two nodes and a server for the duration of the block; without `relays`, a launcher starts the relays.

    A `protected` server has a token and TLS.
    """
    with contextlib.ExitStack() as undo:
        *nodes, server_host = undo.enter_context(hosts(3))
        made = RelayedNodes(place, nodes, server_host, undo, protected)
        if relays:
            made.start_relays()
        yield made


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# In a worker


def become_worker(namespace: str, upstream: str) -> None:
    """Enter a node, and set the environment as its launcher would."""
    enter(namespace)
    os.environ.update(
        GLOO_SOCKET_IFNAME="eth0",
        TP_SOCKET_IFNAME="eth0",
        RALLYPOINT_RELAY=f"tcp://127.0.0.1:{RELAY_PORT}?upstream={upstream.removeprefix('tcp://')}",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(RELAY_PORT),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def tell_progress(place: str, step: int) -> None:
    """Report the number of steps to the test; for one rank only."""
    new = Path(place, "progress.new")
    new.write_text(str(step))
    new.replace(Path(place, "progress"))


def stop_asked(place: str) -> bool:
    """Return whether the test has asked the workers to end."""
    return Path(place, "stop").exists()
