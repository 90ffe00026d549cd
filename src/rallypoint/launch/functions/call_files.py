"""The files by which a caller gives its workers a function with its arguments, and by which they return the results.

This is the only module that pickles. The files are in a directory that only this user can enter, between a process and
its own children. Nothing here reads from a network.

What a worker can import is sent by name. A function that it cannot import is sent by value, with the variables that it
has captured: a lambda, a function inside of another one, one that a decorator has replaced. In a notebook, at a prompt
and with `python -c`, that is every function of `__main__`; it is sent with the global variables that it uses, functions
among them, and modules by name. A class of such a `__main__` cannot be sent: TypeError names it.

Rejected: cloudpickle, which also sends classes by value. It would be a dependency for notebooks alone.
"""

from __future__ import annotations

import builtins
import dis
import importlib
import io
import marshal
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rallypoint.launch.functions.caller_modules import file_of
from rallypoint.launch.functions.main_module import RUN_NAME

__all__ = ["CALL", "PickledCall", "dump_call", "has_result", "load_call", "load_result", "name_of", "save_result"]

CALL = "call"
"""The file with the call."""

PROTOCOL = 5
GLOBAL_OPS = frozenset(["LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"])
UNSENDABLE = (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError, NotImplementedError)
"""What `pickle`, and objects that refuse to be pickled, raise."""


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    inner = getattr(function, "func", function)  # of a partial
    name = getattr(inner, "__qualname__", "") or type(inner).__qualname__
    module = getattr(inner, "__module__", "") or ""
    return name if module in ("", "__main__", RUN_NAME) else f"{module}.{name}"


class PickledCall(NamedTuple):
    """A call, pickled: whether it refers to the script of the caller, and the files of other modules in it, by name."""

    data: bytes
    needs_main: bool
    modules: Mapping[str, str]


def dump_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], has_main: bool
) -> PickledCall:
    """Return a call for the workers, which can run the script of the caller if `has_main`.

    Raises TypeError that names the function, and the argument or variable that cannot be sent.
    """
    data = io.BytesIO()
    pickler = _CallPickler(data, has_main)
    try:
        pickler.dump((function, tuple(args), dict(kwargs)))
    except UNSENDABLE as error:
        parts = {
            **{f"its argument {at}": value for at, value in enumerate(args)},
            **{f"its argument {name!r}": value for name, value in kwargs.items()},
            **{f"the variable {name!r} that it uses": value for name, value in _captured(function).items()},
        }
        what = next((what for what, value in parts.items() if not _can_be_sent(value, has_main)), "it")
        raise TypeError(f"cannot send {name_of(function)} to the workers: {what} cannot be pickled: {error}") from error
    return PickledCall(data.getvalue(), pickler.needs_main, pickler.modules)


def load_call(directory: Path) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Read the call in a worker; whatever the import of a module raises is raised here."""
    with (directory / CALL).open("rb") as file:
        function, args, kwargs = pickle.load(file)
    return function, args, kwargs


def save_result(directory: Path, rank: int, result: object, function: Callable[..., Any]) -> None:
    """Write the result of a worker, atomically; raise TypeError if it cannot be pickled, and OSError."""
    draft = directory / f"draft-{rank}"
    try:
        with draft.open("wb") as file:
            pickle.dump(result, file, PROTOCOL)
    except UNSENDABLE as error:
        raise TypeError(
            f"the result of {name_of(function)} on rank {rank}, of type {type(result).__qualname__}, cannot be "
            f"pickled for the caller: {error}"
        ) from error
    os.replace(draft, _result(directory, rank))


def has_result(directory: Path | None, rank: int) -> bool:
    """Return whether the function has returned in a worker; None is a directory that does not exist yet."""
    return directory is not None and _result(directory, rank).exists()


def load_result(directory: Path, rank: int) -> Any:
    """Read the result of a worker; whatever unpickling raises is raised here."""
    with _result(directory, rank).open("rb") as file:
        return _ResultUnpickler(file).load()


def _result(directory: Path, rank: int) -> Path:
    return directory / f"result-{rank}"


class _ResultUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Find a class of the script under the caller's name of it."""
        return super().find_class("__main__" if module == RUN_NAME else module, name)


class _CallPickler(pickle.Pickler):
    """Sends functions by name if workers can import them, else by value; `has_main`: they can import `__main__`."""

    def __init__(self, file: io.BytesIO, has_main: bool) -> None:
        super().__init__(file, PROTOCOL)
        self._has_main = has_main
        self.needs_main = False
        self.modules: dict[str, str] = {}

    def reducer_override(self, thing: Any) -> Any:
        """Say how to send functions, classes of the script, and modules; leave all else to `pickle`."""
        if isinstance(thing, types.FunctionType):
            return self._send_function(thing)
        if isinstance(thing, types.ModuleType):
            return importlib.import_module, (thing.__name__,)
        if isinstance(thing, type):
            if thing.__module__ == "__main__" and not self._has_main:
                raise TypeError(
                    f"class {thing.__qualname__} is defined in a notebook or at a prompt, where workers cannot import "
                    f"it; put it into a module"
                )
            self._note(sys.modules.get(thing.__module__))
        return NotImplemented

    def _note(self, module: types.ModuleType | None) -> None:
        """Note that workers have to import a module."""
        if module is not None and module.__name__ == "__main__":
            self.needs_main = True
        elif module is not None and (file := file_of(module)):
            self.modules[module.__name__] = file

    def _send_function(self, function: types.FunctionType) -> Any:
        module, home = sys.modules.get(function.__module__ or ""), ""
        if module is not None and self._can_be_imported(module):
            if _find(module, function.__qualname__) is function:
                self._note(module)
                return NotImplemented
            if function.__globals__ is vars(module):
                self._note(module)
                home = module.__name__
        names = () if home else tuple(_global_names(function.__code__))
        state = {
            "__defaults__": function.__defaults__,
            "__kwdefaults__": function.__kwdefaults__,
            "__dict__": dict(vars(function)),
            "cells": [_contents(cell) for cell in function.__closure__ or ()],
            "globals": {name: function.__globals__[name] for name in names if name in function.__globals__},
        }
        made = (marshal.dumps(function.__code__), function.__qualname__, home, id(function.__globals__))
        return _make_function, made, state, None, None, _complete_function

    def _can_be_imported(self, module: types.ModuleType) -> bool:
        return self._has_main if module.__name__ == "__main__" else getattr(module, "__spec__", None) is not None


def _find(module: types.ModuleType, qualname: str) -> Any:
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the global variables that a function uses, and the functions inside of it."""
    yield from (str(one.argval) for one in dis.get_instructions(code) if one.opname in GLOBAL_OPS)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _contents(cell: types.CellType) -> list[Any]:
    """Return the contents of a cell as a list: empty for a variable that is not set yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


_namespaces: dict[int, dict[str, Any]] = {}
"""In a worker: the global variables of functions without a module, shared by those that shared them in the caller."""


def _make_function(code: bytes, qualname: str, home: str, namespace: int) -> types.FunctionType:
    """Make a function without its variables, in a worker; these may refer to the function."""
    found: types.CodeType = marshal.loads(code)
    fresh = {"__name__": "__main__", "__builtins__": builtins}
    variables = vars(importlib.import_module(home)) if home else _namespaces.setdefault(namespace, fresh)
    cells = tuple(types.CellType() for _ in found.co_freevars)
    function = types.FunctionType(found, variables, found.co_name, None, cells)
    function.__qualname__ = qualname
    return function


def _complete_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    """Set the variables of a function."""
    function.__defaults__ = state["__defaults__"]
    function.__kwdefaults__ = state["__kwdefaults__"]
    vars(function).update(state["__dict__"])
    for cell, contents in zip(function.__closure__ or (), state["cells"], strict=True):
        if contents:
            cell.cell_contents = contents[0]
    function.__globals__.update(state["globals"])


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables that a function by value takes along."""
    if not isinstance(function, types.FunctionType):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {name: contents[0] for name, cell in cells if (contents := _contents(cell))}
    names = _global_names(function.__code__)
    return {**found, **{name: function.__globals__[name] for name in names if name in function.__globals__}}


def _can_be_sent(value: object, has_main: bool) -> bool:
    try:
        _CallPickler(io.BytesIO(), has_main).dump(value)
    except UNSENDABLE:
        return False
    return True
