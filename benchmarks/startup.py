"""Start-up and memory: what it costs to import, to ask for help, to start a server, and to keep a connection."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.rig import PLACEMENTS, in_turn, pin, resident_kb, say
from benchmarks.servers import START, greeted, serving
from benchmarks.table import Line, Target

TITLE = "Start-up and memory"
NOTES = (
    "Everything on one core. Imports are counted above a bare `python -c pass`. Our server is ready when `Server()` "
    "returns; torch's when a fresh process that holds a TCPStore has printed its port. Memory is resident memory; a "
    "connection is one that has said VALIDATE and PING and then keeps still. The targets are for our figure itself."
)
CONNECTIONS = 5000
FILES_BESIDE = 500
"""Descriptors that a process has use for beside its connections."""


def run(quick: bool) -> list[Line]:
    """Measure times, then memory."""
    pin(os.getpid(), PLACEMENTS[0].clients)  # what is started from here on stays there
    names = ["rallypoint", *(["torch"] if importlib.util.find_spec("torch") else [])]
    connections = min(500 if quick else CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - FILES_BESIDE)
    rounds = {"rallypoint": 3, "torch": 1} if quick else {"rallypoint": 20, "torch": 3}
    return _times(names, rounds) + _memory(names, connections)


def _times(names: list[str], rounds: dict[str, int]) -> list[Line]:
    say("  import")
    imported = [_import_ms(name, rounds[name]) for name in names]
    say("  rallypoint --help")
    command = [str(Path(sys.executable).with_name("rallypoint")), "--help"]
    helped = in_turn(["help"], rounds["rallypoint"], lambda _: run_ms(command))
    say("  a server")
    ready = [in_turn([name], rounds[name], _ready_ms)[name] for name in names]
    return [
        _line("import", "ms", 60, imported),
        _line("rallypoint --help", "ms", 200, [helped["help"]]),
        _line("a server ready", "ms", 400, ready),
    ]


def _memory(names: list[str], connections: int) -> list[Line]:
    say(f"  memory, {connections} connections")
    idle, grown = [], []
    with serving(names) as servers:
        for server in servers.values():
            before = resident_kb(server.pid)
            held = [greeted(server.port) for _ in range(connections)]
            idle.append([before / 1024])
            grown.append([(resident_kb(server.pid) - before) / connections])
            for sock in held:
                sock.close()
    return [
        _line("idle server", "MB", 60, idle),
        _line(f"each of {connections:,} idle connections", "KB", 16, grown),
    ]


def _line(what: str, unit: str, limit: float, figures: list[list[float]]) -> Line:
    """Make a line of our figures and, where there are some, torch's."""
    ours, *theirs = figures
    peer = ("torch", theirs[0]) if theirs else ()
    return Line(what, PLACEMENTS[0].name, unit, ours, *peer)._replace(target=Target(at_most=limit, unit=unit))


def _import_ms(module: str, rounds: int) -> list[float]:
    """Return how long an import took, above a Python that imports nothing."""
    statements = (f"import {module}", "pass")
    figures = in_turn(statements, rounds, lambda statement: run_ms([sys.executable, "-c", statement]))
    return [full - bare for full, bare in zip(*figures.values(), strict=True)]


def run_ms(command: list[str], more: dict[str, str] | None = None) -> float:
    """Run a command, with more variables in its environment; return how long it took."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment.update(more or {})
    start_at = time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=environment)  # the first writes its bytecode
    return (time.monotonic() - start_at) * 1000


def _ready_ms(name: str) -> float:
    start_at = time.monotonic()
    with START[name]():
        return (time.monotonic() - start_at) * 1000
