"""`rallypoint serve` as a real process: what it prints, writes, binds and adopts, how it refuses, and how it ends."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from tests.raw_peer import AMPLE_S, NO_UVLOOP, RawPeer, http, read_line

import rallypoint
from rallypoint.cli import COMMANDS, main
from rallypoint.core.records import ReplyStatus
from rallypoint.errors import AddressTaken
from rallypoint.protocol.native import ACCEPTED, PREFACE, VERSION, Hello, Welcome, frame
from rallypoint.server import process
from rallypoint.server.settings import Settings

SAYS = re.compile(r"rallypoint serves at tcp://(\S+):(\d+)")
COMMAND = [sys.executable, "-m", "rallypoint"]


@contextlib.contextmanager
def serve(*options: object, code: int = 0, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command; when the block ends it must have ended, or end by SIGTERM, with this exit code."""
    child = subprocess.Popen(
        [*COMMAND, "serve", *map(str, options)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, **more
    )
    try:
        yield child
        child.terminate()
        assert child.wait(AMPLE_S) == code
    finally:
        child.kill()
        child.communicate()


def address(child: subprocess.Popen[bytes]) -> tuple[str, int]:
    """Return the address that the command prints."""
    said = SAYS.fullmatch(read_line(child))
    assert said
    return said[1].strip("[]"), int(said[2])


def fails(*options: object, **more: Any) -> tuple[int, str]:
    """Run a command that must fail; return its exit code and its error output."""
    command = [*COMMAND, "serve", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=AMPLE_S, check=False, **more)
    assert done.stdout == "" and "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_it_prints_where_it_serves_and_serves_there() -> None:
    with serve("--port", 0) as child:
        where = address(child)
        assert where[0] == "127.0.0.1"
        with RawPeer(where) as peer:
            peer.work()
        assert http(where, b"GET /healthz HTTP/1.0\r\n\r\n").endswith(b"ok\n")
        store = rallypoint.connect(f"tcp://{where[0]}:{where[1]}")
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_the_installed_command_is_the_same() -> None:
    command = Path(sys.executable).with_name("rallypoint")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=AMPLE_S, check=True)
    assert rallypoint.__version__ in done.stdout


def test_without_uvloop_it_serves_too(tmp_path: Path) -> None:
    (tmp_path / "uvloop.py").write_text(NO_UVLOOP)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with serve("--port", 0, env={**os.environ, "PYTHONPATH": path}) as child:
        with RawPeer(address(child)) as peer:
            peer.work()
        maps = Path(f"/proc/{child.pid}/maps").read_text()
        assert "uvloop" not in maps


# The URL file


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_the_url_file_exists_while_it_serves(tmp_path: Path, end: signal.Signals) -> None:
    file = tmp_path / "url"
    file.write_text("tcp://an-earlier-run:1\n" * 100)
    with serve("--port", 0, "--url-file", file) as child:
        host, port = address(child)
        assert file.read_text() == f"tcp://{host}:{port}\n"
        assert os.listdir(tmp_path) == ["url"], "a temporary file was left behind"
        assert file.stat().st_mode & 0o777 == 0o644
        child.send_signal(end)
        assert child.wait(AMPLE_S) == 0
        assert os.listdir(tmp_path) == []


def test_the_url_file_of_a_successor_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "url"
    with serve("--port", 0, "--url-file", file) as first:
        address(first)
        with serve("--port", 0, "--url-file", file) as second:
            url = "tcp://{}:{}\n".format(*address(second))
            first.terminate()
            first.wait(AMPLE_S)
            assert file.read_text() == url
        assert not file.exists()


def test_a_url_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    code, said = fails("--port", 0, "--url-file", tmp_path / "no" / "url")
    assert code == 1 and said.startswith("Error: ") and said.count("\n") == 1 and "no/url" in said
    code, said = fails("--port", 0, "--url-file", tmp_path)
    assert code == 2 and "is a directory" in said


# Sockets


def test_it_adopts_a_bound_socket(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        where = sock.getsockname()
        with serve("--fd", sock.fileno(), "--url-file", tmp_path / "url", pass_fds=[sock.fileno()]) as child:
            assert address(child) == where
            with RawPeer(where) as peer:
                peer.work(1)


def test_it_adopts_several_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.2", 0)) as other:
        numbers = (one.fileno(), other.fileno())
        with serve("--fd", numbers[0], "--fd", numbers[1], pass_fds=numbers) as child:
            assert address(child) == one.getsockname()
            for sock in (one, other):
                RawPeer(sock.getsockname()).close()


def test_a_descriptor_that_cannot_listen_is_refused() -> None:
    code, said = fails("--fd", 55)
    assert code == 1 and "descriptor 55 is not a socket" in said
    code, said = fails("--fd", 0, stdin=subprocess.DEVNULL)
    assert code == 1 and "descriptor 0 is not a socket" in said
    with socket.socket() as unbound:
        code, said = fails("--fd", unbound.fileno(), pass_fds=[unbound.fileno()])
        assert code == 1 and "is not bound to a port" in said


def test_a_taken_port_is_one_line_and_names_the_address() -> None:
    with serve("--port", 0) as child:
        host, port = address(child)
        code, said = fails("--port", port)
        assert code == 1 and said.startswith(f"Error: cannot listen on {host}:{port}") and said.count("\n") == 1
        with pytest.raises(AddressTaken, match=f"{host}:{port}"):
            rallypoint.Server(port=port)
        RawPeer((host, port)).close()


def test_it_fails_if_one_of_several_addresses_is_taken() -> None:
    with serve("--host", "127.0.0.2", "--port", 0) as child:
        port = address(child)[1]
        code, said = fails("--host", "127.0.0.1", "--host", "127.0.0.2", "--port", port)
        assert code == 1 and f"127.0.0.2:{port}" in said


def reachable(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        RawPeer((host, port)).close()
        return True
    return False


def test_it_binds_exactly_the_requested_addresses() -> None:
    with serve("--port", 0) as child:
        port = address(child)[1]
        assert reachable("127.0.0.1", port)
        assert reachable("::ffff:127.0.0.1", port), "PyTorch's clients connect to this address"
        assert not reachable("127.0.0.2", port)
        assert not reachable("::1", port)
    with serve("--host", "127.0.0.2", "--host", "127.0.0.3", "--port", 0) as child:
        where = address(child)
        assert where[0] == "127.0.0.2"
        assert [reachable(f"127.0.0.{n}", where[1]) for n in (1, 2, 3)] == [False, True, True]


def test_all_addresses_are_bound_only_on_request() -> None:
    with serve("--host", "0.0.0.0", "--port", 0) as child:
        host, port = address(child)
        assert host == socket.gethostname(), "an address that clients elsewhere can use"
        assert reachable("127.0.0.1", port) and reachable("127.0.0.2", port)


@pytest.mark.needs("torch")
def test_an_unmodified_torch_client_can_connect() -> None:
    dist = importlib.import_module("torch.distributed")
    with serve("--port", 0) as child:
        host, port = address(child)
        for name in (host, "localhost"):
            store = dist.TCPStore(name, port, is_master=False, timeout=timedelta(seconds=AMPLE_S))
            store.set("k", "v")
            assert store.get("k") == b"v" and store.add("n", 2) % 2 == 0
            del store


# Words


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--fd", 9000, "--port", 1], "cannot be combined with --host and --port"),
        (["--fd", 9000, "--host", "127.0.0.1"], "cannot be combined with --host and --port"),
        (["--fd", 9000, "--fd", 9001, "--fd", 9000], "more than once"),
        (["--port", 65536], "65536 is not in the range"),
        (["--port", -1], "-1 is not in the range"),
        (["--port", "http"], "not a valid integer"),
        (["--fd", -1], "-1 is not in the range"),
        (["--max-memory", "lots"], "'lots' is not a size"),
        (["--max-memory", "0"], "'0' is not a size"),
        (["--max-memory", "-5"], "not a size"),
        (["--max-connection-memory", "1M"], "'1M' is too small"),
        (["--max-memory", "9999999T"], "'9999999T' does not fit"),
        (["--grace", "-1"], "-1 is not a number of seconds from 0 to 86400"),
        (["--grace", "nan"], "nan is not a number of seconds"),
        (["--grace", "inf"], "inf is not a number of seconds"),
        (["--grace", "soon"], "'soon' is not a valid float"),
        (["--recovery", "5"], "--recovery needs --data-dir"),
        (["--data-dir", "d", "--recovery", "-1"], "-1 is not a number of seconds from 0 to 86400"),
        (["--data-dir", "d", "--engine", "etcd://h:1/s"], "--data-dir and --storage are mutually exclusive"),
        (["--data-dir", __file__], "is a file"),
        (["--max-connections", "0"], "0 is not in the range"),
        (["--max-sessions", "-1"], "-1 is not in the range"),
        (["extra"], "unexpected extra argument"),
        (["--nothing"], "No such option"),
    ],
)
def test_invalid_options_are_refused(options: list[object], says: str) -> None:
    result = CliRunner().invoke(main, ["serve", *map(str, options)])
    assert result.exit_code == 2
    assert says in result.output.replace("\n", " ")


@pytest.mark.parametrize("host", ["", "no.such.host.invalid", "192.0.2.1", "300.1.1.1", "a..b"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    code, said = fails("--host", host, "--port", 0)
    assert code == 1 and said.startswith("Error: cannot listen on") and said.count("\n") == 1


@pytest.mark.parametrize("text", ["64M", "64m", "64MiB", "64 MB", "67108864"])
def test_sizes_may_have_units(text: str) -> None:
    with serve("--port", 0, "--max-memory", text) as child:
        page = http(address(child), b"GET /statistics HTTP/1.0\r\n\r\n").decode()
        assert '"max_bytes": 67108864,' in page


def test_the_grace_option_applies_to_every_session() -> None:
    options = ("--port", 0, "--grace", "0.125", "--max-connections", 5, "--max-sessions", 1)
    with serve(*options) as child, RawPeer(address(child), greet=False) as peer:
        peer.send(PREFACE + frame(Hello(VERSION, "test")))
        assert peer.read(len(ACCEPTED)) == ACCEPTED
        size = int.from_bytes(peer.read(4), "little")
        _, status, welcome = msgspec.msgpack.decode(peer.read(size))
        assert (status, msgspec.convert(welcome, Welcome).grace_s) == (ReplyStatus.OK, 0.125)


def test_a_data_directory_and_its_recovery_are_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Settings] = []
    monkeypatch.setattr(process, "serve", lambda settings, *more: told.append(settings))
    for options in ([], ["--data-dir", str(tmp_path)], ["--data-dir", str(tmp_path), "--recovery", "12.5"]):
        assert CliRunner().invoke(main, ["serve", *options]).exit_code == 0
    assert [(each.data_dir, each.recovery_s) for each in told] == [
        (None, None),
        (str(tmp_path), None),
        (str(tmp_path), 12.5),
    ]


def test_help() -> None:
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=AMPLE_S, check=True)
    assert all(name in done.stdout for name in COMMANDS)
    for name in COMMANDS:
        for option in ("--help", "-h"):
            result = CliRunner().invoke(main, [name, option])
            assert result.exit_code == 0 and result.output.startswith("Usage:")
    assert "--url-file" in CliRunner().invoke(main, ["serve", "--help"]).output
    assert CliRunner().invoke(main, ["dance"]).exit_code == 2


# The end


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly_and_disconnects_all_clients(end: signal.Signals) -> None:
    with serve("--port", 0) as child:
        where = address(child)
        peers = [RawPeer(where) for _ in range(5)]
        peers[0].wait(b"/never")
        child.send_signal(end)
        assert child.wait(AMPLE_S) == 0
        for peer in peers:
            assert peer.rest() == b""
            peer.close()
        assert child.stderr and child.stderr.read() == b""
        with serve("--port", where[1]) as again:
            assert address(again) == where


# Storage in etcd


def test_the_storage_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Settings] = []
    monkeypatch.setattr(process, "serve", lambda settings, *more: told.append(settings))
    url = "etcd://h:1/s?user=ann&password=secret"
    for options, variable in ((["--storage", url], ""), (["--engine", url], ""), ([], url), ([], "")):
        assert CliRunner().invoke(main, ["serve", *options], env={"RALLYPOINT_STORAGE": variable}).exit_code == 0
    assert [each.storage for each in told] == [url, url, url, None]


def test_a_server_that_other_machines_cannot_reach_is_refused_where_etcd_is_on_those() -> None:
    result = CliRunner().invoke(main, ["serve", "--port", "0", "--storage", "etcd://192.0.2.1/jobs"])
    assert result.exit_code and "listens on 127.0.0.1" in result.output and "serve --host" in result.output


@pytest.mark.parametrize(
    "url",
    [
        "etcd://h:1/s?user=ann&password=secret&colour=red",
        "etcd://h:1/s?prefix=x&user=ann&password=secret",
        "etcd://h:1/s?user=ann&password=secret#x",
        "etcd://h:1/s?user=ann&secret",
        "etcd://ann:secret@h:1/s",
        "tcp://h:1?password=secret",
    ],
)
def test_passwords_are_left_out_of_errors_and_help(url: str) -> None:
    result = CliRunner().invoke(main, ["serve", "--port", "0"], env={"RALLYPOINT_STORAGE": url})
    assert result.exit_code == 1 and "h:1" in result.output and "secret" not in result.output.replace("&secret", "")
    helped = CliRunner().invoke(main, ["serve", "--help"], env={"RALLYPOINT_STORAGE": url})
    assert helped.exit_code == 0 and "secret" not in helped.output


def test_a_mistyped_command_gets_a_suggestion() -> None:
    done = CliRunner().invoke(main, ["brarier"])
    assert done.exit_code == 2
    assert "No such command 'brarier'. Did you mean 'barrier'?" in done.output


def test_help_of_run_shows_groups_defaults_and_one_spelling() -> None:
    text = CliRunner().invoke(main, ["run", "--help"], terminal_width=100).output
    for heading in ("Size of the job:", "Rendezvous:", "Failures, restarts and shutdown:", "Output:"):
        assert heading in text
    assert re.search(r"--exit-timeout SECONDS .*\[default:\s+300\s+s\]", text, re.DOTALL)
    assert "--rdzv_id" not in text
