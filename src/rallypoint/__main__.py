"""`python -m rallypoint`, and `rallypoint`: the command line.

During the import of this module and of the package (`rallypoint/__init__.py` does the same first), Ctrl-C ends the
process without a traceback, as it does a C program. While a command runs, Ctrl-C raises KeyboardInterrupt
(`rallypoint.cli`). The interpreter's own startup, some milliseconds, cannot be covered.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise ignored: a background job
    signal.signal(signal.SIGINT, signal.SIG_DFL)

try:
    from rallypoint.cli import main
except ModuleNotFoundError as error:
    raise SystemExit(f"rallypoint: the command line needs {error.name}: pip install 'rallypoint[cli]'") from None

__all__ = ["main"]

if __name__ == "__main__":
    main(prog_name="rallypoint")
