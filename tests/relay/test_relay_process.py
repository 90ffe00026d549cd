"""`rallypoint relay` and `Relay` as real processes: what they print, bind, adopt and refuse, and when they end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import operator
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner
from tests.ports import reserve_port
from tests.raw_peer import AMPLE_S, RawPeer, http, may_listen, read_line, script, until, wait_for_end
from tests.relay.relays import RelayThread
from tests.served import server_fixture

import rallypoint
from rallypoint import net, unix_socket
from rallypoint.cli import main
from rallypoint.client.routing.relay_address import VARIABLE
from rallypoint.deadline import Deadline
from rallypoint.errors import AddressTaken, ServerFailed
from rallypoint.relay import process
from rallypoint.relay import server as relay_server
from rallypoint.relay.server import RelayServer

COMMAND = [sys.executable, "-m", "rallypoint", "relay"]
SAYS = re.compile(r"rallypoint relays (\S+) at (\S+?)(?: and (\S+))?")


server = server_fixture("module")


@contextlib.contextmanager
def relay(upstream: str, *options: object, end: int = signal.SIGTERM, **more: Any) -> Iterator[list[str]]:
    """Run the command; yield its output: upstream, URL, a second URL or "", the variable. End it by a signal."""
    child = subprocess.Popen(
        [*COMMAND, "--upstream", upstream, *map(str, options)], stdout=subprocess.PIPE, bufsize=0, **more
    )
    try:
        said = SAYS.fullmatch(read_line(child))
        assert said
        variable, _, value = read_line(child).partition("=")
        assert variable == VARIABLE
        yield [*(part or "" for part in said.groups()), value]
        child.send_signal(end)
        assert child.wait(AMPLE_S) == 0
    finally:
        child.kill()
        child.communicate()


def fails(*options: object) -> tuple[int, str]:
    """Run a command that must fail; return its exit code and its error output."""
    done = subprocess.run([*COMMAND, *map(str, options)], capture_output=True, text=True, timeout=AMPLE_S, check=False)
    assert done.stdout == "" and "Traceback" not in done.stderr
    return done.returncode, done.stderr


def address(url: str) -> tuple[str, int]:
    host, port = net.parse_endpoint(url.removeprefix("tcp://"), 0)
    return host, port


def serves(url: str) -> bool:
    with RawPeer(address(url)) as peer:
        peer.work(2)
    return True


# The command


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_its_address_and_relays_there(end: int, server: rallypoint.Server, tmp_path: Path) -> None:
    file = tmp_path / "url"
    with relay(server.url, "--url-file", file, end=end) as (upstream, url, second, variable):
        assert (upstream, second) == (server.url, "") and url.startswith("tcp://127.0.0.1:")
        assert file.read_text() == f"{url}\n"
        assert variable == f"{url}?upstream={server.url.removeprefix('tcp://')}"
        assert serves(url)
        with rallypoint.connect(url) as store, rallypoint.connect(server.url) as plain:
            store.set("k", "v")
            assert plain.get("k") == b"v"
    assert not file.exists()


def test_it_listens_before_its_server_does() -> None:
    port = reserve_port()
    with relay(f"tcp://127.0.0.1:{port}") as (_, url, _, _):
        health = http(address(url), b"GET /healthz HTTP/1.0\r\n\r\n").decode()
        assert f"no connection to the server at 127.0.0.1:{port}" in health
        with RawPeer(address(url)) as early:  # a client of PyTorch's waits
            early.wait(b"/k")
            with rallypoint.Server(port=port) as server, rallypoint.connect(server.url) as store:
                store.set("k", "v")
                assert early.read(1) == b"\0" and early.get(b"/k") == b"v"


def test_it_logs_that_it_has_no_server(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOG_INTERVAL_S", 0.0)
    asked: list[str] = ["ok", "no connection to the server at h:1 for 3.0 s: refused", "ok"]

    class Server:
        def health(self) -> str:
            if not asked:
                raise EOFError
            return asked.pop(0)

    with caplog.at_level(logging.WARNING, "rallypoint.relay"), pytest.raises(EOFError):
        asyncio.run(process._log_outage(cast(RelayServer, Server())))
    assert [record.getMessage() for record in caplog.records] == [
        "no connection to the server at h:1 for 3.0 s: refused"
    ]


def test_it_listens_on_several_hosts_and_a_unix_socket(server: rallypoint.Server, tmp_path: Path) -> None:
    path = tmp_path / "s"
    options = ("--host", "127.0.0.1", "--host", "127.0.0.3", "--unix", path)
    with relay(server.url, *options) as (_, url, second, variable):
        assert second == f"unix://{path}" and variable.startswith(f"{second}?upstream=127.0.0.1:")
        assert serves(url) and serves(url.replace("127.0.0.1", "127.0.0.3"))
        with unix_socket.connect(str(path), Deadline(AMPLE_S)) as sock:
            sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert sock.recv(12) == b"HTTP/1.1 200"
    assert not path.exists()


def test_it_may_listen_on_a_unix_socket_alone(
    server: rallypoint.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    with relay(server.url, "--unix", path) as (_, url, second, variable):
        assert (url, second) == (f"unix://{path}", "")
        monkeypatch.setenv(VARIABLE, variable)
        with rallypoint.connect(server.url) as store:
            store.set("by", "unix")
            assert store._backend._route.relayed  # type: ignore[attr-defined]
        code, said = fails("--upstream", server.url, "--unix", path)
        assert code == 1 and f"cannot listen on unix://{path}: another process is listening there" in said
    assert not path.exists()


def test_the_socket_file_of_a_killed_relay_is_replaced(server: rallypoint.Server, tmp_path: Path) -> None:
    path = tmp_path / "s"
    command = [*COMMAND, "--upstream", server.url, "--unix", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as child:
        read_line(child)
        child.kill()
    assert path.is_socket()
    with relay(server.url, "--unix", path):
        pass
    assert not path.exists()


def test_it_adopts_bound_sockets(server: rallypoint.Server, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.create_server(("127.0.0.1", 0)) as tcp, unix_socket.listen(path) as unix:
        fds = (tcp.fileno(), unix.fileno())
        with relay(server.url, "--fd", fds[0], "--fd", fds[1], pass_fds=fds) as (_, url, _, _):
            assert address(url) == tcp.getsockname() and serves(url)
            with unix_socket.connect(path, Deadline(AMPLE_S)) as sock:
                sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
                assert sock.recv(12) == b"HTTP/1.1 200"
    assert fails("--upstream", server.url, "--fd", 0)[0] == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "Missing option '--upstream'"),
        (["--upstream", "head:29400"], "etcd; a server is tcp://HOST:PORT"),
        (["--upstream", "file:///x"], "'file:///x' is not a server: use tcp://host:port"),
        (["--upstream", "etcd://h/s?prefix=p"], "'etcd://h/s?prefix=p' is not a server"),
        (["--upstream", "etcd://h/s?user=u"], "give both user= and password="),
        (["--upstream", "tcp://h:1/prefix"], "'tcp://h:1/prefix' is not a server"),
        (["--upstream", "tcp://h:1?timeout=3"], "'tcp://h:1?timeout=3' is not a server"),
        (["--upstream", "tcp://h:0"], "'tcp://h:0' has port 0"),
        (["--upstream", "tcp://h:http"], "'h:http' does not end with a port number"),
        (["--upstream", "tcp://"], "give the server as tcp://host:port"),
        (["--upstream", "tcp://h:1", "--unix", ""], "'' is not the path of a Unix socket"),
        (["--upstream", "tcp://h:1", "--unix", "/" + "x" * 120], "has 121 bytes; the limit for a Unix socket is 107"),
        (["--upstream", "tcp://h:1", "--fd", 9000, "--port", 1], "cannot be combined with --host, --port and --unix"),
        (["--upstream", "tcp://h:1", "--fd", 9000, "--unix", "s"], "cannot be combined with --host, --port and --unix"),
        (["--upstream", "tcp://h:1", "--fd", 9000, "--fd", 9000], "more than once"),
        (["--upstream", "tcp://h:1", "--port", 65536], "65536 is not in the range"),
        (["--upstream", "tcp://h:1", "--max-memory", "lots"], "'lots' is not a size"),
        (["--upstream", "tcp://h:1", "--max-connections", 0], "0 is not in the range"),
        (["--upstream", "tcp://h:1", "extra"], "unexpected extra argument"),
    ],
)
def test_invalid_options_are_refused(options: list[object], says: str) -> None:
    result = CliRunner().invoke(main, ["relay", *map(str, options)])
    assert result.exit_code == 2
    assert says in re.sub(r"\s+", " ", result.output)


def test_a_taken_port_and_a_relay_of_itself_are_one_line_errors(server: rallypoint.Server) -> None:
    code, said = fails("--upstream", server.url, "--port", server.port)
    assert code == 1 and f"cannot listen on 127.0.0.1:{server.port}: EADDRINUSE" in said and said.count("\n") == 1
    port = reserve_port()
    code, said = fails("--upstream", f"tcp://127.0.0.1:{port}", "--port", port)
    assert code == 1 and f"'tcp://127.0.0.1:{port}' is the address of the relay itself" in said


# The class


def test_a_relay_relays_until_it_is_closed(server: rallypoint.Server, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rallypoint.Relay(server.url, unix=path) as one:
        assert one.url == f"tcp://127.0.0.1:{one.port}" and str(one.pid) in repr(one) and repr(one).startswith("<Relay")
        assert one.running() and serves(one.url) and one.upstream == server.url.removeprefix("tcp://")
        assert one.environ == {VARIABLE: f"unix://{path}?upstream={one.upstream}"}
        facts = one.statistics()
        assert facts["pid"] == one.pid and facts["upstream_connected"]
    assert not one.running() and "ended" in repr(one) and may_listen(one.port) and not path.exists()
    one.close()


def test_statistics_are_available_on_a_unix_socket_alone(server: rallypoint.Server, tmp_path: Path) -> None:
    with rallypoint.Relay(server.url, host=None, unix=tmp_path / "s") as one:
        assert (one.url, one.port) == (f"unix://{tmp_path}/s", 0)
        assert one.statistics()["pid"] == one.pid
    with pytest.raises(ValueError, match="needs a host, a unix path, or both"):
        rallypoint.Relay(server.url, host=None)


def test_a_killed_relay_is_replaced_at_the_same_addresses(server: rallypoint.Server, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rallypoint.Relay(server.url, unix=path) as one, rallypoint.connect(one.url) as store:
        store.lease("mine", "v")
        for times in (1, 2):
            before = one.pid
            with RawPeer(address(one.url)) as torchs:
                os.kill(before, signal.SIGKILL)
                assert torchs.rest() == b"", "PyTorch's clients see their store die"
            until(lambda: one.restarts, partial(operator.eq, times))
            assert serves(one.url) and store.get("mine") == b"v" and one.pid != before
            with unix_socket.connect(str(path), Deadline(AMPLE_S)) as sock:
                sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
                assert sock.recv(12) == b"HTTP/1.1 200"
    assert not path.exists()


def test_it_is_closed_with_its_last_reference(server: rallypoint.Server) -> None:
    one = rallypoint.Relay(server.url)
    pid, port = one.pid, one.port
    del one
    gc.collect()
    wait_for_end(pid)
    assert may_listen(port)


START = """
import sys, rallypoint
relay = rallypoint.Relay(sys.argv[1], unix=sys.argv[2])
print(relay.pid, relay.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent(death: signal.Signals, server: rallypoint.Server, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with script(START, server.url, path) as parent:
        pid, port = map(int, read_line(parent).split())
        assert path.is_socket()
        parent.send_signal(death)
        wait_for_end(pid)
        assert may_listen(port) and not path.exists()


def test_a_taken_address_or_bad_url_is_reported_before_a_child_starts(
    server: rallypoint.Server, tmp_path: Path
) -> None:
    gc.collect()
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(AddressTaken, match=str(server.port)):
        rallypoint.Relay(server.url, port=server.port)
    (tmp_path / "file").write_text("dear data")
    with pytest.raises(AddressTaken, match="is not a socket"):
        rallypoint.Relay(server.url, unix=tmp_path / "file")
    with pytest.raises(ValueError, match="'tcp://h:0' has port 0"):
        rallypoint.Relay("tcp://h:0")
    assert os.listdir("/proc/self/fd") == descriptors


def test_a_relay_that_fails_to_start_is_reported_and_leaves_nothing(
    server: rallypoint.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ServerFailed, match="ended with 3"):
        rallypoint.Relay(server.url, unix=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_relay_imports_no_store_server_and_importing_the_package_no_relay() -> None:
    code = "import rallypoint.relay.process, sys; print('rallypoint.server.server' in sys.modules)"
    light = "import rallypoint, sys; print(any('relay.' in name for name in sys.modules))"
    for each in (code, light):
        done = subprocess.run([sys.executable, "-c", each], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"


# While etcd is silent

LOOKS = """
import sys
from rallypoint.etcd import json_api
from rallypoint.relay.process import serve
from rallypoint.relay.settings import RelaySettings
from rallypoint.client.routing import search

search.LOOK_S, json_api.ATTEMPT_S = 3600.0, (3600.0, 3600.0)
serve(RelaySettings(upstream=sys.argv[1]))
"""


def test_it_can_be_terminated_while_etcd_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(AMPLE_S)
        with script(LOOKS, f"etcd://127.0.0.1:{silent.getsockname()[1]}/x") as child:
            question, _ = silent.accept()
            with question:
                assert question.recv(1)
                child.send_signal(signal.SIGTERM)
                assert child.wait(AMPLE_S) == 0


def test_it_ends_while_a_round_cannot_be_closed_at_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_server, "CLOSE_S", 10 * AMPLE_S)
    answers: list[bool] = []
    with rallypoint.Server() as server:
        try:
            with RelayThread(server.port) as relay:
                relay.connected()
                os.kill(server.pid, signal.SIGSTOP)
                relay.call(lambda: relay.server.close_round("job", None, answers.append))
            assert not answers
        finally:
            os.kill(server.pid, signal.SIGCONT)
