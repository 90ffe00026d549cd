"""The hosts of a job without a scheduler: an agent on each, started over ssh, all of which end together.

What an agent needs, its command line, directory and variables, is the first line of its standard input, not part of
the command: any user may read the arguments of processes, here and there, and a token must not be among them. Later
lines are names of signals. When the standard input ends, for whatever reason, the agent ends: no host is left working
after a launcher that was killed (`remote_agent.py`).

If the agent on one host fails, the others usually end by themselves, with the same failure. Those that have not after
OTHERS_END_S get SIGTERM. The exit code is that of the first one.

Rejected: a terminal on the host (`ssh -t`), which would forward Ctrl-C and hang-ups. It merges the two output streams,
changes line ends, and one terminal cannot be had for several hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rallypoint.launch.clusters.node_list import expand_hosts, split_list
from rallypoint.launch.clusters.ssh_agents import ssh_variables
from rallypoint.launch.output.pump import OutputPump, OutputRoute, WorkerStreams
from rallypoint.launch.signal_names import ENDING_SIGNALS
from rallypoint.launch.ssh.remote_agent import MAX_LINE
from rallypoint.launch.wakeup_pipe import WakeupPipe
from rallypoint.launch.workers.worker_process import describe_exit, exit_code_of

__all__ = ["FORWARDED", "HostsRun", "forwarded_variables", "parse_hosts"]

FORWARDED = (
    "PET_*",
    "PYTHONPATH",
    "RALLYPOINT_HEALTH_*",
    "RALLYPOINT_STORE",
    "RALLYPOINT_TOKEN",
    "RALLYPOINT_TOKEN_FILE",
    "RALLYPOINT_TLS_*",
)
"""Variables that every agent gets."""

OTHERS_END_S = 5.0
"""How long agents may take to end by themselves after the first failure."""

KILL_S = 15.0
"""How long an agent may take to end, besides the grace period of its workers."""

SSH_FAILED = 255
"""The exit code with which ssh reports its own failures."""

OPTIONS = ("BatchMode=yes", "ConnectTimeout=30", "ServerAliveInterval=5", "ServerAliveCountMax=3")
"""Options of ssh: it never asks, and notices within about 15 s that a host is gone."""

_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def parse_hosts(text: str) -> tuple[str, ...]:
    """Parse --hosts: `[USER@]HOST,…`, with ranges; raise ValueError that quotes the offending part."""
    found: list[str] = []
    for part in split_list(text):
        user, at, names = part.strip().rpartition("@")
        if at and not _USER.fullmatch(user):
            raise ValueError(f"{part!r}: {user!r} is not the name of a user")
        found += [user + at + host for host in expand_hosts(names)]
    for host, times in Counter(host.rpartition("@")[2] for host in found).items():
        if times > 1:
            raise ValueError(f"{host!r} is named twice: a host has one agent, and --nproc-per-node workers")
    return tuple(found)


def forwarded_variables(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the variables for the agents: those that every agent gets, and `names`, of which some may end with *."""
    wanted = [*FORWARDED, *names]
    prefixes = tuple(name[:-1] for name in wanted if name.endswith("*"))
    return {name: value for name, value in environ.items() if name in wanted or name.startswith(prefixes)}


class _RemoteAgent:
    """The ssh process of one host."""

    def __init__(self, host: str, settings: bytes, streams: WorkerStreams, wakeup: WakeupPipe) -> None:
        self.host = host
        self.code: int | None = None
        self._streams = streams
        self._has_ended = self._has_settings = False
        self._lock = threading.Lock()
        self._held: list[bytes] = []
        """Signals for an agent that does not have its settings yet."""

        reader, self._writer = os.pipe()
        words = [word for option in OPTIONS for word in ("-o", option)]
        command = f"exec {shlex.quote(sys.executable)} -m rallypoint.launch.ssh.remote_agent"
        try:
            self._ssh = subprocess.Popen(
                ["ssh", "-T", *words, host, command],
                stdin=reader,
                stdout=streams.stdout,
                stderr=streams.stderr,
                start_new_session=True,
            )
        except OSError:
            os.close(self._writer)
            raise
        finally:
            os.close(reader)
            streams.started()
        told = threading.Thread(target=self._follow, args=(settings, wakeup), name=f"ssh {host}", daemon=True)
        told.start()

    def _follow(self, settings: bytes, wakeup: WakeupPipe) -> None:
        """Write the settings, for which ssh has time until it is connected, and wait for the end of ssh."""
        self._write(settings)
        os.set_blocking(self._writer, False)
        with self._lock:
            self._has_settings = True
            self._write(b"".join(self._held))
        self._ssh.wait()
        self._has_ended = True
        wakeup.wake()

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):  # ssh has ended, or takes nothing any more
            while data:
                data = data[os.write(self._writer, data) :]

    def poll(self) -> bool:
        """Return whether it has just ended."""
        if self.code is not None or not self._has_ended:
            return False
        self.code = self._ssh.returncode
        os.close(self._writer)
        self._streams.finish()
        return True

    def signal(self, name: str) -> None:
        """Have the agent get a signal."""
        line = name.encode() + b"\n"
        with self._lock:
            if not self._has_settings:
                self._held.append(line)
            elif self.code is None:
                self._write(line)

    def kill(self) -> None:
        """End ssh; the agent then ends by itself."""
        if self.code is None:
            self._ssh.kill()

    def describe_end(self) -> str:
        """Return how it ended."""
        how = describe_exit(self.code or 0)
        return f"{how}: ssh could not connect, or lost the connection" if self.code == SSH_FAILED else how


class HostsRun:
    """Runs one agent on each host until all have ended."""

    def __init__(
        self,
        hosts: Sequence[str],
        words: Sequence[str],
        environment: Mapping[str, str],
        run_id: str,
        grace_s: float,
        preempting: Sequence[str] = (),
    ) -> None:
        """Raise ValueError if the settings of an agent are too long; signals in `preempting` do not end the agents."""
        self._hosts = hosts
        self._preempting, self._is_preempted = preempting, False
        self._kill_s = grace_s + KILL_S
        common = {"words": list(words), "directory": os.getcwd(), "kill_after_s": self._kill_s}
        self._settings = [
            _encoded({**common, "environment": {**environment, **ssh_variables(hosts, rank, run_id)}})
            for rank in range(len(hosts))
        ]
        self._wakeup = WakeupPipe((*ENDING_SIGNALS, *preempting))
        self._agents: list[_RemoteAgent] = []
        self._code: int | None = None
        self._end_at = self._kill_at = float("inf")

    def run(self) -> int:
        """Run the agents; return the exit code of the first that failed, or of the signal that ended them."""
        with self._wakeup.handling_signals(), contextlib.ExitStack() as stack:
            pump = OutputPump()
            stack.callback(pump.close)
            stack.callback(self._kill)
            self._start(pump)
            while running := [agent for agent in self._agents if agent.code is None]:
                due_s = min(self._end_at, self._kill_at) - time.monotonic()
                self._wakeup.wait(max(0.0, min(due_s, 3600.0)))
                self._forward_signals(running)
                self._collect(running, pump)
                self._end_late(running)
        return self._code or 0

    def _start(self, pump: OutputPump) -> None:
        shown = OutputRoute(console=True)
        for rank, (host, settings) in enumerate(zip(self._hosts, self._settings, strict=True)):
            streams = pump.open(host.rpartition("@")[2], shown, shown, rank=rank)
            try:
                self._agents.append(_RemoteAgent(host, settings, streams, self._wakeup))
            except OSError as error:
                pump.say(f"rallypoint run: cannot start ssh: {error.strerror}. Is OpenSSH's client installed?")
                self._code = 1
                self._kill()
                return

    def _forward_signals(self, running: list[_RemoteAgent]) -> None:
        while self._wakeup.signals:
            name = self._wakeup.signals.pop(0)
            for agent in running:
                agent.signal(name)
            if self._is_ending(name):
                self._failed(128 + getattr(signal, name))
                self._end_at, self._kill_at = float("inf"), time.monotonic() + self._kill_s

    def _is_ending(self, name: str) -> bool:
        """Return whether a signal ends the agents: one that preempts them does not, except for SIGINT again."""
        if name not in self._preempting:
            return name in ENDING_SIGNALS
        again, self._is_preempted = self._is_preempted, True
        return again and name == "SIGINT"

    def _collect(self, running: list[_RemoteAgent], pump: OutputPump) -> None:
        """Note which agents have ended; after the first failure, the others have a moment."""
        for agent in running:
            if not agent.poll() or not agent.code:
                continue
            if self._code is None:
                self._end_at = time.monotonic() + OTHERS_END_S
            if self._code != exit_code_of(agent.code):
                pump.say(f"rallypoint run: the agent on {agent.host} ended: {agent.describe_end()}")
            self._failed(exit_code_of(agent.code))

    def _failed(self, code: int) -> None:
        self._code = self._code or code

    def _end_late(self, running: list[_RemoteAgent]) -> None:
        """End agents that have not ended in time."""
        now = time.monotonic()
        if now >= self._end_at:
            self._end_at, self._kill_at = float("inf"), min(self._kill_at, now + self._kill_s)
            for agent in running:
                agent.signal("SIGTERM")
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self._kill()

    def _kill(self) -> None:
        for agent in self._agents:
            agent.kill()


def _encoded(settings: Mapping[str, Any]) -> bytes:
    line = json.dumps(settings).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise ValueError(
            f"the arguments and variables of an agent are too long: {len(line)} bytes, limit {MAX_LINE}; put them "
            f"into a file on the hosts (--env-file)"
        )
    return line
