"""Native frames of workers, by py-spy where it is installed and may trace: what C code a Python call is in.

py-spy is a program of its own and no dependency: it is looked for beside this Python and on the path. It pauses a
worker by ptrace for a fraction of a second. By default only one rank of each place is traced (`fold`). What fails
leaves a note; the Python stacks are there anyway.

Rejected: gdb or eu-stack, which know nothing of Python's frames. Tracing a stopped worker, which py-spy cannot.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from rallypoint.core.stacks import MAX_STACK_BYTES, RankStack, fold
from rallypoint.deadline import Deadline
from rallypoint.text import printable

__all__ = ["NATIVE_S", "add_native", "find_py_spy"]

NATIVE_S = 20.0
"""How long the workers of one node may be traced in total."""

MAX_NOTE = 300

NOT_INSTALLED = "py-spy is not installed (pip install py-spy)"
REFUSED = "ptrace is refused: run as root, give the container CAP_SYS_PTRACE, or set kernel.yama.ptrace_scope to 0"
_REFUSAL = re.compile(r"permission denied|operation not permitted", re.I)


class SpyFrame(msgspec.Struct):
    """A frame in the output of py-spy; `module` is the library of a native one."""

    name: str
    filename: str
    module: str | None = None
    line: int = 0

    def __str__(self) -> str:
        file = os.path.basename(self.filename) if self.module else self.filename
        line = f":{self.line}" if self.line else ""
        library = os.path.basename(self.module or "")
        return f"{self.name} ({file}{line}{f' in {library}' if library not in ('', file) else ''})"


class SpyThread(msgspec.Struct):
    """A thread in the output of py-spy."""

    frames: list[SpyFrame]
    os_thread_id: int | None = None
    thread_name: str | None = None


_decoder = msgspec.json.Decoder(list[SpyThread])


def find_py_spy() -> str | None:
    """Return the path of py-spy, or None."""
    path = os.environ.get("PATH") or os.defpath  # an empty part would be the working directory
    return shutil.which("py-spy", path=os.pathsep.join([os.path.dirname(sys.executable), path]))


def add_native(stacks: Sequence[RankStack], every: bool, timeout_s: float = NATIVE_S) -> list[RankStack]:
    """Return these stacks of workers of this machine with native frames: of every rank, or of one of each place."""
    deadline, program = Deadline(timeout_s), find_py_spy()
    traced = {one.rank for one in stacks} if every else {group.ranks[0] for group in fold(stacks)}
    return [_traced(one, program, deadline) if one.rank in traced else one for one in stacks]


def _traced(one: RankStack, program: str | None, deadline: Deadline) -> RankStack:
    if program is None:
        text, why = "", NOT_INSTALLED
    elif one.state != "running":
        text, why = "", f"the process is {one.state}"
    else:
        text, why = _dump(program, one.pid, deadline)
    return msgspec.structs.replace(one, native=text, native_note=why)


def _dump(program: str, pid: int, deadline: Deadline) -> tuple[str, str]:
    """Return the frames of all threads of a process, the main thread first; or nothing, and why."""
    command = [program, "dump", "--native", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline.remaining())
    except subprocess.TimeoutExpired:  # py-spy was killed, and the kernel lets the worker go on
        return "", f"py-spy took longer than {deadline.timeout_s:g} s"
    except OSError as error:
        return "", f"cannot run {program}: {error.strerror or error}"[:MAX_NOTE]
    if done.returncode:
        return "", _why(done.stderr.decode(errors="replace"))
    try:
        threads = _decoder.decode(done.stdout)
    except msgspec.DecodeError as error:
        return "", f"malformed output of py-spy: {error}"[:MAX_NOTE]
    main_first = sorted(threads, key=lambda thread: thread.os_thread_id != pid)
    return "\n\n".join(map(_described, main_first))[:MAX_STACK_BYTES], ""


def _why(errors: str) -> str:
    """Return the reason of a failure of py-spy: the innermost cause that it lists, else its first line."""
    if _REFUSAL.search(errors):
        return REFUSED
    causes = re.findall(r"^ +\d+: (.*)$", errors.partition("Stack backtrace")[0], re.M)
    said = causes[-1] if causes else errors.strip().partition("\n")[0].removeprefix("Error: ")
    return printable(f"py-spy failed: {said or 'without a word'}")[:MAX_NOTE]


def _described(thread: SpyThread) -> str:
    name = f" ({thread.thread_name})" if thread.thread_name else ""
    head = f"Thread {thread.os_thread_id or '?'}{name}, most recent call first:"
    return "\n".join([printable(head), *(f"  {printable(frame)}" for frame in thread.frames)])
