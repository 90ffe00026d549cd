"""A host that vanishes: it says no farewell, and nothing answers for it any more. Its leases must fall all the same.

The host is a network namespace at the end of a pair of virtual Ethernet devices; it vanishes when its end goes down.
Only the server's kernel can notice, by its keep-alive probes (`net.keep_alive`), and then the grace runs. How many
seconds that takes is printed (`pytest -s`), and asserted only to be within the deadline.

Rejected: setting our own end down. That takes the route away too, and the kernel would tell the server at once.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import rallypoint

DEADLINE_S = 60
IP = shutil.which("ip") or "/usr/sbin/ip"

HOLDER = """
import sys, rallypoint
store = rallypoint.connect(sys.argv[1], timeout=60)
store.lease("held", "by a host")
print("held", flush=True)
sys.stdin.read()
"""


class Host(NamedTuple):
    """Another host, and the address at which it finds us; nobody else uses either."""

    namespace: str
    device: str
    our_address: str

    def run(self, *command: str) -> subprocess.Popen[str]:
        """Start a program there."""
        return subprocess.Popen(
            [IP, "netns", "exec", self.namespace, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def vanish(self) -> None:
        """Cut its link."""
        _ip("-n", self.namespace, "link", "set", self.device, "down")


@pytest.fixture
def host() -> Iterator[Host]:
    token = secrets.token_hex(3)
    namespace, ours, theirs = f"rally-{token}", f"rally{token}a", f"rally{token}b"
    net = f"10.213.{secrets.randbelow(256)}"
    first = 4 * secrets.randbelow(64) + 1
    our_address, their_address = f"{net}.{first}", f"{net}.{first + 1}"
    inside = ("-n", namespace)
    with contextlib.ExitStack() as undo:
        _ip("netns", "add", namespace)
        undo.callback(_ip, "netns", "del", namespace)
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
        undo.callback(_ip, "link", "del", ours)
        _ip("link", "set", theirs, "netns", namespace)
        _ip("addr", "add", f"{our_address}/30", "dev", ours)
        _ip(*inside, "addr", "add", f"{their_address}/30", "dev", theirs)
        _ip("link", "set", ours, "up")
        _ip(*inside, "link", "set", theirs, "up")
        yield Host(namespace, theirs, our_address)


@pytest.mark.needs("netns")
def test_a_vanished_host_loses_its_leases(host: Host) -> None:
    with (
        rallypoint.Server(host=host.our_address) as server,
        rallypoint.connect(server.url, timeout=DEADLINE_S) as store,
        store.watch() as changes,
    ):
        process = host.run(sys.executable, "-c", HOLDER, server.url)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            assert changes.next().value == b"by a host"
            cut_at = time.monotonic()
            host.vanish()
            gone = changes.next(timeout=DEADLINE_S)
            print(f"a vanished host was noticed after {time.monotonic() - cut_at:.1f} s")
            assert (gone.key, gone.value) == ("held", None)
            assert process.poll() is None
        finally:
            process.kill()
            process.communicate()


def _ip(*words: str) -> None:
    subprocess.run([IP, *words], check=True)
