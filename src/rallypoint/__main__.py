"""`python -m rallypoint`, and `rallypoint`: the command line.

While it is imported, the package included (`rallypoint/__init__.py` begins with it), a Ctrl-C ends the process as it
does a program in C, without a traceback; from when a command begins until it has ended, it is a KeyboardInterrupt
(`rallypoint.cli`). What Python itself does before that, for some milliseconds, is out of our hands.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in the background
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from rallypoint.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main(prog_name="rallypoint")
