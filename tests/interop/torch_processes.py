"""Processes that have imported torch, without the seconds that the import takes.

One process imports torch, starts no threads, and forks a process for every function that it is asked to run. Functions
live beside their tests and are found by name; arguments and results are Python literals. A socket of each process
carries its result, and closes when the process ends.
"""

from __future__ import annotations

import ast
import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
AMPLE_S = 80.0
"""Longer than anything here takes, and shorter than pytest's limit."""


class TorchProcessFailed(Exception):
    """A function raised in its process, or the process died."""


class TorchProcess:
    """A forked process that runs one function."""

    def __init__(self, link: socket.socket, what: str) -> None:
        self._what = what
        self._link = link
        self._link.settimeout(AMPLE_S)
        self._reader = link.makefile("r")
        self.pid = int(self._reader.readline())

    def result(self) -> Any:
        """Wait for the function to end, and return what it returned or raise what it raised, as TorchProcessFailed."""
        try:
            outcome, value = ast.literal_eval(self._reader.read() or "'died', ''")
        except TimeoutError:
            outcome, value = "hung", f"no result after {AMPLE_S:g} s"
        finally:
            self.end()
        if outcome != "done":
            raise TorchProcessFailed(f"{self._what} {outcome}\n{value}")
        return value

    def interrupt(self) -> None:
        """Send the process SIGINT."""
        os.kill(self.pid, signal.SIGINT)

    def end(self) -> None:
        """Kill the process if it still runs."""
        if self._link.fileno() >= 0:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._reader.close()
            self._link.close()


class TorchProcesses:
    """The process that all others are forked from."""

    def __init__(self) -> None:
        self._members: list[TorchProcess] = []
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.interop.torch_processes", str(theirs.fileno())]
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def start(self, function: Callable[..., Any], *arguments: Any) -> TorchProcess:
        """Run a function of a test module in a new process."""
        path = Path(function.__code__.co_filename).relative_to(ROOT)
        name = ".".join(path.with_suffix("").parts)
        link, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [repr((name, function.__name__, arguments)).encode()], [theirs.fileno()])
        member = TorchProcess(link, f"{function.__name__}{arguments}")
        self._members.append(member)
        return member

    def run(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run a function at once in a process for each tuple of arguments; return the results in order."""
        return [member.result() for member in [self.start(function, *arguments) for arguments in calls]]

    def dismiss(self) -> None:
        """Kill the processes that a failed test has left."""
        for member in self._members:
            member.end()
        self._members.clear()

    def close(self) -> None:
        """End all processes."""
        self.dismiss()
        self._control.close()
        self._process.wait(AMPLE_S)


def _serve(control: socket.socket) -> None:
    """Fork a process for each request, until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, (*fds,), _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not request:
            return
        if os.fork() == 0:
            control.close()
            _work(socket.socket(fileno=fds[0]), *ast.literal_eval(request.decode()))
        os.close(fds[0])


def _work(link: socket.socket, module: str, function: str, arguments: tuple[Any, ...]) -> None:
    """Run one function and report its result, in the forked process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored it
    link.sendall(f"{os.getpid()}\n".encode())
    try:
        outcome = "done", getattr(importlib.import_module(module), function)(*arguments)
    except BaseException:
        outcome = "raised", traceback.format_exc()
    link.sendall(repr(outcome).encode())
    link.close()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    import pytest  # noqa: F401 - imported once, for all processes
    import torch._dynamo  # which DDP imports, too
    import torch.distributed.rpc  # noqa: F401

    _serve(socket.socket(fileno=int(sys.argv[1])))
