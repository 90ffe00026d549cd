"""Status: what it costs a server to be watched, and how long its views of 1,000 ranks take.

The job is 125 nodes of 8 ranks, whose reports this process writes as agents do: each every 5 s, and the ranks are a
step further each time. Three connections read the events, as three open pages do.

Where RALLYPOINT_BEFORE names a checkout of an earlier commit, a barrier of 64 and `add` are measured beside it, in
processor time of the server, which the load of the machine disturbs less than time on the wall.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import urlopen

import rallypoint
from benchmarks.meeting import IN_A_ROW, Members, pass_once
from benchmarks.rig import Missing, cpu_s, in_turn, need, say, team
from benchmarks.servers import Running, serving
from benchmarks.table import Line, Target
from rallypoint.core.run_keys import report_prefix
from rallypoint.core.run_report import NodeReport, RankReport, encode_report

TITLE = "Status: 1,000 ranks on the page and in the command"
NOTES = (
    "125 nodes of 8 ranks report every 5 s. *server, 3 watchers*: processor time of the server, in percent of one "
    "core, reports included; its peer is the same without watchers. *page*: from opening it in chromium until all "
    "ranks are drawn. *barrier of 64*, *add*: processor time of the server for each member or call, beside the "
    "checkout in RALLYPOINT_BEFORE. Less is better."
)
NODES, RANKS, INTERVAL_S = 125, 8, 5.0
WATCHERS, MEMBERS, PROCESSES, ADDS = 3, 64, 4, 2000


def run(quick: bool) -> list[Line]:
    """Measure the cost of watchers, then the views, then the paths that every client takes."""
    lines: list[Line] = []
    with serving(["rallypoint"]) as servers, _job(servers["rallypoint"].port):
        server = servers["rallypoint"]
        rounds, slice_s = (1, 5.0) if quick else (5, 10.0)
        watched, alone = in_turn(["watched", "alone"], rounds, functools.partial(_cost, server, slice_s)).values()
        cheap, second = Target(at_most=2.0, unit="%"), Target(at_most=1.0, unit="s")
        lines.append(Line("server, 3 watchers", "", "%", watched, "no watchers", alone, cheap))
        for what, look in (
            ("rallypoint status", functools.partial(_run_status, server.port)),
            ("GET /status", functools.partial(_fetch, server.port, "/status")),
            ("GET /", functools.partial(_fetch, server.port, "/")),
        ):
            lines.append(Line(what, "", "s", _timed(look), target=second))
        try:
            need("chromium", "chromedriver")
            lines.append(Line("page", "", "s", _pages(server.port, 2 if quick else 5), target=second))
        except Missing as missing:
            say(f"  no page: {missing}")
    if "RALLYPOINT_BEFORE" in os.environ:
        lines += _beside_before(2 if quick else 15)
    return lines


# The job


@contextmanager
def _job(port: int) -> Iterator[None]:
    """Write the reports of a job until the end of the block."""
    over = threading.Event()
    with rallypoint.TCPStore("127.0.0.1", port) as store:
        for node in range(NODES):
            store.lease(_key(node), _report(node, 0))
        writing = threading.Thread(target=_write, args=(store, over))
        writing.start()
        try:
            yield
        finally:
            over.set()
            writing.join()


def _write(store: rallypoint.Store, over: threading.Event) -> None:
    step = 0
    while not over.is_set():
        step += 1
        for node in range(NODES):
            store.set(_key(node), _report(node, step))
            if over.wait(INTERVAL_S / NODES):
                return


def _key(node: int) -> str:
    return f"{report_prefix('bench')}n{node}"


def _report(node: int, step: int) -> bytes:
    ranks = [
        RankReport(rank=node * RANKS + local, local_rank=local, pid=4000 + local, step=step, progress_age_s=0.2)
        for local in range(RANKS)
    ]
    return encode_report(
        NodeReport(run="bench", node=f"n{node}", host=f"host-{node}", state="running", restart_budget=3, ranks=ranks)
    )


# Watching


def _cost(server: Running, slice_s: float, name: str) -> float:
    """Return the processor time of the server, in percent of one core, with watchers or alone."""
    with ExitStack() as stack:
        for _ in range(WATCHERS if name == "watched" else 0):
            stack.enter_context(_watching(server.port))
        began, used_s = time.monotonic(), cpu_s(server.pid)
        time.sleep(slice_s)
        return 100 * (cpu_s(server.pid) - used_s) / (time.monotonic() - began)


@contextmanager
def _watching(port: int) -> Iterator[None]:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n")
    reading = threading.Thread(target=_read, args=(sock,), daemon=True)
    reading.start()
    try:
        yield
    finally:
        sock.shutdown(socket.SHUT_RDWR)
        reading.join()
        sock.close()


def _read(sock: socket.socket) -> None:
    while sock.recv(1 << 20):
        pass


def _timed(do: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(5):
        began = time.monotonic()
        do()
        times.append(time.monotonic() - began)
    return times


def _run_status(port: int) -> None:
    command = [sys.executable, "-m", "rallypoint", "status", f"tcp://127.0.0.1:{port}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _fetch(port: int, path: str) -> bytes:
    with urlopen(f"http://127.0.0.1:{port}{path}") as reply:
        return bytes(reply.read())


def _pages(port: int, count: int) -> list[float]:
    from tests.status.browser import browser  # the tests have a driver

    drawn = f"document.querySelectorAll('.grid i').length === {NODES * RANKS}"
    with tempfile.TemporaryDirectory() as directory, browser(Path(directory)) as window:
        times = []
        for turn in range(count + 1):
            began = time.monotonic()
            window.open(f"http://127.0.0.1:{port}/")
            window.wait_for(drawn)
            if turn:
                times.append(time.monotonic() - began)
        return times


# Beside an earlier commit


def _beside_before(rounds: int) -> list[Line]:
    names = ["rallypoint", "before"]
    need("torch")
    with serving(names) as servers, team(PROCESSES, Members, MEMBERS // PROCESSES, MEMBERS) as crowds:
        stores = {name: rallypoint.TCPStore("127.0.0.1", servers[name].port) for name in names}

        def barrier_us(name: str) -> float:
            used_s = cpu_s(servers[name].pid)
            pass_once(crowds, servers, "barrier", name)
            return 1e6 * (cpu_s(servers[name].pid) - used_s) / MEMBERS / IN_A_ROW["barrier"]

        def add_us(name: str) -> float:
            used_s = cpu_s(servers[name].pid)
            for _ in range(ADDS):
                stores[name].add("counter", 1)
            return 1e6 * (cpu_s(servers[name].pid) - used_s) / ADDS

        lines = []
        for what, measure in ((f"barrier of {MEMBERS}", barrier_us), ("add", add_us)):
            ours, theirs = in_turn(names, rounds, measure).values()
            lines.append(Line(what, "server", "us", ours, "before", theirs, Target(at_most=1.05)))
        return lines
