"""A server with a data directory that is killed and restarted, as a supervisor would do."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.ports import reserve_port

AMPLE_S = 120.0
KILLS = int(os.environ.get("KILLS", "5"))
"""How often the server is killed in each test; `make soak` sets 100."""

FIRST_SEED = int(os.environ.get("FIRST_SEED", "1"))


class DurableServer:
    """A server on a fixed port, with a data directory."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = reserve_port()
        self.url = f"tcp://127.0.0.1:{self.port}"
        self.kills = 0
        self._command = [sys.executable, "-m", "rallypoint", "serve", "--port", str(self.port)]
        self._command += ["--data-dir", str(directory), *options]
        self.child = self._start()

    def _start(self) -> subprocess.Popen[str]:
        child = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        line = child.stdout.readline()
        assert "serves at" in line, f"the server did not start: {line!r}, exit code {child.wait()}"
        return child

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the server by SIGKILL or another signal."""
        self.child.send_signal(number)
        self.child.wait(AMPLE_S)
        assert self.child.stdout is not None
        self.child.stdout.close()
        self.kills += number == signal.SIGKILL

    def restart(self) -> None:
        """Kill the server, and start it again on its port and directory."""
        self.kill()
        self.child = self._start()


@contextlib.contextmanager
def durable_server(directory: Path, *options: str) -> Iterator[DurableServer]:
    """Run a server with a data directory for as long as the block lasts."""
    server = DurableServer(directory, *options)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def repeatedly_killed(server: DurableServer, kills: int = KILLS, seed: int = FIRST_SEED) -> Iterator[threading.Event]:
    """Kill and restart a server at random moments during the block; the event is set after the last kill.

    Leaving the block waits for the last restart.
    """
    chance, over = random.Random(f"{seed} kills"), threading.Event()
    failed: list[BaseException] = []

    def kill() -> None:
        pause = threading.Event()
        try:
            for _ in range(kills):
                pause.wait(chance.choice((0.02, 0.2, chance.uniform(0.0, 1.0))))
                server.restart()
        except BaseException as error:
            failed.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield over
    finally:
        thread.join(AMPLE_S + 2 * kills)
        assert not failed, failed
