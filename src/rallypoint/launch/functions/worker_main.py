"""A worker of `rallypoint.launch`: reads the call, makes it, and writes the result, or records the error.

The agent starts it with `BOOT`, which sets the module path of the caller first: this package may be on it only there.
An error is printed, as Python would, and recorded in the error file of the worker (failures.py reads it), in both
without the frames of this module.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from rallypoint.launch.functions.call_files import load_call, save_result
from rallypoint.launch.functions.caller_modules import CallerModules
from rallypoint.launch.functions.main_module import MainScript, importing

__all__ = ["BOOT", "SETUP", "main"]

SETUP = "setup.json"
"""The file with the caller's `path`, `argv`, `modules` (caller_modules.py), and script (`main`), if that is needed."""

BOOT = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
with open(sys.argv[1]) as file:
    sys.path[:] = json.load(file)["path"]
from rallypoint.launch.functions.worker_main import main
main()
"""
"""The program of a worker; its argument is the path of SETUP. Until `main`, Ctrl-C ends it without a traceback."""

INTERRUPTED = 130


def main() -> None:
    """Run the function in this worker; the exit code is Python's."""
    directory = Path(sys.argv[1]).parent
    setup = json.loads((directory / SETUP).read_text())
    sys.argv[:] = setup["argv"]
    CallerModules(setup["modules"]).install()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _run(directory, setup["main"])
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)  # the caller was interrupted
    except Exception as error:
        text = "".join(traceback.format_exception(type(error), error, _without_us(error.__traceback__)))
        _record("".join(traceback.format_exception_only(type(error), error)).strip(), text)
        sys.stderr.write(text)
        sys.exit(1)


def _run(directory: Path, main_script: list[str] | None) -> None:
    with importing():
        if main_script is not None:
            MainScript(*main_script).run()
        function, args, kwargs = load_call(directory)
    rank = int(os.environ["RANK"])
    try:
        result = function(*args, **kwargs)
    except SystemExit as end:
        if end.code is None or end.code == 0:
            save_result(directory, rank, None, function)
        raise
    save_result(directory, rank, result, function)


def _without_us(frames: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback below the frames of this module; all of it if there is no other part."""
    below = frames
    while below is not None and below.tb_frame.f_code.co_filename == __file__:
        below = below.tb_next
    return below or frames


def _record(message: str, text: str) -> None:
    """Write the error file of this worker, in PyTorch's format."""
    more = {"py_callstack": text, "timestamp": str(int(time.time()))}
    facts: dict[str, Any] = {"message": {"message": message, "extraInfo": more}}
    with contextlib.suppress(OSError, KeyError):
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(facts))
