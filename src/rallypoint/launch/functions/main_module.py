"""The script that called `rallypoint.launch`, in the caller and in its workers.

A function or a class of the script is known as `__main__.NAME`. Workers find it by running the script once more, under
the name `__mp_main__` that `multiprocessing` uses for this: code under `if __name__ == "__main__"` is not run again.
The script is run only if something that is sent refers to it.

In a notebook, at a prompt and with `python -c` there is no script to run: functions are sent by value (call_files.py).
Rejected: `fork`, which would need none of this. Threads, CUDA and the caller's connections do not survive it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["RUN_NAME", "MainScript", "forbid_launch", "importing"]

RUN_NAME = "__mp_main__"
"""`__name__` of the script in a worker."""

_importing = 0
"""Greater than 0 if this process is a worker that is still importing what its function needs."""


class MainScript(NamedTuple):
    """The file of a `__main__` module, and the package of which it is a module; empty if it is none."""

    path: str
    package: str

    @classmethod
    def of_caller(cls) -> MainScript | None:
        """Return the script of this process; None at a prompt, in a notebook, and with `python -c`."""
        main = sys.modules["__main__"]
        path = getattr(main, "__file__", None)
        if hasattr(sys, "ps1") or not path or not os.path.isfile(path):
            return None
        return cls(os.path.abspath(path), getattr(main, "__package__", None) or "")

    def run(self) -> None:
        """Run the script as `__mp_main__`, and make it `__main__` for what was sent."""
        module = types.ModuleType(RUN_NAME)
        module.__file__ = self.path
        module.__package__ = self.package
        sys.modules["__main__"] = sys.modules[RUN_NAME] = module
        with open(self.path, "rb") as file:
            code = compile(file.read(), self.path, "exec")
        exec(code, module.__dict__)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Forbid `launch` in this block, in which a worker imports what its function needs."""
    global _importing
    _importing += 1
    try:
        yield
    finally:
        _importing -= 1


def forbid_launch() -> None:
    """Raise RuntimeError in a worker that is still importing: its workers would do the same, and so on."""
    if _importing:
        raise RuntimeError(
            "rallypoint.launch was called while a worker imported the script or module of its function: put the call "
            'under `if __name__ == "__main__":`, or into a function'
        )
