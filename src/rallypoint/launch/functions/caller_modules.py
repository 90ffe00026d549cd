"""Modules of the caller that workers cannot find on its module path: imported from their files instead.

A caller may have a module under a name that no path leads to: pytest gives test modules such names in its mode
`importlib`. Workers try the path first.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec

__all__ = ["CallerModules", "file_of"]


def file_of(module: types.ModuleType) -> str:
    """Return the absolute path of a module's source; empty if it has none."""
    path = getattr(module, "__file__", None)
    return os.path.abspath(path) if isinstance(path, str) and path.endswith(".py") else ""


class CallerModules(importlib.abc.MetaPathFinder):
    """Finds modules by a table of names and files; a name above them is a package without contents of its own."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def install(self) -> None:
        """Ask this finder last."""
        sys.meta_path.append(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import a module, or None if it is not in the table."""
        if fullname in self._files:
            return importlib.util.spec_from_file_location(fullname, self._files[fullname])
        if any(name.startswith(f"{fullname}.") for name in self._files):
            return ModuleSpec(fullname, None, is_package=True)
        return None
