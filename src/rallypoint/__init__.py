"""rallypoint: where the processes of a distributed job find each other, wait for each other, and start again.

A store is a map from text to bytes that the processes of a job share. Get one with a line of text

    store = rallypoint.connect("tcp://head-node:29400")      # or memory://, or file:///shared/run-7

or by its class: `TCPStore`, `FileStore`, `HashStore`, all with the names and signatures of PyTorch's stores, and
`PrefixStore` to see any of them through a key prefix. `set`, `get` (which waits), `add`, `wait`, `queue_push` and
`queue_pop` are what most programs need; `swap`, `watch`, `lease` and `delete_prefix` go further.

On a store, the processes of a job come together: `Barrier` waits for everybody and names who is missing, `Exchange`
gives every rank what all have given, `Lock` has one holder and dies with it, `Group` knows who is in and tells who
comes and goes. They live on our server, or on any store that there is. `Rendezvous` forms rounds of nodes, with ranks
that they keep, and tells them when to form another.

`rallypoint run script.py` starts the workers of a job, and starts them again: in a script, `rallypoint.worker()` says
who it is.

A server is a process of its own: `rallypoint serve` in a terminal, or `with rallypoint.Server() as server:` in a
program. Unmodified PyTorch programs use it as their TCPStore. `rallypoint relay`, or `rallypoint.Relay`, gives the
processes of a node one connection to it, and lets PyTorch's clients survive its restart.

Every error is a `RallypointError` with its facts as fields. PyTorch's own names for things are in
`rallypoint.compat`; what needs torch is in `rallypoint.torch`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # in the interpreter: `signal` would first have to be found
import sys

if _signal.getsignal(2) is _signal.default_int_handler and (
    ("-m", "rallypoint") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    or "".join(sys.argv[:1]).rpartition("/")[2] == "rallypoint"
):
    _signal.signal(2, _signal.SIG_DFL)  # the command is being imported: see `rallypoint.__main__`

from typing import TYPE_CHECKING, Any

from rallypoint.core.records import Swap
from rallypoint.errors import (
    AddressTaken,
    BadDeviceMap,
    ConnectFailed,
    ConnectionLost,
    CorruptFile,
    Disagreement,
    DiskFull,
    EtcdRefused,
    LimitExceeded,
    MeetingError,
    MembersLost,
    MembersMissing,
    NameTaken,
    NetworkError,
    NoQuorum,
    NotAMember,
    NotAnInteger,
    QueueEmpty,
    RallypointError,
    RankTaken,
    RunClosed,
    RunFull,
    ServerFailed,
    ServerRestarted,
    SessionLost,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreTimeout,
    Unsupported,
    WorkersMissing,
)
from rallypoint.store.base import Change, Lease, Pipeline, Store, Watch
from rallypoint.store.memory import HashStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.tcp import TCPStore
from rallypoint.store.url import connect

if TYPE_CHECKING:
    from rallypoint.elastic.context import NotLaunched, Worker, worker
    from rallypoint.elastic.rendezvous import Rendezvous, Round
    from rallypoint.recipes.barrier import Barrier
    from rallypoint.recipes.exchange import Exchange
    from rallypoint.recipes.group import Group
    from rallypoint.recipes.lock import Lock
    from rallypoint.relay.spawn import Relay
    from rallypoint.spawn import Server
    from rallypoint.store.etcd import EtcdStore
    from rallypoint.store.file import FileStore

__version__ = "0.1.0"

__all__ = [
    # stores
    "connect",
    "Store",
    "HashStore",
    "FileStore",
    "TCPStore",
    "EtcdStore",
    "PrefixStore",
    "Swap",
    "Watch",
    "Change",
    "Lease",
    "Pipeline",
    # coming together
    "Barrier",
    "Exchange",
    "Lock",
    "Group",
    "Rendezvous",
    "Round",
    # inside a launched script
    "worker",
    "Worker",
    "NotLaunched",
    # the server
    "Server",
    "Relay",
    # errors
    "RallypointError",
    "StoreError",
    "StoreTimeout",
    "WorkersMissing",
    "QueueEmpty",
    "NotAnInteger",
    "LimitExceeded",
    "StoreFull",
    "Unsupported",
    "StoreClosed",
    "CorruptFile",
    "DiskFull",
    "MeetingError",
    "MembersMissing",
    "MembersLost",
    "NotAMember",
    "Disagreement",
    "NameTaken",
    "BadDeviceMap",
    "RankTaken",
    "RunClosed",
    "RunFull",
    "NetworkError",
    "ConnectFailed",
    "ConnectionLost",
    "SessionLost",
    "ServerRestarted",
    "AddressTaken",
    "ServerFailed",
    "NoQuorum",
    "EtcdRefused",
]


# What most programs never touch is imported when it is first asked for.
_LAZY = {
    "Server": "rallypoint.spawn",
    "Relay": "rallypoint.relay.spawn",
    "FileStore": "rallypoint.store.file",
    "EtcdStore": "rallypoint.store.etcd",
    "Barrier": "rallypoint.recipes.barrier",
    "Exchange": "rallypoint.recipes.exchange",
    "Lock": "rallypoint.recipes.lock",
    "Group": "rallypoint.recipes.group",
    "Rendezvous": "rallypoint.elastic.rendezvous",
    "Round": "rallypoint.elastic.rendezvous",
    "worker": "rallypoint.elastic.context",
    "Worker": "rallypoint.elastic.context",
    "NotLaunched": "rallypoint.elastic.context",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
