"""Pages of the API, one for each group of names in `rallypoint.__all__` and one for each other public module.

mkdocstrings fills them in from the docstrings; it reads the sources and imports nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from repository import ROOT

PACKAGE = ROOT / "src" / "rallypoint"
TITLES = {
    "stores": "Stores",
    "recipes": "Coordination",
    "the launcher": "Launching a function",
    "inside a launched script": "Inside a worker",
    "the server": "Servers, relays, credentials",
    "errors": "Errors",
}
"""The groups of `rallypoint.__all__`, by the comments that head them."""

MODULES = {
    "rallypoint.aio": "asyncio",
    "rallypoint.torch": "PyTorch adapter",
    "rallypoint.compat.store": "compat.store",
    "rallypoint.compat.distributed": "compat.distributed",
    "rallypoint.compat.rendezvous": "compat.rendezvous",
    "rallypoint.testing": "Testing",
}
"""Public modules with pages of their own, where they exist."""


def groups() -> dict[str, list[str]]:
    """Return the names in `rallypoint.__all__`, by group."""
    text = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    listed = text.partition("__all__ = [")[2].partition("]")[0]
    found: dict[str, list[str]] = {}
    for line in listed.splitlines():
        if heading := re.match(r"\s*# (.+)", line):
            names = found[heading[1]] = []
        elif name := re.match(r'\s*"(\w+)"', line):
            names.append(name[1])
    return found


def group_page(group: str) -> str:
    """Return the page of one group."""
    blocks = [f"::: rallypoint.{name}\n" for name in groups()[group]]
    return "\n".join([f"# {TITLES[group]}\n", *blocks])


def module_page(module: str) -> str:
    """Return the page of one module."""
    return f"# {MODULES[module]}\n\n::: {module}\n"


def exists(module: str) -> bool:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def uri(title: str) -> str:
    return f"reference/api/{re.sub(r'[^a-z]+', '-', title.lower())}.md"


PAGES: dict[str, Callable[[], str]] = {
    **{uri(title): functools.partial(group_page, group) for group, title in TITLES.items()},
    **{uri(title): functools.partial(module_page, name) for name, title in MODULES.items() if exists(name)},
}
"""Each page, by its path on the site, and the function that makes it."""
