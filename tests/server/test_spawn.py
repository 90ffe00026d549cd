"""`Server`: a child process that serves, and that ends exactly when it should: with `close`, with its last reference,
and with the process that started it; not with a thread of that process, nor its fork, nor a Ctrl-C in its terminal.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from tests.ports import reserve_port
from tests.raw_peer import MIB, RawPeer, http, may_listen, read_line, script, until, wait_for_end

import rallypoint
from rallypoint.errors import AddressTaken, ServerFailed


def serves(port: int) -> bool:
    with RawPeer(("127.0.0.1", port)) as peer:
        peer.ping()
    return True


def executable(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_it_serves_until_it_is_closed_and_the_port_is_free_at_once() -> None:
    with rallypoint.Server() as server:
        assert server.url == f"tcp://127.0.0.1:{server.port}"
        assert server.running() and str(server.pid) in repr(server)
        peer = RawPeer(("127.0.0.1", server.port))
        peer.work()
        store = rallypoint.connect(server.url)
        store.set("k", "v")
        assert peer.get(b"/k") == b"v"
    assert not server.running() and "ended" in repr(server)
    assert peer.rest() == b""
    peer.close()
    with rallypoint.Server(port=server.port) as again:  # although connections of the old one linger
        assert again.port == server.port and serves(again.port)
        server.close()  # harmless when repeated, also for the new server
        assert serves(again.port)


def test_it_listens_on_a_socket_that_it_is_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with rallypoint.Server(fd=os.dup(sock.fileno())) as server:
            assert server.port == port and serves(port)


def test_it_listens_on_several_addresses() -> None:
    with rallypoint.Server(["127.0.0.1", "127.0.0.3"]) as server:
        for host in ("127.0.0.1", "127.0.0.3"):
            with RawPeer((host, server.port)) as peer:
                peer.ping()
        with pytest.raises(ConnectionRefusedError):
            RawPeer(("127.0.0.2", server.port))


def test_it_is_closed_with_its_last_reference() -> None:
    server = rallypoint.Server()
    pid, port = server.pid, server.port
    del server
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # gone, and not a zombie
    assert may_listen(port)


def test_running_is_false_after_a_kill() -> None:
    with rallypoint.Server() as server:
        os.kill(server.pid, signal.SIGKILL)
        until(server.running, lambda running: not running)
    assert may_listen(server.port)


@pytest.mark.parametrize("name", ["max_memory", "max_connection_memory"])
def test_memory_limits_are_checked_before_anything_is_started(name: str) -> None:
    for wrong in (0, -1, 1000, 2**63):
        with pytest.raises(ValueError, match=f"{name} must be at least .* got {wrong}$"):
            rallypoint.Server(**{name: wrong})  # type: ignore[arg-type]
    for odd in ("64M", 1e9, True):
        with pytest.raises(TypeError, match=f"{name} must be a number of bytes, not {odd!r}"):
            rallypoint.Server(**{name: odd})  # type: ignore[arg-type]


@pytest.mark.parametrize("grace", [-1, float("inf"), float("nan"), 86_401, timedelta(days=2)])
def test_an_invalid_grace_is_refused(grace: float) -> None:
    with pytest.raises(ValueError, match="grace must"):
        rallypoint.Server(grace=grace)


def test_the_child_has_the_given_limits() -> None:
    with rallypoint.Server(max_memory=64 * MIB, max_connection_memory=32 * MIB) as server:
        assert server.statistics()["max_bytes"] == 64 * MIB
        keys = [str(number) for number in range(5)]
        with rallypoint.connect(server.url) as store:
            for key in keys:
                store.set(key, bytes(7 * MIB))
            with pytest.raises(rallypoint.LimitExceeded, match=f"the limit is {32 * MIB:,}"):
                store.multi_get(keys)


# It cannot start


def test_a_taken_port_is_reported_before_a_child_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(AddressTaken, match=f"127.0.0.1:{port}.*in use"):
            rallypoint.Server(port=port)


def test_a_child_that_ends_is_reported_with_its_own_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It closes its descriptors before it exits, like any process; its own code is reported, not our signal.
    monkeypatch.setattr(sys, "executable", executable(tmp_path / "python", "exec >&- 2>&-; exit 3"))
    port = reserve_port()
    with pytest.raises(ServerFailed, match="ended with 3; it says more on this process's standard error"):
        rallypoint.Server(port=port)
    assert may_listen(port)


def test_a_child_that_is_not_ready_in_time_is_reported_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable(tmp_path / "python", "exec sleep 600"))
    port = reserve_port()
    with pytest.raises(ServerFailed, match=r"not ready after 0\.1 s") as caught:
        rallypoint.Server(port=port, start_timeout=0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(caught.value.pid, 0)
    assert may_listen(port)


def test_a_missing_interpreter_is_reported_as_server_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    gc.collect()
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(ServerFailed, match="'/nowhere/python' cannot be run: No such file"):
        rallypoint.Server()
    assert os.listdir("/proc/self/fd") == descriptors


# Where it is started

TRAPS = ("asyncio", "socket", "signal", "tempfile", "logging", "json", "select", "html", "rallypoint", "msgspec")
START_IN = """
import os, sys
import rallypoint
from rallypoint import Server
os.chdir(sys.argv[1])
with Server() as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""


def set_traps(place: Path, names: tuple[str, ...] = TRAPS) -> None:
    for name in names:
        (place / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working directory was imported')\n")


def test_files_in_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    set_traps(tmp_path)
    with script(START_IN, tmp_path) as parent:
        assert serves(int(read_line(parent)))


def test_files_beside_the_program_do_not_shadow_the_library(tmp_path: Path) -> None:
    set_traps(tmp_path, ("asyncio", "html", "tempfile", "ssl"))
    (tmp_path / "train.py").write_text(START_IN)
    command = [sys.executable, str(tmp_path / "train.py"), "/"]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert serves(int(read_line(parent)))
    finally:
        parent.communicate()


def test_a_package_that_was_found_in_the_working_directory_is_found_by_the_child() -> None:
    assert rallypoint.__file__
    with script(START_IN, ".", cwd=Path(rallypoint.__file__).parents[1]) as parent:
        assert serves(int(read_line(parent)))


# When it ends

START = """
import os, signal, sys, threading
from rallypoint import Server
server = Server()
print(server.pid, server.port, flush=True)
"""


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_it_ends_when_its_parent_is_killed(death: signal.Signals) -> None:
    with script(START + "sys.stdin.read()") as parent:
        pid, port = map(int, read_line(parent).split())
        peer = RawPeer(("127.0.0.1", port))
        peer.wait(b"/never")
        parent.send_signal(death)
        assert peer.rest() == b""
        wait_for_end(pid)
        assert may_listen(port)


@pytest.mark.parametrize("end", ["sys.exit()", "os._exit(0)", "1 / 0", "os.execv('/bin/true', ['true'])"])
def test_it_ends_when_its_parent_ends(end: str) -> None:
    with script(START + end, stderr=subprocess.DEVNULL) as parent:
        pid, port = map(int, read_line(parent).split())
        parent.wait()
        wait_for_end(pid)
        assert may_listen(port)


def test_a_parent_that_dies_at_once_leaves_nothing() -> None:
    # The parent is killed as soon as the child exists, most likely before the child watches it.
    code = """
import os, signal, subprocess
from rallypoint import Server
from rallypoint.process import child as child_module
def start(*args, **more):
    child = subprocess.Popen(*args, **more)
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
class fake: Popen, DEVNULL = staticmethod(start), subprocess.DEVNULL
child_module.subprocess = fake
Server()
"""
    with script(code) as parent:
        wait_for_end(int(read_line(parent)))


def test_it_outlives_the_thread_that_started_it() -> None:
    servers: list[rallypoint.Server] = []
    thread = threading.Thread(target=lambda: servers.append(rallypoint.Server()))
    thread.start()
    number = thread.native_id
    thread.join()
    until(lambda: os.path.exists(f"/proc/self/task/{number}"), lambda there: not there)
    with servers[0] as server:
        assert serves(server.port) and server.running()


def test_it_outlives_a_fork_of_its_parent_that_exits() -> None:
    code = START + "if os.fork() == 0:\n    sys.exit()\nos.wait()\nprint('waited', flush=True)\nsys.stdin.read()"
    with script(code) as parent:
        pid, port = map(int, read_line(parent).split())
        assert read_line(parent) == "waited"
        assert serves(port)
        os.kill(pid, 0)


def test_it_outlives_a_fork_of_its_parent_that_drops_it() -> None:
    code = START + "if os.fork() == 0:\n    del server\n    os._exit(0)\nos.wait()\nprint('waited', flush=True)\n"
    with script(code + "sys.stdin.read()") as parent:
        port = int(read_line(parent).split()[1])
        assert read_line(parent) == "waited"
        assert serves(port)


def test_ctrl_c_is_handled_by_the_parent_alone() -> None:
    listen = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"  # whatever this shell ignores
    pause = textwrap.indent(listen + START + "sys.stdin.readline()\n", "    ")
    code = f"try:\n{pause}except KeyboardInterrupt:\n    print('judged', flush=True)\n"
    with script(code + "sys.stdin.read()", start_new_session=True) as parent:
        pid, port = map(int, read_line(parent).split())
        assert os.getpgid(pid) != os.getpgid(parent.pid)
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdin is not None
        parent.stdin.write(b"\n")  # a signal that arrives just before the read blocks does not end it
        assert read_line(parent) == "judged"
        os.kill(pid, signal.SIGINT)  # even a signal sent to the child itself
        assert serves(port) and b"200" in http(("127.0.0.1", port), b"GET /healthz HTTP/1.0\r\n\r\n")


def command_lines(pid: int) -> bytes:
    """Return the arguments of a process and of all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return Path(f"/proc/{pid}/cmdline").read_bytes() + b"".join(command_lines(int(child)) for child in children)


@pytest.mark.parametrize("outlive", [None, 60])
def test_its_settings_are_not_among_its_arguments(tmp_path: Path, outlive: float | None) -> None:
    with rallypoint.Server(data_dir=tmp_path / "secret-place", outlive=outlive) as server:
        assert (tmp_path / "secret-place").exists()
        told = command_lines(server.pid)
        assert b"rallypoint" in told and b"secret-place" not in told


def test_settings_larger_than_a_pipe_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes, limit 32768"):
        rallypoint.Server(storage="etcd://127.0.0.1:1/" + 40_000 * "x")
