"""The interface between a launcher and a rendezvous, as in `torch.distributed.elastic.rendezvous.api`.

A launcher gets the handler of a backend from the registry, by name, with `RendezvousParameters`. The handler's
`next_rendezvous` blocks until the nodes of a round have joined, and returns `RendezvousInfo`. Stores are duck-typed,
ours or torch's, so their type is `Any` here.
"""

from __future__ import annotations

import abc
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from rallypoint.compat.distributed import get_free_port
from rallypoint.compat.rendezvous.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rallypoint.compat.rendezvous.settings import check_nodes

__all__ = [
    "RendezvousParameters",
    "RendezvousHandler",
    "RendezvousInfo",
    "RendezvousStoreInfo",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "rendezvous_handler_registry",
    "RendezvousError",
    "RendezvousClosedError",
    "RendezvousTimeoutError",
    "RendezvousConnectionError",
    "RendezvousStateError",
    "RendezvousGracefulExitError",
]

_WORDS = {
    True: frozenset(("1", "true", "t", "yes", "y")),
    False: frozenset(("0", "false", "f", "no", "n")),
}


class RendezvousParameters:
    """The parameters of a rendezvous: backend and endpoint, run id, number of nodes, and further options."""

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ValueError("the name of the rendezvous backend must not be empty")
        check_nodes(min_nodes, max_nodes)
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs
        self.local_addr = local_addr

    def get(self, key: str, default: Any = None) -> Any:
        """Return an option unchanged."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return a boolean option: a bool, 1 or 0, or true, t, yes, y, false, f, no, n in any case."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        for truth, words in _WORDS.items():
            if str(value).lower() in words:
                return truth
        raise ValueError(f"the rendezvous option {key!r} must be a boolean (true or false), not {value!r}")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return an integer option, converted from a string if necessary."""
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError as error:
            raise ValueError(f"the rendezvous option {key!r} must be an integer, not {value!r}") from error

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"RendezvousParameters({facts})"


@dataclass
class RendezvousStoreInfo:
    """The address of the store with which the workers of a round start."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"
    master_addr: str
    master_port: int

    @staticmethod
    def build(rank: int, store: Any, local_addr: str | None, server_port: int | None = None) -> RendezvousStoreInfo:
        """As rank 0, publish this host's address and a port; as another rank, wait for them. Return them."""
        address, port = RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY
        if rank == 0:
            store.set(address, (local_addr or socket.getfqdn()).encode())
            store.set(port, str(server_port or get_free_port()).encode())
        return RendezvousStoreInfo(store.get(address).decode(), int(store.get(port).decode()))


class RendezvousInfo:
    """One node's view of a round: its rank, the number of nodes, the round's store, and the workers' store."""

    def __init__(self, store: Any, rank: int, world_size: int, bootstrap_store_info: RendezvousStoreInfo) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._bootstrap_store_info = bootstrap_store_info

    @property
    def store(self) -> Any:
        """The store that the nodes of the round share."""
        return self._store

    @property
    def rank(self) -> int:
        """The rank of this node in the round."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of nodes in the round."""
        return self._world_size

    @property
    def bootstrap_store_info(self) -> RendezvousStoreInfo | None:
        """The address of the store with which the workers start."""
        return self._bootstrap_store_info

    def __repr__(self) -> str:
        return f"<RendezvousInfo rank {self.rank} of {self.world_size}, {self.bootstrap_store_info}>"


class RendezvousHandler(abc.ABC):
    """A rendezvous as a launcher uses it."""

    @abc.abstractmethod
    def get_backend(self) -> str:
        """Return the name under which this kind of rendezvous is registered."""

    @property
    def use_agent_store(self) -> bool:
        """Whether workers can use the launchers' store instead of starting their own."""
        return False

    @abc.abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next round, once its nodes have joined.

        Raises RendezvousClosedError, RendezvousConnectionError, RendezvousStateError or RendezvousTimeoutError.
        """

    @abc.abstractmethod
    def is_closed(self) -> bool:
        """Return whether the rendezvous is closed: no further round will form."""

    @abc.abstractmethod
    def set_closed(self) -> None:
        """Close the rendezvous for all nodes."""

    @abc.abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many nodes arrived too late for the current round and wait for the next."""

    @abc.abstractmethod
    def get_run_id(self) -> str:
        """Return the id of the run."""

    @abc.abstractmethod
    def shutdown(self) -> bool:
        """Release the resources of the rendezvous; return whether that succeeded."""


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]
"""A function that creates a handler from parameters."""


class RendezvousHandlerRegistry:
    """Maps backend names to handler creators."""

    def __init__(self) -> None:
        self._registry: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Register a creator under a name. Raises ValueError if another creator has the name."""
        if not backend:
            raise ValueError("the name of the rendezvous backend must not be empty")
        present = self._registry.setdefault(backend, creator)
        if present != creator:
            raise ValueError(
                f"the rendezvous backend {backend!r} cannot be registered with {creator!r}: "
                f"it is already registered with {present!r}"
            )

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Create the handler that the parameters name. Raises ValueError if the name is not registered."""
        try:
            creator = self._registry[params.backend]
        except KeyError as error:
            known = ", ".join(sorted(self._registry)) or "none"
            raise ValueError(
                f"the rendezvous backend {params.backend!r} is not registered (registered: {known}). "
                f"Was `register` called?"
            ) from error
        handler = creator(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"the handler created by {creator!r} has the rendezvous backend {handler.get_backend()!r}, which does "
                f"not match the requested {params.backend!r}"
            )
        return handler


rendezvous_handler_registry = RendezvousHandlerRegistry()
"""The registry of this process."""
