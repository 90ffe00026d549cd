"""Runs a function in workers: sends the call, waits for its agent, and returns the results.

The agent is a child process (agent_process.py), not a part of the caller. An agent handles signals in its main thread,
and changes the limits and the cgroup of its process while it starts workers. A caller may be a notebook, a test or a
thread of a server, and keeps all of that to itself. The price is the start of one interpreter. The agent has a session
of its own: Ctrl-C in a terminal reaches only the caller, which passes it on.

Rejected: `multiprocessing`. Its processes have no restarts, no orphan reaper, and no store to meet in.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rallypoint.core.policy.stop_policy import PREEMPTED
from rallypoint.deadline import Deadline
from rallypoint.errors import ServerFailed
from rallypoint.launch.failures import Failure
from rallypoint.launch.functions import agent_process
from rallypoint.launch.functions.call_files import CALL, dump_call, has_result, load_result, name_of
from rallypoint.launch.functions.function_run import FunctionRun
from rallypoint.launch.functions.launch_errors import LaunchFailed, LaunchTimeout, WorkerFailed
from rallypoint.launch.functions.launch_options import LaunchOptions
from rallypoint.launch.functions.main_module import MainScript, forbid_launch
from rallypoint.launch.functions.worker_main import SETUP
from rallypoint.launch.workers.worker_process import describe_exit

__all__ = ["run_function"]

CLOSE_S = 15.0
"""How long an agent may take to end, beyond the grace period of its workers, before it is killed."""

SLICE_S = 1.0
"""The longest single wait."""


def run_function(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: LaunchOptions
) -> list[Any]:
    """Run a function in workers, and return the results by rank; `launch` has the errors that it raises."""
    forbid_launch()
    _check(function, args, kwargs)
    deadline = None if options.timeout_s is None else Deadline(options.timeout_s)
    run = FunctionRun(_files(function, args, kwargs, options))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()  # before the workers write
    try:
        late = _wait(run, deadline, options)
        if late is not None and run.code != 0:
            raise LaunchTimeout(function=name_of(function), timeout_s=options.timeout_s or 0.0, running=late)
        if run.code != 0:
            raise _error(run, name_of(function))
        return [_result(run, rank, name_of(function)) for rank in range(options.workers)]
    finally:
        _close(run)


def _check(function: object, args: object, kwargs: object) -> None:
    if not callable(function):
        raise TypeError(f"function must be callable, not {function!r}")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(f"args must be a sequence of arguments, such as (1, 2), not {args!r}")
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise TypeError(f"kwargs must map names to arguments, not {kwargs!r}")


def _files(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: LaunchOptions
) -> dict[str, bytes]:
    """Return the files of the workers and of the agent."""
    main = MainScript.of_caller()
    call = dump_call(function, args, kwargs, main is not None)
    path = [place for place in sys.path if isinstance(place, str)]
    setup = {
        "path": path,
        "argv": getattr(sys, "argv", []),
        "main": main if call.needs_main else None,
        "modules": call.modules,
    }
    return {CALL: call.data, SETUP: json.dumps(setup).encode(), agent_process.OPTIONS: msgspec.json.encode(options)}


def _wait(run: FunctionRun, deadline: Deadline | None, options: LaunchOptions) -> list[int] | None:
    """Wait until a run has ended; stop it at the deadline, and return the ranks that had no result by then.

    If this thread is interrupted, the run is stopped, and ends before the exception goes on: at once if that happens
    again, as with a second Ctrl-C.
    """
    late: list[int] | None = None
    interrupted: BaseException | None = None
    while True:
        try:
            if interrupted is None:
                run.start()
                if _has_ended(run, deadline):
                    return None
                late = [rank for rank in range(options.workers) if not has_result(run.directory, rank)]
            run.stop(signal.SIGINT if isinstance(interrupted, KeyboardInterrupt) else signal.SIGTERM)
            if not run.ended.wait(options.grace_s + CLOSE_S):
                run.stop(signal.SIGKILL)
                run.ended.wait(CLOSE_S)
            break
        except BaseException as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
    return late


def _has_ended(run: FunctionRun, deadline: Deadline | None) -> bool:
    """Wait until the run has ended, or until the deadline; return whether it has.

    In slices: a signal that arrives right before the main thread sleeps does not wake it.
    """
    while not run.ended.wait(SLICE_S if deadline is None else min(deadline.remaining(), SLICE_S)):
        if deadline is not None and deadline.expired():
            return False
    return True


def _close(run: FunctionRun) -> None:
    """Release what a run still has, however often this thread is interrupted."""
    interrupted: BaseException | None = None
    while True:
        try:
            run.close()
            break
        except BaseException as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


def _result(run: FunctionRun, rank: int, name: str) -> Any:
    """Return the result of a worker that has succeeded."""
    try:
        assert run.directory is not None
        return load_result(run.directory, rank)
    except FileNotFoundError:
        why = "it ended without a result, as os._exit(0) does"
        raise WorkerFailed(function=name, rank=rank, pid=0, code=0, how=describe_exit(0), message=why) from None
    except Exception as error:
        why = f"the result of rank {rank} cannot be unpickled: {type(error).__name__}: {error}"
        raise LaunchFailed(function=name, why=why) from error


def _error(run: FunctionRun, name: str) -> WorkerFailed | LaunchFailed:
    """Return why a run failed: the first failure of a worker, else the last error of the agent."""
    if run.error is not None:
        why = run.error.why if isinstance(run.error, ServerFailed) else str(run.error)
        return LaunchFailed(function=name, why=why)
    for event in reversed(run.events):
        if "failure" in event:
            first = msgspec.convert(event["failure"], Failure)
            if first.rank >= 0:
                return _worker_failed(name, first)
        if event["event"] in ("error", "end", "signal", "failure", PREEMPTED):
            return LaunchFailed(function=name, why=event["reason"])
    return LaunchFailed(function=name, why=f"the launcher ended unexpectedly: {describe_exit(run.killed or 0)}")


def _worker_failed(function: str, first: Failure) -> WorkerFailed:
    return WorkerFailed(
        function=function,
        rank=first.rank,
        pid=first.pid,
        code=first.code,
        how=first.how,
        message=first.message,
        traceback=first.traceback,
        stderr=first.stderr,
    )
