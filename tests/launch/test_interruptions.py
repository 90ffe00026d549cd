"""A terminating signal interrupts a request of the agent, and nothing else, wherever the signal arrives."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.launch.runs import PRELUDE, Node, Place
from tests.raw_peer import AMPLE_S, until

import rallypoint
from rallypoint.launch.events import Events
from rallypoint.launch.stores.interruptible_store import interruptible_view
from rallypoint.launch.wakeup_pipe import Signalled, WakeupPipe
from rallypoint.readiness import wait_readable
from rallypoint.recipes.rendezvous import Rendezvous


@pytest.fixture
def wakeup() -> Iterator[WakeupPipe]:
    made = WakeupPipe()
    with made.handling_signals():
        yield made


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_a_pipe_is_closed_when_nobody_can_use_it_any_more() -> None:
    pipe = WakeupPipe()
    wake, name = pipe.wake, os.readlink(f"/proc/self/fd/{pipe.fileno()}")
    del pipe
    wake()
    assert descriptors(name) == 2, "a thread that still has it can wake the agent"
    del wake
    gc.collect()
    assert descriptors(name) == 0


def descriptors(name: str) -> int:
    """Return how many descriptors of this process are of one file."""
    return sum(os.path.realpath(f"/proc/self/fd/{number}").endswith(name) for number in os.listdir("/proc/self/fd"))


# The window


def test_a_signal_wakes_the_agent_before_its_handler_runs(wakeup: WakeupPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler runs between two instructions: not while the agent sleeps, and perhaps it is just about to."""
    monkeypatch.setattr(wakeup, "wake", lambda: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert wait_readable(wakeup, timeout_s=AMPLE_S) and wakeup.signals == ["SIGUSR1"]


def test_a_request_ends_with_a_signal_and_after_one_has_a_moment(wakeup: WakeupPipe) -> None:
    def terminate_and_pause() -> None:
        terminate()
        signal.pause()

    with pytest.raises(Signalled, match="SIGTERM"):
        wakeup.interruptible(terminate_and_pause)
    assert wakeup.signals == ["SIGTERM"]
    assert wakeup.interruptible(lambda: 3) == 3, "there is time for an answer"
    with pytest.raises(Signalled, match="SIGTERM"):
        wakeup.interruptible(signal.pause)
    with pytest.raises(Signalled, match="SIGTERM"):
        wakeup.interruptible(lambda: pytest.fail("it was made"), patience_s=0.0)
    assert wakeup.signals == ["SIGTERM"] and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_outside_of_a_request_and_in_other_threads_a_signal_is_only_queued(wakeup: WakeupPipe) -> None:
    began, ends = threading.Event(), threading.Event()

    def request() -> None:
        began.set()
        ends.wait(AMPLE_S)

    thread = threading.Thread(target=lambda: wakeup.interruptible(request))
    thread.start()
    assert began.wait(AMPLE_S)
    terminate()
    ends.set()
    thread.join(AMPLE_S)
    assert wakeup.signals == ["SIGTERM"] and wakeup.is_ending()


def test_what_another_thread_reports_does_not_delay_an_interruption(wakeup: WakeupPipe) -> None:
    began, ends = threading.Event(), threading.Event()

    def report() -> None:
        with wakeup.uninterrupted():
            began.set()
            ends.wait(AMPLE_S)

    def request() -> None:
        began.wait(AMPLE_S)
        terminate()
        pytest.fail("not interrupted")

    thread = threading.Thread(target=report)
    thread.start()
    with pytest.raises(Signalled):
        wakeup.interruptible(request)
    ends.set()
    thread.join(AMPLE_S)


def test_signals_that_end_nothing_interrupt_nothing_and_are_forgotten_with_their_round(wakeup: WakeupPipe) -> None:
    def request() -> str:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGALRM)
        return "answer"

    assert wakeup.interruptible(request) == "answer"
    terminate()
    signal.raise_signal(signal.SIGUSR1)
    assert wakeup.signals == ["SIGUSR1", "SIGTERM", "SIGUSR1"]
    wakeup.forget_forwarded()
    assert wakeup.signals == ["SIGTERM"]


def test_a_signal_in_a_part_of_a_request_interrupts_the_whole_once(wakeup: WakeupPipe) -> None:
    steps = []

    def wait_and_undo() -> None:
        try:
            wakeup.interruptible(lambda: steps.append("begun"))
            terminate()
            steps.append("not interrupted")
        finally:
            wakeup.interruptible(lambda: steps.append("undone"))

    with pytest.raises(Signalled):
        wakeup.interruptible(wait_and_undo, patience_s=0.0)
    assert steps == ["begun", "undone"]


@pytest.mark.parametrize("queued", [False, True])
def test_what_is_reported_during_a_request_is_written_first(
    queued: bool, wakeup: WakeupPipe, capfd: pytest.CaptureFixture[str]
) -> None:
    events = Events("", False, False, wakeup.uninterrupted)
    if queued:
        terminate()

    def show(line: str) -> None:
        terminate()
        os.write(2, line.encode())

    def request() -> None:
        events.waits("whole")
        pytest.fail("not interrupted after it")

    with events.shown_by(show), pytest.raises(Signalled):
        wakeup.interruptible(request)
    assert capfd.readouterr().err == "rallypoint run: whole"
    with events.shown_by(show):
        events.waits("again")
    assert wakeup.signals == ["SIGTERM"] * (3 if queued else 2)


def test_a_report_during_a_last_request_does_not_end_it(wakeup: WakeupPipe) -> None:
    terminate()
    events = Events("", True, False, wakeup.uninterrupted)

    def request() -> str:
        events.fail("end", "it is said")
        return "answer"

    assert wakeup.interruptible(request) == "answer"


# The store


def test_every_request_of_the_agents_thread_ends_with_a_signal(wakeup: WakeupPipe) -> None:
    with rallypoint.Server() as server, rallypoint.connect(server.url) as store:
        view, own = interruptible_view(store, wakeup), os.getpid()
        other = threading.Thread(target=lambda: view.set("got", view.get("later", AMPLE_S)))
        other.start()
        run = Rendezvous(view, "job", 2, node="a")

        def kill_when_waiting() -> None:
            until(run.status, lambda now: now.waiting == ("a",))
            os.kill(own, signal.SIGTERM)

        killer = threading.Thread(target=kill_when_waiting)
        killer.start()
        with pytest.raises(Signalled):
            run.join(AMPLE_S)
        killer.join(AMPLE_S)
        assert run.status().waiting == (), "there is time to undo it"
        with view.watch("later") as watch:
            view.set("later", "yes")
            assert watch.next(AMPLE_S).value == b"yes"
        other.join(AMPLE_S)
        assert view.get("got") == b"yes", "the other thread was not interrupted"
        with pytest.raises(Signalled):
            view.get("never", AMPLE_S)
        assert repr(view) == repr(store)


# The agent


def test_a_silent_server_keeps_nobody_who_waits_for_other_nodes(tmp_path: Path) -> None:
    with Place(tmp_path) as place:
        script = place.script("stay()")
        one, two = (place.node(name, script) for name in "ab")
        one.until("^up")
        two.until("^up")
        two.signal("SIGTERM")
        assert two.end() == 143
        with rallypoint.TCPStore("localhost", place.port, timeout=AMPLE_S) as store:
            until(Rendezvous(store, "job", 2).status, lambda status: status.waiting == ("a",))
        server = place.server()
        os.kill(server, signal.SIGSTOP)
        try:
            one.signal("SIGTERM")
            assert one.end() == 143
        finally:
            os.kill(server, signal.SIGKILL)
        assert "rallypoint run: SIGTERM while waiting for other nodes" in one.err and "Traceback" not in one.err


AT_LINE = """
import os, signal, sys
from rallypoint.cli import main
from rallypoint.launch import agent

at, here, lines = int(sys.argv[1]), os.path.dirname(agent.__file__), 0

def trace(frame, event, argument):
    return line if frame.f_code.co_filename.startswith(here) else None

def line(frame, event, argument):
    global lines
    ours = getattr(signal.getsignal(signal.SIGTERM), "__name__", "") == "_handle"
    lines += event == "line" and ours
    if lines == at and ours and event == "line":
        where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        os.write(2, f"signal at {where}\\n".encode())
        signal.raise_signal(signal.SIGTERM)
    return line

sys.settrace(trace)
try:
    main(sys.argv[2:])
finally:
    sys.settrace(None)
    os.write(2, f"{lines} lines\\n".encode())
"""
"""Runs `rallypoint`, and raises SIGTERM before line number `at` of those that it executes in the launcher."""

POINTS = 9


def run_with_signal_at(number: int, where: Path) -> Node:
    """Run a job whose worker fails once, is restarted and succeeds, with a signal at some line of the launcher."""
    script = where / "script.py"
    script.write_text(PRELUDE + "say('up', os.getpid())\nsys.exit(3 * (restarts == 0))\n")
    command = [sys.executable, "-c", AT_LINE, str(number), "run", "--max-restarts=1", str(script)]
    return Node(command, where, {"SIGNAL_AT": f"{where}#{number}"})


def left_over(mark: str) -> list[str]:
    """Return the command lines of processes that have this variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"SIGNAL_AT={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_wherever_a_signal_arrives_the_node_ends_and_leaves_nothing_behind(tmp_path: Path) -> None:
    node = run_with_signal_at(0, tmp_path)
    assert node.end() == 0, node.text()
    total = int(node.until(r"^(\d+) lines$")[0][1])
    codes = []
    for number in range(1, total, total // POINTS):
        node = run_with_signal_at(number, tmp_path)
        code, said = node.end(), node.err
        codes.append(code)
        assert not re.search("Traceback|internal error|Exception ignored", said), said
        assert code == 143 or (code == 0 and "SIGTERM" not in said), f"{number}: {code}\n{said}"
        until(partial(left_over, f"{tmp_path}#{number}"), lambda found: not found)
    assert codes.count(143) > POINTS // 2, "only after the result of the run is a signal too late"
