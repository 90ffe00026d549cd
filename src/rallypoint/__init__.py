"""rallypoint: rendezvous, coordination and restart for the processes of a distributed job.

A store is a map from text keys to bytes that the processes of a job share. Open one by URL

    store = rallypoint.connect("tcp://head-node:29400")      # or memory://, or file:///shared/run-7

or by class: `TCPStore`, `FileStore` and `HashStore` have the names and signatures of PyTorch's stores, and
`PrefixStore` shows any store through a key prefix. Most programs need `set`, `get` (which waits), `add`, `wait`,
`queue_push` and `queue_pop`; `swap`, `watch`, `lease` and `delete_prefix` go further.

The recipes coordinate processes through a store: `Barrier` waits for all members and names the missing ones, `Exchange`
gives every rank the values of all ranks, `Lock` has one holder and is released when the holder dies, `Group` lists its
members and reports joins and departures, `WorkQueue` delivers items until they are done. They run on our server, or on
any other store. `Rendezvous` forms rounds of nodes with stable ranks, and tells the nodes when to form the next round.

`rallypoint run script.py` starts and restarts the workers of a job; inside the script, `rallypoint.worker()` returns
the worker's rank and group. `rallypoint.launch(function, nproc=4)` does the same for a function, on this machine.

A server runs in its own process: `rallypoint serve` in a terminal, or `with rallypoint.Server() as server:` in a
program. Unmodified PyTorch programs use it as their TCPStore. `rallypoint relay`, or `rallypoint.Relay`, gives the
processes of a node one connection to the server, and lets PyTorch's clients survive a restart of the server.

Every error is a `RallypointError` with its facts as fields. `rallypoint.compat` has PyTorch's own names;
`rallypoint.torch` has the parts that need torch.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # built into the interpreter: `signal` is a file to search for
import sys

if _signal.getsignal(2) is _signal.default_int_handler and (
    ("-m", "rallypoint") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    or "".join(sys.argv[:1]).rpartition("/")[2] == "rallypoint"
):
    _signal.signal(2, _signal.SIG_DFL)  # the command line is being imported: see `rallypoint.__main__`

from typing import TYPE_CHECKING, Any

from rallypoint.core.records import Swap
from rallypoint.errors import (
    AddressTaken,
    AuthenticationFailed,
    BadDeviceMap,
    ConnectFailed,
    ConnectionLost,
    CorruptFile,
    Disagreement,
    DiskFull,
    EtcdRefused,
    ItemLost,
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
from rallypoint.store.base import Change, Lease, Store, Watch
from rallypoint.store.memory import HashStore
from rallypoint.store.pipeline import Pipeline
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.tcp import TCPStore
from rallypoint.store.url import connect

if TYPE_CHECKING:
    from rallypoint.launch import launch
    from rallypoint.launch.functions.launch_errors import LaunchFailed, LaunchTimeout, WorkerFailed
    from rallypoint.launch.worker_context import NotLaunched, Worker, worker
    from rallypoint.process.spawn import Server
    from rallypoint.recipes.barrier import Barrier
    from rallypoint.recipes.exchange import Exchange
    from rallypoint.recipes.group import Group
    from rallypoint.recipes.lock import Lock
    from rallypoint.recipes.rendezvous import Rendezvous, Round
    from rallypoint.recipes.work_queue import WorkItem, WorkQueue
    from rallypoint.relay.spawn import Relay
    from rallypoint.security.credentials import Credentials
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
    # recipes
    "Barrier",
    "Exchange",
    "Lock",
    "Group",
    "Rendezvous",
    "Round",
    "WorkQueue",
    "WorkItem",
    # the launcher
    "launch",
    "WorkerFailed",
    "LaunchTimeout",
    "LaunchFailed",
    # inside a launched script
    "worker",
    "Worker",
    "NotLaunched",
    # the server
    "Server",
    "Relay",
    "Credentials",
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
    "ItemLost",
    "RunClosed",
    "RunFull",
    "NetworkError",
    "ConnectFailed",
    "ConnectionLost",
    "SessionLost",
    "ServerRestarted",
    "AddressTaken",
    "ServerFailed",
    "AuthenticationFailed",
    "NoQuorum",
    "EtcdRefused",
]


# Imported on first use: most programs never need these.
_LAZY = {
    "Server": "rallypoint.process.spawn",
    "Relay": "rallypoint.relay.spawn",
    "Credentials": "rallypoint.security.credentials",
    "FileStore": "rallypoint.store.file",
    "EtcdStore": "rallypoint.store.etcd",
    "Barrier": "rallypoint.recipes.barrier",
    "Exchange": "rallypoint.recipes.exchange",
    "Lock": "rallypoint.recipes.lock",
    "Group": "rallypoint.recipes.group",
    "Rendezvous": "rallypoint.recipes.rendezvous",
    "Round": "rallypoint.recipes.rendezvous",
    "WorkQueue": "rallypoint.recipes.work_queue",
    "WorkItem": "rallypoint.recipes.work_queue",
    "WorkerFailed": "rallypoint.launch.functions.launch_errors",
    "LaunchTimeout": "rallypoint.launch.functions.launch_errors",
    "LaunchFailed": "rallypoint.launch.functions.launch_errors",
    "worker": "rallypoint.launch.worker_context",
    "Worker": "rallypoint.launch.worker_context",
    "NotLaunched": "rallypoint.launch.worker_context",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "launch"})


def __getattr__(name: str) -> Any:
    import importlib

    if name == "launch":
        return importlib.import_module("rallypoint.launch")  # a package that can be called
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
