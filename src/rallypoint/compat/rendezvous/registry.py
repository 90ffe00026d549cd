"""Rendezvous handlers by name, as in `torch.distributed.elastic.rendezvous.registry`.

`HANDLERS` are built in. Installed packages add theirs by entry points of the group `torchrun.handlers`, as for PyTorch:
each is a function without arguments that returns the creator. PyTorch imports all of them at once. Here each is
imported when it is first requested by name, because it may import torch.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from rallypoint.compat.rendezvous.api import (
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from rallypoint.compat.rendezvous.backend import create_backend
from rallypoint.compat.rendezvous.handler import create_handler
from rallypoint.compat.rendezvous.static import create_rdzv_handler

__all__ = ["get_rendezvous_handler", "HANDLERS"]

ENTRY_POINTS = "torchrun.handlers"


def _create_c10d_handler(params: RendezvousParameters) -> RendezvousHandler:
    backend, store = create_backend(params)
    return create_handler(store, backend, params)


HANDLERS: dict[str, RendezvousHandlerCreator] = {"c10d": _create_c10d_handler, "static": create_rdzv_handler}
"""The built-in handlers."""


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler that the parameters name: a registered one, or an installed package's."""
    _register_out_of_tree_handlers()
    return rendezvous_handler_registry.create_handler(params)


def _register_default_handlers() -> None:
    for name, creator in HANDLERS.items():
        rendezvous_handler_registry.register(name, creator)


def _register_out_of_tree_handlers() -> None:
    """Register the handlers of installed packages without importing them; keep names already registered."""
    for entry in entry_points(group=ENTRY_POINTS):
        rendezvous_handler_registry._registry.setdefault(entry.name, _loading(entry))


def _loading(entry: EntryPoint) -> RendezvousHandlerCreator:
    def create(params: RendezvousParameters) -> RendezvousHandler:
        creator: RendezvousHandlerCreator = entry.load()()
        return creator(params)

    return create


_register_default_handlers()
