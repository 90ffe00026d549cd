"""The rendezvous of PyTorch's elastic runtime, with the names of `torch.distributed.elastic.rendezvous`, without torch.

    here            in torch.distributed.elastic.rendezvous
    api, errors     api
    endpoint, timer utils
    backend         c10d_rendezvous_backend, and RendezvousBackend of dynamic_rendezvous
    handler         dynamic_rendezvous (with agent_rendezvous, backend_host and round_server)
    settings        RendezvousTimeout and RendezvousSettings of dynamic_rendezvous
    static          static_tcp_rendezvous
    registry        registry

This module exports all public names, so that migration is a change of imports. docs/migrate.md lists the differences.
"""

from __future__ import annotations

from rallypoint.compat.rendezvous.api import (
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from rallypoint.compat.rendezvous.backend import (
    DEFAULT_PORT,
    C10dRendezvousBackend,
    RendezvousBackend,
    Token,
    create_backend,
)
from rallypoint.compat.rendezvous.endpoint import (
    _matches_machine_hostname,
    _parse_rendezvous_config,
    _try_parse_port,
    parse_rendezvous_endpoint,
)
from rallypoint.compat.rendezvous.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rallypoint.compat.rendezvous.handler import DynamicRendezvousHandler, create_handler
from rallypoint.compat.rendezvous.registry import get_rendezvous_handler
from rallypoint.compat.rendezvous.settings import RendezvousSettings, RendezvousTimeout
from rallypoint.compat.rendezvous.static import StaticTCPRendezvous, create_rdzv_handler
from rallypoint.compat.rendezvous.timer import _delay, _PeriodicTimer

__all__ = [
    # the launcher's interface
    "RendezvousParameters",
    "RendezvousHandler",
    "RendezvousInfo",
    "RendezvousStoreInfo",
    # handlers by name
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "rendezvous_handler_registry",
    "get_rendezvous_handler",
    # elastic: nodes join and leave
    "DynamicRendezvousHandler",
    "create_handler",
    # static: ranks are known from the start
    "StaticTCPRendezvous",
    "create_rdzv_handler",
    # storage of the state
    "RendezvousBackend",
    "C10dRendezvousBackend",
    "Token",
    "create_backend",
    "DEFAULT_PORT",
    # settings
    "RendezvousSettings",
    "RendezvousTimeout",
    # errors
    "RendezvousError",
    "RendezvousClosedError",
    "RendezvousTimeoutError",
    "RendezvousConnectionError",
    "RendezvousStateError",
    "RendezvousGracefulExitError",
    # parsing, hosts and timers
    "parse_rendezvous_endpoint",
    "_parse_rendezvous_config",
    "_matches_machine_hostname",
    "_try_parse_port",
    "_delay",
    "_PeriodicTimer",
]
