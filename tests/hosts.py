"""Several hosts on one machine: network namespaces behind one bridge, each with its own host name and /etc/hosts.

    @pytest.mark.needs("netns")
    def test_a_cut(tmp_path: Path) -> None:
        with hosts(3) as (a, b, c):
            server = a.popen([sys.executable, "-m", "rallypoint", "serve", "--host", a.address, "--port", "29400"])
            agent = Node(b.command([sys.executable, "-m", "rallypoint", "run", ..., f"{a.name}:29400"]), tmp_path, {})
            b.cut()           # off the bridge: both sides see silence, no error
            b.mend()
            a.carrier_lost()  # the interface of `a` itself sees that its cable is gone
            a.mend()
            b.cut_from(a)     # `b` has no route to `a`, and lost its connections to it; all others stay
            b.mend_to(a)
            with a.inside():  # this thread's new sockets belong to `a`, its loopback included
                page = urlopen("http://localhost:29400/statistics")

The hosts are named host-a, host-b, ..., and know each other by name. The bridge is in a namespace of its own, so that
no address, route or device appears outside: tests may run in parallel, and cannot reach each other. `command` and
`popen` keep the pid: every wrapper execs. At the end all processes in the namespaces are killed by pid, and
everything is removed.

Rejected: setting a host's own interface down in order to cut it. Its addresses and routes go with it, and its kernel
then tells every socket at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import string
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["FILES", "IP", "Host", "enter", "hosts"]

IP = shutil.which("ip") or "/usr/sbin/ip"
CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUTS = 0x40000000, 0x00020000, 0x04000000
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19
ETH_P_ALL = 3
FILES = Path("/etc/netns")
"""Where `ip netns exec NAME` finds the files, as NAME/hosts and NAME/resolv.conf, that it mounts over those in /etc."""

RENAME = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


class Host:
    """One host: `name` and `address` are how the others reach it."""

    def __init__(self, namespace: str, switch: str, port: str, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.namespace, self._switch, self._port = namespace, switch, port

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on this host."""
        return [IP, "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", RENAME, self.name, *argv]

    def popen(self, argv: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
        """Start a program on this host; `more` is for `Popen`."""
        return subprocess.Popen(self.command(argv), **more)

    def cut(self) -> None:
        """Take the host off the bridge: nothing arrives any more, either way, and no interface notices."""
        _ip("-n", self._switch, "link", "set", self._port, "nomaster")

    def carrier_lost(self) -> None:
        """Set the bridge's end of the cable down: the host's own interface loses its carrier."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def mend(self) -> None:
        """Undo `cut` and `carrier_lost`."""
        _ip("-n", self._switch, "link", "set", self._port, "master", "bridge", "up")

    def cut_from(self, other: Host) -> None:
        """Lose the route to another host and every connection to it; the other host gets no notice."""
        _ip("-n", self.namespace, "route", "add", "unreachable", f"{other.address}/32")
        ending = [IP, "netns", "exec", self.namespace, "ss", "--kill", "dst", other.address]
        subprocess.run(ending, check=True, capture_output=True)

    def mend_to(self, other: Host) -> None:
        """Undo `cut_from`."""
        _ip("-n", self.namespace, "route", "del", "unreachable", f"{other.address}/32")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Create this thread's sockets on this host; its host name and /etc/hosts do not apply."""
        with _inside(self.namespace):
            yield

    def capturing_socket(self) -> socket.socket:
        """Return a socket that receives every packet to and from this host, at its port of the bridge."""
        with _inside(self._switch):
            made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.htons(ETH_P_ALL))
            made.bind((self._port, ETH_P_ALL))
        return made

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.address} namespace {self.namespace}>"


@contextlib.contextmanager
def hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Create hosts that reach each other by name and address; remove them at the end."""
    token, network = secrets.token_hex(3), f"10.{secrets.randbelow(256)}.{secrets.randbelow(256)}"
    names = [f"host-{letter}" for letter in string.ascii_lowercase[:count]]
    addresses = {name: f"{network}.{number}" for number, name in enumerate(names, 1)}
    switch = f"rally-{token}"
    with contextlib.ExitStack() as undo:
        _add_namespace(switch, undo)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        made = []
        for name, address in addresses.items():
            made.append(Host(f"{switch}-{name}", switch, name, name, address))
            _add_host(made[-1].namespace, switch, name, addresses, undo)
        yield tuple(made)


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts from now on, to a host: its network, its name, its files in /etc."""
    with open(f"/run/netns/{namespace}") as there:
        _enter(there.fileno())
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.unshare(CLONE_NEWNS | CLONE_NEWUTS) or libc.mount(b"", b"/", b"none", MS_SLAVE | MS_REC, None)
    for file in (FILES / namespace).iterdir():
        failed = failed or libc.mount(bytes(file), bytes(Path("/etc", file.name)), b"none", MS_BIND, None)
    if failed:
        raise OSError(ctypes.get_errno(), "cannot have a name and files in /etc of one's own")
    socket.sethostname(namespace.split("-", 2)[2])  # as `hosts` has made it


def _add_host(namespace: str, switch: str, name: str, addresses: dict[str, str], undo: contextlib.ExitStack) -> None:
    _add_namespace(namespace, undo)
    files = FILES / namespace
    files.mkdir(parents=True)
    undo.callback(shutil.rmtree, files)
    known = "".join(f"{address} {other}\n" for other, address in addresses.items())
    (files / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{known}")
    (files / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # where nothing answers, and resolving fails at once
    _ip("-n", switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("-n", switch, "link", "set", name, "master", "bridge", "up")
    _ip("-n", namespace, "addr", "add", f"{addresses[name]}/24", "dev", "eth0")
    _ip("-n", namespace, "link", "set", "eth0", "up")


def _add_namespace(namespace: str, undo: contextlib.ExitStack) -> None:
    _ip("netns", "add", namespace)
    undo.callback(_ip, "netns", "del", namespace)
    undo.callback(_kill_all, namespace)
    _ip("-n", namespace, "link", "set", "lo", "up")


def _kill_all(namespace: str) -> None:
    """Kill all processes in a namespace until there are none: the test has started all of them."""
    while pids := [int(word) for word in _ip("netns", "pids", namespace).split() if int(word) != os.getpid()]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[None]:
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{namespace}") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def _ip(*words: str) -> str:
    return subprocess.run([IP, *words], check=True, stdout=subprocess.PIPE, text=True).stdout
