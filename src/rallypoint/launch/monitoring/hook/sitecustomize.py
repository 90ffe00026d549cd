"""Registers a Python worker of `rallypoint run` for stack dumps; Python imports this at start-up (PYTHONPATH).

Two signals ask for stacks. At the first, a handler in Python writes those of all threads, between two instructions of
the main thread. At the second, `faulthandler` writes that of the main thread from a C signal handler, so it answers
even while C code holds the interpreter lock. The hook tells the agent its process and descriptor in the worker's record
(worker_records.py), then removes itself from the path and the environment, and imports the sitecustomize module of the
user, if there is one: children do not inherit the hook. It imports nothing of the package, runs on any Python, which
need not be that of the agent (without effect on 2), and whatever fails leaves the worker as it is.

Rejected: faulthandler alone. It reads frames that change while Python code runs, of its own thread and of others, and
may crash the worker: a busy one once in a few hundred dumps.
Rejected: to start scripts through a module of ours (`__main__` would be ours), and a .pth file (all programs of the
environment would pay for it).
"""

import sys

__all__ = ()

HIGH_FD = 1000
"""The descriptor of the stack file, if it is free: scripts may count on the low numbers."""

RECORD_BYTES = 128
"""The size of a record, as in progress_record.py."""

MAX_THREADS, MAX_DEPTH = 50, 100
"""The most threads of one answer, and the most frames of each."""


def _register():  # type: () -> None
    import faulthandler
    import os

    folder, local = os.path.split(os.environ["RALLYPOINT_MONITOR"])
    records = os.open(os.path.join(folder, "records"), os.O_RDWR)
    try:
        start = RECORD_BYTES * int(local)
        numbers = memoryview(os.pread(records, RECORD_BYTES, start)).cast("q")
        if numbers[2] and _is_alive(numbers[2]):
            return  # a parent of this process has registered
        stacks = os.open(os.path.join(folder, "stacks." + local), os.O_WRONLY | os.O_APPEND)
        stacks = _moved(stacks)
        faulthandler.register(numbers[4], file=stacks, all_threads=False, chain=False)
        _answer_in_python(numbers[4] - 1, stacks)
        for number, at in ((stacks, 24), (os.getpid(), 16)):
            os.pwrite(records, number.to_bytes(8, sys.byteorder), start + at)
    finally:
        os.close(records)


def _answer_in_python(number, stacks):  # type: (int, int) -> None
    """At a signal, write the stacks of all threads as faulthandler does, the main thread last, and an empty line."""
    import os

    write, current_frames, main = os.write, sys._current_frames, __import__("_thread").get_ident()
    own = _answer_in_python.__code__.co_filename

    def answer(*_):  # type: (object) -> None
        try:
            lines = []
            for thread, top in sorted(current_frames().items(), key=lambda item: item[0] == main)[-MAX_THREADS:]:
                lines.append("Thread " + hex(thread) + " (most recent call first):")
                frame, depth = top if thread != main else top.f_back, 0  # that of the main thread is this one
                while thread == main and frame is not None and frame.f_code.co_filename == own:
                    frame = frame.f_back  # this function, if it has interrupted itself
                while frame is not None and depth < MAX_DEPTH:
                    code = frame.f_code
                    line = str(frame.f_lineno or 0)
                    lines.append('  File "' + code.co_filename + '", line ' + line + " in " + code.co_name)
                    frame, depth = frame.f_back, depth + 1
            write(stacks, ("\n".join(lines) + "\n\n").encode("utf-8", "backslashreplace"))
        except Exception:
            pass  # whatever it interrupted goes on

    __import__("_signal").signal(number, answer)  # the module `signal` takes longer to import


def _is_alive(pid):  # type: (int) -> bool
    import os

    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return pid != os.getpid()


def _moved(descriptor):  # type: (int) -> int
    """Move a descriptor out of the way, if there is room."""
    import os

    try:
        os.fstat(HIGH_FD)
    except OSError:
        try:
            os.dup2(descriptor, HIGH_FD, inheritable=False)
        except OSError:
            return descriptor
        os.close(descriptor)
        return HIGH_FD
    return descriptor


def _withdraw():  # type: () -> None
    """Remove this directory from the search path, and from the environment of children."""
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != here]
    first, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == here:
        if rest:
            os.environ["PYTHONPATH"] = rest
        else:
            del os.environ["PYTHONPATH"]


def _import_the_users():  # type: () -> None
    own = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


try:
    _register()
except Exception:
    pass  # no stacks of this worker, and no other effect
try:
    _withdraw()
except Exception:
    pass
_import_the_users()
