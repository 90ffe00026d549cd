"""Failover: how long a client waits for its next acknowledged write when the leading server, or its host, is gone.

Three hosts (network namespaces behind a bridge, `tests/hosts.py`) have one member of etcd and one server each; a
client on a fourth writes all the time. In turn, the leading server is killed, so that its host refuses connections; it
is stopped; its host vanishes without a word, with etcd's leader elsewhere, or on it. There is no peer for it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hosts import IP, Host, hosts

from benchmarks.rig import Missing, need, say
from benchmarks.table import Line, Target

TITLE = "Failover of a replicated store"
NOTES = (
    "From the fault until the next write of a client is acknowledged: the client has one blocking session with the "
    "addresses of all three servers, and writes one value after the other. Three hosts with a member of etcd and a "
    "server each, the client on a fourth; network namespaces on one machine. *vanishes*: the host is taken off the "
    "bridge, so nothing answers for it. A server's lease in etcd lasts 3 s; when etcd's leader vanishes with the "
    "server, its next leader gives all leases their whole time again, after an election."
)
WHERE = "4 namespaces"
PORT, ETCD_PORT, PEER_PORT = 29400, 2379, 2380
PATIENCE_S = 60.0
WINDOW_S = 15.0
"""How long after a fault the client's longest call is looked for."""

CLIENT = """
import sys, time, rallypoint
store = rallypoint.connect(sys.argv[1], timeout=60)
while True:
    called = time.monotonic()
    store.set("key", "value")
    print(called, time.monotonic(), flush=True)
    time.sleep(0.001)
"""


class Rig:
    """The hosts, with what runs on them."""

    def __init__(self, machines: tuple[Host, ...], folder: Path, stack: contextlib.ExitStack) -> None:
        *self.hosts, self.client_host = machines
        self._folder, self._stack = folder, stack
        for host in self.hosts:
            self._popen(host, self._member(host))
        self._until(lambda: all(self._status(host) for host in self.hosts))
        ends = ",".join(f"{host.address}:{ETCD_PORT}" for host in self.hosts)
        serve = [sys.executable, "-m", "rallypoint", "serve", "--port", str(PORT), "--storage", f"etcd://{ends}/bench"]
        self._serve = {host.name: [*serve, "--host", host.address] for host in self.hosts}
        self.servers = {host.name: self._popen(host, self._serve[host.name]) for host in self.hosts}
        self.leader()
        url = "tcp://" + ",".join(f"{host.address}:{PORT}" for host in self.hosts)
        with (folder / "client").open("wb") as out:
            command = self.client_host.command([sys.executable, "-c", CLIENT, url])
            stack.enter_context(_ended(subprocess.Popen(command, stdout=out)))

    def measure(self, fault: Callable[[Rig, Host], Callable[[], object]], etcd_leads_here: bool) -> float:
        """Have a fault of the leading server, return how long the client waited, and undo the fault."""
        leader = self.leader()
        self._lead_etcd(leader, etcd_leads_here)
        self._until(lambda: bool(self._calls()))
        at = time.monotonic()
        undo = fault(self, leader)
        self._until(lambda: self._calls()[-1][1] > at + 0.5 and self._longest(at)[1] > at)
        time.sleep(1.0)  # another, longer gap may follow
        waited_s = self._longest(at)[1] - at
        undo()
        self._until(lambda: all(self._status(host) and self._statistics(host) for host in self.hosts))
        return waited_s

    def leader(self) -> Host:
        """Return the host whose server leads."""
        found: list[Host] = []

        def look() -> bool:
            found[:] = [host for host in self.hosts if self._statistics(host).get("storage")]
            return len(found) == 1

        self._until(look)
        return found[0]

    def kill(self, host: Host) -> Callable[[], object]:
        """Kill a server."""
        self.servers[host.name].kill()
        return lambda: self.servers.update({host.name: self._popen(host, self._serve[host.name])})

    def stop(self, host: Host) -> Callable[[], object]:
        """Stop a server."""
        self.servers[host.name].send_signal(signal.SIGSTOP)
        return lambda: self.servers[host.name].send_signal(signal.SIGCONT)

    def vanish(self, host: Host) -> Callable[[], object]:
        """Cut a host off."""
        host.cut()
        return host.mend

    def _lead_etcd(self, host: Host, here: bool) -> None:
        """Have etcd's leader on a host, or on any other."""

        def led() -> bool:
            status = {one.name: self._status(one) for one in self.hosts}
            ids = {one.name: _member_id(status[one.name]) for one in self.hosts}
            leading = next((one for one in self.hosts if status[one.name].get("leader") == ids[one.name]), None)
            if leading is None or (leading is host) is here:
                return leading is not None
            target = host if here else next(one for one in self.hosts if one is not host)
            self._ask(leading, ETCD_PORT, "/v3/maintenance/transfer-leadership", {"targetID": ids[target.name]})
            return False

        self._until(led)

    # Inside

    def _member(self, host: Host) -> list[str]:
        peers = ",".join(f"{one.name}=http://{one.address}:{PEER_PORT}" for one in self.hosts)
        client, peer = f"http://{host.address}:{ETCD_PORT}", f"http://{host.address}:{PEER_PORT}"
        return [
            str(shutil.which("etcd")), f"--name={host.name}", f"--data-dir={self._folder / host.name}",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster={peers}", "--pre-vote=true",
        ]  # fmt: skip

    def _popen(self, host: Host, argv: list[str]) -> subprocess.Popen[Any]:
        with (self._folder / f"{host.name}.log").open("ab") as log:
            process = host.popen(argv, stdout=log, stderr=log)
        self._stack.enter_context(_ended(process))
        return process

    def _calls(self) -> list[tuple[float, float]]:
        lines = (self._folder / "client").read_text().split("\n")[:-1]
        return [(float(called), float(returned)) for called, returned in map(str.split, lines)]

    def _longest(self, at: float) -> tuple[float, float]:
        """Return the longest of the calls that ended after an instant, and began soon after it at most."""
        calls = [one for one in self._calls() if one[1] > at and one[0] < at + WINDOW_S]
        return max(calls, key=lambda one: one[1] - one[0], default=(at, at))

    def _statistics(self, host: Host) -> dict[str, Any]:
        return self._ask(host, PORT, "/statistics")

    def _status(self, host: Host) -> dict[str, Any]:
        found = self._ask(host, ETCD_PORT, "/v3/maintenance/status", {})
        return found if found.get("leader", "0") != "0" else {}

    def _ask(self, host: Host, port: int, path: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        found: dict[str, Any] = {}
        with self.client_host.inside(), contextlib.suppress(OSError, ValueError):
            found = json.load(urllib.request.urlopen(f"http://{host.address}:{port}{path}", data, timeout=2.0))
        return found

    def _until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            if time.monotonic() > deadline:
                raise RuntimeError("what was waited for did not come")
            time.sleep(0.02)


FAULTS: dict[str, tuple[Callable[[Rig, Host], Callable[[], object]], bool, float]] = {
    "the leading server is killed": (Rig.kill, False, 1000),
    "it is stopped": (Rig.stop, False, 5000),
    "its host vanishes": (Rig.vanish, False, 5000),
    "its host vanishes, with etcd's leader": (Rig.vanish, True, 5000),
}
"""What happens to the leading server, whether etcd's leader is on its host, and how many milliseconds that may cost."""


def run(quick: bool) -> list[Line]:
    """Measure each fault a few times."""
    need("etcd", "hpack", IP)
    with contextlib.ExitStack() as stack:
        try:
            machines = stack.enter_context(hosts(4))
        except (OSError, subprocess.CalledProcessError) as error:
            raise Missing(f"network namespaces cannot be made here ({error})") from None
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        rig = Rig(machines, Path(folder), stack)
        lines = []
        for what, (fault, etcd_leads_here, most_ms) in FAULTS.items():
            say(f"  {what}")
            waited = [rig.measure(fault, etcd_leads_here) * 1000 for _ in range(1 if quick else 5)]
            lines.append(Line(what, WHERE, "ms", waited, target=Target(at_most=most_ms, unit="ms")))
        return lines


def _member_id(status: dict[str, Any]) -> str:
    return str(status.get("header", {}).get("member_id", ""))


@contextlib.contextmanager
def _ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()
