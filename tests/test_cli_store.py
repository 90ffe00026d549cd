"""The commands for shell scripts, as real processes against a real server: what they print, and how they end."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.ports import reserve_port
from tests.raw_peer import AMPLE_S, read_line
from tests.served import server_fixture

import rallypoint
from rallypoint.cli import COMMANDS, key_commands, main
from rallypoint.cli.store_command import as_text, one_line
from rallypoint.deadline import Deadline
from rallypoint.recipes.hosting import shared_object
from rallypoint.testing import CuttingProxy

COMMAND = [sys.executable, "-m", "rallypoint"]
ROOT = Path(__file__).resolve().parents[1]


server = server_fixture("module", grace=1.0)


@pytest.fixture
def store(server: rallypoint.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[rallypoint.Store]:
    """The empty store that commands find in their environment."""
    monkeypatch.setenv("RALLYPOINT_URL", server.url)
    with rallypoint.connect(server.url) as store:
        store.delete_prefix("")
        yield store


def run(*words: object, given: bytes = b"", **more: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end."""
    done = subprocess.run([*COMMAND, *map(str, words)], input=given, capture_output=True, timeout=AMPLE_S, **more)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


def prints(*words: object, given: bytes = b"") -> bytes:
    """Run a command that must succeed without error output; return what it prints."""
    done = run(*words, given=given)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


def fails(*words: object, **more: Any) -> tuple[int, str]:
    """Run a command that must fail; return its exit code and its one line of error output."""
    done = run(*words, **more)
    said = done.stderr.decode()
    assert done.stdout == b"" and said.endswith("\n")
    assert done.returncode == 2 or said.count("\n") == 1
    return done.returncode, said


@pytest.fixture
def start(store: rallypoint.Store) -> Iterator[Any]:
    """A function that starts a command without waiting for its end."""
    with ExitStack() as stack:

        def begin(*words: object) -> subprocess.Popen[bytes]:
            command = [*COMMAND, *map(str, words)]
            child = stack.enter_context(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, start_new_session=True
                )
            )
            stack.callback(child.kill)
            return child

        yield begin


def until_waiting(server: rallypoint.Server, *children: subprocess.Popen[bytes]) -> None:
    """Return when all of the commands wait at the server."""
    deadline, pause = Deadline(AMPLE_S), threading.Event()
    names = {f"{socket.gethostname()}:{child.pid}" for child in children}
    while names - {session["name"] for session in server.statistics()["sessions"] if session["waits_for"]}:
        assert not deadline.expired()
        pause.wait(0.01)


def interrupt(child: subprocess.Popen[bytes]) -> int:
    """Press Ctrl-C, which reaches all processes of the terminal; return the exit code."""
    os.killpg(child.pid, signal.SIGINT)
    return child.wait(AMPLE_S)


# Keys


def test_set_and_get(store: rallypoint.Store) -> None:
    assert prints("set", "k", "some text") == b""
    assert store.get("k") == b"some text"
    assert prints("get", "k") == b"some text\n"
    assert prints("get", "k", "--raw") == b"some text"


@pytest.mark.parametrize("value", [b"\0\xff\n", b"\xc3(", b"\0", bytes(range(256)) * 1000])
def test_bytes_go_in_and_come_out_as_they_are(store: rallypoint.Store, value: bytes) -> None:
    prints("set", "k", "-", given=value)
    assert store.get("k") == value
    assert prints("get", "k") == value


def test_an_argument_may_be_bytes_too(store: rallypoint.Store) -> None:
    subprocess.run([*map(os.fsencode, COMMAND), b"set", b"k", b"\xff\xfe"], check=True, timeout=AMPLE_S)
    assert store.get("k") == b"\xff\xfe"
    done = subprocess.run([*map(os.fsencode, COMMAND), b"get", b"\xff"], capture_output=True, timeout=AMPLE_S)
    assert done.returncode == 2 and b"Traceback" not in done.stderr and b"not valid Unicode" in done.stderr


@pytest.mark.parametrize("value", ["-5", "-x", "-15h", "-", "- 1"])
def test_a_value_may_start_with_a_dash(store: rallypoint.Store, value: str) -> None:
    assert prints("set", "k", value, "--connect-timeout", 9, given=b"-") == b""
    assert store.get("k").decode() == value
    assert prints("exchange", "e", "--size=1", value, "--rank", 0, given=b"-").decode() == f"{value}\n"


def test_an_unknown_option_is_refused_unless_after_two_dashes(store: rallypoint.Store) -> None:
    code, said = fails("set", "k", "--vlaue")
    assert code == 2 and "No such option" in said
    assert fails("set", "k", "v", "--store")[0] == 2
    assert prints("set", "--", "k", "--vlaue") == b"" and store.get("k") == b"--vlaue"
    assert b"Write VALUE" in prints("set", "k", "-h")


@pytest.mark.parametrize(
    "words", [["get", "k"], ["get", "k", "--raw"], ["ls"], ["exchange", "e", "x", "--size=1", "--rank=0"]]
)
def test_output_that_cannot_be_written_is_one_line(store: rallypoint.Store, words: list[str]) -> None:
    store.set("k", "v")
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=AMPLE_S)
    assert (done.returncode, done.stderr) == (1, "Error: cannot write the output: No space left on device\n")


def test_input_that_cannot_be_read_is_one_line(store: rallypoint.Store) -> None:
    with open(os.devnull, "wb") as not_for_reading:
        done = subprocess.run([*COMMAND, "set", "k", "-"], stdin=not_for_reading, capture_output=True, timeout=AMPLE_S)
    assert done.returncode == 1 and done.stderr.startswith(b"Error: ") and done.stderr.count(b"\n") == 1


def test_get_waits_for_the_key(store: rallypoint.Store, start: Any) -> None:
    child = start("get", "late")
    store.set("late", "now")
    assert child.communicate(timeout=AMPLE_S) == (b"now\n", b"")
    code, said = fails("get", "never", "--timeout", 0)
    assert code == 3 and "still missing 'never'" in said


def test_add(store: rallypoint.Store) -> None:
    assert prints("add", "n", 5) == b"5\n"
    assert prints("add", "n", -7) == b"-2\n"
    store.set("text", "x")
    code, said = fails("add", "text", 1)
    assert code == 1 and said.startswith("Error: key 'text' holds b'x'")
    assert fails("add", "n", "many")[0] == 2


def test_wait(store: rallypoint.Store, start: Any) -> None:
    child = start("wait", "a", "b")
    store.multi_set(["a", "b"], ["", ""])
    assert child.communicate(timeout=AMPLE_S) == (b"", b"") and child.returncode == 0
    code, said = fails("wait", "a", "x", "y", "--timeout", 0.1)
    assert code == 3 and "timed out after 0.1 s: still missing 'x', 'y', 2 of 3 keys" in said
    assert fails("wait")[0] == 2


def test_verbose_wait_reports_the_missing_keys(store: rallypoint.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_commands, "PROGRESS_S", 0.05)
    result = CliRunner().invoke(main, ["wait", "x", "y", "--timeout", "0.2", "--verbose"])
    assert result.exit_code == 3 and "waiting: 2 of 2 keys are missing: x, y\n" in result.output
    assert "timed out after 0.2 s" in result.output
    result = CliRunner().invoke(main, ["wait", "x", "--timeout", "0.2"])
    assert "waiting" not in result.output


def test_ls_and_del(store: rallypoint.Store) -> None:
    store.multi_set(["b/2", "a", "b/1", "odd\nkey"], [""] * 4)
    assert prints("ls") == b"a\nb/1\nb/2\nodd\\nkey\n"
    assert prints("ls", "b/") == b"b/1\nb/2\n"
    assert prints("del", "a", "nothing") == b"1\n"
    assert prints("del", "--prefix", "b/", "od") == b"3\n"
    assert prints("ls") == b""
    assert fails("del")[0] == 2


def test_ls_long_shows_sizes_and_beginnings(store: rallypoint.Store) -> None:
    store.multi_set(["a", "b", "c", "d\ne"], ["text", b"\x00\x01", "x" * 100, "two\nlines"])
    lines = prints("ls", "-l").decode().splitlines()
    assert [line.split(None, 2) for line in lines] == [
        ["4", "a", "text"],
        ["2", "b", "(binary)"],
        ["100", "c", "x" * 40 + "..."],
        ["9", "d\\ne", "two\\nlines"],
    ]


def test_other_names_of_commands(store: rallypoint.Store) -> None:
    assert prints("put", "k", "-5") == b"" and prints("get", "k") == b"-5\n"
    assert [prints("incr", "n"), prints("incr", "n", -3)] == [b"1\n", b"-2\n"]
    assert prints("keys") == b"k\nn\n"
    assert prints("delete", "k", "n") == b"2\n"
    assert "Did you mean 'delete'" in fails("delet", "k")[1]


def test_ping_makes_a_round_trip(store: rallypoint.Store) -> None:
    assert re.fullmatch(rb"<TCPStore tcp://127.0.0.1:\d+> answered in \d+\.\d\d ms\n", prints("ping"))
    code, said = fails("ping", "--store", "tcp://127.0.0.1:1", "--connect-timeout", 0.2)
    assert code == 4 and "127.0.0.1:1" in said


def test_push_and_pop(store: rallypoint.Store, start: Any) -> None:
    assert prints("push", "q", "one", "-2") == b""
    assert prints("push", "q", "-", given=b"\x00three\n") == b""
    assert prints("push", "q", "--lines", "-", given=b"four\nfive") == b""
    popped = [prints("pop", "q", *more) for more in ([], ["--timeout", 0], [], ["--raw"], [])]
    assert popped == [b"one\n", b"-2\n", b"\x00three\n", b"four", b"five\n"]
    code, said = fails("pop", "q", "--timeout", 0)
    assert code == 3 and "queue_pop timed out" in said
    child = start("pop", "q")
    store.queue_push("q", "late")
    assert child.communicate(timeout=AMPLE_S) == (b"late\n", b"")
    assert fails("push", "q")[0] == fails("push", "q", "x", "--lines")[0] == 2
    assert fails("push", "q", "x", "--max-deliveries", 2)[0] == 2


def test_push_and_pop_of_a_work_queue(store: rallypoint.Store) -> None:
    assert prints("push", "w", "one", "two", "--work", "--max-deliveries", 1) == b""
    assert prints("pop", "w", "--work") == b"one\n"
    queue = rallypoint.WorkQueue(store, "w")
    assert queue.status()[:4] == (1, 0, 0, 1)
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, "pop", "w", "--work"], stdout=full, stderr=subprocess.PIPE, timeout=AMPLE_S)
    assert done.returncode == 1 and b"cannot write the output" in done.stderr
    assert [letter.data for letter in queue.dead_letters()] == [b"two"], "it was not acknowledged"
    code, said = fails("pop", "w", "--work", "--timeout", 0)
    assert code == 3 and "work queue 'w': 0 items are ready, 0 taken, 1 dead letters" in said
    assert queue.discard() == 1


def test_watch(store: rallypoint.Store, start: Any) -> None:
    child = start("watch", "w/", "--verbose")
    assert child.stderr and child.stderr.readline() == b"waiting: changes of keys that start with 'w/'\n"
    store.set("other", "no")
    store.set("w/k", "one\ntwo\n")
    store.set("w/k", b"\0\xff")
    store.delete_key("w/k")
    assert [read_line(child) for _ in range(3)] == ["set\tw/k\tone\\ntwo", "set\tw/k\t\\x00\\xff", "del\tw/k"]
    assert interrupt(child) == 130
    assert child.stderr.read() == b""


def test_watch_as_json(store: rallypoint.Store, start: Any) -> None:
    child = start("watch", "--json", "-v")
    assert child.stderr and child.stderr.readline()
    store.set("k", b"\0\xff")
    store.delete_key("k")
    first, second = (json.loads(read_line(child)) for _ in range(2))
    assert first["key"] == "k" and base64.b64decode(first["value"]) == b"\0\xff"
    assert second["value"] is None and second["revision"] > first["revision"]
    code, said = fails("watch", "--timeout", 0.1)
    assert code == 3 and "no key that starts with '' changed" in said


@pytest.mark.parametrize(
    ("value", "shown"),
    [(b"plain", "plain"), (b"end\n", "end"), ("größe".encode(), "größe"), (b"a\tb\\", "a\\tb\\"), (b"\xff", "\\xff")],
)
def test_a_value_is_shown_on_one_line(value: bytes, shown: str) -> None:
    assert one_line(value) == shown


def test_values_with_control_characters_are_not_text() -> None:
    assert as_text("größe\n\t".encode()) == "größe\n\t"
    assert [as_text(value) for value in (b"\xff", b"\0", b"\x1b[31m")] == [None] * 3


# Barrier and exchange


@pytest.mark.parametrize(("members", "names"), [("3", "012"), ("a,b,c", "abc")])
def test_barrier(start: Any, members: str, names: str) -> None:
    for _ in range(2):  # it can be used again
        children = [start("barrier", "b", "--members", members, "--member", name) for name in names]
        for child in children:
            assert child.communicate(timeout=AMPLE_S) == (b"", b"") and child.returncode == 0


def test_a_barrier_names_the_missing_on_every_member(store: rallypoint.Store, start: Any) -> None:
    children = [start("barrier", "b", "--members", "a,b,c", "--member", name, "--timeout", 1.5) for name in "ab"]
    for child in children:
        said = child.communicate(timeout=AMPLE_S)[1].decode()
        assert child.returncode == 3 and said.count("\n") == 1
        assert re.search(r"missing: (a, |b, )?c[ .]", said), said


def test_a_barrier_refuses_invalid_members(store: rallypoint.Store) -> None:
    code, said = fails("barrier", "b", "--members", 2, "--member", 2)
    assert code == 1 and "does not expect '2'" in said
    for members in ("0", "a,,b", "a,a", ","):
        assert fails("barrier", "b", "--members", members, "--member", "a")[0] == 2
    assert fails("barrier", "b", "--members", 2)[0] == 2


def test_verbose_barrier_reports_the_missing_members(store: rallypoint.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.05)
    words = ["barrier", "b", "--members", "2", "--member", "1", "--timeout", "0.3"]
    result = CliRunner().invoke(main, [*words, "--verbose"])
    assert result.exit_code == 3 and "waiting: 1 of 2 members are here; missing: 0\n" in result.output
    assert "waiting" not in CliRunner().invoke(main, words).stderr


def test_a_member_that_dies_breaks_the_barrier(server: rallypoint.Server, store: rallypoint.Store, start: Any) -> None:
    words = ["--members", 3, "--timeout", AMPLE_S, "-v", "--member"]
    dying, other = start("barrier", "b", *words, 0), start("barrier", "b", *words, 1)
    until_waiting(server, dying, other)
    dying.kill()
    said = other.communicate(timeout=AMPLE_S)[1].decode()
    assert other.returncode == 1 and "is broken: lost 0 (" in said


def test_exchange(start: Any) -> None:
    first = start("exchange", "e", "--size", 3, "--rank", 0, "zero")
    second = start("exchange", "e", "--size", 3, "--rank", 1, "--json")
    assert prints("exchange", "e", "--size", 3, "--rank", 2, "-", given=b"t\0o\n") == b"zero\n\nt\\x00o\n"
    assert first.communicate(timeout=AMPLE_S) == (b"zero\n\nt\\x00o\n", b"")
    exact = json.loads(second.communicate(timeout=AMPLE_S)[0])
    assert [base64.b64decode(value) for value in exact] == [b"zero", b"", b"t\0o\n"]


def test_an_exchange_names_the_missing(store: rallypoint.Store) -> None:
    code, said = fails("exchange", "e", "--size", 3, "--rank", 1, "x", "--timeout", 0.1)
    assert code == 3 and re.search(r"missing: \D*0\D*2", said)
    assert fails("exchange", "e", "--size", 3, "--rank", 3, "x")[0] == 2


# Lock


def test_lock_passes_exit_codes_and_a_growing_fence(store: rallypoint.Store) -> None:
    fences = [int(prints("lock", "l", "--", "sh", "-c", "echo $RALLYPOINT_FENCE")) for _ in range(3)]
    assert 0 < fences[0] < fences[1] < fences[2]
    assert run("lock", "l", "--", "sh", "-c", "exit 7").returncode == 7
    assert run("lock", "l", "--", "sh", "-c", "kill -9 $$").returncode == 137
    code, said = fails("lock", "l", "--", "no-such-command")
    assert code == 127 and "cannot run no-such-command" in said
    assert fails("lock", "l", "--", "/")[0] == 126
    assert fails("lock", "l")[0] == 2


def test_a_command_of_a_lock_may_have_any_name(store: rallypoint.Store, tmp_path: Path) -> None:
    script = os.fsencode(tmp_path) + b"/caf\xe9" * 2
    os.mkdir(os.path.dirname(script))
    with open(script, "wb") as file:
        file.write(b'#!/bin/sh\nprintf "%s" "$1"\n')
    os.chmod(script, 0o755)
    done = subprocess.run([*COMMAND, "lock", "l", "--", script, b"\xff"], capture_output=True, timeout=AMPLE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\xff", b"")


def test_a_lock_is_held_while_its_command_runs(start: Any) -> None:
    holder = start("lock", "l", "--", "cat", "/dev/zero")
    assert holder.stdout and holder.stdout.read(1) == b"\0"
    code, said = fails("lock", "l", "--timeout", 0.1, "--", "true")
    assert code == 3 and re.search(rf"held by cat \(.*{holder.pid}.*\)", said), said
    holder.stdout.close()  # SIGPIPE ends cat, and the lock is free
    assert prints("lock", "l", "--", "echo", "-n", "mine") == b"mine"
    assert holder.wait(AMPLE_S) != 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_the_locked_command_and_free_the_lock(start: Any, number: signal.Signals, code: int) -> None:
    child = start("lock", "l", "--", "sh", "-c", "echo ready; exec sleep 60")
    assert read_line(child) == "ready"
    if number == signal.SIGINT:
        assert interrupt(child) == code
    else:
        child.send_signal(number)
        assert child.wait(AMPLE_S) == code
    assert prints("lock", "l", "--timeout", AMPLE_S, "--", "echo", "free") == b"free\n"


def test_a_lost_lock_is_reported_once(tmp_path: Path) -> None:
    with rallypoint.Server(grace=0.2) as server:
        words = ["lock", "l", "--store", server.url, "--", "sh", "-c", "echo ready; read line; exit 5"]
        child = subprocess.Popen(
            [*COMMAND, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        try:
            assert read_line(child) == "ready"
            server.close()
            assert child.stderr
            assert re.fullmatch(
                rb"Warning: lock 'l' \(fence \d+\) was lost while the command runs; another may hold it\n",
                child.stderr.readline(),
            )
            assert child.communicate(b"\n", timeout=AMPLE_S)[1] == b"", "it is reported once"
            assert child.returncode == 5
        finally:
            child.kill()
            child.communicate()


# The store, and the end


def test_the_store_is_named_by_option_or_environment(server: rallypoint.Server, store: rallypoint.Store) -> None:
    bare = {name: value for name, value in os.environ.items() if name != "RALLYPOINT_URL"}
    code, said = fails("get", "k", env=bare)
    assert code == 2 and "--store URL" in said and "RALLYPOINT_URL" in said
    store.set("job/k", "v")
    assert run("get", "k", "--store", f"{server.url}/job", env=bare).stdout == b"v\n"
    code, said = fails("get", "k", "--store", f"{server.url}?timeout=0.1", env=bare)
    assert code == 3 and "after 0.1 s" in said


def test_commands_work_on_a_file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_URL", f"file://{tmp_path}/store")
    with rallypoint.connect(os.environ["RALLYPOINT_URL"]) as store:  # the file lasts while a handle is open
        prints("set", "k", "v")
        assert prints("get", "k") == b"v\n" and store.get("k") == b"v"
    assert fails("get", "k", "--timeout", 0)[0] == 3
    assert prints("lock", "l", "--", "echo", "held") == b"held\n"


def test_the_exit_code_depends_on_the_error_of_the_store(tmp_path: Path) -> None:
    with rallypoint.Server() as gone:
        url = gone.url
    code, said = fails("get", "k", "--store", url, "--connect-timeout", 0.2)
    assert code == 4 and "no store answered" in said
    code, said = fails("get", "k", "--store", f"file://{tmp_path}/no/dir")
    assert code == 4 and "cannot open" in said
    (tmp_path / "text").write_text("this is no store\n" * 10)
    assert fails("get", "k", "--store", f"file://{tmp_path}/text")[0] == 1
    for bad in ("ftp://x", "tcp://", "tcp://h:99999"):
        code, said = fails("get", "k", "--store", bad)
        assert code == 2 and bad in said
    code, said = fails("get", "k", "--store", "tcp://h?passwort=secret")
    assert code == 2 and "unknown option 'passwort'" in said and "secret" not in said


@pytest.mark.parametrize(
    "words", [["get", "x"], ["wait", "x"], ["barrier", "b", "--members", "2", "--member", "0"], ["watch", "-v"]]
)
def test_ctrl_c_ends_a_wait_with_130(server: rallypoint.Server, start: Any, words: list[str]) -> None:
    child = start(*words)
    if words[0] == "watch":
        assert child.stderr and child.stderr.readline()
    else:
        until_waiting(server, child)
    assert interrupt(child) == 130
    assert child.communicate()[1] == b""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize(
    "words",
    [["barrier", "b", "--members=2", "--member=0"], ["exchange", "e", "x", "--size=2", "--rank=0"]],
    ids=lambda words: words[0],
)
def test_a_terminated_command_withdraws_its_arrival(
    start: Any, number: signal.Signals, code: int, words: list[str]
) -> None:
    """Otherwise it would count until its grace period ends, which is longer than the time limit of this test."""
    with rallypoint.Server(grace=600.0) as server:
        child = start(*words, "--store", server.url)
        until_waiting(server, child)
        child.send_signal(number)
        assert child.communicate(timeout=AMPLE_S) == (b"", b"") and child.returncode == code
        assert server.statistics()["objects"] == {} and server.statistics()["sessions"] == []


def test_a_terminated_command_leaves_the_queue_of_a_lock(start: Any) -> None:
    with rallypoint.Server(grace=600.0) as server, rallypoint.connect(server.url) as store:
        lock = rallypoint.Lock(store, "l")
        lock.acquire()
        child = start("lock", "l", "--store", server.url, "--", "true")
        until_waiting(server, child)
        child.send_signal(signal.SIGTERM)
        assert child.communicate(timeout=AMPLE_S) == (b"", b"") and child.returncode == 143
        lock.release()
        assert server.statistics()["objects"] == {}


@pytest.fixture
def behind(start: Any) -> Iterator[tuple[rallypoint.Server, CuttingProxy]]:
    """A server with a long grace, and a proxy in front of it."""
    with rallypoint.Server(grace=AMPLE_S) as server, CuttingProxy(server.port) as cutter:
        yield server, cutter


def down_line(child: subprocess.Popen[bytes], cutter: CuttingProxy) -> bytes:
    """Take the server down, and return the line that a command then prints."""
    cutter.go_down()
    assert child.stderr is not None
    line = child.stderr.readline()
    assert re.fullmatch(rb"server at 127\.0\.0\.1:%d is down for 1 s .* \(\d+ s more\)\n" % cutter.port, line), line
    return line


@pytest.mark.parametrize("words", [["get", "late"], ["wait", "late"], ["barrier", "b", "--members=2", "--member=0"]])
def test_a_command_reports_an_outage_once_and_continues_after_it(
    words: list[str], behind: tuple[rallypoint.Server, CuttingProxy], start: Any
) -> None:
    server, cutter = behind
    child = start(*words, "--timeout", AMPLE_S, "--store", f"tcp://127.0.0.1:{cutter.port}")
    until_waiting(server, child)
    down_line(child, cutter)
    cutter.come_back()
    assert re.fullmatch(rb"server at .* is back after \d+\.\d s\n", child.stderr.readline())
    with rallypoint.connect(server.url) as other:
        other.set("late", "v")
        if words[0] == "barrier":
            rallypoint.Barrier(other, "b", 2).wait(1)
    out, err = child.communicate(timeout=AMPLE_S)
    assert (child.returncode, out, err) == (0, b"v\n" if words[0] == "get" else b"", b"")


@pytest.mark.parametrize("words", [["get", "late"], ["wait", "late"], ["lock", "l", "--", "true"]])
def test_a_command_that_times_out_in_an_outage_exits_with_3(
    words: list[str], behind: tuple[rallypoint.Server, CuttingProxy], start: Any
) -> None:
    server, cutter = behind
    with rallypoint.connect(server.url) as other, rallypoint.Lock(other, "l"):
        command, *rest = words
        child = start(command, "--timeout", 2, "--store", f"tcp://127.0.0.1:{cutter.port}", *rest)
        until_waiting(server, child)
        down_line(child, cutter)
        out, err = child.communicate(timeout=AMPLE_S)
        assert (child.returncode, out) == (3, b"")
        assert b"timed out" in err and b"has been down for" in err and err.count(b"\n") == 1


INSTALLED = Path(sys.executable).with_name("rallypoint")


@pytest.mark.parametrize("module", ["click", "msgspec"])
@pytest.mark.parametrize("command", [[sys.executable, "-m", "rallypoint"], [str(INSTALLED)]])
def test_ctrl_c_during_start_up_exits_silently(tmp_path: Path, module: str, command: list[str]) -> None:
    """The package itself imports msgspec, the command imports click."""
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport nothing")
    paths = [str(tmp_path), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([*command, "ls"], env=env, capture_output=True, timeout=AMPLE_S)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b""), "which a shell shows as 130"


def test_ctrl_c_is_an_exception_for_programs_that_import_the_package() -> None:
    code = "import rallypoint, signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=AMPLE_S).stdout == b"True\n"


def test_help_imports_no_command() -> None:
    look = (
        "import sys; from click.testing import CliRunner; from rallypoint.cli import main; "
        "print(CliRunner().invoke(main, ['--help']).output); "
        "print([m for m in sys.modules if m.startswith(('rallypoint.cli.', 'rallypoint.recipes', 'asyncio', 'torch'))])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=AMPLE_S)
    assert done.stdout.endswith("\n[]\n")
    assert all(says in " ".join(done.stdout.split()) for says in COMMANDS.values())


# The documentation


def test_the_session_in_the_documentation_is_real(store: rallypoint.Store, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    (session,) = re.findall(r"```console\n(.*?)```", page, re.S)
    (tmp_path / "rallypoint").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    (tmp_path / "rallypoint").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    for command, output in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", session, re.M):
        done = subprocess.run(
            ["sh", "-c", f"{command}\nwait"], env=env, capture_output=True, text=True, timeout=AMPLE_S
        )
        assert (done.stdout, done.stderr) == (output, ""), command
    for name in COMMANDS:
        assert re.search(rf"`(rallypoint )?{name}\b", page), f"docs/cli.md does not mention {name}"


def test_a_command_says_that_it_is_still_trying_to_connect() -> None:
    url = f"tcp://127.0.0.1:{reserve_port()}"
    done = run("get", "k", "--store", url, "--connect-timeout", 4)
    first, error = done.stderr.decode().splitlines()[:2]
    assert done.returncode == 4 and first == f"no reply from {url} yet; trying for 2 s more"
    assert "nothing listens there" in error
