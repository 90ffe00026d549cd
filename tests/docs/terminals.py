"""Shells on terminals of their own, which type the commands of a page and wait for what it shows.

    $ a command          typed; the lines below it, up to the next `$`, must appear, in any order
    ^C                   typed when these lines are there, and the command must end

Each title, as in ```console title="Terminal 2"```, is a shell of its own; one with the name of a host, as in
`title="host-b"`, is there. Lines before the first `$` of a block are further output of the command that runs there. A
command without lines below must end before the next one of any shell; one with lines may go on, and one with `...`
alone below it is left to itself. The numbers 4711 to 4719 are process ids: in a command they become what stood in the
output at their place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.docs.blocks import Block, missing_lines, process_ids
from tests.hosts import Host

__all__ = ["Terminal", "type_block"]

AMPLE_S = 100
COLUMNS = 140
ENDED = re.compile(r"^---- ended (\d+)$")


class Terminal:
    """One shell on a host, with its output on a terminal."""

    def __init__(self, host: Host, folder: Path, env: Mapping[str, str]) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        shell = ["bash", "--noprofile", "--norc"]
        self._shell = host.popen(
            shell, cwd=folder, env=env, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._closed = False
        self._typed = self._begin = 0
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()
        self._write("trap : INT; set -m")

    def _write(self, text: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{text}\n".encode())
        self._shell.stdin.flush()

    def _read(self, terminal: int) -> None:
        pending = b""
        while True:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # nobody has the terminal any more
                data = b""
            *lines, pending = (pending + data).split(b"\n")
            with self._news:  # what a carriage return has replaced is not to be seen
                self._lines += [line.rstrip(b"\r").rpartition(b"\r")[2].decode() for line in lines]
                self._closed = not data
                self._news.notify_all()
            if not data:
                os.close(terminal)
                return

    def type(self, command: str) -> None:
        """Type a command, when the last one has ended."""
        self.wait_for_end()
        self._begin = len(self._lines)
        self._typed += 1
        self._write(f"{{ {command}\n}} </dev/null; echo ---- ended {self._typed}")

    def expect(self, shown: list[str], command: str) -> dict[str, str]:
        """Wait until the command has printed these lines, or has ended; return which process ids they name."""
        wanted = [line for line in shown if line not in ("^C", "...")]
        if shown == ["..."]:
            return {}
        goes_on = command.endswith("&")

        def is_done() -> bool:
            return (self._ended() and not goes_on) or (bool(wanted) and not self._missing(wanted))

        if wanted or not shown:
            self._wait(is_done, command)
        missing = self._missing(wanted)
        assert not missing, f"$ {command}\n" + "\n".join(self._lines[self._begin :]) + f"\nmissing: {missing}"
        if "^C" in shown:
            self.interrupt()
        pids: dict[str, str] = {}
        for line in wanted:
            pids |= process_ids(line, self._lines[self._begin :])
        return pids

    def _missing(self, wanted: list[str]) -> list[str]:
        return missing_lines(wanted, self._lines[self._begin :])

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does, and wait for the end."""
        for pid in _children(self._shell.pid):
            os.kill(pid, signal.SIGINT)
        self.wait_for_end()

    def wait_for_end(self) -> None:
        """Wait until the last command has ended."""
        self._wait(self._ended, "the last command")

    def _ended(self) -> bool:
        ends = [int(found[1]) for line in self._lines if (found := ENDED.match(line))]
        return not self._typed or self._typed in ends or self._closed

    def _wait(self, is_true: Callable[[], bool], what: str) -> None:
        with self._news:
            done = self._news.wait_for(is_true, AMPLE_S)
        assert done, f"$ {what}: nothing more for {AMPLE_S} s; it said\n" + "\n".join(self._lines[-40:])

    def close(self) -> None:
        """End the shell and all that it has started."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        for pid in [*_children(self._shell.pid), self._shell.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._shell.wait()
        self._reader.join(AMPLE_S)


def _children(pid: int) -> list[int]:
    """Return the commands of a shell that run; workers are sessions of their own, and end with their agent."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def type_block(terminal: Terminal, block: Block, pids: dict[str, str]) -> None:
    """Type all commands of a block, and wait for what it shows; `pids` are what is known of process ids so far."""
    more, *commands = re.split(r"^\$ ", block.text, flags=re.M)
    if more:
        pids |= terminal.expect(more.splitlines(), block.title)
    for one in commands:
        command, *shown = one.splitlines()
        for mine, theirs in pids.items():
            command = re.sub(rf"\b{mine}\b", theirs, command)
        terminal.type(command)
        pids |= terminal.expect(shown, command)
