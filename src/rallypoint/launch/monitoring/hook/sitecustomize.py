"""Registers a Python worker of `rallypoint run` for stack dumps; Python imports this at start-up (PYTHONPATH).

`faulthandler` writes the stack of the main thread from a C signal handler, so it answers even while C code holds the
interpreter lock. The hook tells the agent its process and descriptor in the worker's record (worker_records.py), then
removes itself from the path and the environment, and imports the sitecustomize module of the user, if there is one:
children do not inherit the hook. It imports nothing of the package, runs on any Python, which need not be that of the
agent (without effect on 2), and whatever fails leaves the worker as it is.

Rejected: the stacks of all threads. The others run on meanwhile, and to read frames that change may crash the worker:
with two busy threads, once in a few hundred dumps.
Rejected: to start scripts through a module of ours (`__main__` would be ours), and a .pth file (all programs of the
environment would pay for it).
"""

import sys

__all__ = ()

HIGH_FD = 1000
"""The descriptor of the stack file, if it is free: scripts may count on the low numbers."""


def _register():  # type: () -> None
    import faulthandler
    import os

    folder, local = os.path.split(os.environ["RALLYPOINT_MONITOR"])
    records = os.open(os.path.join(folder, "records"), os.O_RDWR)
    try:
        start = 64 * int(local)
        numbers = memoryview(os.pread(records, 64, start)).cast("q")
        if numbers[2] and _is_alive(numbers[2]):
            return  # a parent of this process has registered
        stacks = os.open(os.path.join(folder, "stacks." + local), os.O_WRONLY | os.O_APPEND)
        stacks = _moved(stacks)
        faulthandler.register(numbers[4], file=stacks, all_threads=False, chain=False)
        for number, at in ((stacks, 24), (os.getpid(), 16)):
            os.pwrite(records, number.to_bytes(8, sys.byteorder), start + at)
    finally:
        os.close(records)


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
