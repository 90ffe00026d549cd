"""What a launcher and a rendezvous say to each other, as in `torch.distributed.elastic.rendezvous.api`.

A launcher asks the registry for the handler of a backend by name, with `RendezvousParameters`; `next_rendezvous` of
the handler blocks until the nodes have met, and returns `RendezvousInfo`. Stores are whatever has the methods, ours
or torch's, so they are not named by type here.
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
    """What a rendezvous is made from: a backend and its endpoint, the run, how many nodes, and further options."""

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
        if min_nodes < 1:
            raise ValueError(f"the minimum number of nodes must be greater than zero: min_nodes is {min_nodes}")
        if max_nodes < min_nodes:
            raise ValueError(
                f"the maximum, max_nodes ({max_nodes}), must not be less than the minimum, min_nodes ({min_nodes})"
            )
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs
        self.local_addr = local_addr

    def get(self, key: str, default: Any = None) -> Any:
        """Return an option as it was given."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return an option that is a truth, 1 or 0, or a word: true, t, yes, y, false, f, no, n."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        for truth, words in _WORDS.items():
            if str(value).lower() in words:
                return truth
        raise ValueError(f"the rendezvous option {key!r} must be a boolean (true or false), not {value!r}")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return an option that is a whole number, or text of one."""
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
    """Where the workers of a round find the store that they start with."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"
    master_addr: str
    master_port: int

    @staticmethod
    def build(rank: int, store: Any, local_addr: str | None, server_port: int | None = None) -> RendezvousStoreInfo:
        """Publish this host's address and a port as rank 0; as another rank, wait for what rank 0 published."""
        address, port = RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY
        if rank == 0:
            store.set(address, (local_addr or socket.getfqdn()).encode())
            store.set(port, str(server_port or get_free_port()).encode())
        return RendezvousStoreInfo(store.get(address).decode(), int(store.get(port).decode()))


class RendezvousInfo:
    """One round, for one node: its rank among how many, a store of the round, and where workers start."""

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
        """How many nodes the round has."""
        return self._world_size

    @property
    def bootstrap_store_info(self) -> RendezvousStoreInfo | None:
        """Where the workers find the store that they start with."""
        return self._bootstrap_store_info

    def __repr__(self) -> str:
        return f"<RendezvousInfo rank {self.rank} of {self.world_size}, {self.bootstrap_store_info}>"


class RendezvousHandler(abc.ABC):
    """A rendezvous as a launcher uses it."""

    @abc.abstractmethod
    def get_backend(self) -> str:
        """Return the name that this kind of rendezvous is registered by."""

    @property
    def use_agent_store(self) -> bool:
        """Whether workers may use the store that the launchers met on, and start none of their own."""
        return False

    @abc.abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Return when the nodes of the next round have met.

        Raises RendezvousClosedError, RendezvousConnectionError, RendezvousStateError or RendezvousTimeoutError.
        """

    @abc.abstractmethod
    def is_closed(self) -> bool:
        """Say whether the rendezvous is closed: no further round will form."""

    @abc.abstractmethod
    def set_closed(self) -> None:
        """Close the rendezvous for all nodes."""

    @abc.abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many nodes came too late for the current round, and wait for the next."""

    @abc.abstractmethod
    def get_run_id(self) -> str:
        """Return the id of the run."""

    @abc.abstractmethod
    def shutdown(self) -> bool:
        """Let go of everything that the rendezvous holds open, and say whether that went well."""


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]
"""What makes a handler from parameters."""


class RendezvousHandlerRegistry:
    """Which backend name is whose: makes handlers by name."""

    def __init__(self) -> None:
        self._registry: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Give a name to a kind of rendezvous; a name that is another's raises ValueError."""
        if not backend:
            raise ValueError("the name of the rendezvous backend must not be empty")
        present = self._registry.setdefault(backend, creator)
        if present != creator:
            raise ValueError(
                f"the rendezvous backend {backend!r} cannot be registered with {creator!r}: "
                f"it is already registered with {present!r}"
            )

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Make the handler that the parameters name; a name that is nobody's raises ValueError."""
        try:
            creator = self._registry[params.backend]
        except KeyError as error:
            known = ", ".join(sorted(self._registry)) or "none"
            raise ValueError(
                f"the rendezvous backend {params.backend!r} is not registered; registered are: {known}. "
                f"Was `register` called?"
            ) from error
        handler = creator(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"the rendezvous backend {handler.get_backend()!r} of the handler that {creator!r} made does not match "
                f"the requested {params.backend!r}"
            )
        return handler


rendezvous_handler_registry = RendezvousHandlerRegistry()
"""The registry that launchers of this process use."""
