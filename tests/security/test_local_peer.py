"""Whose process is at the other end of a connection: real sockets, real users, and peers that are gone."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.hosts import IP, hosts
from tests.raw_peer import AMPLE_S

from rallypoint.readiness import wait_readable
from rallypoint.security.local_peer import is_local, may_use, peer_uid

NOBODY = 65534
KINDS = ("ipv4", "other loopback", "ipv6", "mapped", "unix")
RESET = struct.pack("ii", 1, 0)

Connect = Callable[[], socket.socket]


def listening(kind: str, place: Path) -> socket.socket:
    """Return a listening socket of one kind."""
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{place}")  # a name, which every user can reach
    elif kind in ("ipv6", "mapped"):
        listener = socket.socket(socket.AF_INET6)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, kind == "ipv6")
        listener.bind(("::1" if kind == "ipv6" else "::", 0))
    else:
        listener = socket.create_server(("127.0.0.1" if kind == "ipv4" else "127.0.0.2", 0))
    listener.listen()
    listener.settimeout(AMPLE_S)
    return listener


def connection_to(listener: socket.socket, kind: str) -> socket.socket:
    """Connect; a client of a mapped address uses IPv4, and does not know of IPv6."""
    address: Any = listener.getsockname()
    if kind == "mapped":
        return socket.create_connection(("127.0.0.1", address[1]), AMPLE_S)
    sock = socket.socket(listener.family)
    sock.settimeout(AMPLE_S)
    sock.connect(address)
    return sock


@contextlib.contextmanager
def pair(kind: str, place: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield the server's and the client's end of a connection within this process."""
    with listening(kind, place) as listener, connection_to(listener, kind) as client:
        accepted, _ = listener.accept()
        with accepted:
            yield accepted, client


@contextlib.contextmanager
def of_another_user(kind: str, place: Path, act: Callable[[socket.socket], object]) -> Iterator[socket.socket]:
    """Yield the server's end of a connection from a process of another user, which has done `act` with its own end."""
    with listening(kind, place) as listener:
        done, stay = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.close(stay[1])
                os.setuid(NOBODY)
                sock = connection_to(listener, kind)
                act(sock)
                os.write(done[1], b"!")
                os.read(stay[0], 1)  # until the parent closes its end
            os._exit(0)
        os.close(done[1])
        os.close(stay[0])
        try:
            accepted, _ = listener.accept()
            assert wait_readable(done[0], timeout_s=AMPLE_S) and os.read(done[0], 1) == b"!"
            with accepted:
                yield accepted
        finally:
            os.close(stay[1])
            os.close(done[0])
            os.waitpid(pid, 0)


def nothing(_: socket.socket) -> None:
    """Leave the connection open."""


def close(sock: socket.socket) -> None:
    """Send a request and close: the request is still there to be read."""
    sock.sendall(b"request")
    sock.close()


def reset(sock: socket.socket) -> None:
    sock.sendall(b"request")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sock.close()


def half_close(sock: socket.socket) -> None:
    sock.sendall(b"request")
    sock.shutdown(socket.SHUT_WR)


def wait_for(sock: socket.socket, event: int) -> None:
    """Wait until the kernel reports an event of the peer."""
    poller = select.poll()
    poller.register(sock, event)
    assert poller.poll(AMPLE_S * 1000)


# The same user


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_of_the_same_user_may_use_the_server(kind: str, tmp_path: Path) -> None:
    with pair(kind, tmp_path) as (accepted, client):
        assert peer_uid(accepted) == os.geteuid()
        assert peer_uid(client) == os.geteuid()
        assert may_use(accepted) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_also_one_that_has_ended_its_sending(kind: str, tmp_path: Path) -> None:
    with pair(kind, tmp_path) as (accepted, client):
        half_close(client)
        wait_for(accepted, select.POLLRDHUP)
        assert (peer_uid(accepted), may_use(accepted)) == (os.geteuid(), "")


def test_of_many_connections_each_is_found(tmp_path: Path) -> None:
    with listening("ipv4", tmp_path) as listener, contextlib.ExitStack() as ends:
        for _ in range(50):
            ends.enter_context(connection_to(listener, "ipv4"))
            accepted = ends.enter_context(listener.accept()[0])
            assert peer_uid(accepted) == os.geteuid()


def test_looking_leaves_nothing_open(tmp_path: Path) -> None:
    with pair("ipv4", tmp_path) as (accepted, _):
        before = os.listdir("/proc/self/fd")
        assert [may_use(accepted) for _ in range(5)] == [""] * 5
        assert os.listdir("/proc/self/fd") == before


# Another user


@pytest.mark.needs("root")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", [nothing, half_close])
def test_a_process_of_another_user_may_not(kind: str, act: Callable[[socket.socket], object], tmp_path: Path) -> None:
    with of_another_user(kind, tmp_path, act) as accepted:
        assert peer_uid(accepted) == NOBODY
        assert may_use(accepted) == f"it is a process of user {NOBODY}, and this server's user is {os.geteuid()}"


@pytest.mark.needs("root")
@pytest.mark.parametrize("kind", KINDS)
def test_root_may_use_the_server_of_another_user(kind: str, tmp_path: Path) -> None:
    with pair(kind, tmp_path) as (accepted, _):
        os.seteuid(NOBODY)
        try:
            assert (peer_uid(accepted), may_use(accepted)) == (0, "")
        finally:
            os.seteuid(0)


@pytest.mark.needs("root")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unix"])
@pytest.mark.parametrize("act", [close, reset])
def test_a_stranger_that_closes_before_we_look_is_not_let_in(
    kind: str, act: Callable[[socket.socket], object], tmp_path: Path
) -> None:
    """Its request can still be read. Some kernels say that a socket without a process is root's."""
    with of_another_user(kind, tmp_path, act) as accepted:
        wait_for(accepted, select.POLLRDHUP)
        assert may_use(accepted).startswith("its user is unknown: ")
        with pytest.raises(OSError, match=r"."):
            peer_uid(accepted)
        assert accepted.recv(100) == b"request"


@pytest.mark.needs("root")
@pytest.mark.parametrize("act", [close, reset])
def test_the_user_of_a_unix_socket_is_known_after_its_end(
    act: Callable[[socket.socket], object], tmp_path: Path
) -> None:
    with of_another_user("unix", tmp_path, act) as accepted:
        assert may_use(accepted).startswith(f"it is a process of user {NOBODY}")


# A peer that is gone


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unix"])
@pytest.mark.parametrize("act", [close, reset])
def test_a_peer_that_is_gone_is_refused(kind: str, act: Callable[[socket.socket], object], tmp_path: Path) -> None:
    with pair(kind, tmp_path) as (accepted, client):
        act(client)
        wait_for(accepted, select.POLLRDHUP)
        assert may_use(accepted).startswith("its user is unknown: ")


def test_a_socket_of_our_own_that_is_closed_is_refused(tmp_path: Path) -> None:
    with pair("ipv4", tmp_path) as (accepted, _):
        accepted.close()
        assert may_use(accepted).startswith("its user is unknown: ")


class Addresses:
    """A connection that does not exist, between two addresses."""

    family = socket.AF_INET

    def __init__(self, own: tuple[str, int], peer: tuple[str, int]) -> None:
        self.getsockname, self.getpeername = (lambda: own), (lambda: peer)


def test_a_listener_at_the_port_of_a_peer_is_not_the_peer(tmp_path: Path) -> None:
    """The kernel, asked for a connection that is gone, may find who listens at its port now."""
    with listening("ipv4", tmp_path) as listener, pair("ipv4", tmp_path) as (accepted, _):
        gone: Any = Addresses(("127.0.0.1", 9), listener.getsockname())
        assert peer_uid(gone) is None
        mistaken: Any = Addresses(accepted.getpeername(), listener.getsockname())
        assert peer_uid(mistaken) is None


# A kernel that does not tell


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT])
def test_without_the_kernel_a_loopback_address_must_do(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(socket.socket):
        def __init__(self, family: int = -1, *more: Any, **others: Any) -> None:
            if family == socket.AF_NETLINK:
                raise OSError(number, os.strerror(number))
            super().__init__(family, *more, **others)

    with pair("ipv4", tmp_path) as (accepted, _):
        monkeypatch.setattr(socket, "socket", Refusing)
        assert (peer_uid(accepted), may_use(accepted)) == (None, "")
        elsewhere: Any = Addresses(("10.0.0.1", 1), ("10.0.0.1", 2))
        assert may_use(elsewhere) == "its user is unknown: the kernel does not tell"


def test_a_process_without_free_descriptors_lets_nobody_in(tmp_path: Path) -> None:
    """It cannot ask, which is not the same as a kernel that does not tell."""
    with pair("ipv4", tmp_path) as (accepted, _):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
                os.write(writer, may_use(accepted).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as said:
            assert said.read() == b"its user is unknown: Too many open files"
        os.waitpid(pid, 0)


# Other machines


@pytest.mark.parametrize(
    ("own", "peer", "local"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.3.2.1", True),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "127.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("127.0.0.1", "10.0.0.2", False),  # a router may be told to deliver that
        ("::1", "::1", True),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("::ffff:10.0.0.1", "::ffff:127.0.0.1", True),
        ("fe80::1%eth0", "fe80::1%eth0", True),
        ("fe80::1%eth0", "fe80::2%eth0", False),
        ("fd00::2", "fd00::3", False),
        ("2001:db8::7f00:1", "2001:db8::127.0.0.1", False),
    ],
)
def test_which_addresses_are_of_this_machine(own: str, peer: str, local: bool) -> None:
    more = (0, 0) if ":" in own else ()
    assert is_local((own, 1, *more), (peer, 2, *more)) is local


def test_a_unix_socket_is_of_this_machine() -> None:
    for own, peer in (("/run/socket", ""), ("", "/run/socket"), (b"\0abstract", b"")):
        assert is_local(own, peer)


@pytest.mark.needs("netns")
def test_an_address_of_this_machine_that_is_not_loopback(tmp_path: Path) -> None:
    """Of a process of the same user, of another user, and of another machine."""
    with hosts(2) as (here, there):
        with here.inside():
            listener = socket.create_server((here.address, 0))
            client = socket.create_connection(listener.getsockname(), AMPLE_S)
            accepted, peer = listener.accept()
            assert peer[0] == here.address
            assert (peer_uid(accepted), may_use(accepted)) == (os.geteuid(), "")
            client.close()
            wait_for(accepted, select.POLLRDHUP)
            assert may_use(accepted).startswith("its user is unknown: ")
            accepted.close()
        with there.inside():
            client = socket.create_connection(listener.getsockname(), AMPLE_S)
        with here.inside():
            accepted, peer = listener.accept()
            assert peer[0] == there.address
            assert "accepted only from this machine" in may_use(accepted)
        for each in (listener, client, accepted):
            each.close()


@pytest.mark.needs("netns")
def test_an_address_of_one_link(tmp_path: Path) -> None:
    """An IPv6 address that means something only with its interface."""
    address = "fe80::5"
    with hosts(1) as (here,), here.inside():
        add = [IP, "-n", here.namespace, "addr", "add", f"{address}/64", "dev", "eth0", "nodad"]
        subprocess.run(add, check=True, timeout=AMPLE_S)
        number = socket.if_nametoindex("eth0")
        with socket.socket(socket.AF_INET6) as listener, socket.socket(socket.AF_INET6) as client:
            listener.bind((address, 0, 0, number))
            listener.listen()
            client.connect(listener.getsockname())
            accepted, _ = listener.accept()
            with accepted:
                assert (peer_uid(accepted), may_use(accepted)) == (os.geteuid(), "")


@pytest.mark.needs("netns")
def test_a_connection_of_another_network_namespace_is_not_in_our_table(tmp_path: Path) -> None:
    """As when a process takes over a listening socket of another container: the kernel does not tell."""
    with hosts(1) as (there,):
        with there.inside():
            listener = socket.create_server(("127.0.0.1", 0))
            client = socket.create_connection(listener.getsockname(), AMPLE_S)
            accepted, _ = listener.accept()
            assert peer_uid(accepted) == os.geteuid()
        assert (peer_uid(accepted), may_use(accepted)) == (None, "")
        for each in (listener, client, accepted):
            each.close()
