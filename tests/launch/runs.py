"""Real runs of `rallypoint run`: nodes as processes, whose lines are events to wait for.

A `Place` has one port, a directory and any number of nodes; when it is left, every process that it knows of is gone.
Nothing here sleeps: `until` returns when a line was printed, and fails after `AMPLE_S` with all that was.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

from tests.pages import pid_at
from tests.ports import reserve_port
from tests.raw_peer import AMPLE_S, wait_for_end

from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import OPEN

OPEN_CLIENT = ClientSecurity(OPEN)
"""A client without credentials, whatever the environment has."""

HARNESS = frozenset(("TMPDIR", "PYTHONFAULTHANDLER"))
"""Variables that agents, and so their workers, get from this harness."""

PRELUDE = """
import json, os, signal, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
node, restarts = os.environ["RALLYPOINT_NODE"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def on(name, act):
    signal.signal(getattr(signal, name), lambda *_: act())
def hang():
    while True:
        time.sleep(0.1)  # not pause(), which misses a signal that arrives just before it blocks
def stay():
    "Say that we are up, and end well when USR1 comes."
    on("SIGUSR1", lambda: os._exit(0))
    say("up", rank, world, restarts, os.getpid())
    hang()
"""
"""What every script begins with."""


class Node:
    """One agent: its lines as they come, on both streams."""

    def __init__(self, command: list[str], where: Path, more: dict[str, str], **streams: Any) -> None:
        self.lines: list[tuple[str, str]] = []
        self._news = threading.Condition()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCH"))}
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        self.child = subprocess.Popen(
            command,
            cwd=where,
            env={**environment, **dict.fromkeys(HARNESS, "1"), "TMPDIR": str(where), **more},
            stdin=subprocess.DEVNULL,
            **given,
        )
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.child.stdout), ("err", self.child.stderr))
            if stream is not None
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: Any) -> None:
        for line in stream:
            with self._news:
                self.lines.append((name, line.decode(errors="surrogateescape").rstrip("\n")))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def text(self, name: str = "") -> str:
        with self._news:
            return "\n".join(line for where, line in self.lines if name in ("", where))

    @property
    def out(self) -> str:
        return self.text("out")

    @property
    def err(self) -> str:
        return self.text("err")

    def until(self, pattern: str, times: int = 1) -> list[re.Match[str]]:
        """Wait for at least `times` lines that match; return the matches."""
        deadline = time.monotonic() + AMPLE_S
        with self._news:
            while True:
                found = [match for _, line in self.lines if (match := re.search(pattern, line))]
                if len(found) >= times:
                    return found
                alive = any(reader.is_alive() for reader in self._readers)
                assert alive and self._news.wait(deadline - time.monotonic()), (
                    f"{len(found)} of {times} lines like {pattern!r}:\n" + "\n".join(line for _, line in self.lines)
                )

    def up(self, *ranks: int, world: int, restarts: int = 0) -> dict[int, int]:
        """Return the pids of these workers, when they are up in a world of this size."""
        pids = {}
        for rank in ranks:
            pids[rank] = int(self.until(rf"^up {rank} {world} {restarts} (\d+)$")[-1][1])
        return pids

    def signal(self, name: str) -> None:
        self.child.send_signal(getattr(signal, name))

    def end(self) -> int:
        """Wait for its end, and for all of its lines; return the exit code."""
        try:
            code = self.child.wait(AMPLE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {AMPLE_S:g} s:\n{self._autopsy()}") from None
        for reader in self._readers:
            reader.join(AMPLE_S)
        return code

    def _autopsy(self) -> str:
        """End the agent, its workers first, and return the stacks of their threads among its lines."""
        commands = {}
        for pid in sorted(processes_of(self.child.pid), reverse=True):
            with contextlib.suppress(OSError):  # it has just ended
                commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        for pid, command in commands.items():
            if " -I " not in command:  # servers and relays ignore PYTHONFAULTHANDLER
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
                wait_for_end(pid)
        for reader in self._readers:
            reader.join(AMPLE_S)
        return "\n".join([*(f"{pid}: {command[:200]}" for pid, command in commands.items()), self.text()])

    def events(self) -> list[dict[str, Any]]:
        """Read standard error as JSON, a line an event."""
        return [json.loads(line) for line in self.err.splitlines()]


class Place:
    """Where nodes are started, one port among them."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.port = reserve_port()
        self.nodes: list[Node] = []
        self.token = ""
        """The token of the server at the port, if it has one."""

        self._scripts = 0

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.child.kill()
            node.end()
        with contextlib.suppress(OSError, ProcessLookupError):
            os.kill(self.server(), signal.SIGTERM)

    def server(self) -> int:
        """Return the pid of the server at the port."""
        return pid_at(f"localhost:{self.port}", self.token)

    def script(self, code: str) -> str:
        """Write a script, and return its path."""
        self._scripts += 1
        path = self.where / f"script{self._scripts}.py"
        path.write_text(PRELUDE + textwrap.dedent(code))
        return str(path)

    def run(self, *words: object, env: dict[str, str] | None = None, where: Path | None = None, **streams: Any) -> Node:
        """Start `rallypoint run`, in the place's directory or another."""
        command = [sys.executable, "-m", "rallypoint", "run", *map(str, words)]
        self.nodes.append(Node(command, where or self.where, env or {}, **streams))
        return self.nodes[-1]

    def node(self, name: str, *words: object, nodes: str = "2", run: str = "job", **more: Any) -> Node:
        """Start one node of several."""
        meet = ["--nnodes", nodes, "--rdzv-endpoint", f"localhost:{self.port}", "--rdzv-id", run, "--node", name]
        return self.run(*meet, *words, **more)


def gone(*pids: int) -> None:
    """Wait until these processes are."""
    for pid in pids:
        wait_for_end(pid)


def parent(pid: int) -> int:
    """Return the parent of a process; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def every_process() -> set[int]:
    """Return the pids of all processes of this machine."""
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()}


def processes_of(agent: int) -> set[int]:
    """Return the pids of a process and of all that it has started, and so on."""
    parents = {pid: parent(pid) for pid in every_process()}
    found = {agent}
    while more := {pid for pid, above in parents.items() if above in found} - found:
        found |= more
    return found


def has_in(what: str, text: str, pids: set[int]) -> set[int]:
    """Return the processes that have a text in their arguments ("cmdline") or their environment ("environ")."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            if text.encode() in Path(f"/proc/{pid}/{what}").read_bytes():
                found.add(pid)
    return found
