"""Endpoints, host matching, listening and connecting, on real sockets of the loopback only.

Cases that loopback lacks (a name with many addresses, a resolver that hangs, a taken port in one family) use a fake
`getaddrinfo`, or a socket class with one faulty method; the rest of each call is real. Linux and a loopback with ::1
are required: without them these tests fail, they do not skip.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import AddressTaken, ConnectFailed
from rallypoint.net import Endpoint, adopt, connect, is_this_host, listen, parse_endpoint

AMPLE_S = 60.0
NOT_OURS = "fd00:dead:beef::1"


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def reserved() -> Iterator[socket.socket]:
    """A port that refuses connections: bound, not listening."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def addresses(sockets: list[socket.socket]) -> list[str]:
    return [sock.getsockname()[0] for sock in sockets]


def accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=AMPLE_S).close()
    except ConnectionRefusedError:
        return False
    return True


def info(address: str) -> tuple[Any, ...]:
    """One row of `getaddrinfo`'s answer."""
    if ":" in address:
        return (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, 0, 0, 0))
    return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))


def fake_dns(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Callable[[], list[Any]]]) -> None:
    """Resolve these names to given addresses, and all others as before; like DNS, refuse numeric lookups."""
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host not in answers:
            return real(host, port, *args, **more)
        if more.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not numeric")
        return answers[host]()

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def unknown() -> list[Any]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class HangingResolver:
    """Answers only when released; leaving the block releases it."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.released = threading.Event()
        self.gave_up = False

    def __call__(self) -> list[Any]:
        self.asked.set()
        self.gave_up = not self.released.wait(AMPLE_S)
        return unknown()

    def __enter__(self) -> HangingResolver:
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()


# Endpoints

GOOD = {
    None: ("localhost", 29400),
    "": ("localhost", 29400),
    " \t": ("localhost", 29400),
    "localhost": ("localhost", 29400),
    "node-1.cluster.local": ("node-1.cluster.local", 29400),
    "node_1:80": ("node_1", 80),
    " node-1:80": ("node-1", 80),
    "node-1:80 ": ("node-1", 80),
    "\tnode-1:80\n": ("node-1", 80),
    "node-1:0": ("node-1", 0),
    "node-1:65535": ("node-1", 65535),
    "node-1:00080": ("node-1", 80),
    "10.0.0.1": ("10.0.0.1", 29400),
    "10.0.0.1:80": ("10.0.0.1", 80),
    "0.0.0.0:0": ("0.0.0.0", 0),
    "[::1]": ("::1", 29400),
    " [::1]:80": ("::1", 80),
    "[::]:0": ("::", 0),
    "[2001:db8::1]:80": ("2001:db8::1", 80),
    "[::ffff:10.0.0.1]:80": ("::ffff:10.0.0.1", 80),
    "[10.0.0.1]:80": ("10.0.0.1", 80),
    "[node-1]:80": ("node-1", 80),
    "bücher:80": ("bücher", 80),
}
BAD = [
    *("node-1:", "node-1:http", "node-1:-1", "node-1:+1", "node-1: 80", "node-1:65536", "node-1:123456"),
    *("node-1:1_0", "node-1:٣", "node-1:80x", "node-1:" + "9" * 20, "[::1]:", "[::1]80", "[::1]:65536"),
    *(":", ":80", "a b:80", "a :80", "a/b:80", "http://a:80", "a,b:80", "a*:80", "user@a:80", "a;b"),
    *("[::1", "::1]", "[]", "[]:80", "[[::1]]:80", "[::1] :80", "[ ::1 ]:80", "[::1]x:80", "a:b:c"),
]
# A bare IPv6 address holds no port; torch cuts its last group off as one. And torch knows no zones, and takes what
# stands before the last colon for a host whatever it is.
BETTER_THAN_TORCH: dict[str, tuple[str, int] | None] = {
    "::1": ("::1", 29400),
    "::": ("::", 29400),
    "2001:db8::1": ("2001:db8::1", 29400),
    "2001:db8::1:80": ("2001:db8::1:80", 29400),
    "::ffff:10.0.0.1": ("::ffff:10.0.0.1", 29400),
    "fe80::1%eth0": ("fe80::1%eth0", 29400),
    "[fe80::1%eth0]:80": ("fe80::1%eth0", 80),
    "node-1:80:90": None,
    "2001:db8:::1": None,
    "2001::db8::1": None,
    "[a:b]:80": None,
}


@pytest.mark.parametrize(("text", "expected"), [*GOOD.items(), *((t, e) for t, e in BETTER_THAN_TORCH.items() if e)])
def test_an_endpoint_is_read(text: str | None, expected: tuple[str, int]) -> None:
    assert parse_endpoint(text, 29400) == expected


@pytest.mark.parametrize("text", [*BAD, *(t for t, e in BETTER_THAN_TORCH.items() if e is None)])
def test_a_bad_endpoint_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="endpoint") as caught:
        parse_endpoint(f" {text}", 29400)
    assert repr(f" {text}") in str(caught.value)


def test_errors_tell_a_bad_port_from_a_bad_host() -> None:
    with pytest.raises(ValueError, match="port number from 0 to 65535"):
        parse_endpoint("node-1:http", 29400)
    with pytest.raises(ValueError, match="a name, an IPv4 address or"):
        parse_endpoint("node 1:80", 29400)


@pytest.mark.parametrize("endpoint", [Endpoint("node-1", 80), Endpoint("10.0.0.1", 0), Endpoint("::1", 80)])
def test_an_endpoint_as_text_reads_back(endpoint: Endpoint) -> None:
    assert parse_endpoint(str(endpoint), 29400) == endpoint


def test_an_ipv6_endpoint_has_brackets() -> None:
    assert f"{Endpoint('::1', 80)} {Endpoint('node-1', 80)}" == "[::1]:80 node-1:80"


def outcome(parse: Callable[[str | None, int], tuple[str, int]], text: str | None) -> tuple[str, int] | None:
    try:
        return tuple(parse(text, 29400))  # type: ignore[return-value]
    except ValueError:
        return None


@pytest.mark.needs("torch")
def test_endpoints_are_read_as_torch_reads_them() -> None:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    differ = [
        text
        for text in [*GOOD, *BAD, *BETTER_THAN_TORCH]
        if outcome(parse_endpoint, text) != outcome(parse_rendezvous_endpoint, text)
    ]
    assert differ == list(BETTER_THAN_TORCH)


# Which hosts are this one

HOSTS = {
    "localhost": True,
    "LOCALHOST": True,
    "127.0.0.1": True,
    "127.0.0.2": True,
    "127.1": True,
    "::1": True,
    "0:0:0:0:0:0:0:1": True,
    socket.gethostname(): True,
    socket.gethostname().upper(): True,
    "203.0.113.7": False,
    "2001:db8::7": False,
    "no-such-host.invalid": False,
    "": False,
    "a b": False,
    "a..b": False,
    "a" * 70: False,
    "\0": False,
    # These can be bound and yet are no machine's own.
    "0.0.0.0": False,
    "::": False,
    "224.0.0.1": False,
    "ff0e::1": False,
    "255.255.255.255": False,
}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve names by the hosts file only."""
    fake_dns(monkeypatch, {"no-such-host.invalid": unknown, "a b": unknown, "": unknown, "\0": unknown})


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(("host", "expected"), HOSTS.items())
def test_whether_a_host_is_this_one(host: str, expected: bool) -> None:
    assert is_this_host(host) is expected


@pytest.mark.needs("torch")
@pytest.mark.usefixtures("offline")
def test_hosts_match_as_torch_matches_them() -> None:
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    assert {host: _matches_machine_hostname(host) for host in HOSTS} == {host: is_this_host(host) for host in HOSTS}


@pytest.mark.parametrize("host", ["localhost.", " localhost ", " 127.0.0.1 ", f"{socket.gethostname()}."])
def test_space_and_a_final_dot_make_no_other_host(host: str) -> None:
    assert is_this_host(host)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["127.0.0.1"], True),
        ([NOT_OURS, "127.0.0.1"], True),
        ([NOT_OURS], False),
        (["203.0.113.7"], False),
        ([], False),
    ],
)
def test_an_alias_is_this_host_if_an_address_of_it_can_be_bound(
    monkeypatch: pytest.MonkeyPatch, found: list[str], expected: bool
) -> None:
    fake_dns(monkeypatch, {"alias": lambda: [info(address) for address in found]})
    assert is_this_host("alias") is expected


def test_the_host_name_is_this_host_even_if_it_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")
    fake_dns(monkeypatch, {"node-1": unknown, "NODE-1": unknown, "node-2": unknown})
    assert is_this_host("NODE-1")
    assert not is_this_host("node-2")


def test_the_full_name_is_this_host_even_if_it_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")
    canonical = (*info("203.0.113.7")[:3], "node-1.cluster.local", ("203.0.113.7", 0))
    fake_dns(monkeypatch, {"node-1": lambda: [canonical], "Node-1.cluster.local": unknown, "node-1.other": unknown})
    assert is_this_host("Node-1.cluster.local")
    assert not is_this_host("node-1.other")


def test_a_resolver_that_hangs_means_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "_RESOLVE_S", 0.1)
    with HangingResolver() as resolver:
        fake_dns(monkeypatch, {"elsewhere": resolver})
        assert not is_this_host("elsewhere")
        assert resolver.asked.is_set() and not resolver.gave_up


def test_a_slow_resolver_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.current_thread()
    asked_in: list[threading.Thread] = []

    def answer() -> list[Any]:
        asked_in.append(threading.current_thread())
        return [info("127.0.0.1")]

    fake_dns(monkeypatch, {"alias": answer})
    assert is_this_host("alias")
    assert asked_in[0] is not main and asked_in[0].daemon


def test_no_reverse_lookup_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("reverse DNS")

    for name in ("gethostbyaddr", "getfqdn", "getnameinfo"):
        monkeypatch.setattr(socket, name, forbidden)
    assert is_this_host("127.0.0.1") and not is_this_host("203.0.113.7")


# Listening


@pytest.mark.parametrize(("host", "elsewhere"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_a_loopback_request_does_not_listen_on_the_wildcard(opened: ExitStack, host: str, elsewhere: bool) -> None:
    sockets = [opened.enter_context(sock) for sock in listen([host], 0)]
    port = port_of(sockets[0])
    assert accepts("127.0.0.1", port)
    assert accepts("127.0.0.2", port) is elsewhere


@pytest.mark.parametrize(("asked", "other"), [("0.0.0.0", "::1"), ("::", "127.0.0.1"), ("::1", "127.0.0.1")])
def test_one_family_leaves_the_other_alone(opened: ExitStack, asked: str, other: str) -> None:
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family) as held:  # so that no other program listens there, and no caller calls from there
        held.bind((other, 0))
        (sock,) = (opened.enter_context(sock) for sock in listen([asked], port_of(held)))
        assert not accepts(other, port_of(sock))
    opened.enter_context(listen([other], port_of(sock))[0])


@pytest.mark.parametrize("hosts", [["0.0.0.0", "::"], ["127.0.0.1", "::1"], ["::1", "127.0.0.1"]])
def test_port_0_is_one_number_in_both_families(opened: ExitStack, hosts: list[str]) -> None:
    sockets = [opened.enter_context(sock) for sock in listen(hosts, 0)]
    assert addresses(sockets) == hosts
    assert len({port_of(sock) for sock in sockets}) == 1
    assert accepts("127.0.0.1", port_of(sockets[0])) and accepts("::1", port_of(sockets[0]))


class Recorded(socket.socket):
    """A socket class that records its sockets and may refuse to bind some."""

    made: list[socket.socket]
    refusals: dict[int, list[int]]  # by address family: what the next binds to a known port fail with

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.made.append(self)

    def bind(self, address: Any) -> None:
        due = self.refusals.get(self.family)
        if due and self.type == socket.SOCK_STREAM:
            number = due.pop()
            raise OSError(number, os.strerror(number))
        super().bind(address)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    Recorded.made, Recorded.refusals = [], {}
    monkeypatch.setattr(socket, "socket", Recorded)
    return Recorded


def test_a_free_port_that_the_other_family_lacks_is_given_back(opened: ExitStack, recorded: type[Recorded]) -> None:
    recorded.refusals = {socket.AF_INET6: [errno.EADDRINUSE] * 3}
    sockets = [opened.enter_context(sock) for sock in listen(["127.0.0.1", "::1"], 0)]
    assert len({port_of(sock) for sock in sockets}) == 1
    left_open = [sock for sock in recorded.made if sock.fileno() != -1]
    assert left_open == sockets and len(recorded.made) >= 8  # more where a port really was taken


def test_the_search_for_a_common_port_ends(recorded: type[Recorded]) -> None:
    recorded.refusals = {socket.AF_INET6: [errno.EADDRINUSE] * 10_000}
    with pytest.raises(AddressTaken, match="in use"):
        listen(["127.0.0.1", "::1"], 0)
    assert all(sock.fileno() == -1 for sock in recorded.made)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EADDRINUSE, "EADDRINUSE: address already in use"),
        (errno.EADDRNOTAVAIL, "not an address of this machine"),
        (errno.EACCES, "permission denied"),
        (errno.ENOBUFS, os.strerror(errno.ENOBUFS)),
    ],
)
def test_a_refused_address_is_named_with_the_reason_and_tried_once(
    recorded: type[Recorded], number: int, words: str
) -> None:
    recorded.refusals = {socket.AF_INET: [number]}
    with pytest.raises(AddressTaken, match=r"127\.0\.0\.1:1234") as caught:
        listen(["127.0.0.1"], 1234)
    assert caught.value.address == "127.0.0.1:1234" and words in caught.value.why
    assert len(recorded.made) == 1 and recorded.made[0].fileno() == -1


def test_only_a_free_port_that_is_taken_is_tried_again(recorded: type[Recorded]) -> None:
    recorded.refusals = {socket.AF_INET: [errno.EACCES]}
    with pytest.raises(AddressTaken, match="permission denied"):
        listen(["127.0.0.1"], 0)


def test_a_taken_port_is_refused_and_the_others_are_given_back(opened: ExitStack) -> None:
    taken = port_of(opened.enter_context(listen(["127.0.0.1"], 0)[0]))
    with pytest.raises(AddressTaken) as caught:
        listen(["::1", "127.0.0.1"], taken)
    assert (caught.value.address, caught.value.why) == (f"127.0.0.1:{taken}", "EADDRINUSE: address already in use")
    assert not accepts("::1", taken)


def test_a_port_is_free_again_once_closed() -> None:
    (server,) = listen(["127.0.0.1"], 0)
    port = port_of(server)
    with closing(socket.create_connection(("127.0.0.1", port))), closing(server.accept()[0]):
        pass  # both ends go down in order, which leaves the port in TIME_WAIT
    server.close()
    listen(["127.0.0.1"], port)[0].close()


def test_a_literal_of_another_machine_is_refused() -> None:
    with pytest.raises(AddressTaken, match=r"203\.0\.113\.7:\d+: not an address of this machine"):
        listen(["127.0.0.1", "203.0.113.7"], 0)


def test_a_name_listens_on_each_address_that_this_machine_has(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [info(address) for address in (NOT_OURS, "127.0.0.1", "::1", "127.0.0.1")]
    fake_dns(monkeypatch, {"me": lambda: found, "not-me": lambda: [info(NOT_OURS)]})
    sockets = [opened.enter_context(sock) for sock in listen(["127.0.0.1", "me"], 0)]
    assert addresses(sockets) == ["127.0.0.1", "::1"]
    with pytest.raises(AddressTaken, match=r"not an address of this machine"):
        listen(["127.0.0.1", "not-me"], 0)
    with pytest.raises(AddressTaken, match=r"not an address of this machine"):
        listen(["127.0.0.1", NOT_OURS], 0)


def test_a_name_whose_address_is_taken_is_not_passed_over(opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = port_of(opened.enter_context(listen(["127.0.0.1"], 0)[0]))
    fake_dns(monkeypatch, {"me": lambda: [info("127.0.0.1"), info("::1")]})
    with pytest.raises(AddressTaken, match="in use"):
        listen(["me"], taken)


@pytest.mark.parametrize("hosts", [["0.0.0.0", "127.0.0.1"], ["127.0.0.1", "0.0.0.0"], ["localhost", "0.0.0.0"]])
def test_a_wildcard_stands_for_what_it_covers(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch, hosts: list[str]
) -> None:
    fake_dns(monkeypatch, {"localhost": lambda: [info("127.0.0.1")]})
    sockets = [opened.enter_context(sock) for sock in listen(hosts, 0)]
    assert addresses(sockets) == ["0.0.0.0"]


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
@pytest.mark.usefixtures("offline")
def test_a_name_that_cannot_be_resolved_cannot_be_listened_on(host: str) -> None:
    with pytest.raises(AddressTaken, match=r"cannot be resolved|is not a host name") as caught:
        listen(["127.0.0.1", host], 0)
    assert caught.value.address == f"{host}:0"


@pytest.mark.parametrize(("hosts", "port"), [("localhost", 0), ([], 0), (["localhost"], -1), (["localhost"], 65536)])
def test_listening_on_no_address_is_misuse(hosts: Any, port: int) -> None:
    with pytest.raises(ValueError, match="list of hosts and a port"):
        listen(hosts, port)


def test_a_listening_socket_blocks_and_closes_on_exec(monkeypatch: pytest.MonkeyPatch, opened: ExitStack) -> None:
    opened.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
    socket.setdefaulttimeout(5.0)
    sock = opened.enter_context(listen(["127.0.0.1"], 0)[0])
    assert sock.gettimeout() is None and os.get_blocking(sock.fileno()) and not sock.get_inheritable()
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


def test_a_bound_socket_listens_and_a_free_port_is_free() -> None:
    with net.bound_socket() as sock:
        assert is_this_host(sock.getsockname()[0]) and accepts(sock.getsockname()[0], port_of(sock))
    port = net.free_port("127.0.0.1")
    listen(["127.0.0.1"], port)[0].close()


# Adopting


@pytest.mark.parametrize("listening", [False, True])
def test_a_bound_descriptor_is_adopted(reserved: socket.socket, listening: bool) -> None:
    if listening:
        reserved.listen()
    reserved.setblocking(False)
    reserved.set_inheritable(True)
    fd, port = reserved.fileno(), port_of(reserved)
    with adopt(reserved.detach()) as sock:
        assert sock.fileno() == fd and accepts("127.0.0.1", port)
        assert os.get_blocking(fd) and not sock.get_inheritable()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(fd)


def refused_descriptors(stack: ExitStack) -> dict[str, int]:
    server = stack.enter_context(listen(["127.0.0.1"], 0)[0])
    datagram = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    datagram.bind(("127.0.0.1", 0))
    pipe = os.pipe()
    for fd in pipe:
        stack.callback(os.close, fd)
    return {
        "is not a socket": pipe[0],
        "is not a TCP socket": datagram.fileno(),
        "is not a TCP socket; ": stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)).fileno(),
        "is not bound": stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)).fileno(),
        "is connected to 127.0.0.1": stack.enter_context(socket.create_connection(server.getsockname())).fileno(),
    }


def test_descriptors_that_cannot_be_adopted_are_refused_and_stay_open(opened: ExitStack) -> None:
    for words, fd in refused_descriptors(opened).items():
        with pytest.raises(ValueError, match=f"descriptor {fd} {words}"):
            adopt(fd)
        os.fstat(fd)


def test_a_descriptor_that_is_not_open_is_refused() -> None:
    fd = os.dup(0)
    os.close(fd)
    with pytest.raises(ValueError, match=f"descriptor {fd} is not a socket"):
        adopt(fd)


def test_a_descriptor_whose_port_another_listens_on_is_refused_and_stays_open(opened: ExitStack) -> None:
    first, second = (opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(2))
    for sock in (first, second):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port_of(first)))
    first.listen()
    with pytest.raises(AddressTaken, match="in use"):
        adopt(second.fileno())
    os.fstat(second.fileno())


# Connecting


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_connection_is_without_delay_kept_alive_and_blocking(opened: ExitStack, host: str) -> None:
    server = opened.enter_context(listen([host], 0)[0])
    sock = opened.enter_context(connect(host, port_of(server), Deadline(AMPLE_S)))
    assert sock.getpeername() == server.getsockname()
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert sock.gettimeout() is None and not sock.get_inheritable()


def test_a_vanished_host_is_found_within_six_seconds(reserved: socket.socket) -> None:
    def options() -> list[int]:
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        return [reserved.getsockopt(socket.IPPROTO_TCP, name) for name in names]

    net.keep_alive(reserved)
    assert options() == [1, 1, 5, 6000]
    net.keep_alive(reserved, idle_s=10, interval_s=5, count=3)
    assert options() == [10, 5, 3, 25000]


def test_a_name_with_only_ipv4_behind_an_unreachable_ipv6(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch, reserved: socket.socket
) -> None:
    server = opened.enter_context(listen(["127.0.0.1"], 0)[0])
    fake_dns(monkeypatch, {"v4": lambda: [info("127.0.0.1")], "both": lambda: [info("::1"), info("127.0.0.1")]})
    for host in ("v4", "both"):
        sock = opened.enter_context(connect(host, port_of(server), Deadline(AMPLE_S)))
        assert sock.getpeername() == server.getsockname()


@pytest.fixture
def hole_and_server(opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> tuple[int, socket.socket]:
    """The name "two" has a server at its second address; at its first one a full queue neither answers nor refuses."""
    hole, server = (opened.enter_context(sock) for sock in listen(["127.0.0.3", "127.0.0.1"], 0, backlog=0))
    for _ in range(4):
        caller = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        caller.setblocking(False)
        caller.connect_ex(hole.getsockname())
    fake_dns(monkeypatch, {"two": lambda: [info("127.0.0.3"), info("127.0.0.1")]})
    return port_of(hole), server


@pytest.mark.parametrize(
    ("patience_s", "timeout_s"),
    [pytest.param(0.1, AMPLE_S, id="bounded by patience"), pytest.param(1e9, 2.0, id="bounded by its share")],
)
def test_a_black_holed_address_leaves_time_for_a_good_one(
    monkeypatch: pytest.MonkeyPatch, hole_and_server: tuple[int, socket.socket], patience_s: float, timeout_s: float
) -> None:
    monkeypatch.setattr(net, "_PATIENCE_S", (patience_s, patience_s))
    deadline = Deadline(timeout_s)
    with connect("two", hole_and_server[0], deadline) as sock:
        assert sock.getpeername() == hole_and_server[1].getsockname()
    assert not deadline.expired()


@pytest.mark.parametrize("timeout_s", [0, 0.3])
def test_each_address_is_tried_and_its_last_error_reported(
    hole_and_server: tuple[int, socket.socket], timeout_s: float
) -> None:
    port, server = hole_and_server
    server.close()
    with pytest.raises(ConnectFailed) as caught:
        connect("two", port, Deadline(timeout_s))
    assert caught.value.tried == {
        f"127.0.0.3:{port}": "no answer",
        f"127.0.0.1:{port}": "refused, nothing listens there",
    }
    assert (caught.value.peer, caught.value.timeout_s) == (f"two:{port}", timeout_s)


def count_attempts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    called: list[Any] = []

    class Counted(socket.socket):
        def connect(self, address: Any) -> None:
            called.append(address)
            super().connect(address)

    monkeypatch.setattr(socket, "socket", Counted)
    return called


def test_a_timeout_of_0_is_one_attempt(monkeypatch: pytest.MonkeyPatch, reserved: socket.socket) -> None:
    called = count_attempts(monkeypatch)
    with pytest.raises(ConnectFailed):
        connect("127.0.0.1", port_of(reserved), Deadline(0))
    assert called == [reserved.getsockname()]


def test_a_timeout_of_0_reaches_a_server_that_is_up(opened: ExitStack) -> None:
    server = opened.enter_context(listen(["127.0.0.1"], 0)[0])
    opened.enter_context(connect("localhost", port_of(server), Deadline(0)))


def test_a_server_that_comes_up_late_is_reached(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch, reserved: socket.socket
) -> None:
    refused, listening = threading.Event(), threading.Event()

    def come_up_late() -> None:
        assert refused.wait(AMPLE_S)
        reserved.listen()
        listening.set()

    def pause(_: float) -> None:
        refused.set()
        assert listening.wait(AMPLE_S)

    monkeypatch.setattr(time, "sleep", pause)
    late = threading.Thread(target=come_up_late)
    late.start()
    opened.callback(late.join)
    called = count_attempts(monkeypatch)
    opened.enter_context(connect("127.0.0.1", port_of(reserved), Deadline(AMPLE_S)))
    assert len(called) == 2


def test_the_pause_grows_to_a_limit_with_jitter(monkeypatch: pytest.MonkeyPatch, reserved: socket.socket) -> None:
    pauses: list[float] = []
    deadline = Deadline(AMPLE_S)

    def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 10:
            deadline.at = 0.0

    monkeypatch.setattr(time, "sleep", pause)
    with pytest.raises(ConnectFailed):
        connect("127.0.0.1", port_of(reserved), deadline)
    whole = [0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert all(most / 2 <= pause_s <= most for pause_s, most in zip(pauses, whole, strict=True))
    assert len(set(pauses[5:])) > 1


def test_a_socket_connected_to_itself_is_refused_and_leaves_the_port_free(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SelfConnecting(socket.socket):
        def connect(self, address: Any) -> None:
            self.bind(address)
            super().connect(address)
            assert self.getsockname() == self.getpeername()

    port = net.free_port("127.0.0.1")
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", SelfConnecting)
        with pytest.raises(ConnectFailed) as caught:
            connect("127.0.0.1", port, Deadline(0))
    assert caught.value.tried == {f"127.0.0.1:{port}": "refused, only this socket itself answered"}
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:  # no SO_REUSEADDR: TIME_WAIT would show
        sock.bind(("127.0.0.1", port))


def test_a_name_that_cannot_be_resolved_is_retried_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def answer() -> list[Any]:
        asked.append(time.monotonic())
        return unknown()

    fake_dns(monkeypatch, {"ghost": answer})
    deadline = Deadline(0.5)
    with pytest.raises(ConnectFailed) as caught:
        connect("ghost", 29400, deadline)
    assert deadline.expired() and len(asked) > 1
    assert caught.value.tried == {"ghost": "the name cannot be resolved (Name or service not known)"}


def test_a_name_that_appears_late_is_reached(opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    server = opened.enter_context(listen(["127.0.0.1"], 0)[0])
    answers: list[Callable[[], list[Any]]] = [unknown, unknown, lambda: [info("127.0.0.1")]]
    fake_dns(monkeypatch, {"pod-0": lambda: answers.pop(0)()})  # noqa: PLW0108 (a fresh one each time)
    opened.enter_context(connect("pod-0", port_of(server), Deadline(AMPLE_S)))
    assert answers == []


def test_a_name_that_appears_late_is_no_longer_called_unknown(
    monkeypatch: pytest.MonkeyPatch, reserved: socket.socket
) -> None:
    answers = [unknown]
    fake_dns(monkeypatch, {"pod-0": lambda: answers.pop()() if answers else [info("127.0.0.1")]})
    deadline = Deadline(AMPLE_S)
    pauses: list[float] = []

    def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 2:
            deadline.at = 0.0

    monkeypatch.setattr(time, "sleep", pause)
    with pytest.raises(ConnectFailed) as caught:
        connect("pod-0", port_of(reserved), deadline)
    assert list(caught.value.tried) == [f"127.0.0.1:{port_of(reserved)}"]


@pytest.mark.parametrize("timeout_s", [0, 0.2])
def test_a_resolver_that_hangs_does_not_outlast_the_deadline(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> None:
    monkeypatch.setattr(net, "_PATIENCE_S", (2 * AMPLE_S, 2 * AMPLE_S))  # so that only the deadline ends it
    with HangingResolver() as resolver:
        fake_dns(monkeypatch, {"ghost": resolver})
        with pytest.raises(ConnectFailed) as caught:
            connect("ghost", 29400, Deadline(timeout_s))
        assert resolver.asked.is_set() and not resolver.gave_up
    assert "no answer from the resolver" in caught.value.tried["ghost"]


def test_a_deadline_may_be_endless(opened: ExitStack) -> None:
    server = opened.enter_context(listen(["localhost"], 0)[0])
    opened.enter_context(connect("localhost", port_of(server), Deadline(float("inf"))))


def test_ctrl_c_interrupts_a_resolver_that_hangs(opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    # A shell starts its background jobs with SIGINT ignored, and CI may be one.
    opened.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    main = threading.main_thread().ident
    assert main is not None
    with HangingResolver() as resolver:

        def interrupt() -> list[Any]:
            signal.pthread_kill(main, signal.SIGINT)
            return resolver()

        fake_dns(monkeypatch, {"ghost": interrupt})
        with pytest.raises(KeyboardInterrupt):
            connect("ghost", 29400, Deadline(AMPLE_S))
        assert not resolver.gave_up


@pytest.mark.parametrize("error", [KeyboardInterrupt, InterruptedError])
def test_an_interrupted_attempt_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, recorded: type[Recorded], error: type[BaseException]
) -> None:
    def interrupted(*_: Any) -> None:
        raise error

    monkeypatch.setattr(recorded, "connect", interrupted)
    with pytest.raises(error):
        connect("127.0.0.1", 29400, Deadline(AMPLE_S))
    assert [sock.fileno() for sock in recorded.made] == [-1]


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [("a..b", 80, "'a..b' is not a host name"), ("localhost", 0, "1 to 65535"), ("localhost", 65536, "1 to 65535")],
)
def test_connecting_to_no_address_is_misuse(host: str, port: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        connect(host, port, Deadline(AMPLE_S))


# The limit on open files


@pytest.fixture
def file_limit() -> Iterator[tuple[int, int]]:
    """A low soft limit and the original hard limit; both are restored."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowered = (512, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, lowered)
    yield lowered
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_file_limit_is_raised_as_far_as_it_goes_and_never_lowered(file_limit: tuple[int, int]) -> None:
    soft, hard = file_limit
    for wanted, expected in [(soft - 1, soft), (soft + 1, soft + 1), (soft, soft + 1), (hard + 1, hard)]:
        assert net.raise_file_limit(wanted) == expected
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (expected, hard)


def test_raising_the_file_limit_returns_the_old_one_if_forbidden(
    monkeypatch: pytest.MonkeyPatch, file_limit: tuple[int, int]
) -> None:
    def forbidden(*_: Any) -> None:
        raise ValueError("current limit exceeds maximum limit")

    with monkeypatch.context() as patched:
        patched.setattr(resource, "setrlimit", forbidden)
        assert net.raise_file_limit(file_limit[0] + 1) == file_limit[0]


def test_without_file_limits_the_wanted_number_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert net.raise_file_limit(12345) == 12345
