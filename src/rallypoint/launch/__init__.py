"""`rallypoint run`: an agent on each node joins the rounds of a job and runs its workers; and `rallypoint.launch`.

`rallypoint.launch` is this package, and the package can be called: `rallypoint.launch(train, nproc=4)`. Python sets the
attribute `launch` of `rallypoint` to the package as soon as any module of it is imported, so a function of that name
would be gone after the first `rallypoint.worker()`.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rallypoint.deadline import Timeout

__all__ = ["launch"]

Result = TypeVar("Result")


def launch(
    function: Callable[..., Result],
    nproc: int | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: Timeout | None = None,
    max_restarts: int = 0,
    restart: str = "group",
    env: Mapping[str, str] | None = None,
    grace: Timeout = 30.0,
    log_dir: str | os.PathLike[str] | None = None,
) -> list[Result]:
    """Run `function(*args, **kwargs)` in `nproc` worker processes on this machine; return the results, by rank.

    The workers are those of `rallypoint run` on one node: `rallypoint.worker()` and PyTorch's `env://` work in them.
    `nproc` may also be "auto", "cpu" or "gpu". `max_restarts` and `restart` ("group", "node" or "worker") are as in
    `rallypoint run`; `env` has further variables for the workers; `grace` is the time between SIGTERM and SIGKILL for
    workers that have to end. The output of the workers goes to this process's, or to files in `log_dir`.

    Raises WorkerFailed with the first failure, after all other workers have ended; LaunchTimeout when `timeout` has
    passed; LaunchFailed if the launcher itself fails; TypeError if the function, an argument or a keyword cannot be
    sent to the workers. However it ends, Ctrl-C included, no worker is left. It may be called from any thread.
    docs/launch.md has the details.
    """
    from rallypoint.launch.functions.launch_options import LaunchOptions
    from rallypoint.launch.functions.launching import run_function

    options = LaunchOptions.of(nproc, timeout, max_restarts, restart, env, grace, log_dir)
    return run_function(function, args, {} if kwargs is None else kwargs, options)


class _CallablePackage(types.ModuleType):
    """The class of this package."""

    __call__ = staticmethod(launch)


sys.modules[__name__].__class__ = _CallablePackage
